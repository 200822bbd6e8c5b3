"""A saved folder loads where the package is not installed: its code is beside the weights."""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import hf_txl
from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory, TransfoXLModel, TransfoXLTokenizer
from hf_txl.remote_code_transfo_xl import AUTO_MAP, CODE_VERSION, code_files, write_code
from hf_txl.training import TransfoXLTrainer, TransfoXLTrainingArguments
from tests.helpers import assert_close
from tests.packaging.hub_server import HubServer

STRANGER = Path(__file__).with_name("without_package.py")
WORDS = ["<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "and", *(f"word{number}" for number in range(32))]
SIZES: dict[str, Any] = {
    **{"vocab_size": len(WORDS), "cutoffs": [10, 20], "div_val": 2, "d_model": 16, "n_head": 2, "n_layer": 2},
    **{"d_inner": 32, "mem_len": 6, "same_length": True, "eos_token_id": 0, "pad_token_id": 0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    TransfoXLForCausalLM(TransfoXLConfig(**SIZES, init_std=0.3)).save_pretrained(tmp_path / "model")
    TransfoXLTokenizer.from_vocabulary(WORDS, "pretokenized").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def as_stranger(source: str | Path, folder: Path, **environment: str) -> dict[str, Any]:
    """The report of `without_package.py`."""
    run = subprocess.run(
        [sys.executable, str(STRANGER), str(source), str(folder / "again")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **environment},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("report ")).partition(" ")[2])


@torch.no_grad()
def assert_same_numbers(report: dict[str, Any], folder: Path) -> None:
    """What a stranger got is what the package gives."""
    model = TransfoXLForCausalLM.from_pretrained(folder).eval()
    body = TransfoXLModel.from_pretrained(folder).eval()
    ids = torch.tensor(report["ids"])
    assert report["config"] == ["TransfoXLConfig", "transfo-xl", 6]
    assert report["classes"] == ["TransfoXLModel", "TransfoXLForCausalLM", "TransfoXLForSequenceClassification"]
    assert_close("states", torch.tensor(report["states"]), body(ids).last_hidden_state[0, -1], 1e-5)
    assert_close("loss", torch.tensor(report["loss"]), model(ids, labels=ids).loss, 1e-5)
    # `same_length`: segments change nothing
    expected = model(ids, cache=model.init_memory(1)).logits[0, -1]
    assert_close("logits", torch.tensor(report["logits behind memory"]), expected, 1e-5)
    assert report["generated"][0][: ids.shape[1]] == report["ids"][0]
    assert report["generated behind memory"][0] == report["generated"][0][4:]
    assert report["pipeline"].startswith("the cat sat")
    assert report["labels"] == ["LABEL_0", "LABEL_1"]
    assert report["saved again"] == 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_stranger_loads_generates_trains_and_saves(folder: Path) -> None:
    """C100: Auto classes, pipelines and a step of training in a process without the package."""
    report = as_stranger(folder, folder.parent)
    assert_same_numbers(report, folder)
    # what the stranger saved holds the code again, byte for byte, and names no other place
    again = folder.parent / "again"
    assert names(again) == names(folder)
    for name in AUTO_FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    for key in ("auto_map", "hf_txl_version"):
        assert read_config(again)[key] == read_config(folder)[key]


AUTO_FILES = [file.name for file in code_files()]


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def test_a_folder_holds_the_flat_files_and_an_auto_map(folder: Path) -> None:
    config = read_config(folder)
    assert config["auto_map"] == AUTO_MAP
    assert config["hf_txl_version"] == CODE_VERSION == hf_txl.__version__
    package = Path(hf_txl.__file__).parent
    flat = {path.name for path in package.glob("*_transfo_xl.py")} - {"tokenization_transfo_xl.py"}
    assert set(AUTO_FILES) == flat
    for name in flat:
        assert (folder / name).read_bytes() == (package / name).read_bytes()
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("way", ["field", "loading", "attribute"])
def test_the_code_can_be_left_out(folder: Path, way: str) -> None:
    """By the configuration, in whatever way it is set; a folder without code stays one."""
    if way == "field":
        model = TransfoXLForCausalLM(TransfoXLConfig(**SIZES, save_code=False))
    elif way == "loading":
        model = AutoModelForCausalLM.from_pretrained(folder, save_code=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.config.save_code = False
    for place in ("first", "second"):
        model.save_pretrained(folder.parent / place)
        assert not names(folder.parent / place) & set(AUTO_FILES)
        assert not read_config(folder.parent / place).keys() & {"auto_map", "hf_txl_version"}
        model = AutoModelForCausalLM.from_pretrained(folder.parent / place)


def test_a_configuration_alone_saves_its_code(tmp_path: Path) -> None:
    config = TransfoXLConfig(**SIZES)
    before = config.to_dict()
    config.save_pretrained(tmp_path)
    assert names(tmp_path) == {"config.json", *AUTO_FILES}
    assert config.to_dict() == before
    assert AutoConfig.from_pretrained(tmp_path).to_dict().keys() - before.keys() <= {"auto_map"}


def test_classes_of_another_repository_are_not_named_in_what_is_saved(folder: Path, tmp_path: Path) -> None:
    """C100: releases of transformers wrote `REPOSITORY--MODULE.CLASS` into folders that were loaded and saved."""
    file = folder / "config.json"
    elsewhere = {name: f"someone/else--{reference}" for name, reference in AUTO_MAP.items()}
    others = {"AutoModelForTokenClassification": "someone/else--other.Model"}
    file.write_text(json.dumps({**read_config(folder), "auto_map": {**elsewhere, **others}}), encoding="utf-8")
    TransfoXLForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "alone")
    assert [read_config(tmp_path / place)["auto_map"] for place in ("again", "alone")] == [AUTO_MAP] * 2


def test_several_processes_may_save_to_one_folder(tmp_path: Path) -> None:
    """Each finds its files in place, and nothing else is left there."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write_code, [tmp_path] * 64))
    assert names(tmp_path) == set(AUTO_FILES)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("save_code", [True, False])
def test_checkpoints_of_trainers_hold_the_code(ours: bool, save_code: bool, tmp_path: Path) -> None:
    model = TransfoXLForCausalLM(TransfoXLConfig(**SIZES, save_code=save_code))
    settings = {"max_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    if ours:
        args = TransfoXLTrainingArguments(str(tmp_path), segment_length=4, **settings)
        trainer = TransfoXLTrainer(model, args, train_dataset=torch.arange(64) % SIZES["vocab_size"])
    else:
        ids = [2, 3, 4, 5]
        trainer = Trainer(
            model, TrainingArguments(str(tmp_path), **settings), train_dataset=[{"input_ids": ids, "labels": ids}]
        )
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    for place in ("checkpoint-1", "end"):
        assert names(tmp_path / place) >= {"model.safetensors", "config.json"}
        assert names(tmp_path / place) & set(AUTO_FILES) == set(AUTO_FILES if save_code else ())
        assert read_config(tmp_path / place).get("auto_map") == (AUTO_MAP if save_code else None)


PUSH = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
import hf_txl
folder, saved = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
model.push_to_hub("me/pushed")
AutoTokenizer.from_pretrained(folder).push_to_hub("me/pushed")
model.config.push_to_hub("me/configuration")
# a folder that holds the code before, of which the library uploads what has changed
for attempt in range(2):
    model.save_pretrained(saved, push_to_hub=True, repo_id="me/saved")
    model.config.save_pretrained(saved, push_to_hub=True, repo_id="me/saved_configuration")
"""


@pytest.mark.full
def test_what_is_pushed_holds_the_code(folder: Path, tmp_path: Path) -> None:
    """C100: by each way of the library; what a stranger loads from there is saved with the code again."""
    with HubServer(tmp_path / "hub") as hub:
        run = subprocess.run(
            [sys.executable, "-c", PUSH, str(folder), str(tmp_path / "saved")],
            capture_output=True,
            text=True,
            env={**os.environ, **hub.environment(tmp_path)},
            cwd=Path(hf_txl.__file__).parents[1],
        )
        assert run.returncode == 0, run.stderr
        report = as_stranger("me/pushed", tmp_path, **hub.environment(tmp_path / "stranger"))
    assert_same_numbers(report, folder)
    pushed = [tmp_path / "hub" / "me" / name for name in ("pushed", "configuration", "saved", "saved_configuration")]
    for place in (*pushed, tmp_path / "again"):
        assert names(place) >= {"config.json", *AUTO_FILES}
        assert read_config(place)["auto_map"] == AUTO_MAP


def test_the_classes_of_the_package_win(folder: Path) -> None:
    """C100: also where remote code is trusted."""
    for trust in ({}, {"trust_remote_code": True}):
        assert type(AutoConfig.from_pretrained(folder, **trust)) is TransfoXLConfig
        assert type(AutoModelForCausalLM.from_pretrained(folder, **trust)) is TransfoXLForCausalLM


@pytest.mark.parametrize(
    ("version", "warns"), [("99.0", True), ("not a version", True), (CODE_VERSION, False), ("0.0.1", False)]
)
def test_newer_code_in_a_folder_is_told(
    folder: Path, version: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_txl.remote_code_transfo_xl, "logger", Recorder())
    file = folder / "config.json"
    file.write_text(json.dumps({**read_config(folder), "hf_txl_version": version}), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    told = hf_txl.remote_code_transfo_xl.logger.messages
    assert [f"saved by hf_txl {version}" in message for message in told] == [True] * warns
    assert "hf_txl_version" not in config.to_dict()


class Recorder:
    def __init__(self) -> None:
        self.messages: list[str] = []

    def warning_once(self, message: str) -> None:
        self.messages.append(message)


def test_a_subclass_keeps_its_own_entry(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's model in a file of its own, registered as the library's documentation tells."""
    place = folder.parent / "modules"
    place.mkdir()
    (place / "my_model.py").write_text(
        "from hf_txl import TransfoXLForCausalLM\n\n\nclass MyModel(TransfoXLForCausalLM):\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(place)
    import my_model

    my_model.MyModel.register_for_auto_class("AutoModelForCausalLM")
    my_model.MyModel(TransfoXLConfig(**SIZES)).save_pretrained(folder.parent / "mine")
    auto_map = read_config(folder.parent / "mine")["auto_map"]
    assert auto_map == {**AUTO_MAP, "AutoModelForCausalLM": "my_model.MyModel"}
    assert (folder.parent / "mine" / "my_model.py").exists()
    # loaded by the package's class, the user's file is not there any more
    TransfoXLForCausalLM.from_pretrained(folder.parent / "mine").save_pretrained(folder.parent / "plain")
    assert read_config(folder.parent / "plain")["auto_map"] == AUTO_MAP


BOTH = """
import sys
from transformers import AutoModelForCausalLM
stranger = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
import torch, hf_txl
ours = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(stranger).__module__.startswith("transformers_modules.")
assert type(ours) is hf_txl.TransfoXLForCausalLM
ids = torch.tensor([[2, 3, 4]])
for model, other in ((stranger, ours), (ours, stranger)):
    model.eval()
    model(ids, cache=model.init_memory(1))
    try:
        model(ids, cache=other.init_memory(1))
    except TypeError as error:
        assert "`cache` must be a `TransfoXLMemory` of the model's own code" in str(error), error
    else:
        raise AssertionError("a memory of other classes was accepted")
with torch.no_grad():
    assert torch.equal(ours(ids).logits, stranger(ids).logits)
print("both")
"""


def test_both_in_one_process_do_not_mix(folder: Path) -> None:
    """A memory of the package is no cache of the library to a model from a folder's code."""
    run = subprocess.run(
        [sys.executable, "-c", BOTH, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1"},
        cwd=Path(hf_txl.__file__).parents[1],
    )
    assert run.returncode == 0 and "both" in run.stdout, run.stderr


COMPILED = """
import sys
import torch
from transformers import AutoModelForCausalLM
stranger = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
import hf_txl
ours = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
segments = torch.tensor([[[2, 3, 4]], [[5, 6, 7]]])

class Step(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, memory):
        return self.model(ids, cache=memory).logits, memory

with torch.no_grad():
    for model in (stranger, ours):
        step, memory = Step(model), model.init_memory(1)
        expected = [step(ids, memory)[0] for ids in segments]
        filled = Step(model)(segments[0], model.init_memory(1))[1]
        exported = torch.export.export(step, (segments[1], filled)).module()
        logits, memory = exported(segments[1], Step(model)(segments[0], model.init_memory(1))[1])
        assert type(memory) is type(model.init_memory(1))
        torch.testing.assert_close(logits, expected[1], atol=1e-5, rtol=0)
        compiled, memory = torch.compile(step, fullgraph=True, backend="eager"), model.init_memory(1)
        for ids, logits in zip(segments, expected):
            torch.testing.assert_close(compiled(ids, memory)[0], logits, atol=1e-5, rtol=0)
print("compiled")
"""


@pytest.mark.full
def test_code_of_a_folder_is_compiled_and_exported_beside_the_package(folder: Path) -> None:
    """C115: two memory classes of one name are registered for tracing in one process."""
    run = subprocess.run(
        [sys.executable, "-c", COMPILED, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1"},
        cwd=Path(hf_txl.__file__).parents[1],
    )
    assert run.returncode == 0 and "compiled" in run.stdout, run.stderr


def test_what_stands_in_the_way_of_a_memory_of_the_package() -> None:
    """The package's own memory is accepted, of course."""
    model = TransfoXLForCausalLM(TransfoXLConfig(**SIZES)).eval()
    with torch.no_grad():
        model(torch.tensor([[2, 3]]), cache=TransfoXLMemory(model.config))

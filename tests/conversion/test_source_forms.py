"""The same model in every form in which its weights may come: wrapped, in parts of one memory, without a head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_txl import TransfoXLForCausalLM, TransfoXLModel
from hf_txl.cli import app
from hf_txl.conversion import checkpoint as module
from hf_txl.conversion.checkpoint import Checkpoint, open_checkpoint
from hf_txl.conversion.convert import Conversion, convert
from hf_txl.conversion.read_pytorch import StoredObject, read_file
from hf_txl.conversion.settings import Settings
from tests.helpers import FIXTURES
from tests.parity.recorded_cases import pytorch_case

ENWIK8 = FIXTURES / "pytorch_original" / "xl-enwik8"
NVIDIA = FIXTURES / "nvidia" / "nv-same-length" / "checkpoint_best.pt"
LEGACY = FIXTURES / "hf_legacy"
NOT_IN_A_STATE_DICT = ("mem_len", "clamp_len", "same_length", "pre_lnorm")


def asked(case: str = "xl-enwik8") -> dict[str, Any]:
    return {name: pytorch_case(case).fields[name] for name in NOT_IN_A_STATE_DICT}


def quietly(source: Path, output: Path, **options: Any) -> Conversion:
    return convert(source, output, progress=False, **options)


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.format == other.format
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    assert one.stored == other.stored


# ---- wrappers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "module.", "module.module.", "module.module.module."])
@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model"])
def test_a_state_dict_may_be_wrapped_any_number_of_times(key: str | None, prefix: str, tmp_path: Path) -> None:
    """DataParallel around FP16_Module, in a dictionary of a training's state."""
    tensors = torch.load(ENWIK8 / "state_dict.pt")
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    torch.save(wrapped if key is None else {key: wrapped, "epoch": 3}, tmp_path / "model.pt")
    opened = open_checkpoint(tmp_path / "model.pt")
    assert_same(opened, open_checkpoint(ENWIK8 / "state_dict.pt"))
    Settings(opened, asked())


def test_names_that_only_some_tensors_have_are_no_wrapper(tmp_path: Path) -> None:
    """Two tensors must not become one."""
    torch.save({"module.a": torch.zeros(1), "a": torch.ones(1)}, tmp_path / "model.pt")
    assert open_checkpoint(tmp_path / "model.pt").tensors.keys() == {"module.a", "a"}


@pytest.mark.parametrize("prefix", ["module.", "module.module."])
def test_the_state_of_nvidia_may_be_wrapped(prefix: str, tmp_path: Path) -> None:
    content = read_file(NVIDIA)
    state = {prefix + name: tensor for name, tensor in content["model_state"].items()}
    torch.save({"model_state": state, "model_config": content["model_config"]}, tmp_path / "checkpoint_last.pt")
    opened = open_checkpoint(tmp_path / "checkpoint_last.pt")
    assert opened.tensors.keys() == content["model_state"].keys()
    Settings(opened, {})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_pickled_model_may_be_wrapped(depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = open_checkpoint(ENWIK8 / "model.pt")
    wrapped = read_file(ENWIK8 / "model.pt")
    for name in ("fp16_opt.FP16_Module", "data_parallel.BalancedDataParallel", "torch.nn.DataParallel")[:depth]:
        wrapped = StoredObject(name, (), {"_parameters": {}, "_buffers": {}, "_modules": {"module": wrapped}})
    monkeypatch.setattr(module, "read_file", lambda path: wrapped)
    assert_same(open_checkpoint(ENWIK8 / "model.pt"), expected)


def test_a_module_that_holds_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = StoredObject("fp16_opt.FP16_Module", (), {"_parameters": {}, "_buffers": {}, "_modules": {}})
    itself.state["_modules"]["module"] = itself
    monkeypatch.setattr(module, "read_file", lambda path: itself)
    with pytest.raises(ValueError, match="holds itself"):
        open_checkpoint(ENWIK8 / "model.pt")


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["xl-enwik8", "xl-wt103-large"])
def test_tensors_may_be_parts_of_one_memory(case: str, tmp_path: Path) -> None:
    """As an optimizer of flat parameters leaves them; tied ones are the same part."""
    folder = FIXTURES / "pytorch_original" / case
    file = next(folder.glob("state_dict*.pt"))
    tensors = torch.load(file)
    memory = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    views: dict[str, torch.Tensor] = {}
    start = 0
    parts: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part = memory[start : start + tensor.numel()].view(tensor.shape)
        views[name] = parts.setdefault(tensor.data_ptr(), part)
        start += tensor.numel()
    torch.save(views, tmp_path / "flat.pt")
    quietly(tmp_path / "flat.pt", tmp_path / "flat", settings=asked(case), verify=True)
    quietly(file, tmp_path / "apart", settings=asked(case))
    flat, apart = (load_file(tmp_path / name / "model.safetensors") for name in ("flat", "apart"))
    assert flat.keys() == apart.keys()
    for name, weight in apart.items():
        assert torch.equal(flat[name], weight), name


def test_weights_that_share_memory_without_being_tied_are_all_written(tmp_path: Path) -> None:
    """Two layers that are one: a configuration has no word for that."""
    tensors = torch.load(ENWIK8 / "state_dict.pt")
    for name in list(tensors):
        if name.startswith("layers.2."):
            tensors[name] = tensors[name.replace("layers.2.", "layers.1.")]
    torch.save(tensors, tmp_path / "model.pt")
    quietly(tmp_path / "model.pt", tmp_path / "out", settings=asked())
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    for name, weight in model.transformer.layers[2].state_dict().items():
        assert torch.equal(weight, tensors[f"layers.1.{name}"]), name


# ---- transformers ------------------------------------------------------------------------------------------------


def base_model(source: Path, folder: Path, form: str) -> None:
    """What `TransfoXLModel.save_pretrained` of transformers 4 writes: no prefix, no softmax."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["TransfoXLModel"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name.removeprefix("transformer."): tensor.contiguous()
        for name, tensor in read_file(source / "pytorch_model.bin").items()
        if name.startswith("transformer.")
    }
    if form == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "other name":
        torch.save(tensors, folder / "weights.bin")
    elif form == "safetensors":
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    else:
        names = list(tensors)
        halves = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, part in halves.items():
            torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


@pytest.mark.parametrize("form", ["bin", "safetensors", "shards", "other name"])
@pytest.mark.parametrize("case", ["legacy-wt103", "legacy-div1", "legacy-no-cutoff"])
def test_a_base_model_of_transformers_stays_one(case: str, form: str, tmp_path: Path) -> None:
    base_model(LEGACY / case, tmp_path / "base", form)
    source = tmp_path / "base" / "weights.bin" if form == "other name" else tmp_path / "base"
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), "--verify"])
    assert result.exit_code == 0, result.output
    assert "TransfoXLModel, for AutoModel\n" in result.stdout
    model, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(model) is TransfoXLModel
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole = TransfoXLForCausalLM.from_pretrained(LEGACY / case)
    for name, weight in whole.transformer.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert model.config.memory_init == "zeros"
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "AutoModel.from_pretrained" in card
    assert "pipeline_tag: feature-extraction" in card


@pytest.mark.parametrize("found", ["pytorch_model.bin", "model.safetensors"])
def test_a_model_of_transformers_needs_its_configuration(found: str, tmp_path: Path) -> None:
    TransfoXLForCausalLM.from_pretrained(LEGACY / "legacy-div1").save_pretrained(tmp_path)
    if found == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / found)
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must have its config\.json beside it"):
        open_checkpoint(tmp_path / found)


def test_another_configuration_beside_the_weights_makes_no_model_of_transformers(tmp_path: Path) -> None:
    shutil.copy(ENWIK8 / "state_dict.pt", tmp_path / "model.pt")
    (tmp_path / "config.json").write_text('{"model_type": "mine"}', encoding="utf-8")
    assert open_checkpoint(tmp_path / "model.pt").format == "pytorch"
    (tmp_path / "config.json").write_text('{"model_type": "transfo-xl"}', encoding="utf-8")
    assert open_checkpoint(tmp_path / "model.pt").format == "transformers"
    assert open_checkpoint(tmp_path / "model.pt", "pytorch").format == "pytorch"


def test_a_state_dict_of_the_original_may_be_in_safetensors(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in torch.load(ENWIK8 / "state_dict.pt").items()}
    save_file(tensors, tmp_path / "weights.safetensors")
    opened = open_checkpoint(tmp_path / "weights.safetensors")
    assert_same(opened, open_checkpoint(ENWIK8 / "state_dict.pt"))
    assert Settings(opened, asked()).config.tie_word_embeddings


# ---- where it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "is_asked_for"), [("runs/modle.pt", False), ("transfo-xl/wt103", True)])
def test_only_what_can_be_a_name_on_the_hub_is_asked_for(
    source: str, is_asked_for: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt file in a folder that is here is none."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    downloads: list[str] = []

    def download(name: str) -> str:
        downloads.append(name)
        return str(LEGACY / "legacy-div1")

    monkeypatch.setattr(module, "snapshot_download", download)
    if is_asked_for:
        assert open_checkpoint(source).name == source
    else:
        with pytest.raises(FileNotFoundError, match=f"{source} does not exist"):
            open_checkpoint(source)
    assert downloads == [source] * is_asked_for


@pytest.mark.parametrize("written", ["folder", "folder/", "./folder", "."])
def test_a_source_is_called_by_its_own_name(written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(LEGACY / "legacy-div1", tmp_path / "folder")
    monkeypatch.chdir(tmp_path / "folder" if written == "." else tmp_path)
    assert open_checkpoint(written).name == "folder"


# ---- end tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_config", "in_generation", "given", "expected", "origin"),
    [
        (None, 7, None, 7, "generation_config.json"),
        (5, 7, None, 5, "config.json"),
        (5, None, None, 5, "config.json"),
        (None, None, None, None, None),
        (5, 7, 3, 3, "given (config.json: 5)"),
        (None, 7, 3, 3, "given"),
    ],
)
def test_both_configurations_have_one_end_token(
    in_config: int | None,
    in_generation: int | None,
    given: int | None,
    expected: int | None,
    origin: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(LEGACY / "legacy-div1", folder)
    for name, value in (("config.json", in_config), ("generation_config.json", in_generation)):
        stored = json.loads((folder / name).read_text(encoding="utf-8"))
        stored.pop("eos_token_id", None)
        stored |= {} if value is None else {"eos_token_id": value}
        # it does nothing without `do_sample`, but releases before 5 wrote such files
        (folder / name).write_text(json.dumps({**stored, "temperature": 0.7}), encoding="utf-8")
    result = quietly(folder, tmp_path / "out", settings={} if given is None else {"eos_token_id": given})
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == expected
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == expected
    assert model.generation_config.temperature == 0.7
    assert result.origins.get("eos_token_id") == origin


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": "many"}', '{"max_new_tokens": -3}', ""])
def test_an_odd_configuration_of_generation_is_named(content: str, tmp_path: Path) -> None:
    shutil.copytree(LEGACY / "legacy-div1", tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(content, encoding="utf-8")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and "generation_config.json" in result.stderr
    assert not (tmp_path / "out").exists()


# ---- what is stored with the weights -----------------------------------------------------------------------------


def test_of_what_nvidia_stores_the_arguments_of_the_constructor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """`args` are the options of the training script, some of which it changes before it builds the model."""
    content = read_file(NVIDIA)
    arguments = StoredObject("argparse.Namespace", (), {"mem_len": 3, "dropout": 0.3, "init": "uniform"})
    content |= {"args": arguments, "model_config": {**content["model_config"], "mem_len": 7, "dropout": 0.7}}
    monkeypatch.setattr(module, "read_file", lambda path: content)
    config = Settings(open_checkpoint(NVIDIA), {}).config
    assert (config.mem_len, config.dropout, config.init) == (7, 0.7, "uniform")


def test_every_argument_that_a_module_keeps_is_read_where_it_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_file(ENWIK8 / "model.pt")
    attention = model.state["_modules"]["layers"].state["_modules"]["0"].state["_modules"]["dec_attn"]
    model.state.update(mem_len=11, clamp_len=12, ext_len=13, same_length=True)
    model.state["_modules"]["drop"].state["p"] = 0.14
    attention.state["_modules"]["dropatt"].state["p"] = 0.15
    attention.state["_modules"]["layer_norm"].state["eps"] = 0.16
    attention.state["pre_lnorm"] = True
    monkeypatch.setattr(module, "read_file", lambda path: model)
    config = Settings(open_checkpoint(ENWIK8 / "model.pt"), {}).config
    assert (config.mem_len, config.clamp_len, config.ext_len, config.same_length) == (11, 12, 13, True)
    assert (config.dropout, config.dropatt, config.layer_norm_epsilon, config.pre_lnorm) == (0.14, 0.15, 0.16, True)


def test_of_a_log_only_the_arguments_at_its_top_are_read(tmp_path: Path) -> None:
    """`train.py` goes on in the same file when it is started again; what else is there looks alike."""
    shutil.copy(ENWIK8 / "state_dict.pt", tmp_path / "model.pt")
    top = ["=" * 100, "    - mem_len : 9", "    - dataset : enwik8", "    - same_length : False", "=" * 100]
    log = [*top, "#params = 7", "    - mem_len : 3", "| epoch 1"]
    (tmp_path / "log.txt").write_text("\n".join(log), encoding="utf-8")
    opened = open_checkpoint(tmp_path)
    assert opened.stored == {"mem_len": 9, "dataset": "enwik8", "same_length": False}
    assert opened.stored_in == "log.txt"

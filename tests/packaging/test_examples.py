"""The examples run at toy size, as a user starts them."""

import importlib.util
import json
import math
import multiprocessing
import os
import queue
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.demo import demo_text
from hf_txl.scoring import evaluate_stream
from hf_txl.tokenization_transfo_xl import build_vocabulary
from hf_txl.training import TransfoXLTrainingArguments
from tests.helpers import assert_close
from tests.packaging.hub_server import TOKEN, HubServer

ROOT = Path(__file__).resolve().parents[2]
NUM_CELLS = 24

# what one test trains, others look at
pytestmark = pytest.mark.xdist_group("examples")


def run_example(name: str, *arguments: str, **environment: str) -> str:
    """Standard output of an example run with the interpreter and the package of this test."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    completed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment},
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout


# what a new process does; it is forked from a server that has imported the libraries, which take ten seconds
STARTED = """
import os, runpy, sys
os.environ.update(environment)
sys.argv = arguments
sys.stdout = sys.stderr = open(log, "w", buffering=1)
exec(prelude)
runpy.run_path(arguments[0], run_name="__main__")
"""
PRELOADED = ["accelerate", "datasets", "transformers.trainer", "hf_txl.demo", "hf_txl.training"]


def start_example(folder: Path, name: str, *arguments: object, processes: int = 1, prelude: str = "") -> list[int]:
    """Exit codes of an example that is run by some processes; `folder/log-<rank>.txt` holds what they print."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(processes):
        environment = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
        if processes > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        names = {
            "environment": environment,
            "arguments": [str(ROOT / "examples" / name), *map(str, arguments)],
            "log": str(folder / f"log-{rank}.txt"),
            "prelude": prelude + "import torch\ntorch.set_num_threads(1)\n",
        }
        workers.append(context.Process(target=exec, args=(STARTED, names)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        worker.kill()
        worker.join()
    return [worker.exitcode or 0 for worker in workers]


def run_processes(folder: Path, name: str, *arguments: object, processes: int = 1) -> None:
    codes = start_example(folder, name, *arguments, processes=processes)
    assert codes == [0] * processes, (folder / "log-0.txt").read_text(encoding="utf-8")[-4000:]


def load_example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # dataclasses look their module up
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    return load_example("ablation")


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ablation") / "results"
    return folder, run_example("ablation.py", "--quick", "--output", str(folder))


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def cell_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (folder / "cells").iterdir()}


# --- the whole of it


@pytest.mark.full
def test_the_quick_ablation_writes_every_cell_table_and_plot(
    quick_run: tuple[Path, str], ablation: ModuleType
) -> None:
    folder, output = quick_run
    assert f"0 cells kept, {NUM_CELLS} to train" in output
    assert {path.name for path in folder.iterdir()} == {"ablation.md", "ablation.png", "cells", "results.json"}
    # the first eight bytes of every PNG
    assert (folder / "ablation.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    table = (folder / "ablation.md").read_text(encoding="utf-8")
    assert table in output
    assert len(re.findall(r"^\| \w+ \| (?:yes|no) \| (?:full|half) \|", table, re.MULTILINE)) == NUM_CELLS

    results = read(folder)
    assert results["seeds"] == [0]
    assert results["machine"]["cores"] == os.cpu_count() and results["machine"]["threads_per_cell"] == 1
    assert results["versions"]["torch"] == torch.__version__
    assert results["settings"]["steps"] == ablation.QUICK.steps
    combinations = {(cell["kind"], cell["recurrence"], cell["loss"]) for cell in results["cells"]}
    assert combinations == {
        (kind, recurrence, loss)
        for kind in (
            "transformer_xl",
            "learned_relative",
            "shaw",
            "huang",
            "absolute_sinusoid",
            "absolute_learned",
        )
        for recurrence in (True, False)
        for loss in ("full", "half")
    }
    assert len(results["cells"]) == len(cell_files(folder)) == NUM_CELLS
    parameters = [cell["parameters"] for cell in results["cells"]]
    assert max(parameters) <= 1.05 * min(parameters)
    for cell in results["cells"]:
        length = 32 if cell["recurrence"] else 16
        assert [entry["attention_length"] for entry in cell["evaluation"]] == [m * length for m in (1, 2, 4, 8)]
        assert all(
            entry["bits_per_character"] == pytest.approx(entry["loss"] / math.log(2)) for entry in cell["evaluation"]
        )
        # better than a guess among all characters, worse than knowing
        assert all(0 < entry["loss"] < math.log(66) for entry in cell["evaluation"])
        best = min(cell["evaluation"], key=lambda entry: entry["loss"])
        assert cell["best_attention_length"] == best["attention_length"]


@pytest.mark.full
def test_a_finished_ablation_trains_nothing_again(quick_run: tuple[Path, str], ablation: ModuleType) -> None:
    folder, _ = quick_run
    before, results = cell_files(folder), read(folder)
    cells = ablation.run_ablation(folder, ablation.QUICK, processes=2)
    assert cell_files(folder) == before
    shown = [{name: value for name, value in cell.items() if name != "identity"} for cell in cells]
    assert shown == results["cells"]


# --- going on where it stopped


class Inline:
    """An executor that runs everything at once and here."""

    def __init__(self, *arguments: Any) -> None:
        # what would prepare a process is not for this one
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, cancel_futures: bool) -> None:
        pass


@pytest.fixture
def trained(ablation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the cells that are trained, none of which takes any time."""
    names = []

    def run_cell(cell: Any, settings: Any, report: Any) -> dict[str, Any]:
        names.append(cell.name)
        evaluation = [{"loss": 1.0, "bits_per_character": 1.4}]
        return {"identity": ablation.identity(cell, settings), "evaluation": evaluation, "processor_seconds": 0.0}

    monkeypatch.setattr(ablation, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(ablation, "_reports", queue.Queue())
    monkeypatch.setattr(ablation, "run_cell", run_cell)
    return names


def test_an_interrupted_ablation_trains_only_what_is_missing(
    ablation: ModuleType, trained: list[str], tmp_path: Path
) -> None:
    ablation.run_ablation(tmp_path, ablation.QUICK, 2)
    assert trained == [cell.name for cell in ablation.CELLS]
    before = cell_files(tmp_path)
    (tmp_path / "cells" / "shaw-recurrence-half.json").unlink()
    # half a file, as a copy that was cut off
    cut = tmp_path / "cells" / "huang-no_recurrence-full.json"
    cut.write_bytes(cut.read_bytes()[:100])
    trained.clear()
    assert len(ablation.run_ablation(tmp_path, ablation.QUICK, 2)) == NUM_CELLS
    assert sorted(trained) == ["huang-no_recurrence-full", "shaw-recurrence-half"]
    after = cell_files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {f"{name}.json" for name in trained}


def test_cells_that_were_finished_before_a_failure_are_kept(
    ablation: ModuleType, trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_cell = ablation.run_cell

    def fail_at_the_third(cell: Any, settings: Any, report: Any) -> dict[str, Any]:
        if len(trained) == 2:
            raise MemoryError("no more")
        return dict(run_cell(cell, settings, report))

    monkeypatch.setattr(ablation, "run_cell", fail_at_the_third)
    with pytest.raises(MemoryError, match="no more"):
        ablation.run_ablation(tmp_path, ablation.QUICK, 2)
    monkeypatch.setattr(ablation, "run_cell", run_cell)
    ablation.run_ablation(tmp_path, ablation.QUICK, 2)
    assert trained == [cell.name for cell in ablation.CELLS]


def test_a_changed_setting_trains_every_cell_again(ablation: ModuleType, trained: list[str], tmp_path: Path) -> None:
    ablation.run_ablation(tmp_path, ablation.QUICK, 2)
    ablation.run_ablation(tmp_path, replace(ablation.QUICK, learning_rate=1e-3), 2)
    assert trained == 2 * [cell.name for cell in ablation.CELLS]
    # and those are the ones that are kept now
    ablation.run_ablation(tmp_path, replace(ablation.QUICK, learning_rate=1e-3), 2)
    assert len(trained) == 2 * NUM_CELLS


# --- its parts


def test_characters_are_numbered_by_falling_frequency(ablation: ModuleType) -> None:
    train_ids, held_out_ids, vocab_size = ablation.read_text()
    text = demo_text()
    frequencies = Counter(text)
    ordered = sorted(frequencies, key=frequencies.__getitem__, reverse=True)
    ids = {character: index for index, character in enumerate(ordered)}
    split = len(text) * 9 // 10
    assert (len(train_ids), len(held_out_ids), vocab_size) == (split, len(text) - split, len(ids) + 1)
    assert train_ids[:2000].tolist() == [ids[character] for character in text[:2000]]
    assert held_out_ids[:2000].tolist() == [ids[character] for character in text[split : split + 2000]]


def test_every_setting_is_part_of_a_cell_s_identity(ablation: ModuleType, tmp_path: Path) -> None:
    cell, settings = ablation.CELLS[0], ablation.QUICK
    path = tmp_path / "cell.json"
    ablation.write_json(path, {"identity": ablation.identity(cell, settings)})
    assert ablation.read_cell(path, ablation.identity(cell, settings)) is not None
    for name, value in vars(settings).items():
        changed = (*value, 16) if isinstance(value, tuple) else value * 2 + 1
        other = replace(settings, **{name: changed})
        assert ablation.read_cell(path, ablation.identity(cell, other)) is None, name
    for other_cell in ablation.CELLS[1:]:
        assert ablation.read_cell(path, ablation.identity(other_cell, settings)) is None


@pytest.mark.full
def test_full_setting_gives_all_kinds_the_same_parameters_within_five_percent(ablation: ModuleType) -> None:
    counts = [
        sum(parameter.numel() for parameter in ablation.make_matched_model(cell, ablation.Settings(), 66).parameters())
        for cell in ablation.CELLS
        if cell.loss == "full"
    ]
    assert len(counts) == 12 and max(counts) <= 1.05 * min(counts)


@pytest.mark.parametrize("recurrence", [True, False])
@pytest.mark.parametrize("kind", ["transformer_xl", "absolute_learned"])
def test_an_evaluation_sees_the_attention_length_and_scores_the_same_characters(
    ablation: ModuleType, kind: str, recurrence: bool
) -> None:
    """Against the model called on one window of text per call, without a memory or with one that is read in full."""
    settings = replace(
        ablation.QUICK,
        segment_length=4,
        multiples=(1, 3),
        evaluation_rows=2,
        evaluation_length=12,
        d_model=8,
        d_inner=8,
    )
    cell = ablation.Cell(kind, recurrence, "half")
    model = ablation.make_matched_model(cell, settings, 20).eval()
    warm_up = 3 * 2 * 4
    tokens = torch.randint(0, 20, (2 * (warm_up + 12 + 1),))
    for multiple in (1, 3):
        attention_length = multiple * (8 if recurrence else 4)
        found = ablation.evaluate(model, tokens, cell, settings, attention_length)
        step = 2 if recurrence else attention_length // 2
        losses = []
        for row in tokens.view(2, -1):
            memory = model.init_memory(1, mem_len=attention_length - step) if recurrence else None
            for start in range(0, warm_up + 12, step):
                first = start if recurrence else max(0, start - step)
                with torch.no_grad():
                    logits = model(row[None, first : start + step], cache=memory).logits[0].double()
                for t in range(start, start + step):
                    if t >= warm_up:
                        losses.append(-logits.log_softmax(-1)[t - first, row[t + 1]].item())
        assert len(losses) == 2 * 12
        assert found == pytest.approx(sum(losses) / len(losses), abs=1e-6)


def test_agreement_with_the_paper_counts_pairs_in_its_order(ablation: ModuleType) -> None:
    def results(bits_of: Any) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "recurrence": recurrence, "loss": loss, "best_bits_per_character": bits_of(perplexity)}
            for (kind, recurrence, loss), (perplexity, _) in ablation.PAPER.items()
        ]

    # nine cells: 9 * 8 / 2 pairs
    assert ablation.same_order(results(lambda perplexity: perplexity)) == (36, 36)
    assert ablation.same_order(results(lambda perplexity: -perplexity)) == (0, 36)


def test_a_file_is_replaced_whole_or_not_at_all(
    ablation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    ablation.write_json(path, {"number": 1})

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        ablation.write_json(path, {"number": 2})
    assert json.loads(path.read_text(encoding="utf-8")) == {"number": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]


# --- train.py: the recipes


# of `run_*.sh` in the original PyTorch code: layers, width, heads, head size, inner width, dropout, dropatt, div_val,
# segment length and memory, batch size, steps, warm-up; and of the evaluation: segment length, memory, clamp_len
PUBLISHED = {
    "wt103_base": (16, 410, 10, 41, 2100, 0.1, 0.0, 1, 150, 60, 200_000, 0, 64, 640, 400),
    "wt103_large": (18, 1024, 16, 64, 4096, 0.2, 0.2, 4, 384, 128, 4_000_000, 16_000, 128, 1600, 1000),
    "enwik8_base": (12, 512, 8, 64, 2048, 0.1, 0.0, 1, 512, 22, 400_000, 0, 80, 2100, 820),
    "enwik8_large": (24, 1024, 8, 128, 3072, 0.15, 0.15, 1, 768, 64, 400_000, 4000, 128, 3800, 1000),
    "text8_base": (12, 512, 8, 64, 2048, 0.1, 0.0, 1, 512, 22, 400_000, 0, 80, 2100, 820),
    "text8_large": (24, 1024, 8, 128, 3072, 0.15, 0.15, 1, 768, 64, 400_000, 0, 128, 3800, 1000),
}


def test_there_is_a_recipe_for_each_published_model() -> None:
    own = {"example_model"}
    assert {path.stem for path in (ROOT / "examples" / "recipes").iterdir()} == {*PUBLISHED, *own}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_settings(name: str, tmp_path: Path) -> None:
    recipe = json.loads((ROOT / "examples" / "recipes" / f"{name}.json").read_text(encoding="utf-8"))
    assert recipe["source"].endswith(f"run_{name}.sh")
    # words of WikiText-103, bytes of enwik8, letters and space of text8
    vocab_size = {"wt103": 267_735, "enwik8": 204, "text8": 27}[name.split("_")[0]]
    config = TransfoXLConfig(vocab_size=vocab_size, **recipe["model"])
    args = TransfoXLTrainingArguments(output_dir=str(tmp_path), **recipe["training"])
    assert (
        *(config.n_layer, config.d_model, config.n_head, config.d_head, config.d_inner, config.dropout),
        *(config.dropatt, config.div_val, args.segment_length, recipe["batch_size"], args.max_steps),
        *(args.warmup_steps, args.eval_segment_length, args.eval_mem_len, args.eval_clamp_len),
    ) == PUBLISHED[name]
    assert config.mem_len == args.segment_length
    # the same in all of them, most of it a default of the original's `train.py`
    assert (args.learning_rate, args.max_grad_norm, args.weight_decay) == (0.00025, 0.25, 0.0)
    assert args.lr_scheduler_type == "cosine"
    assert (config.clamp_len, config.same_length, args.eval_same_length) == (-1, False, True)
    assert (config.untie_r, config.pre_lnorm, config.d_embed) == (False, False, config.d_model)
    words = name.startswith("wt103")
    assert config.cutoffs == ([20_000, 40_000, 200_000] if words else [])
    assert config.tie_projs == ([False, True, True, True] if words else [False])
    tokens = {"wt103": "pretokenized", "enwik8": "bytes", "text8": "characters"}[name.split("_")[0]]
    assert recipe["tokenizer"] == tokens


# --- train.py: the whole of it


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of words and one of its kind that is held out."""
    folder = tmp_path_factory.mktemp("words")
    lines = demo_text().splitlines(keepends=True)
    (folder / "train.txt").write_text("".join(lines[:120]), encoding="utf-8")
    (folder / "valid.txt").write_text("".join(lines[120:150]), encoding="utf-8")
    return folder


def train_arguments(words: Path, output: Path, steps: int) -> list[object]:
    return [
        *("--train_file", words / "train.txt", "--validation_file", words / "valid.txt", "--output_dir", output),
        *("--recipe", ROOT / "examples" / "recipes" / "wt103_base.json", "--max_steps", steps),
        *("--set", "n_layer=2", "d_model=16", "n_head=2", "d_head=8", "d_inner=16", "mem_len=8", "cutoffs=[20,90]"),
        *("--batch_size", 4, "--segment_length", 8, "--eval_segment_length", 8, "--eval_mem_len", 16),
        *("--save_steps", 2, "--logging_steps", 2, "--mem_lens", 0, 8, "--use_cpu", "--report_to", "none"),
    ]


@pytest.fixture(scope="module")
def trained_twice(words: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 4 steps that is resumed for 8, and the results of the first part."""
    folder = tmp_path_factory.mktemp("train")
    run_processes(folder, "train.py", *train_arguments(words, folder / "out", 4))
    first = read(folder / "out")
    run_processes(folder, "train.py", *train_arguments(words, folder / "out", 8), "--resume")
    return folder / "out", first


@pytest.mark.full
def test_training_by_a_recipe_writes_a_model_its_results_and_a_plot(
    trained_twice: tuple[Path, dict[str, Any]],
) -> None:
    folder, first = trained_twice
    # the recipe's, except for what was set
    assert first["training"]["learning_rate"] == 0.00025 and first["training"]["max_grad_norm"] == 0.25
    assert (first["training"]["segment_length"], first["training"]["max_steps"]) == (8, 4)
    assert first["model"]["n_layer"] == 2 and first["model"]["cutoffs"] == [20, 90]
    losses = {entry["step"]: entry["loss"] for entry in first["history"] if "loss" in entry}
    assert list(losses) == [2, 4] and all(0 < loss < 10 for loss in losses.values())
    assert [row["mem_len"] for row in first["by_memory"]] == [0, 8]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.full
def test_the_results_are_those_of_the_saved_model(words: Path, trained_twice: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = trained_twice
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    results = read(folder)
    assert results["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    # lines with the token that ends each
    lines = (words / "valid.txt").read_text(encoding="utf-8").splitlines()
    ids = [index for line in lines for index in [*tokenizer(line, add_special_tokens=False).input_ids, 0]]
    assert tokenizer.convert_ids_to_tokens(0) == "<eos>"
    for row in results["by_memory"]:
        score = evaluate_stream(model, ids, segment_length=8, batch_size=8, mem_len=row["mem_len"], progress=False)
        assert row["loss"] == pytest.approx(score.loss, abs=1e-6)
        assert row["predictions"] == score.predictions


@pytest.mark.full
def test_a_resumed_training_goes_on_from_the_steps_of_before(trained_twice: tuple[Path, dict[str, Any]]) -> None:
    folder, first = trained_twice
    results = read(folder)
    assert results["training"]["max_steps"] == 8
    history = [(entry["step"], entry["loss"]) for entry in results["history"] if "loss" in entry]
    assert [step for step, _ in history] == [2, 4, 6, 8]
    assert history[:2] == [(entry["step"], entry["loss"]) for entry in first["history"] if "loss" in entry]


@pytest.mark.full
def test_a_streamed_text_is_trained_without_being_written(words: Path, tmp_path: Path) -> None:
    run_processes(tmp_path, "train.py", *train_arguments(words, tmp_path / "out", 3), "--streaming")
    assert any("loss" in entry for entry in read(tmp_path / "out")["history"])


@pytest.mark.full
def test_a_trained_model_is_uploaded(words: Path, tmp_path: Path) -> None:
    """At every checkpoint and at the end: what is on the Hub then is what the run left."""
    arguments = [str(argument) for argument in train_arguments(words, tmp_path / "out", 4)]
    settings = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with HubServer(tmp_path / "hub") as hub:
        run_example(
            "train.py", *arguments, "--push_to_hub", "--hub_model_id", "me/words", HF_ENDPOINT=hub.endpoint, **settings
        )
    assert hub.commits[-1] == "End of training"
    uploaded = tmp_path / "hub" / "me" / "words"
    assert {"README.md", "tokenizer.json", "results.json"} <= {path.name for path in uploaded.iterdir()}
    assert not list(uploaded.glob("checkpoint-*"))
    model, left = (AutoModelForCausalLM.from_pretrained(folder) for folder in (uploaded, tmp_path / "out"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, left.state_dict()[name]), name
    assert (
        AutoTokenizer.from_pretrained(uploaded).get_vocab()
        == AutoTokenizer.from_pretrained(left.name_or_path).get_vocab()
    )


@pytest.mark.full
def test_a_used_output_folder_is_refused_unless_the_run_goes_on(
    words: Path, trained_twice: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained_twice
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, train_arguments(words, folder, 8))])
    with pytest.raises(SystemExit, match=r"--output_dir holds an earlier run \(.*checkpoint-8\); use --resume"):
        load_example("train").main()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--set", "n_layr=3"], r"--set must name settings .* names \['n_layr'\]; near: \['n_layer'\]"),
        (["--set", "n_layer=3", "--set", "d_model=8"], "--set must be given once"),
        (["--set", "same_length=False"], "--set must be settings of a model, values as in JSON .*same_length"),
        (["--set", "n_layer=3", "--model", "folder"], "--set must not be given with --model"),
        (["--recipe", "none.json"], "--recipe must be a JSON file, but 'none.json' is none"),
        (["--train_file", "none.txt"], r"--train_file must name text files, .* \['none.txt'\]"),
        (["--validation_file", "."], r"--validation_file must name text files, .* \['.'\]"),
        (["--mem_lens", "-1"], r"--mem_lens must be lengths of 0 or more, but are \[-1\]"),
        (["--batch_size", "0"], r"--batch_size must be a positive multiple .* is 0"),
        (["--resume"], "--resume needs a checkpoint, but .* holds no complete one"),
        (["--tokenizer", "./words"], "--tokenizer must be a folder .* but './words' could not be loaded"),
    ],
    ids=lambda value: None,
)
def test_options_that_cannot_work_are_refused_before_anything_is_written(
    changes: list[str], message: str, words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--train_file", str(words / "train.txt"), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given, "--tokenizer", "pretokenized", *changes])
    with pytest.raises(SystemExit, match=message):
        load_example("train").main()
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_a_run_that_never_trained_is_made_anew(words: Path, tmp_path: Path) -> None:
    train = load_example("train")
    args = train.TransfoXLTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    for name, mode in (("valid.txt", "characters"), ("train.txt", "pretokenized")):
        data = train.DataArguments(train_file=[str(words / name)], tokenizer=mode)
        assert train.find_tokenizer(data, args).init_kwargs["mode"] == mode


@pytest.mark.full
def test_a_model_that_goes_on_training_keeps_its_tokenizer(
    words: Path, trained_twice: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Whatever kind a recipe makes for a new model."""
    train = load_example("train")
    folder, _ = trained_twice
    data = train.DataArguments(train_file=[str(words / "valid.txt")], model=str(folder), tokenizer="characters")
    args = train.TransfoXLTrainingArguments(str(tmp_path / "out"), use_cpu=True)
    assert train.find_tokenizer(data, args).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    assert not (tmp_path / "out" / "tokenizer").exists()


# --- train_accelerate.py


PLAIN = {
    **{"steps": 12, "save_every": 4, "batch_size": 4, "segment_length": 17, "accumulation": 3},
    **{"n_layer": 2, "d_model": 16, "learning_rate": 1e-3, "warmup_steps": 2},
}


def options(**changes: object) -> list[object]:
    settings = {**PLAIN, **changes}
    return [item for name, value in settings.items() for item in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 1,125 characters to train on: rows of 281, so 280 targets, in 16 segments of 17 and one of 8; 36 are read
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(demo_text()[:1250], encoding="utf-8")
    return path


def weights(folder: Path, step: int = 12) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoint-{step}" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def one_process(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_processes(folder, "train_accelerate.py", text_file, "--output", folder / "out", *options(dropout=0.0))
    return folder / "out"


def test_the_plain_loop_computes_what_is_written_out_here(text_file: Path, one_process: Path) -> None:
    text = text_file.read_text(encoding="utf-8")
    symbols = build_vocabulary([text], "characters", special=("<unk>",))
    tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "characters")
    # (1125,) -> (4 rows, 281)
    rows = torch.tensor(tokenizer(text[:1125]).input_ids)[: 4 * 281].view(4, 281)
    set_seed(0)
    lengths: dict[str, Any] = {"mem_len": 17, "clamp_len": -1, "same_length": False}
    size = {"n_layer": 2, "d_model": 16, "n_head": 4, "d_inner": 64, "dropout": 0.0}
    model = TransfoXLForCausalLM(TransfoXLConfig(vocab_size=len(tokenizer), **size, **lengths)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = model.init_memory(4)
    starts = [*range(0, 280, 17)] * 3
    for step in range(12):
        rate = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 10))
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        total, count = torch.zeros(()), 0
        for start in starts[3 * step : 3 * step + 3]:
            if start == 0:
                memory = model.init_memory(4)
            stop = min(start + 17, 280)
            losses = model(rows[:, start:stop], shift_labels=rows[:, start + 1 : stop + 1], cache=memory).losses
            total, count = total + losses.sum(), count + losses.numel()
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    found = weights(one_process)
    for name, parameter in model.named_parameters():
        if name in found:
            assert_close(name, found[name], parameter.detach(), atol=1e-6)
    assert len(found) >= len(list(model.parameters()))


@pytest.mark.full
def test_the_plain_loop_trains_the_same_on_two_processes(text_file: Path, one_process: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run_processes(tmp_path, "train_accelerate.py", text_file, "--output", output, *options(dropout=0.0), processes=2)
    assert {path.name for path in (output / "checkpoint-12").glob("memory*")} == {
        f"memory-{rank}.safetensors" for rank in (0, 1)
    }
    expected = weights(one_process)
    for name, weight in weights(output).items():
        assert_close(name, weight, expected[name], atol=1e-6)


# kills its process when it has written its memory for the third time, so that the third checkpoint is half there
KILLED = """
import signal
written = 0
def hook(event, values):
    global written
    if event == "os.rename" and str(values[1]).endswith("memory-0.safetensors"):
        written += 1
        if written == 3:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
"""


@pytest.mark.full
def test_a_plain_loop_that_is_killed_goes_on_to_the_same_bits(text_file: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[object]:
        return [text_file, "--output", tmp_path / name, *options(dropout=0.2, save_every=3)]

    run_processes(tmp_path, "train_accelerate.py", *arguments("whole"))
    codes = start_example(tmp_path, "train_accelerate.py", *arguments("killed"), prelude=KILLED)
    assert codes == [-signal.SIGKILL]
    assert {path.name for path in (tmp_path / "killed").iterdir()} == {"checkpoint-6", "unfinished"}
    run_processes(tmp_path, "train_accelerate.py", *arguments("killed"))
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["checkpoint-12"]
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(tmp_path / "killed").items())


def test_a_text_that_is_no_utf8_is_refused_by_the_plain_loop(tmp_path: Path) -> None:
    typer = pytest.importorskip("typer")
    path = tmp_path / "text.txt"
    path.write_bytes(b"no text \xff\xfe" * 100)
    with pytest.raises(typer.BadParameter, match="TEXT_FILE must be UTF-8, but .*invalid start byte"):
        load_example("train_accelerate").main(path, tmp_path / "out", batch_size=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_plain_loop_does_not_go_on_with_other_settings(text_file: Path, one_process: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in one_process.rglob("*")}
    changed = options(dropout=0.0, segment_length=16)
    assert start_example(tmp_path, "train_accelerate.py", text_file, "--output", one_process, *changed) == [2]
    log = (tmp_path / "log-0.txt").read_text(encoding="utf-8")
    assert "'segment_length': (17, 16)" in " ".join(log.replace("│", " ").split())
    assert {path: path.stat().st_mtime_ns for path in one_process.rglob("*")} == before


# --- finetune_lora.py


@pytest.mark.full
def test_an_adapter_is_trained_saved_loaded_and_merged(one_process: Path, text_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model_folder = one_process / "checkpoint-12" / "model"
    output = tmp_path / "adapter"
    run_processes(
        tmp_path,
        "finetune_lora.py",
        *(model_folder, text_file, "--output", output, "--steps", 30, "--segment-length", 16),
        *("--batch-size", 4, "--learning-rate", 0.02),
    )
    losses = json.loads((output / "losses.json").read_text(encoding="utf-8"))
    assert losses["after"] < losses["before"]
    assert losses["loaded"] == pytest.approx(losses["after"], abs=1e-6)
    assert losses["merged"] == pytest.approx(losses["after"], abs=1e-5)
    # the low-rank matrices alone: two for each of three matrices in each of two layers
    adapter = load_file(output / "adapter_model.safetensors")
    assert len(adapter) == 12 and all(".lora_" in name for name in adapter)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapter} == {"qkv_net", "o_net", "r_net"}
    # what they add by hand: W + alpha / rank * B A
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = AutoTokenizer.from_pretrained(model_folder)(text_file.read_text(encoding="utf-8")[1125:]).input_ids
    score = {"segment_length": 16, "batch_size": 4, "progress": False}
    assert losses["before"] == pytest.approx(evaluate_stream(model, ids, **score).loss, abs=1e-6)
    with torch.no_grad():
        for name, module in model.named_modules():
            matrices = [adapter.get(f"base_model.model.{name}.lora_{letter}.weight") for letter in "BA"]
            if matrices[0] is not None:
                module.weight += 16 / 8 * matrices[0] @ matrices[1]
    assert losses["after"] == pytest.approx(evaluate_stream(model, ids, **score).loss, abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("length", "occupied", "model_type", "message"),
    [
        (70, False, "transfo-xl", r"held-out text must have at least 2 tokens for each of 8 streams, but has 7"),
        (1250, True, "transfo-xl", "must be new or empty"),
        (1250, False, "gpt2", "must be a transfo-xl, but .* is a gpt2"),
        (1250, False, "", "MODEL must be a model's folder or Hub name"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused_before_the_training(
    one_process: Path, tmp_path: Path, length: int, occupied: bool, model_type: str, message: str
) -> None:
    pytest.importorskip("peft")
    typer = pytest.importorskip("typer")
    folder = one_process / "checkpoint-12" / "model"
    if model_type != "transfo-xl":
        folder = tmp_path / "other"
        folder.mkdir()
        if model_type:
            (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    (tmp_path / "text.txt").write_text(demo_text()[:length], encoding="utf-8")
    output = tmp_path / "adapter"
    if occupied:
        output.mkdir()
        (output / "mine.txt").write_text("kept", encoding="utf-8")
    with pytest.raises(typer.BadParameter, match=message):
        load_example("finetune_lora").main(str(folder), tmp_path / "text.txt", output)
    assert [path.name for path in output.glob("*")] == (["mine.txt"] if occupied else [])


@pytest.mark.full
def test_long_documents_are_classified_at_toy_size(tmp_path: Path) -> None:
    sizes = ["--steps", "2", "--document_length", "60", "--segment_length", "20", "--test_documents", "8"]
    output = run_example("classify_long_documents.py", "--output_dir", str(tmp_path / "out"), *sizes)
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    for name in ("memory", "last_segment"):
        assert f"{name}: accuracy {results[name]['accuracy']:.3f}" in output
        assert results[name]["evaluations"][-1]["step"] == 2
    assert (tmp_path / "out" / "accuracy.png").is_file()

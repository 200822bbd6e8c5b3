"""The examples run at toy size, as a user starts them."""

import importlib.util
import json
import math
import os
import queue
import re
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_txl.demo import character_tokenizer, demo_text

ROOT = Path(__file__).resolve().parents[2]
NUM_CELLS = 24


def run_example(name: str, *arguments: str) -> str:
    """Standard output of an example run with the interpreter and the package of this test."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    completed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return completed.stdout


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    specification = importlib.util.spec_from_file_location("ablation", ROOT / "examples" / "ablation.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # dataclasses look their module up
    sys.modules["ablation"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("ablation") / "results"
    return folder, run_example("ablation.py", "--quick", "--output", str(folder))


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


def cell_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in (folder / "cells").iterdir()}


# --- the whole of it


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


def test_the_text_is_read_as_the_demo_reads_it(ablation: ModuleType) -> None:
    train_ids, held_out_ids, vocab_size = ablation.read_text()
    text = demo_text()
    tokenizer = character_tokenizer(text)
    split = len(text) * 9 // 10
    assert (len(train_ids), len(held_out_ids), vocab_size) == (split, len(text) - split, len(tokenizer))
    assert train_ids[:2000].tolist() == tokenizer(text[:2000]).input_ids
    assert held_out_ids[:2000].tolist() == tokenizer(text[split : split + 2000]).input_ids


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

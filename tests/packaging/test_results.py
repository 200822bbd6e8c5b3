"""Numbers in the documentation are those of the committed measurements. Report ids are those of public issues."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks/run.py` as a module."""
    pytest.importorskip("tqdm")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("run")


def test_speed_tables_are_those_of_the_committed_measurement(benchmark: Any) -> None:
    """C118"""
    report = read("docs/results/speed.json")
    expected = benchmark.table(report)
    assert len(benchmark.PAGES) == 2
    for page in benchmark.PAGES:
        text = page.read_text(encoding="utf-8")
        assert benchmark.with_table(text, expected) == text, f"python benchmarks/run.py --from-json writes {page.name}"
    assert (ROOT / "docs/results/speed.md").read_text(encoding="utf-8") == expected


def test_speed_tables_name_hardware_versions_and_peers(benchmark: Any) -> None:
    """C118: beside a repaired 4.57.6 and GPT-2 of equal size, in decoding and evaluation with memory."""
    report = read("docs/results/speed.json")
    text = benchmark.table(report)
    for fact in (
        report["machine"]["processor"],
        f"{report['machine']['cores']} cores",
        f"torch {report['versions']['torch']}",
        f"transformers {report['versions']['transformers']}",
        "transformers 4.57.6",
        report["date"],
    ):
        assert fact in text
    for model in report["models"].values():
        for case in ("decoding, batch 1", "decoding, batch 8", "evaluation"):
            assert set(model[case]["tokens_per_second"]) == {"ours", "gpt2", "legacy"}
        sizes = model["parameters"]
        assert sizes["ours"] == sizes["legacy"] and 0.95 < sizes["gpt2"] / sizes["ours"] < 1.35


def test_another_table_replaces_the_one_between_the_marks(benchmark: Any) -> None:
    page = f"before\n{benchmark.BEGIN}old\n{benchmark.END}after\n"
    assert benchmark.with_table(page, "new\n") == page.replace("old", "new")
    with pytest.raises(ValueError):
        benchmark.with_table("a page without marks", "new\n")


def test_eight_rows_at_once_were_more_than_twice_as_fast_as_one() -> None:
    """C63, and the sharing of a context of C128, as measured and committed."""
    report = read("benchmarks/batching.json")
    assert report["generation"]["ratio"] >= 2
    assert report["rescoring"]["ratio"] >= 5


def test_the_table_by_memory_length_is_that_of_the_committed_trainings() -> None:
    page = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    for name, row, key, digits in (
        ("training-char", "characters: bits per character", "bits_per_token", 4),
        ("training-word", "words: perplexity", "perplexity", 2),
    ):
        results = read(f"docs/results/{name}.json")
        lengths = [cell.strip() for cell in rows["memory in evaluation"].split("|")[2:-1]]
        cells = [cell.strip(" *") for cell in rows[row].split("|")[2:-1]]
        shown = {int(length): cell for length, cell in zip(lengths, cells, strict=True) if cell}
        assert shown == {entry["mem_len"]: f"{entry[key]:.{digits}f}" for entry in results["by_memory"]}
        # the page's claim: up to the length of the training, every longer memory is better
        losses = [entry["loss"] for entry in results["by_memory"] if entry["mem_len"] <= results["model"]["mem_len"]]
        assert len(losses) > 3 and losses == sorted(losses, reverse=True)


def test_the_same_training_in_transformers_4_35_reaches_the_same_loss() -> None:
    """C104"""
    results = read("docs/results/training-parity.json")
    page = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    ours, legacy = (results["losses"][name] for name in ("ours", "legacy"))
    assert len(ours) == len(legacy) == results["steps"] == results["training"]["max_steps"]
    means = [sum(losses[-100:]) / 100 for losses in (ours, legacy)]
    assert abs(means[0] - means[1]) / means[1] < 0.01
    assert all(f"{mean:.4f}" in page for mean in means)
    assert all(f"{value:.2f}" in page for value in results["validation_perplexity"].values())


def test_the_figures_of_a_training_step_are_those_of_the_committed_measurement() -> None:
    results = read("docs/results/training.json")
    faster = f"{results['speed']['ours, float32']['step, times legacy, float32']:.2f} times as fast"
    smaller = f"{results['memory']['ours']['step, times legacy']:.2f} of the"
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert faster in page and smaller in page


def test_a_memory_beats_a_sliding_window() -> None:
    """C118: by ten times or more at a window of 512; rescoring is measured beside both peers."""
    for model in read("docs/results/speed.json")["models"].values():
        assert model["sliding_window"]["window"] == 512
        assert model["sliding_window"]["evaluation_over_sliding_window"] >= 10
        assert set(model["rescoring 8 x 16"]["tokens_per_second"]) == {"ours", "gpt2", "legacy"}


def test_a_label_at_the_start_of_a_long_document_reaches_the_end() -> None:
    """C62: trained through memory; the last segment alone is at chance."""
    report = read("docs/results/documents.json")
    memory, alone = report["memory"]["accuracy"], report["last_segment"]["accuracy"]
    chance, deviation = 0.25, (0.25 * 0.75 / report["settings"]["test_documents"]) ** 0.5
    assert memory >= 0.95 and abs(alone - chance) < 3 * deviation
    assert report["settings"]["document_length"] == 2000 and report["settings"]["label_words"] == 50
    text = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    assert f"{memory:.1%}".replace("%", " %") in text and f"{alone:.1%}".replace("%", " %") in text


def test_what_a_memory_is_worth_is_told_as_measured() -> None:
    report = read("docs/results/context.json")
    text = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    ratios = {row["length"]: row["ratio"] for row in report["speed"]}
    assert f"1/{ratios[800]:.0f} of the time" in text and f"1/{ratios[3200]:.0f} at 3,200" in text
    assert sorted(ratios.values()) == list(ratios.values())
    assert set(report["effective"]["lengths"]["1.0"].values()) == {24, 16}
    assert report["effective"]["lengths"]["0.1"] == {"transformer_xl": 16, "shaw": 8, "absolute_sinusoid": 8}
    novel = report["by_memory"]["novel"]["transformer_xl"]
    assert report["mem_lens"][novel.index(min(novel))] == 64

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

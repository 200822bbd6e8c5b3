"""Options that travel as a dataclass: what is not one of them is refused by its name, before any work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl.conversion.convert import convert
from hf_txl.options import read_options
from hf_txl.scoring import evaluate_stream
from hf_txl.text_generation import generate_text
from tests.model.tiny_models import tiny_model


@dataclass
class Options:
    width: int = 3
    name: str = "x"


def test_options_keep_their_defaults() -> None:
    assert read_options(Options, {"width": 5}, "f") == Options(5, "x")


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (lambda **options: read_options(Options, options, "f"), {"heigth": 3}),
        (lambda **options: generate_text(tiny_model(), None, "text", **options), {"temprature": 0.5}),
        (lambda **options: convert("absent", "output", **options), {"verfy": True}),
        (lambda **options: evaluate_stream(tiny_model(), torch.arange(9), segment_length=4, **options), {"memlen": 3}),
    ],
    ids=["read_options", "generate_text", "convert", "evaluate_stream"],
)
def test_an_unknown_option_is_refused_by_its_name(
    function: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=next(iter(options))):
        function(**options)
    assert list(tmp_path.iterdir()) == []

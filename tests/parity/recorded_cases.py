"""The recorded outputs in `tests/fixtures`, and how closely they must be met.

`tests/fixtures/README.md` says what the folders hold and where they come from.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers import FIXTURES
from tests.parity import original_keys
from tests.parity.original_keys import Fields, State

# All recordings are float32. Repeating one in float64 moves losses by up to 4e-6 (`float64_max_abs_diff_nll` in
# case.json), and moving every weight by one unit in its last place moves log-probabilities by up to 4e-6
# (`max_abs_diff_when_weights_move_by_one_ulp`), so two correct float32 programs may be this far apart. Mistakes show:
# a window that is one key too narrow costs 0.1 or more, a wrong start or cluster order more than 0.5, and the nearest
# one, a layer-norm epsilon of 1e-5 for 1e-12, still 4e-3 in the cases with `div_val` 4.
LOSSES = 1e-5
LOG_PROBABILITIES = 1e-5
# Hidden states are of order 1 to 10 (without a final layer norm, with pre_lnorm, up to some 10), so relative too.
HIDDEN_STATES = {"atol": 1e-5, "rtol": 1e-5}
# Attention weights lie in [0, 1].
ATTENTIONS = 1e-5
# The original's own rounding noise in gradients is below 4e-6; large entries carry a relative error.
GRADIENTS = {"atol": 1e-5, "rtol": 1e-4}


@dataclass
class Recorded:
    """One recorded case: settings and weights in our terms, and what came out."""

    name: str
    folder: Path
    case: dict[str, Any]
    expected: dict[str, torch.Tensor]
    fields: Fields
    state: State
    """Weights under published names, tied ones under both."""

    @property
    def namespace(self) -> SimpleNamespace:
        """The settings as an object, for code that only reads attributes."""
        return SimpleNamespace(**self.fields)

    def segment(self, index: int, run: str = "") -> dict[str, torch.Tensor]:
        """What is recorded for one segment: `input_ids`, `target`, `nll`, `hidden`, `mems.0`, …"""
        prefix = f"{run}.seg{index}." if run else f"seg{index}."
        return {name.removeprefix(prefix): tensor for name, tensor in self.expected.items() if name.startswith(prefix)}

    def num_segments(self, run: str = "") -> int:
        index = 0
        while self.segment(index, run):
            index += 1
        return index


def case_names(family: str, pattern: str = "*") -> list[str]:
    """The case folders of a family, as they lie on disk."""
    return sorted(path.name for path in (FIXTURES / family).glob(pattern) if path.is_dir())


def _read(family: str, name: str) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    folder = FIXTURES / family / name
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    return folder, case, load_file(folder / "expected.safetensors")


@functools.cache
def pytorch_case(name: str) -> Recorded:
    folder, case, expected = _read("pytorch_original", name)
    fields = original_keys.pytorch_fields(case["constructor"])
    tensors = original_keys.read_tensors(folder / "weights.safetensors")
    state = original_keys.add_tied_names(original_keys.pytorch_state(tensors), fields)
    return Recorded(name, folder, case, expected, fields, state)


@functools.cache
def nvidia_case(name: str) -> Recorded:
    folder, case, expected = _read("nvidia", name)
    fields = original_keys.nvidia_fields(case["constructor"])
    tensors = original_keys.read_tensors(folder / "weights.safetensors")
    state = original_keys.add_tied_names(original_keys.nvidia_state(tensors), fields)
    return Recorded(name, folder, case, expected, fields, state)


@functools.cache
def tensorflow_case(name: str) -> Recorded:
    """The lengths in `fields` are those of the run `train_like`; `lengths_of_run` gives the others'."""
    folder, case, expected = _read("tf_original", name)
    fields = original_keys.tensorflow_fields(case["constructor"], case["runs"]["train_like"])
    tensors = original_keys.read_tensors(folder / "variables.safetensors")
    return Recorded(name, folder, case, expected, fields, original_keys.tensorflow_state(tensors, fields))


@functools.cache
def legacy_case(name: str) -> Recorded:
    folder, case, expected = _read("hf_legacy", name)
    fields = original_keys.legacy_fields(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return Recorded(name, folder, case, expected, fields, original_keys.legacy_state(tensors))


def lengths(settings: dict[str, Any]) -> dict[str, Any]:
    """The part of a run's settings that belongs to a memory."""
    return {name: settings[name] for name in ("mem_len", "clamp_len", "same_length")}


def evaluation_lengths(recorded: Recorded) -> dict[str, Any]:
    """The lengths with which an original PyTorch case was recorded: those of training, unless it overrode them."""
    return lengths(recorded.case["eval_override"] or recorded.case["constructor"])

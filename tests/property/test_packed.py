"""R02: texts packed into rows get what each text gets alone: hidden states, gradients, memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLMemory, TransfoXLModel
from tests.helpers import assert_close
from tests.model.tiny_models import STARTS, STORAGES, WINDOWS, random_ids, tiny_model
from tests.sizes import first

KINDS = ["transformer_xl", "learned_relative", "shaw", "huang", "absolute_sinusoid", "absolute_learned"]
CLOSE = 1e-9
SETTINGS = [
    pytest.param({"attention_kind": kind, "memory_init": start, **WINDOWS[window]}, id=f"{kind}-{start}-{window}")
    for kind in KINDS
    for start in STARTS
    for window in WINDOWS
    if start == "empty" or not kind.startswith("absolute")
]


def read_alone(
    model: Any, segments: list[torch.Tensor], resets: list[torch.Tensor], reals: list[torch.Tensor], storage: str
) -> tuple[list[list[torch.Tensor]], TransfoXLMemory]:
    """Hidden states of the real tokens of one row, per segment, each piece of a text in a call of its own."""
    memory = TransfoXLMemory(model.config, stores=storage, batch_size=1)
    outputs = []
    for ids, starts, real in zip(segments, resets, reals, strict=True):
        bounds = [0, *[i for i in range(1, len(ids)) if starts[i]], len(ids)]
        pieces = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            if starts[begin]:
                memory = TransfoXLMemory(model.config, stores=storage, batch_size=1)
            piece = ids[begin:end][real[begin:end]]
            if len(piece):
                pieces.append(model(piece[None], cache=memory).last_hidden_state[0])
        outputs.append(pieces)
    return outputs, memory


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("seed", first(range(2)))
def test_packed_rows_equal_their_texts_alone(settings: dict[str, Any], storage: str, seed: int) -> None:
    """Three segments of three rows with random beginnings and pads, and a fourth without; gradients too."""
    if storage == "keys_values" and settings["attention_kind"].startswith("absolute"):
        pytest.skip("absolute kinds store hidden states")
    rng, lengths = random.Random(seed), [9, 4, 7, 3]
    model = tiny_model(TransfoXLModel, seed=seed, **settings).double()
    segments = [random_ids(3, length, seed=seed + length) for length in lengths]
    resets = [torch.tensor([[rng.random() < 0.3 for _ in range(n)] for _ in range(3)]) for n in lengths]
    reals = [torch.tensor([[rng.random() < 0.8 for _ in range(n)] for _ in range(3)]) for n in lengths]
    resets[-1] = torch.zeros_like(resets[-1])
    if seed == 0:
        reals = [torch.ones_like(real) for real in reals]

    def packed() -> tuple[list[torch.Tensor], TransfoXLMemory]:
        memory = TransfoXLMemory(model.config, stores=storage)
        return [
            model(ids, attention_mask=real.long(), reset_before=starts, cache=memory).last_hidden_state
            for ids, starts, real in zip(segments, resets, reals, strict=True)
        ], memory

    with torch.set_grad_enabled(storage == "hidden_states"):
        outputs, memory = packed()
        alone = []
        for row in range(3):
            columns = [[part[row] for part in parts] for parts in (segments, resets, reals)]
            expected, own = read_alone(model, *columns, storage=storage)
            for output, real, pieces in zip(outputs, reals, expected, strict=True):
                if pieces:
                    assert_close(f"row {row}", output[row, real[row]], torch.cat(pieces), CLOSE)
            alone += [piece for pieces in expected for piece in pieces]
            kept = memory.rows.lengths_of(3)[row]
            assert kept == own.stored_length
        if storage == "hidden_states":
            weights = list(model.layers.parameters())
            total = sum(output[real].pow(2).sum() for output, real in zip(outputs, reals, strict=True))
            gradients = torch.autograd.grad(total, weights, allow_unused=True)
            wanted = torch.autograd.grad(sum(piece.pow(2).sum() for piece in alone), weights, allow_unused=True)
            for gradient, want in zip(gradients, wanted, strict=True):
                if want is not None:
                    assert_close("gradient", gradient, want, 1e-7)

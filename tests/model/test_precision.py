"""Half precision, masked rows, and backends: everything stays finite and close."""

import pytest
import torch

from hf_txl import TransfoXLMemory
from tests.helpers import assert_close
from tests.t0 import LARGE_WEIGHTS, make_model, random_ids

HALVES = [torch.bfloat16, torch.float16]
BACKENDS = ["eager", "sdpa"]
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_models_stay_finite_and_close(dtype: torch.dtype, backend: str, memory_init: str) -> None:
    """C31, C48: causal, window and padding masks have no constant that a type cannot hold; losses are float32."""
    fields = {"same_length": True, "memory_init": memory_init, **LARGE_WEIGHTS}
    model, half = make_model(**fields), make_model(**fields).to(dtype)
    half.set_attn_implementation(backend)
    ids = random_ids(2, 16)
    memory, half_memory = TransfoXLMemory(model.config), TransfoXLMemory(model.config)
    for segment in (slice(0, 8), slice(8, 16)):
        given = {"attention_mask": MASK, "labels": ids[:, segment].masked_fill(MASK == 0, -100)}
        expected = model(ids[:, segment], cache=memory, **given)
        output = half(ids[:, segment], cache=half_memory, **given)
        assert output.losses.dtype == torch.float32 and output.logits.isfinite().all()
        assert_close("loss", output.loss.detach(), expected.loss.detach(), 0.0, 2e-2)
        output.loss.backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in half.parameters())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_autocast_trains_close_to_float32(dtype: torch.dtype) -> None:
    """C38: clusters of different width, whose embeddings are projected in half precision."""
    losses = []
    for enabled in (False, True):
        model = make_model(**LARGE_WEIGHTS).train()
        memory = model.init_memory(2)
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            for seed in (1, 2):
                loss = model(random_ids(2, 9, seed=seed), labels=random_ids(2, 9, seed=seed), cache=memory).loss
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        losses.append(loss.detach())
    assert_close("loss", losses[1], losses[0], 0.0, 2e-2)


@pytest.mark.parametrize("cached", [False, True], ids=["segment", "memory"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_nothing_stay_finite_backwards_too(backend: str, cached: bool) -> None:
    """C49: pads on the left of an empty start, one row all pads."""
    model = make_model(**LARGE_WEIGHTS)
    model.set_attn_implementation(backend)
    ids, mask = random_ids(3, 8), torch.cat([MASK, torch.zeros(1, 8, dtype=torch.long)])
    output = model(ids, attention_mask=mask, cache=model.init_memory(3) if cached else None, output_hidden_states=True)
    assert all(states.isfinite().all() for states in output.hidden_states)
    output.logits[mask == 1].square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_memory_of_a_half_precision_model_is_of_its_type() -> None:
    model = make_model().to(torch.bfloat16)
    memory = TransfoXLMemory(model.config)
    model(random_ids(2, 5), cache=memory)
    assert all(tensor.dtype == torch.bfloat16 for layer in memory.layers for tensor in layer.tensors.values())

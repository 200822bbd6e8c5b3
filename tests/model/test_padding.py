"""Padding masks: a pad takes no distance, is seen by nothing and is not remembered (C56).

The slow reference leaves pads out, so what it gives is what each row gives alone and unpadded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_txl import TransfoXLMemory, TransfoXLModel
from hf_txl.reference.transformer_xl import SlowTransfoXL, leaves_of, stacked_memory
from tests.helpers import assert_close
from tests.model.tiny_models import (
    STARTS,
    STORAGES,
    WINDOWS,
    random_ids,
    slow_log_probabilities,
    slow_twin,
    tiny_model,
)

# float32 against float64; log-probabilities of these weights are of order 10
LOG_PROBABILITIES = 2e-5
LOSSES = 2e-5
GRADIENTS = {"atol": 2e-5, "rtol": 1e-4}

# real tokens of three rows of 8: one row of 3, one of 8, one between
MASKS = {
    "left": [[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8, [0, 0, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8, [1, 1, 1, 1, 1, 1, 0, 0]],
    "mixed": [[0, 0, 1, 1, 1, 0, 0, 0], [1] * 8, [1, 1, 1, 0, 0, 1, 1, 1]],
}


def mask_of(name: str) -> torch.Tensor:
    return torch.tensor(MASKS[name])


def memories(model: Any, storage: str) -> TransfoXLMemory:
    return TransfoXLMemory(model.config, stores=storage)


# ---- one segment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("side", MASKS)
@torch.no_grad()
def test_real_tokens_get_what_they_get_without_pads(side: str, window: str, start: str, backend: str) -> None:
    """C56, in both start dialects."""
    model = tiny_model(memory_init=start, **WINDOWS[window])
    model.set_attn_implementation(backend)
    ids, mask = random_ids(3, 8), mask_of(side)
    real = mask.bool()
    (expected,) = slow_log_probabilities(model, [ids], masks=[mask])
    logits = model(ids, attention_mask=mask).logits
    assert_close("log-probabilities", logits[real], expected[real], LOG_PROBABILITIES)
    assert logits.isfinite().all()
    for row in range(3):
        alone = model(ids[row, real[row]][None]).logits[0]
        assert_close(f"row {row} against the row alone", logits[row, real[row]], alone, LOG_PROBABILITIES)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@torch.no_grad()
def test_the_mask_may_have_any_type(dtype: torch.dtype) -> None:
    model, ids, mask = tiny_model(), random_ids(3, 8), mask_of("left")
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, expected)


@pytest.mark.parametrize("start", STARTS)
@torch.no_grad()
def test_a_mask_without_pads_is_no_mask(start: str) -> None:
    model, ids = tiny_model(memory_init=start), random_ids(2, 7)
    expected = model(ids).logits
    assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, expected)


@pytest.mark.parametrize("side", MASKS)
@torch.no_grad()
def test_what_a_pad_is_changes_nothing(side: str) -> None:
    model, mask = tiny_model(memory_init="zeros"), mask_of(side)
    real = mask.bool()
    first = random_ids(3, 8)
    second = torch.where(real, first, (first + 7) % 41)
    outputs, states = [], []
    for ids in (first, second):
        memory = memories(model, "hidden_states")
        outputs.append(model(ids, attention_mask=mask, cache=memory).logits[real])
        states.append(memory.to_mems())
    assert torch.equal(*outputs)
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_pads_of_given_embeddings_may_hold_anything_finite() -> None:
    model, mask = tiny_model(), mask_of("mixed")
    real = mask.bool()
    embeddings = torch.randn(3, 8, 16)
    twin = slow_twin(model)
    expected = twin.scores(twin.read(inputs_embeds=embeddings, attention_mask=mask), 8)
    embeddings[~real] = 1e4
    logits = model(inputs_embeds=embeddings, attention_mask=mask).logits
    assert_close("log-probabilities", logits[real], expected[real], LOG_PROBABILITIES)


@pytest.mark.parametrize("kind", ["pre_lnorm", "shared biases", "clamped"])
@torch.no_grad()
def test_other_layers_treat_pads_alike(kind: str) -> None:
    changes = {"pre_lnorm": {"pre_lnorm": True}, "shared biases": {"untie_r": False}, "clamped": {"clamp_len": 2}}
    model = tiny_model(memory_init="zeros", **changes[kind])
    ids, mask = random_ids(3, 8), mask_of("mixed")
    (expected,) = slow_log_probabilities(model, [ids], masks=[mask])
    logits = model(ids, attention_mask=mask).logits
    assert_close("log-probabilities", logits[mask.bool()], expected[mask.bool()], LOG_PROBABILITIES)


@torch.no_grad()
def test_attention_sees_no_pad_and_sums_to_one() -> None:
    model, ids, mask = tiny_model(), random_ids(3, 8), mask_of("mixed")
    twin = slow_twin(model)
    rows = twin.read(ids, attention_mask=mask)
    attentions = model(ids, attention_mask=mask, output_attentions=True).attentions
    for layer, weights in enumerate(attentions):
        for row in range(3):
            real = mask[row].bool()
            # (H, Q, K) of the real queries
            seen = weights[row][:, real]
            assert not seen[..., ~real].any()
            assert_close("attention", seen[..., real], rows[row].attentions[layer], 1e-5)


# ---- several segments ------------------------------------------------------------------------------------------

# a stream of three rows in four segments; in the third segment one row has nothing at all
STREAM = [
    [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]],
    [[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 1]],
    [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]],
    [[0, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]],
]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_a_ragged_stream_is_what_each_row_is_alone(window: str, start: str, storage: str) -> None:
    """Pads never enter the memory, whatever rows have read before."""
    model = tiny_model(memory_init=start, **WINDOWS[window])
    segments = list(random_ids(3, 16).split(4, dim=1))
    masks = [torch.tensor(mask) for mask in STREAM]
    expected = slow_log_probabilities(model, segments, masks=masks)
    memory = memories(model, storage)
    for index, (ids, mask) in enumerate(zip(segments, masks, strict=True)):
        logits = model(ids, attention_mask=mask, cache=memory).logits
        real = mask.bool()
        assert logits.isfinite().all()
        assert_close(f"segment {index}", logits[real], expected[index][real], LOG_PROBABILITIES)


@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_segments_with_and_without_a_mask_may_follow_one_another(storage: str) -> None:
    model = tiny_model()
    segments = list(random_ids(3, 16).split(4, dim=1))
    masks = [torch.tensor(STREAM[0]), torch.ones(3, 4), torch.tensor(STREAM[2]), torch.ones(3, 4)]
    expected = slow_log_probabilities(model, segments, masks=masks)
    memory = memories(model, storage)
    for index, (ids, mask) in enumerate(zip(segments, masks, strict=True)):
        given = {} if mask.all() else {"attention_mask": mask}
        logits = model(ids, cache=memory, **given).logits
        real = mask.bool()
        assert_close(f"segment {index}", logits[real], expected[index][real], LOG_PROBABILITIES)


@torch.no_grad()
def test_the_memory_of_a_ragged_stream_holds_each_rows_last_real_states() -> None:
    model = tiny_model(memory_init="zeros")
    segments = list(random_ids(3, 16).split(4, dim=1))
    twin = slow_twin(model)
    slow_memory, memory = twin.new_memory(3), memories(model, "hidden_states")
    for ids, mask in zip(segments, STREAM, strict=True):
        mask = torch.tensor(mask)
        twin.read(ids, slow_memory, attention_mask=mask)
        model(ids, attention_mask=mask, cache=memory)
        for layer, states in enumerate(memory.to_mems()):
            assert_close(f"memory of layer {layer}", states, stacked_memory(slow_memory, layer), 2e-5)


@pytest.mark.parametrize("start", STARTS)
@torch.no_grad()
def test_a_segment_of_pads_leaves_a_row_where_it_was(start: str) -> None:
    model = tiny_model(memory_init=start)
    first, pads, last = random_ids(2, 12).split(4, dim=1)
    memory, without = memories(model, "hidden_states"), memories(model, "hidden_states")
    model(first, cache=memory)
    output = model(pads, attention_mask=torch.tensor([[0] * 4, [1] * 4]), cache=memory)
    assert output.logits.isfinite().all()
    model(first[:1], cache=without)
    expected = model(last[:1], cache=without).logits[0]
    assert_close("row that was padded", model(last, cache=memory).logits[0], expected, LOG_PROBABILITIES)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_a_library_cache_with_pads_on_the_left_equals_rows_alone(window: str, start: str) -> None:
    """The mask covers all that the cache has seen, as in `generate`, or the last call only.

    Pads behind real tokens are another matter: the library's caches keep them in place of tokens.
    """
    model = tiny_model(memory_init=start, **WINDOWS[window])
    segments = list(random_ids(3, 12).split(4, dim=1))
    whole_mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    whole_mask = torch.cat([whole_mask, torch.ones(3, 8, dtype=torch.long)], dim=1)
    masks = list(whole_mask.split(4, dim=1))
    expected = slow_log_probabilities(model, segments, masks=masks, window_rule=True)
    cache = DynamicCache(config=model.config)
    for index, ids in enumerate(segments):
        logits = model(ids, attention_mask=whole_mask[:, : 4 * index + 4], past_key_values=cache).logits
        real = masks[index].bool()
        assert_close(f"call {index}", logits[real], expected[index][real], LOG_PROBABILITIES)
    # a mask of one call: what came before counts as real
    cache = DynamicCache(config=model.config)
    masks = [torch.ones(3, 4, dtype=torch.long), torch.tensor(STREAM[3])]
    expected = slow_log_probabilities(model, segments[:2], masks=masks, window_rule=True)
    model(segments[0], past_key_values=cache)
    logits = model(segments[1], attention_mask=masks[1], past_key_values=cache).logits
    real = masks[1].bool()
    assert_close("second call", logits[real], expected[1][real], LOG_PROBABILITIES)


# ---- losses and gradients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", MASKS)
@torch.no_grad()
def test_losses_of_padded_rows_equal_the_slow_reference(side: str) -> None:
    model, ids, mask = tiny_model(memory_init="zeros"), random_ids(3, 8), mask_of(side)
    targets = random_ids(3, 8, seed=5).masked_fill(mask == 0, -100)
    twin = slow_twin(model)
    expected = twin.losses(twin.read(ids, attention_mask=mask), targets)
    output = model(ids, attention_mask=mask, shift_labels=targets)
    assert_close("losses", output.losses, expected, LOSSES)
    assert_close("loss", output.loss, expected.sum() / mask.sum(), LOSSES)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("side", MASKS)
def test_gradients_with_pads_equal_the_slow_reference(side: str, start: str) -> None:
    """Over two segments with memory; what a pad holds gets no gradient."""
    model = tiny_model(memory_init=start).train()
    mask = mask_of(side)
    leaves = leaves_of(model)
    twin = SlowTransfoXL(model.config, leaves)
    slow_memory, memory = twin.new_memory(3), memories(model, "auto")
    for seed in range(2):
        ids = random_ids(3, 8, seed=seed)
        targets = random_ids(3, 8, seed=seed + 5).masked_fill(mask == 0, -100)
        twin.losses(twin.read(ids, slow_memory, attention_mask=mask), targets).sum().backward()
        embeddings = model.get_input_embeddings()(ids)
        embeddings.retain_grad()
        output = model(inputs_embeds=embeddings, attention_mask=mask, cache=memory, shift_labels=targets)
        output.losses.sum().backward()
        assert embeddings.grad.isfinite().all()
        assert not embeddings.grad[mask == 0].any()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if leaves[name].grad is None else leaves[name].grad
        assert parameter.grad.isfinite().all(), name
        assert_close(f"gradient of {name}", parameter.grad, expected, **GRADIENTS)


@torch.no_grad()
def test_the_base_model_treats_pads_alike() -> None:
    model, ids, mask = tiny_model(TransfoXLModel), random_ids(3, 8), mask_of("left")
    rows = slow_twin(model).read(ids, attention_mask=mask)
    output = model(ids, attention_mask=mask, output_hidden_states=True)
    for row in range(3):
        real = mask[row].bool()
        for layer, hidden_states in enumerate(output.hidden_states):
            expected = rows[row].hidden_states[layer]
            assert_close(f"row {row} layer {layer}", hidden_states[row, real], expected, 2e-5)

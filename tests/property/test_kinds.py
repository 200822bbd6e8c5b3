"""What `test_streams.py` demands of Transformer-XL's own positions, for the other encodings.

The relative kinds have all the properties of the first: no cut, storage, backend or pad may matter. Absolute kinds
number what is seen from its far end, so a cut does matter to them; they equal their reference for every cut, and with
the cuts given they are causal and blind to pads.

Tolerance: everything runs in float64 and learned tables are read as they are, so only the order of sums differs from
the reference. The absolute sinusoid is float32 in the package, as in the original, and float64 in the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_txl import TransfoXLMemory
from hf_txl.reference.kinds import slow_model_of
from hf_txl.reference.transformer_xl import leaves_of
from tests.helpers import assert_close, cut
from tests.property.strategies import build_model, cuts, masks, model_fields, random_ids
from tests.property.test_streams import blank_pads, read_stream
from tests.sizes import examples

ROUNDING = 1e-10
FLOAT32_SINUSOIDS = 1e-5

RELATIVE: dict[str, dict[str, Any]] = {
    "learned_relative": {"attention_kind": "learned_relative"},
    "shaw": {"attention_kind": "shaw"},
    "shaw-keys-only": {"attention_kind": "shaw", "shaw_values": False},
    "shaw-values-only": {"attention_kind": "shaw", "shaw_keys": False},
    "huang": {"attention_kind": "huang"},
}
ABSOLUTE: dict[str, dict[str, Any]] = {
    # a zero state before the first token would have a position, so these start from nothing
    "absolute_sinusoid": {"attention_kind": "absolute_sinusoid", "memory_init": "empty"},
    "absolute_learned": {"attention_kind": "absolute_learned", "memory_init": "empty"},
}
ALL = {**RELATIVE, **ABSOLUTE}

each_relative_kind = pytest.mark.parametrize("kind", list(RELATIVE))
each_absolute_kind = pytest.mark.parametrize("kind", list(ABSOLUTE))
each_kind = pytest.mark.parametrize("kind", list(ALL))

STORAGES = st.sampled_from(["hidden_states", "keys_values"])
BACKENDS = st.sampled_from(["eager", "sdpa"])
SEEDS = st.integers(0, 9)


@st.composite
def kind_fields(draw: Any, kind: str, **fixed: Any) -> dict[str, Any]:
    """Fields of a model of a kind; tables shorter and longer than segment (12) and memory (7) together."""
    tables = {
        "max_klen": draw(st.integers(1, 20)),
        "max_relative_distance": draw(st.integers(0, 12)),
    }
    return draw(model_fields(**{**tables, **ALL[kind], **fixed}))


def tolerance(kind: str) -> float:
    return FLOAT32_SINUSOIDS if kind == "absolute_sinusoid" else ROUNDING


def storages(kind: str) -> Any:
    """Absolute kinds keep hidden states whatever happens: their keys change from call to call."""
    return STORAGES if kind in RELATIVE else st.sampled_from(["hidden_states", "auto"])


@each_kind
@examples(st.data(), BACKENDS, SEEDS, few=8, many=25)
def test_log_probabilities_equal_the_reference(kind: str, data: st.DataObject, backend: str, seed: int) -> None:
    model = build_model(data.draw(kind_fields(kind)), backend)
    length = data.draw(st.integers(5, 12))
    ids, lengths = random_ids(2, length, seed), data.draw(cuts(length))
    mask = data.draw(masks(2, length))
    slow = slow_model_of(model.config, model.state_dict())
    memory = slow.new_memory(2)
    expected = []
    with torch.no_grad():
        for segment in cut(length, lengths):
            segment_mask = None if mask is None else mask[:, segment]
            rows = slow.read(ids[:, segment], memory, attention_mask=segment_mask)
            expected.append(slow.scores(rows, segment.stop - segment.start))
    actual = read_stream(model, ids, lengths, data.draw(storages(kind)), mask)
    assert_close(f"{kind} scores", blank_pads(actual, mask), torch.cat(expected, dim=1), tolerance(kind))


@each_kind
@examples(st.data(), BACKENDS, SEEDS, few=5, many=12)
def test_gradients_of_all_parameters_equal_the_reference(
    kind: str, data: st.DataObject, backend: str, seed: int
) -> None:
    """Tables included; several segments, memory between them without gradient, pads or not."""
    model = build_model(data.draw(kind_fields(kind)), backend)
    length = data.draw(st.integers(3, 9))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    targets = random_ids(2, length, seed + 50)
    if mask is not None:
        targets = targets.masked_fill(mask == 0, -100)

    leaves = leaves_of(model)
    slow = slow_model_of(model.config, leaves)
    slow_memory, memory = slow.new_memory(2), TransfoXLMemory(model.config)
    expected, actual = torch.zeros(()).double(), torch.zeros(()).double()
    for segment in cut(length, lengths):
        segment_mask = None if mask is None else mask[:, segment]
        rows = slow.read(ids[:, segment], slow_memory, attention_mask=segment_mask)
        expected = expected + slow.losses(rows, targets[:, segment]).sum()
        output = model(ids[:, segment], attention_mask=segment_mask, cache=memory, shift_labels=targets[:, segment])
        actual = actual + output.losses.sum()
    assert_close(f"{kind} loss", actual, expected, tolerance(kind) * length)
    if expected.requires_grad:
        expected.backward()
    actual.backward()
    for name, parameter in model.named_parameters():
        grad = leaves[name].grad
        expected_grad = torch.zeros_like(parameter) if grad is None else grad
        actual_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(
            f"{kind} gradient of {name}", actual_grad, expected_grad, tolerance(kind) * length, 10 * tolerance(kind)
        )


@each_relative_kind
@examples(st.data(), STORAGES, SEEDS, few=5, many=12)
def test_any_cut_gives_the_same_with_same_length(kind: str, data: st.DataObject, stores: str, seed: int) -> None:
    fields = data.draw(kind_fields(kind, same_length=True))
    # without memory there is no window
    fields["mem_len"] = max(fields["mem_len"], 1)
    model = build_model(fields)
    length = data.draw(st.integers(2, 14))
    ids, mask = random_ids(2, length, seed), data.draw(masks(2, length))
    one = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    other = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    assert_close(f"{kind} cut", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@each_relative_kind
@examples(st.data(), STORAGES, SEEDS, few=5, many=12)
def test_any_cut_gives_the_same_while_the_memory_holds_everything(
    kind: str, data: st.DataObject, stores: str, seed: int
) -> None:
    length = data.draw(st.integers(2, 12))
    model = build_model(data.draw(kind_fields(kind, same_length=False, memory_init="empty", mem_len=length)))
    ids, mask = random_ids(2, length, seed), data.draw(masks(2, length))
    one = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    other = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    assert_close(f"{kind} cut", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@each_relative_kind
@examples(st.data(), BACKENDS, SEEDS, few=5, many=12)
def test_both_storages_and_both_backends_give_the_same(
    kind: str, data: st.DataObject, backend: str, seed: int
) -> None:
    model = build_model(data.draw(kind_fields(kind)))
    length = data.draw(st.integers(1, 12))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    one = read_stream(model, ids, lengths, "hidden_states", mask)
    model.set_attn_implementation(backend)
    other = read_stream(model, ids, lengths, "keys_values", mask)
    assert_close(f"{kind} storage", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@each_kind
@examples(st.data(), SEEDS, few=5, many=12)
def test_a_batch_gives_what_each_row_gives_alone(kind: str, data: st.DataObject, seed: int) -> None:
    """Rows of different length, over any number of segments; alone, a row has no pads at all."""
    model = build_model(data.draw(kind_fields(kind)))
    length = data.draw(st.integers(1, 12))
    ids, lengths, mask = random_ids(3, length, seed), data.draw(cuts(length)), data.draw(masks(3, length))
    stores = data.draw(storages(kind))
    batched = read_stream(model, ids, lengths, stores, mask)
    for row in range(3):
        alone = TransfoXLMemory(model.config, stores=stores)
        for segment in cut(length, lengths):
            real = list(range(segment.start, segment.stop))
            if mask is not None:
                real = [time for time in real if mask[row, time]]
            if real:
                with torch.no_grad():
                    scores = model(ids[row : row + 1, real], cache=alone).logits.log_softmax(-1)
                assert_close(f"{kind} row {row}", batched[row, real], scores[0], ROUNDING)


@each_kind
@examples(st.data(), SEEDS, few=5, many=12)
def test_no_output_depends_on_a_later_token(kind: str, data: st.DataObject, seed: int) -> None:
    """With the same cuts, so that a call sees as many tokens as before: absolute positions count them all."""
    model = build_model(data.draw(kind_fields(kind)))
    length = data.draw(st.integers(2, 12))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    changed, stores = data.draw(st.integers(1, length - 1)), data.draw(storages(kind))
    before = read_stream(model, ids, lengths, stores, mask)
    other_ids = ids.clone()
    other_ids[:, changed:] = random_ids(2, length - changed, seed + 100)
    after = read_stream(model, other_ids, lengths, stores, mask)
    assert_close(
        f"{kind} earlier outputs",
        blank_pads(after, mask)[:, :changed],
        blank_pads(before, mask)[:, :changed],
        ROUNDING,
    )


@each_relative_kind
@examples(st.data(), SEEDS, few=5, many=12)
def test_the_window_rule_of_the_library_s_caches_equals_the_reference(
    kind: str, data: st.DataObject, seed: int
) -> None:
    """Every position sees itself and what the memory holds, whatever the cut; pads on the left, as in `generate`."""
    fields = data.draw(kind_fields(kind))
    fields["mem_len"] = max(fields["mem_len"], 2)
    model = build_model(fields)
    length = data.draw(st.integers(2, 12))
    ids, lengths = random_ids(2, length, seed), data.draw(cuts(length))
    pads = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2))
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    slow = slow_model_of(model.config, model.state_dict())
    memory = slow.new_memory(2)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for segment in cut(length, lengths):
            rows = slow.read(ids[:, segment], memory, attention_mask=mask[:, segment], window_rule=True)
            expected = slow.scores(rows, segment.stop - segment.start)
            output = model(
                ids[:, segment], attention_mask=mask[:, : segment.stop], past_key_values=cache, use_cache=True
            )
            actual = blank_pads(output.logits.log_softmax(-1), mask[:, segment])
            assert_close(f"{kind} window", actual, expected, ROUNDING)

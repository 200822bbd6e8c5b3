"""Properties that must hold for any model, any stream and any way of cutting it, against the slow float64 reference.

Tolerance: everything runs in float64, but positions are float32 sinusoids in the package (as in every original) and
float64 ones in the reference, which moves log-probabilities of these small models by less than 1e-5.
"""

from typing import Any

import torch
from hypothesis import strategies as st

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory
from hf_txl.reference.transformer_xl import SlowTransfoXL, leaves_of
from tests.helpers import assert_close, cut
from tests.property.strategies import build_model, cuts, masks, model_fields, random_ids
from tests.sizes import examples

TOLERANCE = 1e-5
# between two runs of the package: the same float64 arithmetic in another order
ROUNDING = 1e-10

STORAGES = st.sampled_from(["hidden_states", "keys_values"])
BACKENDS = st.sampled_from(["eager", "sdpa"])


def read_stream(
    model: TransfoXLForCausalLM,
    ids: torch.Tensor,
    lengths: list[int],
    stores: str,
    mask: torch.Tensor | None = None,
    memory: TransfoXLMemory | None = None,
) -> torch.Tensor:
    """Log-probabilities `(batch, time, vocabulary)` of a stream read in segments with one memory."""
    memory = TransfoXLMemory(model.config, stores=stores) if memory is None else memory
    parts = []
    with torch.no_grad():
        for segment in cut(ids.shape[1], lengths):
            segment_mask = None if mask is None else mask[:, segment]
            parts.append(model(ids[:, segment], attention_mask=segment_mask, cache=memory).logits)
    return torch.cat(parts, dim=1).log_softmax(-1)


def blank_pads(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return scores if mask is None else scores * mask[..., None]


@examples(st.data(), model_fields(), STORAGES, BACKENDS, st.integers(0, 9), few=12, many=40)
def test_log_probabilities_equal_the_reference(
    data: st.DataObject, fields: dict[str, Any], stores: str, backend: str, seed: int
) -> None:
    """Memory of both storages, any cut, padded or not, batched."""
    model = build_model(fields, backend)
    length = data.draw(st.integers(1, 12))
    ids, lengths = random_ids(3, length, seed), data.draw(cuts(length))
    mask = data.draw(masks(3, length))
    slow = SlowTransfoXL(model.config, model.state_dict())
    memory = slow.new_memory(3)
    expected = []
    with torch.no_grad():
        for segment in cut(length, lengths):
            segment_mask = None if mask is None else mask[:, segment]
            rows = slow.read(ids[:, segment], memory, attention_mask=segment_mask)
            expected.append(slow.scores(rows, segment.stop - segment.start))
    actual = read_stream(model, ids, lengths, stores, mask)
    assert_close("log-probabilities", blank_pads(actual, mask), torch.cat(expected, dim=1), TOLERANCE)


@examples(st.data(), model_fields(same_length=True), STORAGES, st.integers(0, 9), few=12, many=40)
def test_any_cut_gives_the_same_with_same_length(
    data: st.DataObject, fields: dict[str, Any], stores: str, seed: int
) -> None:
    """A window is a window, however long the memory is; without memory there is no window (`mem_len=0`)."""
    fields["mem_len"] = max(fields["mem_len"], 1)
    model = build_model(fields)
    length = data.draw(st.integers(2, 14))
    ids, mask = random_ids(2, length, seed), data.draw(masks(2, length))
    one = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    other = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    assert_close("cut", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@examples(
    st.data(), model_fields(same_length=False, memory_init="empty"), STORAGES, st.integers(0, 9), few=12, many=40
)
def test_any_cut_gives_the_same_while_the_memory_holds_everything(
    data: st.DataObject, fields: dict[str, Any], stores: str, seed: int
) -> None:
    length = data.draw(st.integers(2, 12))
    fields["mem_len"] = length
    model = build_model(fields)
    ids, mask = random_ids(2, length, seed), data.draw(masks(2, length))
    one = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    other = read_stream(model, ids, data.draw(cuts(length)), stores, mask)
    assert_close("cut", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@examples(st.data(), model_fields(), BACKENDS, st.integers(0, 9), few=12, many=40)
def test_both_storages_and_both_backends_give_the_same(
    data: st.DataObject, fields: dict[str, Any], backend: str, seed: int
) -> None:
    model = build_model(fields)
    length = data.draw(st.integers(1, 12))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    one = read_stream(model, ids, lengths, "hidden_states", mask)
    model.set_attn_implementation(backend)
    other = read_stream(model, ids, lengths, "keys_values", mask)
    assert_close("storage", blank_pads(one, mask), blank_pads(other, mask), ROUNDING)


@examples(st.data(), model_fields(), STORAGES, st.integers(0, 9), few=12, many=40)
def test_a_batch_gives_what_each_row_gives_alone(
    data: st.DataObject, fields: dict[str, Any], stores: str, seed: int
) -> None:
    """Rows of different length, over any number of segments; alone, a row has no pads at all."""
    model = build_model(fields)
    length = data.draw(st.integers(1, 12))
    ids, lengths, mask = random_ids(3, length, seed), data.draw(cuts(length)), data.draw(masks(3, length))
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
                assert_close(f"row {row}", batched[row, real], scores[0], ROUNDING)


@examples(st.data(), model_fields(), STORAGES, st.integers(0, 9), few=12, many=40)
def test_no_output_depends_on_a_later_token(
    data: st.DataObject, fields: dict[str, Any], stores: str, seed: int
) -> None:
    model = build_model(fields)
    length = data.draw(st.integers(2, 12))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    changed = data.draw(st.integers(1, length - 1))
    before = read_stream(model, ids, lengths, stores, mask)
    other_ids = ids.clone()
    other_ids[:, changed:] = random_ids(2, length - changed, seed + 100)
    after = read_stream(model, other_ids, lengths, stores, mask)
    assert_close(
        "earlier outputs",
        blank_pads(after, mask)[:, :changed],
        blank_pads(before, mask)[:, :changed],
        ROUNDING,
    )


@examples(st.data(), model_fields(), st.integers(0, 9), few=12, many=40)
def test_the_window_rule_of_the_library_s_caches_equals_the_reference(
    data: st.DataObject, fields: dict[str, Any], seed: int
) -> None:
    """Every position sees itself and what the memory holds, whatever the cut; pads on the left, as in `generate`."""
    fields["mem_len"] = max(fields["mem_len"], 2)
    model = build_model(fields)
    length = data.draw(st.integers(2, 12))
    ids, lengths = random_ids(2, length, seed), data.draw(cuts(length))
    pads = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2))
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    slow = SlowTransfoXL(model.config, model.state_dict())
    memory = slow.new_memory(2)
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for segment in cut(length, lengths):
            rows = slow.read(ids[:, segment], memory, attention_mask=mask[:, segment], window_rule=True)
            expected = slow.scores(rows, segment.stop - segment.start)
            output = model(
                ids[:, segment], attention_mask=mask[:, : segment.stop], past_key_values=cache, use_cache=True
            )
            actual = blank_pads(output.logits.log_softmax(-1), mask[:, segment])
            assert_close("log-probabilities", actual, expected, TOLERANCE)


@examples(st.data(), model_fields(), BACKENDS, st.integers(0, 9), few=6, many=25)
def test_gradients_of_all_parameters_equal_the_reference(
    data: st.DataObject, fields: dict[str, Any], backend: str, seed: int
) -> None:
    """The loss of several segments, memory between them without gradient, pads or not."""
    model = build_model(fields, backend)
    length = data.draw(st.integers(1, 8))
    ids, lengths, mask = random_ids(2, length, seed), data.draw(cuts(length)), data.draw(masks(2, length))
    targets = random_ids(2, length, seed + 50)
    if mask is not None:
        targets = targets.masked_fill(mask == 0, -100)

    leaves = leaves_of(model)
    slow = SlowTransfoXL(model.config, leaves)
    slow_memory, memory = slow.new_memory(2), TransfoXLMemory(model.config)
    expected, actual = torch.zeros(()).double(), torch.zeros(()).double()
    for segment in cut(length, lengths):
        segment_mask = None if mask is None else mask[:, segment]
        rows = slow.read(ids[:, segment], slow_memory, attention_mask=segment_mask)
        expected = expected + slow.losses(rows, targets[:, segment]).sum()
        output = model(ids[:, segment], attention_mask=segment_mask, cache=memory, shift_labels=targets[:, segment])
        assert output.losses is not None
        actual = actual + output.losses.sum()
    assert_close("loss", actual.detach(), expected.detach(), TOLERANCE * length, 1e-6)
    if expected.requires_grad:
        expected.backward()
    actual.backward()
    for name, parameter in model.named_parameters():
        grad = leaves[name].grad
        expected_grad = torch.zeros_like(parameter) if grad is None else grad
        actual_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(name, actual_grad, expected_grad, TOLERANCE * length, 1e-4)

"""Training functions that compute again what they do not keep: values and gradients of the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_txl import attention_execution_transfo_xl
from hf_txl.adaptive_softmax_transfo_xl import BucketLossFunction, TableGradient, TablePartsFunction
from hf_txl.attention_execution_transfo_xl import RelativeAttentionFunction, dropout_factors
from hf_txl.layout_transfo_xl import AttentionLayout
from hf_txl.modeling_transfo_xl import ReluDropoutFunction
from tests.helpers import assert_close

EXACT = {"atol": 1e-11}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same_gradients(
    ours: torch.Tensor, expected: torch.Tensor, leaves: dict[str, torch.Tensor], **tolerance: float
) -> None:
    """Values, and gradients of a sum with uneven weights."""
    assert_close("values", ours, expected, **tolerance)
    weights = random(*expected.shape, seed=9).detach().to(expected.dtype)
    gradients = [torch.autograd.grad((result * weights).sum(), list(leaves.values())) for result in (ours, expected)]
    for name, actual, right in zip(leaves, *gradients, strict=True):
        assert_close(f"gradient of {name}", actual, right, **tolerance)


# ---- attention


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    key_mask: torch.Tensor | None,
    window: int | None,
    scaling: float,
    factors: Callable[[int, int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """One query and one head at a time, by distance."""
    batch_size, num_heads, query_length, _ = query.shape
    key_length = key.shape[2]
    output = []
    for row in range(batch_size):
        for head in range(num_heads):
            for i in range(query_length):
                position = key_length - query_length + i
                scores = []
                for j in range(key_length):
                    distance = position - j
                    hidden = distance < 0 or (window is not None and distance >= window)
                    if hidden or (key_mask is not None and not key_mask[row, j]):
                        scores.append(query.new_tensor(float("-inf")))
                        continue
                    content = (query[row, head, i] + u[head]) @ key[row, head, j]
                    by_position = (query[row, head, i] + v[head]) @ rows[key_length - 1 - distance, head]
                    scores.append((content + by_position) * scaling)
                probabilities = torch.softmax(torch.stack(scores), dim=0)
                if factors is not None:
                    probabilities = probabilities * factors(row, i)[head]
                output.append(probabilities @ value[row, head])
    return torch.stack(output).view(batch_size, num_heads, query_length, -1).transpose(1, 2)


def attention_inputs(query_length: int, past_length: int, batch_size: int = 2) -> dict[str, torch.Tensor]:
    heads, width = 3, 5
    keys = past_length + query_length
    return {
        "query": random(batch_size, heads, query_length, width, seed=1),
        "key": random(batch_size, heads, keys, width, seed=2),
        "value": random(batch_size, heads, keys, width, seed=3),
        "rows": random(keys + query_length, heads, width, seed=4),
        "content bias": random(heads, width, seed=5),
        "position bias": random(heads, width, seed=6),
    }


def layout_of(
    leaves: dict[str, torch.Tensor], window: int | None = None, key_mask: torch.Tensor | None = None
) -> AttentionLayout:
    return AttentionLayout(leaves["query"].shape[2], leaves["key"].shape[2], window=window, key_mask=key_mask)


@pytest.mark.parametrize("block", [1, 40, 10**6], ids=["one query per block", "some", "all"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("query_length", "past_length"), [(7, 0), (5, 6), (1, 3), (4, 9)])
def test_attention_is_that_of_single_queries(
    query_length: int, past_length: int, window: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_execution_transfo_xl, "BLOCK_SCORES", block)
    leaves = attention_inputs(query_length, past_length)
    ours = RelativeAttentionFunction.apply(*leaves.values(), layout_of(leaves, window), 0.4, 0.0)
    assert_same_gradients(ours, plain_attention(*leaves.values(), None, window, 0.4), leaves, **EXACT)


@pytest.mark.parametrize("block", [20, 10**6])
def test_keys_that_a_row_does_not_have_are_not_seen(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_execution_transfo_xl, "BLOCK_SCORES", block)
    leaves = attention_inputs(4, 5)
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[0, :3] = key_mask[1, :5] = False
    ours = RelativeAttentionFunction.apply(*leaves.values(), layout_of(leaves, key_mask=key_mask), 0.4, 0.0)
    assert_same_gradients(ours, plain_attention(*leaves.values(), key_mask, None, 0.4), leaves, **EXACT)


@pytest.mark.parametrize("block", [40, 10**6])
def test_both_passes_drop_the_same_probabilities(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factors that were drawn, put into the plain formula."""
    monkeypatch.setattr(attention_execution_transfo_xl, "BLOCK_SCORES", block)
    drawn: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def spy(like: torch.Tensor, dropout: float, seed: int) -> torch.Tensor:
        factors = dropout_factors(like, dropout, seed)
        assert torch.equal(drawn.setdefault((seed, like.shape), factors), factors)
        return factors

    monkeypatch.setattr(attention_execution_transfo_xl, "dropout_factors", spy)
    leaves = attention_inputs(6, 5)
    torch.manual_seed(3)
    ours = RelativeAttentionFunction.apply(*leaves.values(), layout_of(leaves), 0.4, 0.3)
    per_row = len(drawn) // 2
    blocks = [factors for _, factors in sorted(drawn.items(), key=lambda item: item[0][0])]

    def factors(row: int, i: int) -> torch.Tensor:
        size = 6 // per_row
        part = blocks[row * per_row + i // size][:, i % size]
        # keys behind the block are in the future
        return F.pad(part, (0, 11 - part.shape[1]))

    assert len(blocks) == (2 if block == 10**6 else 2 * per_row) and per_row in (1, 3, 6)
    expected = plain_attention(*leaves.values(), None, None, 0.4, factors)
    assert_same_gradients(ours, expected, leaves, **EXACT)
    again = RelativeAttentionFunction.apply(*leaves.values(), layout_of(leaves), 0.4, 0.3)
    assert not torch.equal(again, ours)


def test_factors_keep_the_expected_value() -> None:
    factors = dropout_factors(torch.empty(400, 500), 0.25, seed=1)
    assert factors.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs(factors.mean().item() - 1) < 0.005
    assert not dropout_factors(torch.empty(3, 3), 1.0, seed=1).any()


def test_attention_keeps_nothing_for_a_pair_of_query_and_key() -> None:
    leaves = attention_inputs(40, 30, batch_size=1)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        RelativeAttentionFunction.apply(*leaves.values(), layout_of(leaves), 0.4, 0.1)
    assert max(kept) <= 110 * 3 * 5 < 40 * 70 * 3


# ---- feed-forward


@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
def test_the_gradient_passes_where_the_result_is_positive(dropout: float) -> None:
    states = random(50, 7)
    torch.manual_seed(5)
    ours = ReluDropoutFunction.apply(states, dropout)
    torch.manual_seed(5)
    expected = F.dropout(torch.relu(states), dropout)
    assert_same_gradients(ours, expected, {"states": states}, **EXACT)


# ---- the softmax


def bucket_inputs(num_tokens: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    leaves = {
        "hidden states": random(num_tokens, 6, seed=1),
        "weight": random(11, 6, seed=2),
        "bias": random(11, seed=3),
        "more weight": random(3, 6, seed=4),
        "more bias": random(3, seed=5),
    }
    columns = torch.arange(num_tokens) * 5 % 14
    columns[num_tokens // 3 : num_tokens // 3 + 2] = -100
    return leaves, columns


@pytest.mark.parametrize("most_logits", [1, 30, 10**6], ids=["one token per block", "some", "all"])
@pytest.mark.parametrize("has_clusters", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_losses_are_those_of_cross_entropy(num_tokens: int, has_clusters: bool, most_logits: int) -> None:
    leaves, columns = bucket_inputs(num_tokens)
    hidden, weight, bias, more_weight, more_bias = leaves.values()
    if not has_clusters:
        columns = columns.clamp(max=10)
        leaves = dict(list(leaves.items())[:3])
    more = (more_weight, more_bias) if has_clusters else (None, None)
    ours = BucketLossFunction.apply(hidden, columns, weight, bias, *more, None, most_logits)
    logits = F.linear(hidden, weight, bias)
    if has_clusters:
        logits = torch.cat([logits, F.linear(hidden, *more)], dim=1)
    expected = F.cross_entropy(logits, columns, reduction="none")
    assert_same_gradients(ours, expected, leaves, **EXACT)


@pytest.mark.parametrize("most_logits", [1, 10**6])
def test_losses_under_autocast_are_close_to_float32(most_logits: int) -> None:
    leaves, columns = bucket_inputs(9)
    leaves = {name: leaf.detach().float().requires_grad_() for name, leaf in leaves.items()}
    hidden, weight, bias, *more = leaves.values()
    with torch.autocast("cpu", torch.bfloat16):
        ours = BucketLossFunction.apply(hidden, columns, weight, bias, *more, None, most_logits)
    assert ours.dtype == torch.float32
    logits = torch.cat([F.linear(hidden, weight, bias), F.linear(hidden, *more)], dim=1)
    assert_same_gradients(ours, F.cross_entropy(logits, columns, reduction="none"), leaves, atol=0.06, rtol=0.03)


def test_parts_of_a_table_write_one_gradient() -> None:
    table = random(14, 6)
    gradient = TableGradient(table)
    parts = TablePartsFunction.apply(table, [9, 5], gradient)
    first, second = random(4, 6, seed=1), random(3, 6, seed=2)
    bias = torch.zeros(9, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    columns = torch.tensor([0, 8, 3, 3]), torch.tensor([4, 0, 1])
    written: list[torch.Tensor] = []

    def part(start: int, end: int) -> Callable[[], torch.Tensor]:
        return lambda: written.append(gradient.part(start, end)) or written[-1]

    losses = [
        BucketLossFunction.apply(first, columns[0], parts[0], bias[0], None, None, part(0, 9), 10**6),
        BucketLossFunction.apply(second, columns[1], parts[1], bias[1], None, None, part(9, 14), 10**6),
    ]
    expected = F.cross_entropy(first @ table[:9].t(), columns[0]) * 4
    expected = expected + F.cross_entropy(second @ table[9:].t(), columns[1]) * 3
    (right,) = torch.autograd.grad(expected, table)
    (actual,) = torch.autograd.grad(sum(loss.sum() for loss in losses), table, retain_graph=True)
    assert_close("gradient", actual, right, **EXACT)
    # nothing was added up or copied
    assert actual.data_ptr() == min(part.data_ptr() for part in written)
    (again,) = torch.autograd.grad(sum(loss.sum() for loss in losses), table)
    assert_close("gradient of another pass", again, right, **EXACT)
    assert_close("gradient of the first pass", actual, right, **EXACT)


def test_a_part_that_is_read_elsewhere_too_gets_both_gradients() -> None:
    table, hidden = random(8, 6), random(2, 6, seed=1)
    gradient = TableGradient(table)
    parts = TablePartsFunction.apply(table, [5, 3], gradient)
    columns, bias = torch.tensor([1, 4]), torch.zeros(5, dtype=torch.float64)
    settings: list[Any] = [None, None, lambda: gradient.part(0, 5), 10**6]
    loss = BucketLossFunction.apply(hidden, columns, parts[0], bias, *settings).sum() + (parts[0] ** 2).sum()
    expected = F.cross_entropy(hidden @ table[:5].t(), columns, reduction="sum") + (table[:5] ** 2).sum()
    (right,) = torch.autograd.grad(expected, table)
    (actual,) = torch.autograd.grad(loss, table)
    assert_close("gradient", actual, right, **EXACT)

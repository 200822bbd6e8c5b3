"""Losses by context length against one text at a time, and the paper's measure against loops."""

import random

import pytest
import torch

from hf_txl.scoring import losses_by_context, relative_effective_context_length
from tests.helpers import assert_close
from tests.unit.test_scoring import make_model, random_ids, slow_losses

CONTEXTS = [2, 5, 11]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_losses_are_those_of_each_block_after_its_context(batch_size: int) -> None:
    model, ids = make_model(same_length=False), random_ids(31)
    found = losses_by_context(model, ids, CONTEXTS, num_scored=3, batch_size=batch_size, progress=False)
    for context in CONTEXTS:
        expected = []
        for start in range(11, 29, 3):
            row = ids[start - context : start + 3]
            expected.append(slow_losses(model, row, len(row), mem_len=context)[-3:])
        assert_close(f"context {context}", found[context], torch.cat(expected), 1e-5)


def by_loops(losses: dict[str, dict[int, list[float]]], fraction: float, threshold: float) -> dict[str, int]:
    contexts = sorted(next(iter(losses.values())))
    lengths = {}
    for name in losses:
        reached = 0
        while reached + 1 < len(contexts):
            here, there = contexts[reached], contexts[reached + 1]
            tokens = range(len(losses[name][here]))
            best = [min(rows[here][token] for rows in losses.values()) for token in tokens]
            hard = sorted(tokens, key=lambda token: -best[token])[: max(1, round(fraction * len(best)))]
            before = sum(best[token] for token in hard) / len(hard)
            after = sum(min(best[token], losses[name][there][token]) for token in hard) / len(hard)
            if (before - after) / before < threshold:
                break
            reached += 1
        lengths[name] = contexts[reached]
    return lengths


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_relative_effective_context_length_follows_its_definition(seed: int, fraction: float) -> None:
    draw = random.Random(seed)
    # later contexts gain less
    losses = {
        name: {
            context: [draw.expovariate(0.3) + 6 / (1 + speed * context) for _ in range(40)]
            for context in range(1, 60, 6)
        }
        for name, speed in (("slow", 0.02), ("fast", 0.4))
    }
    losses = {name: {context: sorted(row) for context, row in rows.items()} for name, rows in losses.items()}
    tensors = {
        name: {context: torch.tensor(row, dtype=torch.float64) for context, row in rows.items()}
        for name, rows in losses.items()
    }
    for threshold in (0.01, 0.05, 0.3):
        expected = by_loops(losses, fraction, threshold)
        assert relative_effective_context_length(tensors, fraction, threshold) == expected


def test_what_cannot_be_compared_is_refused() -> None:
    row = torch.ones(3)
    with pytest.raises(ValueError, match="`fraction` must be above 0 and at most 1, but is 0"):
        relative_effective_context_length({"a": {1: row}}, 0)
    with pytest.raises(ValueError, match="`losses` must hold a model"):
        relative_effective_context_length({})
    with pytest.raises(ValueError, match="`losses` must have the same contexts and tokens for all models"):
        relative_effective_context_length({"a": {1: row}, "b": {2: row}})
    with pytest.raises(
        ValueError, match=r"`token_ids` must hold more than the longest context and a block \(14 tokens\)"
    ):
        losses_by_context(make_model(), random_ids(13), CONTEXTS, num_scored=3)

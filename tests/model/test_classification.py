"""Sequence classification: the rightmost real token decides."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hf_txl import TransfoXLForSequenceClassification, TransfoXLMemory
from tests.helpers import assert_close
from tests.t0 import FLOAT32, LARGE_WEIGHTS, make_model, random_ids


def classifier(**fields: Any) -> TransfoXLForSequenceClassification:
    return make_model(TransfoXLForSequenceClassification, **{"num_labels": 3, **LARGE_WEIGHTS, **fields})


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, where], mask[index, where] = row, 1
    return ids, mask


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_equals_the_row_alone(side: str, memory_init: str) -> None:
    """C60: with the pad token equal to the end token, and end tokens in the middle of rows."""
    model = classifier(pad_token_id=0, eos_token_id=0, memory_init=memory_init)
    rows = [random_ids(length, seed=length) for length in (3, 8, 5)]
    rows[1][4] = rows[2][2] = 0
    ids, mask = padded(rows, side)
    together = model(ids, attention_mask=mask).logits
    alone = torch.cat([model(row[None], attention_mask=torch.ones(1, len(row))).logits for row in rows])
    assert_close("scores", together, alone, **FLOAT32)


@torch.no_grad()
def test_scores_are_the_linear_map_of_the_last_real_hidden_state() -> None:
    model = classifier()
    ids, mask = padded([random_ids(3), random_ids(6, seed=2)], "right")
    hidden = model.transformer(ids, attention_mask=mask).last_hidden_state
    expected = torch.stack([hidden[0, 2], hidden[1, 5]]) @ model.score.weight.T
    assert_close("scores", model(ids, attention_mask=mask).logits, expected, **FLOAT32)


@torch.no_grad()
def test_without_a_mask_pads_at_the_end_are_passed_over() -> None:
    model = classifier(pad_token_id=98)
    ids = random_ids(2, 6).clamp(max=97)
    ids[0, 4:] = 98
    hidden = model.transformer(ids).last_hidden_state
    expected = torch.stack([hidden[0, 3], hidden[1, 5]]) @ model.score.weight.T
    assert_close("scores", model(ids).logits, expected, **FLOAT32)


@torch.no_grad()
def test_without_mask_and_pad_token_the_last_position_counts() -> None:
    model = classifier()
    ids = random_ids(3, 6)
    expected = model.transformer(ids).last_hidden_state[:, -1] @ model.score.weight.T
    assert_close("scores", model(ids).logits, expected, **FLOAT32)


@torch.no_grad()
def test_a_document_in_segments_equals_one_call_under_a_window() -> None:
    """C62: documents of different length in one batch, read with memory."""
    model = classifier(same_length=True)
    rows = [random_ids(length, seed=length) for length in (14, 9)]
    ids, mask = padded(rows, "left")
    memory = TransfoXLMemory(model.config)
    for start in range(0, 14, 5):
        segment = slice(start, start + 5)
        scores = model(ids[:, segment], attention_mask=mask[:, segment], cache=memory).logits
    expected = torch.cat([model(row[None]).logits for row in rows])
    assert_close("scores", scores, expected, **FLOAT32)


@pytest.mark.parametrize(
    ("fields", "labels", "loss"),
    [
        ({}, torch.tensor([2, 0]), lambda scores, labels: F.cross_entropy(scores, labels)),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda scores, labels: F.mse_loss(scores[:, 0], labels)),
        (
            {"problem_type": "multi_label_classification"},
            torch.tensor([[1.0, 0, 1], [0, 0, 1]]),
            lambda scores, labels: F.binary_cross_entropy_with_logits(scores, labels),
        ),
    ],
    ids=["classes", "regression", "several labels"],
)
def test_the_loss_is_the_one_of_the_problem(fields: dict[str, Any], labels: torch.Tensor, loss: Any) -> None:
    model = classifier(**fields)
    output = model(random_ids(2, 5), labels=labels)
    assert_close("loss", output.loss.detach(), loss(output.logits, labels).detach(), **FLOAT32)
    output.loss.backward()
    assert model.score.weight.grad is not None and model.score.weight.grad.abs().sum() > 0


def test_every_part_gets_a_gradient_through_two_segments_with_memory() -> None:
    model = classifier().train()
    memory = model.init_memory(2)
    model(random_ids(2, 5), cache=memory)
    model(random_ids(2, 5, seed=2), cache=memory, labels=torch.tensor([0, 1])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

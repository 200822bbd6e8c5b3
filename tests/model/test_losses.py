"""Losses of the language model: which token is scored where, on what, and how they are averaged."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.utils.generic import find_labels

from hf_txl import TransfoXLForCausalLM
from tests.helpers import assert_close, cut, read_in_segments
from tests.t0 import FLOAT32, GRADIENTS, LARGE_WEIGHTS, gradients_of, make_model, random_ids

VOCABULARIES = [
    pytest.param({}, id="clusters"),
    pytest.param({"cutoffs": [], "div_val": 1}, id="plain"),
    pytest.param({"div_val": 1, "d_embed": 16}, id="clusters of equal width"),
]
every_vocabulary = pytest.mark.parametrize("fields", VOCABULARIES)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


# --- which token


@every_vocabulary
def test_labels_are_shifted_inside(fields: dict[str, Any]) -> None:
    """C19: `labels=input_ids` scores position t on token t + 1; C28: the logits are there to show it."""
    model = make_model(**fields, **LARGE_WEIGHTS)
    ids = random_ids(3, 7)
    output = model(ids, labels=ids)
    assert output.logits.shape == (3, 7, 99)
    assert_close("loss", output.loss, cross_entropy(output.logits[:, :-1], ids[:, 1:]), **FLOAT32)
    assert_close("logits", output.logits, model(ids).logits, **FLOAT32)


@every_vocabulary
def test_losses_are_of_the_token_that_follows_each_position(fields: dict[str, Any]) -> None:
    """In token order, float32, and 0 where nothing follows."""
    model = make_model(**fields, **LARGE_WEIGHTS)
    ids = random_ids(3, 7)
    output = model(ids, labels=ids)
    assert output.losses.shape == (3, 7)
    assert output.losses.dtype == torch.float32
    scores = output.logits.log_softmax(-1)
    expected = torch.zeros(3, 7)
    for row in range(3):
        for time in range(6):
            expected[row, time] = -scores[row, time, ids[row, time + 1]]
    assert_close("losses", output.losses, expected, **FLOAT32)
    assert (output.losses[:, -1] == 0).all()


@every_vocabulary
def test_shifted_labels_are_targets_as_they_are(fields: dict[str, Any]) -> None:
    """C19: the explicit way to give targets that are already shifted; the last position is scored too."""
    model = make_model(**fields, **LARGE_WEIGHTS)
    stream = random_ids(3, 8)
    ids, targets = stream[:, :-1], stream[:, 1:]
    output = model(ids, shift_labels=targets)
    assert_close("loss", output.loss, cross_entropy(output.logits, targets), **FLOAT32)
    expected = cross_entropy(output.logits, targets, reduction="none").view(3, 7)
    assert_close("losses", output.losses, expected, **FLOAT32)


def test_shifted_labels_win_over_labels() -> None:
    """As a Trainer that shifts for sequence parallelism passes both."""
    model = make_model(**LARGE_WEIGHTS)
    ids, targets = random_ids(2, 7), random_ids(2, 7, seed=2)
    both = model(ids, labels=ids, shift_labels=targets)
    alone = model(ids, shift_labels=targets)
    assert torch.equal(both.losses, alone.losses)
    assert both.loss == alone.loss
    assert not torch.equal(both.losses, model(ids, labels=ids).losses)


@pytest.mark.parametrize("segment_length", [40, 10, 5])
@torch.no_grad()
def test_a_stream_of_n_tokens_scores_n_minus_one_whatever_the_segment_length(segment_length: int) -> None:
    """C30: with shifted labels; with `labels` the first token of each segment is never a target."""
    model = make_model(same_length=True, **LARGE_WEIGHTS)
    stream = random_ids(1, 40)
    targets = torch.cat([stream[:, 1:], torch.tensor([[-100]])], dim=1)
    outputs = read_in_segments(model, stream, segment_length, shift_labels=targets)
    losses = torch.cat([output.losses for output in outputs], dim=1)
    assert (losses != 0).sum() == 39
    # one pass over everything, by its logits
    expected = cross_entropy(model(stream[:, :-1]).logits, stream[:, 1:], reduction="none")
    assert_close("losses", losses[0, :-1], expected, **FLOAT32)

    segments = read_in_segments(model, stream, segment_length, labels=stream)
    scored = sum(int((output.losses != 0).sum()) for output in segments)
    assert scored == 40 - 40 // segment_length


# --- output


@every_vocabulary
@pytest.mark.parametrize("train", [False, True])
def test_loss_is_a_number_and_comes_first(train: bool, fields: dict[str, Any]) -> None:
    """C20: `out.loss`, `out[0]`, and the tuple; losses per token under another name."""
    model = make_model(**fields).train(train)
    ids = random_ids(2, 5)
    output = model(ids, labels=ids)
    assert output.loss.dim() == 0
    assert output[0] is output.loss
    assert next(iter(output.keys())) == "loss"
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert as_tuple[0].dim() == 0
    assert torch.equal(as_tuple[0], output.loss)


def test_without_labels_there_is_no_loss() -> None:
    """C20: and logits come first."""
    model = make_model()
    ids = random_ids(2, 5)
    output = model(ids)
    assert output.loss is None and output.losses is None
    assert model(ids, return_dict=False)[0].shape == (2, 5, 99)


def test_only_labels_are_compulsory_for_a_trainer() -> None:
    """`shift_labels` in the signature would leave `Trainer.evaluate` without a loss."""
    assert find_labels(TransfoXLForCausalLM) == ["labels"]
    assert "losses" in make_model().config.keys_to_ignore_at_inference


@pytest.mark.parametrize(
    ("train", "arguments", "has_logits"),
    [
        (False, {}, True),
        (False, {"return_logits": False}, False),
        (False, {"skip_logits": True}, False),
        (False, {"skip_logits": False}, True),
        (True, {}, False),
        (True, {"return_logits": True}, True),
        (True, {"skip_logits": False}, True),
        (True, {"return_logits": True, "skip_logits": True}, True),
    ],
)
def test_logits_come_with_labels_unless_switched_off(
    train: bool, arguments: dict[str, bool], has_logits: bool
) -> None:
    """C28: for metrics of a Trainer; in train mode they would only cost memory. `return_logits` has the last word."""
    model = make_model().train(train)
    ids = random_ids(2, 5)
    output = model(ids, labels=ids, **arguments)
    assert (output.logits is not None) == has_logits
    if has_logits:
        assert output.logits.shape == (2, 5, 99)
    assert_close("loss", output.loss, make_model()(ids, labels=ids).loss, **FLOAT32)


@pytest.mark.parametrize("train", [False, True])
def test_logits_come_without_labels_in_every_mode(train: bool) -> None:
    model = make_model().train(train)
    assert model(random_ids(2, 5)).logits.shape == (2, 5, 99)
    assert model(random_ids(2, 5), return_logits=False).logits is None


@every_vocabulary
@pytest.mark.parametrize(
    ("kept", "positions"),
    [
        (0, [0, 1, 2, 3, 4, 5, 6]),
        (1, [6]),
        (3, [4, 5, 6]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (20, [0, 1, 2, 3, 4, 5, 6]),
        (torch.tensor([0, 5, 2]), [0, 5, 2]),
        (torch.tensor([], dtype=torch.long), []),
    ],
)
@torch.no_grad()
def test_logits_to_keep_are_the_last_or_the_named_positions(
    kept: Any, positions: list[int], fields: dict[str, Any]
) -> None:
    """And losses are of all positions whatever is kept."""
    model = make_model(**fields, **LARGE_WEIGHTS)
    ids = random_ids(2, 7)
    whole = model(ids, labels=ids)
    output = model(ids, labels=ids, logits_to_keep=kept)
    assert output.logits.shape == (2, len(positions), 99)
    assert_close("logits", output.logits, whole.logits[:, positions], **FLOAT32)
    assert torch.equal(output.losses, whole.losses)
    assert output.loss == whole.loss


# --- ignored labels and averages


@every_vocabulary
def test_ignored_labels_are_left_out_of_the_mean(fields: dict[str, Any]) -> None:
    """C25: with a plain softmax it is `cross_entropy(..., ignore_index=-100)`, and with clusters too."""
    model = make_model(**fields, **LARGE_WEIGHTS)
    ids = random_ids(3, 7)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1] = -100
    labels[2, 6] = -100
    output = model(ids, labels=labels)
    expected = cross_entropy(output.logits[:, :-1], labels[:, 1:], ignore_index=-100)
    assert_close("loss", output.loss, expected, **FLOAT32)
    assert ((output.losses != 0) == F.pad(labels[:, 1:] != -100, (0, 1))).all()


@every_vocabulary
def test_gradients_are_those_of_the_cross_entropy_of_the_logits(fields: dict[str, Any]) -> None:
    """C25, C28: the two ways to a loss are one, to every parameter."""
    ids = random_ids(3, 7)
    labels = ids.masked_fill(torch.rand(3, 7) < 0.3, -100)
    gradients = []
    for own in (True, False):
        model = make_model(**fields, **LARGE_WEIGHTS)
        output = model(ids, labels=labels)
        loss = output.loss if own else cross_entropy(output.logits[:, :-1], labels[:, 1:], ignore_index=-100)
        loss.backward()
        gradients.append(gradients_of(model))
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        assert_close(f"gradient of {name}", gradients[0][name], expected, **GRADIENTS)


@every_vocabulary
def test_a_batch_without_any_target_costs_nothing(fields: dict[str, Any]) -> None:
    """A whole batch of pads: 0, not NaN, and a backward pass that changes nothing."""
    model = make_model(**fields)
    ids = random_ids(2, 5)
    for targets in ({"labels": torch.full_like(ids, -100)}, {"shift_labels": torch.full_like(ids, -100)}):
        model.zero_grad()
        output = model(ids, **targets)
        assert output.loss == 0 and (output.losses == 0).all()
        output.loss.backward()
        assert all((gradient == 0).all() for gradient in gradients_of(model).values())


def test_a_segment_of_one_token_has_no_target_of_its_own() -> None:
    model = make_model()
    ids = random_ids(2, 1)
    assert model(ids, labels=ids).loss == 0
    assert model(ids, shift_labels=ids).loss > 0


@pytest.mark.parametrize("count", [8, torch.tensor(8), torch.tensor(8.0)])
def test_the_number_of_items_replaces_the_number_of_targets(count: Any) -> None:
    """What a Trainer passes when it accumulates gradients: two halves add up to the whole."""
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(4, 3)
    whole = model(ids, labels=ids).loss
    halves = [model(part, labels=part, num_items_in_batch=count) for part in ids.split(2)]
    assert_close("sum of halves", halves[0].loss + halves[1].loss, whole, **FLOAT32)
    assert_close("one half", halves[0].loss, halves[0].losses.sum() / 8, **FLOAT32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@torch.no_grad()
def test_labels_of_any_integer_type_are_read(dtype: torch.dtype) -> None:
    model = make_model()
    ids = random_ids(2, 5)
    expected = model(ids, labels=ids)
    for arguments in ({"labels": ids.to(dtype)}, {"shift_labels": F.pad(ids[:, 1:], (0, 1)).to(dtype)}):
        losses = model(ids.to(dtype), **arguments).losses
        # shifted labels have a target more, so products over another number of rows
        assert_close("losses", losses[:, :-1], expected.losses[:, :-1], **FLOAT32)


# --- with memory and masks


@torch.no_grad()
def test_losses_with_a_memory_are_those_of_the_logits() -> None:
    model = make_model(**LARGE_WEIGHTS)
    stream = random_ids(2, 13)
    memory = model.init_memory(2)
    for segment in cut(12, [5, 1, 6]):
        output = model(stream[:, segment], cache=memory, shift_labels=stream[:, 1:][:, segment])
        targets = stream[:, 1:][:, segment]
        expected = cross_entropy(output.logits, targets, reduction="none").view(targets.shape)
        assert_close("losses", output.losses, expected, **FLOAT32)


# --- reduction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_vocabulary
def test_half_precision_losses_are_reduced_in_float32(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """C31: 512 targets; finite, within 2% of float32, and the mean exactly that of the float32 losses."""
    ids = random_ids(8, 64)
    targets = random_ids(8, 64, seed=2)
    expected = make_model(**fields)(ids, shift_labels=targets).loss.item()
    model = make_model(**fields).to(dtype)
    output = model(ids, shift_labels=targets)
    assert output.losses.dtype == torch.float32 and output.loss.dtype == torch.float32
    assert math.isfinite(output.loss.item())
    assert output.loss.item() == pytest.approx(expected, rel=0.02)
    assert output.loss.item() == pytest.approx(output.losses.double().mean().item(), rel=1e-6)
    output.loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(model).values())

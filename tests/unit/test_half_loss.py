"""Half loss: only the recent half of each segment is scored, in training streams and in evaluations."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.data import TokenStreams
from hf_txl.scoring import evaluate_stream

IGNORED = -100


def slow_scored(num_targets: int, segment_length: int) -> list[int]:
    """Positions of a row that half loss scores: counted segment by segment, token by token.

    A position is scored unless at least as many positions follow it in its segment, itself included, as the segment
    has after its first half: of 4 the last 2, of 5 the last 3, of 1 the one.
    """
    scored = []
    start = 0
    while start < num_targets:
        segment = list(range(start, min(start + segment_length, num_targets)))
        while len(segment) > math.ceil((min(start + segment_length, num_targets) - start) / 2):
            segment.pop(0)
        scored += segment
        start += segment_length
    return scored


def make_model(**settings: object) -> TransfoXLForCausalLM:
    config = TransfoXLConfig(
        **{
            "vocab_size": 23,
            "cutoffs": [],
            "d_model": 8,
            "d_head": 3,
            "n_head": 2,
            "d_inner": 13,
            "n_layer": 2,
            "mem_len": 5,
            "same_length": False,
            "clamp_len": -1,
            "dropout": 0.0,
            "init_std": 0.3,
            **settings,
        }
    )
    return TransfoXLForCausalLM(config).eval()


def slow_losses(model: TransfoXLForCausalLM, row: torch.Tensor, segment_length: int, mem_len: int) -> list[float]:
    """Loss of every token of one row but the first, from the log-softmax of the logits of each segment."""
    memory = model.init_memory(1, mem_len=mem_len)
    losses = []
    with torch.no_grad():
        for start in range(0, len(row) - 1, segment_length):
            stop = min(start + segment_length, len(row) - 1)
            log_probabilities = model(row[None, start:stop], cache=memory).logits[0].double().log_softmax(-1)
            losses += [-log_probabilities[t - start, row[t + 1]].item() for t in range(start, stop)]
    return losses


# --- the rule, written out


@pytest.mark.parametrize(
    ("segment_length", "expected"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7]),
        # the last segment has one token, which is scored
        (2, [IGNORED, 2, IGNORED, 4, IGNORED, 6, 7]),
        (3, [IGNORED, 2, 3, IGNORED, 5, 6, 7]),
        # the last segment has three, of which the middle one is scored
        (4, [IGNORED, IGNORED, 3, 4, IGNORED, 6, 7]),
        (5, [IGNORED, IGNORED, 3, 4, 5, IGNORED, 7]),
        (7, [IGNORED, IGNORED, IGNORED, 4, 5, 6, 7]),
        (50, [IGNORED, IGNORED, IGNORED, 4, 5, 6, 7]),
    ],
)
def test_the_first_half_of_each_segment_is_left_out_and_the_middle_of_an_odd_one_is_not(
    segment_length: int, expected: Sequence[int]
) -> None:
    streams = TokenStreams(range(8), 1, segment_length, loss="half")
    targets = torch.cat([segment["shift_labels"] for segment in streams.segments()], dim=1)
    assert targets.tolist() == [expected]


# --- streams


@pytest.mark.parametrize("segment_length", [1, 2, 7, 8, 13, 40])
@pytest.mark.parametrize("drop_last", [False, True])
def test_half_streams_differ_from_full_ones_only_in_what_is_scored(segment_length: int, drop_last: bool) -> None:
    tokens = torch.arange(3 * 41)
    half = TokenStreams(tokens, 3, segment_length, drop_last=drop_last, loss="half")
    full = TokenStreams(tokens, 3, segment_length, drop_last=drop_last)
    assert len(half) == len(full)
    read = 0
    for left, right in zip(half.segments(), full.segments(), strict=True):
        assert torch.equal(left["input_ids"], right["input_ids"])
        assert torch.equal(left["labels"], right["labels"])
        scored = left["shift_labels"] != IGNORED
        assert torch.equal(left["shift_labels"][scored], right["shift_labels"][scored])
        expected = [t in slow_scored(scored.shape[1], segment_length) for t in range(scored.shape[1])]
        assert scored.tolist() == [expected] * 3
        read += scored.shape[1]
    assert read == (40 // segment_length * segment_length if drop_last else 40)


def test_items_of_a_loader_are_those_of_the_segments() -> None:
    streams = TokenStreams(range(100), 3, 7, loss="half")
    for batch, segment in zip(DataLoader(streams, batch_size=3), streams.segments(), strict=True):
        assert torch.equal(batch["shift_labels"], segment["shift_labels"])


def test_the_text_is_not_written_into() -> None:
    tokens = torch.arange(30)
    list(TokenStreams(tokens, 2, 4, loss="half").segments())
    assert torch.equal(tokens, torch.arange(30))


def test_full_is_the_default_and_scores_everything() -> None:
    for streams in (TokenStreams(range(30), 2, 4), TokenStreams(range(30), 2, 4, loss="full")):
        assert all((segment["shift_labels"] != IGNORED).all() for segment in streams.segments())


def test_the_training_loss_is_the_mean_over_the_recent_halves() -> None:
    model = make_model()
    tokens = torch.randint(0, 23, (2 * 20,))
    streams = TokenStreams(tokens, 2, 7, loss="half")
    memory = model.init_memory(2)
    found = [model(**segment, cache=memory).loss.item() for segment in streams.segments()]
    losses = [slow_losses(model, row, 7, 5) for row in tokens.view(2, 20)]
    for index, start in enumerate(range(0, 19, 7)):
        scored = [t for t in slow_scored(19, 7) if start <= t < start + 7]
        expected = sum(row[t] for row in losses for t in scored) / (2 * len(scored))
        assert found[index] == pytest.approx(expected, abs=1e-5)


def test_trainer_divides_by_the_scored_targets(tmp_path: object) -> None:
    model = make_model()
    tokens = torch.randint(0, 23, (2 * 8 + 2,))
    streams = TokenStreams(tokens, 2, 8, loss="half")
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=1,
        learning_rate=0.0,
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=streams)
    trainer.train()
    model.eval()
    losses = [slow_losses(model, row, 8, 0)[4:] for row in tokens.view(2, 9)]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # Trainer rounds what it logs to four digits
    assert logged == [pytest.approx(sum(map(sum, losses)) / 8, abs=2e-4)]


# --- evaluation


@pytest.mark.parametrize("segment_length", [1, 2, 7, 13, 40])
@pytest.mark.parametrize("mem_len", [0, 3, 11])
def test_an_evaluation_scores_the_recent_half_of_each_segment(segment_length: int, mem_len: int) -> None:
    model = make_model()
    tokens = torch.randint(0, 23, (3 * 28 + 1,))
    score = evaluate_stream(
        model,
        tokens,
        segment_length=segment_length,
        batch_size=3,
        mem_len=mem_len,
        loss="half",
        return_losses=True,
        progress=False,
    )
    scored = slow_scored(27, segment_length)
    expected = []
    for row in tokens[: 3 * 28].view(3, 28):
        losses = slow_losses(model, row, segment_length, mem_len)
        expected.append([losses[t] for t in scored])
    assert score.predictions == 3 * len(scored)
    assert score.losses is not None and score.losses.shape == (3, len(scored))
    assert torch.allclose(score.losses.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    assert score.loss == pytest.approx(sum(map(sum, expected)) / (3 * len(scored)), abs=1e-5)


def test_half_and_full_agree_where_both_score() -> None:
    model = make_model()
    tokens = torch.randint(0, 23, (40,))
    settings = {"segment_length": 6, "return_losses": True, "progress": False}
    half = evaluate_stream(model, tokens, loss="half", **settings)
    full = evaluate_stream(model, tokens, **settings)
    assert half.losses is not None and full.losses is not None
    assert torch.equal(half.losses, full.losses[:, slow_scored(39, 6)])


def test_what_is_read_again_is_not_part_of_a_segment() -> None:
    """With `ext_len` the halves are those of the new tokens: without memory, a call reads them after the old ones."""
    model = make_model()
    tokens = torch.randint(0, 23, (30,))
    score = evaluate_stream(
        model, tokens, segment_length=6, mem_len=0, ext_len=4, loss="half", return_losses=True, progress=False
    )
    expected = []
    for t in slow_scored(29, 6):
        start = t // 6 * 6
        stop = min(start + 6, 29)
        first = max(0, start - 4)
        with torch.no_grad():
            logits = model(tokens[None, first:stop]).logits[0].double()
        expected.append(-logits.log_softmax(-1)[t - first, tokens[t + 1]].item())
    assert score.losses is not None
    assert torch.allclose(score.losses[0].double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)


def test_with_segments_of_one_token_half_is_full() -> None:
    model = make_model()
    tokens = torch.randint(0, 23, (20,))
    half = evaluate_stream(model, tokens, segment_length=1, loss="half", progress=False)
    full = evaluate_stream(model, tokens, segment_length=1, progress=False)
    assert (half.loss, half.predictions) == (full.loss, full.predictions) and full.predictions == 19


# --- wrong use


@pytest.mark.parametrize("loss", ["first", "Half", None, 0.5])
def test_other_losses_are_refused(loss: object) -> None:
    with pytest.raises(ValueError, match=r"`loss` must be one of \['full', 'half'\], but is"):
        TokenStreams(range(30), 2, 4, loss=loss)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`loss` must be one of \['full', 'half'\], but is"):
        evaluate_stream(make_model(), range(20), segment_length=4, loss=loss)  # type: ignore[arg-type]

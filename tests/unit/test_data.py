"""Token streams: rows that go on from batch to batch, every token a target once; vocabularies in the wrong order."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_txl import TransfoXLConfig
from hf_txl.data import TokenStreams, check_frequency_order


def batches_of(streams: TokenStreams, **loader_settings: object) -> list[dict[str, torch.Tensor]]:
    return list(DataLoader(streams, batch_size=streams.batch_size, **loader_settings))


def assert_rows_go_on(batches: list[dict[str, torch.Tensor]]) -> None:
    """For a text whose token values count up: row r starts with the value after its last one in the batch before."""
    for before, after in zip(batches, batches[1:], strict=False):
        assert torch.equal(after["input_ids"][:, 0], before["input_ids"][:, -1] + 1)


def test_rows_of_a_batch_go_on_where_they_stopped() -> None:
    """C13: values 0 to 999, batch 4, segment 10, through a `DataLoader`."""
    streams = TokenStreams(torch.arange(1000), batch_size=4, segment_length=10)
    batches = batches_of(streams)
    assert batches[0]["input_ids"][:, 0].tolist() == [0, 250, 500, 750]
    assert all(batch["input_ids"].shape == (4, 10) for batch in batches[:-1])
    assert_rows_go_on(batches)
    read = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    assert read.tolist() == [list(range(250 * row, 250 * row + 249)) for row in range(4)]


def test_a_loader_refuses_to_shuffle() -> None:
    """C13: a memory of shuffled text is meaningless."""
    with pytest.raises(ValueError, match="shuffle"):
        DataLoader(TokenStreams(range(100), 2, 5), batch_size=2, shuffle=True)


def test_trainer_keeps_the_order(tmp_path: Path) -> None:
    """C13: `Trainer` shuffles map-style data sets by default; this one it must read in order, targets included."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, remove_unused_columns=False, use_cpu=True, report_to="none"
    )
    streams = TokenStreams(range(1000), batch_size=4, segment_length=10)
    batches = list(Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=streams).get_train_dataloader())
    assert len(batches) == 25
    assert_rows_go_on(batches)
    for batch in batches:
        assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)


def test_worker_processes_keep_the_order() -> None:
    streams = TokenStreams(range(205), batch_size=3, segment_length=7)
    expected = batches_of(streams)
    batches = batches_of(streams, num_workers=2)
    assert len(batches) == len(expected)
    for batch, one_process in zip(batches, expected, strict=True):
        assert torch.equal(batch["input_ids"], one_process["input_ids"])


@pytest.mark.parametrize("num_tokens", [14, 15, 100, 103])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
@pytest.mark.parametrize("segment_length", [1, 4, 13, 200])
def test_every_token_but_the_first_of_a_row_is_a_target_once(
    num_tokens: int, batch_size: int, segment_length: int
) -> None:
    """C30: as many targets whatever the segment length, each the token that follows its input."""
    streams = TokenStreams(range(num_tokens), batch_size, segment_length)
    segments = list(streams.segments())
    piece = num_tokens // batch_size
    targets = torch.cat([segment["shift_labels"] for segment in segments], dim=1)
    assert targets.tolist() == [list(range(row * piece + 1, row * piece + piece)) for row in range(batch_size)]
    for segment in segments:
        assert torch.equal(segment["shift_labels"], segment["input_ids"] + 1)
        assert torch.equal(segment["labels"], segment["input_ids"])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_tokens", "segment_length"), [(101, 10), (95, 10), (103, 17)])
def test_lengths_are_those_of_what_comes(num_tokens: int, segment_length: int, drop_last: bool) -> None:
    streams = TokenStreams(range(num_tokens), 2, segment_length, drop_last=drop_last)
    segments = list(streams.segments())
    assert streams.num_segments == len(segments)
    assert len(streams) == len(list(streams)) == 2 * len(segments)
    assert len(DataLoader(streams, batch_size=2)) == len(segments)
    if drop_last:
        assert {segment["input_ids"].shape for segment in segments} == {(2, segment_length)}
    else:
        assert sum(segment["input_ids"].numel() for segment in segments) == 2 * (num_tokens // 2 - 1)


def test_segments_and_a_loader_give_the_same_batches() -> None:
    streams = TokenStreams(range(50), 3, 4)
    for batch, segment in zip(batches_of(streams), streams.segments(), strict=True):
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            name: tensor.tolist() for name, tensor in segment.items()
        }


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda values: np.array(values, np.uint16)])
def test_a_text_may_be_any_sequence_of_integers(form: object) -> None:
    streams = TokenStreams(form(list(range(21))), 2, 5)
    assert next(iter(streams))["input_ids"].tolist() == [0, 1, 2, 3, 4]
    assert next(iter(streams))["input_ids"].dtype == torch.long


def test_writing_into_a_batch_does_not_change_the_text() -> None:
    text = torch.arange(20)
    for segment in TokenStreams(text, 2, 5).segments():
        for tensor in segment.values():
            tensor.fill_(-1)
    assert torch.equal(text, torch.arange(20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((range(10), 0, 5), "`batch_size` must be an int of at least 1, but is 0"),
        ((range(10), 2, -1), "`segment_length` must be an int of at least 1, but is -1"),
        ((range(10), 2, 2.5), "`segment_length` must be an int of at least 1, but is 2.5"),
        ((range(7), 4, 5), "at least 2 tokens for each of `batch_size` \\(4\\) rows, 8 in all, but has 7"),
        (([], 1, 5), "but has 0"),
        (([[1, 2], [3, 4]], 1, 5), "`token_ids` must have one dimension, time, but has shape \\[2, 2\\]"),
        (([0.5, 1.0], 1, 5), "`token_ids` must hold integers"),
    ],
)
def test_impossible_streams_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenStreams(*arguments)


def test_a_text_without_one_whole_segment_is_refused_where_short_ones_are_dropped() -> None:
    with pytest.raises(ValueError, match="at least 6 tokens"):
        TokenStreams(range(11), 2, 5, drop_last=True)
    assert len(TokenStreams(range(12), 2, 5, drop_last=True)) == 2


CLUSTERS = TransfoXLConfig(vocab_size=10, cutoffs=[2, 6], d_model=16, n_head=2, n_layer=1)


def test_a_vocabulary_in_the_wrong_order_is_reported_with_numbers() -> None:
    """C45: 4 + 8 + 12 tokens in buckets of 2, 4 and 4 ids, so 2, 2 and 3 per token: only the last cluster is wrong."""
    text = [0, 1] * 2 + [2, 3, 4, 5] * 2 + [6, 7, 8, 9] * 3
    with pytest.warns(UserWarning, match=r"cluster\(s\) \[2\]") as caught:
        rates = check_frequency_order(text, CLUSTERS)
    assert rates == [2.0, 2.0, 3.0]
    message = str(caught[0].message)
    assert "ids 0 to 1: 2; ids 2 to 5: 2; ids 6 to 9: 3" in message
    assert "[2, 6]" in message


def test_rates_are_per_token_not_per_bucket() -> None:
    """C45: a large cluster may be used more in all than the shortlist, as long as each of its tokens is rarer."""
    text = [0, 1] * 3 + [2, 3, 4, 5] * 2 + [6, 7, 8, 9]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_frequency_order(text, CLUSTERS) == [3.0, 2.0, 1.0]


def test_a_plain_softmax_needs_no_order() -> None:
    """C45"""
    config = TransfoXLConfig(vocab_size=10, d_model=16, n_head=2, n_layer=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_frequency_order([9] * 5, config) == [0.5]


def test_ids_beyond_the_vocabulary_are_refused_by_the_check() -> None:
    with pytest.raises(ValueError, match="`vocab_size` 10\\), but has values from 3 to 10"):
        check_frequency_order([3, 10], CLUSTERS)

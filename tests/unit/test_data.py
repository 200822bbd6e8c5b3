"""Streams: rows that go on from batch to batch, every token a target once; vocabularies in the wrong order."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hf_txl import TransfoXLConfig
from hf_txl.data import DocumentStreams, TokenStreams, check_frequency_order


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


def test_items_have_numbers() -> None:
    """By which a resumed run finds its place."""
    streams = TokenStreams(range(50), 3, 4)
    for index, item in enumerate(streams):
        assert {name: tensor.tolist() for name, tensor in streams[index].items()} == {
            name: tensor.tolist() for name, tensor in item.items()
        }
    for index in (-1, len(streams)):
        with pytest.raises(IndexError, match=f"between 0 and {len(streams) - 1}, but is {index}"):
            streams[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starts_are_marked_where_rows_begin(num_workers: int) -> None:
    batches = batches_of(TokenStreams(range(50), 3, 4, mark_starts=True), num_workers=num_workers)
    assert [batch["reset_memory"].tolist() for batch in batches] == [[True] * 3] + [[False] * 3] * (len(batches) - 1)


# ---- segments of random length


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_tokens", "segment_length"), [(2003, 40), (500, 3), (4001, 200), (60, 20)])
def test_random_segments_lose_and_repeat_nothing(num_tokens: int, segment_length: int, drop_last: bool) -> None:
    streams = TokenStreams(range(num_tokens), 1, segment_length, varlen=True, seed=3, drop_last=drop_last)
    for epoch in range(3):
        streams.set_epoch(epoch)
        segments = list(streams.segments())
        assert len(segments) == streams.num_segments == len(list(streams))
        targets = torch.cat([segment["shift_labels"][0] for segment in segments])
        assert targets.tolist() == list(range(1, len(targets) + 1))
        lengths = [segment["input_ids"].shape[1] for segment in segments]
        assert all(5 <= length <= max(segment_length, 0) + 15 for length in (lengths if drop_last else lengths[:-1]))
        if not drop_last:
            assert len(targets) == num_tokens - 1


def test_random_lengths_follow_the_originals_distribution() -> None:
    """`get_varlen_iter`: normal about L, about L / 2 with probability 0.05, deviation 5, cut to an integer."""
    streams = TokenStreams(np.zeros(3_000_000, np.uint8), 1, 100, varlen=True, seed=1)
    lengths = np.diff(streams._starts)[:-1]
    short = lengths < 75
    assert abs(short.mean() - 0.05) < 0.005
    # rounding towards zero takes half a token
    assert abs(lengths[~short].mean() - 99.5) < 0.2
    assert abs(lengths[short].mean() - 49.5) < 0.5
    assert abs(lengths[~short].std() - 5) < 0.1
    assert lengths.max() <= 115


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_of_random_lengths_depends_on_seed_and_epoch_only(num_workers: int) -> None:
    def lengths(seed: int, epoch: int) -> list[int]:
        streams = TokenStreams(range(4000), 2, 30, varlen=True, seed=seed)
        streams.set_epoch(epoch)
        return [batch["input_ids"].shape[1] for batch in batches_of(streams, num_workers=num_workers)]

    first = lengths(0, 0)
    assert len(set(first)) > 5
    assert lengths(0, 0) == first != lengths(1, 0)
    assert lengths(0, 1) != first
    # the same lengths, so as many steps
    assert sorted(lengths(0, 1)) == sorted(first)


def test_worker_processes_that_stay_see_the_epoch_change() -> None:
    streams = TokenStreams(range(4000), 2, 30, varlen=True)
    loader = DataLoader(streams, batch_size=2, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        streams.set_epoch(epoch)
        lengths = [batch["input_ids"].shape[1] for batch in loader]
        assert lengths == [segment["input_ids"].shape[1] for segment in streams.segments()]


def test_random_lengths_need_room_for_the_longest() -> None:
    with pytest.raises(ValueError, match="at least 26 tokens"):
        TokenStreams(range(25), 1, 10, varlen=True, drop_last=True)


# ---- documents


def texts_of(lengths: list[int]) -> list[list[int]]:
    """Documents whose values count on: document d holds 100 d, 100 d + 1, …"""
    return [list(range(100 * number, 100 * number + length)) for number, length in enumerate(lengths)]


LENGTHS = [9, 2, 1, 30, 5, 0, 6, 13, 4, 4, 17]


def read_rows(streams: DocumentStreams) -> list[list[tuple[int, int, bool]]]:
    """Per row: input, target and whether it is the first after a start, of each real position."""
    rows: list[list[tuple[int, int, bool]]] = [[] for _ in range(streams.batch_size)]
    for segment in streams.segments():
        assert segment["input_ids"].shape == (streams.batch_size, streams.segment_length)
        mask = segment.get("attention_mask", torch.ones_like(segment["input_ids"])).bool()
        # pads lie behind the last token, are not scored, and come only with a mask
        assert torch.equal(mask, mask.cummin(dim=1).values)
        assert (segment["shift_labels"][~mask] == -100).all()
        assert (segment["labels"][~mask] == -100).all()
        assert torch.equal(segment["labels"][mask], segment["input_ids"][mask])
        assert "attention_mask" not in segment or not mask.all()
        for row, pairs in enumerate(rows):
            real = int(mask[row].sum())
            inputs, targets = segment["input_ids"][row, :real], segment["shift_labels"][row, :real]
            starts = [bool(segment["reset_memory"][row])] + [False] * real
            pairs += list(zip(inputs.tolist(), targets.tolist(), starts, strict=False))
    return rows


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("segment_length", [1, 4, 7, 50])
def test_each_document_is_read_once_from_its_start(batch_size: int, segment_length: int) -> None:
    """C112: nothing leaks across the start of a document, and one of n tokens has n - 1 targets."""
    texts = texts_of(LENGTHS)
    rows = read_rows(DocumentStreams(texts, batch_size, segment_length))
    pairs = [pair for row in rows for pair in row]
    assert sorted(target for _, target, _ in pairs) == sorted(token for text in texts for token in text[1:])
    assert all(target == token + 1 for token, target, _ in pairs)
    starts = sorted(token for token, _, is_start in pairs if is_start)
    assert starts == [text[0] for text in texts if len(text) > 1]
    for row in rows:
        documents = [token // 100 for token, _, _ in row]
        # one after the other, in the order in which rows become free
        assert documents == sorted(documents)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("segment_length", [1, 4, 7, 50])
def test_documents_behind_each_other_are_one_stream_per_row(batch_size: int, segment_length: int) -> None:
    """`LMShuffledIterator` of the original code, without its loss of the last tokens: N - 1 targets for N tokens."""
    texts = texts_of(LENGTHS)
    rows = read_rows(DocumentStreams(texts, batch_size, segment_length, separate=False))
    read = []
    for row in rows:
        for (_, target, _), (token, _, is_start) in zip(row, row[1:], strict=False):
            assert token == target and not is_start
        assert not row or row[0][2]
        read += [row[0][0], *(target for _, target, _ in row)] if row else []
    scored_by_none = sum(len(text) for text in texts) - len(read)
    # a row may end with a text of a single token after which nothing comes
    assert 0 <= scored_by_none < batch_size
    assert set(read) <= {token for text in texts for token in text}
    assert len(set(read)) == len(read)


def test_the_first_segments_of_documents_written_out() -> None:
    streams = DocumentStreams([[1, 2, 3, 4], [5, 6], [7], [8, 9, 10]], batch_size=2, segment_length=2)
    first, second = streams.segments()
    assert first["input_ids"].tolist() == [[1, 2], [5, 0]]
    assert first["shift_labels"].tolist() == [[2, 3], [6, -100]]
    assert first["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert first["reset_memory"].tolist() == [True, True]
    assert second["input_ids"].tolist() == [[3, 0], [8, 9]]
    assert second["shift_labels"].tolist() == [[4, -100], [9, 10]]
    assert second["reset_memory"].tolist() == [False, True]


@pytest.mark.parametrize("form", ["list", "Dataset", "IterableDataset"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_documents_may_be_data_sets(form: str, num_workers: int) -> None:
    texts: Any = texts_of(LENGTHS)
    expected = list(DocumentStreams(texts, 2, 4).segments())
    if form != "list":
        datasets = pytest.importorskip("datasets")
        texts = datasets.Dataset.from_dict({"input_ids": texts})
        texts = texts.to_iterable_dataset() if form == "IterableDataset" else texts
    batches = list(DataLoader(DocumentStreams(texts, 2, 4), batch_size=2, num_workers=num_workers))
    assert len(batches) == len(expected)
    for batch, segment in zip(batches, expected, strict=True):
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            name: tensor.tolist() for name, tensor in segment.items()
        }


def test_documents_are_shuffled_by_seed_and_epoch() -> None:
    texts = texts_of([3] * 40)

    def order(seed: int, epoch: int) -> list[int]:
        streams = DocumentStreams(texts, 1, 4, shuffle=True, seed=seed)
        streams.set_epoch(epoch)
        return [token // 100 for token, _, is_start in read_rows(streams)[0] if is_start]

    first = order(0, 0)
    assert sorted(first) == list(range(40)) != first
    assert order(0, 0) == first
    assert order(0, 1) != first != order(1, 0)


def test_repeated_documents_go_on_with_the_next_epoch() -> None:
    texts = texts_of([3] * 10)
    streams = DocumentStreams(texts, 2, 4, shuffle=True, repeat=True)
    passes = []
    for epoch in range(3):
        once = DocumentStreams(texts, 2, 4, shuffle=True)
        once.set_epoch(epoch)
        passes += [segment["input_ids"].tolist() for segment in once.segments()]
    read = [segment["input_ids"].tolist() for segment, _ in zip(streams.segments(), passes, strict=False)]
    assert read == passes


@pytest.mark.parametrize(
    ("documents", "settings", "message"),
    [
        (iter([[1, 2]]), {}, "`documents` must be iterable more than once"),
        (5, {}, "`documents` must be iterable more than once, .* but is a int"),
        ([[1, 2]], {"batch_size": 0}, "`batch_size` must be an int of at least 1, but is 0"),
        ({1: 2}.keys(), {"shuffle": True}, "`shuffle` must be False for a dict_keys"),
    ],
)
def test_impossible_documents_are_refused(documents: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DocumentStreams(documents, **{"batch_size": 1, "segment_length": 2, **settings})


def test_repeating_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="`documents` must hold a text with a target"):
        next(DocumentStreams([[1], []], 1, 2, repeat=True).segments())


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
    with pytest.raises(ValueError, match="`vocab_size` 10\\), but has 10 at position 1"):
        check_frequency_order([3, 10], CLUSTERS)

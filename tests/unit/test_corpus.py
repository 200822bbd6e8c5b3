"""Corpora: the same ids from files, data sets and streams; ids that stay on disk read like a list."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_txl import TransfoXLTokenizer
from hf_txl.corpus import tokenize_corpus
from hf_txl.data import TokenStreams
from hf_txl.token_ids import ColumnTokens, as_tokens, read_tokens
from hf_txl.tokenization_transfo_xl import build_vocabulary, encode_file

datasets = pytest.importorskip("datasets")

LINES = ["the cat sat , and the dog sat .\n", "\n", "  an é is é\n", "the end , the end\n", "no line break"]
SPECIAL = {
    "pretokenized": ("<eos>", "<unk>"),
    "moses": ("<eos>", "<unk>"),
    "characters": ("<unk>",),
    "bytes": ("<unk>",),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def tokenizer_of(mode: str) -> TransfoXLTokenizer:
    symbols = build_vocabulary(["".join(LINES[:3])], mode, special=SPECIAL[mode])
    return TransfoXLTokenizer.from_vocabulary(symbols, mode)


@pytest.mark.parametrize("mode", SPECIAL)
def test_a_corpus_of_files_has_the_ids_of_the_files_in_order(mode: str, text_file: Path, tmp_path: Path) -> None:
    """Each line of a file is a row; compressed files too. `encode_file` is tested against the original code."""
    tokenizer = tokenizer_of(mode)
    compressed = tmp_path / "more.txt.gz"
    compressed.write_bytes(gzip.compress("".join(LINES[:2]).encode()))
    corpus = tokenize_corpus([text_file, compressed], tokenizer)
    more = tmp_path / "more.txt"
    more.write_text("".join(LINES[:2]), encoding="utf-8")
    expected = [*encode_file(tokenizer, text_file), *encode_file(tokenizer, more)]
    assert len(corpus) == len(LINES) + 2
    assert list(chain.from_iterable(corpus["input_ids"])) == expected
    assert as_tokens(corpus)[:].tolist() == expected


@pytest.mark.parametrize("num_proc", [None, 2, 50])
def test_several_processes_give_the_same_corpus(num_proc: int | None) -> None:
    tokenizer = tokenizer_of("pretokenized")
    rows = datasets.Dataset.from_dict({"text": LINES * 3, "other": range(15)})
    corpus = tokenize_corpus(rows, tokenizer, num_proc=num_proc)
    assert corpus.column_names == ["input_ids"]
    expected = [tokenizer(line)["input_ids"] + [0] for line in LINES * 3]
    assert list(corpus["input_ids"]) == expected


def test_a_streamed_corpus_is_the_same_and_can_be_read_again(text_file: Path) -> None:
    tokenizer = tokenizer_of("characters")
    stored = tokenize_corpus(text_file, tokenizer)
    streamed = tokenize_corpus(text_file, tokenizer, streaming=True)
    assert isinstance(streamed, datasets.IterableDataset)
    for _ in range(2):
        assert [row["input_ids"] for row in streamed] == list(stored["input_ids"])


def test_a_byte_order_mark_is_no_part_of_a_text(text_file: Path, tmp_path: Path) -> None:
    """As some editors put before it: not of a corpus, not of a vocabulary that is counted."""
    marked = tmp_path / "marked.txt"
    marked.write_bytes(b"\xef\xbb\xbf" + text_file.read_bytes())
    for mode in ("pretokenized", "moses", "characters"):
        tokenizer = tokenizer_of(mode)
        plain = list(tokenize_corpus(text_file, tokenizer)["input_ids"])
        assert list(tokenize_corpus(marked, tokenizer)["input_ids"]) == plain
        assert encode_file(tokenizer, marked).tolist() == list(chain.from_iterable(plain))
        assert build_vocabulary([marked], mode) == build_vocabulary([text_file], mode)


@pytest.mark.parametrize("name", ["train[1].txt", "t*.txt", "t?ain1.txt"])
def test_a_file_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    (tmp_path / "train1.txt").write_text("wrong\n", encoding="utf-8")
    (tmp_path / name).write_text("right right\n", encoding="utf-8")
    tokenizer = TransfoXLTokenizer.from_vocabulary(["<unk>", "right", "wrong"], "pretokenized")
    for streaming in (False, True):
        corpus = tokenize_corpus(tmp_path / name, tokenizer, streaming=streaming, line_end=None)
        assert [row["input_ids"] for row in corpus] == [[1, 1]]


def test_line_tokens_can_be_chosen(text_file: Path) -> None:
    tokenizer = tokenizer_of("pretokenized")
    plain = tokenize_corpus(text_file, tokenizer, line_end=None)
    assert list(plain["input_ids"]) == [tokenizer(line)["input_ids"] for line in LINES]


def test_documents_of_another_column() -> None:
    tokenizer = tokenizer_of("pretokenized")
    rows = datasets.Dataset.from_dict({"body": ["the cat\nsat", "the end"]})
    corpus = tokenize_corpus(rows, tokenizer, text_column="body")
    assert list(corpus["input_ids"]) == [tokenizer(text)["input_ids"] + [0] for text in ("the cat sat", "the end")]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("pretokenized")
    with pytest.raises(
        ValueError, match=r"`source` must be text files or a data set, but these are not files: .*absent"
    ):
        tokenize_corpus(tmp_path / "absent.txt", tokenizer)
    with pytest.raises(ValueError, match="`source` must be text files"):
        tokenize_corpus([], tokenizer)
    with pytest.raises(
        ValueError, match=r"`text_column` must be a column of the data set \(\['body'\]\), but is 'text'"
    ):
        tokenize_corpus(datasets.Dataset.from_dict({"body": ["a"]}), tokenizer)


ROWS = [[3, 1, 4], [], [1], [5, 9, 2, 6, 5], [3, 5], [], [8, 9, 7]]


def stored(rows: list[list[int]], folder: Path, rows_per_chunk: int) -> Any:
    """A data set on disk, in chunks of so many rows."""
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    pieces = [
        datasets.Dataset.from_dict({"input_ids": rows[start : start + rows_per_chunk]}, features=features)
        for start in range(0, len(rows), rows_per_chunk)
    ]
    datasets.concatenate_datasets(pieces).save_to_disk(folder)
    return datasets.load_from_disk(folder)


VIEWS: dict[str, tuple[Callable[[Any], Any], list[list[int]]]] = {
    "whole": (lambda dataset: dataset, ROWS),
    "range": (lambda dataset: dataset.select(range(2, 6)), ROWS[2:6]),
    "selection": (lambda dataset: dataset.select([6, 0, 3]), [ROWS[6], ROWS[0], ROWS[3]]),
    "filtered": (lambda dataset: dataset.filter(lambda row: len(row["input_ids"]) > 2), [ROWS[0], ROWS[3], ROWS[6]]),
    "in torch's format": (lambda dataset: dataset.with_format("torch"), ROWS),
}


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 7])
@pytest.mark.parametrize("view", VIEWS)
def test_a_column_reads_like_one_list(view: str, rows_per_chunk: int, tmp_path: Path) -> None:
    change, rows = VIEWS[view]
    expected = list(chain.from_iterable(rows))
    tokens = ColumnTokens(change(stored(ROWS, tmp_path / "rows", rows_per_chunk)))
    assert len(tokens) == len(expected)
    for start in range(len(expected) + 1):
        for stop in range(len(expected) + 2):
            assert tokens[start:stop].tolist() == expected[start:stop]
    assert tokens[:].dtype == np.int64
    assert tokens[-3:].tolist() == expected[-3:]


def test_texts_and_tokenizers_that_are_none_are_refused() -> None:
    tokenizer = TransfoXLTokenizer.from_vocabulary(["<unk>", "a"], "characters")
    rows = datasets.Dataset.from_dict({"text": ["a", None]})
    with pytest.raises(ValueError, match="`text_column` 'text' must hold texts in every row, but has .*NoneType"):
        tokenize_corpus(rows, tokenizer)
    with pytest.raises(ValueError, match="`source` must be text files or a data set, but is None"):
        tokenize_corpus(None, tokenizer)
    with pytest.raises(ValueError, match="`tokenizer` must be a tokenizer, but is None"):
        tokenize_corpus(rows, None)


@pytest.mark.parametrize("rows", [[[1, None]], [[1], None]])
def test_a_column_with_nulls_is_refused(rows: list[Any]) -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": rows})
    with pytest.raises(
        ValueError, match="`text` must have an integer in every place of 'input_ids', but it has nulls"
    ):
        ColumnTokens(dataset, name="text")


def test_a_column_of_anything_but_lists_of_integers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`dataset` must have a column 'input_ids', but has \['text'\]"):
        ColumnTokens(datasets.Dataset.from_dict({"text": ["a"]}))
    for values in ([[0.5]], ["a"], [1]):
        with pytest.raises(ValueError, match="`dataset` must have lists of integers in 'input_ids', but it has"):
            ColumnTokens(datasets.Dataset.from_dict({"input_ids": values}))
    with pytest.raises(ValueError, match="step 1, but has step 2"):
        ColumnTokens(datasets.Dataset.from_dict({"input_ids": [[1, 2]]}))[::2]


def test_reading_copies_and_mapped_files_stay_mapped(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", dtype=np.uint16, mode="r")
    assert as_tokens(mapped) is mapped
    ids = torch.arange(10, dtype=torch.int32)
    for tokens in (as_tokens(mapped), as_tokens(ids), as_tokens(list(range(10)))):
        part = read_tokens(tokens, 2, 5)
        assert part.tolist() == [2, 3, 4]
        assert part.dtype == torch.long
        part.zero_()
        assert read_tokens(tokens).tolist() == list(range(10))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc (Linux)")
def test_a_large_corpus_is_read_without_being_loaded(tmp_path: Path) -> None:
    """100 MB of ids on disk; what a process holds of its own grows by less than a tenth of that."""

    def own_memory() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    rows = [np.arange(number, number + 500_000, dtype=np.int32) for number in range(5)]
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    pieces = [datasets.Dataset.from_dict({"input_ids": [row]}, features=features) for row in rows]
    datasets.concatenate_datasets(pieces * 10).save_to_disk(tmp_path / "corpus", max_shard_size="20MB")
    del rows, pieces
    corpus = datasets.load_from_disk(tmp_path / "corpus")
    streams = TokenStreams(corpus, batch_size=4, segment_length=5000)
    next(streams.segments())
    before = own_memory()
    total = sum(int(segment["input_ids"].numel()) for segment in streams.segments())
    assert total == 4 * (25_000_000 // 4 - 1)
    assert own_memory() - before < 10_000_000

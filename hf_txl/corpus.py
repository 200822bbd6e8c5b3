"""Corpora: text files and data sets tokenized into Arrow files.

A text is tokenized once, in parallel, into an Arrow file of the `datasets` library. The file is memory-mapped, so a
corpus may be larger than memory. `token_ids` and `data` read these files and do not depend on a tokenizer.
"""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .token_ids import COLUMN
from .tokenization_transfo_xl import AUTO, encode_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize_corpus(
    source: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    text_column: str = "text",
    line_start: str | None = AUTO,
    line_end: str | None = AUTO,
    num_proc: int | None = None,
    streaming: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Any:
    """Token ids of a corpus, one list per line of its files or per row of a data set, in the order of the text.

    The ids are those of [`encode_lines`]: with the tokens that begin and end a line where the vocabulary has them, and
    with the line breaks themselves for characters and bytes. The result is kept in the cache of `datasets` and reused
    from there; a progress bar is shown while it is made.

    Args:
        source (path, list of paths, `datasets.Dataset` or `datasets.IterableDataset`):
            UTF-8 text files, also compressed (`.xz`, `.gz`, …), read one after the other; or a data set with a column
            of texts, each row a line or a document.
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer.
        text_column (`str`, defaults to `"text"`): The column of texts.
        line_start, line_end (`str`, *optional*): Other tokens around each line or row; None for no token.
        num_proc (`int`, *optional*): Number of processes that tokenize.
        streaming (`bool`, defaults to `False`):
            Tokenize files while they are read, again in every pass, and write nothing.
        cache_dir (path, *optional*): Where the Arrow files of text files go. Default: the cache of `datasets`.

    Returns:
        `datasets.Dataset`, or `datasets.IterableDataset` if `streaming` or if the source is one, with one column
        `input_ids` of int32 lists.

    Raises:
        ValueError: if `source`, `tokenizer` or `text_column` is not as described, or the text is not UTF-8.
    """
    from datasets import Features, IterableDataset, List, Value

    if not callable(tokenizer):
        raise ValueError(f"`tokenizer` must be a tokenizer, but is {tokenizer!r}.")
    if not hasattr(source, "column_names"):
        source = _load_files(source, streaming, cache_dir)
        text_column = "text"
    columns = source.column_names
    if columns is not None and text_column not in columns:
        raise ValueError(f"`text_column` must be a column of the data set ({columns}), but is {text_column!r}.")

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if not all(isinstance(text, str) for text in rows[text_column]):
            kinds = sorted({type(text).__name__ for text in rows[text_column]})
            raise ValueError(f"`text_column` {text_column!r} must hold texts in every row, but has {kinds}.")
        lines = encode_lines(tokenizer, rows[text_column], line_start=line_start, line_end=line_end)
        return {COLUMN: list(lines)}

    settings: dict[str, Any] = {"batched": True, "features": Features({COLUMN: List(Value("int32"))})}
    if columns is not None:
        settings["remove_columns"] = columns
    if isinstance(source, IterableDataset):
        return source.map(encode, **settings)
    # no more processes than rows
    num_proc = None if num_proc is None or len(source) == 0 else min(num_proc, len(source))
    return source.map(encode, num_proc=num_proc, desc="tokenizing", **settings)


def _load_files(source: Any, streaming: bool, cache_dir: str | os.PathLike[str] | None) -> Any:
    """Text files as a data set with a column `text`, a line per row, line breaks included."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    paths = _existing_files(source)
    try:
        return load_dataset(
            "text",
            # a name, not a pattern
            data_files=[glob.escape(path) for path in paths],
            split="train",
            keep_linebreaks=True,
            # skips the byte-order mark that some editors write
            encoding="utf-8-sig",
            streaming=streaming,
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except DatasetGenerationError as error:
        raise ValueError(
            f"`source` must be text files in UTF-8, but {paths} could not be read: {error.__cause__ or error}."
        ) from error


def _existing_files(source: Any) -> Sequence[str]:
    if source is None:
        raise ValueError("`source` must be text files or a data set, but is None.")
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    missing = [str(path) for path in paths if not Path(path).is_file()]
    if missing or not paths:
        raise ValueError(f"`source` must be text files or a data set, but these are not files: {missing or source}.")
    if not any(Path(path).stat().st_size for path in paths):
        raise ValueError(f"`source` must hold text, but these files are empty: {[str(path) for path in paths]}.")
    return [str(path) for path in paths]


__all__ = ["tokenize_corpus"]

"""Corpora: texts as ids that stay on disk.

A text is tokenised once, in parallel, into an Arrow file of the `datasets` library, which is mapped into memory and
read where it lies: a corpus may be larger than memory. It is apart from `data`, which lays ids out in streams and
neither knows tokenizers nor needs `datasets`.
"""

import glob
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from .tokenization_transfo_xl import AUTO, encode_lines

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

COLUMN = "input_ids"
# ids of a text that are checked at a time: 32 MB
CHECKED_TOGETHER = 2**22


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
    with the line breaks themselves for characters and bytes. The result lies in the cache of `datasets` and is found
    there the next time; progress is shown while it is made.

    Args:
        source (path, list of paths, `datasets.Dataset` or `datasets.IterableDataset`):
            UTF-8 text files, also compressed (`.xz`, `.gz`, …), read one after the other; or a data set with a column
            of texts, each row a line or a document.
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer.
        text_column (`str`, defaults to `"text"`): The column of texts.
        line_start, line_end (`str`, *optional*): Other tokens around each line or row; None for no token.
        num_proc (`int`, *optional*): Processes that tokenise.
        streaming (`bool`, defaults to `False`):
            Tokenise files while they are read, again in every pass, and write nothing.
        cache_dir (path, *optional*): Where the Arrow files of text files go. Default: the cache of `datasets`.

    Returns:
        `datasets.Dataset`, or `datasets.IterableDataset` if `streaming` or if the source is one, with one column
        `input_ids` of int32 lists.
    """
    from datasets import Features, IterableDataset, List, Value, load_dataset
    from datasets.exceptions import DatasetGenerationError

    if not callable(tokenizer):
        raise ValueError(f"`tokenizer` must be a tokenizer, but is {tokenizer!r}.")
    if not hasattr(source, "column_names"):
        if source is None:
            raise ValueError("`source` must be text files or a data set, but is None.")
        paths = [source] if isinstance(source, str | os.PathLike) else list(source)
        missing = [str(path) for path in paths if not Path(path).is_file()]
        if missing or not paths:
            raise ValueError(
                f"`source` must be text files or a data set, but these are no files: {missing or source}."
            )
        if not any(Path(path).stat().st_size for path in paths):
            raise ValueError(f"`source` must hold text, but these files are empty: {[str(path) for path in paths]}.")
        text_column = "text"
        try:
            source = load_dataset(
                "text",
                # a name, not a pattern
                data_files=[glob.escape(str(path)) for path in paths],
                split="train",
                keep_linebreaks=True,
                # without the mark that some editors put before it
                encoding="utf-8-sig",
                streaming=streaming,
                cache_dir=None if cache_dir is None else str(cache_dir),
            )
        except DatasetGenerationError as error:
            raise ValueError(
                f"`source` must be text files in UTF-8, but {[str(path) for path in paths]} could not be read: "
                f"{error.__cause__ or error}."
            ) from error
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
    # no more processes than rows to share out
    num_proc = None if num_proc is None or len(source) == 0 else min(num_proc, len(source))
    return source.map(encode, num_proc=num_proc, desc="tokenizing", **settings)


class ColumnTokens:
    """A column of lists of a `datasets.Dataset` as one long sequence of ids, read from the mapped file on demand.

    Rows follow each other in the order of the data set. Supports `len` and slices.

    Args:
        dataset (`datasets.Dataset`): Has the column.
        column (`str`, defaults to `"input_ids"`): Lists of integers.
        name (`str`, defaults to `"dataset"`): What messages call it.
    """

    def __init__(self, dataset: "Dataset", column: str = COLUMN, name: str = "dataset"):
        import pyarrow

        if column not in dataset.column_names:
            raise ValueError(f"`{name}` must have a column {column!r}, but has {dataset.column_names}.")
        if dataset._indices is not None:
            # a selection or another order, which the file does not have
            dataset = dataset.flatten_indices()
        self._chunks = dataset.data.column(column).chunks
        kind = dataset.data.column(column).type
        if not hasattr(kind, "value_type") or not pyarrow.types.is_integer(kind.value_type):
            raise ValueError(f"`{name}` must have lists of integers in {column!r}, but it has {kind}.")
        if any(chunk.null_count or chunk.flatten().null_count for chunk in self._chunks):
            raise ValueError(f"`{name}` must have an integer in every place of {column!r}, but it has nulls.")
        # (flattening copies nothing)
        lengths = [len(chunk.flatten()) for chunk in self._chunks]
        # where each chunk begins in the whole sequence, and its end
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """The ids from `part.start` to `part.stop`, a copy of type int64."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"`part` must be a slice of step 1, but has step {step}.")
        ids = np.empty(max(0, stop - start), dtype=np.int64)
        chunk = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begins, ends = self._starts[chunk], self._starts[chunk + 1]
            upto = min(stop, int(ends))
            # the lists of a chunk lie behind each other
            values = self._chunks[chunk].flatten()[start - begins : upto - begins]
            ids[len(ids) - (stop - start) : len(ids) - (stop - upto)] = values.to_numpy(zero_copy_only=False)
            start, chunk = upto, chunk + 1
        return ids


Tokens: TypeAlias = "torch.Tensor | np.ndarray | ColumnTokens"


def as_tokens(token_ids: Any, name: str = "token_ids") -> Tokens:
    """A text as something with a length and slices; nothing is copied that need not be.

    Args:
        token_ids (`torch.Tensor` or array of shape `(num_tokens,)`, sequence of `int`, or `datasets.Dataset`):
            The text. An array may be mapped from a file (`np.memmap`), and of any integer type.
        name (`str`, defaults to `"token_ids"`): What messages call it.
    """
    if isinstance(token_ids, ColumnTokens):
        return token_ids
    if hasattr(token_ids, "column_names") and hasattr(token_ids, "data"):
        return ColumnTokens(token_ids, name=name)
    if isinstance(token_ids, np.ndarray):
        shape, is_integer = token_ids.shape, np.issubdtype(token_ids.dtype, np.integer)
        tokens: torch.Tensor | np.ndarray = token_ids
    else:
        try:
            tokens = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"`{name}` must be a list, a tensor or an array of token ids, or a data set with a column {COLUMN!r}, "
                f"but is a {type(token_ids).__name__} of something else: {error}."
            ) from error
        shape = tuple(tokens.shape)
        is_integer = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if len(shape) != 1:
        raise ValueError(f"`{name}` must have one dimension, time, but has shape {list(shape)}.")
    if shape[0] and not is_integer:
        raise ValueError(f"`{name}` must hold integers, but has dtype {tokens.dtype}.")
    return tokens


def read_tokens(tokens: Tokens, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Part of a text as a new tensor of type int64, on the CPU."""
    part = tokens[start:stop]
    if isinstance(part, torch.Tensor):
        return part.to("cpu", torch.long, copy=True)
    return torch.from_numpy(np.array(part, dtype=np.int64))


def check_token_ids(name: str, tokens: Tokens, vocab_size: int) -> None:
    """Refuse a text with ids that a model does not have; it is read once.

    Args:
        name (`str`): What the message calls it.
        tokens: The text, as [`as_tokens`] gives it.
        vocab_size (`int`): Of the model.
    """
    for start in range(0, len(tokens), CHECKED_TOGETHER):
        part = read_tokens(tokens, start, start + CHECKED_TOGETHER)
        wrong = ((part < 0) | (part >= vocab_size)).nonzero()
        if len(wrong):
            position = int(wrong[0])
            raise ValueError(
                f"`{name}` must hold ids between 0 and {vocab_size - 1} (`vocab_size` {vocab_size}), but has "
                f"{int(part[position])} at position {start + position}. Is it from another tokenizer?"
            )


__all__ = ["ColumnTokens", "as_tokens", "check_token_ids", "read_tokens", "tokenize_corpus"]

"""Texts as token ids: one interface to lists, tensors, memory-mapped arrays and columns of data sets.

This module does not depend on the source of the ids: `corpus` makes them with a tokenizer, `data` lays them out in
streams.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from datasets import Dataset

COLUMN = "input_ids"
# ids of a text that are checked at a time: 32 MB
CHECKED_TOGETHER = 2**22


class ColumnTokens:
    """A column of lists of a `datasets.Dataset` as one long sequence of ids, read from the mapped file on demand.

    Rows are concatenated in the order of the data set. Supports `len` and slices.

    Args:
        dataset (`datasets.Dataset`): Has the column.
        column (`str`, defaults to `"input_ids"`): The column of lists of integers.
        name (`str`, defaults to `"dataset"`): Name of the argument, for messages.
    """

    def __init__(self, dataset: "Dataset", column: str = COLUMN, name: str = "dataset"):
        import pyarrow

        if column not in dataset.column_names:
            raise ValueError(f"`{name}` must have a column {column!r}, but has {dataset.column_names}.")
        if dataset._indices is not None:
            # a selection or permutation, which is not materialised in the file
            dataset = dataset.flatten_indices()
        self._chunks = dataset.data.column(column).chunks
        kind = dataset.data.column(column).type
        if not hasattr(kind, "value_type") or not pyarrow.types.is_integer(kind.value_type):
            raise ValueError(f"`{name}` must have lists of integers in {column!r}, but it has {kind}.")
        if any(chunk.null_count or chunk.flatten().null_count for chunk in self._chunks):
            raise ValueError(f"`{name}` must have an integer in every place of {column!r}, but it has nulls.")
        # (flattening copies nothing)
        lengths = [len(chunk.flatten()) for chunk in self._chunks]
        # offset of each chunk in the whole sequence, and its end
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
            # the lists of a chunk are contiguous
            values = self._chunks[chunk].flatten()[start - begins : upto - begins]
            ids[len(ids) - (stop - start) : len(ids) - (stop - upto)] = values.to_numpy(zero_copy_only=False)
            start, chunk = upto, chunk + 1
        return ids


Tokens: TypeAlias = "torch.Tensor | np.ndarray | ColumnTokens"


def as_tokens(token_ids: Any, name: str = "token_ids") -> Tokens:
    """A text with a length and slices, without a copy where possible.

    Args:
        token_ids (`torch.Tensor` or array of shape `(num_tokens,)`, sequence of `int`, or `datasets.Dataset`):
            The text. An array may be mapped from a file (`np.memmap`), and of any integer type.
        name (`str`, defaults to `"token_ids"`): Name of the argument, for messages.
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
                f"but is a {type(token_ids).__name__} that cannot be read as one: {error}."
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
    """Refuse a text with ids outside the vocabulary, which is read once, in parts.

    Args:
        name (`str`): What the message calls it.
        tokens: The text, as [`as_tokens`] gives it.
        vocab_size (`int`): Vocabulary size of the model.

    Raises:
        ValueError: with the first such id and its position.
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


def checked_tokens(name: str, token_ids: Any, vocab_size: int) -> torch.Tensor:
    """A whole text as a new tensor of type int64, whose ids the model has.

    Args:
        name (`str`): Name of the argument, for messages.
        token_ids: The text, as for [`as_tokens`].
        vocab_size (`int`): Vocabulary size of the model.

    Returns:
        `torch.Tensor` of shape `(num_tokens,)`, on the CPU.
    """
    tokens = as_tokens(token_ids, name)
    check_token_ids(name, tokens, vocab_size)
    return read_tokens(tokens)


__all__ = ["ColumnTokens", "as_tokens", "check_token_ids", "checked_tokens", "read_tokens"]

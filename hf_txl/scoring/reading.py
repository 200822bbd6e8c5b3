"""How all scores read texts: without gradients, in batches of similar lengths, segment by segment with a memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..memory_transfo_xl import TransfoXLMemory
from ..token_ids import checked_tokens


@contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; afterwards, the former mode of every module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def token_lists(name: str, texts: Sequence[Any], vocab_size: int) -> list[torch.Tensor]:
    """Ids of each text, checked; messages call them `name[index]`."""
    return [checked_tokens(f"{name}[{index}]", text, vocab_size) for index, text in enumerate(texts)]


def segments(
    rows: Sequence[torch.Tensor], segment_length: int, device: torch.device
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Cut rows, sorted by decreasing length, into segments.

    Rows that have ended are left out, so only the last segment of a row has padding, on the right. No token attends to
    it, so no mask is needed, and the row's memory is no longer read.

    Yields:
        Number of tokens of each row that continues, and ids `(continuing rows, time)`, right-padded with 0.
    """
    for start in range(0, len(rows[0]), segment_length):
        pieces = [row[start : start + segment_length] for row in rows if len(row) > start]
        yield [len(piece) for piece in pieces], torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(device)


def continuing(memory: TransfoXLMemory, num_rows: int) -> TransfoXLMemory:
    """The memory of the first rows, which are the longest."""
    return memory if memory.batch_size in (None, num_rows) else memory.select(range(num_rows))


def batches_by_length(texts: Sequence[torch.Tensor], batch_size: int) -> Iterator[list[int]]:
    """Indices of texts, longest first, so that rows of a batch have similar lengths."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


__all__ = ["inference"]

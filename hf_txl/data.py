"""Token streams for a model with memory: batches whose rows go on where they stopped.

A memory is meaningful only if row r of a batch continues row r of the batch before it. So a text is cut into as many
contiguous pieces as a batch has rows, and all rows are read in parallel, segment by segment (`LMOrderedIterator` of
the original PyTorch code). It is apart from training since evaluation and other training loops need it too.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

LOSSES = ("full", "half")
# a target that is not scored
IGNORED = -100


def num_unscored(length: int, loss: str) -> int:
    """Positions at the start of a segment that are not scored.

    With `"half"` these are `length // 2`: only the recent half of a segment counts, where a prediction has the most
    before it (section 4.2 and the ablation in Table 6 of [Dai et al., 2019](https://arxiv.org/abs/1901.02860)). The
    middle position of an odd length is scored, so a segment of one token is too. With `"full"` there are none.

    Args:
        length (`int`): Tokens of the segment.
        loss (`str`): `"full"` or `"half"`.
    """
    if loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {list(LOSSES)}, but is {loss!r}.")
    return length // 2 if loss == "half" else 0


def _as_tokens(token_ids: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
    tokens = torch.as_tensor(token_ids)
    if tokens.dim() != 1:
        raise ValueError(f"`token_ids` must have one dimension, time, but has shape {list(tokens.shape)}.")
    if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise ValueError(f"`token_ids` must hold integers, but has dtype {tokens.dtype}.")
    return tokens.long()


class TokenStreams(IterableDataset):
    """One long text as `batch_size` streams that are read in parallel.

    Row r of a batch reads piece r of the text, `len(token_ids) // batch_size` tokens (what is left over at the end is
    dropped). Every token of a piece but its first is a target exactly once, whatever the segment length; with
    `loss="half"` only those in the recent half of a segment are, and all tokens are read.

    Items come segment-major: all rows of a segment, then all rows of the next. A `DataLoader` with the same
    `batch_size` (`per_device_train_batch_size` of `Trainer`, times the number of processes) thus makes batches whose
    rows continue those of the batch before. Since this is an `IterableDataset`, a `DataLoader` refuses `shuffle=True`
    and `Trainer` does not shuffle. `Trainer` needs `remove_unused_columns=False`, or it drops `shift_labels`. The
    memory starts afresh with each pass over the text, since the next pass begins elsewhere.

    An item holds tensors of shape `(time,)`: `input_ids`; `shift_labels`, the token that follows each of them (in the
    last position: the first of the next segment), on which the model is scored; and `labels`, a copy of `input_ids`,
    by which `Trainer` sees that there is a loss. Given both, the model uses `shift_labels`.

    Args:
        token_ids (`torch.Tensor` of shape `(num_tokens,)` or sequence of `int`): The text.
        batch_size (`int`): Rows of a batch.
        segment_length (`int`): Tokens of a row in one batch.
        drop_last (`bool`, defaults to `False`):
            Leave out the last segment if it is shorter: for training where all shapes must be equal. An evaluation
            keeps it.
        loss (`str`, defaults to `"full"`):
            `"half"` leaves the first half of each segment out of the loss: its `shift_labels` are -100. The rule for
            odd lengths and the source are those of [`num_unscored`]; a shorter last segment is halved by its own
            length.

    Example:

    ```python
    >>> streams = TokenStreams(range(1000), batch_size=4, segment_length=10)
    >>> loader = DataLoader(streams, batch_size=4)
    >>> [batch["input_ids"][1, 0].item() for batch in loader][:3]
    [250, 260, 270]
    ```
    """

    def __init__(
        self,
        token_ids: torch.Tensor | np.ndarray | Sequence[int],
        batch_size: int,
        segment_length: int,
        *,
        drop_last: bool = False,
        loss: str = "full",
    ):
        super().__init__()
        for name, size in (("batch_size", batch_size), ("segment_length", segment_length)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, but is {size!r}.")
        num_unscored(segment_length, loss)
        tokens = _as_tokens(token_ids)
        length = len(tokens) // batch_size
        needed = 1 + (segment_length if drop_last else 1)
        if length < needed:
            raise ValueError(
                f"`token_ids` must hold at least {needed} tokens for each of `batch_size` ({batch_size}) rows, "
                f"{needed * batch_size} in all, but has {len(tokens)}."
            )
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.loss = loss
        # (num_tokens,) -> (batch, length)
        self.rows = tokens[: batch_size * length].view(batch_size, length)
        num_targets = length - 1
        self.num_segments = num_targets // segment_length if drop_last else -(-num_targets // segment_length)

    def __len__(self) -> int:
        """Number of items: segments times rows."""
        return self.num_segments * self.batch_size

    def _segment(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.segment_length
        stop = min(start + self.segment_length, self.rows.shape[1] - 1)
        # copies, so that nobody writes into the text
        input_ids, targets = self.rows[:, start:stop].clone(), self.rows[:, start + 1 : stop + 1].clone()
        targets[:, : num_unscored(stop - start, self.loss)] = IGNORED
        return {"input_ids": input_ids, "shift_labels": targets, "labels": input_ids.clone()}

    def segments(self) -> Iterator[dict[str, torch.Tensor]]:
        """Whole batches, for loops without a `DataLoader`: the entries of an item, of shape `(batch_size, time)`."""
        for index in range(self.num_segments):
            yield self._segment(index)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # a loader takes whole batches from its workers in turn, so each makes every n-th segment
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, self.num_segments, step):
            segment = self._segment(index)
            for row in range(self.batch_size):
                yield {name: tensor[row] for name, tensor in segment.items()}


def check_frequency_order(token_ids: torch.Tensor | np.ndarray | Sequence[int], config: Any) -> list[float]:
    """Warn where a cluster of the vocabulary is used more than a bucket before it.

    Adaptive embedding and softmax expect a vocabulary sorted by falling frequency: tokens below the first cutoff have
    the widest vectors and cost least, those of the last cluster the narrowest. With `vocab_size=100` and
    `cutoffs=[10, 50]`, ids 0 to 9 should be the most frequent tokens of the training text and 50 to 99 the rarest.

    Args:
        token_ids (`torch.Tensor` of shape `(num_tokens,)` or sequence of `int`): The training text, or much of it.
        config (`TransfoXLConfig`): Configuration with `bucket_ends`.

    Returns:
        `list[float]`: How often a token of each bucket occurs on average: occurrences divided by bucket size.
    """
    tokens = _as_tokens(token_ids)
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
        raise ValueError(
            f"`token_ids` must be between 0 and {config.vocab_size - 1} (`vocab_size` {config.vocab_size}), but has "
            f"values from {int(tokens.min())} to {int(tokens.max())}."
        )
    counts = torch.bincount(tokens, minlength=config.vocab_size)
    ends = config.bucket_ends
    starts = [0, *ends[:-1]]
    rates = [counts[start:end].sum().item() / (end - start) for start, end in zip(starts, ends, strict=True)]
    wrong = [bucket for bucket in range(1, len(rates)) if rates[bucket] > min(rates[:bucket])]
    if wrong:
        table = "; ".join(
            f"ids {start} to {end - 1}: {rate:.4g}" for start, end, rate in zip(starts, ends, rates, strict=True)
        )
        warnings.warn(
            f"`cutoffs` {ends[:-1]} expect a vocabulary sorted by falling frequency, but cluster(s) {wrong} are used "
            f"more than a bucket before them. Average occurrences per token: {table}. Sort the vocabulary by "
            "frequency, or use `cutoffs=[]`; the model is right either way, but slower or worse than it could be.",
            stacklevel=2,
        )
    return rates


__all__ = ["TokenStreams", "check_frequency_order", "num_unscored"]

"""Token streams for a model with memory: each batch row continues the same row of the batch before.

A memory is meaningful only if row r of a batch continues row r of the batch before it. So a text is cut into as many
contiguous pieces as a batch has rows, and all rows are read in parallel, segment by segment (`LMOrderedIterator` of
the original PyTorch code). Training, evaluation and other training loops use the same streams.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import IterableDataset, get_worker_info

from .token_ids import COLUMN, as_tokens, checked_tokens, read_tokens

LOSSES = ("full", "half")
# random segment lengths: `std` and `min_len` of the original's `get_varlen_iter`
DEVIATION = 5
SHORTEST = 5
# rows of a data set
ROWS_READ_TOGETHER = 64
# a target that is not scored
IGNORED = -100


def num_unscored(length: int, loss: str) -> int:
    """Positions at the start of a segment that are not scored.

    With `"half"` these are `length // 2`: only the recent half of a segment is scored, where predictions have most
    context (section 4.2 and the ablation in Table 6 of [Dai et al., 2019](https://arxiv.org/abs/1901.02860)). The
    middle position of an odd length is scored, so a segment of one token is too. With `"full"` there are none.

    Args:
        length (`int`): Tokens of the segment.
        loss (`str`): `"full"` or `"half"`.
    """
    if loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {list(LOSSES)}, but is {loss!r}.")
    return length // 2 if loss == "half" else 0


class TokenStreams(IterableDataset[dict[str, torch.Tensor]]):
    """One long text as `batch_size` streams that are read in parallel.

    Row r of a batch reads piece r of the text, `len(token_ids) // batch_size` tokens (the remainder at the end is
    dropped). Every token of a piece but its first is a target exactly once, whatever the segment length, so a piece of
    N tokens has N - 1 targets; with `loss="half"` only those in the recent half of a segment are, and all tokens are
    read.

    Items come segment-major: all rows of a segment, then all rows of the next. A `DataLoader` with the same
    `batch_size` (`per_device_train_batch_size` of `Trainer`, times the number of processes) thus makes batches whose
    rows continue those of the batch before. Since this is an `IterableDataset`, a `DataLoader` refuses `shuffle=True`
    and `Trainer` does not shuffle. `Trainer` needs `remove_unused_columns=False`, or it drops `shift_labels`. The
    memory must be reset for each pass over the text, since the next pass begins elsewhere.

    An item holds tensors of shape `(time,)`: `input_ids`; `shift_labels`, the token that follows each of them (in the
    last position: the first of the next segment), on which the model is scored; and `labels`, a copy of `input_ids`,
    by which `Trainer` recognises that there is a loss. Given both, the model uses `shift_labels`.

    Args:
        token_ids (`torch.Tensor` or array of shape `(num_tokens,)`, sequence of `int`, or `datasets.Dataset`):
            The text. A data set has a column `input_ids` of lists, which follow each other
            ([`~hf_txl.corpus.tokenize_corpus`] makes one); it is read from its file, as is an `np.memmap`.
        batch_size (`int`): Rows of a batch.
        segment_length (`int`): Tokens of a row in one batch.
        drop_last (`bool`, defaults to `False`):
            Leave out the last segment if it is shorter: for training where all shapes must be equal. Evaluation
            keeps it.
        loss (`str`, defaults to `"full"`):
            `"half"` leaves the first half of each segment out of the loss: its `shift_labels` are -100. The rule for
            odd lengths is that of [`num_unscored`]; a shorter last segment is halved by its own length.
        varlen (`bool`, defaults to `False`):
            Segments of random length, the original's `--varlen`: normally distributed around `segment_length`, in one
            case of twenty around half of it, with a standard deviation of 5, at least 5 and at most
            `segment_length + 15` tokens. Every epoch has the same lengths in another order.
        seed (`int`, defaults to 0): Seed of these lengths.
        mark_starts (`bool`, defaults to `False`):
            Add `reset_memory` to each item, a boolean of shape `()`: whether its row begins here, so that its memory
            must be reset before the segment is read. True in the first segment.

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
        token_ids: Any,
        batch_size: int,
        segment_length: int,
        *,
        drop_last: bool = False,
        loss: str = "full",
        varlen: bool = False,
        seed: int = 0,
        mark_starts: bool = False,
    ):
        super().__init__()
        check_sizes(batch_size=batch_size, segment_length=segment_length)
        num_unscored(segment_length, loss)
        self.tokens = as_tokens(token_ids)
        self.row_length = len(self.tokens) // batch_size
        longest = segment_length + 3 * DEVIATION if varlen else segment_length
        needed = 1 + (longest if drop_last else 1)
        if self.row_length < needed:
            raise ValueError(
                f"`token_ids` must hold at least {needed} tokens for each of `batch_size` ({batch_size}) rows, "
                f"{needed * batch_size} in all, but has {len(self.tokens)}."
            )
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.loss = loss
        self.seed = seed
        self.mark_starts = mark_starts
        # number of targets before each segment, and in all
        self._starts = _segment_starts(self.row_length - 1, segment_length, drop_last, seed if varlen else None)
        self.num_segments = len(self._starts) - 1
        self._varlen = varlen
        # in shared memory, so that persistent worker processes see it change
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()
        self._ordered: tuple[int, np.ndarray] = 0, self._starts

    def settings(self) -> dict[str, Any]:
        """The settings that determine how a text becomes streams, as JSON values."""
        return {
            **{"streams": type(self).__name__, "segment_length": self.segment_length, "loss": self.loss},
            **{"varlen": self._varlen, "seed": self.seed, "segments": self.num_segments},
        }

    def __len__(self) -> int:
        """Number of items: segments times rows."""
        return self.num_segments * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass over the text; with `varlen`, the order of segment lengths depends on it."""
        self._epoch.fill_(epoch)

    def _starts_of_epoch(self) -> np.ndarray:
        epoch = int(self._epoch)
        if self._varlen and self._ordered[0] != epoch:
            # the last segment is the remainder; it stays in place
            lengths = np.diff(self._starts)
            np.random.default_rng([self.seed, epoch]).shuffle(lengths[:-1])
            self._ordered = epoch, np.concatenate([[0], np.cumsum(lengths)])
        return self._ordered[1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Item `index` of the pass: row `index % batch_size` of segment `index // batch_size`."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must be between 0 and {len(self) - 1}, but is {index}.")
        segment, row = divmod(index, self.batch_size)
        starts = self._starts_of_epoch()
        first = row * self.row_length
        # one token more than is read: the last target
        ids = read_tokens(self.tokens, first + int(starts[segment]), first + int(starts[segment + 1]) + 1)
        input_ids, targets = ids[:-1], ids[1:].clone()
        targets[: num_unscored(len(targets), self.loss)] = IGNORED
        item = {"input_ids": input_ids, "shift_labels": targets, "labels": input_ids.clone()}
        if self.mark_starts:
            item["reset_memory"] = torch.tensor(segment == 0)
        return item

    def segments(self) -> Iterator[dict[str, torch.Tensor]]:
        """Whole batches, for loops without a `DataLoader`: the entries of an item, of shape `(batch_size, time)`."""
        for first in range(0, len(self), self.batch_size):
            yield _stack([self[index] for index in range(first, first + self.batch_size)])

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        first, step = _share_of_worker()
        for segment in range(first, self.num_segments, step):
            for row in range(self.batch_size):
                yield self[segment * self.batch_size + row]


def _share_of_worker() -> tuple[int, int]:
    """First segment of a worker process, and steps to its next: a loader takes whole batches from each in turn."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not ints of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"`{name}` must be an int of at least 1, but is {size!r}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy does not accept."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` must be between 0 and 2**32 - 1, but is {seed}.")


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _segment_starts(num_targets: int, segment_length: int, drop_last: bool, seed: int | None) -> np.ndarray:
    """Where the segments of a row begin and the last one ends; of random length if there is a seed."""
    if seed is None:
        starts = np.arange(0, num_targets + 1, segment_length)
    else:
        generator = np.random.default_rng(seed)
        # `get_varlen_iter` of the original code; more than enough, since few are shorter than the normal length
        count = 2 * num_targets // max(segment_length, SHORTEST) + 10
        means = np.where(generator.random(count) < 0.95, segment_length, segment_length / 2)
        lengths = generator.normal(means, DEVIATION).astype(np.int64)
        ends = np.cumsum(lengths.clip(SHORTEST, segment_length + 3 * DEVIATION))
        starts = np.concatenate([[0], ends[ends <= num_targets]])
    if starts[-1] < num_targets and not drop_last:
        starts = np.append(starts, num_targets)
    return starts


class DocumentStreams(IterableDataset[dict[str, torch.Tensor]]):
    """Many texts as `batch_size` streams: a row whose text has ended continues with the next one.

    For corpora of documents or sentences, which may be larger than memory, and whose number may be unknown
    (`datasets.IterableDataset`). Each text is read by one row, in the order in which rows become free. Items come
    segment-major and have the entries of [`TokenStreams`] and `reset_memory`, a boolean of shape `()`: whether the row
    begins a new stream here, so that its memory must be reset before the segment is read. Where a row has fewer tokens
    than the segment, all rows of the segment have an `attention_mask`, 0 at the right padding, whose `shift_labels`
    are -100.

    Args:
        documents (`Iterable[list[int]]`, `datasets.Dataset` or `datasets.IterableDataset`):
            Token ids of each text; of a data set, its column `input_ids`. It is read again in every epoch.
        batch_size (`int`): Rows of a batch.
        segment_length (`int`): Tokens of a row in one batch.
        separate (`bool`, defaults to `True`):
            Whether each text is a stream of its own: the memory is reset at its start, and a text of n tokens has
            n - 1 targets. Otherwise the texts of a row are concatenated, as the original reads the shuffled sentences
            of the One Billion Word corpus (`LMShuffledIterator`): a row of N tokens in all has N - 1 targets.
        shuffle (`bool`, defaults to `False`):
            Read the texts in another order in every epoch. An `IterableDataset` shuffles by its own `shuffle`.
        seed (`int`, defaults to 0): Seed of the order.
        repeat (`bool`, defaults to `False`):
            Begin the next epoch after the last text, endlessly: for training with a given number of steps.

    Example:

    ```python
    >>> streams = DocumentStreams([[1, 2, 3, 4], [5, 6], [7, 8, 9]], batch_size=2, segment_length=2)
    >>> [segment["input_ids"].tolist() for segment in streams.segments()]
    [[[1, 2], [5, 0]], [[3, 0], [7, 8]]]
    ```
    """

    def __init__(
        self,
        documents: Any,
        batch_size: int,
        segment_length: int,
        *,
        separate: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        repeat: bool = False,
    ):
        super().__init__()
        check_sizes(batch_size=batch_size, segment_length=segment_length)
        if not isinstance(documents, Iterable) or isinstance(documents, Iterator):
            raise ValueError(
                f"`documents` must be iterable more than once, such as a list or a data set, but is a "
                f"{type(documents).__name__}."
            )
        if shuffle and not hasattr(documents, "__getitem__"):
            raise ValueError(
                f"`shuffle` must be False for a {type(documents).__name__}, which has no numbered texts; "
                "a `datasets.IterableDataset` has a method `shuffle`."
            )
        self.documents: Any = documents
        self.batch_size = batch_size
        self.segment_length = segment_length
        self.separate = separate
        self.shuffle = shuffle
        self.seed = seed
        self.repeat = repeat
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next pass over the texts; their order depends on it if they are shuffled."""
        self._epoch.fill_(epoch)

    def settings(self) -> dict[str, Any]:
        """The settings that determine how texts become streams, as JSON values."""
        return {
            **{"streams": type(self).__name__, "segment_length": self.segment_length, "separate": self.separate},
            **{"shuffle": self.shuffle, "seed": self.seed},
        }

    def _texts(self, epoch: int) -> Iterator[torch.Tensor]:
        """The texts of an epoch that have at least one target."""
        documents = self.documents
        if hasattr(documents, "set_epoch"):
            documents.set_epoch(epoch)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(documents)).tolist()
            texts: Iterable[Any] = (documents[index] for index in order)
        elif hasattr(documents, "column_names"):
            # unlike iteration, this does not split a streamed data set among processes
            texts = chain.from_iterable(batch[COLUMN] for batch in documents.iter(ROWS_READ_TOGETHER))
        else:
            texts = documents
        for text in texts:
            ids = read_tokens(as_tokens(text[COLUMN] if isinstance(text, Mapping) else text))
            if len(ids) > (1 if self.separate else 0):
                yield ids

    def segments(self) -> Iterator[dict[str, torch.Tensor]]:
        """Whole batches, for loops without a `DataLoader`: the entries of an item, of shape `(batch_size, time)`."""
        for epoch in count(int(self._epoch)):
            is_empty = True
            for segment in self._segments_of(self._texts(epoch)):
                is_empty = False
                yield segment
            if not self.repeat:
                return
            if is_empty:
                raise ValueError("`documents` must hold a text with a target, of at least 2 tokens, but has none.")

    def _segments_of(self, texts: Iterator[torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        length = self.segment_length
        # per row: the unread tokens, each but the first a target too; and whether nothing of the text was read
        waiting = [torch.empty(0, dtype=torch.long)] * self.batch_size
        is_new = [True] * self.batch_size
        while True:
            rows, reads = [], []
            for row in range(self.batch_size):
                if self.separate and len(waiting[row]) < 2:
                    waiting[row], is_new[row] = next(texts, waiting[row]), True
                while not self.separate and len(waiting[row]) <= length and (text := next(texts, None)) is not None:
                    waiting[row] = torch.cat([waiting[row], text])
                ids, targets = waiting[row][:length], waiting[row][1 : length + 1]
                read = len(targets)
                pads = length - read
                rows.append(
                    {
                        "input_ids": F.pad(ids[:read], (0, pads)),
                        "shift_labels": F.pad(targets, (0, pads), value=IGNORED),
                        "labels": F.pad(ids[:read], (0, pads), value=IGNORED),
                        "reset_memory": torch.tensor(is_new[row]),
                        "attention_mask": F.pad(torch.ones(read, dtype=torch.long), (0, pads)),
                    }
                )
                waiting[row], is_new[row] = waiting[row][read:], False
                reads.append(read)
            if not any(reads):
                return
            batch = _stack(rows)
            if min(reads) == length:
                del batch["attention_mask"]
            yield batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # which row reads a text depends on all texts before, so every worker lays out all and yields its part
        first, step = _share_of_worker()
        for segment in islice(self.segments(), first, None, step):
            for row in range(self.batch_size):
                yield {name: tensor[row] for name, tensor in segment.items()}


def pad_rows(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows on the left, so that they end together.

    Args:
        rows (`list[torch.Tensor]`): Token ids of each row, of any lengths.

    Returns:
        `tuple`: ids, 0 on pads, and a mask, 1 for tokens and 0 for pads, of shape `(rows, longest row)`, int64.
    """
    length = max(map(len, rows))
    ids = torch.stack([F.pad(row.long(), (length - len(row), 0)) for row in rows])
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, (torch.arange(length) >= length - lengths).long()


class DocumentCollator:
    """Makes batches of documents with labels, for `Trainer` and for loops; a classifier reads them in segments.

    Args:
        segment_length, gradient_segments (`int`, *optional*):
            Arguments of [`TransfoXLForSequenceClassification`]'s `forward`, which each batch holds if they are given.

    Each example is a `dict` with `input_ids` (`list[int]`) and `label` or `labels` (`int`, `float` or a list); other
    entries are left out. A batch holds `input_ids` and `attention_mask`, padded on the left, and `labels`.
    """

    def __init__(self, segment_length: int | None = None, gradient_segments: int | None = None):
        given = {"segment_length": segment_length, "gradient_segments": gradient_segments}
        self.settings = {name: size for name, size in given.items() if size is not None}
        check_sizes(**self.settings)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch of these examples."""
        ids, mask = pad_rows([torch.as_tensor(example["input_ids"]) for example in examples])
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **self.settings}
        labels = [example.get("labels", example.get("label")) for example in examples]
        if all(label is not None for label in labels):
            batch["labels"] = torch.tensor(labels)
        return batch


def check_frequency_order(token_ids: Any, config: Any) -> list[float]:
    """Warn if a cluster of the vocabulary is used more often per token than a bucket before it.

    Adaptive embedding and softmax expect a vocabulary sorted by decreasing frequency: tokens below the first cutoff
    have the widest vectors and the cheapest softmax, those of the last cluster the narrowest vectors. With
    `vocab_size=100` and `cutoffs=[10, 50]`, ids 0 to 9 should be the most frequent tokens of the training text and 50
    to 99 the rarest.

    Args:
        token_ids: The training text, or much of it; as for [`TokenStreams`].
        config (`TransfoXLConfig`): Configuration with `bucket_ends`.

    Returns:
        `list[float]`: Mean number of occurrences of a token of each bucket.
    """
    tokens = checked_tokens("token_ids", token_ids, config.vocab_size)
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
            f"`cutoffs` {ends[:-1]} expect a vocabulary sorted by decreasing frequency, but cluster(s) {wrong} are "
            f"used more than a bucket before them. Average occurrences per token: {table}. Sort the vocabulary by "
            "frequency, or use `cutoffs=[]`; the model is correct either way, but slower or less accurate.",
            stacklevel=2,
        )
    return rates


__all__ = ["DocumentStreams", "TokenStreams", "check_frequency_order", "num_unscored"]

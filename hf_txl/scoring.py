"""Scores of texts with memory: perplexity as the paper measures it, sentences, n-best lists, long documents.

All functions read segment by segment with a [`TransfoXLMemory`], in eval mode and without gradients, never build a
(tokens x vocabulary) tensor, and sum in float64. They follow `evaluate` in `eval.py` of the original PyTorch code.
Every function takes the settings of the memory (`mem_len`, `clamp_len`, `same_length`, `memory_init`), by default
those of the model's configuration.

With `same_length=True`, or as long as everything fits into a memory that starts empty, results do not depend on
segment boundaries, unless positions are absolute. Otherwise a token attends to the whole memory and to its own segment
up to itself, so results depend on `segment_length`.
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from .data import IGNORED, check_sizes, num_unscored
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLPreTrainedModel
from .token_ids import checked_tokens


@dataclass(frozen=True)
class StreamScore:
    """Result of [`evaluate_stream`].

    Args:
        loss (`float`): Mean negative log-likelihood in nats per token; a float64 sum over `predictions`.
        predictions (`int`): Scored tokens.
        seconds (`float`): Duration.
        losses (`torch.Tensor` of shape `(batch_size, predictions // batch_size)`, *optional*):
            Negative log-likelihood of each scored token, float32 nats, in the order of the text.
    """

    loss: float
    predictions: int
    seconds: float
    losses: torch.Tensor | None = None

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_token(self) -> float:
        """`loss / ln 2`; with one token per character, bits per character."""
        return self.loss / math.log(2)

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens per second."""
        return self.predictions / self.seconds


@contextmanager
def _inference(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode and no gradients; afterwards, the former mode of every module is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _token_lists(name: str, texts: Sequence[Any], vocab_size: int) -> list[torch.Tensor]:
    return [checked_tokens(f"{name}[{index}]", text, vocab_size) for index, text in enumerate(texts)]


def evaluate_stream(
    model: TransfoXLForCausalLM,
    token_ids: Any,
    *,
    segment_length: int,
    batch_size: int = 1,
    loss: str = "full",
    return_losses: bool = False,
    progress: bool = True,
    **settings: Any,
) -> StreamScore:
    """Mean loss of a long text, read once with a memory: the paper's evaluation.

    The text is cut into `batch_size` contiguous rows, read in parallel (the remainder at the end is dropped). Each
    token of a row but the first is scored exactly once, whatever the segment length: the last one of a segment
    predicts the first one of the next. So `N // batch_size - 1` tokens are scored per row. `batch_size=1` is exact for
    one text; more rows are faster, and each starts with a fresh memory.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        token_ids (`torch.Tensor` or array of shape `(num_tokens,)`, sequence of `int`, or `datasets.Dataset`):
            The text, as for [`~hf_txl.data.TokenStreams`].
        segment_length (`int`): Tokens of a row that are scored in one call.
        batch_size (`int`, defaults to 1): Rows.
        loss (`str`, defaults to `"full"`):
            `"half"` scores only the recent half of each segment, as in the paper's ablation (section 4.2, Table 6):
            of `n` positions the last `n - n // 2`, a shorter last segment by its own length. All tokens are read, and
            `predictions` counts those scored. Which tokens these are depends on `segment_length`.
        return_losses (`bool`, defaults to `False`): Whether to return the loss of every scored token too.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`, `stores`),
            by default the configuration's, and `ext_len` (`int`): tokens of a segment that are read again with the
            next one and enter the memory only then. It defaults to the configuration's, usually 0. Other values cost
            twice the time, and change nothing with `same_length=True`.

    Returns:
        [`StreamScore`]

    Raises:
        ValueError: if the text is too short or holds ids that the model does not have, or a size is out of range.
        TypeError: if `settings` holds anything else.

    Example:

    ```python
    >>> score = evaluate_stream(model, token_ids, segment_length=128, mem_len=1600, clamp_len=1000, same_length=True)
    >>> score.loss, score.perplexity, score.predictions
    ```
    """
    check_sizes(segment_length=segment_length, batch_size=batch_size)
    num_unscored(segment_length, loss)
    ext_len = settings.pop("ext_len", None)
    ext_len = model.config.ext_len if ext_len is None else ext_len
    if ext_len < 0:
        raise ValueError(f"`ext_len` must be 0 or more, but is {ext_len}.")
    rows = _parallel_rows(checked_tokens("token_ids", token_ids, model.config.vocab_size), batch_size).to(model.device)
    memory = model.init_memory(batch_size, **settings)
    num_targets = rows.shape[1] - 1
    total, predictions, kept_losses = 0.0, 0, []
    started = time.perf_counter()
    bar = tqdm(total=batch_size * num_targets, unit="tok", unit_scale=True, desc="evaluating", disable=not progress)
    with _inference(model), bar:
        for start in range(0, num_targets, segment_length):
            stop = min(start + segment_length, num_targets)
            first = max(0, start - ext_len)
            losses = _segment_losses(model, rows[:, first : stop + 1], memory, start - first, ext_len, loss)
            total += losses.double().sum().item()
            predictions += losses.numel()
            if return_losses:
                kept_losses.append(losses)
            bar.update(batch_size * (stop - start))
            bar.set_postfix(loss=f"{total / predictions:.4f}", refresh=False)
    return StreamScore(
        loss=total / predictions,
        predictions=predictions,
        seconds=time.perf_counter() - started,
        losses=torch.cat(kept_losses, dim=1) if return_losses else None,
    )


def _parallel_rows(ids: torch.Tensor, batch_size: int) -> torch.Tensor:
    length = len(ids) // batch_size
    if length < 2:
        raise ValueError(
            f"`token_ids` must hold at least 2 tokens for each of `batch_size` ({batch_size}) rows, "
            f"but has {len(ids)}."
        )
    # (num_tokens,) -> (batch, length)
    return ids[: batch_size * length].view(batch_size, length)


def _segment_losses(
    model: TransfoXLForCausalLM, tokens: torch.Tensor, memory: TransfoXLMemory, num_again: int, ext_len: int, loss: str
) -> torch.Tensor:
    """Losses of the scored tokens of one segment, on the CPU; the memory advances.

    Args:
        tokens: `(batch_size, time + 1)`: `num_again` tokens that were scored before, the segment, and its last target.
        ext_len: Tokens at the end that come again with the next segment; they do not enter the memory yet.
    """
    num_inputs = tokens.shape[1] - 1
    targets = tokens[:, 1:].clone()
    # of the segment itself, what `TokenStreams` leaves out in training
    num_ignored = num_again + num_unscored(num_inputs - num_again, loss)
    targets[:, :num_ignored] = IGNORED
    cache = copy.copy(memory) if ext_len else memory
    output = model(tokens[:, :-1], cache=cache, shift_labels=targets, return_logits=False)
    if ext_len and num_inputs > ext_len:
        model.base_model(tokens[:, : num_inputs - ext_len], cache=memory)
    return output.losses[:, num_ignored:].cpu()


def _segments(
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


def _continuing(memory: TransfoXLMemory, num_rows: int) -> TransfoXLMemory:
    """The memory of the first rows, which are the longest."""
    return memory if memory.batch_size in (None, num_rows) else memory.select(range(num_rows))


def _batches_by_length(texts: Sequence[torch.Tensor], batch_size: int) -> Iterator[list[int]]:
    """Indices of texts, longest first, so that rows of a batch have similar lengths."""
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def score_sequences(
    model: TransfoXLForCausalLM,
    sequences: Sequence[torch.Tensor | Sequence[int]],
    *,
    mode: str = "independent",
    context: torch.Tensor | Sequence[int] | None = None,
    bos_token_id: int | None = None,
    batch_size: int = 16,
    segment_length: int = 512,
    **settings: Any,
) -> torch.Tensor:
    """Log-probability of each of several sequences of any lengths.

    There are two modes:

    - `"independent"`: each sequence is scored with a fresh memory, after the context if there is one. The result does
      not depend on batching or on the order of the list.
    - `"stream"`: the sequences are one text, in order; each is scored given all sequences before it. Their scores add
      up to that of the concatenated text.

    A token is scored if another one precedes it. A sequence of n tokens has n - 1 scored tokens if it comes first, and
    n if it follows a context, `bos_token_id` or, in a stream, another sequence. An empty sequence scores 0.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        sequences (`list[list[int]]`): Token ids of each sequence.
        mode (`str`, defaults to `"independent"`): `"independent"` or `"stream"`, as above.
        context (`list[int]`, *optional*):
            Tokens before every sequence, or before the whole stream. They are read once.
        bos_token_id (`int`, *optional*): Token to prepend to the context, or to what is scored if there is none.
        batch_size (`int`, defaults to 16): Sequences scored together if they are independent.
        segment_length (`int`, defaults to 512): Maximum number of tokens of a sequence read in one call.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Returns:
        `torch.Tensor` of shape `(num_sequences,)`, float64: sums of log-probabilities (natural logarithm).
    """
    if mode not in ("independent", "stream"):
        raise ValueError(f"`mode` must be 'independent' or 'stream', but is {mode!r}.")
    check_sizes(batch_size=batch_size, segment_length=segment_length)
    vocab_size = model.config.vocab_size
    texts = _token_lists("sequences", sequences, vocab_size)
    prefix = checked_tokens("context", [] if context is None else context, vocab_size)
    if bos_token_id is not None:
        prefix = torch.cat([checked_tokens("bos_token_id", [bos_token_id], vocab_size), prefix])
    scores = torch.zeros(len(texts), dtype=torch.float64)
    with _inference(model):
        if mode == "stream":
            joined = torch.cat([prefix, *texts])
            # the very first token has no context
            unscored = torch.zeros(min(1, len(joined)))
            losses = torch.cat([unscored, *_losses(model, [joined], segment_length, settings)])
            sizes = [len(prefix)] + [len(text) for text in texts]
            for index, piece in enumerate(losses.split(sizes)[1:]):
                scores[index] = -piece.double().sum()
            return scores

        memory = None
        # the last token of the prefix predicts the first one of a sequence, so it is read with the sequence
        if len(prefix) > 1:
            memory = model.init_memory(1, **settings)
            for piece in prefix[:-1].split(segment_length):
                model.base_model(piece[None].to(model.device), cache=memory)
        rows = [torch.cat([prefix[-1:], text]) for text in texts]
        for indices in _batches_by_length(rows, batch_size):
            batch = [rows[index] for index in indices]
            expanded = None if memory is None else memory.select([0] * len(batch))
            for index, losses in zip(indices, _losses(model, batch, segment_length, settings, expanded), strict=False):
                scores[index] = -losses.double().sum()
    return scores


def _losses(
    model: TransfoXLForCausalLM,
    rows: Sequence[torch.Tensor],
    segment_length: int,
    settings: dict[str, Any],
    memory: TransfoXLMemory | None = None,
) -> list[torch.Tensor]:
    """Negative log-likelihoods of each row's tokens but the first. Rows of fewer than 2 tokens are left out.

    Args:
        rows: Token ids of each row, longest first.
        memory: Memory of what precedes the rows; by default a fresh one.
    """
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        return []
    memory = model.init_memory(len(rows), **settings) if memory is None else _continuing(memory, len(rows))
    losses: list[list[torch.Tensor]] = [[] for _ in rows]
    inputs = _segments([row[:-1] for row in rows], segment_length, model.device)
    targets = _segments([row[1:] for row in rows], segment_length, model.device)
    for (lengths, input_ids), (_, shift_labels) in zip(inputs, targets, strict=True):
        memory = _continuing(memory, len(lengths))
        behind = torch.arange(input_ids.shape[1]) >= torch.tensor(lengths)[:, None]
        shift_labels = shift_labels.masked_fill(behind.to(model.device), IGNORED)
        output = model(input_ids, cache=memory, shift_labels=shift_labels, return_logits=False)
        for row, (length, row_losses) in enumerate(zip(lengths, output.losses.cpu(), strict=True)):
            losses[row].append(row_losses[:length])
    return [torch.cat(pieces) for pieces in losses]


def score_continuations(
    model: TransfoXLForCausalLM,
    context_ids: torch.Tensor | Sequence[int],
    continuations: Sequence[torch.Tensor | Sequence[int]],
    *,
    batch_size: int = 32,
    segment_length: int = 512,
    **settings: Any,
) -> torch.Tensor:
    """Log-probability of each continuation of one context, as in rescoring an n-best list.

    The context is read once, and the hypotheses share its memory. With `same_length=True`, or if a memory that starts
    empty is long enough for context and continuation, the result is that of scoring each concatenated text, unless
    positions are absolute.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        context_ids (`list[int]`): Tokens of the context, at least one.
        continuations (`list[list[int]]`): Tokens of each hypothesis, of any lengths.
        batch_size (`int`, defaults to 32): Hypotheses scored together.
        segment_length (`int`, defaults to 512): Maximum number of tokens of a sequence read in one call.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Returns:
        `torch.Tensor` of shape `(num_continuations,)`, float64: sums of log-probabilities of all tokens of each
        continuation (natural logarithm).
    """
    if len(context_ids) == 0:
        raise ValueError("`context_ids` must hold at least one token, but is empty (`score_sequences` needs none).")
    context = checked_tokens("context_ids", context_ids, model.config.vocab_size)
    texts = _token_lists("continuations", continuations, model.config.vocab_size)
    return score_sequences(
        model, texts, context=context, batch_size=batch_size, segment_length=segment_length, **settings
    )


def embed_documents(
    model: TransfoXLPreTrainedModel,
    documents: Sequence[torch.Tensor | Sequence[int]],
    *,
    segment_length: int = 512,
    batch_size: int = 8,
    progress: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """One vector for each document of any length: the hidden state of its last token.

    Documents are read in segments with a memory, batched by length; batching does not change the result. With
    `same_length=True` and relative positions it is that of one pass over the whole document.

    Args:
        model ([`TransfoXLModel`] or a model with a head): The model.
        documents (`list[list[int]]`): Token ids of each document, at least one.
        segment_length (`int`, defaults to 512): Tokens of a document that are read in one call.
        batch_size (`int`, defaults to 8): Documents read together.
        progress (`bool`, defaults to `False`): Whether to show a progress bar.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Returns:
        `torch.Tensor` of shape `(num_documents, d_model)` on the model's device.
    """
    check_sizes(segment_length=segment_length, batch_size=batch_size)
    texts = _token_lists("documents", documents, model.config.vocab_size)
    for index, text in enumerate(texts):
        if len(text) == 0:
            raise ValueError(f"`documents[{index}]` must hold at least one token, but is empty.")
    vectors: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    bar = tqdm(total=len(texts), unit="doc", desc="reading", disable=not progress)
    with _inference(model), bar:
        for indices in _batches_by_length(texts, batch_size):
            memory = model.init_memory(len(indices), **settings)
            for lengths, input_ids in _segments([texts[index] for index in indices], segment_length, model.device):
                memory = _continuing(memory, len(lengths))
                states = model.base_model(input_ids, cache=memory).last_hidden_state
                # a later segment of the document overwrites it
                for index, length, row_states in zip(indices, lengths, states, strict=False):
                    vectors[index] = row_states[length - 1].clone()
            bar.update(len(indices))
    if not vectors:
        return torch.empty(0, model.config.d_model, device=model.device)
    return torch.stack(vectors)


def classify_documents(
    model: TransfoXLForSequenceClassification,
    documents: Sequence[torch.Tensor | Sequence[int]],
    *,
    segment_length: int = 512,
    batch_size: int = 8,
    progress: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """Class scores for each document of any length, from the hidden state of its last token.

    Args:
        model ([`TransfoXLForSequenceClassification`]): The model.
        documents, segment_length, batch_size, progress, settings: As for [`embed_documents`].

    Returns:
        `torch.Tensor` of shape `(num_documents, num_labels)`: logits, on the model's device.
    """
    vectors = embed_documents(
        model, documents, segment_length=segment_length, batch_size=batch_size, progress=progress, **settings
    )
    with torch.no_grad():
        logits: torch.Tensor = model.score(vectors)
    return logits


__all__ = [
    "StreamScore",
    "classify_documents",
    "embed_documents",
    "evaluate_stream",
    "score_continuations",
    "score_sequences",
]

"""Log-probabilities of sequences of any lengths: sentences, one running text, hypotheses after one context."""

from collections.abc import Sequence
from typing import Any

import torch

from ..data import IGNORED, check_sizes
from ..memory_transfo_xl import TransfoXLMemory
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..token_ids import checked_tokens
from .reading import batches_by_length, continuing, inference, segments, token_lists


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
    texts = token_lists("sequences", sequences, vocab_size)
    prefix = checked_tokens("context", [] if context is None else context, vocab_size)
    if bos_token_id is not None:
        prefix = torch.cat([checked_tokens("bos_token_id", [bos_token_id], vocab_size), prefix])
    scores = torch.zeros(len(texts), dtype=torch.float64)
    with inference(model):
        if mode == "stream":
            joined = torch.cat([prefix, *texts])
            # the very first token has no context
            unscored = torch.zeros(min(1, len(joined)))
            losses = torch.cat([unscored, *token_losses(model, [joined], segment_length, settings)])
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
        for indices in batches_by_length(rows, batch_size):
            batch = [rows[index] for index in indices]
            expanded = None if memory is None else memory.select([0] * len(batch))
            for index, losses in zip(
                indices, token_losses(model, batch, segment_length, settings, expanded), strict=False
            ):
                scores[index] = -losses.double().sum()
    return scores


def token_losses(
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
    memory = model.init_memory(len(rows), **settings) if memory is None else continuing(memory, len(rows))
    losses: list[list[torch.Tensor]] = [[] for _ in rows]
    inputs = segments([row[:-1] for row in rows], segment_length, model.device)
    targets = segments([row[1:] for row in rows], segment_length, model.device)
    for (lengths, input_ids), (_, shift_labels) in zip(inputs, targets, strict=True):
        memory = continuing(memory, len(lengths))
        behind = torch.arange(input_ids.shape[1]) >= torch.tensor(lengths)[:, None]
        shift_labels = shift_labels.masked_fill(behind.to(model.device), IGNORED)
        output = model(input_ids, cache=memory, shift_labels=shift_labels, return_logits=False)
        for row, (length, row_losses) in enumerate(zip(lengths, output.losses.cpu(), strict=True)):
            losses[row].append(row_losses[:length])
    return [torch.cat(pieces) for pieces in losses]


def set_losses(
    model: TransfoXLForCausalLM,
    rows: Sequence[torch.Tensor],
    segment_length: int,
    settings: dict[str, Any],
    token_ids: Sequence[int],
    memory: TransfoXLMemory | None = None,
) -> list[torch.Tensor]:
    """Minus the logarithm of the probability that the next token is one of a set, after each token of each row.

    Logits over the vocabulary are computed for one segment at a time.

    Args:
        rows: Token ids of each row, longest first. Empty rows are left out.
        token_ids: The set.
        memory: Memory of what precedes the rows; by default a fresh one.
    """
    rows = [row for row in rows if len(row)]
    if not rows:
        return []
    memory = model.init_memory(len(rows), **settings) if memory is None else continuing(memory, len(rows))
    losses: list[list[torch.Tensor]] = [[] for _ in rows]
    chosen = torch.tensor(token_ids, device=model.device)
    for lengths, input_ids in segments(rows, segment_length, model.device):
        memory = continuing(memory, len(lengths))
        logits = model(input_ids, cache=memory).logits.float()
        found = logits.logsumexp(-1) - logits[..., chosen].logsumexp(-1)
        for row, (length, row_losses) in enumerate(zip(lengths, found.cpu(), strict=True)):
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
    texts = token_lists("continuations", continuations, model.config.vocab_size)
    return score_sequences(
        model, texts, context=context, batch_size=batch_size, segment_length=segment_length, **settings
    )


__all__ = ["score_continuations", "score_sequences", "token_losses"]

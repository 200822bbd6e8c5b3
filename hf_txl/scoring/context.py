"""How far back a model's predictions gain from context: the relative effective context length of the paper.

[Dai et al., 2019](https://arxiv.org/abs/1901.02860), section 4.3 and appendix C. Models are compared as a group: a
context counts as long as it predicts hard tokens better than the best model of the group does with a shorter one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from ..data import check_sizes
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..token_ids import checked_tokens
from .reading import inference
from .sequences import token_losses


def losses_by_context(
    model: TransfoXLForCausalLM,
    token_ids: Any,
    contexts: Sequence[int],
    *,
    num_scored: int = 16,
    stride: int | None = None,
    batch_size: int = 16,
    progress: bool = True,
    **settings: Any,
) -> dict[int, torch.Tensor]:
    """Losses of the same tokens with contexts of several lengths.

    The text is cut into blocks of `num_scored` tokens. Each is read after the `c` tokens before it, with a fresh
    memory of `c` positions, so that its tokens have `c` to `c + num_scored - 1` tokens of context.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        token_ids (`torch.Tensor` or array of shape `(num_tokens,)`, or `datasets.Dataset`): The text.
        contexts (`list[int]`): Context lengths c, at least 1.
        num_scored (`int`, defaults to 16): Tokens of a block.
        stride (`int`, *optional*): Tokens from block to block. Default: `num_scored`, so that all tokens are scored.
        batch_size (`int`, defaults to 16): Blocks read together.
        progress (`bool`, defaults to `True`): Whether to show a progress bar.
        settings: Arguments of [`TransfoXLMemory`] (`clamp_len`, `same_length`, `memory_init`).

    Returns:
        `dict[int, torch.Tensor]`: for each c, losses in nats, float64, `(num_tokens_scored,)`. All blocks begin behind
        the longest context.
    """
    check_sizes(num_scored=num_scored, batch_size=batch_size, **({} if stride is None else {"stride": stride}))
    for context in contexts:
        check_sizes(contexts=context)
    ids = checked_tokens("token_ids", token_ids, model.config.vocab_size)
    starts = list(range(max(contexts), len(ids) - num_scored + 1, stride or num_scored))
    if not starts:
        raise ValueError(
            f"`token_ids` must hold more than the longest context and a block ({max(contexts) + num_scored} tokens), "
            f"but has {len(ids)}."
        )
    found: dict[int, torch.Tensor] = {}
    bar = tqdm(total=len(contexts) * len(starts), unit="block", desc="contexts", disable=not progress)
    with inference(model), bar:
        for context in contexts:
            losses = []
            for first in range(0, len(starts), batch_size):
                rows = [ids[start - context : start + num_scored] for start in starts[first : first + batch_size]]
                read = token_losses(model, rows, context + num_scored, {"mem_len": context, **settings})
                losses += [row[-num_scored:].double() for row in read]
                bar.update(len(rows))
            found[context] = torch.cat(losses)
    return found


def relative_effective_context_length(
    losses: Mapping[str, Mapping[int, torch.Tensor]], fraction: float = 1.0, threshold: float = 0.01
) -> dict[str, int]:
    """Relative effective context length of each model of a group.

    With `b(c, t)` the lowest loss of token t that a model of the group has with context c, and T the tokens that are
    hardest by it, the loss of model i with a longer context c' is the mean over T of `min(b(c, t), l_i(c', t))`; that
    with the context c itself is the mean of `b`. From the shortest context on, the next longer one counts as long as
    it lowers that loss by the threshold.

    Args:
        losses (`dict[str, dict[int, torch.Tensor]]`):
            For each model, losses of the same tokens by context length, of [`losses_by_context`].
        fraction (`float`, defaults to 1.0): Part of the tokens in T: 0.1, 0.5 and 1.0 in the paper's Table 8.
        threshold (`float`, defaults to 0.01): Relative gain that counts.

    Returns:
        `dict[str, int]`: the longest context that counts, the shortest one measured if none does.

    Raises:
        ValueError: if the models have not the same contexts and tokens, or a number is out of range.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be above 0 and at most 1, but is {fraction}.")
    if not losses:
        raise ValueError("`losses` must hold a model, but is empty.")
    shapes = {name: {context: tuple(each.shape) for context, each in rows.items()} for name, rows in losses.items()}
    if len({str(sorted(each.items())) for each in shapes.values()}) > 1:
        raise ValueError(f"`losses` must have the same contexts and tokens for all models, but has {shapes}.")
    contexts = sorted(next(iter(losses.values())))
    lengths = dict.fromkeys(losses, contexts[0])
    for name, rows in losses.items():
        for shorter, longer in zip(contexts, contexts[1:], strict=False):
            best = torch.stack([each[shorter] for each in losses.values()]).amin(0)
            hardest = best.topk(max(1, round(fraction * len(best)))).indices
            before = best[hardest].mean()
            after = torch.minimum(best, rows[longer])[hardest].mean()
            if (before - after) / before < threshold:
                break
            lengths[name] = longer
    return lengths


__all__ = ["losses_by_context", "relative_effective_context_length"]

"""Perplexity of a long text as the paper measures it, as `evaluate` in `eval.py` of the original PyTorch code."""

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from ..data import IGNORED, check_sizes, num_unscored
from ..memory_transfo_xl import TransfoXLMemory
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..token_ids import checked_tokens
from .reading import inference


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
    with inference(model), bar:
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


__all__ = ["StreamScore", "evaluate_stream"]

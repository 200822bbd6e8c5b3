"""Several texts in one batch row: where each begins, and the layout of their queries and keys.

Whichever keyword marks the texts, the internal form is one boolean per token: a text begins here. A position attends
to its own text only, and distances count within it; what a memory holds belongs to the text that continues it.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .layout_transfo_xl import AttentionLayout

# B batch   Q positions of the segment   T stored and new positions   Z zero states   K = Z + T keys


def text_starts(marks: dict[str, Any], inputs: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
    """Tokens before which a row begins afresh; `None` if no keyword marks any.

    Args:
        marks (`dict`): Keyword arguments, of which `position_ids`, `cu_seq_lens_q`, `cu_seq_lens_k`, `seq_idx` and
            `reset_before` are read. The first token of a row begins afresh only by `reset_before`: otherwise the first
            text continues the memory.
        inputs (`torch.Tensor` of shape `(batch_size, query_length, …)`): Ids or embeddings.
        attention_mask (`torch.Tensor` of shape `(batch_size, at least query_length)`, *optional*): 0 for pads.

    Returns:
        `torch.Tensor` of `bool` and shape `(batch_size, query_length)`, or `None`.

    Raises:
        ValueError: if a keyword has a wrong shape or dtype, or two of them disagree.
    """
    shape, found = list(inputs.shape[:2]), {}
    readers = {
        "position_ids": lambda value: _from_positions(value, shape, attention_mask),
        "cu_seq_lens_q": lambda value: _from_ends("cu_seq_lens_q", value, shape),
        "cu_seq_lens_k": lambda value: _from_ends("cu_seq_lens_k", value, shape),
        "seq_idx": lambda value: _from_numbers(value, shape),
        "reset_before": lambda value: _from_flags(value, shape),
    }
    for name, read in readers.items():
        if (value := marks.get(name)) is not None and (starts := read(value)) is not None:
            found[name] = starts.to(inputs.device)
    if not found or inputs.is_meta:
        return None
    (name, starts), *others = found.items()
    if torch.compiler.is_compiling():
        for _, other in others:
            starts = starts | other
        return starts
    for other_name, other in others:
        if not torch.equal(starts[:, 1:], other[:, 1:]):
            raise ValueError(f"`{name}` and `{other_name}` must mark the same beginnings of texts, but differ.")
        starts = starts | other
    return starts if starts.any() else None


def _check_shape(name: str, value: torch.Tensor, shape: list[int]) -> None:
    if list(value.shape) not in (shape, [1, shape[1]]):
        raise ValueError(f"`{name}` must have shape {shape}, but has {list(value.shape)}.")


def _from_positions(
    position_ids: torch.Tensor, shape: list[int], attention_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Real tokens of position 0, except the first of each row; shapes and other values are checked by `Segment`."""
    if list(position_ids.shape) not in (shape, [1, shape[1]]) or torch.compiler.is_compiling():
        return None
    starts = (position_ids == 0).expand(shape)
    real = torch.ones_like(starts)
    if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[1] >= shape[1]:
        real = (attention_mask[:, -shape[1] :] != 0).to(starts.device)
    return starts & real & (real.cumsum(1) > 1)


def _from_ends(name: str, ends: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Cumulative lengths `(number of texts + 1,)` over all rows, one after the other."""
    total = shape[0] * shape[1]
    starts = torch.zeros(total + 1, dtype=torch.bool, device=ends.device)
    if not torch.compiler.is_compiling():
        values = ends.tolist() if ends.dim() == 1 else []
        if len(values) < 2 or values[0] != 0 or values[-1] != total or values != sorted(values):
            raise ValueError(
                f"`{name}` must rise from 0 to the number of tokens ({total}), one entry per text and a last one, but "
                f"is {ends.tolist()}."
            )
        if set(range(0, total, shape[1])) - {*values}:
            raise ValueError(f"`{name}` must begin a text in each row ({shape[1]} tokens), but is {values}.")
    starts = starts.index_fill(0, ends.long(), True)[:total].view(shape)
    # the first text of a row continues the memory
    return F.pad(starts[:, 1:], (1, 0), value=False)


def _from_numbers(seq_idx: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Texts are runs of equal numbers."""
    _check_shape("seq_idx", seq_idx, shape)
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=False).expand(shape)


def _from_flags(reset_before: torch.Tensor, shape: list[int]) -> torch.Tensor:
    _check_shape("reset_before", reset_before, shape)
    if reset_before.dtype != torch.bool:
        raise ValueError(f"`reset_before` must be boolean (`dones.bool()`), but has dtype {reset_before.dtype}.")
    return reset_before.expand(shape)


def text_numbers(starts: torch.Tensor, stored_length: int) -> torch.Tensor:
    """Number of the text of each stored and new position, `(B, T)`; 0 for the text that continues the memory."""
    return F.pad(starts.long().cumsum(1), (stored_length, 0), value=0)


def end_texts(targets: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """Targets `(B, Q)` without those of the last token of a text, which lie in the next one."""
    if starts is None:
        return targets
    return targets.masked_fill(F.pad(starts[:, 1:], (0, 1)).to(targets.device), -100)


def packed_layout(
    real: torch.Tensor, starts: torch.Tensor, window: int | None, mem_len: int, zero_start: bool
) -> AttentionLayout:
    """Layout of rows that hold several texts.

    Args:
        real (`torch.Tensor` of shape `(batch_size, stored and new positions)`): Positions that exist.
        starts (`torch.Tensor` of shape `(batch_size, query_length)`): Tokens that begin a text.
        window (`int`, *optional*): Number of keys a query attends to.
        mem_len (`int`): Number of zero states in front of a text with `zero_start`.
        zero_start (`bool`): Whether `memory_init` is `"zeros"`.
    """
    query_length, num_zeros = starts.shape[1], mem_len if zero_start else 0
    stored_length = real.shape[1] - query_length
    text = text_numbers(starts, stored_length)
    # pads take no position; (B, T)
    position = real.cumsum(-1) - 1
    infinity = real.shape[1]
    bounds = torch.full_like(position, infinity)
    first = bounds.scatter_reduce(1, text, torch.where(real, position, infinity), "amin").gather(1, text)
    last = (-bounds).scatter_reduce(1, text, torch.where(real, position, -infinity), "amax").gather(1, text)
    # (B, Q, 1) - (B, 1, T) -> (B, Q, T)
    queries = slice(stored_length, None)
    distances = position[:, queries, None] - position[:, None, :]
    visible = real[:, None, :] & (text[:, queries, None] == text[:, None, :]) & (distances >= 0)
    start_mask = None
    if zero_start:
        # the zero states in front of a text, the farthest first: the same slots serve all texts, each at its distance
        depth = torch.arange(num_zeros, 0, -1, device=real.device)
        offset = position[:, queries] - first[:, queries]
        stored = real[:, :stored_length].sum(1, keepdim=True)
        available = torch.where(text[:, queries] == 0, mem_len - stored, mem_len)
        distances = torch.cat([offset[..., None] + depth, distances], dim=-1)
        visible = torch.cat([depth <= available[..., None], visible], dim=-1)
        is_zero = torch.arange(num_zeros + real.shape[1], device=real.device) < num_zeros
        start_mask = is_zero.expand(len(real), -1)
    if window is not None:
        visible = visible & (distances < window)
    # a pad attends to itself: a softmax over no keys would be NaN
    index = torch.arange(visible.shape[-1], device=real.device)
    visible = visible | (index == index[-query_length:, None])
    age = F.pad(last - position, (num_zeros, 0), value=0)
    return AttentionLayout(
        query_length, len(index), num_zeros, zero_start, window, None, start_mask, distances, visible, age
    )


__all__ = ["end_texts", "packed_layout", "text_numbers", "text_starts"]

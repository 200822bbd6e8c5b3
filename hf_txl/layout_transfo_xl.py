"""Layout of the queries and keys of one call: lengths, masks, sliding window and zero states.

Positions are integers and masks booleans. Causal mask and window follow section 3.2 of
[Dai et al., 2019](https://arxiv.org/abs/1901.02860).
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# B batch   Q queries (one segment)   K keys: start slots, then stored ones, then the segment's


@dataclass(frozen=True)
class AttentionLayout:
    """Layout of the queries and keys of one call, the same for every layer.

    Without `distances`, key `j` is at distance `i + (K - Q) - j` from query `i`, in every batch row.

    Args:
        query_length (`int`): Number of queries Q: the tokens of this call.
        key_length (`int`): Number of keys K, start slots included.
        start_slots (`int`): Number of zero states in front of the stored positions (`memory_init="zeros"`).
        zero_start (`bool`): Whether there can be any: `memory_init` is `"zeros"`.
        window (`int`, *optional*): Number of keys a query attends to, itself included; `None`: all that precede it.
        key_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys that exist in a row.
        start_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys that are zero states.
        distances (`torch.Tensor` of shape `(batch_size or 1, query_length, key_length)`, *optional*):
            Distances, if there are pads or free slots between the tokens.
        visible (`torch.Tensor` of the same shape, *optional*): Given with `distances`: keys a query attends to.
        age (`torch.Tensor` of shape `(batch_size or 1, key_length)`, *optional*):
            Given with `distances`: distance of each key from the last token of its row.
    """

    query_length: int
    key_length: int
    start_slots: int = 0
    zero_start: bool = False
    window: int | None = None
    key_mask: torch.Tensor | None = None
    start_mask: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    age: torch.Tensor | None = None

    @classmethod
    def from_mask(
        cls,
        mask: torch.Tensor,
        query_start: int,
        query_length: int,
        start_slots: int,
        window: int | None,
        zero_start: bool,
        oldest: torch.Tensor | None = None,
    ) -> "AttentionLayout":
        """Layout that numbers the real tokens of each row consecutively: pads and free slots take no position.

        Args:
            mask (`torch.Tensor` of shape `(batch_size or 1, number of keys without start slots)`): Real tokens.
            query_start (`int`): Index of the first query among those keys.
            query_length, start_slots, window: As for the class.
            zero_start (`bool`): Whether slots before the first token of a row are zero states.
            oldest (`torch.Tensor` of shape `(batch_size, 1)`, *optional*):
                Position of the first zero state, relative to the first stored token.
        """
        num_keys = start_slots + mask.shape[1]
        index = torch.arange(num_keys, device=mask.device)
        real = F.pad(mask, (start_slots, 0), value=False)
        count = real.cumsum(-1)
        before_first = count == 0
        # (B, K): 0 for the first real token, -1, -2, … for the slots before it
        position = torch.where(before_first, index - before_first.sum(-1, keepdim=True), count - 1)
        start_mask = None
        exists = real
        if zero_start:
            start_mask = before_first if oldest is None else before_first & (position >= oldest)
            exists = real | start_mask
        queries = slice(start_slots + query_start, start_slots + query_start + query_length)
        # (B, Q, 1) - (B, 1, K) -> (B, Q, K)
        distances = position[:, queries, None] - position[:, None, :]
        visible = exists[:, None, :] & (distances >= 0)
        if window is not None:
            visible = visible & (distances < window)
        # a pad attends to itself: a softmax over no keys would be NaN
        visible = visible | (index == index[queries, None])
        age = position[:, -1:] - position
        return cls(query_length, num_keys, start_slots, zero_start, window, None, start_mask, distances, visible, age)

    @property
    def reads_zero_states(self) -> bool:
        """Whether any key may be a zero state; compiled programs must serve any number of them."""
        return self.zero_start and (
            torch.compiler.is_compiling() or self.start_slots > 0 or self.start_mask is not None
        )

    def part(self, row: int, start: int, end: int) -> tuple["AttentionLayout", slice]:
        """Layout of a block of queries of one row, and the keys that any of them may attend to.

        Only without `distances`.

        Args:
            row (`int`): Batch row.
            start, end (`int`): First query, and the one after the last.
        """
        assert self.distances is None
        num_earlier = self.key_length - self.query_length
        first = 0 if self.window is None else max(0, num_earlier + start - self.window + 1)
        keys = slice(first, num_earlier + end)
        key_mask = None if self.key_mask is None else self.key_mask[row : row + 1, keys]
        return AttentionLayout(end - start, keys.stop - first, window=self.window, key_mask=key_mask), keys


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether operations are being compiled, or the tensor is of a subclass, such as a fake tensor."""
    return type(tensor) is not torch.Tensor or torch.compiler.is_compiling()


def distance_mask(layout: AttentionLayout, like: torch.Tensor) -> torch.Tensor:
    """Causal mask and window by distance: 0 if visible, `-inf` beyond the window and for future keys, `(1, 1, K + Q)`.

    Both depend on the distance only, so they are added to the scores before these are aligned with the keys.
    """
    lengths = (layout.key_length, layout.query_length, layout.window)
    # tensors of a compilation must not be cached
    if is_traced(like):
        return make_distance_mask(*lengths, like.dtype, like.device)
    return cached_distance_mask(*lengths, like.dtype, like.device, torch.is_inference_mode_enabled())


def make_distance_mask(
    key_length: int, query_length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    distance = torch.arange(key_length - 1, -query_length - 1, -1, device=device)
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    mask = torch.zeros(key_length + query_length, dtype=dtype, device=device)
    return mask.masked_fill(hidden, float("-inf"))[None, None, :]


@functools.lru_cache(maxsize=64)
def cached_distance_mask(
    key_length: int,
    query_length: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    is_inference: bool,
) -> torch.Tensor:
    """The mask, which all layers of a call and all steps with a full memory share; it is never written to.

    Autograd cannot save tensors created in inference mode, so each mode has its own.
    """
    return make_distance_mask(key_length, query_length, window, dtype, device)


def mask_keys(scores: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Scores `(B, H, Q, K)` with `-inf` for keys that a batch row does not have."""
    if layout.key_mask is None:
        return scores
    return scores.masked_fill(~layout.key_mask[:, None, None, :], float("-inf"))


__all__ = ["AttentionLayout", "distance_mask", "is_traced", "mask_keys"]

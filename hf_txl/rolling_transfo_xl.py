"""Keys and values that roll: new positions are written behind the old ones, which are copied once in a while only.

A memory of M positions that is concatenated with every new token is copied whole for each of them, which takes longer
than all the rest of the layer. It is apart since a segment memory and the library's sliding window use it alike.
"""

import threading
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

# B batch   H heads   S stored positions   Q new ones   D head size
# Time is the last dimension but one throughout.

# free slots of a new storage, as a share of what it holds, and at least: a position is copied about once in as many
# tokens as there are slots
SPARE_SHARE, SPARE_LEAST = 4, 16

claiming = threading.Lock()


class RollingStorage:
    """A tensor with free slots behind the positions written so far.

    A slot is written once and never again, so views of written slots stay as they are, whoever holds them. Of several
    holders whose positions end at the last written slot, the first to append gets the next slots; the others find
    theirs taken and start a storage of their own.

    Args:
        stored (`torch.Tensor` of shape `(…, stored_length, width)`): What it begins with, copied.
        capacity (`int`): Slots.
    """

    def __init__(self, stored: torch.Tensor, capacity: int):
        self.tensor = stored.new_empty(*stored.shape[:-2], capacity, stored.shape[-1])
        self.written = stored.shape[-2]
        self.tensor.narrow(-2, 0, self.written).copy_(stored)

    def append(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        """`stored` and behind it `new`, a view of this storage; `None` if it does not hold them or has no room."""
        tensor, length = self.tensor, new.shape[-2]
        if (
            stored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            or stored.stride() != tensor.stride()
            or new.dtype != tensor.dtype
            or tensor.is_inference() != torch.is_inference_mode_enabled()
        ):
            return None
        first = stored.storage_offset() // tensor.stride(-2)
        end = first + stored.shape[-2]
        with claiming:
            if end != self.written or end + length > tensor.shape[-2]:
                return None
            self.written += length
        tensor.narrow(-2, end, length).copy_(new)
        return tensor.narrow(-2, first, stored.shape[-2] + length)


def append_rolling(
    stored: torch.Tensor, new: torch.Tensor, storage: RollingStorage | None
) -> tuple[torch.Tensor, RollingStorage | None]:
    """Stored positions followed by new ones, of which nobody needs the gradient.

    Args:
        stored (`torch.Tensor` of shape `(…, stored_length, width)`): Is left as it is.
        new (`torch.Tensor` of shape `(…, new_length, width)`): Copied.
        storage (`RollingStorage`, *optional*): The storage that the last call returned.

    Returns:
        `(…, stored_length + new_length, width)` and the storage for the next call; none behind a segment so long that
        free slots would soon be used up.
    """
    if storage is not None and (full := storage.append(stored, new)) is not None:
        return full, storage
    stored_length, new_length = stored.shape[-2], new.shape[-2]
    spare = max(stored_length // SPARE_SHARE, SPARE_LEAST)
    if 2 * new_length > spare or new.dtype != stored.dtype:
        return torch.cat([stored, new], dim=-2), None
    storage = RollingStorage(stored, stored_length + spare)
    full = storage.append(storage.tensor.narrow(-2, 0, stored_length), new)
    assert full is not None
    return full, storage


class RollingWindowLayer(DynamicSlidingWindowLayer):
    """The library's sliding layer, which appends to a rolling storage where it can."""

    def __init__(self, sliding_window: int, **kwargs: Any):
        super().__init__(sliding_window, **kwargs)
        self.storages: dict[str, RollingStorage | None] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        # `record_past`: positions beyond the window are kept, to be taken back
        if not self.is_initialized or self.record_past or needs_gradient or torch.compiler.is_compiling():
            self.storages = {}
            return super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        full = {}
        for name, new in (("keys", key_states), ("values", value_states)):
            full[name], self.storages[name] = append_rolling(getattr(self, name), new, self.storages.get(name))
            kept = min(self.sliding_window - 1, full[name].shape[-2])
            setattr(self, name, full[name].narrow(-2, full[name].shape[-2] - kept, kept))
        return full["keys"], full["values"]


def make_rolling(cache: Any) -> None:
    """Let an empty cache of the library use rolling layers where it would use its own sliding ones."""
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer and not layer.is_initialized and not layer.record_past:
            cache.layers[index] = RollingWindowLayer(layer.sliding_window)


__all__ = ["RollingStorage", "RollingWindowLayer", "append_rolling", "make_rolling"]

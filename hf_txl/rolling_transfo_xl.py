"""Keys and values that roll: new positions are written behind the old ones, which are copied once in a while only.

A memory of M positions that is concatenated with every new token is copied whole for each of them, which takes longer
than all the rest of the layer. It is apart since a segment memory and the library's sliding window use it alike.
"""

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

# B batch   H heads   S stored positions   Q new ones   D head size
# Time is the last dimension but one throughout.

# free slots of a new storage, as a share of what it holds, and at least: a position is copied about once in as many
# tokens as there are slots
SPARE_SHARE, SPARE_LEAST = 4, 16

claiming = threading.Lock()


class RollingStorage:
    """Tensors of equal shape, side by side, with free slots behind the positions written so far.

    A slot is written once and never again, so views of written slots stay as they are, whoever holds them. Of several
    holders whose positions end at the last written slot, the first to append gets the next slots; the others find
    theirs taken and start a storage of their own.

    Args:
        stored (sequence of `torch.Tensor` of shape `(…, stored_length, width)`): What it begins with, copied.
        capacity (`int`): Slots.
    """

    def __init__(self, stored: Sequence[torch.Tensor], capacity: int):
        like = stored[0]
        self.tensor = like.new_empty(len(stored), *like.shape[:-2], capacity, like.shape[-1])
        self.written = like.shape[-2]
        for part, positions in zip(self.tensor, stored, strict=True):
            part.narrow(-2, 0, self.written).copy_(positions)

    def claim(self, stored: torch.Tensor, length: int) -> tuple["RollingStorage", int, int] | None:
        """Slots for new positions behind those that the first of the tensors, `stored`, is a view of.

        Returns:
            This storage, the slot of the first of `stored` and the one behind the last of the new ones; `None` if it
            does not hold `stored` or has no room.
        """
        tensor = self.tensor
        if (
            stored.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            or stored.stride() != tensor.stride()[1:]
            or tensor.is_inference() != torch.is_inference_mode_enabled()
        ):
            return None
        first = stored.storage_offset() // tensor.stride(-2)
        end = first + stored.shape[-2]
        with claiming:
            if end != self.written or end + length > tensor.shape[-2]:
                return None
            self.written += length
        return self, first, end + length

    def views(self, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """These slots of each tensor, `(…, end - first, width)`."""
        return self.tensor.narrow(-2, first, end - first).unbind(0)


def claim_rolling(
    stored: Sequence[torch.Tensor], length: int, storage: RollingStorage | None
) -> tuple[RollingStorage, int, int] | None:
    """Slots for new positions behind stored ones, in a new storage where the given one has none.

    Args:
        stored (sequence of `torch.Tensor` of shape `(…, stored_length, width)`): Are left as they are.
        length (`int`): New positions.
        storage (`RollingStorage`, *optional*): Where `stored` may lie.

    Returns:
        The storage, the slot of the first stored position and the one behind the last new one; `None` for a segment
        so long that free slots would soon be used up, and for tensors that differ in shape, type or device.
    """
    like = stored[0]
    if storage is not None and (claimed := storage.claim(like, length)) is not None:
        return claimed
    stored_length = like.shape[-2]
    spare = max(stored_length // SPARE_SHARE, SPARE_LEAST)
    facts = {(tensor.shape, tensor.dtype, tensor.device) for tensor in stored}
    if 2 * length > spare or len(facts) > 1:
        return None
    storage = RollingStorage(stored, stored_length + spare)
    return storage.claim(storage.views(0, stored_length)[0], length)


# where the positions of a layer of the library lie; the layer itself stays as the library made it, so that whatever
# reads its attributes (`torch.export`, a pickle) finds what it knows
window_storages: "WeakKeyDictionary[DynamicSlidingWindowLayer, RollingStorage]" = WeakKeyDictionary()


class RollingWindows:
    """Appends to the library's sliding layers, in a rolling storage where it can.

    Args:
        cache (`Cache`): Layers of other kinds and offloaded ones are left to its own `update`.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the past and the segment, `(B, H, S + Q, D)`; the newest are kept."""
        cache = self.cache
        # a cache without a configuration makes its layers one by one
        layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
        needs_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if needs_gradient or cache.offloading or not rolls(layer):
            return self._update_unrolled(key_states, value_states, layer_idx)
        new_length = key_states.shape[-2]
        claimed = claim_rolling((layer.keys, layer.values), new_length, window_storages.get(layer))
        if claimed is None:
            window_storages.pop(layer, None)
            return self._update_unrolled(key_states, value_states, layer_idx)
        layer.cumulative_length += new_length
        storage, first, end = claimed
        window_storages[layer] = storage
        for slots, new in zip(storage.views(end - new_length, end), (key_states, value_states), strict=True):
            slots.copy_(new)
        layer.keys, layer.values = storage.views(max(first, end - layer.sliding_window + 1), end)
        keys, values = storage.views(first, end)
        return keys, values

    def _update_unrolled(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.update(key_states, value_states, layer_idx)
        return keys, values


def rolls(layer: Any) -> bool:
    """Whether the positions of a layer can lie in a rolling storage: a sliding one that keeps its window only."""
    # `record_past`: positions beyond the window are kept, to be taken back
    return type(layer) is DynamicSlidingWindowLayer and layer.is_initialized and not layer.record_past


def can_compile(layer: Any) -> bool:
    """Whether `CompiledWindows` can take care of a layer of the library: a sliding one that holds something."""
    return isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and not layer.record_past


class CompiledWindows:
    """Writes the sliding layers of a cache in programs that serve any number of stored positions, up to all.

    Args:
        cache (`DynamicCache`): Its layers are those that `can_compile`.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the past and the segment, `(B, H, S + Q, D)`; the newest are kept."""
        layer = self.cache.layers[layer_idx]
        layer.cumulative_length += key_states.shape[-2]
        full = torch.cat([layer.keys, key_states], dim=-2), torch.cat([layer.values, value_states], dim=-2)
        kept = torch.sym_min(layer.sliding_window - 1, full[0].shape[-2])
        layer.keys, layer.values = (
            states.narrow(-2, states.shape[-2] - kept, kept).clone(memory_format=torch.contiguous_format)
            for states in full
        )
        return full


__all__ = ["CompiledWindows", "RollingStorage", "RollingWindows", "can_compile", "claim_rolling", "window_storages"]

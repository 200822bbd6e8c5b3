"""Buffer of keys and values: new positions are appended to free slots, without copying the stored ones."""

import threading
from collections.abc import Sequence

import torch

# time is the second to last dimension throughout

# free slots of a new buffer: one per `SPARE_SHARE` positions, at least `SPARE_LEAST`; all positions are copied once
# per as many tokens as there are free slots
SPARE_SHARE, SPARE_LEAST = 4, 16

claiming = threading.Lock()


class KeyValueBuffer:
    """Tensors of equal shape with free slots behind the positions written so far.

    Each slot is written once, so views of written slots stay valid. Of several branches whose positions end at the
    last written slot, the first to append claims the next slots; the others start a buffer of their own.

    Args:
        stored (sequence of `torch.Tensor` of shape `(…, stored_length, width)`): The first positions, copied.
        capacity (`int`): Number of slots.
    """

    def __init__(self, stored: Sequence[torch.Tensor], capacity: int):
        like = stored[0]
        self.tensor = like.new_empty(len(stored), *like.shape[:-2], capacity, like.shape[-1])
        self.written = like.shape[-2]
        for part, positions in zip(self.tensor, stored, strict=True):
            part.narrow(-2, 0, self.written).copy_(positions)

    def claim(self, stored: torch.Tensor, length: int) -> tuple["KeyValueBuffer", int, int] | None:
        """Claim slots for new positions behind the stored ones.

        Args:
            stored (`torch.Tensor`): The stored positions of the first tensor.
            length (`int`): Number of new positions.

        Returns:
            This buffer, the first slot of the stored positions and the end of the new ones; `None` if `stored` is not
            a view of the buffer, or the slots behind it are taken or too few.
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


def claim_slots(
    stored: Sequence[torch.Tensor], length: int, buffer: KeyValueBuffer | None
) -> tuple[KeyValueBuffer, int, int] | None:
    """Claim slots for new positions behind stored ones, in a new buffer if the given one has no room.

    Args:
        stored (sequence of `torch.Tensor` of shape `(…, stored_length, width)`): Not changed.
        length (`int`): Number of new positions.
        buffer (`KeyValueBuffer`, *optional*): The buffer that may hold `stored`.

    Returns:
        The buffer, the first slot of the stored positions and the end of the new ones; `None` for segments so long
        that a buffer would not pay, and for tensors that differ in shape, dtype or device.
    """
    like = stored[0]
    if buffer is not None and (claimed := buffer.claim(like, length)) is not None:
        return claimed
    stored_length = like.shape[-2]
    spare = max(stored_length // SPARE_SHARE, SPARE_LEAST)
    facts = {(tensor.shape, tensor.dtype, tensor.device) for tensor in stored}
    if 2 * length > spare or len(facts) > 1:
        return None
    buffer = KeyValueBuffer(stored, stored_length + spare)
    return buffer.claim(buffer.views(0, stored_length)[0], length)


def check_keys(stored: torch.Tensor, new: torch.Tensor) -> None:
    """Refuse stored keys or values `(B, H, S, D)` of another model, batch size, dtype or device."""
    if stored.shape[:2] != new.shape[:2] or stored.shape[3] != new.shape[3]:
        raise ValueError(
            f"`cache` must hold keys and values of batch size {new.shape[0]} and {new.shape[1]} heads of size "
            f"{new.shape[3]}, as the model computes, but has batch size {stored.shape[0]} and {stored.shape[1]} heads "
            f"of size {stored.shape[3]}."
        )
    if stored.dtype != new.dtype or stored.device != new.device:
        raise ValueError(
            f"`cache` must hold keys and values of dtype {new.dtype} on {new.device}, as the model computes, but they "
            f"have dtype {stored.dtype} on {stored.device}."
        )


def newest_positions(states: torch.Tensor, length: int) -> torch.Tensor:
    """The last `length` positions, a view."""
    return states.narrow(-2, states.shape[-2] - length, length)


__all__ = ["KeyValueBuffer", "check_keys", "claim_slots", "newest_positions"]

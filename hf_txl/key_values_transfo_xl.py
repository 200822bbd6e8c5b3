"""Storage of keys and values: a buffer with free slots, a prefix that batch rows share, a prefix of zero states.

New positions are appended to a buffer without copying the stored ones. A prefix precedes the keys and values of the
batch rows themselves: those of a text that several rows continue (beams, samples, hypotheses of an n-best list), or
the zero states before a text. It is stored and read once for all of its rows: attention calls `scores` and then `read`
with the probabilities; only `materialize` copies it for each row.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

# B batch = G groups of R consecutive rows   H heads   S prefix positions   Q queries of a row   T its own positions
# D head size
# Time is the second to last dimension throughout.

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


@dataclass(frozen=True, eq=False)
class KeyValuePrefix:
    """Keys and values of a layer that groups of consecutive batch rows share.

    Args:
        keys, values (`torch.Tensor` of shape `(groups, n_head, prefix_length, d_head)`): Not changed.
        rows_each (`int`): Number of rows per group.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows_each: int

    @property
    def length(self) -> int:
        """Number of prefix positions S."""
        return self.keys.shape[-2]

    # --- for attention

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Scores of scaled queries, `(B, H, Q, D)` -> `(B, H, Q, S)`: one matrix product per group."""
        return self._split_rows(torch.matmul(self._join_rows(query), self.keys.transpose(-1, -2)))

    def read(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the values, `(B, H, Q, S)` -> `(B, H, Q, D)`."""
        return self._split_rows(torch.matmul(self._join_rows(probabilities), self.values))

    def _join_rows(self, states: torch.Tensor) -> torch.Tensor:
        # (G * R, H, Q, *) -> (G, R, H, Q, *) -> (G, H, R * Q, *)
        return states.unflatten(0, (-1, self.rows_each)).transpose(1, 2).flatten(2, 3)

    def _split_rows(self, states: torch.Tensor) -> torch.Tensor:
        # (G, H, R * Q, *) -> (G, H, R, Q, *) -> (G * R, H, Q, *)
        return states.unflatten(2, (self.rows_each, -1)).transpose(1, 2).flatten(0, 1)

    def blocks(self, num_rows: int) -> Iterator[tuple[slice, "KeyValuePrefix"]]:
        """Blocks of at most `num_rows` batch rows, each with its prefix: whole groups, or parts of one."""
        groups_at_once, rows_at_once = max(1, num_rows // self.rows_each), min(num_rows, self.rows_each)
        for group in range(0, len(self.keys), groups_at_once):
            keys, values = (states[group : group + groups_at_once] for states in (self.keys, self.values))
            for start in range(0, self.rows_each, rows_at_once):
                rows_each = min(rows_at_once, self.rows_each - start)
                first = group * self.rows_each + start
                yield slice(first, first + len(keys) * rows_each), KeyValuePrefix(keys, values, rows_each)

    def materialize(
        self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions with a copy of the prefix for each batch row, `(B, H, S + T, D)`.

        Args:
            key, value (`torch.Tensor` of shape `(B, H, T, D)`): The rows' own positions.
            rows (`torch.Tensor` of shape `(num_rows,)`, *optional*): Only these rows, in this order.
        """
        index = torch.arange(len(key), device=key.device) if rows is None else rows
        keys, values = (states.index_select(0, index // self.rows_each) for states in (self.keys, self.values))
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        return torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)

    # --- for the memory

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "KeyValuePrefix":
        """A prefix with a function applied to each tensor."""
        return KeyValuePrefix(function(self.keys), function(self.values), self.rows_each)

    def newest(self, length: int) -> "KeyValuePrefix | None":
        """The last `length` positions; `None` for 0."""
        if length == self.length:
            return self
        return self.map(lambda states: newest_positions(states, length)) if length else None


@dataclass(frozen=True, eq=False)
class ZeroPrefix:
    """Key and value of the zero states before the first token, equal for all of them.

    Args:
        key, value (`torch.Tensor` of shape `(1, n_head, 1, d_head)`): Of one zero state.
        length (`int`): Number of zero states Z.
    """

    key: torch.Tensor
    value: torch.Tensor
    length: int

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Scores of scaled queries, `(B, H, Q, D)` -> `(B, H, Q, Z)`."""
        return torch.matmul(query, self.key.transpose(-1, -2)).expand(-1, -1, -1, self.length)

    def read(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the values, `(B, H, Q, Z)` -> `(B, H, Q, D)`."""
        # autocast would sum in float32
        return probabilities.sum(dim=-1, keepdim=True, dtype=probabilities.dtype) * self.value

    def materialize(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values preceded by the zero states, `(B, H, Z + T, D)`."""
        shape = (len(key), -1, self.length, -1)
        return torch.cat([self.key.expand(shape), key], dim=-2), torch.cat([self.value.expand(shape), value], dim=-2)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Everything that precedes the rows' own keys and values: zero states, then a shared prefix."""

    zeros: ZeroPrefix | None
    shared: KeyValuePrefix | None

    @property
    def parts(self) -> list[ZeroPrefix | KeyValuePrefix]:
        """The parts that exist, in order."""
        return [part for part in (self.zeros, self.shared) if part is not None]

    def scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Scores of scaled queries for each part."""
        return [part.scores(query) for part in self.parts]

    def read(self, probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the values of all positions, `(B, H, Q, Z + S + T)` -> `(B, H, Q, D)`.

        Args:
            probabilities (`torch.Tensor`): Of all positions.
            value (`torch.Tensor` of shape `(B, H, T, D)`): The rows' own positions.
        """
        *of_parts, own = probabilities.split([*(part.length for part in self.parts), value.shape[-2]], dim=-1)
        output = torch.matmul(own, value)
        for part, of_part in zip(self.parts, of_parts, strict=True):
            output = output + part.read(of_part)
        return output

    def blocks(self, batch_size: int, num_rows: int) -> Iterator[tuple[slice, "Prefix"]]:
        """Blocks of at most `num_rows` batch rows, each with its prefix."""
        if self.shared is None:
            yield from ((slice(start, start + num_rows), self) for start in range(0, batch_size, num_rows))
            return
        for rows, shared in self.shared.blocks(num_rows):
            yield rows, Prefix(self.zeros, shared)

    def materialize(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions with a copy of the prefix for each batch row."""
        for part in reversed(self.parts):
            key, value = part.materialize(key, value)
        return key, value


__all__ = [
    "KeyValueBuffer",
    "KeyValuePrefix",
    "Prefix",
    "ZeroPrefix",
    "check_keys",
    "claim_slots",
    "newest_positions",
]

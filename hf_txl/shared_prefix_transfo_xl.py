"""Keys and values that batch rows share: stored and read once, however many rows continue them.

A prefix precedes the keys and values of the rows themselves. It holds a text that several rows continue (beams,
samples, hypotheses of an n-best list) or the zero states before a text. Attention calls `scores` and then `read` with
the probabilities; only `materialize` copies a prefix for each row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .key_value_buffer_transfo_xl import newest_positions

# B batch = G groups of R consecutive rows   H heads   S prefix positions   Q queries of a row   T its own positions
# D head size
# Time is the second to last dimension throughout.


def equal_groups(index: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """The groups that rows fall into, `(G,)`, and the number R of consecutive rows in each.

    Args:
        index (`torch.Tensor` of shape `(B,)`): Group of each row.

    Returns:
        `None` if the groups differ in size or have one row each: then rows cannot share a prefix.
    """
    groups, counts = index.unique_consecutive(return_counts=True)
    rows_each = len(index) // max(1, len(groups))
    if rows_each < 2 or (counts != rows_each).any():
        return None
    return groups, rows_each


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


__all__ = ["KeyValuePrefix", "Prefix", "ZeroPrefix", "equal_groups"]

"""Keys and values that several rows or positions have in common: stored once, and read once for all of them.

The hypotheses of an n-best list, the beams of a search and several samples of one text go on from one memory. A row
that had a copy of it would make attention read as much again for every token. And the zero states before a text are
one state at many positions. Attention asks for scores of these keys and hands over probabilities; it never sees them
side by side with a row's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# B batch = G groups of R rows side by side   H heads   S shared positions   Q queries of a row
# T positions of its own   D head size


@dataclass(frozen=True, eq=False)
class SharedStates:
    """Keys and values of a layer that precede those of the rows themselves.

    Args:
        keys, values (`torch.Tensor` of shape `(groups, n_head, shared_length, d_head)`): Are left as they are.
        rows_each (`int`): Rows of the batch that go on from each of them, side by side.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rows_each: int

    @property
    def length(self) -> int:
        """Shared positions S."""
        return self.keys.shape[-2]

    # --- what attention asks

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Scores of scaled queries, `(B, H, Q, D)` -> `(B, H, Q, S)`: those of a group meet the keys as one matrix."""
        return self._split_rows(torch.matmul(self._join_rows(query), self.keys.transpose(-1, -2)))

    def read(self, probabilities: torch.Tensor) -> torch.Tensor:
        """What rows with these probabilities read, `(B, H, Q, S)` -> `(B, H, Q, D)`."""
        return self._split_rows(torch.matmul(self._join_rows(probabilities), self.values))

    def _join_rows(self, states: torch.Tensor) -> torch.Tensor:
        # (G * R, H, Q, *) -> (G, R, H, Q, *) -> (G, H, R * Q, *)
        return states.unflatten(0, (-1, self.rows_each)).transpose(1, 2).flatten(2, 3)

    def _split_rows(self, states: torch.Tensor) -> torch.Tensor:
        # (G, H, R * Q, *) -> (G, H, R, Q, *) -> (G * R, H, Q, *)
        return states.unflatten(2, (self.rows_each, -1)).transpose(1, 2).flatten(0, 1)

    def blocks(self, num_rows: int) -> Iterator[tuple[slice, "SharedStates"]]:
        """Cut the batch into blocks of at most `num_rows` rows: whole groups, or parts of one.

        Yields:
            The rows of a block and what they share.
        """
        groups_at_once, rows_at_once = max(1, num_rows // self.rows_each), min(num_rows, self.rows_each)
        for group in range(0, len(self.keys), groups_at_once):
            keys, values = (states[group : group + groups_at_once] for states in (self.keys, self.values))
            for start in range(0, self.rows_each, rows_at_once):
                rows_each = min(rows_at_once, self.rows_each - start)
                first = group * self.rows_each + start
                yield slice(first, first + len(keys) * rows_each), SharedStates(keys, values, rows_each)

    # --- what the memory asks

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "SharedStates":
        """The same with a function of each tensor."""
        return SharedStates(function(self.keys), function(self.values), self.rows_each)

    def newest(self, length: int) -> "SharedStates | None":
        """The last positions; `None` if there are none left."""
        if length == self.length:
            return self
        return self.map(lambda states: states.narrow(-2, states.shape[-2] - length, length)) if length else None

    def in_front_of(
        self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy for each row: keys and values of all its positions, `(B, H, S + T, D)`.

        Args:
            key, value (`torch.Tensor` of shape `(B, H, T, D)`): What rows have of their own.
            rows (`torch.Tensor` of shape `(num_rows,)`, *optional*): Only these rows, in this order.
        """
        index = torch.arange(len(key), device=key.device) if rows is None else rows
        keys, values = (states.index_select(0, index // self.rows_each) for states in (self.keys, self.values))
        if rows is not None:
            key, value = key.index_select(0, rows), value.index_select(0, rows)
        return torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)


@dataclass(frozen=True, eq=False)
class ZeroStates:
    """Keys and values of a layer for the zero states before the first token.

    Args:
        key, value (`torch.Tensor` of shape `(1, n_head, 1, d_head)`): Of one zero state.
        length (`int`): Positions Z that it stands at.
    """

    key: torch.Tensor
    value: torch.Tensor
    length: int

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Scores of scaled queries, `(B, H, Q, D)` -> `(B, H, Q, Z)`."""
        return torch.matmul(query, self.key.transpose(-1, -2)).expand(-1, -1, -1, self.length)

    def read(self, probabilities: torch.Tensor) -> torch.Tensor:
        """What rows with these probabilities read, `(B, H, Q, Z)` -> `(B, H, Q, D)`."""
        # of their own type, which autocast would change
        return probabilities.sum(dim=-1, keepdim=True, dtype=probabilities.dtype) * self.value

    def in_front_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with the zero states written out before them, `(B, H, Z + T, D)`."""
        shape = (len(key), -1, self.length, -1)
        return torch.cat([self.key.expand(shape), key], dim=-2), torch.cat([self.value.expand(shape), value], dim=-2)


@dataclass(frozen=True, eq=False)
class StatesInFront:
    """All that precedes the keys and values of the rows themselves: zero states, then what rows share."""

    zeros: ZeroStates | None
    shared: SharedStates | None

    @property
    def parts(self) -> list[ZeroStates | SharedStates]:
        """What there is, in the order of the text."""
        return [part for part in (self.zeros, self.shared) if part is not None]

    def scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Scores of scaled queries for each part."""
        return [part.scores(query) for part in self.parts]

    def read(self, probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What rows read of all their positions, `(B, H, Q, Z + S + T)` -> `(B, H, Q, D)`.

        Args:
            probabilities (`torch.Tensor`): Of all positions.
            value (`torch.Tensor` of shape `(B, H, T, D)`): Of the rows' own positions.
        """
        *in_front, own = probabilities.split([*(part.length for part in self.parts), value.shape[-2]], dim=-1)
        output = torch.matmul(own, value)
        for part, of_part in zip(self.parts, in_front, strict=True):
            output = output + part.read(of_part)
        return output

    def blocks(self, batch_size: int, num_rows: int) -> Iterator[tuple[slice, "StatesInFront"]]:
        """Cut a batch into blocks of at most `num_rows` rows, each with what precedes it."""
        if self.shared is None:
            yield from ((slice(start, start + num_rows), self) for start in range(0, batch_size, num_rows))
            return
        for rows, shared in self.shared.blocks(num_rows):
            yield rows, StatesInFront(self.zeros, shared)

    def in_front_of(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy for each row: keys and values of all its positions."""
        for part in reversed(self.parts):
            key, value = part.in_front_of(key, value)
        return key, value


__all__ = ["SharedStates", "StatesInFront", "ZeroStates"]

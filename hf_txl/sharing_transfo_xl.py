"""What several rows of a batch have in common, stored once and read once for all of them.

The hypotheses of an n-best list, the beams of a search and several samples of one text go on from one memory. A row
that had a copy of it would make attention read as much again for every token. The memory keeps `SharedStates`;
attention asks them for scores and hands them probabilities.
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


__all__ = ["SharedStates"]

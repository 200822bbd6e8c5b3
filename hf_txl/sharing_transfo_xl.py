"""What several rows of a batch have in common, stored once and read once for all of them.

The hypotheses of an n-best list, the beams of a search and several samples of one text go on from one memory. Copies
of it would have to be made, and to be read for every token. It is apart from memory and attention, which meet here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# B batch = G groups of R rows side by side   H heads   S shared positions   Q queries of a row
# T positions of its own   D head size


@dataclass(frozen=True)
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

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "SharedStates":
        """The same with a function of each tensor."""
        return SharedStates(function(self.keys), function(self.values), self.rows_each)

    def newest(self, length: int) -> "SharedStates | None":
        """The last positions, `None` if there are none left."""
        if length == self.length:
            return self
        return self.map(lambda states: states.narrow(-2, states.shape[-2] - length, length)) if length else None

    def in_front_of(self, key: torch.Tensor, value: torch.Tensor, row: int | None = None) -> tuple[torch.Tensor, ...]:
        """Keys and values of all positions of the rows, or of one row, `(B or 1, H, S + T, D)`, copied."""
        if row is not None:
            group, rows = slice(row // self.rows_each, row // self.rows_each + 1), slice(row, row + 1)
            pairs = ((self.keys[group], key[rows]), (self.values[group], value[rows]))
        else:
            shared = self.map(lambda states: states.repeat_interleave(self.rows_each, dim=0))
            pairs = ((shared.keys, key), (shared.values, value))
        return tuple(torch.cat(pair, dim=-2) for pair in pairs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_bias: torch.Tensor,
        scaling: float,
        dropout: float,
        group: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax attention of rows of one group: their queries meet what they share as one matrix.

        Args:
            query (`torch.Tensor` of shape `(R, H, Q, D)`): Of some rows of one group.
            key, value (`torch.Tensor` of shape `(R, H, T, D)`): What these rows have of their own.
            position_bias (`torch.Tensor` of shape `(R, H, Q, S + T)`, or broadcastable to it):
                Scaled position scores, `-inf` where a query must not look.
            scaling (`float`): Factor of the content scores.
            dropout (`float`): Share of the probabilities that are set to zero.
            group (`int`): Which one.

        Returns:
            `(R, Q, H, D)` and the probabilities that were used, `(R, H, Q, S + T)`.
        """
        shared_key, shared_value = self.keys[group], self.values[group]
        num_rows, _, query_length, _ = query.shape
        # (R, H, Q, D) -> (H, R, Q, D): heads in front, so that rows and queries are one dimension
        query, key, value, position_bias = (
            states.transpose(0, 1)
            for states in (query * scaling, key, value, position_bias.expand(num_rows, query.shape[1], -1, -1))
        )
        shared_scores = torch.matmul(query.flatten(1, 2), shared_key.transpose(-1, -2))
        own_scores = torch.matmul(query, key.transpose(-1, -2))
        scores = torch.cat([shared_scores.unflatten(1, (num_rows, query_length)), own_scores], dim=-1)
        scores = scores + position_bias
        precision = torch.promote_types(scores.dtype, torch.float32)
        probabilities = F.dropout(F.softmax(scores, dim=-1, dtype=precision).to(value.dtype), dropout, dropout > 0)
        shared_probabilities, own_probabilities = probabilities.split([self.length, key.shape[-2]], dim=-1)
        output = torch.matmul(shared_probabilities.flatten(1, 2), shared_value).unflatten(1, (num_rows, query_length))
        output = output + torch.matmul(own_probabilities, value)
        # (H, R, Q, D) -> (R, Q, H, D), (H, R, Q, S + T) -> (R, H, Q, S + T)
        return output.permute(1, 2, 0, 3), probabilities.transpose(0, 1)


__all__ = ["SharedStates"]

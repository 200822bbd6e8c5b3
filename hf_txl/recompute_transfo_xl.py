"""Training: functions whose backward pass computes again what would be large to keep.

Between forward and backward, attention keeps no score of a query for a key, the feed-forward layer keeps one tensor
instead of three, and the softmax no matrix of the vocabulary's size but its gradient. Scores are worked through in
blocks that stay in the cache of a processor, which costs less than writing and reading them all. It is apart since
nothing here has a parameter or a layout of its own; the formulas are those of the modules that call it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .positions_transfo_xl import AttentionLayout, align_relative_scores, scores_by_distance

# B batch   H heads   Q queries (one segment)   K keys   D head size   N = K + Q rows of the position table
# q, k queries and keys of a block   n = k + q its rows
# T tokens   t tokens of a block   S rows of a table   C clusters   E width of a table

# scores of one block: 4 MiB in float32
BLOCK_SCORES = 2**20


class RelativeAttentionFunction(torch.autograd.Function):
    """softmax([(q + u) k + (q + v) r] scaling) values, for queries that see what lies before them.

    Takes `query` `(B, H, Q, D)`, `key` and `value` `(B, H, K, D)`, `rows` `(N, H, D)`: relative keys for distances
    `K - 1 … -Q`, `content_bias` and `position_bias` `(H, D)`: u and v, `layout`: which keys a query may see, without
    `distances`, `scaling`: factor of the scores, and `dropout`: part of the probabilities that is dropped. Gives
    `(B, Q, H, D)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
        layout: AttentionLayout,
        scaling: float,
        dropout: float,
    ) -> torch.Tensor:
        tensors = query, key, value, rows, content_bias, position_bias
        ctx.save_for_backward(*tensors)
        ctx.layout, ctx.scaling, ctx.dropout = layout, scaling, dropout
        # one number of the default generator, from which both passes draw the same
        ctx.seed = int(torch.randint(2**62, ())) if dropout else 0
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(ctx, *tensors):
                weights = block.probabilities.to(value.dtype)
                if block.kept is not None:
                    weights = weights * block.kept
                # (H, q, k) x (H, k, D) -> (H, q, D) -> (q, H, D)
                output[block.row, block.queries] = torch.matmul(weights, block.value).transpose(0, 1)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        query, key, value, rows = tensors[:4]
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros(state.shape, dtype=state.dtype, device=state.device) for state in (key, value))
        # heads first, as the products want it
        of_rows = rows.new_zeros(rows.shape[1], rows.shape[0], rows.shape[2])
        of_biases = [torch.zeros_like(rows[0], dtype=torch.promote_types(rows.dtype, torch.float32)) for _ in range(2)]
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(ctx, *tensors):
                # (q, H, D) -> (H, q, D)
                of_output = gradient[block.row, block.queries].transpose(0, 1).to(value.dtype)
                weights = block.probabilities.to(value.dtype)
                of_weights = torch.matmul(of_output, block.value.transpose(1, 2))
                if block.kept is not None:
                    weights, of_weights = weights * block.kept, of_weights * block.kept
                of_value[block.row, :, block.keys].baddbmm_(weights.transpose(1, 2), of_output)
                of_scores = torch._softmax_backward_data(
                    of_weights.to(block.probabilities.dtype), block.probabilities, -1, block.probabilities.dtype
                ).to(value.dtype)
                of_key[block.row, :, block.keys].baddbmm_(of_scores.transpose(1, 2), block.content_query)
                by_content = torch.matmul(of_scores, block.key)
                # one column per key -> one column per distance
                by_distance = of_scores.new_zeros(*of_scores.shape[:2], sum(of_scores.shape[1:]))
                align_relative_scores(by_distance, of_scores.shape[2]).copy_(of_scores)
                of_rows[:, block.distances].baddbmm_(by_distance.transpose(1, 2), block.position_query)
                by_position = torch.matmul(by_distance, block.rows)
                of_query[block.row, :, block.queries] = (by_content + by_position) * ctx.scaling
                for total, part in zip(of_biases, (by_content, by_position), strict=True):
                    total.add_(part.sum(dim=1, dtype=total.dtype), alpha=ctx.scaling)
        of_u, of_v = (total.to(bias.dtype) for total, bias in zip(of_biases, tensors[4:], strict=True))
        return of_query, of_key, of_value, of_rows.transpose(0, 1), of_u, of_v, None, None, None


class _Block:
    """Some queries of one row of the batch, the keys that they may see, and what they make of them."""

    def __init__(
        self,
        ctx: Any,
        row: int,
        queries: slice,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
    ):
        layout, self.keys = ctx.layout.part(row, queries.start, queries.stop)
        self.row, self.queries = row, queries
        # the table begins with distance K - 1, the block with distance k - 1
        self.distances = slice(key.shape[2] - layout.key_length, key.shape[2] + layout.query_length)
        self.key, self.value = key[row, :, self.keys], value[row, :, self.keys]
        # (n, H, D) -> (H, n, D)
        self.rows = rows[self.distances].transpose(0, 1).to(query.dtype)
        states = query[row, :, queries]
        self.content_query = (states + content_bias.to(states.dtype)[:, None]) * ctx.scaling
        self.position_query = (states + position_bias.to(states.dtype)[:, None]) * ctx.scaling
        by_distance = scores_by_distance(self.position_query, self.rows.transpose(1, 2), layout)
        by_key = align_relative_scores(by_distance, layout.key_length)
        scores = torch.baddbmm(by_key, self.content_query, self.key.transpose(1, 2))
        if layout.key_mask is not None:
            scores.masked_fill_(~layout.key_mask, float("-inf"))
        precision = torch.promote_types(scores.dtype, torch.float32)
        self.probabilities = torch.softmax(scores, dim=-1, dtype=precision)
        self.kept = dropout_factors(scores, ctx.dropout, ctx.seed + number) if ctx.dropout else None


def dropout_factors(like: torch.Tensor, dropout: float, seed: int) -> torch.Tensor:
    """Zeros where dropout drops and else `1 / (1 - dropout)`, the same for the same seed."""
    kept = torch.empty_like(like).bernoulli_(1 - dropout, generator=torch.Generator(like.device).manual_seed(seed))
    return kept.div_(1 - dropout) if dropout < 1 else kept


def _blocks(ctx: Any, query: torch.Tensor, key: torch.Tensor, *others: Any) -> Iterator[_Block]:
    """All queries, so many at a time that their scores stay in the cache, and equally many."""
    batch_size, num_heads, query_length, _ = query.shape
    count = -(-num_heads * query_length * key.shape[2] // BLOCK_SCORES)
    size = -(-query_length // min(count, query_length))
    starts = range(0, query_length, size)
    for row in range(batch_size):
        for index, start in enumerate(starts):
            queries = slice(start, min(start + size, query_length))
            yield _Block(ctx, row, queries, row * len(starts) + index, query, key, *others)


class ReluDropoutFunction(torch.autograd.Function):
    """`dropout(relu(x))`, of which only the result is kept: where it is positive, the gradient passes."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, dropout: float) -> torch.Tensor:
        output = torch.nn.functional.dropout(torch.relu(states), dropout)
        ctx.save_for_backward(output)
        ctx.factor = 1 / (1 - dropout) if dropout < 1 else 0.0
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.aten.threshold_backward(gradient, ctx.saved_tensors[0], 0).mul_(ctx.factor), None


class TableGradient:
    """One gradient for a table of which several products read consecutive rows each, once.

    Added up from one gradient per product, each with all rows, it would be written several times over.

    Args:
        table (`torch.Tensor` of shape `(rows, width)`): The table.
    """

    def __init__(self, table: torch.Tensor):
        self.like = torch.empty_like(table, device="meta")
        self.device = table.device
        self.whole: torch.Tensor | None = None

    def part(self, start: int, end: int) -> torch.Tensor:
        """Rows of the gradient, for one product to write all of them."""
        if self.whole is None:
            self.whole = torch.empty_like(self.like, device=self.device)
        return self.whole[start:end]


class TablePartsFunction(torch.autograd.Function):
    """Consecutive rows of a table, of given sizes, whose gradients are written into one [`TableGradient`]."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, sizes: list[int], gradient: TableGradient) -> tuple[torch.Tensor, ...]:
        ctx.sizes, ctx.gradient = sizes, gradient
        return tuple(part.detach() for part in table.split(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *parts: torch.Tensor) -> Any:
        whole, ctx.gradient.whole = ctx.gradient.whole, None
        if whole is not None and all(
            part.data_ptr() == own.data_ptr() for part, own in zip(parts, whole.split(ctx.sizes), strict=True)
        ):
            return whole, None, None
        return torch.cat(parts), None, None


class BucketLossFunction(torch.autograd.Function):
    """Negative log-likelihood of one column per token: `logsumexp(logits) - logits[column]`.

    The logits are those of a table and, behind them, of a second one (the clusters, in the head of an adaptive
    softmax). The backward pass makes probabilities of the logits that were kept, or, where these would be more than
    `most_logits`, of logits that it computes again for some tokens at a time.

    Takes `hidden_states` `(T, E)`, `columns` `(T,)`: -100 is ignored, `weight` `(S, E)`, `bias` `(S,)`, `more_weight`
    `(C, E)` and `more_bias` `(C,)` or `None`, `of_weight`: called for the tensor `(S, E)` to write the gradient of
    `weight` into, or `None`, and `most_logits`. Gives `(T,)`, at least float32, 0 where ignored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        columns: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        more_weight: torch.Tensor | None,
        more_bias: torch.Tensor | None,
        of_weight: Callable[[], torch.Tensor] | None,
        most_logits: int,
    ) -> torch.Tensor:
        device = hidden_states.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        ctx.of_weight = of_weight
        ctx.block = max(1, most_logits // len(weight))
        tables = _in_dtype(ctx.dtype, weight, bias, more_weight, more_bias)
        losses: list[torch.Tensor] = []
        kept: list[Any] = [None, None, None]
        with torch.autocast(device, enabled=False):
            for hidden, column in zip(hidden_states.split(ctx.block), columns.split(ctx.block), strict=True):
                logits, more, lse = kept = list(_logits(hidden.to(ctx.dtype), *tables))
                losses.append(_losses(logits, more, lse, column))
        if len(losses) > 1:
            kept = [None, None, None]
        ctx.save_for_backward(hidden_states, columns, weight, bias, more_weight, more_bias, *kept)
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        hidden_states, columns, weight, bias, more_weight, more_bias, *kept = ctx.saved_tensors
        tables = _in_dtype(ctx.dtype, weight, bias, more_weight, more_bias)
        of_hidden = torch.empty_like(hidden_states)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = torch.empty_like(weight) if ctx.of_weight is None else ctx.of_weight()
        of_bias = torch.zeros_like(bias)
        of_more = None if more_weight is None else (torch.zeros_like(more_weight), torch.zeros_like(more_bias))
        size = len(weight)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, max(1, len(columns)), ctx.block):
                tokens = slice(start, start + ctx.block)
                hidden, column = hidden_states[tokens].to(ctx.dtype), columns[tokens]
                logits, more, lse = kept if kept[0] is not None else _logits(hidden, *tables)
                of_loss = of_losses[tokens].masked_fill(column < 0, 0.0)[:, None]
                of_logits = _of_logits(logits, lse, of_loss, column).to(ctx.dtype)
                of_states = torch.mm(of_logits, tables[0])
                if of_more is not None:
                    assert more is not None
                    of_columns = _of_logits(more, lse, of_loss, column - size).to(ctx.dtype)
                    of_states.addmm_(of_columns, tables[2])
                    of_more[0].add_(torch.mm(of_columns.t(), hidden))
                    of_more[1].add_(of_columns.sum(dim=0, dtype=more_bias.dtype))
                of_hidden[tokens] = of_states
                of_bias.add_(of_logits.sum(dim=0, dtype=bias.dtype))
                if of_weight is None:
                    continue
                # the first write covers all rows, of a cluster without tokens too
                if ctx.dtype != of_weight.dtype:
                    product = torch.mm(of_logits.t(), hidden)
                    of_weight.add_(product) if start else of_weight.copy_(product)
                elif start:
                    of_weight.addmm_(of_logits.t(), hidden)
                else:
                    torch.mm(of_logits.t(), hidden, out=of_weight)
        return of_hidden, None, of_weight, of_bias, *(of_more or (None, None)), None, None


def _in_dtype(dtype: torch.dtype, *tables: torch.Tensor | None) -> list[Any]:
    return [None if table is None else table.to(dtype) for table in tables]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    more_weight: torch.Tensor | None,
    more_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Logits of both tables and the logarithm of their normalisation, `(t, S)`, `(t, C)`, `(t,)`."""
    logits = torch.addmm(bias, hidden, weight.t())
    precision = torch.promote_types(logits.dtype, torch.float32)
    lse = torch.logsumexp(logits.to(precision), dim=-1)
    if more_weight is None or more_bias is None:
        return logits, None, lse
    more = torch.addmm(more_bias, hidden, more_weight.t())
    return logits, more, torch.logaddexp(lse, torch.logsumexp(more.to(precision), dim=-1))


def _losses(logits: torch.Tensor, more: torch.Tensor | None, lse: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    chosen = logits.gather(1, columns.clamp(0, size - 1)[:, None])[:, 0]
    if more is not None:
        behind = more.gather(1, (columns - size).clamp(0, more.shape[1] - 1)[:, None])[:, 0]
        chosen = torch.where(columns < size, chosen, behind)
    return (lse - chosen).masked_fill_(columns < 0, 0.0)


def _of_logits(logits: torch.Tensor, lse: torch.Tensor, of_loss: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gradient of the losses, `(probabilities - 1 at the column) of_loss`; columns of another table count nothing."""
    gradient = (logits.to(lse.dtype) - lse[:, None]).exp_().mul_(of_loss)
    inside = (columns >= 0) & (columns < logits.shape[1])
    at_column = -of_loss * inside[:, None]
    return gradient.scatter_add_(1, columns.clamp(0, logits.shape[1] - 1)[:, None], at_column.to(gradient.dtype))


__all__ = [
    "BucketLossFunction",
    "RelativeAttentionFunction",
    "ReluDropoutFunction",
    "TableGradient",
    "TablePartsFunction",
]

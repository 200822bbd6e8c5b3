"""Executes attention: at once, in blocks of queries, with a prefix, recomputed in the backward pass, or compiled.

`attention_transfo_xl.py` defines the formulas of each kind. Every way takes the same `AttentionInputs` and returns the
same numbers up to rounding; `choose_way` is the only place that selects one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .autograd_transfo_xl import first_order_only
from .layout_transfo_xl import AttentionLayout
from .positions_transfo_xl import PositionTable, align_relative_scores, scores_by_distance
from .shared_prefix_transfo_xl import Prefix, ZeroPrefix

# B batch   H heads   Q queries (one segment)   K keys: zero states, then stored ones, then the segment's
# T keys outside a prefix   D head size   N = K + Q relative keys
# q, k queries and keys of a block   n = k + q its relative keys

# queries per block, so that their scores fit into the cache of a CPU: of one batch row, or of several that share keys
QUERY_BLOCK = 128
# scores per block in training: 4 MiB in float32
BLOCK_SCORES = 2**20
# maximum queries per batch row for which a prefix of zero states, or one that rows share, is read in place; beyond,
# fused attention over materialised keys is faster
ZERO_PREFIX_QUERIES, SHARED_PREFIX_QUERIES = 32, 8

Biases: TypeAlias = tuple[torch.Tensor, torch.Tensor]
AttentionOutput: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]


class AttentionKind(Protocol):
    """Formulas of a kind of attention, documented by `SegmentAttention`."""

    scaling: float
    has_biases: bool
    has_value_bias: bool
    training: bool

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor: ...

    def value_bias(
        self, probabilities: torch.Tensor, layout: AttentionLayout, table: PositionTable
    ) -> torch.Tensor: ...

    def position_terms(
        self, layout: AttentionLayout, table: PositionTable, biases: Biases | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@dataclass(eq=False)
class AttentionInputs:
    """Inputs of the attention of one layer.

    Args:
        kind (`AttentionKind`): Formulas.
        query (`torch.Tensor` of shape `(batch_size, n_head, query_length, d_head)`): Queries of the segment.
        key, value (`torch.Tensor` of shape `(batch_size, n_head, own_length, d_head)`): Without those of the prefix.
        layout (`AttentionLayout`): Layout of queries and all keys.
        table (`PositionTable`): Position table.
        biases (`tuple` of two tensors of shape `(n_head, d_head)`, *optional*): u and v if layers share them.
        prefix (`Prefix`, *optional*): Keys and values that precede `key` and `value`.
        implementation (`str`): Name of the backend.
        dropout (`float`): Dropout of the probabilities.
        wants_probabilities (`bool`): Whether to return the probabilities.
    """

    kind: AttentionKind
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    layout: AttentionLayout
    table: PositionTable
    biases: Biases | None = None
    prefix: Prefix | None = None
    implementation: str = "eager"
    dropout: float = 0.0
    wants_probabilities: bool = False

    @property
    def is_inference(self) -> bool:
        """Whether the call is in eval mode and records no gradients."""
        return not (self.kind.training or (torch.is_grad_enabled() and self.query.requires_grad))

    @property
    def needs_probabilities(self) -> bool:
        """Whether the backend must return probabilities."""
        return self.wants_probabilities or self.kind.has_value_bias

    def materialized(self) -> "AttentionInputs":
        """The same inputs with a copy of the prefix for each batch row."""
        if self.prefix is None:
            return self
        key, value = self.prefix.materialize(self.key, self.value)
        return replace(self, key=key, value=value, prefix=None)


# --- backends


def eager_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    scaling: float,
    dropout: float,
    prefix: Prefix | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Explicit softmax attention; the softmax is computed at least in float32.

    Returns:
        Output `(B, Q, H, D)` and probabilities after dropout `(B, H, Q, K)`.
    """
    query = query * scaling
    scores = torch.matmul(query, key.transpose(-1, -2))
    if prefix is not None:
        scores = torch.cat([*prefix.scores(query), scores], dim=-1)
    scores = scores + position_bias
    precision = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=precision).to(value.dtype)
    probabilities = F.dropout(probabilities, dropout, module.training)
    output = torch.matmul(probabilities, value) if prefix is None else prefix.read(probabilities, value)
    return output.transpose(1, 2), probabilities


def sdpa_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, None]:
    """PyTorch's fused attention; unlike the library's wrapper, it does not copy the strided bias."""
    output = F.scaled_dot_product_attention(query, key, value, position_bias, dropout, scale=scaling)
    return output.transpose(1, 2), None


def library_attention(name: str) -> Callable[..., Any]:
    """An attention function registered with the library, with the position bias as its only mask."""
    attend = ALL_ATTENTION_FUNCTIONS[name]

    def attend_without_mask(module: nn.Module, query: torch.Tensor, *states: torch.Tensor, **options: Any) -> Any:
        # the library's functions index the bias by batch row and head
        options["position_bias"] = options["position_bias"].expand(*query.shape[:2], -1, -1)
        return attend(module, query, *states, None, is_causal=False, **options)

    return attend_without_mask


BACKENDS: dict[str, Callable[..., Any]] = {"eager": eager_attention, "sdpa": sdpa_attention}


def choose_backend(inputs: AttentionInputs, position_bias: torch.Tensor) -> Callable[..., Any]:
    """The backend named in the inputs, or eager attention where that one is slower or cannot compute them."""
    name = inputs.implementation
    # with a bias that needs a gradient, SDPA on the CPU takes its slow path
    slow_path = name == "sdpa" and position_bias.requires_grad and position_bias.device.type == "cpu"
    if inputs.needs_probabilities or inputs.prefix is not None or slow_path:
        name = "eager"
    return BACKENDS[name] if name in BACKENDS else library_attention(name)


# --- ways


def compute(inputs: AttentionInputs) -> AttentionOutput:
    """Compute all queries in one call of a backend; a prefix is read in place."""
    kind, layout, table = inputs.kind, inputs.layout, inputs.table
    content_bias, position_query_bias = inputs.biases or (None, None)
    position_bias = kind.position_bias(inputs.query, layout, table, position_query_bias)
    output, probabilities = choose_backend(inputs, position_bias)(
        kind,
        kind.content_query(inputs.query, content_bias),
        inputs.key,
        inputs.value,
        position_bias=position_bias,
        scaling=kind.scaling,
        dropout=inputs.dropout,
        **({} if inputs.prefix is None else {"prefix": inputs.prefix}),
    )
    if kind.has_value_bias:
        output = output + kind.value_bias(probabilities, layout, table)
    return output, probabilities


class AtOnce:
    """All queries at once, with a copy of the prefix for each batch row: for any backend and for compilation."""

    def run(self, inputs: AttentionInputs) -> AttentionOutput:
        return compute(inputs.materialized())


class WithPrefix:
    """A prefix read in place, for few queries per batch row; on a CPU, in blocks of batch rows."""

    def run(self, inputs: AttentionInputs) -> AttentionOutput:
        assert inputs.prefix is not None
        # all blocks use the same relative keys
        table, batch_size = inputs.table.for_one_layer(), len(inputs.query)
        on_cpu = inputs.query.device.type == "cpu"
        rows_at_once = max(1, QUERY_BLOCK // inputs.layout.query_length) if on_cpu else batch_size
        parts = []
        for rows, prefix in inputs.prefix.blocks(batch_size, rows_at_once):
            states = {name: getattr(inputs, name)[rows] for name in ("query", "key", "value")}
            parts.append(compute(replace(inputs, **states, table=table, prefix=prefix)))
        outputs, probabilities = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(probabilities) if inputs.wants_probabilities else None


class InQueryBlocks:
    """Blocks of queries of one batch row, each with the keys that it may attend to."""

    def run(self, inputs: AttentionInputs) -> AttentionOutput:
        query, layout = inputs.query, inputs.layout
        # all blocks use the same relative keys
        table = inputs.table.for_one_layer()
        output = query.new_empty(query.shape[0], layout.query_length, *query.shape[1::2])
        for row, prefix in (inputs.prefix or Prefix(None, None)).blocks(len(query), 1):
            row_key, row_value = prefix.materialize(inputs.key[row], inputs.value[row])
            for start in range(0, layout.query_length, QUERY_BLOCK):
                block, keys = layout.part(row.start, start, min(start + QUERY_BLOCK, layout.query_length))
                queries = slice(start, start + block.query_length)
                part = replace(
                    inputs,
                    query=query[row, :, queries],
                    key=row_key[:, :, keys],
                    value=row_value[:, :, keys],
                    layout=block,
                    table=table,
                    prefix=None,
                )
                output[row, queries], _ = compute(part)
        return output, None


class Recomputed:
    """Training on a CPU: scores are recomputed in the backward pass instead of saved.

    Also used in training mode without gradients, as in the first pass of reentrant checkpointing: both passes must
    draw the same dropout.
    """

    def run(self, inputs: AttentionInputs) -> AttentionOutput:
        inputs = inputs.materialized()
        kind, layout = inputs.kind, inputs.layout
        output = RelativeAttentionFunction.apply(
            inputs.query,
            inputs.key,
            inputs.value,
            *kind.position_terms(layout, inputs.table, inputs.biases),
            layout,
            kind.scaling,
            inputs.dropout,
        )
        return output, None


class AttentionWay(Protocol):
    """A way to execute attention."""

    def run(self, inputs: AttentionInputs) -> AttentionOutput: ...


AT_ONCE, WITH_PREFIX, IN_QUERY_BLOCKS, RECOMPUTED = AtOnce(), WithPrefix(), InQueryBlocks(), Recomputed()


def choose_way(inputs: AttentionInputs) -> AttentionWay:
    """The fastest way that can compute these inputs."""
    layout, on_cpu = inputs.layout, inputs.query.device.type == "cpu"
    if torch.compiler.is_compiling() or inputs.implementation not in BACKENDS:
        return AT_ONCE
    if not inputs.is_inference:
        can_recompute = on_cpu and layout.distances is None and inputs.kind.has_biases
        return RECOMPUTED if can_recompute and not inputs.wants_probabilities else AT_ONCE
    if inputs.prefix is not None:
        most = ZERO_PREFIX_QUERIES if inputs.prefix.shared is None else SHARED_PREFIX_QUERIES
        if layout.query_length <= most:
            return WITH_PREFIX
    if (
        on_cpu
        and layout.query_length > 1
        and (len(inputs.query) > 1 or layout.query_length > QUERY_BLOCK)
        and layout.distances is None
        and not inputs.needs_probabilities
    ):
        return IN_QUERY_BLOCKS
    return AT_ONCE


def attend(inputs: AttentionInputs) -> AttentionOutput:
    """Execute attention.

    Returns:
        Output `(batch_size, query_length, n_head, d_head)`, and probabilities `(batch_size, n_head, query_length,
        key_length)` if `wants_probabilities`.
    """
    if inputs.prefix is not None and inputs.prefix.zeros is not None:
        if torch.compiler.is_compiling() or inputs.layout.start_mask is not None:
            inputs = place_zero_states(inputs, inputs.prefix.zeros)
    return choose_way(inputs).run(inputs)


def place_zero_states(inputs: AttentionInputs, zeros: ZeroPrefix) -> AttentionInputs:
    """Write zero states into keys and values, for layouts with a `start_mask` and for compilation."""
    assert inputs.prefix is not None and inputs.prefix.shared is None
    key, value, layout = inputs.key, inputs.value, inputs.layout
    compiles = torch.compiler.is_compiling()
    # compilers specialise on sizes 0 and 1: allocate as many slots as keys, and use the last ones
    num_slots = layout.key_length if compiles else zeros.length
    slots, last = (key.shape[0], -1, num_slots, -1), slice(key.shape[2] if compiles else 0, None)
    key = torch.cat([zeros.key.expand(slots), key], dim=2)[:, :, last]
    value = torch.cat([zeros.value.expand(slots), value], dim=2)[:, :, last]
    if layout.start_mask is not None:
        is_start = layout.start_mask[:, None, :, None]
        key, value = torch.where(is_start, zeros.key, key), torch.where(is_start, zeros.value, value)
    return replace(inputs, key=key, value=value, prefix=None)


# --- recomputation


class RelativeAttentionFunction(torch.autograd.Function):
    """softmax([(q + u) k + (q + v) r] scaling) values, causal, with scores recomputed in the backward pass.

    Args:
        query (`torch.Tensor` of shape `(B, H, Q, D)`): Queries.
        key, value (`torch.Tensor` of shape `(B, H, K, D)`): Keys and values.
        relative_keys (`torch.Tensor` of shape `(N, H, D)`): For distances `K - 1 … -Q`.
        content_bias, position_bias (`torch.Tensor` of shape `(H, D)`): u and v.
        layout (`AttentionLayout`): Layout of queries and keys, without `distances`.
        scaling (`float`): Factor of the scores.
        dropout (`float`): Dropout of the probabilities.

    Returns:
        `torch.Tensor` of shape `(B, Q, H, D)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        relative_keys: torch.Tensor,
        content_bias: torch.Tensor,
        position_bias: torch.Tensor,
        layout: AttentionLayout,
        scaling: float,
        dropout: float,
    ) -> torch.Tensor:
        tensors = _Tensors(query, key, value, relative_keys, content_bias, position_bias)
        ctx.save_for_backward(*tensors)
        ctx.layout, ctx.scaling, ctx.dropout = layout, scaling, dropout
        # one draw from the default generator, which seeds the dropout of both passes
        ctx.seed = int(torch.randint(2**62, ())) if dropout else 0
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(ctx, tensors):
                weights = block.probabilities.to(value.dtype)
                if block.kept is not None:
                    weights = weights * block.kept
                # (H, q, k) x (H, k, D) -> (H, q, D) -> (q, H, D)
                output[block.row, block.queries] = torch.matmul(weights, block.value).transpose(0, 1)
        return output

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tensors = _Tensors(*ctx.saved_tensors)
        query, key, value, relative_keys = tensors[:4]
        of_query = torch.empty_like(query)
        of_key, of_value = (torch.zeros(state.shape, dtype=state.dtype, device=state.device) for state in (key, value))
        # heads first, as the matrix products need it
        of_relative_keys = relative_keys.new_zeros(
            relative_keys.shape[1], relative_keys.shape[0], relative_keys.shape[2]
        )
        of_biases = [
            torch.zeros_like(relative_keys[0], dtype=torch.promote_types(relative_keys.dtype, torch.float32))
            for _ in range(2)
        ]
        with torch.autocast(query.device.type, enabled=False):
            for block in _blocks(ctx, tensors):
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
                of_relative_keys[:, block.distances].baddbmm_(by_distance.transpose(1, 2), block.position_query)
                by_position = torch.matmul(by_distance, block.relative_keys)
                of_query[block.row, :, block.queries] = (by_content + by_position) * ctx.scaling
                for total, part in zip(of_biases, (by_content, by_position), strict=True):
                    total.add_(part.sum(dim=1, dtype=total.dtype), alpha=ctx.scaling)
        of_u, of_v = (total.to(bias.dtype) for total, bias in zip(of_biases, tensors[4:], strict=True))
        return of_query, of_key, of_value, of_relative_keys.transpose(0, 1), of_u, of_v, None, None, None


class _Tensors(NamedTuple):
    """The tensors that [`RelativeAttentionFunction`] differentiates, with the shapes given there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    relative_keys: torch.Tensor
    content_bias: torch.Tensor
    position_bias: torch.Tensor


@dataclass(eq=False, slots=True)
class _Block:
    """Probabilities of a block of queries of one batch row over the keys that it may attend to."""

    row: int
    queries: slice
    keys: slice
    distances: slice
    """Their entries among the relative keys."""
    key: torch.Tensor
    value: torch.Tensor
    relative_keys: torch.Tensor
    content_query: torch.Tensor
    position_query: torch.Tensor
    probabilities: torch.Tensor
    kept: torch.Tensor | None
    """Factors of dropout, if there is any."""


def _compute_block(ctx: Any, tensors: _Tensors, row: int, queries: slice, number: int) -> _Block:
    layout, keys = ctx.layout.part(row, queries.start, queries.stop)
    # the table begins with distance K - 1, the block with distance k - 1
    key_length = tensors.key.shape[2]
    distances = slice(key_length - layout.key_length, key_length + layout.query_length)
    key = tensors.key[row, :, keys]
    states = tensors.query[row, :, queries]
    # (n, H, D) -> (H, n, D)
    relative_keys = tensors.relative_keys[distances].transpose(0, 1).to(states.dtype)
    content_query = (states + tensors.content_bias.to(states.dtype)[:, None]) * ctx.scaling
    position_query = (states + tensors.position_bias.to(states.dtype)[:, None]) * ctx.scaling
    by_distance = scores_by_distance(position_query, relative_keys.transpose(1, 2), layout)
    by_key = align_relative_scores(by_distance, layout.key_length)
    scores = torch.baddbmm(by_key, content_query, key.transpose(1, 2))
    if layout.key_mask is not None:
        scores.masked_fill_(~layout.key_mask, float("-inf"))
    precision = torch.promote_types(scores.dtype, torch.float32)
    return _Block(
        row,
        queries,
        keys,
        distances,
        key,
        tensors.value[row, :, keys],
        relative_keys,
        content_query,
        position_query,
        probabilities=torch.softmax(scores, dim=-1, dtype=precision),
        kept=dropout_factors(scores, ctx.dropout, ctx.seed + number) if ctx.dropout else None,
    )


def dropout_factors(like: torch.Tensor, dropout: float, seed: int) -> torch.Tensor:
    """Dropout factors, 0 or `1 / (1 - dropout)`, determined by the seed."""
    kept = torch.empty_like(like).bernoulli_(1 - dropout, generator=torch.Generator(like.device).manual_seed(seed))
    return kept.div_(1 - dropout) if dropout < 1 else kept


def _blocks(ctx: Any, tensors: _Tensors) -> Iterator[_Block]:
    """Blocks of queries of equal size whose scores fit into the cache of a CPU."""
    batch_size, num_heads, query_length, _ = tensors.query.shape
    count = -(-num_heads * query_length * tensors.key.shape[2] // BLOCK_SCORES)
    size = -(-query_length // min(count, query_length))
    starts = range(0, query_length, size)
    for row in range(batch_size):
        for index, start in enumerate(starts):
            queries = slice(start, min(start + size, query_length))
            yield _compute_block(ctx, tensors, row, queries, row * len(starts) + index)


__all__ = ["AttentionInputs", "RelativeAttentionFunction", "attend", "choose_way"]

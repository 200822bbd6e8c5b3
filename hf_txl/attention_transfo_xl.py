"""Attention over a memory and a segment: one class per attention kind behind one call.

Follows `mem_transformer.py` of the original PyTorch code and section 3.3 of
[Dai et al., 2019](https://arxiv.org/abs/1901.02860); [Shaw et al., 2018](https://arxiv.org/abs/1803.02155);
[Huang et al., 2018](https://arxiv.org/abs/1809.04281); [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762);
[Al-Rfou et al., 2018](https://arxiv.org/abs/1808.04444). A layer hands its position scores, mask included, to the
backend as an additive bias. `docs/positions.md` sets the kinds side by side.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_transfo_xl import TransfoXLConfig
from .positions_transfo_xl import (
    AttentionLayout,
    RelativeKeys,
    align_relative_scores,
    distance_mask,
    gather_relative_scores,
    scores_by_distance,
    spread_relative_probabilities,
)
from .recompute_transfo_xl import RelativeAttentionFunction
from .sharing_transfo_xl import SharedStates, StatesInFront, ZeroStates
from .weights_transfo_xl import is_plain

# B batch   H heads   Q queries (one segment)   K keys: start slots, then stored ones, then the segment's
# D head size   N = K + Q rows of a position table


class KeyValueStore(Protocol):
    """What attention needs of a cache that keeps keys and values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    scaling: float,
    dropout: float,
    in_front: StatesInFront | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention spelt out, at least in float32.

    Returns `(B, Q, H, D)` and the probabilities it used, after dropout, `(B, H, Q, K)`.
    """
    query = query * scaling
    scores = torch.matmul(query, key.transpose(-1, -2))
    if in_front is not None:
        scores = torch.cat([*in_front.scores(query), scores], dim=-1)
    scores = scores + position_bias
    precision = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=precision).to(value.dtype)
    probabilities = F.dropout(probabilities, dropout, module.training)
    output = torch.matmul(probabilities, value) if in_front is None else in_front.read(probabilities, value)
    return output.transpose(1, 2), probabilities


def sdpa_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, None]:
    """PyTorch's fused attention; unlike the library's wrapper it takes the strided bias as it is, without a copy."""
    output = F.scaled_dot_product_attention(query, key, value, position_bias, dropout, scale=scaling)
    return output.transpose(1, 2), None


BACKENDS: dict[str, Callable] = {"eager": eager_attention, "sdpa": sdpa_attention}

# queries that are worked through at once, so that their scores stay in the cache of a CPU: of one row of the batch, or
# of several rows that share keys
QUERY_BLOCK = 128
# queries of a row that read keys in front of its own where they are, if these are zero states, and if they are shared:
# with more of them, fused attention over all keys of the row, put together, is faster
FEW_QUERIES, FEW_SHARING_QUERIES = 32, 8


class SegmentAttention(nn.Module):
    """What all attention kinds share: projections, memory, start slots, backend, residual and normalisation.

    A kind is a subclass that says how a query meets keys (`content_query`) and positions (`position_bias`), and, if
    positions enter elsewhere, how (`add_positions`, `value_bias`).
    """

    # the position bias holds the causal mask; backends must not add one of their own
    is_causal = False
    # whether the kind reads sinusoids, has biases u and v, adds a term to the values
    uses_sinusoids = False
    has_biases = False
    has_value_bias = False

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.n_head, config.d_head
        self.scaling = self.head_size**-0.5
        self.pre_lnorm = config.pre_lnorm
        self.make_projections()
        # published names, which are a contract, here and below
        self.o_net = nn.Linear(self.num_heads * self.head_size, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.dropout)

    def make_projections(self) -> None:
        """Query, key and value in one matrix."""
        self.qkv_net = nn.Linear(self.config.d_model, 3 * self.num_heads * self.head_size, bias=False)

    # --- what a kind says

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The query that meets keys, `(B, H, Q, D)`."""
        return query

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Scaled position scores, `-inf` where a query must not look, `(B, H, Q, K)` or broadcastable to it."""
        raise NotImplementedError

    def value_bias(
        self, probabilities: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys
    ) -> torch.Tensor:
        """What positions add to the output of attention, `(B, Q, H, D)`, for kinds with `has_value_bias`."""
        raise NotImplementedError

    def add_positions(
        self, states: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys
    ) -> torch.Tensor:
        """Inputs of the layer, memory and segment, `(B, S + Q, d_model)`, with positions where a kind adds them."""
        return states

    # --- what all do

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `(B, S, d_model)` -> three of `(B, H, S, D)`."""
        if self.pre_lnorm:
            states = self.layer_norm(states)
        # (B, S, 3 * H * D) -> (B, S, 3, H, D) -> three of (B, H, S, D)
        projected = self.qkv_net(states).unflatten(-1, (3, self.num_heads, self.head_size))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        return query, key, value

    def project_memory(self, memory_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of stored layer inputs, `(B, M, d_model)` -> twice `(B, H, M, D)`."""
        _, key, value = self.project(memory_states)
        return key, value

    def project_all(
        self,
        hidden_states: torch.Tensor,
        memory_states: torch.Tensor | None,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs of the layer and queries of the segment; keys and values of memory and segment."""
        states = hidden_states if memory_states is None else torch.cat([memory_states, hidden_states], dim=1)
        states = self.add_positions(states, layout, relative_keys)
        query, key, value = self.project(states)
        # the memory asks nothing
        return states[:, -layout.query_length :], query[:, :, -layout.query_length :], key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        memory_states: torch.Tensor | None = None,
        cache: KeyValueStore | None = None,
        shared: SharedStates | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to memory and segment.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): The segment.
            layout (`AttentionLayout`): Where queries and keys lie.
            relative_keys (`RelativeKeys`): Position table.
            memory_states (`torch.Tensor` of shape `(batch_size, stored_length, d_model)`, *optional*):
                Inputs of this layer in earlier segments, without gradient.
            cache (*optional*): Keeps keys and values; `update` takes the new ones, those of `memory_states` included,
                and returns those of memory and segment.
            shared ([`SharedStates`], *optional*): Keys and values in front of those, which `cache` leaves out.
            biases (`tuple` of two tensors of shape `(n_head, d_head)`, *optional*): u and v if all layers share them.
            output_attentions (`bool`): Whether to return the probabilities.

        Returns:
            `(batch_size, query_length, d_model)` after the residual, and probabilities
            `(batch_size, n_head, query_length, key_length)` or `None`.
        """
        hidden_states, query, key, value = self.project_all(hidden_states, memory_states, layout, relative_keys)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        zeros = self._zero_states(layout, hidden_states, key)
        if zeros is not None and (torch.compiler.is_compiling() or layout.start_mask is not None):
            key, value = self._place_zero_states(key, value, layout, zeros)
            zeros = None
        in_front = None if zeros is None and shared is None else StatesInFront(zeros, shared)
        output, probabilities = self.attend(
            query, key, value, layout, relative_keys, biases, output_attentions, in_front
        )
        # (B, Q, H, D) -> (B, Q, H * D)
        output = self.drop(self.o_net(output.flatten(-2)))
        output = hidden_states + output
        if not self.pre_lnorm:
            output = self.layer_norm(output)
        return output, probabilities if output_attentions else None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        output_attentions: bool = False,
        in_front: StatesInFront | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the queries read, `(B, Q, H, D)`, and the probabilities where there are any, `(B, H, Q, K)`."""
        if in_front is not None and self._reads_in_front(query, layout, in_front):
            states = (query, key, value, in_front)
            return self._attend_behind(*states, layout, relative_keys, biases, output_attentions)
        if self._works_in_blocks(query, layout, output_attentions):
            return self._attend_in_blocks(query, key, value, layout, relative_keys, biases, in_front), None
        if in_front is not None:
            key, value = in_front.in_front_of(key, value)
        return self._attend_at_once(query, key, value, layout, relative_keys, biases, output_attentions)

    def _attend_at_once(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        output_attentions: bool,
        in_front: StatesInFront | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        content_bias, position_query_bias = biases if biases is not None else (None, None)
        position_bias = self.position_bias(query, layout, relative_keys, position_query_bias)
        if in_front is None:
            attend = self._backend(output_attentions or self.has_value_bias, position_bias)
        else:
            attend = functools.partial(eager_attention, in_front=in_front)
        output, probabilities = attend(
            self,
            self.content_query(query, content_bias),
            key,
            value,
            position_bias=position_bias,
            scaling=self.scaling,
            dropout=self.config.dropatt if self.training else 0.0,
        )
        if self.has_value_bias:
            output = output + self.value_bias(probabilities, layout, relative_keys)
        return output, probabilities

    def _reads_in_front(self, query: torch.Tensor, layout: AttentionLayout, in_front: StatesInFront) -> bool:
        """Whether keys in front are read where they are, instead of a copy for each row."""
        return (
            layout.query_length <= (FEW_QUERIES if in_front.shared is None else FEW_SHARING_QUERIES)
            and not self.training
            and not (torch.is_grad_enabled() and query.requires_grad)
            and (self.config._attn_implementation or "eager") in BACKENDS
        )

    def _attend_behind(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        in_front: StatesInFront,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        output_attentions: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `_attend_at_once`, on a CPU some rows of the batch at a time."""
        # a layer's rows of the position table serve all blocks
        relative_keys = relative_keys.for_one_layer()
        batch_size = len(query)
        rows_at_once = max(1, QUERY_BLOCK // layout.query_length) if query.device.type == "cpu" else batch_size
        parts = [
            self._attend_at_once(
                query[rows], key[rows], value[rows], layout, relative_keys, biases, output_attentions, before_rows
            )
            for rows, before_rows in in_front.blocks(batch_size, rows_at_once)
        ]
        outputs, probabilities = zip(*parts, strict=True)
        return torch.cat(outputs), torch.cat(probabilities) if output_attentions else None

    def _works_in_blocks(self, query: torch.Tensor, layout: AttentionLayout, output_attentions: bool) -> bool:
        """Whether the scores of all queries would leave the cache of a CPU."""
        return (
            layout.query_length > 1
            and not torch.compiler.is_compiling()
            and query.device.type == "cpu"
            and (query.shape[0] > 1 or layout.query_length > QUERY_BLOCK)
            and layout.distances is None
            and not (output_attentions or self.has_value_bias or self.training)
            and not (torch.is_grad_enabled() and query.requires_grad)
            and self.config._attn_implementation in BACKENDS
        )

    def _attend_in_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        in_front: StatesInFront | None,
    ) -> torch.Tensor:
        """As `_attend_at_once`, some queries of one row at a time, which see no keys but those up to their own."""
        # a layer's rows of the position table serve all blocks
        relative_keys = relative_keys.for_one_layer()
        output = query.new_empty(query.shape[0], layout.query_length, *query.shape[1::2])
        for here, before_row in (in_front or StatesInFront(None, None)).blocks(len(query), 1):
            row_key, row_value = before_row.in_front_of(key[here], value[here])
            for start in range(0, layout.query_length, QUERY_BLOCK):
                block, keys = layout.part(here.start, start, min(start + QUERY_BLOCK, layout.query_length))
                queries = slice(start, start + block.query_length)
                states = (query[here, :, queries], row_key[:, :, keys], row_value[:, :, keys])
                output[here, queries], _ = self._attend_at_once(*states, block, relative_keys, biases, False)
        return output

    def _zero_states(
        self, layout: AttentionLayout, hidden_states: torch.Tensor, like: torch.Tensor
    ) -> ZeroStates | None:
        """Key and value of the zero states that the layout has, if any, of the type of other keys."""
        compiles = torch.compiler.is_compiling()
        if not layout.zero_start or (not compiles and layout.start_slots == 0 and layout.start_mask is None):
            return None
        if self.pre_lnorm or not is_plain(self.qkv_net, nn.Linear, "weight"):
            # a normalisation in front, or a layer of a user, may give the zero vector a value
            key, value = self.project_memory(hidden_states.new_zeros(1, 1, hidden_states.shape[-1]))
        else:
            key = value = hidden_states.new_zeros(1, self.num_heads, 1, self.head_size)
        return ZeroStates(key.to(like.dtype), value.to(like.dtype), layout.start_slots)

    def _place_zero_states(
        self, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, zeros: ZeroStates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put them where a mask or a program wants them."""
        compiles = torch.compiler.is_compiling()
        # a compiler makes other programs for no slot and for one: it gets as many as there are keys, of which the last
        # ones are taken
        num_slots = layout.key_length if compiles else layout.start_slots
        slots, last = (key.shape[0], -1, num_slots, -1), slice(key.shape[2] if compiles else 0, None)
        key = torch.cat([zeros.key.expand(slots), key], dim=2)[:, :, last]
        value = torch.cat([zeros.value.expand(slots), value], dim=2)[:, :, last]
        if layout.start_mask is not None:
            is_start = layout.start_mask[:, None, :, None]
            key, value = torch.where(is_start, zeros.key, key), torch.where(is_start, zeros.value, value)
        return key, value

    def _backend(self, needs_probabilities: bool, position_bias: torch.Tensor) -> Callable:
        name = self.config._attn_implementation or "eager"
        # with a bias that needs a gradient, SDPA on the CPU takes its slow path: the softmax spelt out is faster
        if needs_probabilities or (
            name == "sdpa" and position_bias.requires_grad and position_bias.device.type == "cpu"
        ):
            name = "eager"
        if name in BACKENDS:
            return BACKENDS[name]
        attend = ALL_ATTENTION_FUNCTIONS[name]

        def attend_without_mask(module: nn.Module, query: torch.Tensor, *states: torch.Tensor, **options: Any) -> Any:
            # the library's functions index the bias, so a shared one is spread over batch and heads
            options["position_bias"] = options["position_bias"].expand(*query.shape[:2], -1, -1)
            return attend(module, query, *states, None, is_causal=False, **options)

        return attend_without_mask


class RelativeAttention(SegmentAttention):
    """Kinds whose position scores depend on the distance of query and key.

    There are as many distances as keys, so a kind only says what a query meets at each of them (`position_query`,
    `make_rows`); the product of the two is aligned with the keys without a tensor per pair (section 3.3 of Dai et al.,
    section 3.4 of Huang et al.: "skewing").
    """

    def project_memory(self, memory_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_plain(self.qkv_net, nn.Linear, "weight"):
            return super().project_memory(memory_states)
        if self.config.pre_lnorm:
            memory_states = self.layer_norm(memory_states)
        # the memory asks nothing; (B, M, 2 * H * D) -> (B, M, 2, H, D) -> two of (B, H, M, D)
        projected = F.linear(memory_states, self.qkv_net.weight[self.num_heads * self.head_size :])
        key, value = projected.unflatten(-1, (2, self.num_heads, self.head_size)).permute(2, 0, 3, 1, 4)
        return key, value

    def project_all(
        self,
        hidden_states: torch.Tensor,
        memory_states: torch.Tensor | None,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.project(hidden_states)
        if memory_states is not None:
            memory_key, memory_value = self.project_memory(memory_states)
            key, value = torch.cat([memory_key, key], dim=2), torch.cat([memory_value, value], dim=2)
        return hidden_states, query, key, value

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What meets the rows, `(B, H, Q, D')`."""
        return query

    def make_rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        """One row per distance and head, `(N, H or 1, D')`."""
        raise NotImplementedError

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        batch_size, num_heads, query_length, _ = query.shape
        # (B, H, Q, D') -> (H, B * Q, D'): the rows are the same for every row of the batch
        position_query = self.position_query(query, bias).transpose(0, 1).flatten(1, 2) * self.scaling
        rows = relative_keys.rows_for(self.layer_idx, layout, self.make_rows)
        # (N, H or 1, D') -> (H, D', N)
        rows = rows.permute(1, 2, 0).to(query.dtype).expand(num_heads, -1, -1)
        if layout.distances is not None:
            scores = torch.matmul(position_query, rows[..., : layout.key_length])
            # (H, B * Q, K) -> (B, H, Q, K)
            scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
            return gather_relative_scores(scores, layout)
        scores = scores_by_distance(position_query, rows, layout)
        # (H, B * Q, N) -> (B, H, Q, N) -> (B, H, Q, K)
        scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
        return mask_keys(align_relative_scores(scores, layout.key_length), layout)


def mask_keys(scores: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """`-inf` for keys that a row does not have."""
    if layout.key_mask is None:
        return scores
    return scores.masked_fill(~layout.key_mask[:, None, None, :], float("-inf"))


class TransfoXLAttention(RelativeAttention):
    """Attention kind `"transformer_xl"`: content and position, each with a global bias (terms (a) to (d)).

    score(i, j) = [(q_i + u) k_j + (q_i + v) r_{i-j}] / sqrt(d_head),   r_d = W_{k,R} R_d
    """

    uses_sinusoids = True
    has_biases = True

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # projection of the position table, W_{k,R}
        self.r_net = nn.Linear(config.d_model, self.num_heads * self.head_size, bias=False)
        if config.untie_r:
            # content query bias u and position query bias v; shared ones belong to the model
            self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
            self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.r_w_bias if bias is None else bias
        return query + bias.to(query.dtype)[:, None, :]

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.r_r_bias if bias is None else bias
        return query + bias.to(query.dtype)[:, None, :]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
        output_attentions: bool = False,
        in_front: StatesInFront | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self._recomputes(query, layout, output_attentions):
            return super().attend(query, key, value, layout, relative_keys, biases, output_attentions, in_front)
        if in_front is not None:
            key, value = in_front.in_front_of(key, value)
        output = RelativeAttentionFunction.apply(
            query,
            key,
            value,
            relative_keys.rows_for(self.layer_idx, layout, self.make_rows),
            *(biases if biases is not None else (self.r_w_bias, self.r_r_bias)),
            layout,
            self.scaling,
            self.config.dropatt if self.training else 0.0,
        )
        return output, None

    def _recomputes(self, query: torch.Tensor, layout: AttentionLayout, output_attentions: bool) -> bool:
        """Whether a CPU trains: scores are then computed again in the backward pass rather than kept.

        In training mode without gradients too, as in the first pass of reentrant checkpointing: dropout must be the
        same in both.
        """
        return (
            (self.training or (torch.is_grad_enabled() and query.requires_grad))
            and not torch.compiler.is_compiling()
            and query.device.type == "cpu"
            and layout.distances is None
            and not output_attentions
            and self.config._attn_implementation in BACKENDS
        )

    def make_rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        # (N, d_model) -> (N, H, D)
        return self.r_net(relative_keys.sinusoids()).unflatten(-1, (self.num_heads, self.head_size))


class LearnedRelativeAttention(RelativeAttention):
    """Attention kind `"learned_relative"`: the original code's reading of Shaw et al. (its `attn_type` 1).

    score(i, j) = [(q_i + u) k_j + q_i a_{i-j} + b_{i-j}] / sqrt(d_head)

    with a table of `max_klen` distances per layer, of which `clamp_len` cuts off the far end; the farthest row that
    is left stands for all distances beyond.
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # vectors a and numbers b, largest distance first, and the content query bias u
        self.r_emb = nn.Parameter(torch.empty(config.max_klen, self.num_heads, self.head_size))
        self.r_bias = nn.Parameter(torch.empty(config.max_klen, self.num_heads))
        self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return query + self.r_w_bias.to(query.dtype)[:, None, :]

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # a one at the end of each query picks up the number b at the end of each row
        return F.pad(query, (0, 1), value=1.0)

    def make_rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        clamp_len = relative_keys.clamp_len
        longest = min(self.config.max_klen, clamp_len if clamp_len > 0 else self.config.max_klen) - 1
        index = self.config.max_klen - 1 - relative_keys.distances.clamp(max=longest)
        # (N, H, D), (N, H, 1) -> (N, H, D + 1)
        return torch.cat([self.r_emb[index], self.r_bias[index][..., None]], dim=-1)


class ShawAttention(RelativeAttention):
    """Attention kind `"shaw"`: Shaw et al. 2018, equations 3 and 4, for a causal model.

    score(i, j) = q_i (k_j + a^K_{min(i-j, K)}) / sqrt(d_head),   output_i = sum_j p_ij (v_j + a^V_{min(i-j, K)})

    Distances are clipped to K = `max_relative_distance`; tables are shared by the heads, one pair per layer. Either
    can be left out (`shaw_keys`, `shaw_values`). With values the softmax is spelt out, whatever the backend.
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # row d belongs to distance d
        num_rows = config.max_relative_distance + 1
        self.has_value_bias = config.shaw_values
        if config.shaw_keys:
            self.relative_key_table = nn.Parameter(torch.empty(num_rows, self.head_size))
        if config.shaw_values:
            self.relative_value_table = nn.Parameter(torch.empty(num_rows, self.head_size))

    def _clipped(self, table: torch.Tensor, relative_keys: RelativeKeys) -> torch.Tensor:
        return table[relative_keys.distances.clamp(max=self.config.max_relative_distance)]

    def make_rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        # (N, D) -> (N, 1, D)
        return self._clipped(self.relative_key_table, relative_keys)[:, None, :]

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.config.shaw_keys:
            return super().position_bias(query, layout, relative_keys, bias)
        return causal_bias(layout, query)

    def value_bias(
        self, probabilities: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys
    ) -> torch.Tensor:
        rows = relative_keys.of_call(self._clipped(self.relative_value_table, relative_keys), layout)
        rows = rows.to(probabilities.dtype)
        # (B, H, Q, N) x (N, D) -> (B, H, Q, D) -> (B, Q, H, D)
        return torch.matmul(spread_relative_probabilities(probabilities, layout), rows).transpose(1, 2)


class HuangAttention(RelativeAttention):
    """Attention kind `"huang"`: Huang et al. 2018 (Music Transformer), Shaw's key term with a table per head.

    score(i, j) = q_i (k_j + e_{h, min(i-j, K)}) / sqrt(d_head)
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # row d belongs to distance d
        self.relative_key_table = nn.Parameter(
            torch.empty(config.max_relative_distance + 1, self.num_heads, self.head_size)
        )

    def make_rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        # (N, H, D)
        return self.relative_key_table[relative_keys.distances.clamp(max=self.config.max_relative_distance)]


class AbsoluteAttention(SegmentAttention):
    """Kinds that add positions to the states: plain dot products, numbered from the far end of what is seen.

    The last token of a call has position 0, so what a state means changes from call to call: memory keeps states
    without positions, and neither keys nor values can be kept. As in the original, with `pre_lnorm` queries come from
    states that are not normalised.
    """

    def make_projections(self) -> None:
        width = self.num_heads * self.head_size
        self.q_net = nn.Linear(self.config.d_model, width, bias=False)
        self.kv_net = nn.Linear(self.config.d_model, 2 * width, bias=False)

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # (B, S, H * D) -> (B, S, H, D) -> (B, H, S, D)
        query = self.q_net(states).unflatten(-1, (self.num_heads, self.head_size)).transpose(1, 2)
        if self.pre_lnorm:
            states = self.layer_norm(states)
        # (B, S, 2 * H * D) -> (B, S, 2, H, D) -> two of (B, H, S, D)
        projected = self.kv_net(states).unflatten(-1, (2, self.num_heads, self.head_size))
        key, value = projected.permute(2, 0, 3, 1, 4)
        return query, key, value

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return causal_bias(layout, query)


def causal_bias(layout: AttentionLayout, like: torch.Tensor) -> torch.Tensor:
    """No position scores: 0 where a query may look and `-inf` elsewhere, `(1 or B, 1, Q, K)`."""
    if layout.visible is not None:
        zeros = torch.zeros(layout.visible.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill(~layout.visible, float("-inf"))[:, None]
    # (1, 1, N) -> (1, 1, Q, N) -> (1, 1, Q, K)
    mask = distance_mask(layout, like)[:, :, None].expand(-1, -1, layout.query_length, -1)
    return mask_keys(align_relative_scores(mask.contiguous(), layout.key_length), layout)


def rows_by_age(rows: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """The row of each key, from rows for distances `K - 1 …` of the last token: `(1 or B, K, d_model)`."""
    if layout.age is None:
        return rows[None, : layout.key_length]
    return rows[(layout.key_length - 1 - layout.age).clamp(0, layout.key_length - 1)]


class AbsoluteSinusoidAttention(AbsoluteAttention):
    """Attention kind `"absolute_sinusoid"`: Vaswani et al. 2017; sinusoids added to the embeddings (`attn_type` 2)."""

    uses_sinusoids = True

    def add_positions(
        self, states: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys
    ) -> torch.Tensor:
        # the layers above read what this one made of the positions
        if self.layer_idx > 0:
            return states
        rows = relative_keys.rows_for(self.layer_idx, layout, lambda table: table.sinusoids())
        return states + rows_by_age(rows, layout)


class AbsoluteLearnedAttention(AbsoluteAttention):
    """Attention kind `"absolute_learned"`: Al-Rfou et al. 2018; a table of positions added before each layer.

    Beyond the `max_klen` rows of the table its farthest row is repeated (`attn_type` 3; like the original it does not
    read `clamp_len`).
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # largest position first
        self.r_emb = nn.Parameter(torch.empty(config.max_klen, config.d_model))

    def _rows(self, relative_keys: RelativeKeys) -> torch.Tensor:
        return self.r_emb[self.config.max_klen - 1 - relative_keys.distances.clamp(max=self.config.max_klen - 1)]

    def add_positions(
        self, states: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys
    ) -> torch.Tensor:
        rows = relative_keys.rows_for(self.layer_idx, layout, self._rows)
        return states + rows_by_age(rows, layout).to(states.dtype)


ATTENTION_CLASSES: dict[str, type[SegmentAttention]] = {
    "transformer_xl": TransfoXLAttention,
    "learned_relative": LearnedRelativeAttention,
    "shaw": ShawAttention,
    "huang": HuangAttention,
    "absolute_sinusoid": AbsoluteSinusoidAttention,
    "absolute_learned": AbsoluteLearnedAttention,
}


__all__ = [
    "ATTENTION_CLASSES",
    "AbsoluteAttention",
    "AbsoluteLearnedAttention",
    "AbsoluteSinusoidAttention",
    "HuangAttention",
    "LearnedRelativeAttention",
    "RelativeAttention",
    "SegmentAttention",
    "ShawAttention",
    "TransfoXLAttention",
]

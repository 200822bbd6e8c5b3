"""Formulas, projections and parameters of the six kinds of attention over a memory and a segment.

Follows `mem_transformer.py` of the original PyTorch code and section 3.3 of
[Dai et al., 2019](https://arxiv.org/abs/1901.02860); [Shaw et al., 2018](https://arxiv.org/abs/1803.02155);
[Huang et al., 2018](https://arxiv.org/abs/1809.04281); [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762);
[Al-Rfou et al., 2018](https://arxiv.org/abs/1808.04444). `docs/positions.md` compares the kinds;
`attention_execution_transfo_xl.py` executes them.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from .attention_execution_transfo_xl import AttentionInputs, attend
from .configuration_transfo_xl import TransfoXLConfig
from .gating_transfo_xl import join, make_gate
from .layout_transfo_xl import AttentionLayout, distance_mask, mask_keys
from .positions_transfo_xl import (
    PositionTable,
    align_relative_scores,
    gather_relative_scores,
    scores_by_distance,
    spread_relative_probabilities,
)
from .shared_prefix_transfo_xl import KeyValuePrefix, Prefix, ZeroPrefix
from .weights_transfo_xl import is_plain

# B batch   H heads   Q queries (one segment)   K keys: zero states, then stored ones, then the segment's
# D head size   N = K + Q entries of the position table


class KeyValueWriter(Protocol):
    """What attention requires of a cache of keys and values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class SegmentAttention(nn.Module):
    """Base class of all kinds: projections, zero states, residual connection and layer normalisation.

    A kind is a subclass that defines the query of the content scores (`content_query`), the position scores
    (`position_bias`) and, where positions enter elsewhere, `add_positions` or `value_bias`.
    """

    # the position bias contains the causal mask
    is_causal = False
    # whether the kind uses sinusoids, has biases u and v, or adds a position term to the values
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
        # published weight names, here and below
        self.o_net = nn.Linear(self.num_heads * self.head_size, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.dropout)
        self.gate = make_gate(config)

    def make_projections(self) -> None:
        """Create the projections: one matrix for query, key and value."""
        self.qkv_net = nn.Linear(self.config.d_model, 3 * self.num_heads * self.head_size, bias=False)

    # --- formulas that kinds define

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The query of the content scores, `(B, H, Q, D)`."""
        return query

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Scaled position scores, `-inf` for masked keys, `(B, H, Q, K)` or broadcastable to it."""
        raise NotImplementedError

    def position_terms(
        self, layout: AttentionLayout, table: PositionTable, biases: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Relative keys r `(N, H, D)`, and u and v `(H, D)`, for kinds with `has_biases`."""
        raise NotImplementedError

    def value_bias(self, probabilities: torch.Tensor, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        """Position term of the attention output, `(B, Q, H, D)`, for kinds with `has_value_bias`."""
        raise NotImplementedError

    def add_positions(self, states: torch.Tensor, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        """Add position embeddings to the hidden states of memory and segment, `(B, S + Q, d_model)`."""
        return states

    # --- common to all kinds

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, `(B, S, d_model)` -> three times `(B, H, S, D)`."""
        if self.pre_lnorm:
            states = self.layer_norm(states)
        # (B, S, 3 * H * D) -> (B, S, 3, H, D) -> three of (B, H, S, D)
        projected = self.qkv_net(states).unflatten(-1, (3, self.num_heads, self.head_size))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        return query, key, value

    def project_memory(self, memory_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of stored hidden states, `(B, M, d_model)` -> two times `(B, H, M, D)`."""
        _, key, value = self.project(memory_states)
        return key, value

    def project_all(
        self,
        hidden_states: torch.Tensor,
        memory_states: torch.Tensor | None,
        layout: AttentionLayout,
        table: PositionTable,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states and queries of the segment; keys and values of memory and segment."""
        states = hidden_states if memory_states is None else torch.cat([memory_states, hidden_states], dim=1)
        states = self.add_positions(states, layout, table)
        query, key, value = self.project(states)
        # memory positions produce no queries
        return states[:, -layout.query_length :], query[:, :, -layout.query_length :], key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: AttentionLayout,
        table: PositionTable,
        memory_states: torch.Tensor | None = None,
        cache: KeyValueWriter | None = None,
        shared: KeyValuePrefix | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_attentions: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to memory and segment.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): The segment.
            layout (`AttentionLayout`): Layout of queries and keys.
            table (`PositionTable`): Position table.
            memory_states (`torch.Tensor` of shape `(batch_size, stored_length, d_model)`, *optional*):
                Stored inputs of this layer from earlier segments, without gradient.
            cache (*optional*): Stores keys and values; `update` takes the new ones, those of `memory_states` included,
                and returns those of memory and segment.
            shared ([`KeyValuePrefix`], *optional*): Keys and values that precede those of `cache`.
            biases (`tuple` of two tensors of shape `(n_head, d_head)`, *optional*): u and v if all layers share them.
            output_attentions (`bool`): Whether to return the probabilities.

        Returns:
            Hidden states `(batch_size, query_length, d_model)` after the residual connection, and probabilities
            `(batch_size, n_head, query_length, key_length)` or `None`.
        """
        hidden_states, query, key, value = self.project_all(hidden_states, memory_states, layout, table)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        zeros = self.zero_states(layout, hidden_states, key) if layout.reads_zero_states else None
        inputs = AttentionInputs(
            kind=self,
            query=query,
            key=key,
            value=value,
            layout=layout,
            table=table,
            biases=biases,
            prefix=None if zeros is None and shared is None else Prefix(zeros, shared),
            implementation=self.config._attn_implementation or "eager",
            dropout=self.config.dropatt if self.training else 0.0,
            wants_probabilities=output_attentions,
        )
        output, probabilities = attend(inputs)
        # (B, Q, H, D) -> (B, Q, H * D)
        output = self.drop(self.o_net(output.flatten(-2)))
        output = join(self.gate, hidden_states, output)
        if not self.pre_lnorm:
            output = self.layer_norm(output)
        return output, probabilities if output_attentions else None

    def zero_states(self, layout: AttentionLayout, hidden_states: torch.Tensor, like: torch.Tensor) -> ZeroPrefix:
        """Key and value of the zero states, in the dtype of the other keys."""
        if self.pre_lnorm or not is_plain(self.qkv_net, nn.Linear, "weight"):
            # layer normalisation or a replaced projection may map the zero vector to another one
            key, value = self.project_memory(hidden_states.new_zeros(1, 1, hidden_states.shape[-1]))
        else:
            key = value = hidden_states.new_zeros(1, self.num_heads, 1, self.head_size)
        return ZeroPrefix(key.to(like.dtype), value.to(like.dtype), layout.start_slots)


class RelativeAttention(SegmentAttention):
    """Base class of the kinds whose position scores depend on the distance between query and key.

    A kind defines one relative key per distance (`project_relative_keys`) and the query it is multiplied with
    (`position_query`). The products are aligned with the keys without a tensor per pair (section 3.3 of Dai et al.;
    "skewing" in section 3.4 of Huang et al.).
    """

    def project_memory(self, memory_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_plain(self.qkv_net, nn.Linear, "weight"):
            return super().project_memory(memory_states)
        if self.config.pre_lnorm:
            memory_states = self.layer_norm(memory_states)
        # memory positions produce no queries; (B, M, 2 * H * D) -> (B, M, 2, H, D) -> two of (B, H, M, D)
        projected = F.linear(memory_states, self.qkv_net.weight[self.num_heads * self.head_size :])
        key, value = projected.unflatten(-1, (2, self.num_heads, self.head_size)).permute(2, 0, 3, 1, 4)
        return key, value

    def project_all(
        self,
        hidden_states: torch.Tensor,
        memory_states: torch.Tensor | None,
        layout: AttentionLayout,
        table: PositionTable,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.project(hidden_states)
        if memory_states is not None:
            memory_key, memory_value = self.project_memory(memory_states)
            key, value = torch.cat([memory_key, key], dim=2), torch.cat([memory_value, value], dim=2)
        return hidden_states, query, key, value

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The query of the position scores, `(B, H, Q, D')`."""
        return query

    def project_relative_keys(self, table: PositionTable) -> torch.Tensor:
        """One relative key per distance and head, `(N, H or 1, D')`."""
        raise NotImplementedError

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor:
        batch_size, num_heads, query_length, _ = query.shape
        # (B, H, Q, D') -> (H, B * Q, D'): relative keys are the same for all batch rows
        position_query = self.position_query(query, bias).transpose(0, 1).flatten(1, 2) * self.scaling
        relative_keys = table.relative_keys(self.layer_idx, layout, self.project_relative_keys)
        # (N, H or 1, D') -> (H, D', N)
        relative_keys = relative_keys.permute(1, 2, 0).to(query.dtype).expand(num_heads, -1, -1)
        if layout.distances is not None:
            scores = torch.matmul(position_query, relative_keys[..., : layout.key_length])
            # (H, B * Q, K) -> (B, H, Q, K)
            scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
            return gather_relative_scores(scores, layout)
        scores = scores_by_distance(position_query, relative_keys, layout)
        # (H, B * Q, N) -> (B, H, Q, N) -> (B, H, Q, K)
        scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
        return mask_keys(align_relative_scores(scores, layout.key_length), layout)


class TransfoXLAttention(RelativeAttention):
    """Attention kind `"transformer_xl"`: content and position scores, each with a global bias (terms (a) to (d)).

    score(i, j) = [(q_i + u) k_j + (q_i + v) r_{i-j}] / sqrt(d_head),   r_d = W_{k,R} R_d
    """

    uses_sinusoids = True
    has_biases = True

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # projection of the sinusoids, W_{k,R}
        self.r_net = nn.Linear(config.d_model, self.num_heads * self.head_size, bias=False)
        if config.untie_r:
            # content bias u and position bias v; if shared by all layers, they are parameters of the model
            self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
            self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.r_w_bias if bias is None else bias
        return query + bias.to(query.dtype)[:, None, :]

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.r_r_bias if bias is None else bias
        return query + bias.to(query.dtype)[:, None, :]

    def position_terms(
        self, layout: AttentionLayout, table: PositionTable, biases: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        relative_keys = table.relative_keys(self.layer_idx, layout, self.project_relative_keys)
        return relative_keys, *(biases if biases is not None else (self.r_w_bias, self.r_r_bias))

    def project_relative_keys(self, table: PositionTable) -> torch.Tensor:
        # (N, d_model) -> (N, H, D)
        # with a batch dimension, since adapters that differ by batch row would mistake distances for rows
        return self.r_net(table.sinusoids()[None])[0].unflatten(-1, (self.num_heads, self.head_size))


class LearnedRelativeAttention(RelativeAttention):
    """Attention kind `"learned_relative"`: the original code's reading of Shaw et al. (its `attn_type` 1).

    score(i, j) = [(q_i + u) k_j + q_i a_{i-j} + b_{i-j}] / sqrt(d_head)

    with a table of `max_klen` distances per layer. Distances of at least `max_klen` or `clamp_len` share the entry of
    the largest distance below.
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # vectors a and scalars b, largest distance first, and the content bias u
        self.r_emb = nn.Parameter(torch.empty(config.max_klen, self.num_heads, self.head_size))
        self.r_bias = nn.Parameter(torch.empty(config.max_klen, self.num_heads))
        self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return query + self.r_w_bias.to(query.dtype)[:, None, :]

    def position_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # the product of the appended one and the last component of a relative key is b
        return F.pad(query, (0, 1), value=1.0)

    def project_relative_keys(self, table: PositionTable) -> torch.Tensor:
        clamp_len = table.clamp_len
        longest = min(self.config.max_klen, clamp_len if clamp_len > 0 else self.config.max_klen) - 1
        index = self.config.max_klen - 1 - table.distances.clamp(max=longest)
        # (N, H, D), (N, H, 1) -> (N, H, D + 1)
        return torch.cat([self.r_emb[index], self.r_bias[index][..., None]], dim=-1)


class ShawAttention(RelativeAttention):
    """Attention kind `"shaw"`: Shaw et al. 2018, equations 3 and 4, for a causal model.

    score(i, j) = q_i (k_j + a^K_{min(i-j, K)}) / sqrt(d_head),   output_i = sum_j p_ij (v_j + a^V_{min(i-j, K)})

    Distances are clipped to K = `max_relative_distance`; each layer has one table for keys and one for values, shared
    by its heads. Either can be omitted (`shaw_keys`, `shaw_values`).
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # entry d belongs to distance d
        num_entries = config.max_relative_distance + 1
        self.has_value_bias = config.shaw_values
        if config.shaw_keys:
            self.relative_key_table = nn.Parameter(torch.empty(num_entries, self.head_size))
        if config.shaw_values:
            self.relative_value_table = nn.Parameter(torch.empty(num_entries, self.head_size))

    def _clipped(self, vectors: torch.Tensor, table: PositionTable) -> torch.Tensor:
        return vectors[table.distances.clamp(max=self.config.max_relative_distance)]

    def project_relative_keys(self, table: PositionTable) -> torch.Tensor:
        # (N, D) -> (N, 1, D)
        return self._clipped(self.relative_key_table, table)[:, None, :]

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.config.shaw_keys:
            return super().position_bias(query, layout, table, bias)
        return causal_bias(layout, query)

    def value_bias(self, probabilities: torch.Tensor, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        values = table.of_call(self._clipped(self.relative_value_table, table), layout).to(probabilities.dtype)
        # (B, H, Q, N) x (N, D) -> (B, H, Q, D) -> (B, Q, H, D)
        return torch.matmul(spread_relative_probabilities(probabilities, layout), values).transpose(1, 2)


class HuangAttention(RelativeAttention):
    """Attention kind `"huang"`: Huang et al. 2018 (Music Transformer), Shaw's key term with one table per head.

    score(i, j) = q_i (k_j + e_{h, min(i-j, K)}) / sqrt(d_head)
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # entry d belongs to distance d
        self.relative_key_table = nn.Parameter(
            torch.empty(config.max_relative_distance + 1, self.num_heads, self.head_size)
        )

    def project_relative_keys(self, table: PositionTable) -> torch.Tensor:
        # (N, H, D)
        return self.relative_key_table[table.distances.clamp(max=self.config.max_relative_distance)]


class AbsoluteAttention(SegmentAttention):
    """Base class of the kinds that add position embeddings to the hidden states and use plain dot products.

    Positions are counted backwards from the last token of a call, which has position 0, so they change in every call:
    the memory stores hidden states without positions, and keys and values cannot be cached. With `pre_lnorm`, queries
    are projected from unnormalised states, as in the original.
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
        self, query: torch.Tensor, layout: AttentionLayout, table: PositionTable, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return causal_bias(layout, query)


def causal_bias(layout: AttentionLayout, like: torch.Tensor) -> torch.Tensor:
    """Mask without position scores: 0 for visible keys and `-inf` for others, `(1 or B, 1, Q, K)`."""
    if layout.visible is not None:
        zeros = torch.zeros(layout.visible.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill(~layout.visible, float("-inf"))[:, None]
    # (1, 1, N) -> (1, 1, Q, N) -> (1, 1, Q, K)
    mask = distance_mask(layout, like)[:, :, None].expand(-1, -1, layout.query_length, -1)
    return mask_keys(align_relative_scores(mask.contiguous(), layout.key_length), layout)


def embeddings_by_age(embeddings: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Position embeddings of keys, selected by their distance from the last token, `(1 or B, K, d_model)`."""
    if layout.age is None:
        return embeddings[None, : layout.key_length]
    return embeddings[(layout.key_length - 1 - layout.age).clamp(0, layout.key_length - 1)]


class AbsoluteSinusoidAttention(AbsoluteAttention):
    """Attention kind `"absolute_sinusoid"`: Vaswani et al. 2017; sinusoids added to the embeddings (`attn_type` 2)."""

    uses_sinusoids = True

    def add_positions(self, states: torch.Tensor, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        # positions are added to the input of the first layer only
        if self.layer_idx > 0:
            return states
        sinusoids = table.relative_keys(self.layer_idx, layout, lambda table: table.sinusoids())
        return states + embeddings_by_age(sinusoids, layout)


class AbsoluteLearnedAttention(AbsoluteAttention):
    """Attention kind `"absolute_learned"`: Al-Rfou et al. 2018; learned positions added before each layer.

    Larger positions than the table's `max_klen` entries share the largest one (`attn_type` 3; `clamp_len` has no
    effect, as in the original).
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # largest position first
        self.r_emb = nn.Parameter(torch.empty(config.max_klen, config.d_model))

    def _embeddings(self, table: PositionTable) -> torch.Tensor:
        return self.r_emb[self.config.max_klen - 1 - table.distances.clamp(max=self.config.max_klen - 1)]

    def add_positions(self, states: torch.Tensor, layout: AttentionLayout, table: PositionTable) -> torch.Tensor:
        embeddings = table.relative_keys(self.layer_idx, layout, self._embeddings)
        return states + embeddings_by_age(embeddings, layout).to(states.dtype)


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

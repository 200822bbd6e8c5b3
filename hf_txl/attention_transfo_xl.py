"""Relative attention over a memory and a segment: positions, masks, alignment, one class per attention kind.

Follows section 3.3 and Appendix B of [Dai et al., 2019](https://arxiv.org/abs/1901.02860) and `mem_transformer.py` of
the original PyTorch code. An attention layer receives an `AttentionLayout`, which says where queries and keys lie, and
hands its position scores, mask included, to the backend as an additive bias.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_transfo_xl import TransfoXLConfig

# B batch   H heads   Q queries (one segment)   K keys: start slots, then stored ones, then the segment's
# D head size   N = K + Q rows of a position table


class KeyValueStore(Protocol):
    """What attention needs of a cache that keeps keys and values."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class AttentionLayout:
    """Where the queries and keys of one call lie, the same for every layer.

    Without `distances`, key `j` is at distance `i + (K - Q) - j` from query `i`, in every row.

    Args:
        query_length (`int`): Queries Q: the tokens of this call.
        key_length (`int`): Keys K, start slots included.
        start_slots (`int`):
            Zero states attended to before the first stored position and stored nowhere (`memory_init="zeros"`).
        window (`int`, *optional*): Keys a query may see, itself included; `None`: everything before it.
        key_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys that exist in a row.
        start_mask (`torch.Tensor` of shape `(batch_size, key_length)`, *optional*): Keys to be read as a zero state.
        distances (`torch.Tensor` of shape `(batch_size or 1, query_length, key_length)`, *optional*):
            Distances where pads or free slots lie between the tokens.
        visible (`torch.Tensor` of the same shape, *optional*): Given with `distances`: keys that a query sees.
    """

    query_length: int
    key_length: int
    start_slots: int = 0
    window: int | None = None
    key_mask: torch.Tensor | None = None
    start_mask: torch.Tensor | None = None
    distances: torch.Tensor | None = None
    visible: torch.Tensor | None = None

    @classmethod
    def from_mask(
        cls,
        mask: torch.Tensor,
        query_start: int,
        query_length: int,
        start_slots: int,
        window: int | None,
        zero_start: bool,
        oldest: torch.Tensor | None = None,
    ) -> "AttentionLayout":
        """Number the real tokens of each row one after another: pads and free slots take no distance.

        Args:
            mask (`torch.Tensor` of shape `(batch_size or 1, number of keys without start slots)`): Real tokens.
            query_start (`int`): Index of the first query among those keys.
            query_length (`int`): Queries.
            start_slots (`int`): Zero states in front of them.
            window (`int`, *optional*): As above.
            zero_start (`bool`): Whether slots before the first token of a row stand for zero states.
            oldest (`torch.Tensor` of shape `(batch_size, 1)`, *optional*):
                Position, counted from the first stored token, before which there are no more zero states.
        """
        num_keys = start_slots + mask.shape[1]
        index = torch.arange(num_keys, device=mask.device)
        real = F.pad(mask, (start_slots, 0), value=False)
        count = real.cumsum(-1)
        before_first = count == 0
        # (B, K): 0 is the first real token; the slots before it count backwards from -1
        position = torch.where(before_first, index - before_first.sum(-1, keepdim=True), count - 1)
        start_mask = None
        exists = real
        if zero_start:
            start_mask = before_first if oldest is None else before_first & (position >= oldest)
            exists = real | start_mask
        queries = slice(start_slots + query_start, start_slots + query_start + query_length)
        # (B, Q, 1) - (B, 1, K) -> (B, Q, K)
        distances = position[:, queries, None] - position[:, None, :]
        visible = exists[:, None, :] & (distances >= 0)
        if window is not None:
            visible = visible & (distances < window)
        # a pad sees itself, so that no row of the softmax is empty
        visible = visible | (index == index[queries, None])
        return cls(query_length, num_keys, start_slots, window, None, start_mask, distances, visible)


def sinusoid_embeddings(distances: torch.Tensor, d_model: int) -> torch.Tensor:
    """Sinusoids of distances, all sines first, then all cosines (section 3.3), always computed in float32.

    Args:
        distances (`torch.Tensor` of shape `(length,)`): Distances in tokens.
        d_model (`int`): Even width.

    Returns:
        `torch.Tensor` of shape `(length, d_model)`, float32.
    """
    steps = torch.arange(0, d_model, 2, dtype=torch.float32, device=distances.device)
    frequencies = 1 / (10000 ** (steps / d_model))
    # (length, 1) x (1, d_model / 2)
    angles = distances.to(torch.float32)[:, None] * frequencies[None, :]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RelativeKeys:
    """Position table of one call and, where keys and values are kept, its projections by each layer.

    Rows run from the largest distance to zero and are followed by `num_future` rows for keys that lie in the future of
    a query, which the mask removes. A projection depends on no input, so while a stream is read without gradients it
    is computed once per layer; the object then lives on the cache, whose keys are frozen in the same way, and never on
    a module, whose weights may change.

    Args:
        num_distances (`int`): Rows for distances `num_distances - 1 … 0`.
        num_future (`int`): Rows for future keys.
        embeddings (`torch.Tensor` of shape `(num_distances + num_future, d_model)`): The table.
        clamp_len (`int`): Distance above which the rows are the same.
        keeps (`bool`): Whether projections are kept.
    """

    def __init__(self, num_distances: int, num_future: int, embeddings: torch.Tensor, clamp_len: int, keeps: bool):
        self.num_distances = num_distances
        self.num_future = num_future
        self.embeddings = embeddings
        self.clamp_len = clamp_len
        self.keeps = keeps
        self.projections: dict[int, torch.Tensor] = {}

    def fits(self, layout: AttentionLayout, clamp_len: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the table covers a call and has its type and device."""
        return (
            clamp_len == self.clamp_len
            and layout.key_length <= self.num_distances
            and layout.query_length <= self.num_future
            and self.embeddings.dtype == dtype
            and self.embeddings.device == device
        )

    def project(
        self, layer_idx: int, layout: AttentionLayout, projection: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Projected rows for distances `K - 1 … 0` and `Q` future keys, `(K + Q, n_head * d_head)`."""
        projected = self.projections.get(layer_idx)
        if projected is None:
            projected = projection(self.embeddings)
            if self.keeps:
                self.projections[layer_idx] = projected
        first = self.num_distances - layout.key_length
        return projected[first : self.num_distances + layout.query_length]


def align_relative_scores(scores: torch.Tensor, key_length: int) -> torch.Tensor:
    """Re-index position scores from one column per distance to one column per key, without a copy.

    Column `c` belongs to distance `K - 1 - c`; the last Q columns belong to keys in the future. Query `i` needs key
    `j` at distance `i + K - Q - j`, which is column `j + Q - 1 - i`: each row starts one column further left than the
    row above. In memory that is a row stride one shorter than the row ("rel-shift", Appendix B of
    [Dai et al., 2019](https://arxiv.org/abs/1901.02860)).

    Args:
        scores (`torch.Tensor` of shape `(…, query_length, key_length + query_length)`):
            Query-position scores, largest distance first. The last two dimensions are contiguous.
        key_length (`int`): Keys K.

    Returns:
        `torch.Tensor` of shape `(…, query_length, key_length)`, a view.
    """
    query_length, width = scores.shape[-2:]
    # (…, Q, K + Q) -> (…, Q * (K + Q)) -> (…, Q, K + Q - 1) -> (…, Q, K)
    rows = scores.flatten(-2)[..., query_length - 1 : query_length - 1 + query_length * (width - 1)]
    return rows.unflatten(-1, (query_length, width - 1))[..., :key_length]


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_bias: torch.Tensor,
    scaling: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention spelt out, at least in float32. Returns `(B, Q, H, D)` and probabilities `(B, H, Q, K)`."""
    scores = torch.matmul(query * scaling, key.transpose(-1, -2)) + position_bias
    precision = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=precision).to(value.dtype)
    output = torch.matmul(F.dropout(probabilities, dropout, module.training), value)
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


class SegmentAttention(nn.Module):
    """What all attention kinds share: projections, memory, start slots, backend, residual and normalisation.

    A kind is a subclass that says how a query meets keys (`content_query`) and positions (`position_bias`).
    """

    # the position bias holds the causal mask; backends must not add one of their own
    is_causal = False

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads, self.head_size = config.n_head, config.d_head
        self.scaling = self.head_size**-0.5
        # published names: query, key and value in one matrix; output; module names are a contract
        self.qkv_net = nn.Linear(config.d_model, 3 * self.num_heads * self.head_size, bias=False)
        self.o_net = nn.Linear(self.num_heads * self.head_size, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.drop = nn.Dropout(config.dropout)

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The query that meets keys, `(B, H, Q, D)`."""
        raise NotImplementedError

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Scaled position scores, `-inf` where a query must not look, `(B, H, Q, K)`."""
        raise NotImplementedError

    def project_memory(self, memory_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of stored layer inputs, `(B, M, d_model)` -> twice `(B, H, M, D)`."""
        _, key, value = self._project(memory_states)
        return key, value

    def forward(
        self,
        hidden_states: torch.Tensor,
        layout: AttentionLayout,
        relative_keys: RelativeKeys,
        memory_states: torch.Tensor | None = None,
        cache: KeyValueStore | None = None,
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
            cache (*optional*): Keeps keys and values instead; `update` returns those of memory and segment.
            biases (`tuple` of two tensors of shape `(n_head, d_head)`, *optional*): u and v if all layers share them.
            output_attentions (`bool`): Whether to return the probabilities.

        Returns:
            `(batch_size, query_length, d_model)` after the residual, and probabilities
            `(batch_size, n_head, query_length, key_length)` or `None`.
        """
        states = hidden_states if memory_states is None else torch.cat([memory_states, hidden_states], dim=1)
        query, key, value = self._project(states)
        # the memory asks nothing
        query = query[:, :, -layout.query_length :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        key, value = self._add_start_states(key, value, layout, hidden_states)

        content_bias, position_query_bias = biases if biases is not None else (None, None)
        position_bias = self.position_bias(query, layout, relative_keys, position_query_bias)
        attend = self._backend(output_attentions, position_bias)
        output, probabilities = attend(
            self,
            self.content_query(query, content_bias),
            key,
            value,
            position_bias=position_bias,
            scaling=self.scaling,
            dropout=self.config.dropatt if self.training else 0.0,
        )
        # (B, Q, H, D) -> (B, Q, H * D)
        output = self.drop(self.o_net(output.flatten(-2)))
        output = hidden_states + output
        if not self.config.pre_lnorm:
            output = self.layer_norm(output)
        return output, probabilities if output_attentions else None

    def _project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.config.pre_lnorm:
            states = self.layer_norm(states)
        # (B, S, 3 * H * D) -> (B, S, 3, H, D) -> three of (B, H, S, D)
        projected = self.qkv_net(states).unflatten(-1, (3, self.num_heads, self.head_size))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        return query, key, value

    def _add_start_states(
        self, key: torch.Tensor, value: torch.Tensor, layout: AttentionLayout, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the keys and values of a zero hidden state where the layout wants them."""
        if layout.start_slots == 0 and layout.start_mask is None:
            return key, value
        # (1, H, 1, D); zero unless a normalisation in front gives the zero vector a value
        start_key, start_value = self.project_memory(hidden_states.new_zeros(1, 1, hidden_states.shape[-1]))
        slots = (key.shape[0], -1, layout.start_slots, -1)
        key = torch.cat([start_key.to(key.dtype).expand(slots), key], dim=2)
        value = torch.cat([start_value.to(value.dtype).expand(slots), value], dim=2)
        if layout.start_mask is not None:
            is_start = layout.start_mask[:, None, :, None]
            key = torch.where(is_start, start_key.to(key.dtype), key)
            value = torch.where(is_start, start_value.to(value.dtype), value)
        return key, value

    def _backend(self, output_attentions: bool, position_bias: torch.Tensor) -> Callable:
        name = self.config._attn_implementation or "eager"
        # with a bias that needs a gradient, SDPA on the CPU takes its slow path: the softmax spelt out is faster
        if output_attentions or (
            name == "sdpa" and position_bias.requires_grad and position_bias.device.type == "cpu"
        ):
            name = "eager"
        if name in BACKENDS:
            return BACKENDS[name]
        attend = ALL_ATTENTION_FUNCTIONS[name]

        def attend_without_mask(module: nn.Module, *states: torch.Tensor, **options: Any) -> Any:
            return attend(module, *states, None, is_causal=False, **options)

        return attend_without_mask


class TransfoXLAttention(SegmentAttention):
    """Attention kind `"transformer_xl"`: content and position, each with a global bias (terms (a) to (d)).

    score(i, j) = [(q_i + u) k_j + (q_i + v) r_{i-j}] / sqrt(d_head),   r_d = W_{k,R} R_d
    """

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # published name: projection of the position table, W_{k,R}
        self.r_net = nn.Linear(config.d_model, self.num_heads * self.head_size, bias=False)
        if config.untie_r:
            # content query bias u and position query bias v; shared ones belong to the model
            self.r_w_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))
            self.r_r_bias = nn.Parameter(torch.empty(self.num_heads, self.head_size))

    def content_query(self, query: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = self.r_w_bias if bias is None else bias
        return query + bias.to(query.dtype)[:, None, :]

    def position_bias(
        self, query: torch.Tensor, layout: AttentionLayout, relative_keys: RelativeKeys, bias: torch.Tensor | None
    ) -> torch.Tensor:
        bias = self.r_r_bias if bias is None else bias
        batch_size, num_heads, query_length, head_size = query.shape
        # (B, H, Q, D) -> (H, B * Q, D): the table is the same for every row of the batch
        position_query = (query + bias.to(query.dtype)[:, None, :]).transpose(0, 1).reshape(num_heads, -1, head_size)
        relative_key = relative_keys.project(self.layer_idx, layout, self.r_net)
        # (N, H * D) -> (H, D, N)
        relative_key = relative_key.unflatten(-1, (num_heads, head_size)).permute(1, 2, 0).to(query.dtype)
        if layout.distances is not None:
            relative_key = relative_key[..., : layout.key_length]
            scores = torch.matmul(position_query * self.scaling, relative_key)
            # (H, B * Q, K) -> (B, H, Q, K)
            scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
            return gather_relative_scores(scores, layout)
        scores = torch.baddbmm(distance_mask(layout, position_query), position_query, relative_key, alpha=self.scaling)
        # (H, B * Q, N) -> (B, H, Q, N) -> (B, H, Q, K)
        scores = scores.unflatten(1, (batch_size, query_length)).transpose(0, 1)
        scores = align_relative_scores(scores, layout.key_length)
        if layout.key_mask is not None:
            scores = scores.masked_fill(~layout.key_mask[:, None, None, :], float("-inf"))
        return scores


def distance_mask(layout: AttentionLayout, like: torch.Tensor) -> torch.Tensor:
    """0 for the distances a query may look at, `-inf` beyond the window and for future keys, `(1, 1, K + Q)`.

    Causal mask and window depend on the distance alone, so they are laid over the scores before these are aligned.
    """
    key_length, query_length = layout.key_length, layout.query_length
    distance = torch.arange(key_length - 1, -query_length - 1, -1, device=like.device)
    hidden = distance < 0
    if layout.window is not None:
        hidden = hidden | (distance >= layout.window)
    mask = torch.zeros(key_length + query_length, dtype=like.dtype, device=like.device)
    return mask.masked_fill(hidden, float("-inf"))[None, None, :]


def gather_relative_scores(scores: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
    """Re-index position scores by the distances of a layout, for rows with pads or free slots between tokens.

    Args:
        scores (`torch.Tensor` of shape `(batch_size, num_heads, query_length, key_length)`):
            Query-position scores, column `c` for distance `K - 1 - c`.
        layout (`AttentionLayout`): With `distances` and `visible`.

    Returns:
        `torch.Tensor` of the same shape, one column per key, `-inf` where a key is not visible.
    """
    assert layout.distances is not None and layout.visible is not None
    columns = (layout.key_length - 1 - layout.distances).clamp(0, layout.key_length - 1)
    aligned = scores.gather(-1, columns[:, None].expand_as(scores))
    return aligned.masked_fill(~layout.visible[:, None], float("-inf"))


ATTENTION_CLASSES: dict[str, type[SegmentAttention]] = {"transformer_xl": TransfoXLAttention}


__all__ = [
    "ATTENTION_CLASSES",
    "AttentionLayout",
    "RelativeKeys",
    "SegmentAttention",
    "TransfoXLAttention",
    "align_relative_scores",
    "gather_relative_scores",
    "sinusoid_embeddings",
]

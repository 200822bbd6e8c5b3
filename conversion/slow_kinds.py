"""Slow, readable versions of the other position encodings, one query and one key at a time, in float64.

Each class is `SlowTransfoXL` with another attention, written from the equations of its paper (or, where the original
code is the only source, from what its recorded outputs say). Distances are those of a causal model: i - j for query i
and key j, 0 or more, memory included. As there, every step can be differentiated and nothing is shared with the
package. `test_slow_kinds.py` says why they can be believed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .slow_model import SlowMemory, SlowTransfoXL

# H heads   Q queries of one segment   K = memory + Q keys   D head size


class SlowKind(SlowTransfoXL):
    """Attention in which a pair of query and key has a score, and a key a value for each query.

    A kind overrides `score` and `value`; the plain ones are scaled dot-product attention without positions.
    """

    def score(
        self, layer: int, head: int, query: torch.Tensor, key: torch.Tensor, distance: int, clamp_len: int
    ) -> torch.Tensor:
        """What enters the softmax for vectors (D,) of one head; a number."""
        return query.dot(key) / math.sqrt(self.config.d_head)

    def value(self, layer: int, value: torch.Tensor, distance: int) -> torch.Tensor:
        """What a query at this distance takes from a key, (D,)."""
        return value

    def normalised(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        """The vector itself unless normalisation comes first (`pre_lnorm`)."""
        if not self.config.pre_lnorm:
            return vector
        weight = self.layer_weight(layer, "dec_attn.layer_norm.weight")
        return self.layer_norm(vector, weight, self.layer_weight(layer, "dec_attn.layer_norm.bias"))

    def project(
        self, layer: int, sources: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Queries, keys and values (H, D) of each source."""
        query_weight, key_weight, value_weight = self.layer_weight(layer, "dec_attn.qkv_net.weight").chunk(3)
        shape = (self.config.n_head, self.config.d_head)
        sources = [self.normalised(layer, vector) for vector in sources]
        queries = [(query_weight @ vector).view(shape) for vector in sources]
        keys = [(key_weight @ vector).view(shape) for vector in sources]
        values = [(value_weight @ vector).view(shape) for vector in sources]
        return queries, keys, values

    def attend(
        self, layer: int, inputs: list[torch.Tensor], memory: SlowMemory, window_rule: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The attention output of each query before the residual sum, and the weights (H, Q, K)."""
        sources = memory.layers[layer] + inputs
        queries, keys, values = self.project(layer, sources)
        output_weight = self.layer_weight(layer, "dec_attn.o_net.weight")
        outputs, weights = [], []
        for i in range(len(memory.layers[layer]), len(sources)):
            visible = [j for j in range(len(sources)) if self.is_visible(i - j, memory, window_rule)]
            heads, rows = [], []
            for head in range(self.config.n_head):
                scores = [
                    self.score(layer, head, queries[i][head], keys[j][head], i - j, memory.clamp_len) for j in visible
                ]
                exponentials = torch.exp(torch.stack(scores) - max(scores).detach())
                probabilities = exponentials / exponentials.sum()
                taken = [self.value(layer, values[j][head], i - j) for j in visible]
                heads.append(sum(p * vector for p, vector in zip(probabilities, taken, strict=True)))
                row = torch.zeros(len(sources), dtype=torch.float64)
                row[visible] = probabilities.detach()
                rows.append(row)
            outputs.append(output_weight @ torch.cat(heads))
            weights.append(torch.stack(rows))
        # Q x (H, K) -> (H, Q, K)
        return outputs, torch.stack(weights, dim=1)


class SlowShaw(SlowKind):
    """[Shaw et al., 2018](https://arxiv.org/abs/1803.02155), section 3.

    Equation 3:  z_i = sum_j alpha_ij (x_j W^V + a^V_ij)
    Equation 4:  e_ij = x_i W^Q (x_j W^K + a^K_ij)' / sqrt(d_z)
    Section 3.2: a_ij = w_clip(j - i, k), clip(x, k) = max(-k, min(k, x))

    Of the 2k + 1 rows w_-k … w_k a causal model reads w_-k … w_0; row d of a table is w_-d. Heads share the tables.
    """

    def row(self, table: torch.Tensor, distance: int) -> torch.Tensor:
        limit = self.config.max_relative_distance
        clipped = max(-limit, min(limit, -distance))
        return table[-clipped]

    def score(
        self, layer: int, head: int, query: torch.Tensor, key: torch.Tensor, distance: int, clamp_len: int
    ) -> torch.Tensor:
        if self.config.shaw_keys:
            key = key + self.row(self.layer_weight(layer, "dec_attn.relative_key_table"), distance)
        return query.dot(key) / math.sqrt(self.config.d_head)

    def value(self, layer: int, value: torch.Tensor, distance: int) -> torch.Tensor:
        if self.config.shaw_values:
            value = value + self.row(self.layer_weight(layer, "dec_attn.relative_value_table"), distance)
        return value


class SlowHuang(SlowKind):
    """[Huang et al., 2018](https://arxiv.org/abs/1809.04281), the relative attention of section 3.

    Softmax((Q K' + S_rel) / sqrt(D_h)) V with S_rel(i, j) = q_i e_{i-j}, from a table of distances for each head;
    distances beyond a table take its farthest row.
    """

    def score(
        self, layer: int, head: int, query: torch.Tensor, key: torch.Tensor, distance: int, clamp_len: int
    ) -> torch.Tensor:
        # (distances, H, D)
        table = self.layer_weight(layer, "dec_attn.relative_key_table")
        relative = query.dot(table[min(distance, self.config.max_relative_distance), head])
        return (query.dot(key) + relative) / math.sqrt(self.config.d_head)


class SlowLearnedRelative(SlowKind):
    """What the original PyTorch code computes for `attn_type` 1: ((q_i + u) k_j + q_i a_d + b_d) / sqrt(d_head).

    The last row of the tables a and b belongs to distance 0. `clamp_len` keeps the last rows only; a distance beyond
    the rows that are left takes the first of them.
    """

    def score(
        self, layer: int, head: int, query: torch.Tensor, key: torch.Tensor, distance: int, clamp_len: int
    ) -> torch.Tensor:
        vectors = self.layer_weight(layer, "dec_attn.r_emb")[:, head]
        numbers = self.layer_weight(layer, "dec_attn.r_bias")[:, head]
        if clamp_len > 0:
            vectors, numbers = vectors[-clamp_len:], numbers[-clamp_len:]
        row = max(0, len(vectors) - 1 - distance)
        content_bias = self.layer_weight(layer, "dec_attn.r_w_bias")[head]
        content = (query + content_bias).dot(key)
        return (content + query.dot(vectors[row]) + numbers[row]) / math.sqrt(self.config.d_head)


class SlowAbsolute(SlowKind):
    """Kinds that add a position to each state: what is seen in a call is numbered K-1 … 0, the last token being 0.

    The memory keeps states without positions, so a state is numbered anew at each call. The residual sum starts from
    the numbered states. With `pre_lnorm` queries come from states that are not normalised (as in the original).
    """

    def position(self, layer: int, number: int, clamp_len: int) -> torch.Tensor:
        """What is added to a state before a layer, (d_model,)."""
        raise NotImplementedError

    def project(
        self, layer: int, sources: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        shape = (self.config.n_head, self.config.d_head)
        query_weight = self.layer_weight(layer, "dec_attn.q_net.weight")
        key_weight, value_weight = self.layer_weight(layer, "dec_attn.kv_net.weight").chunk(2)
        queries = [(query_weight @ vector).view(shape) for vector in sources]
        sources = [self.normalised(layer, vector) for vector in sources]
        keys = [(key_weight @ vector).view(shape) for vector in sources]
        values = [(value_weight @ vector).view(shape) for vector in sources]
        return queries, keys, values

    def read_vectors(
        self, vectors: list[torch.Tensor], memory: SlowMemory, window_rule: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert not window_rule, "a cache of keys and values cannot be numbered anew"
        hidden_states, attentions = [torch.stack(vectors)], []
        for layer in range(self.config.n_layer):
            seen = memory.layers[layer] + vectors
            numbered = [
                vector + self.position(layer, len(seen) - 1 - index, memory.clamp_len)
                for index, vector in enumerate(seen)
            ]
            num_remembered = len(memory.layers[layer])
            # as the layer sees it in this call; what stays in memory is `vectors`
            view = memory.branch()
            view.layers[layer] = numbered[:num_remembered]
            memory.write(layer, vectors)
            vectors = numbered[num_remembered:]
            attended, weights = self.attend(layer, vectors, view, window_rule)
            sums = [vector + output for vector, output in zip(vectors, attended, strict=True)]
            if not self.config.pre_lnorm:
                norm_weight = self.layer_weight(layer, "dec_attn.layer_norm.weight")
                norm_bias = self.layer_weight(layer, "dec_attn.layer_norm.bias")
                sums = [self.layer_norm(vector, norm_weight, norm_bias) for vector in sums]
            vectors = [self.feed_forward(layer, vector) for vector in sums]
            hidden_states.append(torch.stack(vectors))
            attentions.append(weights)
        return hidden_states, attentions


class SlowAbsoluteSinusoid(SlowAbsolute):
    """[Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.5: sinusoids, added to the embeddings."""

    def position(self, layer: int, number: int, clamp_len: int) -> torch.Tensor:
        if layer > 0:
            return torch.zeros(self.config.d_model, dtype=torch.float64)
        return self.sinusoid(number, clamp_len)


class SlowAbsoluteLearned(SlowAbsolute):
    """[Al-Rfou et al., 2018](https://arxiv.org/abs/1808.04444): a table of positions before every layer.

    The last row belongs to number 0; numbers beyond the table take its first row. `clamp_len` plays no part.
    """

    def position(self, layer: int, number: int, clamp_len: int) -> torch.Tensor:
        table = self.layer_weight(layer, "dec_attn.r_emb")
        return table[max(0, len(table) - 1 - number)]


KINDS: dict[str, type[SlowTransfoXL]] = {
    "transformer_xl": SlowTransfoXL,
    "learned_relative": SlowLearnedRelative,
    "shaw": SlowShaw,
    "huang": SlowHuang,
    "absolute_sinusoid": SlowAbsoluteSinusoid,
    "absolute_learned": SlowAbsoluteLearned,
}


def slow_model_of(config: Any, state_dict: Mapping[str, torch.Tensor]) -> SlowTransfoXL:
    """The reference for the `attention_kind` of a configuration."""
    return KINDS[config.attention_kind](config, state_dict)

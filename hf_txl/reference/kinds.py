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

from .transformer_xl import Scorer, SlowMemory, SlowTransfoXL

# H heads   D head size


class SlowShaw(SlowTransfoXL):
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

    def scorer(self, layer: int, num_distances: int, clamp_len: int) -> Scorer:
        def score(head: int, query: torch.Tensor, key: torch.Tensor, distance: int) -> torch.Tensor:
            if self.config.shaw_keys:
                key = key + self.row(self.layer_weight(layer, "dec_attn.relative_key_table"), distance)
            return query.dot(key) / math.sqrt(self.config.d_head)

        return score

    def value(self, layer: int, value: torch.Tensor, distance: int) -> torch.Tensor:
        if self.config.shaw_values:
            value = value + self.row(self.layer_weight(layer, "dec_attn.relative_value_table"), distance)
        return value


class SlowHuang(SlowTransfoXL):
    """[Huang et al., 2018](https://arxiv.org/abs/1809.04281), the relative attention of section 3.

    Softmax((Q K' + S_rel) / sqrt(D_h)) V with S_rel(i, j) = q_i e_{i-j}, from a table of distances for each head;
    distances beyond a table take its farthest row.
    """

    def scorer(self, layer: int, num_distances: int, clamp_len: int) -> Scorer:
        # (distances, H, D)
        table = self.layer_weight(layer, "dec_attn.relative_key_table")

        def score(head: int, query: torch.Tensor, key: torch.Tensor, distance: int) -> torch.Tensor:
            relative = query.dot(table[min(distance, self.config.max_relative_distance), head])
            return (query.dot(key) + relative) / math.sqrt(self.config.d_head)

        return score


class SlowLearnedRelative(SlowTransfoXL):
    """What the original PyTorch code computes for `attn_type` 1: ((q_i + u) k_j + q_i a_d + b_d) / sqrt(d_head).

    The last row of the tables a and b belongs to distance 0. `clamp_len` keeps the last rows only; a distance beyond
    the rows that are left takes the first of them.
    """

    def scorer(self, layer: int, num_distances: int, clamp_len: int) -> Scorer:
        vectors = self.layer_weight(layer, "dec_attn.r_emb")
        numbers = self.layer_weight(layer, "dec_attn.r_bias")
        if clamp_len > 0:
            vectors, numbers = vectors[-clamp_len:], numbers[-clamp_len:]
        content_bias = self.layer_weight(layer, "dec_attn.r_w_bias")

        def score(head: int, query: torch.Tensor, key: torch.Tensor, distance: int) -> torch.Tensor:
            row = max(0, len(vectors) - 1 - distance)
            content = (query + content_bias[head]).dot(key)
            return (content + query.dot(vectors[row, head]) + numbers[row, head]) / math.sqrt(self.config.d_head)

        return score


class SlowAbsolute(SlowTransfoXL):
    """Kinds that add a position to each state: what is seen in a call is numbered K-1 … 0, the last token being 0.

    The memory keeps states without positions, so a state is numbered anew at each call. The residual sum starts from
    the numbered states. With `pre_lnorm` queries come from states that are not normalised (as in the original).
    """

    def position(self, layer: int, number: int, clamp_len: int) -> torch.Tensor:
        """What is added to a state before a layer, (d_model,)."""
        raise NotImplementedError

    def project(
        self, layer: int, sources: list[torch.Tensor], memory_length: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        shape = (self.config.n_head, self.config.d_head)
        query_weight = self.layer_weight(layer, "dec_attn.q_net.weight")
        key_weight, value_weight = self.layer_weight(layer, "dec_attn.kv_net.weight").chunk(2)
        queries = [(query_weight @ vector).view(shape) for vector in sources[memory_length:]]
        sources = [self.normalised(layer, vector) for vector in sources]
        keys = [(key_weight @ vector).view(shape) for vector in sources]
        values = [(value_weight @ vector).view(shape) for vector in sources]
        return queries, keys, values

    def scorer(self, layer: int, num_distances: int, clamp_len: int) -> Scorer:
        return lambda head, query, key, distance: query.dot(key) / math.sqrt(self.config.d_head)

    def layer_inputs(
        self, layer: int, vectors: list[torch.Tensor], memory: SlowMemory
    ) -> tuple[list[torch.Tensor], SlowMemory]:
        seen = memory.branch()
        states = seen.layers[layer] + vectors
        numbered = [
            vector + self.position(layer, len(states) - 1 - index, memory.clamp_len)
            for index, vector in enumerate(states)
        ]
        memory_length = len(seen.layers[layer])
        seen.layers[layer] = numbered[:memory_length]
        return numbered[memory_length:], seen

    def read_vectors(
        self, vectors: list[torch.Tensor], memory: SlowMemory, window_rule: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert not window_rule, "a cache of keys and values cannot be numbered anew"
        return super().read_vectors(vectors, memory)


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

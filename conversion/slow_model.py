"""A slow Transformer-XL that is meant to be read: one row, one query and one key at a time, in float64.

Everything follows the formulas of [Dai et al., 2019](https://arxiv.org/abs/1901.02860): the four terms (a)-(d) of
section 3.3 are four separate dot products, the vector of every distance is projected on its own, the softmax runs over
a list of visible keys, the memory of a layer is a list of vectors, and the adaptive softmax multiplies the probability
of a cluster by the probability inside it. Rows of a batch never meet, and padding is handled by leaving it out.

It takes the weights under their published names and any object that has the fields of `TransfoXLConfig`. Every step
can be differentiated, so the gradient of every parameter can be compared: see `leaves_of` and `SlowTransfoXL.losses`.
Nothing here is shared with the package. `test_slow_model.py` compares it with the recorded outputs of the original
implementations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# H heads   Q queries of one segment   K = memory + Q keys   V vocabulary

IGNORED = -100


@dataclass
class RowOutput:
    """What one row of one segment gives; pads are absent."""

    positions: list[int]
    """Columns of the batch that hold real tokens, in order."""
    hidden_states: list[torch.Tensor]
    """`n_layer + 1` tensors (Q, d_model): the embedding, then each layer."""
    attentions: list[torch.Tensor]
    """`n_layer` tensors (H, Q, K), memory keys first."""


class SlowMemory:
    """The memory of one row: for each layer a list of the vectors that entered it, oldest first.

    The lengths belong to the memory; `None` takes the configuration's.
    """

    def __init__(
        self,
        config: Any,
        *,
        mem_len: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        memory_init: str | None = None,
    ) -> None:
        self.mem_len: int = config.mem_len if mem_len is None else mem_len
        self.clamp_len: int = config.clamp_len if clamp_len is None else clamp_len
        self.same_length: bool = config.same_length if same_length is None else same_length
        memory_init = config.memory_init if memory_init is None else memory_init
        num_zeros = {"empty": 0, "zeros": self.mem_len}[memory_init]
        self.d_model: int = config.d_model
        zero = torch.zeros(self.d_model, dtype=torch.float64)
        self.layers: list[list[torch.Tensor]] = [[zero] * num_zeros for _ in range(config.n_layer)]

    @classmethod
    def from_tensors(cls, config: Any, layers: Sequence[torch.Tensor], **lengths: Any) -> SlowMemory:
        """A memory that holds these vectors: one tensor (time, d_model) for each layer."""
        memory = cls(config, **lengths)
        memory.layers = [list(layer.double()) for layer in layers]
        return memory

    def write(self, layer: int, inputs: Iterable[torch.Tensor]) -> None:
        kept = self.layers[layer] + [vector.detach() for vector in inputs]
        self.layers[layer] = kept[max(0, len(kept) - self.mem_len) :]

    def branch(self) -> SlowMemory:
        """A copy that can be read on without changing this one."""
        other = copy.copy(self)
        other.layers = [list(layer) for layer in self.layers]
        return other

    def stacked(self, layer: int) -> torch.Tensor:
        """(time, d_model)"""
        vectors = self.layers[layer]
        return torch.stack(vectors) if vectors else torch.zeros(0, self.d_model, dtype=torch.float64)


class SlowTransfoXL:
    """Transformer-XL by loops over queries and keys.

    Args:
        config: an object with the fields of `TransfoXLConfig`.
        state_dict: weights under their published names. A tied tensor may be given under both names or only under the
            name it is tied to. Tensors that are float64 already are used as they are, so they may require gradients.
    """

    def __init__(self, config: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in state_dict.items()}
        self.cutoffs: list[int] = list(config.cutoffs or [])
        self.bounds: list[int] = [0, *self.cutoffs, config.vocab_size]
        self.num_clusters = len(self.cutoffs)
        self.shortlist_size = self.bounds[1]
        self._sinusoids: dict[int, torch.Tensor] = {}

    # ---- weights -------------------------------------------------------------------------------------------------

    def weight(self, name: str, tied_to: str | None = None) -> torch.Tensor:
        """The tensor of this name; without it, the one it is tied to. Both given: they must agree."""
        if tied_to is None:
            return self.weights[name]
        if name not in self.weights:
            return self.weights[tied_to]
        if tied_to in self.weights and not torch.equal(self.weights[name], self.weights[tied_to]):
            raise ValueError(f"`{name}` is tied to `{tied_to}` by the configuration, but their values differ.")
        return self.weights[name]

    def layer_weight(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"transformer.layers.{layer}.{name}"]

    def bias_vector(self, layer: int, name: str) -> torch.Tensor:
        """`r_w_bias` (u of the paper) or `r_r_bias` (v), (H, d_head): one pair per layer, or one for all."""
        if self.config.untie_r:
            return self.layer_weight(layer, f"dec_attn.{name}")
        return self.weights[f"transformer.{name}"]

    def cluster_width(self, cluster: int) -> int:
        return int(self.config.d_embed // self.config.div_val**cluster)

    def has_projection(self, cluster: int) -> bool:
        if self.config.div_val == 1:
            return bool(self.config.d_embed != self.config.d_model)
        return bool(self.config.proj_same_dim or self.cluster_width(cluster) != self.config.d_model)

    def projection_is_tied(self, cluster: int) -> bool:
        tie_projs = self.config.tie_projs
        if tie_projs is None:
            return self.config.proj_share_all_but_first and cluster > 0
        return cluster < len(tie_projs) and tie_projs[cluster]

    def embedding_table(self, cluster: int) -> torch.Tensor:
        """(words of the cluster, width)"""
        if self.config.div_val == 1:
            table = self.weights["transformer.word_emb.emb_layers.0.weight"]
            return table[self.bounds[cluster] : self.bounds[cluster + 1]]
        return self.weights[f"transformer.word_emb.emb_layers.{cluster}.weight"]

    def embedding_projection(self, cluster: int) -> torch.Tensor | None:
        """(d_model, width), or None"""
        if not self.has_projection(cluster):
            return None
        return self.weights[f"transformer.word_emb.emb_projs.{0 if self.config.div_val == 1 else cluster}"]

    def softmax_table(self, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (words of the cluster, width) and bias of one cluster's output layer."""
        index = 0 if self.config.div_val == 1 else cluster
        source = f"transformer.word_emb.emb_layers.{index}.weight" if self.config.tie_word_embeddings else None
        table = self.weight(f"crit.out_layers.{index}.weight", source)
        bias = self.weights[f"crit.out_layers.{index}.bias"]
        if self.config.div_val == 1:
            words = slice(self.bounds[cluster], self.bounds[cluster + 1])
            return table[words], bias[words]
        return table, bias

    def softmax_projection(self, cluster: int) -> torch.Tensor | None:
        """(d_model, width), or None"""
        if not self.has_projection(cluster):
            return None
        source = f"transformer.word_emb.emb_projs.{0 if self.config.div_val == 1 else cluster}"
        return self.weight(f"crit.out_projs.{cluster}", source if self.projection_is_tied(cluster) else None)

    # ---- layers --------------------------------------------------------------------------------------------------

    def embed(self, token: int) -> torch.Tensor:
        """Adaptive input of one token, times sqrt(d_model): (d_model,)"""
        cluster = sum(token >= cutoff for cutoff in self.cutoffs)
        vector = self.embedding_table(cluster)[token - self.bounds[cluster]]
        projection = self.embedding_projection(cluster)
        if projection is not None:
            vector = projection @ vector
        return vector * math.sqrt(self.config.d_model)

    def layer_norm(self, vector: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        centred = vector - vector.mean()
        variance = (centred * centred).mean()
        return centred / torch.sqrt(variance + self.config.layer_norm_epsilon) * weight + bias

    def sinusoid(self, distance: int, clamp_len: int) -> torch.Tensor:
        """R of a distance: all sines, then all cosines."""
        if clamp_len > 0:
            distance = min(distance, clamp_len)
        if distance not in self._sinusoids:
            rates = [10000.0 ** (-2 * t / self.config.d_model) for t in range(self.config.d_model // 2)]
            sines = [math.sin(distance * rate) for rate in rates]
            cosines = [math.cos(distance * rate) for rate in rates]
            self._sinusoids[distance] = torch.tensor(sines + cosines, dtype=torch.float64)
        return self._sinusoids[distance]

    def is_visible(self, distance: int, memory: SlowMemory, window_rule: bool) -> bool:
        """Whether a query sees the key this far behind it.

        The segment rule lets a query see the whole memory, however far, and what precedes it in its own segment.
        """
        if distance < 0:
            return False
        if memory.same_length and memory.mem_len > 0:
            # counted with the query itself; without memory `same_length` has no effect
            return distance < memory.mem_len + int(self.config.same_length_includes_oldest)
        if window_rule:
            return distance < memory.mem_len + 1
        return True

    def attend(
        self, layer: int, inputs: list[torch.Tensor], memory: SlowMemory, window_rule: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The attention output of each query before the residual sum, and the weights (H, Q, K)."""
        num_heads, head_size = self.config.n_head, self.config.d_head
        norm_weight = self.layer_weight(layer, "dec_attn.layer_norm.weight")
        norm_bias = self.layer_weight(layer, "dec_attn.layer_norm.bias")
        sources = memory.layers[layer] + inputs
        if self.config.pre_lnorm:
            sources = [self.layer_norm(vector, norm_weight, norm_bias) for vector in sources]

        # each (num_heads * head_size, d_model): queries, then keys, then values
        query_weight, key_weight, value_weight = self.layer_weight(layer, "dec_attn.qkv_net.weight").chunk(3)
        memory_length = len(memory.layers[layer])
        queries = [(query_weight @ vector).view(num_heads, head_size) for vector in sources[memory_length:]]
        keys = [(key_weight @ vector).view(num_heads, head_size) for vector in sources]
        values = [(value_weight @ vector).view(num_heads, head_size) for vector in sources]
        relative_weight = self.layer_weight(layer, "dec_attn.r_net.weight")
        relative_keys = [
            (relative_weight @ self.sinusoid(distance, memory.clamp_len)).view(num_heads, head_size)
            for distance in range(len(sources))
        ]
        content_query_bias = self.bias_vector(layer, "r_w_bias")
        position_query_bias = self.bias_vector(layer, "r_r_bias")

        outputs, weights = [], []
        for i, query in enumerate(queries):
            visible = [j for j in range(len(sources)) if self.is_visible(memory_length + i - j, memory, window_rule)]
            heads, rows = [], []
            for head in range(num_heads):
                scores = []
                for j in visible:
                    key, relative_key = keys[j][head], relative_keys[memory_length + i - j][head]
                    a = query[head].dot(key)
                    b = query[head].dot(relative_key)
                    c = content_query_bias[head].dot(key)
                    d = position_query_bias[head].dot(relative_key)
                    scores.append((a + b + c + d) / math.sqrt(head_size))
                exponentials = torch.exp(torch.stack(scores) - max(scores).detach())
                probabilities = exponentials / exponentials.sum()
                heads.append(sum(p * values[j][head] for p, j in zip(probabilities, visible, strict=True)))
                row = torch.zeros(len(sources), dtype=torch.float64)
                row[visible] = probabilities.detach()
                rows.append(row)
            outputs.append(self.layer_weight(layer, "dec_attn.o_net.weight") @ torch.cat(heads))
            weights.append(torch.stack(rows))
        # Q x (H, K) -> (H, Q, K)
        return outputs, torch.stack(weights, dim=1)

    def feed_forward(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        norm_weight = self.layer_weight(layer, "pos_ff.layer_norm.weight")
        norm_bias = self.layer_weight(layer, "pos_ff.layer_norm.bias")
        inner = self.layer_norm(vector, norm_weight, norm_bias) if self.config.pre_lnorm else vector
        inner = self.layer_weight(layer, "pos_ff.CoreNet.0.weight") @ inner
        inner = torch.relu(inner + self.layer_weight(layer, "pos_ff.CoreNet.0.bias"))
        inner = self.layer_weight(layer, "pos_ff.CoreNet.3.weight") @ inner
        result = vector + inner + self.layer_weight(layer, "pos_ff.CoreNet.3.bias")
        return result if self.config.pre_lnorm else self.layer_norm(result, norm_weight, norm_bias)

    def read_vectors(
        self, vectors: list[torch.Tensor], memory: SlowMemory, window_rule: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All layers over the input vectors of one row; the memory advances."""
        hidden_states, attentions = [torch.stack(vectors)], []
        for layer in range(self.config.n_layer):
            attended, weights = self.attend(layer, vectors, memory, window_rule)
            memory.write(layer, vectors)
            sums = [vector + output for vector, output in zip(vectors, attended, strict=True)]
            if not self.config.pre_lnorm:
                norm_weight = self.layer_weight(layer, "dec_attn.layer_norm.weight")
                norm_bias = self.layer_weight(layer, "dec_attn.layer_norm.bias")
                sums = [self.layer_norm(vector, norm_weight, norm_bias) for vector in sums]
            vectors = [self.feed_forward(layer, vector) for vector in sums]
            hidden_states.append(torch.stack(vectors))
            attentions.append(weights)
        return hidden_states, attentions

    # ---- adaptive softmax ----------------------------------------------------------------------------------------

    def cluster_logits(self, hidden: torch.Tensor, cluster: int) -> torch.Tensor:
        """Logits of the words of one cluster; those of the shortlist are followed by one for every other cluster."""
        weight, bias = self.softmax_table(cluster)
        projection = self.softmax_projection(cluster)
        narrow = hidden if projection is None else projection.T @ hidden
        logits = weight @ narrow + bias
        if cluster == 0 and self.num_clusters:
            cluster_logits = self.weights["crit.cluster_weight"] @ narrow + self.weights["crit.cluster_bias"]
            logits = torch.cat([logits, cluster_logits])
        return logits

    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """log p of every word given one output vector: (d_model,) -> (V,)"""
        head = log_softmax(self.cluster_logits(hidden, 0))
        parts = [head[: self.shortlist_size]]
        for cluster in range(1, self.num_clusters + 1):
            parts.append(head[self.shortlist_size + cluster - 1] + log_softmax(self.cluster_logits(hidden, cluster)))
        return torch.cat(parts)

    # ---- batches -------------------------------------------------------------------------------------------------

    def new_memory(self, batch_size: int, **lengths: Any) -> list[SlowMemory]:
        """One memory for each row."""
        return [SlowMemory(self.config, **lengths) for _ in range(batch_size)]

    def read(
        self,
        input_ids: torch.Tensor | None = None,
        memory: list[SlowMemory] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        window_rule: bool = False,
    ) -> list[RowOutput]:
        """Read one segment, row by row; each row's memory advances by its real tokens.

        Args:
            input_ids: (batch, time).
            memory: one memory per row; without it every row starts as the configuration says.
            attention_mask: (batch, time), 0 at pads, which are left out.
            inputs_embeds: (batch, time, d_model), used as they are, in place of `input_ids`.
            window_rule: every position sees itself and the `mem_len` positions before it (what the library's caches
                do), instead of the whole memory.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        assert inputs is not None
        memory = self.new_memory(len(inputs)) if memory is None else memory
        outputs = []
        for row, row_memory in enumerate(memory):
            positions = list(range(inputs.shape[1]))
            if attention_mask is not None:
                positions = [time for time in positions if attention_mask[row, time]]
            if input_ids is not None:
                vectors = [self.embed(int(input_ids[row, time])) for time in positions]
            else:
                vectors = [inputs[row, time].double() for time in positions]
            if vectors:
                hidden_states, attentions = self.read_vectors(vectors, row_memory, window_rule)
            else:
                nothing = torch.zeros(0, self.config.d_model, dtype=torch.float64)
                hidden_states, attentions = [nothing] * (self.config.n_layer + 1), []
            outputs.append(RowOutput(positions, hidden_states, attentions))
        return outputs

    def scores(self, rows: list[RowOutput], width: int) -> torch.Tensor:
        """Log-probabilities (batch, width, V) with zeros at pads."""
        zeros = torch.zeros(self.config.vocab_size, dtype=torch.float64)
        return torch.stack([torch.stack(self._scatter(row, width, zeros)) for row in rows])

    def _scatter(self, row: RowOutput, width: int, zeros: torch.Tensor) -> list[torch.Tensor]:
        columns = [zeros] * width
        for index, time in enumerate(row.positions):
            columns[time] = self.log_probabilities(row.hidden_states[-1][index])
        return columns

    def losses(self, rows: list[RowOutput], targets: torch.Tensor) -> torch.Tensor:
        """-log p(targets[b, t] | what row b read up to t), 0 where the target is -100 or the input a pad."""
        zero = torch.zeros((), dtype=torch.float64)
        result = []
        for row, row_targets in zip(rows, targets, strict=True):
            columns = [zero] * len(row_targets)
            for index, time in enumerate(row.positions):
                if row_targets[time] != IGNORED:
                    scores = self.log_probabilities(row.hidden_states[-1][index])
                    columns[time] = -scores[int(row_targets[time])]
            result.append(torch.stack(columns))
        return torch.stack(result)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    largest = logits.max().detach()
    return logits - largest - torch.log(torch.exp(logits - largest).sum())


def last_hidden(rows: list[RowOutput]) -> torch.Tensor:
    """(batch, time, d_model), for rows without pads."""
    return torch.stack([row.hidden_states[-1] for row in rows])


def stacked_memory(memory: list[SlowMemory], layer: int) -> torch.Tensor:
    """The legacy layout (mem_time, batch, d_model), for rows of equal length."""
    return torch.stack([row.stacked(layer) for row in memory], dim=1)


def leaves_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Float64 copies of a model's parameters that collect their own gradients, each shared parameter once.

    `SlowTransfoXL(config, leaves_of(model))`, then `backward()`; compare `leaf.grad` with `parameter.grad` by name.
    """
    return {
        name: parameter.detach().double().clone().requires_grad_(True) for name, parameter in module.named_parameters()
    }

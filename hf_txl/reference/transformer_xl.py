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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .weights import NamedWeights

# H heads   Q queries of one segment   K = memory + Q keys   D head size   V vocabulary

IGNORED = -100
Scorer = Callable[[int, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""The score of a query (D,) and a key (D,): called with head, query, key and distance."""


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


def join(model: SlowTransfoXL, layer: int, sublayer: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The residual sum, or a gate of Parisotto et al. 2019 (section 3.2) after the ReLU of figure 1."""
    gating = getattr(model.config, "gating", None)
    if gating is None:
        return x + y
    y = torch.relu(y)

    def times(name: str, vector: torch.Tensor) -> torch.Tensor:
        return model.layer_weight(layer, f"{sublayer}.gate.{name}.weight") @ vector

    def bias() -> torch.Tensor:
        return model.layer_weight(layer, f"{sublayer}.gate.gate_bias")

    if gating == "residual":
        return x + y
    if gating == "input":
        return torch.sigmoid(times("w", x)) * x + y
    if gating == "output":
        return x + torch.sigmoid(times("w", x) - bias()) * y
    if gating == "highway":
        carried = torch.sigmoid(times("w", x) + bias())
        return carried * x + (1 - carried) * y
    if gating == "sigmoid_tanh":
        return x + torch.sigmoid(times("w", y) - bias()) * torch.tanh(times("u", y))
    reset = torch.sigmoid(times("w_r", y) + times("u_r", x))
    update = torch.sigmoid(times("w_z", y) + times("u_z", x) - bias())
    candidate = torch.tanh(times("w_h", y) + times("u_h", reset * x))
    return (1 - update) * x + update * candidate


class SlowTransfoXL(NamedWeights):
    """Transformer-XL by loops over queries and keys.

    Another attention kind overrides `project`, `scorer` or `value`.

    Args:
        config, state_dict: as for `NamedWeights`.
    """

    def __init__(self, config: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, state_dict)
        self._sinusoids: dict[int, torch.Tensor] = {}

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

    def normalised(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        """The vector itself unless normalisation comes first (`pre_lnorm`)."""
        return self.attention_norm(layer, vector) if self.config.pre_lnorm else vector

    def attention_norm(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        weight = self.layer_weight(layer, "dec_attn.layer_norm.weight")
        return self.layer_norm(vector, weight, self.layer_weight(layer, "dec_attn.layer_norm.bias"))

    def project(
        self, layer: int, sources: list[torch.Tensor], memory_length: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Queries (H, D) of the segment, and keys and values (H, D) of all sources, memory first."""
        shape = (self.config.n_head, self.config.d_head)
        # each (H * D, d_model): queries, then keys, then values
        query_weight, key_weight, value_weight = self.layer_weight(layer, "dec_attn.qkv_net.weight").chunk(3)
        sources = [self.normalised(layer, vector) for vector in sources]
        queries = [(query_weight @ vector).view(shape) for vector in sources[memory_length:]]
        keys = [(key_weight @ vector).view(shape) for vector in sources]
        values = [(value_weight @ vector).view(shape) for vector in sources]
        return queries, keys, values

    def scorer(self, layer: int, num_distances: int, clamp_len: int) -> Scorer:
        """What enters the softmax for one head's query (D,) and key (D,) at a distance below `num_distances`."""
        shape = (self.config.n_head, self.config.d_head)
        relative_weight = self.layer_weight(layer, "dec_attn.r_net.weight")
        relative_keys = [
            (relative_weight @ self.sinusoid(distance, clamp_len)).view(shape) for distance in range(num_distances)
        ]
        content_query_bias = self.bias_vector(layer, "r_w_bias")
        position_query_bias = self.bias_vector(layer, "r_r_bias")

        def score(head: int, query: torch.Tensor, key: torch.Tensor, distance: int) -> torch.Tensor:
            relative_key = relative_keys[distance][head]
            a = query.dot(key)
            b = query.dot(relative_key)
            c = content_query_bias[head].dot(key)
            d = position_query_bias[head].dot(relative_key)
            return (a + b + c + d) / math.sqrt(self.config.d_head)

        return score

    def value(self, layer: int, value: torch.Tensor, distance: int) -> torch.Tensor:
        """What a query at this distance takes from a key, (D,)."""
        return value

    def attend(
        self, layer: int, inputs: list[torch.Tensor], memory: SlowMemory, window_rule: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The attention output of each query before the residual sum, and the weights (H, Q, K)."""
        sources = memory.layers[layer] + inputs
        memory_length = len(memory.layers[layer])
        queries, keys, values = self.project(layer, sources, memory_length)
        score = self.scorer(layer, len(sources), memory.clamp_len)
        output_weight = self.layer_weight(layer, "dec_attn.o_net.weight")
        outputs, weights = [], []
        for i, query in enumerate(queries, start=memory_length):
            visible = [j for j in range(len(sources)) if self.is_visible(i - j, memory, window_rule)]
            heads, rows = [], []
            for head in range(self.config.n_head):
                scores = [score(head, query[head], keys[j][head], i - j) for j in visible]
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

    def feed_forward(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        norm_weight = self.layer_weight(layer, "pos_ff.layer_norm.weight")
        norm_bias = self.layer_weight(layer, "pos_ff.layer_norm.bias")
        inner = self.layer_norm(vector, norm_weight, norm_bias) if self.config.pre_lnorm else vector
        inner = self.layer_weight(layer, "pos_ff.CoreNet.0.weight") @ inner
        inner = torch.relu(inner + self.layer_weight(layer, "pos_ff.CoreNet.0.bias"))
        inner = self.layer_weight(layer, "pos_ff.CoreNet.3.weight") @ inner
        inner = inner + self.layer_weight(layer, "pos_ff.CoreNet.3.bias")
        result = join(self, layer, "pos_ff", vector, inner)
        return result if self.config.pre_lnorm else self.layer_norm(result, norm_weight, norm_bias)

    def layer_inputs(
        self, layer: int, vectors: list[torch.Tensor], memory: SlowMemory
    ) -> tuple[list[torch.Tensor], SlowMemory]:
        """What a layer reads of the segment and of the memory; kinds with absolute positions add them here."""
        return vectors, memory.branch()

    def read_vectors(
        self, vectors: list[torch.Tensor], memory: SlowMemory, window_rule: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All layers over the input vectors of one row; the memory advances."""
        hidden_states, attentions = [torch.stack(vectors)], []
        for layer in range(self.config.n_layer):
            inputs, seen = self.layer_inputs(layer, vectors, memory)
            memory.write(layer, vectors)
            attended, weights = self.attend(layer, inputs, seen, window_rule)
            sums = [join(self, layer, "dec_attn", *each) for each in zip(inputs, attended, strict=True)]
            if not self.config.pre_lnorm:
                sums = [self.attention_norm(layer, vector) for vector in sums]
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
        result = []
        for row in rows:
            columns = [zeros] * width
            for index, time in enumerate(row.positions):
                columns[time] = self.log_probabilities(row.hidden_states[-1][index])
            result.append(torch.stack(columns))
        return torch.stack(result)

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

"""Relative attention against loops over queries and keys: alignment, positions, masks, backends, dropout."""

import math
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLModel, attention_execution_transfo_xl
from hf_txl.attention_execution_transfo_xl import AT_ONCE, eager_attention, sdpa_attention
from hf_txl.attention_transfo_xl import TransfoXLAttention
from hf_txl.layout_transfo_xl import AttentionLayout
from hf_txl.positions_transfo_xl import (
    PositionTable,
    align_relative_scores,
    gather_relative_scores,
    sinusoid_embeddings,
)
from hf_txl.reference.transformer_xl import SlowTransfoXL
from tests.helpers import assert_close
from tests.model.tiny_models import T0
from tests.t0 import FLOAT32, FLOAT64, GRADIENTS, LARGE_WEIGHTS, make_config, make_model, random_ids

# Q queries   M memory   K = M + Q keys   D head size

# rounding of a few float64 sums
EXACT = 1e-12
# a sine or cosine of a float32 angle below 300 (half a unit in the last place of the angle)
SINUSOIDS = 2e-5
LENGTHS = [(1, 0), (1, 6), (2, 1), (7, 0), (7, 3), (13, 20)]


# --- alignment


def naive_alignment(scores: torch.Tensor, key_length: int) -> torch.Tensor:
    """Column `c` belongs to distance `K - 1 - c`; future keys get 0."""
    query_length = scores.shape[-2]
    memory_length = key_length - query_length
    aligned = torch.zeros(*scores.shape[:-1], key_length, dtype=scores.dtype)
    for i in range(query_length):
        for j in range(i + memory_length + 1):
            distance = i + memory_length - j
            aligned[..., i, j] = scores[..., i, key_length - 1 - distance]
    return aligned


def visible(query_length: int, key_length: int) -> torch.Tensor:
    return torch.ones(query_length, key_length, dtype=torch.bool).tril(key_length - query_length)


@pytest.mark.parametrize(("query_length", "memory_length"), LENGTHS)
def test_aligned_scores_are_queries_times_the_vector_of_the_distance(query_length: int, memory_length: int) -> None:
    """C51: BD[i, j] = (q_i + v) . R_(i + M - j), by a loop."""
    key_length = memory_length + query_length
    query = torch.randn(3, 5, query_length, 4, dtype=torch.float64)
    bias = torch.randn(5, 1, 4, dtype=torch.float64)
    relative = {distance: torch.randn(5, 4, dtype=torch.float64) for distance in range(-query_length, key_length)}
    table = torch.stack([relative[distance] for distance in range(key_length - 1, -query_length - 1, -1)])
    # (B, H, Q, D) x (N, H, D) -> (B, H, Q, N)
    scores = torch.einsum("bhqd,nhd->bhqn", query + bias, table)
    aligned = align_relative_scores(scores, key_length)
    assert aligned.shape == (3, 5, query_length, key_length)
    for i in range(query_length):
        for j in range(i + memory_length + 1):
            expected = ((query[:, :, i] + bias[:, 0]) * relative[i + memory_length - j]).sum(-1)
            assert_close(f"BD[{i}, {j}]", aligned[..., i, j], expected, EXACT)


@pytest.mark.parametrize(("query_length", "memory_length"), LENGTHS)
def test_future_keys_meet_the_rows_that_the_mask_hides(query_length: int, memory_length: int) -> None:
    """C51: no entry comes from another query's row, not even a masked one."""
    key_length = memory_length + query_length
    # every score names its query and distance: 1000 i + distance
    distances = torch.arange(key_length - 1, -query_length - 1, -1.0)
    scores = 1000.0 * torch.arange(query_length)[:, None] + distances[None, :]
    aligned = align_relative_scores(scores, key_length)
    for i in range(query_length):
        for j in range(key_length):
            assert aligned[i, j] == 1000 * i + (i + memory_length - j)


def test_alignment_is_a_view() -> None:
    scores = torch.randn(2, 3, 5, 11 + 5)
    assert align_relative_scores(scores, 11).untyped_storage().data_ptr() == scores.untyped_storage().data_ptr()


@pytest.mark.parametrize(("query_length", "memory_length"), LENGTHS)
def test_gradients_of_alignment_equal_those_of_the_loop(query_length: int, memory_length: int) -> None:
    key_length = memory_length + query_length
    scores = torch.randn(2, 3, query_length, key_length + query_length, dtype=torch.float64, requires_grad=True)
    # future keys are masked, so nothing flows back from them
    weights = torch.randn(2, 3, query_length, key_length, dtype=torch.float64) * visible(query_length, key_length)
    (ours,) = torch.autograd.grad((align_relative_scores(scores, key_length) * weights).sum(), scores)
    (theirs,) = torch.autograd.grad((naive_alignment(scores, key_length) * weights).sum(), scores)
    assert_close("gradient", ours, theirs, EXACT)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("query_length", "memory_length"), LENGTHS)
def test_gathered_scores_equal_aligned_ones(query_length: int, memory_length: int, window: int | None) -> None:
    """Rows without pads through the path of rows with pads."""
    key_length = memory_length + query_length
    scores = torch.randn(2, 3, query_length, key_length + query_length, dtype=torch.float64)
    mask = torch.ones(2, key_length, dtype=torch.bool)
    layout = AttentionLayout.from_mask(mask, memory_length, query_length, 0, window, False)
    gathered = gather_relative_scores(scores[..., :key_length], layout)
    seen = visible(query_length, key_length)
    if window is not None:
        seen = seen & ~seen.tril(memory_length - window)
    expected = align_relative_scores(scores, key_length).masked_fill(~seen, float("-inf"))
    assert_close("scores", gathered, expected, 0.0)


# --- positions


@pytest.mark.parametrize("d_model", [2, 6, 32])
def test_sinusoids_follow_the_formula_all_sines_first(d_model: int) -> None:
    distances = [0, 1, 2, 7, 100, 255]
    table = sinusoid_embeddings(torch.tensor(distances), d_model)
    assert table.dtype == torch.float32
    half = d_model // 2
    for row, distance in zip(table.double(), distances, strict=True):
        for i in range(half):
            angle = distance / 10000 ** (2 * i / d_model)
            assert abs(row[i].item() - math.sin(angle)) < SINUSOIDS
            assert abs(row[half + i].item() - math.cos(angle)) < SINUSOIDS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_positions_are_computed_in_float32_whatever_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    """Distances above 256 are no longer exact in bfloat16: positions must be rounded after the sine, not before."""
    model = make_model(mem_len=300, memory_init="zeros").to(dtype)
    seen = []
    model.transformer.layers[1].dec_attn.r_net.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(random_ids(1, 3), use_cache=False)
    distances = torch.arange(302, -4, -1).clamp(min=0)
    assert seen[0].dtype == dtype
    assert torch.equal(seen[0][0], sinusoid_embeddings(distances, 32).to(dtype))


# --- one attention layer by a triple loop


def attention_by_loops(
    layer: TransfoXLAttention, states: torch.Tensor, memory_length: int, clamp_len: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Section 3.3 for one row `(K, d_model)`: the output before the residual sum, and weights `(H, Q, K)`."""
    num_heads, size, width = layer.num_heads, layer.head_size, states.shape[1]
    query_weight, key_weight, value_weight = layer.qkv_net.weight.view(3, num_heads, size, width)
    relative_weight = layer.r_net.weight.view(num_heads, size, width)
    query_length = len(states) - memory_length
    weights = torch.zeros(num_heads, query_length, len(states), dtype=torch.float64)
    outputs = torch.zeros(query_length, num_heads, size, dtype=torch.float64)
    for head in range(num_heads):
        for i in range(query_length):
            query = query_weight[head] @ states[memory_length + i]
            scores = {}
            for j in range(len(states)):
                distance = i + memory_length - j
                if distance < 0 or (window is not None and distance >= window):
                    continue
                clamped = min(distance, clamp_len) if clamp_len > 0 else distance
                angles = [clamped / 10000 ** (2 * t / width) for t in range(width // 2)]
                position = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
                key, relative_key = key_weight[head] @ states[j], relative_weight[head] @ position
                score = (query + layer.r_w_bias[head]) @ key + (query + layer.r_r_bias[head]) @ relative_key
                scores[j] = float(score) / math.sqrt(size)
            total = sum(math.exp(score) for score in scores.values())
            for j, score in scores.items():
                weights[head, i, j] = math.exp(score) / total
                outputs[i, head] += weights[head, i, j] * (value_weight[head] @ states[j])
    return outputs.flatten(1) @ layer.o_net.weight.T, weights


def attention_layer(**fields: Any) -> TransfoXLAttention:
    """One layer in float64; heads that do not add up to the model width."""
    model = make_model(TransfoXLModel, n_head=3, d_head=5, n_layer=1, **LARGE_WEIGHTS, **fields).double()
    return model.layers[0].dec_attn


def position_table(num_keys: int, num_queries: int, clamp_len: int) -> PositionTable:
    distances = torch.arange(num_keys - 1, -num_queries - 1, -1).clamp(0, clamp_len if clamp_len > 0 else None)
    table = sinusoid_embeddings(distances, 32).double()
    return PositionTable(distances, num_queries, clamp_len, table.dtype, table, keeps=False)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("clamp_len", "window"), [(-1, None), (4, None), (-1, 6), (2, 7)])
@pytest.mark.parametrize(("query_length", "memory_length"), [(1, 6), (5, 6), (9, 6), (3, 0)])
@torch.no_grad()
def test_attention_equals_a_triple_loop(
    query_length: int, memory_length: int, clamp_len: int, window: int | None, backend: str
) -> None:
    """C18: distance = i + M - j, with memory in front; C02: a window counts the position itself."""
    layer = attention_layer()
    layer.config._attn_implementation = backend
    key_length = memory_length + query_length
    states = torch.randn(2, key_length, 32, dtype=torch.float64)
    layout = AttentionLayout(query_length, key_length, window=window)
    segment = states[:, memory_length:]
    output, _ = layer(segment, layout, position_table(key_length, query_length, clamp_len), states[:, :memory_length])
    for row in range(2):
        attended, _ = attention_by_loops(layer, states[row], memory_length, clamp_len, window)
        expected = layer.layer_norm(segment[row] + attended)
        assert_close("attention output", output[row], expected, **FLOAT64)


@pytest.mark.parametrize(("query_length", "memory_length"), [(1, 6), (5, 6), (9, 6), (3, 0)])
@torch.no_grad()
def test_attention_weights_equal_a_triple_loop(query_length: int, memory_length: int) -> None:
    """C18, C122: rows sum to 1 and nothing above the causal line gets weight."""
    layer = attention_layer()
    key_length = memory_length + query_length
    states = torch.randn(1, key_length, 32, dtype=torch.float64)
    _, weights = layer(
        states[:, memory_length:],
        AttentionLayout(query_length, key_length),
        position_table(key_length, query_length, -1),
        states[:, :memory_length],
        output_attentions=True,
    )
    _, expected = attention_by_loops(layer, states[0], memory_length, -1, None)
    assert_close("weights", weights[0], expected, 1e-6)
    assert_close("sums", weights.sum(-1), torch.ones(1, 3, query_length), 1e-6)
    assert (weights[..., ~visible(query_length, key_length)] == 0).all()


@torch.no_grad()
def test_a_longer_position_table_changes_nothing() -> None:
    """What a stream keeps covers more distances and future keys than one call needs."""
    layer = attention_layer()
    states = torch.randn(2, 4, 32, dtype=torch.float64)
    layout = AttentionLayout(4, 4)
    exact, _ = layer(states, layout, position_table(4, 4, -1))
    longer, _ = layer(states, layout, position_table(19, 11, -1))
    assert_close("output", longer, exact, EXACT)


# --- backends


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_one_query_sees_itself_and_all_of_the_memory(attn_implementation: str) -> None:
    """C52: a causal flag aligned top-left would leave one key of seven."""
    model = make_model(**LARGE_WEIGHTS)
    model.set_attn_implementation(attn_implementation)
    ids = random_ids(2, 7)
    memory = model.init_memory(2)
    model(ids[:, :6], cache=memory)
    output = model(ids[:, 6:], cache=memory, output_attentions=True)
    for weights in output.attentions:
        assert weights.shape == (2, 4, 1, 7)
        assert (weights > 0).all()
    # while everything fits into the memory, it is as good as one segment
    assert_close("logits", output.logits, model(ids, use_cache=False).logits[:, -1:], 2e-5)


@torch.no_grad()
def test_one_query_with_memory_is_the_same_on_every_backend() -> None:
    """C52"""
    ids = random_ids(2, 7)
    logits = {}
    for name in ("eager", "sdpa"):
        model = make_model(**LARGE_WEIGHTS)
        model.set_attn_implementation(name)
        memory = model.init_memory(2, stores="keys_values")
        model(ids[:, :6], cache=memory)
        logits[name] = model(ids[:, 6:], cache=memory).logits
    assert_close("logits", logits["sdpa"], logits["eager"], 2e-5)


def backend_inputs(query_length: int, key_length: int) -> dict[str, torch.Tensor]:
    """Tensors as the layers pass them; the bias is a strided view that ends with masked keys."""
    shapes = {"query": query_length, "key": key_length, "value": key_length}
    inputs = {name: torch.randn(2, 3, length, 5, dtype=torch.float64) for name, length in shapes.items()}
    scores = torch.randn(2, 3, query_length, key_length + query_length, dtype=torch.float64)
    scores[..., key_length:] = float("-inf")
    scores[..., : max(0, key_length - 4)] = float("-inf")
    return {**inputs, "scores": scores}


@pytest.mark.parametrize(("query_length", "memory_length"), [(1, 6), (5, 6), (9, 2), (7, 0)])
def test_backends_are_equal_forward_and_backward(query_length: int, memory_length: int) -> None:
    """C119: in float64, where the eager softmax is rounded to float32."""
    key_length = memory_length + query_length
    inputs = backend_inputs(query_length, key_length)
    module = torch.nn.Module().eval()
    target = torch.randn(2, query_length, 3, 5, dtype=torch.float64)
    results: dict[str, dict[str, torch.Tensor]] = {}
    for attend in (eager_attention, sdpa_attention):
        leaves = {name: tensor.clone().requires_grad_(True) for name, tensor in inputs.items()}
        bias = align_relative_scores(leaves["scores"], key_length)
        output, _ = attend(module, leaves["query"], leaves["key"], leaves["value"], bias, 0.4, 0.0)
        (output * target).sum().backward()
        results[attend.__name__] = {"output": output, **{name: leaf.grad for name, leaf in leaves.items()}}
    for name, expected in results["eager_attention"].items():
        assert_close(name, results["sdpa_attention"][name], expected, 1e-6, 1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_models_on_both_backends_are_equal_forward_and_backward(padded: bool) -> None:
    """C119: logits to 1e-4 and gradients to 1e-3 at most; here closer."""
    ids = random_ids(3, 13)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
        mask[2, 9:] = 0
    logits, gradients = {}, {}
    for name in ("eager", "sdpa"):
        model = make_model(same_length=True, **LARGE_WEIGHTS).double()
        model.set_attn_implementation(name)
        memory = model.init_memory(3)
        model(ids[:, :6], cache=memory, attention_mask=mask[:, :6])
        output = model(ids[:, 6:], cache=memory, attention_mask=mask[:, 6:], labels=ids[:, 6:])
        output.loss.backward()
        with torch.no_grad():
            logits[name] = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        gradients[name] = {key: p.grad for key, p in model.named_parameters()}
    assert_close("logits", logits["sdpa"], logits["eager"], **FLOAT64)
    for key, expected in gradients["eager"].items():
        assert_close(f"gradient of {key}", gradients["sdpa"][key], expected, **GRADIENTS)


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_equals_eager() -> None:
    """Slow, because torch generates code; of one shape, because on the CPU it generates wrong code for a second."""
    torch.compiler.reset()
    ids = random_ids(2, 7)
    logits = {}
    for name in ("eager", "flex_attention"):
        model = make_model(memory_init="zeros", **LARGE_WEIGHTS)
        model.set_attn_implementation(name)
        logits[name] = model(ids, use_cache=False).logits
    assert_close("logits", logits["flex_attention"], logits["eager"], **FLOAT32)


@torch.no_grad()
def test_attentions_are_returned_on_a_backend_that_has_none() -> None:
    """C122: by falling back for this call."""
    ids = random_ids(2, 5)
    weights = {}
    for name in ("eager", "sdpa"):
        model = make_model(**LARGE_WEIGHTS)
        model.set_attn_implementation(name)
        weights[name] = torch.stack(model(ids, output_attentions=True).attentions)
    assert torch.equal(weights["sdpa"], weights["eager"])


@pytest.mark.parametrize(
    ("name", "message"), [("flash_attention_2", "(?i)flash.attention.2"), ("no_such_backend", "no_such_backend")]
)
def test_a_backend_that_cannot_be_exact_is_refused(name: str, message: str) -> None:
    """C119: a clear message, not other numbers."""
    with pytest.raises((ValueError, ImportError), match=message):
        make_model().set_attn_implementation(name)


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_rows_of_pads_stay_finite(backend: str, memory_init: str) -> None:
    """C49: three pads in front, and one row of pads only; forward and backward through the real tokens."""
    model = make_model(memory_init=memory_init, **LARGE_WEIGHTS)
    model.set_attn_implementation(backend)
    ids = random_ids(3, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1] = 0
    with torch.no_grad():
        assert model(ids, attention_mask=mask).logits.isfinite().all()
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), output_hidden_states=True)
    output.loss.backward()
    assert all(states.isfinite().all() for states in output.hidden_states)
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


# --- numbering of real tokens


def numbered_by_loops(
    mask: list[bool], query_start: int, query_length: int, start_slots: int, window: int | None, oldest: int | None
) -> tuple[list[bool], dict[tuple[int, int], int]]:
    """One row: which slots are zero states, and the distance of each pair (query, key) that sees each other.

    `oldest` is the position before which there are no zero states, `None` if there are none at all.
    """
    is_real = [False] * start_slots + mask
    positions: dict[int, int] = {}
    first = next((slot for slot, real in enumerate(is_real) if real), len(is_real))
    is_start = [False] * len(is_real)
    for slot in range(len(is_real)):
        if slot < first and oldest is not None and slot - first >= oldest:
            is_start[slot] = True
            positions[slot] = slot - first
        elif is_real[slot]:
            positions[slot] = sum(is_real[:slot])
    pairs = {}
    for query in range(query_length):
        slot = start_slots + query_start + query
        if not is_real[slot]:
            continue
        for key, position in positions.items():
            distance = positions[slot] - position
            if distance >= 0 and (window is None or distance < window):
                pairs[query, key] = distance
    return is_start, pairs


@pytest.mark.parametrize("seed", range(12))
def test_real_tokens_are_numbered_one_after_another(seed: int) -> None:
    """Pads and free slots take no distance; the zero states of a start lie directly before the first token."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    stored, query_length = pick(0, 1, 5), pick(1, 4, 7)
    mask = torch.rand(5, stored + query_length, generator=generator) < pick(0.3, 0.6, 0.95)
    # a row without any real token and one without pads
    mask[0], mask[1] = False, True
    start_slots, window, zero_start = pick(0, 1, 4), pick(None, 1, 3), pick(False, True)
    limits = torch.randint(-9, 1, (5, 1), generator=generator) if pick(False, True) else None
    layout = AttentionLayout.from_mask(mask, stored, query_length, start_slots, window, zero_start, limits)
    assert (layout.query_length, layout.key_length) == (query_length, start_slots + stored + query_length)
    for row in range(5):
        oldest = None if not zero_start else -(10**6) if limits is None else int(limits[row])
        is_start, pairs = numbered_by_loops(mask[row].tolist(), stored, query_length, start_slots, window, oldest)
        if zero_start:
            assert layout.start_mask[row].tolist() == is_start
        else:
            assert layout.start_mask is None
        for query in range(query_length):
            slot = start_slots + stored + query
            assert layout.visible[row, query, slot], "every query sees itself"
            if not mask[row, stored + query]:
                continue
            seen = {key for key in range(layout.key_length) if layout.visible[row, query, key]}
            assert seen == {key for other, key in pairs if other == query}
            for key in seen:
                assert layout.distances[row, query, key] == pairs[query, key]


# --- dropout


class SlowWithFactors(SlowTransfoXL):
    """Every place of dropout multiplies by a factor instead: another one for attention probabilities."""

    factor, attention_factor = 1.25, 1.5

    def embed(self, token: int) -> torch.Tensor:
        return super().embed(token) * self.factor

    def sinusoid(self, distance: int, clamp_len: int) -> torch.Tensor:
        return super().sinusoid(distance, clamp_len) * self.factor

    def attend(self, *args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        outputs, weights = super().attend(*args, **kwargs)
        # the output is linear in the probabilities
        return [output * self.attention_factor * self.factor for output in outputs], weights

    def feed_forward(self, layer: int, vector: torch.Tensor) -> torch.Tensor:
        norm_weight = self.layer_weight(layer, "pos_ff.layer_norm.weight")
        norm_bias = self.layer_weight(layer, "pos_ff.layer_norm.bias")
        inner = self.layer_norm(vector, norm_weight, norm_bias) if self.config.pre_lnorm else vector
        inner = self.layer_weight(layer, "pos_ff.CoreNet.0.weight") @ inner
        inner = torch.relu(inner + self.layer_weight(layer, "pos_ff.CoreNet.0.bias")) * self.factor
        inner = self.layer_weight(layer, "pos_ff.CoreNet.3.weight") @ inner
        inner = (inner + self.layer_weight(layer, "pos_ff.CoreNet.3.bias")) * self.factor
        result = vector + inner
        return result if self.config.pre_lnorm else self.layer_norm(result, norm_weight, norm_bias)


@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_dropout_is_at_the_original_places(pre_lnorm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: embeddings, positions, attention output, both feed-forward steps, final output; before residual sums.

    A factor in place of each dropout shows where it is. Memory holds inputs of layers, so embeddings after dropout.
    """

    def scale(states: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return states * (1 + p) if training else states

    model = make_model(dropout=0.25, dropatt=0.5, pre_lnorm=pre_lnorm, **LARGE_WEIGHTS).double().train()
    slow = SlowWithFactors(model.config, model.state_dict())
    monkeypatch.setattr(torch.nn.functional, "dropout", scale)
    monkeypatch.setattr(
        attention_execution_transfo_xl, "dropout_factors", lambda like, p, seed: torch.full_like(like, 1 + p)
    )
    ids = random_ids(1, 9)
    memory, slow_memory = model.init_memory(1), slow.new_memory(1)
    for segment in (ids[:, :4], ids[:, 4:]):
        output = model(segment, cache=memory, output_hidden_states=True)
        states = slow.read(segment, slow_memory)[0].hidden_states
        states[-1] = states[-1] * slow.factor
        for layer, (ours, expected) in enumerate(zip(output.hidden_states, states, strict=True)):
            assert_close(f"hidden state {layer}", ours[0], expected, **FLOAT64)


@torch.no_grad()
def test_attention_dropout_reaches_the_fused_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: `dropatt` and nothing else, and only in train mode."""
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(kwargs["dropout_p"] if "dropout_p" in kwargs else args[4])
        return fused(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    # as on a GPU
    monkeypatch.setattr(attention_execution_transfo_xl, "choose_way", lambda inputs: AT_ONCE)
    model = make_model(dropout=0.25, dropatt=0.5)
    model.set_attn_implementation("sdpa")
    model(random_ids(1, 4))
    model.train()(random_ids(1, 4))
    assert seen == [0.0] * 3 + [0.5] * 3


@pytest.mark.parametrize("fields", [{"dropout": 0.5}, {"dropatt": 0.5}])
def test_dropout_changes_training_and_not_evaluation(fields: dict[str, float]) -> None:
    """C55"""
    model = make_model(**fields, **LARGE_WEIGHTS)
    ids = random_ids(2, 8)
    plain = make_model(**LARGE_WEIGHTS)(ids).logits
    assert torch.equal(model(ids).logits, plain)
    assert torch.equal(model(ids).logits, plain)
    model.train()
    first, second = model(ids).logits, model(ids).logits
    assert not torch.allclose(first, plain) and not torch.allclose(first, second)


def test_layers_share_the_settings_of_one_configuration() -> None:
    config = make_config(layer_norm_epsilon=1e-12)
    layer = TransfoXLAttention(TransfoXLConfig(**{**T0, "layer_norm_epsilon": 1e-12}), 0)
    assert layer.layer_norm.eps == config.layer_norm_epsilon == 1e-12
    assert layer.scaling == 8**-0.5

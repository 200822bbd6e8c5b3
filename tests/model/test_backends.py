"""Every attention backend, in every type, against the slow reference; which names are taken, and what they are given.

Report ids are public issues'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory, attention_execution_transfo_xl
from hf_txl.attention_execution_transfo_xl import AT_ONCE, BACKENDS, IN_QUERY_BLOCKS, choose_way
from tests.helpers import assert_close
from tests.model.tiny_models import (
    STARTS,
    STORAGES,
    WINDOWS,
    random_ids,
    slow_log_probabilities,
    t0_model,
    tiny_config,
    tiny_model,
)

HALVES = [torch.bfloat16, torch.float16]
# two correct float32 programs; log-probabilities of these weights are of order 10
FLOAT32 = 2e-5
# a float64 model takes its sinusoids in float32
FLOAT64 = 1e-5
# at least eight bits of mantissa, in log-probabilities of up to 6
HALF = 5e-2
GRADIENTS = {"atol": 1e-5, "rtol": 1e-4}
PADS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]])


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """This backend everywhere: on the CPU, SDPA is otherwise left where its bias needs a gradient."""
    monkeypatch.setattr(attention_execution_transfo_xl, "choose_backend", lambda *_: BACKENDS[name])


def state_of(model: Any, name: str) -> Any:
    """A cache by name; `None` for "none"."""
    if name in STORAGES:
        return TransfoXLMemory(model.config, stores=name)
    return DynamicCache(config=model.config) if name == "DynamicCache" else None


# ---- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["none", "DynamicCache", *STORAGES])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_every_backend_equals_the_slow_reference(backend: str, state: str) -> None:
    """C52: the memory longer than the segment, and a single query."""
    model = tiny_model(memory_init="zeros", same_length=True)
    model.set_attn_implementation(backend)
    cache = state_of(model, state)
    segments = list(random_ids(2, 11).split([7, 3, 1], dim=1))[: 1 if state == "none" else 3]
    expected = slow_log_probabilities(model, segments)
    for index, ids in enumerate(segments):
        logits = model(ids, past_key_values=cache, use_cache=False).logits
        assert_close(f"segment {index}", logits, expected[index], FLOAT32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_fused_attention_has_the_gradients_of_eager(start: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory; eager is compared with the slow reference elsewhere."""
    gradients = []
    for backend in ("eager", "sdpa"):
        use_backend(monkeypatch, backend)
        model = tiny_model(memory_init=start).train()
        memory = TransfoXLMemory(model.config)
        for seed in range(2):
            ids = random_ids(2, 8, seed=seed)
            given = {"attention_mask": PADS, "labels": ids.masked_fill(PADS == 0, -100)} if masked else {"labels": ids}
            model(ids, cache=memory, **given).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert_close(f"gradient of {name}", gradients[1][name], expected, **GRADIENTS)


def test_fused_attention_is_finite_backwards_where_a_row_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C49: through SDPA's own backward pass."""
    use_backend(monkeypatch, "sdpa")
    model = tiny_model().train()
    mask = torch.cat([PADS, torch.zeros(1, 8, dtype=torch.long)])
    ids = random_ids(3, 8)
    memory = TransfoXLMemory(model.config)
    for _ in range(2):
        output = model(ids, attention_mask=mask, cache=memory, labels=ids.masked_fill(mask == 0, -100))
        assert output.losses.isfinite().all() and output.past_key_values is memory
        output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_on_the_cpu_equals_the_slow_reference() -> None:
    """Inference, one shape: more is not possible on the CPU. It is compiled, which takes up to a minute."""
    torch._dynamo.reset()
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    ids = random_ids(2, 8)
    (expected,) = slow_log_probabilities(model, [ids])
    assert_close("log-probabilities", model(ids, use_cache=False).logits, expected, FLOAT32)


# ---- types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_half_precision_is_close_to_the_slow_reference(dtype: torch.dtype, start: str) -> None:
    """C31, C48: of the same weights, as they are after rounding."""
    model = t0_model(memory_init=start).to(dtype)
    segments = list(random_ids(2, 16, vocab_size=99).split(8, dim=1))
    expected = slow_log_probabilities(model, segments, masks=[PADS, PADS])
    memory, real = TransfoXLMemory(model.config), PADS.bool()
    for index, ids in enumerate(segments):
        output = model(ids, attention_mask=PADS, cache=memory)
        assert output.logits.isfinite().all() and output.logits.dtype == torch.float32
        assert_close(f"segment {index}", output.logits[real], expected[index][real], HALF)


@torch.no_grad()
def test_a_float64_model_equals_the_slow_reference() -> None:
    model = tiny_model(memory_init="zeros").double()
    segments = list(random_ids(2, 8).split(4, dim=1))
    expected = slow_log_probabilities(model, segments)
    memory = TransfoXLMemory(model.config)
    for index, ids in enumerate(segments):
        assert_close(f"segment {index}", model(ids, cache=memory).logits, expected[index], FLOAT64)


@pytest.mark.parametrize("state", ["DynamicCache", *STORAGES])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_inference_under_autocast_is_close_to_the_slow_reference(dtype: torch.dtype, state: str) -> None:
    """C38"""
    model = t0_model(memory_init="zeros", same_length=True)
    segments = list(random_ids(2, 18, vocab_size=99).split(6, dim=1))
    cache = state_of(model, state)
    expected = slow_log_probabilities(model, segments)
    for index, ids in enumerate(segments):
        with torch.autocast("cpu", dtype=dtype):
            logits = model(ids, past_key_values=cache).logits
        assert logits.dtype == torch.float32
        assert_close(f"segment {index}", logits, expected[index], HALF)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("state", ["none", *STORAGES])
def test_half_precision_generates_what_is_likeliest_up_to_rounding(state: str, dtype: torch.dtype) -> None:
    model = tiny_model(same_length=True).to(dtype)
    prompt = random_ids(1, 6)
    output = model.generate(prompt, cache=state_of(model, state), do_sample=False, max_new_tokens=8, eos_token_id=None)
    (scores,) = slow_log_probabilities(model, [output[:, :-1]], window_rule=True)
    for position in range(5, output.shape[1] - 1):
        assert scores[0, position, output[0, position + 1]] > scores[0, position].max() - 0.3


# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_backend_may_be_named_in_every_way_of_the_library(backend: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=backend)
    built = AutoModelForCausalLM.from_config(tiny_config(), attn_implementation=backend)
    model.set_attn_implementation(backend)
    for one in (loaded, built, model):
        assert one.config._attn_implementation == backend
        assert {layer.dec_attn.config._attn_implementation for layer in one.transformer.layers} == {backend}


@pytest.mark.parametrize("name", ["nonsense", "flash_attention_2"])
def test_a_backend_that_is_not_offered_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """C119: a clear message, and the model goes on as before."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    before = model.config._attn_implementation
    reason = "nonsense" if name == "nonsense" else r"(?i)flash.?attention"
    with pytest.raises((ValueError, ImportError), match=reason):
        model.set_attn_implementation(name)
    with pytest.raises((ValueError, ImportError), match=reason):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    with pytest.raises((ValueError, ImportError), match=reason):
        TransfoXLForCausalLM(tiny_config(attn_implementation=name))
    assert model.config._attn_implementation == before
    assert model(random_ids(1, 3)).logits.isfinite().all()


@torch.no_grad()
def test_a_backend_of_the_user_is_handed_every_mask_in_the_position_bias() -> None:
    calls = []

    def plain_softmax(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        calls.append(attention_mask)
        scores = query @ key.transpose(-1, -2) * options["scaling"] + options["position_bias"]
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("softmax_of_a_user", plain_softmax)
    model = tiny_model()
    model.set_attn_implementation("softmax_of_a_user")
    segments, mask = list(random_ids(2, 8).split(4, dim=1)), PADS[:, 2:6]
    expected = slow_log_probabilities(model, segments, masks=[mask, mask])
    memory = TransfoXLMemory(model.config)
    for index, ids in enumerate(segments):
        logits = model(ids, attention_mask=mask, cache=memory).logits
        assert_close(f"segment {index}", logits[mask.bool()], expected[index][mask.bool()], FLOAT32)
    # once per layer and segment
    assert calls == [None] * 4


@torch.no_grad()
def test_attention_dropout_acts_in_training_only() -> None:
    model = tiny_model(dropatt=0.5)
    ids = random_ids(2, 8)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


# ---- blocks of queries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("transformer_xl", "empty"),
        ("transformer_xl", "zeros"),
        ("huang", "empty"),
        ("learned_relative", "zeros"),
        ("absolute_sinusoid", "empty"),
    ],
)
@torch.no_grad()
def test_blocks_of_queries_give_what_all_at_once_give(
    kind: str, window: str, start: str, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over segments shorter and longer than a block, with a memory that is ragged, in every kind of storage."""
    model = tiny_model(attention_kind=kind, memory_init=start, mem_len=7, **WINDOWS[window])
    model.set_attn_implementation("sdpa")
    ids = random_ids(2, 24)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    outputs = {}
    for block in (3, 1000):
        monkeypatch.setattr(attention_execution_transfo_xl, "QUERY_BLOCK", block)
        if block == 1000:

            def without_blocks(inputs: Any) -> Any:
                way = choose_way(inputs)
                return AT_ONCE if way is IN_QUERY_BLOCKS else way

            monkeypatch.setattr(attention_execution_transfo_xl, "choose_way", without_blocks)
        outputs[block] = [model(ids[:1], use_cache=False).logits]
        for storage in ["hidden_states"] if kind.startswith("absolute") else STORAGES:
            memory = TransfoXLMemory(model.config, stores=storage)
            model(ids[:, :8], cache=memory, attention_mask=mask if ragged else None)
            outputs[block] += [model(ids[:, first : first + 8], cache=memory).logits for first in (8, 16)]
    for blocks, whole in zip(*outputs.values(), strict=True):
        assert_close("logits", blocks, whole, 1e-5)

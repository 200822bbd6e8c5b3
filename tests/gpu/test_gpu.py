"""What can only be seen on a GPU: `pytest -m gpu tests/gpu`, one script of a few minutes.

Values and gradients of every backend and type against the slow float64 reference, memory, padding, compilation,
`generate`, peak memory at 2048 tokens on a memory of 2048, and fifty training steps. With the environment variable
HF_TXL_GPU_REPORT=file.json the figures are written there with date and hardware.

Tolerances: 1e-4 in float32 (products in another order), 2e-2 in half precision (eight or eleven bits of mantissa).
"""

import json
import os
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory
from hf_txl.reference.transformer_xl import SlowTransfoXL, leaves_of
from tests.helpers import assert_close

pytestmark = pytest.mark.gpu

# the same script runs on another device where somebody wants to try it without a GPU
DEVICE = os.environ.get("HF_TXL_GPU_DEVICE", "cuda")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
FIGURES: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    """Write the figures when all is done, complete or not at all."""
    FIGURES.clear()
    yield
    if path := os.environ.get("HF_TXL_GPU_REPORT"):
        header = {
            "date": date.today().isoformat(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else DEVICE,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        beside = Path(f"{path}.tmp")
        beside.write_text(json.dumps({**header, **FIGURES}, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def make_config(**fields: Any) -> TransfoXLConfig:
    defaults: dict[str, Any] = {
        "vocab_size": 61,
        "cutoffs": [11, 31],
        "div_val": 2,
        "d_model": 32,
        "n_head": 2,
        "d_head": 16,
        "d_inner": 48,
        "n_layer": 2,
        "mem_len": 7,
        "clamp_len": 9,
        "same_length": False,
        "dropout": 0.0,
    }
    return TransfoXLConfig(**{**defaults, **fields})


def make_model(config: TransfoXLConfig, dtype: torch.dtype = torch.float32) -> TransfoXLForCausalLM:
    model = TransfoXLForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + name.endswith("layer_norm.weight"))
    # the reference computes with the numbers that the model has after rounding
    return model.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_values_and_gradients_equal_the_reference(backend: str, dtype: torch.dtype, padded: bool) -> None:
    """Three segments with memory, forward and backward."""
    config = make_config()
    model = make_model(config, dtype)
    model.set_attn_implementation(backend)
    ids, targets = torch.randint(0, 61, (2, 3, 5)), torch.randint(0, 61, (2, 3, 5))
    mask = torch.ones(2, 3, 5, dtype=torch.long)
    if padded:
        mask[0, 0, :2] = mask[1, 1, 3:] = 0
    targets = targets.masked_fill(mask == 0, -100)

    leaves = leaves_of(model.cpu())
    slow = SlowTransfoXL(config, leaves)
    model.to(DEVICE)
    memory, slow_memory = TransfoXLMemory(config), slow.new_memory(2)
    total, expected_total = torch.zeros((), device=DEVICE), torch.zeros(()).double()
    tolerance = TOLERANCES[dtype]
    for segment_ids, segment_targets, segment_mask in zip(
        ids.unbind(1), targets.unbind(1), mask.unbind(1), strict=True
    ):
        given = {"attention_mask": segment_mask.to(DEVICE)} if padded else {}
        output = model(segment_ids.to(DEVICE), cache=memory, shift_labels=segment_targets.to(DEVICE), **given)
        rows = slow.read(segment_ids, slow_memory, attention_mask=segment_mask)
        expected = slow.losses(rows, segment_targets)
        # nats: relative to their size, since half precision rounds logits of that size
        assert_close(f"losses, {backend}", output.losses.float().cpu(), expected, tolerance, tolerance)
        total, expected_total = total + output.losses.sum(), expected_total + expected.sum()
    total.backward()
    expected_total.backward()
    # the gradient as a whole: half precision rounds its single numbers, sums over many tokens, further than that
    error = norm = 0.0
    for name, parameter in model.named_parameters():
        expected_grad = leaves[name].grad
        if expected_grad is not None:
            error += float((parameter.grad.double().cpu() - expected_grad).square().sum())
            norm += float(expected_grad.square().sum())
    FIGURES[f"gradient_error_{backend}_{dtype}_{padded}"] = (error / norm) ** 0.5
    assert error**0.5 < tolerance * norm**0.5


@pytest.mark.parametrize("stores", ["hidden_states", "keys_values"])
@torch.no_grad()
def test_cutting_a_stream_changes_nothing_under_a_window(stores: str) -> None:
    model = make_model(make_config(same_length=True))
    ids = torch.randint(0, 61, (3, 24), device=DEVICE)
    whole = model(ids, cache=TransfoXLMemory(model.config, stores=stores)).logits
    memory = TransfoXLMemory(model.config, stores=stores)
    parts = torch.cat([model(part, cache=memory).logits for part in ids.split([7, 1, 13, 3], dim=1)], dim=1)
    assert_close("logits", parts, whole, TOLERANCES[torch.float32])


@torch.no_grad()
def test_compiled_equals_eager() -> None:
    model = make_model(make_config())
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.randint(0, 61, (2, 7), device=DEVICE)
    one, other = TransfoXLMemory(model.config), TransfoXLMemory(model.config)
    for _ in range(3):
        actual, expected = compiled(ids, cache=one).logits, model(ids, cache=other).logits
        assert_close("logits", actual, expected, TOLERANCES[torch.float32])


def test_generation_is_that_of_the_cpu() -> None:
    model = make_model(make_config(same_length=True))
    prompt = torch.randint(1, 61, (2, 5), device=DEVICE)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    here = model.generate(prompt, **settings).cpu()
    with_memory = model.generate(prompt, cache=TransfoXLMemory(model.config), **settings).cpu()
    there = model.cpu().generate(prompt.cpu(), **settings)
    assert torch.equal(here, there) and torch.equal(with_memory, there)


def test_peak_memory_of_a_long_segment_on_a_long_memory() -> None:
    """L = M = 2048, 8 layers of width 512: forward and backward; a tensor per (query, key, width) would need 34 GB."""
    if not torch.cuda.is_available():
        pytest.skip("peak memory is read from the CUDA allocator")
    config = make_config(vocab_size=1000, cutoffs=[], div_val=1, d_model=512, n_head=8, d_head=64, d_inner=2048,
                         n_layer=8, mem_len=2048, clamp_len=-1)  # fmt: skip
    model = TransfoXLForCausalLM(config).to(DEVICE).train()
    ids = torch.randint(0, 1000, (1, 2048), device=DEVICE)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        memory = TransfoXLMemory(config)
        model(ids, cache=memory)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids, cache=memory, labels=ids).loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        FIGURES[f"peak_bytes_2048_{name}"] = peak
        model.zero_grad()
        assert peak < 34e9


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_fifty_steps_learn_a_repeated_text(dtype: torch.dtype) -> None:
    """Autocast in half precision, weights in float32."""
    config = make_config(vocab_size=32, cutoffs=[], div_val=1, d_model=64, n_head=4, mem_len=16)
    model = TransfoXLForCausalLM(config).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stream = (torch.arange(4 * 17 * 50).view(4, -1) % 31).to(DEVICE)
    memory, losses = TransfoXLMemory(config), []
    scaler = torch.amp.GradScaler(DEVICE, enabled=dtype == torch.float16)
    for step in range(50):
        segment = stream[:, 16 * step : 16 * step + 17]
        with torch.autocast(torch.device(DEVICE).type, dtype=dtype, enabled=dtype != torch.float32):
            loss = model(segment[:, :-1], shift_labels=segment[:, 1:], cache=memory).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    FIGURES[f"loss_after_50_steps_{dtype}"] = losses[-1]
    assert losses[-1] < losses[0] / 2

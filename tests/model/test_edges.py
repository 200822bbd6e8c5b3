"""Uses by other programs that once gave a wrong number without an error: each is right now, or refused by name."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, StaticCache

from tests.helpers import assert_close
from tests.model.tiny_models import random_ids, tiny_model

ROUNDING = 2e-5


# --- second derivatives


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("own_loss", [False, True])
def test_second_derivatives_that_would_be_wrong_are_refused(own_loss: bool, training: bool) -> None:
    model, ids = tiny_model().train(training), random_ids(2, 5)
    output = model(ids, labels=ids, return_logits=True)
    loss = output.logits.square().sum() if own_loss else output.loss
    with pytest.raises(NotImplementedError, match=r"`create_graph` must be False.*output_attentions=True"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True, allow_unused=True)


def test_second_derivatives_are_those_of_finite_differences() -> None:
    """The way out that the error names."""
    model, ids = tiny_model().double(), random_ids(2, 5)
    weight = model.transformer.layers[0].dec_attn.qkv_net.weight

    def gradient(create_graph: bool) -> torch.Tensor:
        logits = model(ids, output_attentions=True, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return torch.autograd.grad(loss, weight, create_graph=create_graph)[0]

    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    actual = torch.autograd.grad((gradient(True) * direction).sum(), weight)[0]
    sides = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            weight.add_(direction, alpha=step)
        sides.append(gradient(False))
        with torch.no_grad():
            weight.sub_(direction, alpha=step)
    assert_close("product with the Hessian", actual, (sides[0] - sides[1]) / 2e-5, 1e-6 * float(actual.abs().max()))


# --- compiled programs check values too


@pytest.mark.parametrize("wrong", [-1, 100])
@torch.no_grad()
def test_a_compiled_program_refuses_ids_that_do_not_exist(wrong: int) -> None:
    torch._dynamo.reset()
    model = tiny_model()
    program = torch.compile(model, backend="eager")
    ids = random_ids(2, 5)
    assert_close("logits", program(ids, use_cache=False).logits, model(ids, use_cache=False).logits, ROUNDING)
    bad = ids.clone()
    bad[0, 2] = wrong
    with pytest.raises(RuntimeError, match="`input_ids` must be between 0 and"):
        program(bad, use_cache=False)


@torch.no_grad()
def test_a_compiled_program_refuses_masks_of_other_values() -> None:
    torch._dynamo.reset()
    model, ids = tiny_model(), random_ids(2, 5)
    program = torch.compile(model, backend="eager")
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close("logits", program(ids, attention_mask=mask, use_cache=False).logits, expected, ROUNDING)
    with pytest.raises(RuntimeError, match="`attention_mask` must be 1"):
        program(ids, attention_mask=mask + 1, use_cache=False)


# --- a memory or cache within other programs


def test_a_memory_is_not_advanced_by_a_recomputation() -> None:
    model = tiny_model(mem_len=4).train()
    memory, ids = model.init_memory(1), random_ids(1, 8)
    model(ids[:, :4], cache=memory)

    def loss_of(segment: torch.Tensor) -> torch.Tensor:
        return model(segment, cache=memory, labels=segment).loss

    loss: Any = checkpoint(loss_of, ids[:, 4:], use_reentrant=False)
    with pytest.raises(ValueError, match="`cache` must be None in a backward pass.*gradient_checkpointing_enable"):
        loss.backward()


@torch.no_grad()
def test_rows_that_end_early_do_not_remember_their_padding() -> None:
    model = tiny_model(mem_len=20, same_length=False)
    prompt, segment = random_ids(4, 4), random_ids(4, 3, seed=1)
    free = model.generate(prompt, cache=model.init_memory(4), max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    # the third new token of row 1 ends a row, wherever else it stands
    end = int(free[1, 6])
    memory = model.init_memory(4)
    tokens = model.generate(prompt, cache=memory, max_new_tokens=8, eos_token_id=end, pad_token_id=0)
    lengths = [next((i for i in range(4, 12) if row[i] == end), 11) for row in tokens.tolist()]
    assert min(lengths) < max(lengths)
    actual = model(segment, cache=memory).logits
    for row, length in enumerate(lengths):
        alone = model.init_memory(1)
        model(tokens[row : row + 1, :4], cache=alone)
        for position in range(4, length):
            model(tokens[row : row + 1, position : position + 1], cache=alone)
        assert_close(f"row {row}", actual[row], model(segment[row : row + 1], cache=alone).logits[0], 1e-4)


def test_a_memory_is_moved_to_devices_only() -> None:
    with pytest.raises(TypeError, match=r"`device` must be a device, but is torch.bfloat16"):
        tiny_model().init_memory(1).to(torch.bfloat16)  # type: ignore[arg-type]


# --- caches of the library


@pytest.mark.parametrize("given", [True, False], ids=["a cache that is passed", "a cache that is returned"])
@torch.no_grad()
def test_pads_of_earlier_calls_stay_pads(given: bool) -> None:
    model = tiny_model(same_length=True)
    ids, mask = random_ids(2, 6), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    whole = F.pad(mask, (0, 2), value=1)
    cache = DynamicCache(config=model.config) if given else None
    cache = model(ids[:, :4], attention_mask=mask, past_key_values=cache, use_cache=True).past_key_values
    for partial in (None, whole[:, 4:]):
        with pytest.raises(ValueError, match=r"`attention_mask` must cover the cached positions too, \[2, 6\]"):
            model(ids[:, 4:], attention_mask=partial, past_key_values=cache)
    actual = model(ids[:, 4:], attention_mask=whole, past_key_values=cache).logits[0]
    assert_close("row with pads", actual, model(ids[:1, 2:], use_cache=False).logits[0, -2:], ROUNDING)


@torch.no_grad()
def test_tokens_that_pads_have_displaced_are_not_missed_silently() -> None:
    model = tiny_model(mem_len=4, same_length=True)
    cache, ids = DynamicCache(config=model.config), random_ids(1, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache)
    with pytest.raises(ValueError, match="must have no pads after real tokens once a row is longer than the window"):
        model(ids[:, 6:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_a_static_cache_does_not_shrink_the_window() -> None:
    model, ids = tiny_model(mem_len=6, memory_init="empty"), random_ids(1, 9)
    cache = StaticCache(config=model.config, max_cache_len=4)
    model(ids[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match=r"`cache` must have a `max_cache_len` of at least \d"):
        model(ids[:, 4:], past_key_values=cache)


@torch.no_grad()
def test_a_cache_of_another_window_is_refused() -> None:
    model, ids = tiny_model(mem_len=4), random_ids(1, 9)
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], past_key_values=cache)
    model.config.mem_len = 8
    with pytest.raises(ValueError, match=r"`cache` must have the window of the model \(\d+,"):
        model(ids[:, 5:], past_key_values=cache)

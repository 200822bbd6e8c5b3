"""What goes on from a cache equals one pass by one rule, or is refused (R06).

A call without a cache reads by the segment rule, a call with one of the library's caches by the window rule. The right
answer is the slow reference under the window rule, which reads each text as alone.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from tests.helpers import assert_close
from tests.model.tiny_models import STARTS, WINDOWS, random_ids, slow_log_probabilities, tiny_model
from tests.t0 import returned_cache

# float32 against float64 through two layers and a softmax
PROBABILITIES = 1e-4
# the ratio of two probabilities of one token, in policy gradients
RATIO = 1e-5


@pytest.mark.parametrize("length", [1, 4, 6, 7, 13])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
@torch.no_grad()
def test_a_returned_cache_goes_on_by_one_rule_or_not_at_all(window: str, start: str, length: int) -> None:
    """`mem_len` is 5, so a position of the window rule sees itself and five more."""
    model = tiny_model(memory_init=start, **WINDOWS[window])
    ids = random_ids(2, length + 9)
    (expected,) = slow_log_probabilities(model, [ids], window_rule=True)
    prefix = model(ids[:, :length])
    cache = returned_cache(prefix)
    # seen by what was returned itself
    (by_window,) = slow_log_probabilities(model, [ids[:, :length]], window_rule=True)
    agree = (prefix.logits - by_window).abs().max() < PROBABILITIES
    assert agree == (window != "all" or length == 1 or (start == "empty" and length <= 6))
    branches = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    branches[1].reorder_cache(torch.tensor([1, 0]))
    branches[1].reorder_cache(torch.tensor([1, 0]))
    for branch in branches:
        if not agree:
            for new in (ids[:, length : length + 1], ids[:, length:]):
                with pytest.raises(ValueError, match="`cache` must have been filled under the window rule"):
                    model(new, past_key_values=branch)
            with pytest.raises(ValueError, match=r"`cache` must .*DynamicCache\(config=model.config\).*TransfoXLMem"):
                model.generate(ids, past_key_values=branch, max_new_tokens=2)
            continue
        logits = [model(ids[:, length : length + 3], past_key_values=branch).logits]
        logits += [model(ids[:, at : at + 1], past_key_values=branch).logits for at in range(length + 3, length + 9)]
        assert_close("log-probabilities", torch.cat(logits, dim=1), expected[:, length:], PROBABILITIES)


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
@torch.no_grad()
def test_the_other_models_refuse_it_too(model_class: Any) -> None:
    model = tiny_model(model_class)
    ids = random_ids(2, 7)
    with pytest.raises(ValueError, match="`cache` must have been filled under the window rule"):
        model(ids, past_key_values=returned_cache(model(ids)))


@torch.no_grad()
def test_the_ways_out_of_the_message_work() -> None:
    model, ids = tiny_model(), random_ids(2, 22)
    (expected,) = slow_log_probabilities(model, [ids], window_rule=True)
    cache = DynamicCache(config=model.config)
    logits = [model(part, past_key_values=cache).logits for part in ids.split([13, 1, 8], dim=1)]
    assert_close("log-probabilities", torch.cat(logits, dim=1), expected, PROBABILITIES)
    parts = list(ids.split([13, 1, 8], dim=1))
    memory = model.init_memory(2)
    for part, of_slow in zip(parts, slow_log_probabilities(model, parts), strict=True):
        assert_close("log-probabilities", model(part, past_key_values=memory).logits, of_slow, PROBABILITIES)


@torch.no_grad()
def test_an_emptied_cache_begins_anew() -> None:
    model, ids = tiny_model(), random_ids(2, 9)
    cache = returned_cache(model(ids))
    cache.reset()
    if not cache.layers[0].is_initialized:
        logits = [model(part, past_key_values=cache).logits for part in ids.split([7, 2], dim=1)]
        (expected,) = slow_log_probabilities(model, [ids], window_rule=True)
        assert_close("log-probabilities", torch.cat(logits, dim=1), expected, PROBABILITIES)


@pytest.mark.full
@torch.no_grad()
def test_a_compiled_call_returns_a_cache_that_knows_its_rule() -> None:
    model = tiny_model()
    # the programs of other tests count towards the limit of how many there may be
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for length in (4, 9, 12):
        ids = random_ids(2, length + 2)
        cache = returned_cache(run(ids[:, :length], use_cache=True))
        if length <= 6:
            (expected,) = slow_log_probabilities(model, [ids], window_rule=True)
            logits = model(ids[:, length:], past_key_values=cache).logits
            assert_close("log-probabilities", logits, expected[:, length:], PROBABILITIES)
            continue
        for function in (model, run):
            with pytest.raises(Exception, match="`cache` must have been filled under the window rule"):
                function(ids[:, length:], past_key_values=cache)


@torch.no_grad()
def test_a_program_returns_no_cache_that_could_not_go_on() -> None:
    """Outside the program a cache is made of its tensors and knows no rule."""
    with pytest.raises(ValueError, match="`cache` must be given where a call"):
        torch.export.export(tiny_model(), (random_ids(2, 7),), {"use_cache": True})


# --- probabilities of what was generated, in one forward


@pytest.mark.parametrize("way", ["an explicit cache", "same_length"])
@pytest.mark.parametrize("start", STARTS)
def test_probabilities_at_generation_are_those_of_one_forward(start: str, way: str) -> None:
    """As PPO and GRPO compare them: a left-padded batch, texts longer than the memory, gradients in the forward."""
    model = tiny_model(TransfoXLForCausalLM, memory_init=start, same_length=way == "same_length", pad_token_id=0)
    prompts, pads, num_new = random_ids(3, 8), [0, 5, 2], 9
    mask = (torch.arange(8) >= torch.tensor(pads)[:, None]).long()
    prompts = prompts.masked_fill(mask == 0, 0)
    output = model.generate(
        prompts,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        max_new_tokens=num_new,
        return_dict_in_generate=True,
        output_logits=True,
    )
    full = output.sequences
    full_mask = torch.cat([mask, torch.ones(3, num_new, dtype=torch.long)], dim=1)
    chosen = full[:, 8:, None]
    at_generation = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, chosen)

    def scored(**settings: Any) -> torch.Tensor:
        logits = model(full, attention_mask=full_mask, return_logits=True, **settings).logits[:, 7:-1]
        return logits.log_softmax(-1).gather(-1, chosen)

    # as the training page says
    settings = {"past_key_values": DynamicCache(config=model.config)} if way == "an explicit cache" else {}
    model.train()
    forward = scored(**settings)
    assert_close("ratio", (forward - at_generation).exp(), torch.ones_like(forward), RATIO)
    for row, pad in enumerate(pads):
        text = full[row : row + 1, pad:]
        (expected,) = slow_log_probabilities(model, [text], window_rule=True)
        expected = expected[0, -num_new - 1 : -1].gather(-1, chosen[row])
        assert_close(f"log-probabilities of row {row}", forward[row], expected, PROBABILITIES)
    forward.sum().backward()
    assert all(parameter.grad is not None for parameter in model.transformer.layers.parameters())
    if way == "an explicit cache":
        # what the page warns of
        assert (scored() - at_generation).abs().max() > 0.1

"""`generate` with every kind of state, against loops written by hand.

The right answer is what the slow reference gives when it reads the prompt once and then one token at a time. With the
library's caches, or without any, every position sees what the memory would hold and itself (the window rule); with a
`TransfoXLMemory` the prompt is a segment that sees all of the memory. Report ids are those of public issues.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache, pipeline, set_seed
from transformers.utils import logging

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory, TransfoXLModel, generation_transfo_xl
from hf_txl.reference.transformer_xl import SlowMemory
from tests.helpers import assert_close
from tests.model.tiny_models import STARTS, STORAGES, WINDOWS, random_ids, slow_twin, tiny_model
from tests.sizes import full

# float32 against float64 through two layers and a softmax
PROBABILITIES = 1e-5
NAMES = ["cache", "past_key_values"]
# no end token, and no pad token either: `generate` would take that id in a prompt for padding
PLAIN = {"do_sample": False, "eos_token_id": None}


@torch.no_grad()
def by_hand(
    model: Any,
    prompt: torch.Tensor,
    num_tokens: int,
    *,
    memory: SlowMemory | None = None,
    window_rule: bool = True,
    choose: Any = None,
) -> list[int]:
    """Continue one prompt with the slow reference: prompt once, then token by token.

    Args:
        model: gives configuration and weights.
        prompt: (time,) ids or (time, d_model) embeddings.
        num_tokens: new tokens.
        memory: the state before the prompt, advanced in place; by default the start that the configuration names.
        window_rule: whether the prompt is read under the window rule.
        choose: from the log-probabilities (vocab,) to the next token; the likeliest by default.

    Returns:
        The new tokens.
    """
    twin = slow_twin(model)
    memory = SlowMemory(model.config) if memory is None else memory
    inputs = {"input_ids": prompt[None]} if prompt.dim() == 1 else {"inputs_embeds": prompt[None]}
    tokens: list[int] = []
    for _ in range(num_tokens):
        (row,) = twin.read(memory=[memory], window_rule=window_rule, **inputs)
        scores = twin.log_probabilities(row.hidden_states[-1][-1])
        tokens.append(int(scores.argmax()) if choose is None else choose(scores))
        inputs = {"input_ids": torch.tensor([tokens[-1:]])}
    return tokens


def rows_by_hand(model: Any, prompts: torch.Tensor, num_tokens: int, **options: Any) -> list[list[int]]:
    """Prompt and continuation of each row."""
    return [row.tolist() + by_hand(model, row, num_tokens, **options) for row in prompts]


def slow_memory_after(model: Any, tokens: torch.Tensor, **settings: Any) -> SlowMemory:
    """The slow memory of a row that has read these tokens as one segment."""
    memory = SlowMemory(model.config, **settings)
    if len(tokens):
        slow_twin(model).read(tokens[None], [memory])
    return memory


GIVEN_AS = ["keyword", "generation_config", "second argument", "configuration of the model"]


def as_given(model: Any, given_as: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of `generate` behind the prompt that mean these options."""
    if given_as == "keyword":
        return [], options
    if given_as == "configuration of the model":
        model.generation_config.update(**options)
        return [], {}
    config = GenerationConfig(**options)
    return ([config], {}) if given_as == "second argument" else ([], {"generation_config": config})


class Calls:
    """Records what the model is fed while it is used as a context."""

    def __init__(self, model: Any) -> None:
        self.model = model.transformer
        self.input_ids: list[torch.Tensor] = []

    def __enter__(self) -> Calls:
        def record(module: Any, args: Any, kwargs: Any) -> None:
            self.input_ids.append(kwargs["input_ids"].clone())

        self.handle = self.model.register_forward_pre_hook(record, with_kwargs=True)
        return self

    def __exit__(self, *args: Any) -> None:
        self.handle.remove()

    @property
    def lengths(self) -> list[int]:
        return [ids.shape[1] for ids in self.input_ids]


def snapshot(memory: TransfoXLMemory) -> dict[str, Any]:
    """A copy of all that a memory holds."""
    return copy.deepcopy(memory.state_dict())


def assert_same_state(name: str, actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys(), name
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert torch.equal(actual[key], value), f"{name}: {key}"
        else:
            assert actual[key] == value, f"{name}: {key}"


# ---- greedy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_greedy_without_a_cache_equals_a_hand_loop_under_the_window_rule(window: str, start: str) -> None:
    """C65, C66: longer than the memory, so that positions leave it."""
    model = tiny_model(memory_init=start, **WINDOWS[window])
    prompts = random_ids(2, 7)
    output = model.generate(prompts, max_new_tokens=9, **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompts, 9)


@pytest.mark.parametrize("stores", [*STORAGES, "auto"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_greedy_with_a_fresh_memory_equals_a_hand_loop_under_the_segment_rule(
    window: str, start: str, stores: str
) -> None:
    model = tiny_model(memory_init=start, **WINDOWS[window])
    prompts = random_ids(2, 7)
    memory = TransfoXLMemory(model.config, stores=stores)
    output = model.generate(prompts, cache=memory, max_new_tokens=9, **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompts, 9, window_rule=False)


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize("options", [{"pre_lnorm": True}, {"untie_r": False}, {"cutoffs": [], "div_val": 1}])
def test_greedy_is_right_for_other_layers_and_softmaxes(options: dict[str, Any], with_memory: bool) -> None:
    model = tiny_model(memory_init="zeros", clamp_len=4, **options)
    prompts = random_ids(2, 4)
    cache = {"cache": TransfoXLMemory(model.config)} if with_memory else {}
    output = model.generate(prompts, max_new_tokens=6, **cache, **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompts, 6, window_rule=not with_memory)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("storage", STORAGES)
def test_greedy_goes_on_from_a_filled_memory(storage: str, name: str) -> None:
    """C64: the ids are new ones, nothing of the past is fed again."""
    model = tiny_model(memory_init="zeros")
    past, prompts = random_ids(2, 8, seed=2), random_ids(2, 3)
    memory = TransfoXLMemory(model.config, stores=storage)
    with torch.no_grad():
        model(past, cache=memory)
    output = model.generate(prompts, max_new_tokens=7, **{name: memory}, **PLAIN)
    expected = [
        row.tolist() + by_hand(model, row, 7, memory=slow_memory_after(model, read), window_rule=False)
        for row, read in zip(prompts, past, strict=True)
    ]
    assert output.tolist() == expected


def test_a_memory_filled_while_training_can_be_generated_from() -> None:
    model = tiny_model()
    past, prompts = random_ids(2, 4, seed=2), random_ids(2, 3)
    memory = TransfoXLMemory(model.config)
    model.train()(past, cache=memory, labels=past).loss.backward()
    assert memory.storage == "hidden_states"
    output = model.eval().generate(prompts, cache=memory, max_new_tokens=4, **PLAIN)
    expected = [
        row.tolist() + by_hand(model, row, 4, memory=slow_memory_after(model, read), window_rule=False)
        for row, read in zip(prompts, past, strict=True)
    ]
    assert output.tolist() == expected


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("start", STARTS)
def test_a_ragged_memory_and_ragged_prompts_give_what_each_row_gives_alone(start: str, storage: str) -> None:
    model = tiny_model(memory_init=start)
    past, prompts = random_ids(3, 6, seed=2), random_ids(3, 4)
    past_pads, prompt_pads = [5, 0, 2], [0, 3, 1]
    past_mask = (torch.arange(6) >= torch.tensor(past_pads)[:, None]).long()
    prompt_mask = (torch.arange(4) >= torch.tensor(prompt_pads)[:, None]).long()
    memory = TransfoXLMemory(model.config, stores=storage)
    with torch.no_grad():
        model(past, attention_mask=past_mask, cache=memory)
    output = model.generate(prompts, attention_mask=prompt_mask, cache=memory, max_new_tokens=8, **PLAIN)
    for row in range(3):
        slow = slow_memory_after(model, past[row, past_pads[row] :])
        expected = by_hand(model, prompts[row, prompt_pads[row] :], 8, memory=slow, window_rule=False)
        assert output[row, 4:].tolist() == expected, f"row {row}"


def test_a_reset_row_starts_afresh_while_the_other_goes_on() -> None:
    model = tiny_model()
    past, prompts = random_ids(2, 6, seed=2), random_ids(2, 3)
    memory = TransfoXLMemory(model.config)
    with torch.no_grad():
        model(past, cache=memory)
    memory.reset([0])
    output = model.generate(prompts, cache=memory, max_new_tokens=5, **PLAIN)
    assert output[0, 3:].tolist() == by_hand(model, prompts[0], 5, window_rule=False)
    slow = slow_memory_after(model, past[1])
    assert output[1, 3:].tolist() == by_hand(model, prompts[1], 5, memory=slow, window_rule=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", STARTS)
def test_greedy_with_a_given_library_cache_equals_a_hand_loop(start: str, name: str) -> None:
    model = tiny_model(memory_init=start)
    prompts = random_ids(2, 7)
    cache = DynamicCache(config=model.config)
    output = model.generate(prompts, max_new_tokens=6, **{name: cache}, **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompts, 6)
    # all but the last token have been read
    assert cache.get_seq_length() == 7 + 6 - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_filled_library_cache_continues_with_the_full_ids(name: str) -> None:
    model = tiny_model(memory_init="zeros", same_length=True)
    prompts = random_ids(2, 9)
    with torch.no_grad():
        cache = model(prompts[:, :6], use_cache=True, **{name: DynamicCache(config=model.config)}).past_key_values
    output = model.generate(prompts, max_new_tokens=6, **{name: cache}, **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompts, 6)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_use_cache_false_reads_everything_as_one_segment_each_time(window: str, start: str) -> None:
    """Without a state each step is a forward of the whole text, which is one segment."""
    model = tiny_model(memory_init=start, **WINDOWS[window])
    prompts = random_ids(2, 4)
    output = model.generate(prompts, max_new_tokens=6, use_cache=False, **PLAIN)
    ids = prompts
    for _ in range(6):
        with torch.no_grad():
            scores = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], dim=1)
    assert output.tolist() == ids.tolist()
    if window != "all":
        # under a window the cut into segments changes nothing
        assert output.tolist() == rows_by_hand(model, prompts, 6)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_memory_of_one_position_equals_a_hand_loop(window: str, start: str) -> None:
    model = tiny_model(mem_len=1, memory_init=start, **WINDOWS[window])
    prompts = random_ids(2, 4)
    without = model.generate(prompts, max_new_tokens=5, **PLAIN)
    assert without.tolist() == rows_by_hand(model, prompts, 5)
    with_memory = model.generate(prompts, cache=TransfoXLMemory(model.config), max_new_tokens=5, **PLAIN)
    assert with_memory.tolist() == rows_by_hand(model, prompts, 5, window_rule=False)


@pytest.mark.parametrize("said_by", ["configuration", "configuration, with a memory", "memory"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_where_nothing_is_kept_every_step_reads_the_whole_text_as_one_segment(
    window: str, start: str, said_by: str
) -> None:
    model = tiny_model(mem_len=5 if said_by == "memory" else 0, memory_init=start, **WINDOWS[window])
    prompts = random_ids(2, 4)
    cache = None if said_by == "configuration" else TransfoXLMemory(model.config, mem_len=0)
    output = model.generate(prompts, cache=cache, max_new_tokens=5, **PLAIN)
    expected = []
    for row in prompts.tolist():
        for _ in range(5):
            nothing = SlowMemory(model.config, mem_len=0)
            row = row + by_hand(model, torch.tensor(row), 1, memory=nothing, window_rule=False)
        expected.append(row)
    assert output.tolist() == expected


@pytest.mark.parametrize("mem_len", [0, 1])
def test_lengths_are_those_of_the_memory_and_not_of_the_configuration(mem_len: int) -> None:
    """C64: a model that is set to keep nothing still feeds a memory each token once."""
    model = tiny_model(mem_len=mem_len, same_length=True)
    prompts = random_ids(2, 7)
    settings = {"mem_len": 5, "clamp_len": 3, "same_length": False, "memory_init": "zeros"}
    memory = TransfoXLMemory(model.config, **settings)
    with Calls(model) as calls:
        output = model.generate(prompts, cache=memory, max_new_tokens=5, **PLAIN)
    assert calls.lengths == [7, 1, 1, 1, 1]
    expected = [
        row.tolist() + by_hand(model, row, 5, memory=SlowMemory(model.config, **settings), window_rule=False)
        for row in prompts
    ]
    assert output.tolist() == expected


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", ["none", "DynamicCache", *STORAGES])
def test_left_padded_prompts_give_what_each_row_gives_alone(state: str, start: str) -> None:
    model = tiny_model(memory_init=start)
    prompts = random_ids(3, 7)
    pads = [0, 6, 3]
    mask = (torch.arange(7) >= torch.tensor(pads)[:, None]).long()
    cache = {
        "none": None,
        "DynamicCache": DynamicCache(config=model.config),
        "hidden_states": TransfoXLMemory(model.config, stores="hidden_states"),
        "keys_values": TransfoXLMemory(model.config, stores="keys_values"),
    }[state]
    output = model.generate(prompts, attention_mask=mask, cache=cache, max_new_tokens=8, **PLAIN)
    for row in range(3):
        window_rule = state not in STORAGES
        expected = by_hand(model, prompts[row, pads[row] :], 8, window_rule=window_rule)
        assert output[row, 7:].tolist() == expected, f"row {row}"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", ["none", "memory"])
def test_a_prompt_of_embeddings_equals_a_hand_loop(state: str, start: str) -> None:
    model = tiny_model(memory_init=start)
    embeddings = torch.randn(2, 4, model.config.d_model)
    cache = TransfoXLMemory(model.config) if state == "memory" else None
    output = model.generate(inputs_embeds=embeddings, cache=cache, max_new_tokens=6, **PLAIN)
    expected = [by_hand(model, row, 6, window_rule=state == "none") for row in embeddings]
    assert output.tolist() == expected


def test_embedded_ids_generate_what_the_ids_generate() -> None:
    """C123"""
    model = tiny_model()
    prompts = random_ids(2, 4)
    embeddings = model.get_input_embeddings()(prompts)
    from_ids = model.generate(prompts, max_new_tokens=6, **PLAIN)
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=6, **PLAIN), from_ids[:, 4:])


# ---- going on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", STARTS)
def test_a_returned_library_cache_continues_to_the_same_text(start: str, name: str) -> None:
    model = tiny_model(memory_init=start)
    prompts = random_ids(2, 4)
    first = model.generate(prompts, max_new_tokens=5, return_dict_in_generate=True, **PLAIN)
    second = model.generate(first.sequences, max_new_tokens=6, **{name: first.past_key_values}, **PLAIN)
    assert second.tolist() == rows_by_hand(model, prompts, 11)


@pytest.mark.parametrize("start", STARTS)
@torch.no_grad()
def test_a_library_cache_continues_with_new_ids_and_a_mask_of_all(start: str) -> None:
    """Rows of different length, padded on the left; the mask covers what the cache has read and the new ids."""
    model = tiny_model(memory_init=start)
    prompts, new, pads = random_ids(2, 6), random_ids(2, 3, seed=2), [0, 4]
    mask = (torch.arange(9) >= torch.tensor(pads)[:, None]).long()
    cache = DynamicCache(config=model.config)
    model(prompts, attention_mask=mask[:, :6], cache=cache)
    output = model.generate(new, attention_mask=mask, cache=cache, max_new_tokens=6, **PLAIN)
    for row, pad in enumerate(pads):
        text = torch.cat([prompts[row, pad:], new[row]])
        assert output[row, 3:].tolist() == by_hand(model, text, 6), f"row {row}"


@pytest.mark.parametrize("storage", STORAGES)
def test_a_returned_memory_continues_to_the_same_text(storage: str) -> None:
    """The memory has read all but the last generated token, which therefore begins the next prompt."""
    model = tiny_model()
    prompts = random_ids(2, 4)
    memory = TransfoXLMemory(model.config, stores=storage)
    first = model.generate(prompts, cache=memory, max_new_tokens=5, return_dict_in_generate=True, **PLAIN)
    assert first.past_key_values is memory
    second = model.generate(first.sequences[:, -1:], cache=memory, max_new_tokens=6, **PLAIN)
    joined = torch.cat([first.sequences, second[:, 1:]], dim=1)
    assert joined.tolist() == rows_by_hand(model, prompts, 11, window_rule=False)


def test_a_branch_of_the_memory_leaves_the_original_where_it_was() -> None:
    model = tiny_model()
    memory = TransfoXLMemory(model.config)
    with torch.no_grad():
        model(random_ids(2, 6), cache=memory)
    before = snapshot(memory)
    prompts = random_ids(2, 2, seed=3)
    first = model.generate(prompts, cache=copy.copy(memory), max_new_tokens=5, **PLAIN)
    assert_same_state("memory after generating from its branch", memory.state_dict(), before)
    assert torch.equal(first, model.generate(prompts, cache=copy.copy(memory), max_new_tokens=5, **PLAIN))


# ---- what is fed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["none", "DynamicCache", "fresh memory", "filled memory", "embeddings"])
def test_the_prompt_is_read_once_and_then_one_token_per_step(state: str) -> None:
    """C64"""
    model = tiny_model()
    prompts = random_ids(2, 6)
    cache: Any = {"DynamicCache": DynamicCache(config=model.config)}.get(state)
    if "memory" in state:
        cache = TransfoXLMemory(model.config)
    if state == "filled memory":
        with torch.no_grad():
            model(random_ids(2, 9), cache=cache)
    with Calls(model) as calls:
        output = model.generate(prompts, cache=cache, max_new_tokens=5, **PLAIN)
    assert calls.lengths == [6, 1, 1, 1, 1]
    assert torch.equal(torch.cat(calls.input_ids, dim=1), output[:, :-1])


def test_without_a_cache_allowed_the_whole_text_is_read_at_each_step() -> None:
    model = tiny_model()
    with Calls(model) as calls:
        model.generate(random_ids(1, 6), use_cache=False, max_new_tokens=3, **PLAIN)
    assert calls.lengths == [6, 7, 8]


@pytest.mark.parametrize("state", ["library cache", "memory"])
def test_300_tokens_keep_a_memory_of_mem_len(state: str) -> None:
    """C74, without its timings"""
    model = tiny_model(mem_len=16, same_length=True)
    cache = TransfoXLMemory(model.config) if state == "memory" else DynamicCache(config=model.config)
    lengths = []

    def record(*_: Any) -> None:
        layer = cache.layers[-1]
        lengths.append(0 if layer.keys is None else layer.keys.shape[-2])

    model.transformer.register_forward_hook(record)
    output = model.generate(random_ids(1, 5), cache=cache, max_new_tokens=300, **PLAIN)
    assert output.shape == (1, 305)
    assert max(lengths) <= 16
    # with `same_length` the library's cache keeps `mem_len - 1`: the current token is the last of `mem_len` keys
    assert lengths[-1] == (16 if state == "memory" else 15)


# ---- sampling --------------------------------------------------------------------------------------------------


def sampled_by_hand(model: Any, prompts: torch.Tensor, num_tokens: int, window_rule: bool) -> list[list[int]]:
    """Draw with the global generator, all rows of a step at once, from the slow reference's distribution."""
    twin = slow_twin(model)
    memory = twin.new_memory(len(prompts))
    ids, inputs = prompts, prompts
    for _ in range(num_tokens):
        with torch.no_grad():
            rows = twin.read(inputs, memory, window_rule=window_rule)
            scores = torch.stack([twin.log_probabilities(row.hidden_states[-1][-1]) for row in rows])
        inputs = torch.multinomial(scores.exp().float(), num_samples=1)
        ids = torch.cat([ids, inputs], dim=1)
    return ids.tolist()


@pytest.mark.parametrize("state", ["none", "DynamicCache", *STORAGES])
def test_sampling_draws_what_a_hand_loop_draws_with_the_same_generator(state: str) -> None:
    model = tiny_model(memory_init="zeros")
    prompts = random_ids(3, 4)
    cache: Any = {"DynamicCache": DynamicCache(config=model.config)}.get(state)
    if state in STORAGES:
        cache = TransfoXLMemory(model.config, stores=state)
    torch.manual_seed(5)
    output = model.generate(prompts, cache=cache, max_new_tokens=8, **{**PLAIN, "do_sample": True}, top_k=0)
    torch.manual_seed(5)
    assert output.tolist() == sampled_by_hand(model, prompts, 8, window_rule=state not in STORAGES)


@pytest.mark.parametrize("state", ["none", "memory"])
def test_sampled_tokens_have_the_frequencies_of_the_exact_distribution(state: str) -> None:
    """Independent of how the library draws."""
    model = tiny_model()
    past, prompt, draws = random_ids(1, 4, seed=2), random_ids(1, 3), 6000
    cache, slow = None, SlowMemory(model.config)
    if state == "memory":
        cache = TransfoXLMemory(model.config)
        with torch.no_grad():
            model(past, cache=cache)
        slow = slow_memory_after(model, past[0])
    options = {**PLAIN, "do_sample": True, "top_k": 0}
    output = model.generate(prompt, cache=cache, max_new_tokens=1, num_return_sequences=draws, **options)
    counts = torch.bincount(output[:, -1], minlength=model.config.vocab_size).double()
    (row,) = slow_twin(model).read(prompt, [slow])
    exact = slow_twin(model).log_probabilities(row.hidden_states[-1][-1]).exp()
    # five standard deviations of a binomial count, and one draw where that is less
    allowed = 5 * (draws * exact * (1 - exact)).sqrt() + 1
    assert ((counts - draws * exact).abs() <= allowed).all()


def keep_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    return scores.masked_fill(scores < scores.sort(descending=True)[0][k - 1], -torch.inf)


def keep_top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    """The fewest likeliest tokens whose probability reaches p."""
    probabilities = scores.softmax(-1)
    kept, total = torch.zeros_like(scores, dtype=torch.bool), 0.0
    for token in probabilities.argsort(descending=True).tolist():
        kept[token] = True
        total += float(probabilities[token])
        if total >= p:
            break
    return scores.masked_fill(~kept, -torch.inf)


def without_tokens(scores: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return scores.index_fill(0, torch.tensor(tokens), -torch.inf)


PROCESSORS: dict[str, tuple[dict[str, Any], Any]] = {
    "nothing": ({}, lambda scores: scores),
    "temperature": ({"temperature": 0.6}, lambda scores: scores / 0.6),
    "top-k": ({"top_k": 4}, lambda scores: keep_top_k(scores, 4)),
    "top-p": ({"top_p": 0.7}, lambda scores: keep_top_p(scores, 0.7)),
    "all three": (
        {"temperature": 1.4, "top_k": 9, "top_p": 0.8},
        lambda scores: keep_top_p(keep_top_k(scores / 1.4, 9), 0.8),
    ),
    "suppressed tokens": ({"suppress_tokens": [3, 30]}, lambda scores: without_tokens(scores, [3, 30])),
    "bad words": ({"bad_words_ids": [[3], [30]]}, lambda scores: without_tokens(scores, [3, 30])),
}


@pytest.mark.parametrize("state", ["none", "memory"])
@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_processed_distributions_are_those_made_by_hand(processor: str, clusters: bool, state: str) -> None:
    """C65, C77: `logits` may be log-probabilities, and every processor means the same by them."""
    options, by_definition = PROCESSORS[processor]
    model = tiny_model(**({} if clusters else {"cutoffs": [], "div_val": 1}))
    cache = TransfoXLMemory(model.config) if state == "memory" else None
    prompt = random_ids(1, 4)
    output = model.generate(
        prompt,
        cache=cache,
        max_new_tokens=6,
        output_scores=True,
        return_dict_in_generate=True,
        **{**PLAIN, "do_sample": True, "top_k": 0, **options},
    )
    twin, memory = slow_twin(model), SlowMemory(model.config)
    inputs = prompt
    for step, scores in enumerate(output.scores):
        with torch.no_grad():
            (row,) = twin.read(inputs, [memory], window_rule=state == "none")
            exact = by_definition(twin.log_probabilities(row.hidden_states[-1][-1])).softmax(-1)
        assert_close(f"distribution at step {step}", scores[0].softmax(-1), exact, PROBABILITIES)
        inputs = output.sequences[:, 4 + step : 5 + step]
        assert exact[inputs.item()] > 0


def test_suppressed_tokens_never_appear() -> None:
    """C77: such as `<unk>` of WikiText-103."""
    model = tiny_model()
    options = {**PLAIN, "do_sample": True, "top_k": 0}
    prompt = random_ids(4, 3)
    free = model.generate(prompt, max_new_tokens=60, **options)[:, 3:]
    unknown = int(free.flatten().mode().values)
    for suppressing in ({"suppress_tokens": [unknown]}, {"bad_words_ids": [[unknown]]}):
        output = model.generate(prompt, max_new_tokens=60, **options, **suppressing)
        assert not (output[:, 3:] == unknown).any()


# ---- the end of a line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_memory", [False, True])
def test_no_end_token_means_no_end_and_no_warning(with_memory: bool, caplog: pytest.LogCaptureFixture) -> None:
    """C69: in WikiText-103 id 0 is the end of a line, not of a document."""
    model = tiny_model(eos_token_id=0)
    with torch.no_grad():
        model.crit.out_layers[0].bias[0] = 50.0
    prompt = random_ids(1, 3)
    cache = TransfoXLMemory(model.config) if with_memory else None
    logging.enable_propagation()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            output = model.generate(
                prompt, cache=cache, eos_token_id=None, min_new_tokens=20, max_new_tokens=20, do_sample=False
            )
    finally:
        logging.disable_propagation()
    assert output[0, 3:].tolist() == [0] * 20
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in warned]
    assert not [text for text in said if "token" in text], said


def test_the_end_token_ends_and_min_new_tokens_delays_it() -> None:
    model = tiny_model(eos_token_id=0)
    with torch.no_grad():
        model.crit.out_layers[0].bias[0] = 50.0
    prompt = random_ids(1, 3)
    assert model.generate(prompt, max_new_tokens=20, do_sample=False)[0, 3:].tolist() == [0]
    delayed = model.generate(prompt, min_new_tokens=6, max_new_tokens=20, do_sample=False)[0, 3:].tolist()
    assert len(delayed) == 7 and delayed[-1] == 0 and 0 not in delayed[:-1]


# ---- beams and several sequences -------------------------------------------------------------------------------

SMALL_VOCABULARY = {"vocab_size": 5, "cutoffs": [2], "eos_token_id": None}
# all continuations of 3 tokens pass through at most 5 * 5 prefixes, so 25 beams miss none
EXHAUSTIVE = {"num_beams": 25, "max_new_tokens": 3, "num_return_sequences": 6}


def log_probabilities_of_all(
    model: Any, prompt: torch.Tensor, slow: SlowMemory, window_rule: bool
) -> dict[tuple[int, ...], float]:
    """log p of each continuation by three tokens, by enumeration."""
    twin = slow_twin(model)
    result = {}

    def extend(tokens: tuple[int, ...], total: float, inputs: torch.Tensor, memory: SlowMemory) -> None:
        (row,) = twin.read(inputs, [memory], window_rule=window_rule)
        scores = twin.log_probabilities(row.hidden_states[-1][-1]).tolist()
        for token, score in enumerate(scores):
            if len(tokens) == 2:
                result[*tokens, token] = total + score
            else:
                extend((*tokens, token), total + score, torch.tensor([[token]]), memory.branch())

    with torch.no_grad():
        extend((), 0.0, prompt, slow)
    return result


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("state", ["none", "fresh memory", "filled memory"])
def test_exhaustive_beams_find_the_likeliest_continuations(state: str, start: str) -> None:
    model = tiny_model(memory_init=start, mem_len=4, **SMALL_VOCABULARY)
    prompts = random_ids(2, 3, vocab_size=5)
    past = random_ids(2, 6 if state == "filled memory" else 0, vocab_size=5, seed=2)
    cache = None if state == "none" else TransfoXLMemory(model.config)
    if state == "filled memory":
        with torch.no_grad():
            model(past, cache=cache)
    output = model.generate(prompts, cache=cache, **EXHAUSTIVE, **PLAIN)
    for row in range(2):
        slow = slow_memory_after(model, past[row])
        exact = log_probabilities_of_all(model, prompts[row : row + 1], slow, window_rule=state == "none")
        best = sorted(exact, key=lambda tokens: -exact[tokens])[:6]
        assert [tuple(tokens) for tokens in output[6 * row : 6 * row + 6, 3:].tolist()] == best, f"row {row}"


@pytest.mark.parametrize("state", ["fresh", "batch size known", "filled"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_several_sequences_leave_the_given_memory_unchanged(options: dict[str, Any], state: str) -> None:
    model = tiny_model()
    memory = TransfoXLMemory(model.config, batch_size=2 if state == "batch size known" else None)
    if state == "filled":
        with torch.no_grad():
            model(random_ids(2, 6), cache=memory)
    before = snapshot(memory)
    output = model.generate(random_ids(2, 3), cache=memory, max_new_tokens=4, **{**PLAIN, **options})
    assert output.shape == (2 * options.get("num_return_sequences", 1), 7)
    assert_same_state("the given memory", memory.state_dict(), before)


@pytest.mark.parametrize("state", ["none", "memory"])
def test_each_returned_sequence_goes_on_from_its_own_row(state: str) -> None:
    """With one token to choose from, every sequence of a row is the greedy one of that row."""
    model = tiny_model()
    past, prompts = random_ids(2, 6, seed=2), random_ids(2, 3)
    cache, settings = None, [SlowMemory(model.config), SlowMemory(model.config)]
    if state == "memory":
        cache = TransfoXLMemory(model.config)
        with torch.no_grad():
            model(past, cache=cache)
        settings = [slow_memory_after(model, row) for row in past]
    options = {**PLAIN, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    output = model.generate(prompts, cache=cache, max_new_tokens=6, **options)
    for row, slow in enumerate(settings):
        expected = by_hand(model, prompts[row], 6, memory=slow, window_rule=state == "none")
        assert output[3 * row : 3 * row + 3, 3:].tolist() == [expected] * 3


def test_beams_of_a_ragged_batch_are_those_of_each_row_alone() -> None:
    model = tiny_model()
    prompts, pads = random_ids(2, 5), [3, 0]
    mask = (torch.arange(5) >= torch.tensor(pads)[:, None]).long()
    options = {**PLAIN, "num_beams": 3, "max_new_tokens": 6}
    for new_cache in (lambda: None, lambda: TransfoXLMemory(model.config)):
        output = model.generate(prompts, attention_mask=mask, cache=new_cache(), **options)
        for row, pad in enumerate(pads):
            alone = model.generate(prompts[row : row + 1, pad:], cache=new_cache(), **options)
            assert output[row, 5:].tolist() == alone[0, 5 - pad :].tolist(), f"row {row}"


# ---- other ways to decode --------------------------------------------------------------------------------------


def assistant(seed: int) -> Any:
    return tiny_model(seed=seed, n_layer=1)


def compiled_on_any_device() -> CompileConfig:
    """Programs that are traced and run as they are: generated code is another test's business."""
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    return config


OTHER_WAYS: dict[str, Any] = {
    "chunked prefill": lambda: {"prefill_chunk_size": 3},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "assisted by a stranger": lambda: {"assistant_model": assistant(9)},
    "assisted by itself": lambda: {"assistant_model": tiny_model()},
    "static cache": lambda: {"cache_implementation": "static"},
    "static cache, compiled": lambda: {
        "cache_implementation": "static",
        "compile_config": compiled_on_any_device(),
    },
    "static cache in chunks": lambda: {"cache_implementation": "static", "prefill_chunk_size": 3},
}


# with zeros a static cache is refused, which has a test of its own
WAYS_AND_STARTS = [
    full(way, start) if "compiled" in way else (way, start)
    for way in OTHER_WAYS
    for start in STARTS
    if "static" not in way or start == "empty"
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("way", "start"), WAYS_AND_STARTS)
def test_every_way_to_decode_without_a_memory_equals_greedy(way: str, start: str, window: str) -> None:
    model = tiny_model(memory_init=start, **WINDOWS[window])
    # a repeated prompt, so that looking up finds something
    prompt = random_ids(1, 4).repeat(1, 3)
    output = model.generate(prompt, max_new_tokens=12, **OTHER_WAYS[way](), **PLAIN)
    assert output.tolist() == rows_by_hand(model, prompt, 12)


@pytest.mark.parametrize("way", ["chunked prefill", "static cache"])
def test_ragged_prompts_decode_alike_in_other_ways(way: str) -> None:
    model = tiny_model(same_length=True)
    prompts, pads = random_ids(3, 8), [0, 7, 4]
    mask = (torch.arange(8) >= torch.tensor(pads)[:, None]).long()
    output = model.generate(prompts, attention_mask=mask, max_new_tokens=8, **OTHER_WAYS[way](), **PLAIN)
    for row, pad in enumerate(pads):
        assert output[row, 8:].tolist() == by_hand(model, prompts[row, pad:], 8), f"row {row}"


@pytest.mark.parametrize("given_as", GIVEN_AS)
@pytest.mark.parametrize("way", ["chunked prefill", "prompt lookup"])
def test_decoding_that_a_memory_cannot_do_is_refused(way: str, given_as: str) -> None:
    model = tiny_model()
    memory = TransfoXLMemory(model.config)
    args, options = as_given(model, given_as, {**OTHER_WAYS[way](), "max_new_tokens": 4, "do_sample": False})
    with pytest.raises(ValueError, match="TransfoXLMemory"):
        model.generate(random_ids(1, 6), *args, cache=memory, **options)
    assert memory.stored_length == 0


def test_assisted_decoding_with_a_memory_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="TransfoXLMemory"):
        model.generate(
            random_ids(1, 6),
            cache=TransfoXLMemory(model.config),
            assistant_model=assistant(9),
            max_new_tokens=4,
            **PLAIN,
        )


def test_a_memory_and_a_static_cache_together_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="cache"):
        model.generate(
            random_ids(1, 6),
            cache=TransfoXLMemory(model.config),
            cache_implementation="static",
            max_new_tokens=4,
            **PLAIN,
        )


def test_a_static_cache_is_refused_where_zeros_come_before_the_first_token() -> None:
    model = tiny_model(memory_init="zeros")
    with pytest.raises(ValueError, match="memory_init"):
        model.generate(random_ids(1, 6), cache_implementation="static", max_new_tokens=4, **PLAIN)
    with pytest.raises(ValueError, match="memory_init"):
        model(random_ids(1, 6), cache=StaticCache(config=model.config, max_cache_len=20))


@pytest.mark.parametrize("given_as", GIVEN_AS)
def test_a_quantized_cache_is_refused_with_the_reason(given_as: str) -> None:
    """Before the library asks for a package that would not help."""
    model = tiny_model()
    args, options = as_given(model, given_as, {"cache_implementation": "quantized", "max_new_tokens": 4})
    with pytest.raises(ValueError, match="full attention only"):
        model.generate(random_ids(1, 6), *args, **options)


@pytest.mark.parametrize("given_as", GIVEN_AS)
@pytest.mark.parametrize("start", STARTS)
def test_a_memory_is_used_whatever_use_cache_says(start: str, given_as: str) -> None:
    """Models are saved by trainings that turn it off; reading all of a text behind its memory would be no text."""
    model = tiny_model(memory_init=start)
    memory, prompts = TransfoXLMemory(model.config), random_ids(2, 4)
    args, options = as_given(model, given_as, {**PLAIN, "max_new_tokens": 6, "use_cache": False})
    output = model.generate(prompts, *args, cache=memory, **options)
    assert output.tolist() == rows_by_hand(model, prompts, 6, window_rule=False)
    with torch.no_grad():
        read = TransfoXLMemory(model.config)
        model(prompts, cache=read)
        for token in output[:, 4:-1].unbind(1):
            model(token[:, None], cache=read)
    next_ids = random_ids(2, 3, seed=8)
    with torch.no_grad():
        assert_close("logits", model(next_ids, cache=memory).logits, model(next_ids, cache=read).logits, 1e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_pads_of_a_prompt_behind_a_memory_are_not_remembered(length: int) -> None:
    """A row that ends with one has nothing to predict from, whoever says that it is one."""
    model = tiny_model(mem_len=9)
    memory = TransfoXLMemory(model.config)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1] = 0
    with torch.no_grad():
        model(random_ids(2, 4), cache=memory)
    with pytest.raises(ValueError, match=r"`attention_mask` must end with a real token in each row.*with \[1, 0\]"):
        model.generate(random_ids(2, length), attention_mask=mask, cache=memory, max_new_tokens=2, **PLAIN)
    if length > 1:
        with pytest.raises(ValueError, match=r"`attention_mask` must end with .* masks each `pad_token_id`"):
            ids = torch.tensor([[4, 5], [4, 0]])
            model.generate(ids, cache=memory, max_new_tokens=2, **{**PLAIN, "pad_token_id": 0})
    assert memory.stored_length == 4
    mask[:] = 1
    mask[1, : length - 1] = 0
    model.generate(random_ids(2, length), attention_mask=mask, cache=memory, max_new_tokens=2, **PLAIN)
    shortest = memory.stored_length if memory.rows.lengths is None else int(memory.rows.lengths.min())
    assert (memory.stored_length, shortest) == (4 + length + 1, 6)


@pytest.mark.parametrize("options", [{}, {"cache": "memory"}])
def test_continuous_batching_is_refused_rather_than_wrong(options: dict[str, Any]) -> None:
    model = tiny_model()
    if options:
        options = {"cache": TransfoXLMemory(model.config)}
    with pytest.raises(NotImplementedError, match="generate"):
        model.generate_batch([[1, 2, 3]], **options)


def test_two_different_caches_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="past_key_values"):
        model.generate(
            random_ids(1, 3),
            cache=TransfoXLMemory(model.config),
            past_key_values=DynamicCache(config=model.config),
            max_new_tokens=2,
        )


def test_a_memory_of_another_batch_size_is_refused_by_name() -> None:
    model = tiny_model()
    memory = TransfoXLMemory(model.config)
    with torch.no_grad():
        model(random_ids(3, 4), cache=memory)
    with pytest.raises(ValueError, match=r"`cache`.*2.*3"):
        model.generate(random_ids(2, 4), cache=memory, max_new_tokens=2, **PLAIN)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_rows_of_a_memory_are_those_of_the_prompt_before_they_are_repeated(options: dict[str, Any]) -> None:
    model = tiny_model()
    memory = TransfoXLMemory(model.config)
    with torch.no_grad():
        model(random_ids(2, 4), cache=memory)
    with pytest.raises(ValueError, match=r"`cache` must have the batch size of the prompt \(1\), but holds 2 streams"):
        model.generate(random_ids(1, 4), cache=memory, max_new_tokens=2, **{**PLAIN, **options})


def test_a_misspelt_argument_is_refused() -> None:
    model = tiny_model()
    for name in ("mems", "cahce"):
        with pytest.raises((ValueError, TypeError), match=name):
            model.generate(random_ids(1, 4), max_new_tokens=2, **{name: TransfoXLMemory(model.config)}, **PLAIN)


# ---- the library's view ----------------------------------------------------------------------------------------


def test_the_memory_has_all_that_a_cache_of_this_release_must_have() -> None:
    """C67: what is abstract there was renamed between releases, and a class that lacks it cannot be made."""
    memory = TransfoXLMemory(tiny_model().config)
    for kind in (type(memory.layers[0]), type(memory)):
        assert not getattr(kind, "__abstractmethods__", ())
    # what `generate` reads of any cache
    assert memory.get_seq_length() == 0 and not memory.is_compileable
    assert memory.layers[0].get_mask_sizes(3) == (3, 0)


def test_the_language_model_can_generate_and_the_others_cannot() -> None:
    """C65"""
    assert TransfoXLForCausalLM.can_generate()
    assert not TransfoXLModel.can_generate()


def test_caller_tensors_and_configuration_stay_as_they_were() -> None:
    model = tiny_model(memory_init="zeros")
    prompts, mask = random_ids(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    copies, config = (prompts.clone(), mask.clone()), model.config.to_dict()
    generation = model.generation_config.to_dict()
    for cache in (None, TransfoXLMemory(model.config)):
        model.generate(prompts, attention_mask=mask, cache=cache, max_new_tokens=4, **PLAIN)
    assert torch.equal(prompts, copies[0]) and torch.equal(mask, copies[1])
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation


CHARACTERS = ["\n", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL "]


def character_tokenizer() -> Any:
    """One token per character of the tiny vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_the_pipeline_feeds_the_prompt_and_nothing_else() -> None:
    """C70: for the class name that transformers 4 used, pipelines put a long foreign text in front."""
    assert len(CHARACTERS) == 41
    model, tokenizer = tiny_model(), character_tokenizer()
    prompt = "Hello"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ids.shape == (1, 5)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with Calls(model) as calls:
        (result,) = generator(prompt, max_new_tokens=7, do_sample=False)
    assert torch.equal(calls.input_ids[0], ids)
    assert calls.lengths == [5] + [1] * 6
    expected = "".join(CHARACTERS[token] for token in by_hand(model, ids[0], 7))
    assert result["generated_text"] == prompt + expected


def test_rows_of_a_pipeline_batch_are_what_each_prompt_gives_alone() -> None:
    model, tokenizer = tiny_model(memory_init="zeros"), character_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.padding_side = "left"
    prompts = ["ab", "Hello I am"]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    results = generator(prompts, max_new_tokens=6, do_sample=False)
    for prompt, (result,) in zip(prompts, results, strict=True):
        ids = torch.tensor(tokenizer(prompt).input_ids)
        assert result["generated_text"] == prompt + "".join(CHARACTERS[token] for token in by_hand(model, ids, 6))


def test_a_streamer_receives_every_token_in_order() -> None:
    class Collector:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model, collector = tiny_model(), Collector()
    output = model.generate(
        random_ids(1, 3), cache=TransfoXLMemory(model.config), streamer=collector, max_new_tokens=5, **PLAIN
    )
    assert collector.tokens == [*itertools.chain(output[0].tolist()), -1]


# ---- clusters that cannot matter -------------------------------------------------------------------------------


CLUSTERS = {"vocab_size": 400, "cutoffs": [60, 120]}


class BucketReads:
    """Counts how often each bucket of the softmax is read."""

    def __init__(self, model: Any) -> None:
        self.buckets: list[int] = []
        read = model.crit._logits

        def count(bucket: int, hidden_states: torch.Tensor) -> torch.Tensor:
            self.buckets.append(bucket)
            return read(bucket, hidden_states)

        model.crit._logits = count

    def counts(self) -> list[int]:
        counts = [self.buckets.count(bucket) for bucket in range(3)]
        self.buckets.clear()
        return counts


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 3, "temperature": 0.8, "top_p": 0.9},
        {"do_sample": True, "top_k": 50, "temperature": 1.3, "num_return_sequences": 2},
    ],
)
def test_clusters_that_cannot_be_chosen_are_not_read_and_the_tokens_are_the_same(
    options: dict[str, Any], with_memory: bool
) -> None:
    unread = 0
    for seed in range(4):
        model = tiny_model(seed=seed, **CLUSTERS)
        reads = BucketReads(model)
        ids = random_ids(2, 5)
        outputs = []
        # asked for scores, every bucket is read
        for scores in ({}, {"return_dict_in_generate": True, "output_scores": True}):
            cache = {"cache": TransfoXLMemory(model.config)} if with_memory else {}
            set_seed(seed)
            outputs.append(model.generate(ids, max_new_tokens=20, eos_token_id=None, **options, **cache, **scores))
            outputs[-1] = outputs[-1].sequences if scores else outputs[-1]
            counts = reads.counts()
            if scores:
                assert counts == [20, 20, 20]
            else:
                unread += 40 - counts[1] - counts[2]
        assert torch.equal(*outputs)
    assert unread > 0


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "repetition_penalty": 1.5},
        {"do_sample": False, "num_beams": 2},
        {"do_sample": True, "top_k": 0},
        {"do_sample": True, "top_k": 61},
        {"do_sample": False, "bad_words_ids": [[3]]},
    ],
)
def test_clusters_are_read_where_any_token_may_be_chosen(options: dict[str, Any]) -> None:
    model = tiny_model(**CLUSTERS)
    reads = BucketReads(model)
    model.generate(random_ids(2, 5), max_new_tokens=6, eos_token_id=None, **options)
    assert reads.counts() == [6, 6, 6]


# ---- long texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize(("num_tokens", "mem_len"), [(600, 64), pytest.param(20000, 1600, marks=pytest.mark.slow)])
def test_a_long_text_takes_no_more_memory_than_a_short_one(num_tokens: int, mem_len: int, with_memory: bool) -> None:
    """C74: what is kept has the length of the memory, and so, but for some free slots, has what it lies in."""
    model = tiny_model(mem_len=mem_len, cutoffs=[], div_val=1)
    cache = TransfoXLMemory(model.config) if with_memory else DynamicCache(config=model.config)
    output = model.generate(random_ids(1, 3), cache=cache, max_new_tokens=num_tokens, **PLAIN)
    assert output.shape[1] == num_tokens + 3
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert all(tensor.shape[2] == mem_len for tensor in tensors)
    # several tensors may lie in one piece of memory
    pieces = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    bytes_per_slot = sum(tensor.nbytes // mem_len for tensor in tensors)
    assert sum(pieces.values()) <= bytes_per_slot * (mem_len + max(mem_len // 4, 16) + 1)
    # the same as reading the end of the text by itself, as far back as two layers see
    text = output[:, -2 * mem_len - 2 :]
    expected = model.generate(text[:, :-1], max_new_tokens=1, **PLAIN)
    assert expected.tolist() == text.tolist()


# ---- stopping at texts, beams that are sampled -------------------------------------------------------------------


@pytest.mark.parametrize("given_as", GIVEN_AS)
@pytest.mark.parametrize("state", ["none", "memory"])
def test_stop_strings_end_a_text_where_its_new_part_completes_one(state: str, given_as: str) -> None:
    """With a tokenizer that does not know the word on which the library's own criterion relies."""
    model, tokenizer = tiny_model(), character_tokenizer()
    prompts = random_ids(3, 5)
    cache = (lambda: TransfoXLMemory(model.config)) if state == "memory" else (lambda: None)
    free = model.generate(prompts, cache=cache(), max_new_tokens=24, **PLAIN)
    texts = ["".join(CHARACTERS[token] for token in row) for row in free[:, 5:].tolist()]
    # two characters that come early in row 0, and one text that is in its prompt too
    stops = [texts[0][2:4], "".join(CHARACTERS[token] for token in prompts[0, :2])]
    args, options = as_given(
        model, given_as, {**PLAIN, "max_new_tokens": 24, "pad_token_id": 0, "stop_strings": stops}
    )
    ends = [min([text.find(stop) + len(stop) for stop in stops if stop in text] or [24]) for text in texts]
    assert ends[0] == 4
    for row, end in enumerate(ends):
        alone = model.generate(prompts[row : row + 1], *args, cache=cache(), tokenizer=tokenizer, **options)
        assert alone[0].tolist() == free[row, : 5 + end].tolist()
    # a batch goes on, as in the library without an end token, until each of its rows has stopped
    together = model.generate(prompts, *args, cache=cache(), tokenizer=tokenizer, **options)
    assert torch.equal(together, free[:, : 5 + max(ends)])


def test_stop_strings_need_a_tokenizer_and_are_texts() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="`tokenizer` must be given together with `stop_strings`"):
        model.generate(random_ids(1, 3), stop_strings=["a"], max_new_tokens=3)
    with pytest.raises(ValueError, match="`stop_strings` must be non-empty texts"):
        model.generate(random_ids(1, 3), stop_strings=["a", ""], tokenizer=character_tokenizer(), max_new_tokens=3)


@pytest.mark.parametrize("state", ["none", "DynamicCache", *STORAGES])
def test_sampled_beams_are_scored_by_their_own_tokens(state: str) -> None:
    """The score of each beam that is returned is what a forward over its tokens gives."""
    model = tiny_model()
    prompts, new_tokens = random_ids(2, 4), 5
    cache = {
        "none": lambda: None,
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "hidden_states": lambda: TransfoXLMemory(model.config, stores="hidden_states"),
        "keys_values": lambda: TransfoXLMemory(model.config, stores="keys_values"),
    }[state]
    torch.manual_seed(3)
    output = model.generate(
        prompts,
        cache=cache(),
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=new_tokens,
        do_sample=True,
        eos_token_id=None,
        pad_token_id=0,
        length_penalty=0.0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert len({tuple(row) for row in output.sequences.tolist()}) > 4
    for sequence, score in zip(output.sequences, output.sequences_scores, strict=True):
        tokens, total = iter(sequence[4:].tolist()), []

        def follow(scores: torch.Tensor, tokens: Any = tokens, total: list[torch.Tensor] = total) -> int:
            token = next(tokens)
            total.append(scores[token])
            return token

        by_hand(model, sequence[:4], new_tokens, choose=follow, window_rule=state not in STORAGES)
        assert_close(f"{state} score", score, sum(total), 1e-4)


# --- a prompt without a token, a configuration that says to read everything again


@pytest.mark.parametrize("state", ["nothing", "memory", "library"])
@torch.no_grad()
def test_a_prompt_without_a_token_is_refused(state: str) -> None:
    """R14: it ended in an IndexError; a memory holds no prediction."""
    model = tiny_model()
    ids, cache = (
        random_ids(2, 5),
        {"memory": model.init_memory(2), "library": DynamicCache(config=model.config)}.get(state),
    )
    if cache is not None:
        model(ids, past_key_values=cache)
    begin = "begin with `bos_token_id`" if cache is None else "leave the last context token out"
    empty = {"inputs": ids[:, :0], "input_ids": ids[:, :0], "inputs_embeds": torch.zeros(2, 0, 16)}
    for name, prompt in empty.items():
        with pytest.raises(ValueError, match=f"`{name}` must hold at least one token per row.*; .*{begin}"):
            model.generate(**{name: prompt}, past_key_values=cache, **PLAIN)
    if state == "memory":
        assert cache.stored_length == 5
        # what the message says
        held_back = model.init_memory(2)
        model(ids[:, :-1], past_key_values=held_back)
        output = model.generate(ids[:, -1:], past_key_values=held_back, max_new_tokens=4, **PLAIN)
        for row in range(2):
            slow = slow_memory_after(model, ids[row, :-1])
            assert output[row, 1:].tolist() == by_hand(model, ids[row, -1:], 4, memory=slow, window_rule=False)


@pytest.mark.parametrize("length", [1, 5, 6, 7])
@torch.no_grad()
def test_a_text_that_a_cache_has_read_to_its_end_is_not_read_again(length: int) -> None:
    """The library would feed all of it once more, or a part."""
    model = tiny_model()
    ids, new = random_ids(2, 7), {"max_new_tokens": 3, **PLAIN}
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    with pytest.raises(
        ValueError, match=f"whole text, more than the 7 tokens that `cache` has read, but holds {length}"
    ):
        model.generate(ids[:, :length], past_key_values=cache, **new)
    with pytest.raises(ValueError, match="`inputs_embeds` must hold the whole text"):
        model.generate(inputs_embeds=model.get_input_embeddings()(ids[:, :length]), past_key_values=cache, **new)
    mask = torch.ones(2, 7 + length, dtype=torch.long)
    output = model.generate(ids[:, :length], attention_mask=mask, past_key_values=cache, **new)
    text = torch.cat([ids, ids[:, :length]], dim=1)
    assert output[:, length:].tolist() == [by_hand(model, row, 3) for row in text]


def warnings_of(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[str]:
    """What `generate` warns of by itself."""
    said: list[str] = []
    monkeypatch.setattr(generation_transfo_xl.logger, "warning_once", said.append)
    model.generate(random_ids(1, 4), max_new_tokens=2, **PLAIN, **settings)
    return said


def test_reading_everything_again_because_a_configuration_says_so_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """R08: `use_cache=False` in a configuration, where the library's Trainer writes it."""
    slow = tiny_model(use_cache=False)
    for model, settings in (
        (slow, {}),
        (tiny_model(), {"generation_config": GenerationConfig(use_cache=False)}),
    ):
        (said,) = warnings_of(model, monkeypatch, **settings)
        assert "Pass `use_cache=True` or set `model.generation_config.use_cache = True`" in said
    # what was asked for, what the message says, and where nothing is read again
    assert not warnings_of(tiny_model(), monkeypatch, use_cache=False)
    assert not warnings_of(slow, monkeypatch, use_cache=True)
    assert not warnings_of(slow, monkeypatch, past_key_values=slow.init_memory(1))
    assert not warnings_of(tiny_model(), monkeypatch)
    slow.generation_config.use_cache = True
    assert not warnings_of(slow, monkeypatch)

"""Everything around a model, for every position encoding: generation, training, files, compilation, refusals.

Numbers come from the slow float64 references or from a loop written out; `tests/property/test_kinds.py` compares the
encodings themselves.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    StaticCache,
)

from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLMemory,
    TransfoXLModel,
)
from hf_txl.reference.kinds import slow_model_of
from tests.helpers import assert_close, cut
from tests.sizes import full

# float32 against float64 through two layers and a softmax
LOG_PROBABILITIES = 1e-5
# the same float32 sums in another order
ROUNDING = 2e-6

TINY: dict[str, Any] = {
    "vocab_size": 23,
    "cutoffs": [],
    "d_model": 12,
    "n_head": 2,
    "d_head": 5,
    "d_inner": 16,
    "n_layer": 2,
    "mem_len": 5,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "dropatt": 0.0,
}
# tables that end within a segment and its memory
RELATIVE: dict[str, dict[str, Any]] = {
    "transformer_xl": {"attention_kind": "transformer_xl"},
    "learned_relative": {"attention_kind": "learned_relative", "max_klen": 6},
    "shaw": {"attention_kind": "shaw", "max_relative_distance": 3},
    "shaw-keys-only": {"attention_kind": "shaw", "max_relative_distance": 3, "shaw_values": False},
    "shaw-values-only": {"attention_kind": "shaw", "max_relative_distance": 3, "shaw_keys": False},
    "huang": {"attention_kind": "huang", "max_relative_distance": 4},
}
ABSOLUTE: dict[str, dict[str, Any]] = {
    "absolute_sinusoid": {"attention_kind": "absolute_sinusoid", "max_klen": 7},
    "absolute_learned": {"attention_kind": "absolute_learned", "max_klen": 7},
}
ALL = {**RELATIVE, **ABSOLUTE}
each_relative_kind = pytest.mark.parametrize("kind", list(RELATIVE))
each_absolute_kind = pytest.mark.parametrize("kind", list(ABSOLUTE))
each_kind = pytest.mark.parametrize("kind", list(ALL))
# for what takes seconds: one relative and one absolute kind by default
two_kinds = pytest.mark.parametrize(
    "kind", [kind if kind in ("huang", "absolute_sinusoid") else full(kind) for kind in ALL]
)


def make_model(kind: str, model_class: Any = TransfoXLForCausalLM, **changes: Any) -> Any:
    """A random model in eval mode with weights so large that every part of it matters."""
    model = model_class(TransfoXLConfig(**{**TINY, **ALL[kind], **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("layer_norm.weight") else 0.4 * noise)
    return model.eval()


def random_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


# ---- generation ------------------------------------------------------------------------------------------------

# no end token, and no pad token either: `generate` would take that id in a prompt for padding
PLAIN = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
NEW_TOKENS = 6


@torch.no_grad()
def by_hand(model: Any, prompt: torch.Tensor, memory: Any = None) -> tuple[list[int], torch.Tensor]:
    """Continue one prompt `(time,)` with the slow reference; new tokens and their log-probabilities `(new, vocab)`.

    With a memory, and for relative kinds without one (then under the window rule), the prompt is read once and then
    one token at a time. Absolute kinds without a memory read the last `max_klen` tokens again for each new one.
    """
    slow = slow_model_of(model.config, model.state_dict())
    reads_again = model.config.is_absolute and memory is None
    window_rule = memory is None and not model.config.is_absolute
    memory = slow.new_memory(1) if memory is None else memory
    ids = prompt.tolist()
    new = torch.tensor([ids])
    scores = []
    for _ in range(NEW_TOKENS):
        if reads_again:
            memory, new = slow.new_memory(1), torch.tensor([ids[-model.config.max_klen :]])
        (row,) = slow.read(new, memory, window_rule=window_rule)
        scores.append(slow.log_probabilities(row.hidden_states[-1][-1]))
        ids.append(int(scores[-1].argmax()))
        new = torch.tensor([ids[-1:]])
    return ids[len(prompt) :], torch.stack(scores)


def assert_continues(name: str, output: Any, row: int, expected: tuple[list[int], torch.Tensor]) -> None:
    tokens, scores = expected
    assert output.sequences[row, -NEW_TOKENS:].tolist() == tokens, name
    actual = torch.stack([logits[row] for logits in output.logits]).log_softmax(-1)
    assert_close(name, actual, scores, LOG_PROBABILITIES)


@pytest.mark.parametrize("same_length", [False, True])
@each_kind
def test_generation_without_a_memory_equals_a_loop_by_hand(kind: str, same_length: bool) -> None:
    """Relative kinds under the library's cache (window rule); absolute ones read the last `max_klen` tokens again."""
    model = make_model(kind, same_length=same_length)
    # shorter than a table, and longer than tables and memory
    for length in (4, 11):
        prompt = random_ids(2, length)
        output = model.generate(prompt, max_new_tokens=NEW_TOKENS, **PLAIN)
        for row in range(2):
            assert_continues(f"{kind} prompt of {length}", output, row, by_hand(model, prompt[row]))


@each_kind
def test_generation_with_a_memory_equals_a_loop_by_hand(kind: str) -> None:
    """The memory has read something before, and then holds all but the last generated token."""
    model = make_model(kind)
    before, prompt = random_ids(2, 6, seed=3), random_ids(2, 4)
    memory = TransfoXLMemory(model.config)
    with torch.no_grad():
        model(before, cache=memory)
    output = model.generate(prompt, cache=memory, max_new_tokens=NEW_TOKENS, **PLAIN)
    slow = slow_model_of(model.config, model.state_dict())
    slow_memory = slow.new_memory(2)
    with torch.no_grad():
        slow.read(before, slow_memory)
    next_ids = random_ids(2, 3, seed=4)
    for row in range(2):
        assert_continues(f"{kind} with memory", output, row, by_hand(model, prompt[row], [slow_memory[row]]))
    with torch.no_grad():
        actual = model(next_ids, cache=memory).logits.log_softmax(-1)
        expected = slow.scores(slow.read(next_ids, slow_memory), 3)
    assert_close(f"{kind} after generation", actual, expected, LOG_PROBABILITIES)


@pytest.mark.parametrize("with_memory", [False, True])
@each_kind
def test_ragged_prompts_continue_as_each_would_alone(kind: str, with_memory: bool) -> None:
    model = make_model(kind)
    prompt, real = random_ids(3, 9), [9, 4, 1]
    mask = (torch.arange(9) >= 9 - torch.tensor(real)[:, None]).long()
    cache = {"cache": TransfoXLMemory(model.config)} if with_memory else {}
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, **PLAIN, **cache)
    for row, length in enumerate(real):
        memory = slow_model_of(model.config, model.state_dict()).new_memory(1) if with_memory else None
        expected = by_hand(model, prompt[row, 9 - length :], memory)
        assert_continues(f"{kind} prompt of {length} real tokens", output, row, expected)


@each_absolute_kind
def test_absolute_generation_never_reads_more_than_the_table_reaches(kind: str) -> None:
    model = make_model(kind)
    lengths = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    model.generate(random_ids(1, 4), max_new_tokens=NEW_TOKENS, **PLAIN)
    assert lengths == [4, 5, 6, 7, 7, 7]


@each_absolute_kind
def test_a_memory_of_no_length_generates_as_none_at_all(kind: str) -> None:
    model = make_model(kind)
    prompt = random_ids(2, 11)
    output = model.generate(prompt, cache=TransfoXLMemory(model.config, mem_len=0), max_new_tokens=NEW_TOKENS, **PLAIN)
    for row in range(2):
        assert_continues(f"{kind} without memory", output, row, by_hand(model, prompt[row]))


@each_absolute_kind
def test_beams_of_absolute_kinds_score_what_the_model_scores(kind: str) -> None:
    model = make_model(kind)
    prompt = random_ids(1, 3)
    output = model.generate(prompt, max_new_tokens=3, num_beams=4, length_penalty=0.0, output_scores=True, **PLAIN)
    sequence = output.sequences
    # each step of the generation numbered the tokens from its own end
    with torch.no_grad():
        steps = [model(sequence[:, :end]).logits[0, -1].log_softmax(-1) for end in range(3, 6)]
    total = sum(scores[token] for scores, token in zip(steps, sequence[0, 3:], strict=True))
    assert_close(f"{kind} score of the best beam", output.sequences_scores[0], total, LOG_PROBABILITIES)


# ---- training --------------------------------------------------------------------------------------------------


def gradients_of_a_stream(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    memory = TransfoXLMemory(model.config)
    for segment in cut(ids.shape[1], 4):
        model(ids[:, segment], cache=memory, labels=ids[:, segment]).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@each_kind
def test_checkpointing_does_not_change_gradients(kind: str) -> None:
    model = make_model(kind).train()
    ids = random_ids(2, 12)
    expected = gradients_of_a_stream(model, ids)
    calls = []
    model.transformer.layers[0].dec_attn.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    actual = gradients_of_a_stream(model, ids)
    # forward and again in the backward pass
    assert len(calls) == 6
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        assert_close(f"{kind} gradient of {name}", actual[name], gradient, ROUNDING, 1e-5)


@each_kind
def test_training_learns_a_repeated_text(kind: str) -> None:
    """With dropout everywhere; the loss of a stream that repeats itself falls well below that of guessing."""
    torch.manual_seed(0)
    model = TransfoXLForCausalLM(TransfoXLConfig(**{**TINY, **ALL[kind], "dropout": 0.05, "dropatt": 0.05}))
    ids = torch.arange(64).remainder(8).repeat(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model.train()
    for _ in range(8):
        memory = TransfoXLMemory(model.config)
        for segment in cut(64, 16):
            optimizer.zero_grad()
            model(ids[:, segment], cache=memory, labels=ids[:, segment]).loss.backward()
            optimizer.step()
    assert model.eval()(ids, labels=ids).loss < 0.5 * torch.tensor(TINY["vocab_size"]).log()


# ---- files -----------------------------------------------------------------------------------------------------

CLASSES = [
    (AutoModel, TransfoXLModel),
    (AutoModelForCausalLM, TransfoXLForCausalLM),
    (AutoModelForSequenceClassification, TransfoXLForSequenceClassification),
]


@pytest.mark.parametrize(("auto_class", "model_class"), CLASSES)
@each_kind
def test_a_saved_model_comes_back(kind: str, auto_class: Any, model_class: Any, tmp_path: Path) -> None:
    model = make_model(kind, model_class)
    model.save_pretrained(tmp_path)
    loaded, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is model_class
    assert not any(info.values()), info
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    ids = random_ids(2, 8)
    with torch.no_grad():
        assert torch.equal(loaded(ids)[0], model(ids)[0])


@each_kind
def test_a_configuration_comes_back(kind: str, tmp_path: Path) -> None:
    config = make_model(kind).config
    config.save_pretrained(tmp_path)
    for loaded in (AutoConfig.from_pretrained(tmp_path), TransfoXLConfig.from_dict(config.to_dict())):
        for field in TransfoXLConfig.__annotations__:
            assert getattr(loaded, field) == getattr(config, field), field
    # and the values that were derived are in the file, since a table's length must not change with `mem_len`
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert saved["attention_kind"] == config.attention_kind
    assert saved["max_klen"] == config.max_klen
    longer = AutoConfig.from_pretrained(tmp_path, mem_len=50)
    assert (longer.mem_len, longer.max_klen) == (50, config.max_klen)
    assert longer.max_relative_distance == config.max_relative_distance


@pytest.mark.parametrize(
    ("attn_type", "kind", "memory_init"),
    [
        (0, "transformer_xl", "zeros"),
        (1, "learned_relative", "zeros"),
        # a zero state before the first token would have a position
        (2, "absolute_sinusoid", "empty"),
        (3, "absolute_learned", "empty"),
    ],
)
def test_a_file_of_the_original_is_read(attn_type: int, kind: str, memory_init: str) -> None:
    file = {**TINY, "attn_type": attn_type, "tgt_len": 4, "ext_len": 1}
    config = TransfoXLConfig.from_dict(file)
    assert config.attention_kind == kind
    assert config.attn_type == attn_type
    assert config.memory_init == memory_init
    # rows for a segment, what is fed again, and the memory
    assert config.max_klen == 4 + 1 + TINY["mem_len"]
    again = TransfoXLConfig.from_dict(config.to_dict())
    assert (again.attention_kind, again.max_klen, again.memory_init) == (kind, config.max_klen, memory_init)


PUBLISHED = {**TINY, "attn_type": 0}


@pytest.mark.parametrize("file", [TINY, PUBLISHED])
@each_kind
def test_what_the_caller_says_replaces_the_kind_of_a_file(kind: str, file: dict[str, Any], tmp_path: Path) -> None:
    """Published files say `attn_type: 0`; nothing that follows from it may stay."""
    (tmp_path / "config.json").write_text(json.dumps({**file, "model_type": "transfo-xl"}), encoding="utf-8")
    for read in (AutoConfig.from_pretrained, TransfoXLConfig.from_pretrained):
        config = read(tmp_path, **ALL[kind])
        for field, value in ALL[kind].items():
            assert getattr(config, field) == value, field
        assert config.memory_init == ("empty" if kind in ABSOLUTE else "zeros")
        if config.attn_type is not None:
            by_number = read(tmp_path, attn_type=config.attn_type)
            assert (by_number.attention_kind, by_number.memory_init) == (config.attention_kind, config.memory_init)


def test_two_names_of_the_kind_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="`attention_kind`.*`attn_type=0`"):
        TransfoXLConfig(**TINY, attn_type=0, attention_kind="shaw")
    assert TransfoXLConfig(**TINY, attn_type=2, attention_kind="absolute_sinusoid").attn_type == 2


@each_absolute_kind
def test_a_prompt_of_embeddings_needs_a_memory(kind: str) -> None:
    """Without one, each step reads the text again by its ids; with one, the embeddings are read once."""
    model = make_model(kind)
    ids = random_ids(2, 4)
    embeddings = model.get_input_embeddings()(ids).detach()
    with pytest.raises(ValueError, match="`inputs_embeds`.*absolute"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=3, **PLAIN)
    memory = model.init_memory(2)
    generated = model.generate(inputs_embeds=embeddings, cache=memory, max_new_tokens=5, **PLAIN).sequences
    by_hand, step, memory = [], {"inputs_embeds": embeddings}, model.init_memory(2)
    with torch.no_grad():
        for _ in range(5):
            by_hand.append(model(**step, cache=memory).logits[:, -1].argmax(-1, keepdim=True))
            step = {"input_ids": by_hand[-1]}
    assert torch.equal(generated, torch.cat(by_hand, dim=1))


@each_kind
def test_resizing_keeps_what_the_old_tokens_score(kind: str) -> None:
    model = make_model(kind)
    ids = random_ids(2, 8)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(TINY["vocab_size"] + 4)
        after = model(ids).logits
    assert after.shape[-1] == TINY["vocab_size"] + 4
    assert_close(f"{kind} logits of old tokens", after[..., : TINY["vocab_size"]], before, ROUNDING)
    assert model.generate(torch.full((1, 3), TINY["vocab_size"] + 3), max_new_tokens=2, **PLAIN).sequences.shape == (
        1,
        5,
    )


# ---- compilation, size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@two_kinds
def test_forward_compiles_without_graph_breaks(kind: str, backend: str) -> None:
    """With memory and gradients; `aot_eager` traces and differentiates, but makes no machine code."""
    model = make_model(kind, n_layer=1).train()
    ids = random_ids(2, 6)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results = []
    for run in (model, compiled):
        model.zero_grad()
        memory = TransfoXLMemory(model.config)
        model(ids, cache=memory)
        output = run(ids, cache=memory, labels=ids, return_logits=True)
        output.loss.backward()
        grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        results.append((output.logits.detach(), grads))
    assert_close(f"{kind} logits", results[1][0], results[0][0], ROUNDING, 1e-5)
    for name, gradient in results[0][1].items():
        assert_close(f"{kind} gradient of {name}", results[1][1][name], gradient, ROUNDING, 1e-4)


@two_kinds
def test_forward_exports(kind: str) -> None:
    model = make_model(kind, n_layer=1)
    ids, other_ids = random_ids(2, 6), random_ids(2, 6, seed=7)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,))
        actual, expected = exported.module()(other_ids).logits, model(other_ids).logits
    assert_close(f"{kind} logits", actual, expected, ROUNDING)


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of any tensor that an operation returns, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.largest:
                self.largest, self.operation = tensor.numel(), str(func)
        return result


@pytest.mark.parametrize("padded", [False, True])
@each_relative_kind
def test_no_tensor_has_a_vector_per_pair_of_query_and_key(kind: str, padded: bool) -> None:
    """Forward and backward: at most a number per head for each query and distance; naively, d_head times as many."""
    length, d_head, n_head = 64, 32, 2
    model = make_model(kind, n_layer=1, d_head=d_head, mem_len=length, max_klen=length).train()
    memory = TransfoXLMemory(model.config)
    model(random_ids(1, length), cache=memory)
    ids = random_ids(1, length, seed=2)
    mask = torch.ones_like(ids)
    mask[:, : 5 * padded] = 0
    with LargestTensor() as seen:
        model(ids, attention_mask=mask, cache=memory, labels=ids).loss.backward()
    num_keys = 2 * length
    assert n_head * length * num_keys <= seen.largest, "the scores themselves were seen"
    assert seen.largest <= n_head * length * (num_keys + length), seen.operation
    assert n_head * length * (num_keys + length) < length * num_keys * d_head


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_kind": "rotary"}, "`attention_kind`"),
        ({"attn_type": 4}, "`attn_type`"),
        ({"attention_kind": "shaw", "shaw_keys": False, "shaw_values": False}, "`shaw_keys` or `shaw_values`"),
        ({"attention_kind": "shaw", "max_relative_distance": -1}, "`max_relative_distance`"),
        ({"attention_kind": "huang", "max_relative_distance": -1}, "`max_relative_distance`"),
        ({"attention_kind": "learned_relative", "max_klen": 0}, "`max_klen`"),
        ({"attention_kind": "absolute_sinusoid", "memory_init": "zeros"}, "`memory_init`"),
        ({"attention_kind": "absolute_learned", "memory_init": "zeros"}, "`memory_init`"),
    ],
)
def test_a_configuration_that_no_kind_can_have_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        TransfoXLConfig(**{**TINY, **fields})


def test_a_zero_start_in_a_file_is_refused_for_absolute_kinds() -> None:
    with pytest.raises(ValueError, match="`memory_init`"):
        TransfoXLConfig.from_dict({**TINY, "attn_type": 2, "memory_init": "zeros"})


@pytest.mark.parametrize(
    ("settings", "named"), [({"stores": "keys_values"}, "`stores`"), ({"memory_init": "zeros"}, "`memory_init`")]
)
@each_absolute_kind
def test_a_memory_that_absolute_positions_cannot_have_is_refused(
    kind: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        TransfoXLMemory(make_model(kind).config, **settings)


@pytest.mark.parametrize("make_cache", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=20)])
@each_absolute_kind
def test_a_cache_of_the_library_is_refused_by_absolute_kinds(kind: str, make_cache: Any) -> None:
    model = make_model(kind)
    cache = make_cache(config=model.config)
    with pytest.raises(ValueError, match="`cache`.*TransfoXLMemory"):
        model(random_ids(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="`cache`.*TransfoXLMemory"):
        model.generate(random_ids(1, 4), past_key_values=make_cache(config=model.config), max_new_tokens=2)


@each_absolute_kind
def test_absolute_kinds_return_no_cache(kind: str) -> None:
    """There is none that could be continued."""
    output = make_model(kind)(random_ids(1, 4), use_cache=True)
    assert output.get("cache") is None and output.get("past_key_values") is None


# ---- what the documentation says of the kinds ------------------------------------------------------------------


@each_absolute_kind
@torch.no_grad()
def test_a_longer_input_moves_earlier_outputs_of_absolute_kinds(kind: str) -> None:
    """They number what is seen from its far end. A relative kind sees the same distances as before."""
    ids = random_ids(1, 8)
    for other, moves in ((kind, True), ("huang", False)):
        model = make_model(other)
        difference = (model(ids).logits[:, :6] - model(ids[:, :6]).logits).abs().max()
        assert (difference > 0.1) == moves, other
        assert moves or difference < 1e-5


@pytest.mark.parametrize("kind", ["learned_relative", "shaw", "huang", "absolute_learned"])
@torch.no_grad()
def test_beyond_a_table_its_farthest_row_is_repeated(kind: str) -> None:
    """As if the table had been written longer with that row."""
    model = make_model(kind)
    longer = make_model(kind, max_klen=30, max_relative_distance=30)
    state = copy.deepcopy(model.state_dict())
    for name, table in longer.state_dict().items():
        if state[name].shape != table.shape:
            more = len(table) - len(state[name])
            # tables of the original run from the farthest distance, the others towards it
            if kind in ("learned_relative", "absolute_learned"):
                state[name] = torch.cat([state[name][:1].repeat_interleave(more, 0), state[name]])
            else:
                state[name] = torch.cat([state[name], state[name][-1:].repeat_interleave(more, 0)])
    longer.load_state_dict(state)
    ids = random_ids(1, 20)
    assert_close(f"{kind} logits", model(ids).logits, longer(ids).logits, ROUNDING)

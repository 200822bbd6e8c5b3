"""Rows that go on from one text: the same numbers as rows that each read it, and none of it stored twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_txl import TransfoXLMemory, attention_execution_transfo_xl
from hf_txl.attention_execution_transfo_xl import eager_attention
from hf_txl.scoring import score_continuations
from hf_txl.shared_prefix_transfo_xl import KeyValuePrefix
from tests.helpers import assert_close
from tests.model.test_kinds import RELATIVE
from tests.model.test_kinds import make_model as make_model_of_kind
from tests.model.tiny_models import STARTS, WINDOWS, random_ids, slow_log_probabilities, tiny_model
from tests.sizes import full

# the same float64 sums in another order
ROUNDING = 1e-9
# beside the slow model, whose sinusoids are float64
SINUSOIDS = 1e-5
# of 23 tokens read: memories that are full, and one that is not
LENGTHS = [1, 7, 23, 40]
# single tokens, which roll; segments that push out all that is shared; more queries than are worked through at once
SEGMENTS = [1, 1, 3, 17, 140, 1]
TEXT_LENGTH = 23


def is_shared(memory: TransfoXLMemory) -> bool:
    return memory.layers[0].prefix is not None


@torch.no_grad()
def assert_equal_streams(
    model: Any, shared: TransfoXLMemory, copies: TransfoXLMemory, segments: list[int], num_rows: int = 6
) -> None:
    """Two memories of the same rows go on alike, also when rows change places between segments."""
    for index, length in enumerate(segments):
        ids = random_ids(num_rows, length, vocab_size=model.config.vocab_size, seed=100 + index)
        actual, expected = (model(ids, cache=memory, output_attentions=True) for memory in (shared, copies))
        assert_close(f"logits of segment {index}", actual.logits, expected.logits, ROUNDING)
        for layer, pair in enumerate(zip(actual.attentions, expected.attentions, strict=True)):
            assert_close(f"attentions of segment {index}, layer {layer}", *pair, ROUNDING)
        assert shared.stored_length == copies.stored_length
        # rows stay with their text, as beams do
        order = torch.tensor([2, 2, 0, 3, 5, 4]) if num_rows == 6 else torch.arange(num_rows)
        shared.reorder_cache(order)
        copies.reorder_cache(order)


def read_text(model: Any, rows: int, texts: int = 2, **settings: Any) -> tuple[TransfoXLMemory, TransfoXLMemory]:
    """A memory of texts of which rows share what was read, and one whose rows have read them each."""
    ids = random_ids(texts, TEXT_LENGTH, vocab_size=model.config.vocab_size)
    once, copies = model.init_memory(texts, **settings), model.init_memory(texts * rows, **settings)
    with torch.no_grad():
        model(ids, cache=once)
        model(ids.repeat_interleave(rows, dim=0), cache=copies)
    return once, copies


@pytest.mark.parametrize("mem_len", LENGTHS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("window", WINDOWS)
def test_rows_that_share_a_text_go_on_as_if_each_had_read_it(window: str, start: str, mem_len: int) -> None:
    model = tiny_model(memory_init=start, mem_len=mem_len, clamp_len=9, **WINDOWS[window]).double()
    once, copies = read_text(model, rows=3)
    shared = once.select([0, 0, 0, 1, 1, 1])
    assert is_shared(shared)
    assert_equal_streams(model, shared, copies, SEGMENTS)
    assert not is_shared(shared)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", list(RELATIVE))
def test_every_relative_kind_shares(kind: str, backend: str) -> None:
    model = make_model_of_kind(kind, mem_len=11).double()
    model.set_attn_implementation(backend)
    once, copies = read_text(model, rows=3)
    shared = once.select([0, 0, 0, 1, 1, 1])
    assert is_shared(shared)
    assert_equal_streams(model, shared, copies, [1, 2, 4, 150])


@pytest.mark.parametrize(("texts", "rows", "length"), [(3, 50, 5), (2, 50, 8), (40, 4, 7), (1, 131, 1), (5, 3, 31)])
@torch.no_grad()
def test_many_rows_are_read_in_blocks(texts: int, rows: int, length: int) -> None:
    """Parts of a group, whole groups, and one of each at the end."""
    model = tiny_model(mem_len=30).double()
    once, copies = read_text(model, rows, texts)
    shared = once.select([text for text in range(texts) for _ in range(rows)])
    ids = random_ids(texts * rows, length, seed=6)
    actual, expected = (model(ids, cache=memory).logits for memory in (shared, copies))
    assert_close("logits", actual, expected, ROUNDING)


@torch.no_grad()
def test_sharing_rows_need_not_be_all_or_in_order() -> None:
    """Rows that are chosen share what they have in common, whether or not they did before."""
    model = tiny_model(mem_len=30).double()
    once, copies = read_text(model, rows=1, texts=3)
    for rows in ([2, 2, 0, 0], [1, 1, 1, 1], [0, 1, 1, 2], [1]):
        shared = once.select(rows)
        assert is_shared(shared) == (rows[:2] == [2, 2] or rows == [1, 1, 1, 1])
        assert_equal_streams(model, shared, copies.select(rows), [1, 3], num_rows=len(rows))
    # of rows that share already: fewer of each, one of each, unequally many, other ones
    once, copies = read_text(model, rows=3)
    shared = once.select([0, 0, 0, 1, 1, 1])
    ids = random_ids(6, 4, seed=3)
    model(ids, cache=shared)
    model(ids, cache=copies)
    for rows, shares in (([0, 2, 3, 4], True), ([1, 4], False), ([0, 1, 4], False), ([5, 3], True), ([4], False)):
        selected = shared.select(rows)
        assert is_shared(selected) == shares, rows
        assert_equal_streams(model, selected, copies.select(rows), [1, 3], num_rows=len(rows))


@torch.no_grad()
def test_pads_and_restarts_end_the_sharing_and_change_no_number() -> None:
    model = tiny_model(mem_len=30, same_length=True).double()
    once, copies = read_text(model, rows=3, texts=1)
    shared, ids = once.select([0, 0, 0]), random_ids(3, 5, seed=4)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    expected = model(ids, cache=copies, attention_mask=mask).logits
    actual = model(ids, cache=shared, attention_mask=mask).logits
    assert_close("padded", actual[mask.bool()], expected[mask.bool()], ROUNDING)
    once, copies = read_text(model, rows=3, texts=1)
    shared = once.select([0, 0, 0])
    shared.reset([1])
    copies.reset([1])
    assert_equal_streams(model, shared, copies, [1, 4], num_rows=3)


@pytest.mark.full
@torch.no_grad()
def test_a_program_gives_each_row_its_own_copy_once() -> None:
    """One program takes the shared memory apart, and another serves all that follows, reordered or not."""
    model = tiny_model(mem_len=30).double()
    once, copies = read_text(model, rows=3, texts=1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(model, fullgraph=True, backend="eager")
    shared = once.select([0, 0, 0])
    for seed in range(12):
        ids = random_ids(3, 1, seed=seed)
        actual, expected = run(ids, cache=shared).logits, model(ids, cache=copies).logits
        assert_close(f"token {seed}", actual, expected, ROUNDING)
        for memory in (shared, copies):
            memory.reorder_cache(torch.tensor([2, 2, 2] if seed % 3 else [1, 0, 2]))
    assert not is_shared(shared) and is_shared(copies)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    torch._dynamo.reset()


class BuiltTensors(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, views of others left out."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given, made = (
            {leaf.untyped_storage().data_ptr(): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        new = [leaf.untyped_storage().nbytes() for where, leaf in made.items() if where not in given]
        self.largest = max([self.largest, *new])
        return result


@torch.no_grad()
def test_nothing_as_large_as_a_copy_for_each_row_is_made() -> None:
    """300 positions of 16 numbers per head, for 50 rows of two queries: what these meet is a score per position."""
    model = tiny_model(mem_len=300, d_head=16, same_length=True, cutoffs=[], div_val=1)
    memory = model.init_memory(1)
    model(random_ids(1, 300), cache=memory)
    keys = memory.layers[0].keys
    ids = random_ids(50, 2, seed=2)
    with BuiltTensors() as built:
        shared = memory.select([0] * 50)
        for _ in range(3):
            model(ids, cache=shared)
            shared.reorder_cache(torch.arange(50).flip(0))
    assert shared.layers[0].prefix.keys.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    a_copy_for_each_row = 50 * keys.nbytes
    assert 0 < built.largest < a_copy_for_each_row / 3
    # the memory that they go on from is where it was
    assert memory.stored_length == 300 and not is_shared(memory) and memory.layers[0].keys is keys


@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True}])
@pytest.mark.parametrize("state", ["memory", "DynamicCache", "rows of a memory"])
@torch.no_grad()
def test_zero_states_before_a_text_are_not_written_out(state: str, options: dict[str, Any]) -> None:
    """295 of 300 positions, of which each token would read as many as in a full memory."""
    model = tiny_model(mem_len=300, d_head=16, memory_init="zeros", same_length=True, **options).double()
    text, rows = random_ids(1, 8), 3 if state == "rows of a memory" else 1
    cache: Any = DynamicCache(config=model.config) if state == "DynamicCache" else model.init_memory(1)
    model(text[:, :5], cache=cache)
    if rows > 1:
        cache = cache.select([0] * rows)
    with BuiltTensors() as built:
        logits = [model(token.repeat(rows, 1), cache=cache).logits for token in text[:, 5:].split(1, dim=1)]
    keys_of_all_rows = rows * 300 * model.config.n_head * 16 * 8
    assert 0 < built.largest < keys_of_all_rows / 2
    (expected,) = slow_log_probabilities(model, [text])
    for row in range(rows):
        assert_close("log-probabilities", torch.cat(logits, dim=1)[row], expected[0, 5:], SINUSOIDS)


@pytest.mark.parametrize("options", [{}, {"pre_lnorm": True}, {"untie_r": True}])
@pytest.mark.parametrize("length", [1, 3, 32, 33, full(129)])
@torch.no_grad()
def test_queries_behind_zero_states_see_them(length: int, options: dict[str, Any]) -> None:
    """As many queries as read them as one state, and one more; several rows."""
    model = tiny_model(mem_len=7, memory_init="zeros", **options).double()
    ids = random_ids(3, length + 2)
    memory = model.init_memory(3)
    actual = [model(segment, cache=memory).logits for segment in (ids[:, :2], ids[:, 2:])]
    expected = slow_log_probabilities(model, [ids[:, :2], ids[:, 2:]])
    for name, ours, theirs in zip(("first", "second"), actual, expected, strict=True):
        assert_close(name, ours, theirs, SINUSOIDS)


class BiasedLinear(torch.nn.Linear):
    """As an adapter may be: the zero vector has a value."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) + 0.3


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("state", ["memory", "DynamicCache", "rows of a memory"])
@pytest.mark.parametrize("kind", list(RELATIVE))
@torch.no_grad()
def test_zero_states_of_every_kind_are_those_that_are_written_out(
    kind: str, state: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model_of_kind(kind, mem_len=9, memory_init="zeros").double()
    for layer in model.transformer.layers if replaced else []:
        layer.dec_attn.qkv_net.__class__ = BiasedLinear

    def read(limit: int) -> list[Any]:
        monkeypatch.setattr(attention_execution_transfo_xl, "ZERO_PREFIX_QUERIES", limit)
        monkeypatch.setattr(attention_execution_transfo_xl, "SHARED_PREFIX_QUERIES", limit)
        cache: Any = DynamicCache(config=model.config) if state == "DynamicCache" else model.init_memory(1)
        rows = 1
        outputs = []
        for index, length in enumerate((2, 1, 3, 1, 5)):
            ids = random_ids(rows, length, vocab_size=model.config.vocab_size, seed=index)
            outputs.append(model(ids, cache=cache, output_attentions=True))
            if index == 0 and state == "rows of a memory":
                cache, rows = cache.select([0, 0, 0]), 3
        return outputs

    for index, (actual, expected) in enumerate(zip(read(32), read(-1), strict=True)):
        assert_close(f"logits {index}", actual.logits, expected.logits, ROUNDING)
        for layer, pair in enumerate(zip(actual.attentions, expected.attentions, strict=True)):
            assert_close(f"attentions {index}, layer {layer}", *pair, ROUNDING)


@pytest.mark.parametrize("length", [9, 64, 129])
@torch.no_grad()
def test_long_segments_put_keys_together_for_one_row_at_a_time(length: int) -> None:
    model = tiny_model(mem_len=300, d_head=16, d_inner=4, same_length=True, cutoffs=[], div_val=1)
    model.set_attn_implementation("sdpa")
    memory = model.init_memory(1)
    model(random_ids(1, 300), cache=memory)
    shared = memory.select([0] * 50)
    with BuiltTensors() as built:
        model(random_ids(50, length), cache=shared, return_logits=False)
    # the segment's own queries, keys and values, and no copy of what went before for each row
    own = 50 * 3 * 48 * length * 4
    assert 0 < built.largest < own + 50 * memory.layers[0].keys.nbytes / 2


@torch.no_grad()
def test_few_rows_of_many_are_taken_without_a_copy_of_all() -> None:
    model = tiny_model(mem_len=300, d_head=16, same_length=True, cutoffs=[], div_val=1)
    memory = model.init_memory(1)
    model(random_ids(1, 300), cache=memory)
    shared = memory.select([0] * 50)
    model(random_ids(50, 1), cache=shared)
    with BuiltTensors() as built:
        shared.select([5])
    assert 0 < built.largest < 3 * memory.layers[0].keys.nbytes


@torch.no_grad()
def test_branches_of_a_shared_memory_are_apart() -> None:
    model = tiny_model(mem_len=30).double()
    once, copies = read_text(model, rows=3)
    shared = once.select([0, 0, 0, 1, 1, 1])
    branches = [copy.copy(shared), copy.deepcopy(shared), shared.select(range(6))]
    for branch in branches:
        assert_equal_streams(model, branch, copy.copy(copies), [1, 2, 1])
    assert_equal_streams(model, shared, copies, [2, 1])
    with torch.no_grad():
        ids = random_ids(2, 3, seed=9)
        fresh = read_text(model, rows=1)[1]
        assert_close("what they went on from", model(ids, cache=once).logits, model(ids, cache=fresh).logits, ROUNDING)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_hypotheses_score_as_each_joined_text(batch_size: int) -> None:
    """Of any lengths, so that rows end at different segments."""
    model = tiny_model(mem_len=60, same_length=True).double()
    context = random_ids(1, 31)[0]
    hypotheses = [random_ids(1, length, seed=length)[0] for length in (5, 1, 9, 9, 3)]
    actual = score_continuations(model, context, hypotheses, batch_size=batch_size, segment_length=4)
    for score, hypothesis in zip(actual, hypotheses, strict=True):
        text = torch.cat([context, hypothesis])[None]
        with torch.no_grad():
            log_probabilities = model(text).logits.log_softmax(-1)[0, len(context) - 1 : -1]
        expected = log_probabilities.gather(-1, hypothesis[:, None]).sum()
        assert_close("score", score, expected, ROUNDING)


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Groups, and rows of each, whenever queries meet keys that rows share."""
    seen = []
    scores = KeyValuePrefix.scores

    def note_rows(shared: KeyValuePrefix, query: torch.Tensor) -> torch.Tensor:
        seen.append((len(shared.keys), shared.rows_each))
        return scores(shared, query)

    monkeypatch.setattr(KeyValuePrefix, "scores", note_rows)
    return seen


@pytest.mark.parametrize(
    ("options", "rows_each"),
    [
        ({"num_beams": 3}, 3),
        ({"num_return_sequences": 4, "do_sample": True}, 4),
        ({"num_beams": 4, "do_sample": True, "num_return_sequences": 2}, 4),
    ],
)
def test_beams_and_samples_share_the_memory_that_they_go_on_from(
    options: dict[str, Any], rows_each: int, meetings: list[tuple[int, int]]
) -> None:
    model = tiny_model(mem_len=30)
    once, _ = read_text(model, rows=1)
    plain = {"max_new_tokens": 7, "pad_token_id": 0, "eos_token_id": None}
    model.generate(random_ids(2, 3), cache=once, **plain, **options)
    # two layers; the prompt and six tokens
    assert meetings == [(2, rows_each)] * 2 * 7


def test_hypotheses_share_the_memory_of_their_context(meetings: list[tuple[int, int]]) -> None:
    model = tiny_model(mem_len=30)
    score_continuations(model, random_ids(1, 9)[0], [random_ids(1, 4)[0]] * 5, batch_size=3)
    assert meetings == [(1, 3)] * 2 + [(1, 2)] * 2


def test_a_registered_attention_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(mem_len=30).double()
    once, copies = read_text(model, rows=3)
    calls = []

    def attend(module: Any, query: torch.Tensor, *states: Any, **options: Any) -> Any:
        calls.append(query.shape[0])
        key, value = states[:2]
        return eager_attention(
            module, query, key, value, options["position_bias"], options["scaling"], options["dropout"]
        )

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "of the user", attend)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "of the user")
    shared, ids = once.select([0, 0, 0, 1, 1, 1]), random_ids(6, 2, seed=5)
    with torch.no_grad():
        actual = model(ids, cache=shared).logits
        assert calls == [6, 6]
        assert_close("logits", actual, model(ids, cache=copies).logits, ROUNDING)


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_whatever_rows_read_and_are_chosen_each_is_its_own_text(seed: int) -> None:
    """With a window, what a row gives is what one pass over all that it has read gives."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int, size: int = 1) -> list[int]:
        return torch.randint(0, most, (size,), generator=generator).tolist()

    model = tiny_model(mem_len=(4, 9, 30)[seed % 3], same_length=True, cutoffs=[], div_val=1).double()
    memory, texts = model.init_memory(2), [torch.empty(0, dtype=torch.long)] * 2
    for step in range(25):
        if step % 2 == 0:
            length = (1, 1, 2, 6, 17)[draw(5)[0]]
            ids = random_ids(len(texts), length, seed=100 * seed + step)
            actual = model(ids, cache=memory).logits
            texts = [torch.cat([text, row]) for text, row in zip(texts, ids, strict=True)]
            for row, text in enumerate(texts):
                expected = model(text[None], use_cache=False).logits[0, -length:]
                assert_close(f"step {step}, row {row}", actual[row], expected, ROUNDING)
            continue
        rows = sorted(draw(len(texts), 1 + draw(3)[0])) if draw(2)[0] else draw(len(texts), 1 + draw(4)[0])
        rows = [row for row in rows for _ in range(1 + step % 3)]
        memory, texts = memory.select(rows), [texts[row] for row in rows]

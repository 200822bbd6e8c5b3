"""What a model remembers from call to call, against streams read token by token or by loops."""

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache, Trainer, TrainingArguments
from transformers.utils import logging as library_logging

from hf_txl import TransfoXLForSequenceClassification, TransfoXLMemory, TransfoXLModel
from hf_txl.attention_transfo_xl import TransfoXLAttention
from hf_txl.positions_transfo_xl import PositionTable
from hf_txl.reference.transformer_xl import SlowMemory
from tests.helpers import assert_close, cut, read_in_segments
from tests.model.tiny_models import slow_log_probabilities, slow_twin
from tests.t0 import (
    FLOAT32,
    FLOAT64,
    GRADIENTS,
    LARGE_WEIGHTS,
    gradients_of,
    make_config,
    make_model,
    random_ids,
    returned_cache,
)

STORAGES = ["hidden_states", "keys_values"]
STARTS = ["empty", "zeros"]
both_storages = pytest.mark.parametrize("stores", STORAGES)
both_starts = pytest.mark.parametrize("memory_init", STARTS)

# the same float64 arithmetic in another order
ROUNDING = 1e-9


@contextmanager
def layer_inputs(model: Any) -> Iterator[list[list[torch.Tensor]]]:
    """Everything that enters each layer while the context is open."""
    base = model.base_model
    seen: list[list[torch.Tensor]] = [[] for _ in base.layers]
    hooks = [
        layer.register_forward_pre_hook(lambda module, args, index=index: seen[index].append(args[0].detach().clone()))
        for index, layer in enumerate(base.layers)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def assert_same_state(memory: TransfoXLMemory, before: dict[str, Any]) -> None:
    """Bit by bit what `snapshot` saw."""
    now = memory.state_dict()
    assert now.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(now[name], value) if isinstance(value, torch.Tensor) else now[name] == value, name


def snapshot(memory: TransfoXLMemory) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in memory.state_dict().items()
    }


# --- lengths


@pytest.mark.parametrize("mem_len", [1, 3, 6])
@pytest.mark.parametrize("segments", [[5, 2, 1], [1] * 9, [13], [4, 1, 7], [2, 2]])
@torch.no_grad()
def test_memory_is_the_last_inputs_of_each_layer(segments: list[int], mem_len: int) -> None:
    """C01: exactly what entered, after every segment, whichever of memory and segment is longer."""
    model = make_model(mem_len=mem_len)
    memory = model.init_memory(2, stores="hidden_states")
    ids, read = random_ids(2, sum(segments)), 0
    with layer_inputs(model) as inputs:
        for segment in cut(sum(segments), segments):
            model(ids[:, segment], cache=memory)
            read += segment.stop - segment.start
            assert memory.stored_length == min(mem_len, read)
            for layer, stream in zip(memory.layers, inputs, strict=True):
                assert torch.equal(layer.hidden_states, torch.cat(stream, dim=1)[:, -mem_len:])
    # embeddings of all positions at once are other products, which may round otherwise
    embeddings = model.get_input_embeddings()(ids)
    assert_close("embeddings", memory.layers[0].hidden_states, embeddings[:, -mem_len:], **FLOAT32)


@pytest.mark.parametrize("segments", [[5, 2, 1], [1] * 9, [13], [4, 1, 7]])
@torch.no_grad()
def test_keys_and_values_are_those_of_the_last_inputs(segments: list[int]) -> None:
    """C01"""
    model = make_model(mem_len=3)
    memory = model.init_memory(2, stores="keys_values")
    with layer_inputs(model) as inputs:
        read_in_segments(model, random_ids(2, sum(segments)), segments, memory)
    for layer, module, stream in zip(memory.layers, model.transformer.layers, inputs, strict=True):
        # (B, M, 3 * H * D) -> three of (B, H, M, D)
        projected = module.dec_attn.qkv_net(torch.cat(stream, dim=1)[:, -3:]).view(2, 3, 3, 4, 8)
        _, keys, values = projected.permute(2, 0, 3, 1, 4)
        assert_close("keys", layer.keys, keys, **FLOAT32)
        assert_close("values", layer.values, values, **FLOAT32)


@pytest.mark.parametrize(("query_length", "memory_length"), [(1, 6), (5, 6), (9, 6), (3, 0)])
@both_storages
@torch.no_grad()
def test_distances_count_from_the_end_of_the_memory(query_length: int, memory_length: int, stores: str) -> None:
    """C18: against loops that use distance = i + M - j."""
    model = make_model(**LARGE_WEIGHTS).double()
    memory = model.init_memory(2, stores=stores)
    ids = random_ids(2, memory_length + query_length)
    segments = [ids[:, :memory_length], ids[:, memory_length:]] if memory_length else [ids]
    outputs = [model(segment, cache=memory).logits.log_softmax(-1) for segment in segments]
    expected = slow_log_probabilities(model, segments)
    assert_close("log-probabilities", outputs[-1], expected[-1], **FLOAT64)


# --- windows


@pytest.mark.parametrize(("includes_oldest", "width"), [(False, 6), (True, 7)])
@pytest.mark.parametrize("state", ["none", "hidden_states", "keys_values", "library"])
@both_starts
@torch.no_grad()
def test_every_query_sees_the_same_number_of_keys(
    memory_init: str, state: str, includes_oldest: bool, width: int
) -> None:
    """C02: 6 with itself as in the original PyTorch code, 7 as in TensorFlow; on every path.

    With an empty start the first queries have fewer keys to see.
    """
    model = make_model(same_length=True, same_length_includes_oldest=includes_oldest, memory_init=memory_init)
    ids = random_ids(2, 9)
    segments = [ids] if state == "none" else [ids[:, :4], ids[:, 4:5], ids[:, 5:]]
    cache: Any = (
        {
            "none": None,
            "library": DynamicCache(config=model.config),
        }.get(state)
        if state in ("none", "library")
        else model.init_memory(2, stores=state)
    )
    first = 0
    for segment in segments:
        attentions = model(segment, cache=cache, output_attentions=True).attentions
        length = segment.shape[1]
        expected = [
            width if memory_init == "zeros" else min(width, position + 1) for position in range(first, first + length)
        ]
        for weights in attentions:
            assert (weights != 0).sum(-1).tolist() == [[expected] * 4] * 2
            assert_close("sum of weights", weights.sum(-1), torch.ones(2, 4, length), 1e-6)
        first += length


@torch.no_grad()
def test_without_same_length_a_query_sees_all_of_the_memory() -> None:
    """C02: the segment rule."""
    model = make_model()
    memory = model.init_memory(1)
    model(random_ids(1, 9), cache=memory)
    attentions = model(random_ids(1, 4), cache=memory, output_attentions=True).attentions
    for weights in attentions:
        assert (weights != 0).sum(-1).tolist() == [[[7, 8, 9, 10]] * 4]


@pytest.mark.parametrize("fields", [{"same_length": True}, {"same_length": True, "same_length_includes_oldest": True}])
@both_storages
@torch.no_grad()
def test_a_window_gives_the_same_numbers_however_the_stream_is_cut(stores: str, fields: dict[str, bool]) -> None:
    model = make_model(**fields, **LARGE_WEIGHTS).double()
    ids = random_ids(2, 13)
    whole = model(ids, use_cache=False).logits
    for segments in ([1] * 13, [6, 7], [2, 9, 1, 1], [12, 1]):
        outputs = read_in_segments(model, ids, segments, model.init_memory(2, stores=stores))
        assert_close(f"{segments}", torch.cat([output.logits for output in outputs], dim=1), whole, ROUNDING)


# --- start


@torch.no_grad()
def test_empty_start_is_a_model_without_memory() -> None:
    """C05: with and without a memory object."""
    ids = random_ids(2, 5)
    expected = make_model(mem_len=0)(ids).logits
    model = make_model()
    assert_close("logits", model(ids).logits, expected, **FLOAT32)
    assert_close("logits with a memory", model(ids, cache=model.init_memory(2)).logits, expected, **FLOAT32)


@both_storages
@torch.no_grad()
def test_zero_start_attends_to_mem_len_zero_vectors(stores: str) -> None:
    """C05: as if a memory of zeros had been read; with a memory, and for a call without one."""
    ids = random_ids(2, 5)
    model = make_model(**LARGE_WEIGHTS)
    zeros = TransfoXLMemory.from_mems(model.config, [torch.zeros(6, 2, 32)] * 3)
    expected = model(ids, cache=zeros).logits
    zero_start = make_model(memory_init="zeros", **LARGE_WEIGHTS)
    memory = zero_start.init_memory(2, stores=stores)
    assert_close("logits with a memory", zero_start(ids, cache=memory).logits, expected, **FLOAT32)
    assert_close("logits", zero_start(ids).logits, expected, **FLOAT32)
    # and the next segment, which still sees one of them
    ids = random_ids(2, 4, seed=2)
    assert_close("next", zero_start(ids, cache=memory).logits, model(ids, cache=zeros).logits, **FLOAT32)


@torch.no_grad()
def test_the_two_starts_differ_and_either_can_be_chosen() -> None:
    """C05: in the configuration (which defaults to the empty one) or for one memory."""
    ids = random_ids(2, 5)
    empty, zeros = make_model(), make_model(memory_init="zeros")
    assert empty.config.memory_init == "empty"
    states = [model.transformer(ids).last_hidden_state for model in (empty, zeros)]
    assert 0.01 < (states[0] - states[1]).abs().max() < 0.1
    chosen = empty(ids, cache=empty.init_memory(2, memory_init="zeros")).logits
    assert_close("zeros chosen for a memory", chosen, zeros(ids).logits, **FLOAT32)
    chosen = zeros(ids, cache=zeros.init_memory(2, memory_init="empty")).logits
    assert_close("empty chosen for a memory", chosen, empty(ids).logits, **FLOAT32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@both_starts
@torch.no_grad()
def test_a_new_memory_is_the_same_as_none(memory_init: str, dtype: torch.dtype) -> None:
    """C14: bit by bit; what it comes to hold has the device and dtype of the model."""
    model = make_model(memory_init=memory_init).to(dtype)
    ids = random_ids(3, 7)
    memory = model.init_memory(3)
    output = model(ids, cache=memory)
    assert torch.equal(output.logits, model(ids).logits)
    assert returned_cache(output) is memory
    for layer in memory.layers:
        for tensor in layer.tensors.values():
            assert (tensor.dtype, tensor.device) == (dtype, model.device)


@torch.no_grad()
def test_no_memory_at_all_can_be_asked_for_again_and_again() -> None:
    """C11: `mem_len=0`, feeding back whatever was returned; each call is independent."""
    model = make_model(mem_len=0, **LARGE_WEIGHTS)
    for cache in (None, model.init_memory(2), TransfoXLMemory(model.config, stores="hidden_states")):
        for seed in range(3):
            ids = random_ids(2, 5, seed=seed)
            output = model(ids, cache=cache)
            assert_close("logits", output.logits, model(ids, use_cache=False).logits, **FLOAT32)
            cache = returned_cache(output)
            assert cache is None or cache.stored_length == 0


def test_no_memory_at_all_trains() -> None:
    """C11"""
    model = make_model(mem_len=0, same_length=True, **LARGE_WEIGHTS).train()
    memory = model.init_memory(2)
    for seed in range(3):
        ids = random_ids(2, 5, seed=seed)
        loss = model(ids, labels=ids, cache=memory).loss
        assert_close("loss", loss, model(ids, labels=ids).loss, **FLOAT32)
        loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- layout


@torch.no_grad()
def test_entry_i_is_the_input_of_layer_i() -> None:
    """C15: `n_layer` tensors (mem_len, batch, d_model); the top output is not remembered."""
    model = make_model(memory_init="zeros")
    memory = model.init_memory(2, stores="hidden_states")
    output = model(random_ids(2, 5), cache=memory, output_hidden_states=True)
    mems = memory.to_mems()
    assert [list(mem.shape) for mem in mems] == [[6, 2, 32]] * 3
    assert len(output.hidden_states) == 4
    for layer in range(3):
        assert torch.equal(mems[layer][-5:].transpose(0, 1), output.hidden_states[layer])
        assert (mems[layer][0] == 0).all()


# --- one switch


@torch.no_grad()
def test_memory_is_on_unless_switched_off() -> None:
    """C16: `use_cache`, true by default; nothing to return without memory, or in train mode."""
    ids = random_ids(2, 5)
    model = make_model()
    assert model.config.use_cache
    cache = returned_cache(model(ids))
    assert cache is not None and cache.get_seq_length() == 5
    assert returned_cache(model(ids, use_cache=False)) is None
    assert returned_cache(make_model(use_cache=False)(ids)) is None
    assert returned_cache(make_model(use_cache=False)(ids, use_cache=True)) is not None
    assert returned_cache(make_model(mem_len=0)(ids)) is None
    assert returned_cache(model.train()(ids)) is None


@torch.no_grad()
def test_a_memory_that_is_given_is_used_whatever_the_switch_says() -> None:
    """C16: two flags never fight."""
    ids = random_ids(2, 5)
    for use_cache in (None, True, False):
        model = make_model(use_cache=False)
        memory = model.init_memory(2)
        model(ids, cache=memory, use_cache=use_cache)
        assert memory.stored_length == 5


@torch.no_grad()
def test_both_names_of_the_argument_are_one() -> None:
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(2, 9)
    memories = [model.init_memory(2) for _ in range(3)]
    for segment in (ids[:, :5], ids[:, 5:]):
        logits = [
            model(segment, cache=memories[0]).logits,
            model(segment, past_key_values=memories[1]).logits,
            model(segment, cache=memories[2], past_key_values=memories[2]).logits,
        ]
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@torch.no_grad()
def test_one_warning_where_a_cache_will_be_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """C16: a cache of the library given to a model that remembers nothing."""
    library_logging.warning_once.cache_clear()
    model = make_model(mem_len=0)
    ids = random_ids(2, 5)
    # the loggers of the library do not hand their messages on
    logger = logging.getLogger("hf_txl.modeling_transfo_xl")
    logger.addHandler(caplog.handler)
    try:
        for _ in range(3):
            logits = model(ids, cache=DynamicCache(config=make_config())).logits
    finally:
        logger.removeHandler(caplog.handler)
    warnings = {record.getMessage() for record in caplog.records}
    assert len(warnings) == 1 and "`cache` is ignored" in warnings.pop()
    assert_close("logits", logits, model(ids).logits, **FLOAT32)


# --- batches


@both_storages
@torch.no_grad()
def test_another_batch_size_is_refused_with_both_sizes(stores: str) -> None:
    """C07: never a crash deep inside, never broadcasting; the memory is as it was."""
    model = make_model()
    memory = model.init_memory(3, stores=stores)
    model(random_ids(3, 5), cache=memory)
    before = snapshot(memory)
    for batch_size in (2, 1, 4):
        with pytest.raises(ValueError, match=rf"`cache` must have the batch size of the input \({batch_size}\).* 3 "):
            model(random_ids(batch_size, 5), cache=memory)
    assert_same_state(memory, before)


@torch.no_grad()
def test_a_library_cache_of_another_batch_size_is_refused_with_both_sizes() -> None:
    """C07"""
    model = make_model()
    cache = returned_cache(model(random_ids(3, 5)))
    with pytest.raises(ValueError, match="`cache` .*batch size 2 .*batch size 3"):
        model(random_ids(2, 5), cache=cache)


def test_trainer_evaluates_ten_samples_in_batches_of_four(tmp_path: Any) -> None:
    """C07: the last batch is smaller; nothing of one batch is carried into the next."""
    model = make_model()
    samples = [{"input_ids": row, "labels": row} for row in random_ids(10, 7)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    metrics = Trainer(model=model, args=arguments, eval_dataset=samples).evaluate()
    with torch.no_grad():
        ids = torch.stack([sample["input_ids"] for sample in samples])
        expected = model(ids, labels=ids).loss
    assert metrics["eval_loss"] == pytest.approx(expected.item(), abs=1e-4)


@both_storages
@both_starts
@torch.no_grad()
def test_a_reset_row_starts_afresh_and_the_other_goes_on(stores: str, memory_init: str) -> None:
    """C12: agents end their episodes at different times."""
    model = make_model(memory_init=memory_init, **LARGE_WEIGHTS)
    first, second, third = random_ids(2, 8), random_ids(2, 4, seed=2), random_ids(2, 3, seed=3)
    memory, going_on = (model.init_memory(2, stores=stores) for _ in range(2))
    model(first, cache=memory)
    model(first, cache=going_on)
    memory.reset([0])
    afresh = model.init_memory(2, stores=stores)
    for ids in (second, third):
        logits = model(ids, cache=memory).logits
        assert_close("reset row", logits[0], model(ids, cache=afresh).logits[0], **FLOAT32)
        assert_close("other row", logits[1], model(ids, cache=going_on).logits[1], **FLOAT32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@both_storages
@both_starts
def test_what_a_reset_row_remembered_does_not_leak(memory_init: str, stores: str, value: float) -> None:
    """C12: not even NaN, in no output and no gradient."""
    model = make_model(memory_init=memory_init, **LARGE_WEIGHTS)
    embeddings = model.get_input_embeddings()(random_ids(2, 8)).detach()
    poisoned = embeddings.clone()
    poisoned[0, 5] = value
    ids = random_ids(2, 4, seed=2)
    results = []
    for inputs in (poisoned, embeddings):
        memory = model.init_memory(2, stores=stores)
        with torch.no_grad():
            model(inputs_embeds=inputs, cache=memory)
        memory.reset([0])
        with torch.set_grad_enabled(stores == "hidden_states"):
            losses = model(ids, cache=memory, labels=ids).losses
        gradients = {}
        if stores == "hidden_states":
            model.zero_grad()
            losses.sum().backward()
            gradients = gradients_of(model)
        results.append((losses, gradients))
    (losses, gradients), (expected_losses, expected_gradients) = results
    assert losses.isfinite().all()
    assert torch.equal(losses, expected_losses)
    for name, expected in expected_gradients.items():
        assert torch.equal(gradients[name], expected), name


@both_storages
@both_starts
@torch.no_grad()
def test_a_ragged_batch_equals_each_row_alone_over_several_segments(memory_init: str, stores: str) -> None:
    """Pads take no distance and are not remembered, wherever they lie."""
    model = make_model(memory_init=memory_init, **LARGE_WEIGHTS).double()
    ids = random_ids(3, 15)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    mask[1, 3:9] = 0
    mask[2, [0, 4, 6, 13, 14]] = 0
    segments = list(cut(15, 5))
    memory, twin = model.init_memory(3, stores=stores), slow_twin(model)
    # the reference leaves pads out
    slow_memory = twin.new_memory(3)
    for segment in segments:
        logits = model(ids[:, segment], attention_mask=mask[:, segment], cache=memory).logits.log_softmax(-1)
        read = twin.read(ids[:, segment], slow_memory, attention_mask=mask[:, segment])
        real = mask[:, segment].bool()
        assert_close("log-probabilities", logits[real], twin.scores(read, 5)[real], **FLOAT64)


# --- gradients


def test_memory_cuts_the_graph_and_backward_works_once_or_twice() -> None:
    """C10: two segments, one backward over both losses or one after each: the same gradients."""
    ids = random_ids(2, 10)
    gradients = []
    for at_once in (True, False):
        model = make_model(**LARGE_WEIGHTS)
        memory = model.init_memory(2)
        losses = []
        for segment in (ids[:, :5], ids[:, 5:]):
            losses.append(model(segment, labels=segment, cache=memory).loss)
            for layer in memory.layers:
                assert not layer.hidden_states.requires_grad and layer.hidden_states.grad_fn is None
            if not at_once:
                losses[-1].backward()
        if at_once:
            sum(losses).backward()
        gradients.append(gradients_of(model))
    for name, expected in gradients[0].items():
        assert_close(f"gradient of {name}", gradients[1][name], expected, **GRADIENTS)


def test_gradients_through_the_projections_of_the_memory_equal_the_reference() -> None:
    """C10: the states in memory are constants, their keys and values are not."""
    model = make_model(n_layer=2, **LARGE_WEIGHTS).double()
    twin = slow_twin(model)
    leaves = {name: p.detach().clone().requires_grad_(True) for name, p in model.named_parameters()}
    twin.weights = leaves
    memory, slow_memory = model.init_memory(1), twin.new_memory(1)
    first, second = random_ids(1, 5), random_ids(1, 4, seed=2)
    model(first, cache=memory)
    twin.read(first, slow_memory)
    model(second, cache=memory, shift_labels=second).losses.sum().backward()
    twin.losses(twin.read(second, slow_memory), second).sum().backward()
    for name, parameter in model.named_parameters():
        expected = leaves[name].grad
        # the loops never touch clusters without targets
        expected = torch.zeros_like(parameter) if expected is None else expected
        assert_close(f"gradient of {name}", parameter.grad, expected, **GRADIENTS)


# --- what is stored


def storage_after(memory: TransfoXLMemory) -> str | None:
    names = {name for layer in memory.layers for name in layer.tensors}
    return {frozenset(): None, frozenset({"hidden_states"}): "hidden_states"}.get(frozenset(names), "keys_values")


def test_auto_storage_follows_what_the_forward_records() -> None:
    """Hidden states where gradients are recorded; they become keys and values at the first single token without."""
    model = make_model(**LARGE_WEIGHTS)
    memory = model.init_memory(2)
    reference = model.init_memory(2, stores="hidden_states")

    def read(length: int, with_gradients: bool, seed: int) -> None:
        ids = random_ids(2, length, seed=seed)
        with torch.set_grad_enabled(with_gradients):
            logits, expected = model(ids, cache=memory).logits, model(ids, cache=reference).logits
        assert_close("logits", logits, expected, **FLOAT32)

    assert storage_after(memory) is None
    read(5, True, 1)
    assert storage_after(memory) == memory.storage == "hidden_states"
    read(3, False, 2)
    assert storage_after(memory) == "hidden_states"
    read(4, True, 3)
    assert storage_after(memory) == "hidden_states"
    read(1, False, 4)
    assert storage_after(memory) == memory.storage == "keys_values"
    read(5, False, 5)
    read(1, False, 6)
    assert storage_after(memory) == "keys_values"


@torch.no_grad()
def test_auto_storage_keeps_keys_and_values_in_inference() -> None:
    model = make_model()
    memory = model.init_memory(2)
    model(random_ids(2, 5), cache=memory)
    assert storage_after(memory) == "keys_values"


def test_auto_storage_asks_whether_the_model_records_gradients() -> None:
    """A frozen model in grad mode infers; one parameter or an input that needs a gradient trains."""
    model = make_model().requires_grad_(False)
    memory = model.init_memory(2)
    model(random_ids(2, 5), cache=memory)
    assert storage_after(memory) == "keys_values"
    embeddings = model.get_input_embeddings()(random_ids(2, 5)).requires_grad_(True)
    memory = model.init_memory(2)
    model(inputs_embeds=embeddings, cache=memory)
    assert storage_after(memory) == "hidden_states"
    model.transformer.layers[2].pos_ff.layer_norm.weight.requires_grad_(True)
    memory = model.init_memory(2)
    model(random_ids(2, 5), cache=memory)
    assert storage_after(memory) == "hidden_states"


def test_hidden_states_filled_without_gradients_are_trained_on() -> None:
    """Reinforcement learning: roll out first, train later; the gradient equals that of a warm-up with gradients."""
    model = make_model(**LARGE_WEIGHTS)
    first, second = random_ids(2, 5), random_ids(2, 6, seed=2)
    gradients = []
    for warm_up_with_gradients in (False, True):
        memory = model.init_memory(2, stores="hidden_states")
        with torch.set_grad_enabled(warm_up_with_gradients):
            model(first, cache=memory)
        model.zero_grad()
        model(second, cache=memory, labels=second).loss.backward()
        gradients.append(gradients_of(model))
    for name, expected in gradients[1].items():
        assert_close(f"gradient of {name}", gradients[0][name], expected, **GRADIENTS)


@pytest.mark.parametrize("stores", ["auto", "keys_values"])
def test_keys_and_values_met_by_training_are_refused(stores: str) -> None:
    """The gradient would silently lack the part that goes through the memory's projections."""
    model = make_model()
    memory = model.init_memory(2, stores=stores)
    with torch.no_grad():
        model(random_ids(2, 5), cache=memory)
    before = snapshot(memory)
    with pytest.raises(ValueError, match="`cache` must store hidden states where gradients are recorded"):
        model(random_ids(2, 5), cache=memory)
    assert_same_state(memory, before)
    with torch.no_grad():
        model(random_ids(2, 5), cache=memory)


def test_a_memory_for_keys_and_values_refuses_training_from_the_start() -> None:
    model = make_model()
    memory = model.init_memory(2, stores="keys_values")
    with pytest.raises(ValueError, match="`cache` must store hidden states where gradients are recorded"):
        model(random_ids(2, 5), cache=memory)
    assert memory.stored_length == 0


# --- a forward that fails


class LayerError(Exception):
    """Raised inside a layer by a test."""


def fail_in(module: Any) -> Any:
    def fail(*args: Any) -> None:
        raise LayerError

    return module.register_forward_hook(fail)


CALLS: dict[str, Callable[[Any, TransfoXLMemory], Any]] = {
    "token out of range": lambda model, memory: model(torch.full((2, 3), 99), cache=memory),
    "label out of range": lambda model, memory: model(random_ids(2, 3), labels=torch.full((2, 3), 99), cache=memory),
    "shifted label out of range": lambda model, memory: model(
        random_ids(2, 3), shift_labels=torch.full((2, 3), -1), cache=memory
    ),
    "labels of another shape": lambda model, memory: model(random_ids(2, 3), labels=random_ids(2, 2), cache=memory),
    "mask of another shape": lambda model, memory: model(
        random_ids(2, 3), attention_mask=torch.ones(2, 4), cache=memory
    ),
    "misspelt argument": lambda model, memory: model(random_ids(2, 3), lables=random_ids(2, 3), cache=memory),
    "empty segment": lambda model, memory: model(random_ids(2, 3)[:, :0], cache=memory),
}


@pytest.mark.parametrize("call", list(CALLS))
@both_storages
@torch.no_grad()
def test_a_refused_call_leaves_the_memory_as_it_was(stores: str, call: str) -> None:
    model = make_model()
    memory = model.init_memory(2, stores=stores)
    model(random_ids(2, 5), cache=memory)
    before = snapshot(memory)
    with pytest.raises((ValueError, TypeError)):
        CALLS[call](model, memory)
    assert_same_state(memory, before)


@pytest.mark.parametrize("where", ["embedding", "first layer", "last layer"])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("filled", ["hidden_states", "keys_values", "auto with gradients", "nothing"])
@torch.no_grad()
def test_an_exception_inside_a_layer_leaves_the_memory_as_it_was(filled: str, length: int, where: str) -> None:
    """A call either ends or never was: the same segment can be read again, also in training."""
    model = make_model(**LARGE_WEIGHTS)
    memory = model.init_memory(2, stores="auto" if filled in ("auto with gradients", "nothing") else filled)
    if filled != "nothing":
        with torch.set_grad_enabled(filled == "auto with gradients"):
            model(random_ids(2, 5), cache=memory)
    before, untouched = snapshot(memory), copy.deepcopy(memory)
    base = model.transformer
    modules = {"embedding": base.word_emb, "first layer": base.layers[0], "last layer": base.layers[2].pos_ff}
    hook = fail_in(modules[where])
    with pytest.raises(LayerError):
        model(random_ids(2, length, seed=2), cache=memory)
    hook.remove()
    assert_same_state(memory, before)
    for seed in (2, 3):
        ids = random_ids(2, length, seed=seed)
        assert torch.equal(model(ids, cache=memory).logits, model(ids, cache=untouched).logits)


# --- tensors of the caller


@both_storages
@both_starts
@torch.no_grad()
def test_tensors_of_the_caller_are_neither_changed_nor_kept(memory_init: str, stores: str) -> None:
    """Everything that was passed in is the same afterwards, and may then be overwritten."""
    model = make_model(memory_init=memory_init, **LARGE_WEIGHTS)
    for mask_dtype in (torch.bool, torch.long):
        for uses_embeddings in (False, True):
            memory, reference = (model.init_memory(2, stores=stores) for _ in range(2))
            ids = random_ids(2, 4)
            mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]).to(mask_dtype)
            given = {
                "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100),
                "shift_labels": ids.roll(-1, 1).masked_fill(mask == 0, -100),
                **({"inputs_embeds": model.get_input_embeddings()(ids)} if uses_embeddings else {"input_ids": ids}),
            }
            before = {name: tensor.clone() for name, tensor in given.items()}
            model(**{name: tensor.clone() for name, tensor in given.items()}, cache=reference)
            model(**given, cache=memory)
            for name, tensor in given.items():
                assert torch.equal(tensor, before[name]), name
                tensor.fill_(1)
            follow = random_ids(2, 3, seed=5)
            expected = model(follow, cache=reference).logits
            assert torch.equal(model(follow, cache=memory).logits, expected)


@both_storages
@torch.no_grad()
def test_overwriting_the_first_input_does_not_reach_the_memory(stores: str) -> None:
    """A segment as long as the memory, and shorter ones: what is kept is a copy, not a view of the input."""
    model = make_model(**LARGE_WEIGHTS)
    for length in (1, 4, 6, 9):
        embeddings = model.get_input_embeddings()(random_ids(2, length))
        memory, reference = (model.init_memory(2, stores=stores) for _ in range(2))
        model(inputs_embeds=embeddings.clone(), cache=reference)
        model(inputs_embeds=embeddings, cache=memory)
        embeddings.fill_(float("nan"))
        ids = random_ids(2, 3, seed=5)
        assert torch.equal(model(ids, cache=memory).logits, model(ids, cache=reference).logits)


@both_storages
@torch.no_grad()
def test_overwriting_returned_hidden_states_reaches_neither_memory_nor_input(stores: str) -> None:
    model = make_model(**LARGE_WEIGHTS)
    for length in (1, 4, 6, 9):
        embeddings = model.get_input_embeddings()(random_ids(2, length))
        before = embeddings.clone()
        memory, reference = (model.init_memory(2, stores=stores) for _ in range(2))
        model(inputs_embeds=embeddings, cache=reference)
        for states in model(inputs_embeds=embeddings, cache=memory, output_hidden_states=True).hidden_states:
            states.fill_(float("nan"))
        assert torch.equal(embeddings, before)
        ids = random_ids(2, 3, seed=5)
        assert torch.equal(model(ids, cache=memory).logits, model(ids, cache=reference).logits)


def test_embeddings_of_the_caller_get_their_gradient() -> None:
    model = make_model(**LARGE_WEIGHTS)
    embeddings = model.get_input_embeddings()(random_ids(2, 4)).detach().requires_grad_(True)
    model(inputs_embeds=embeddings, cache=model.init_memory(2)).logits.sum().backward()
    assert embeddings.grad.isfinite().all() and (embeddings.grad != 0).any()


def test_a_legacy_list_continues_where_it_was_left() -> None:
    """`from_mems` and `to_mems` in the middle of a stream; the given list is the same afterwards."""
    model = make_model(**LARGE_WEIGHTS)
    memory = model.init_memory(2)
    model(random_ids(2, 9), cache=memory)
    mems = memory.to_mems()
    before = [mem.clone() for mem in mems]
    again = TransfoXLMemory.from_mems(model.config, mems)
    ids = random_ids(2, 4, seed=2)
    assert torch.equal(model(ids, cache=again).logits, model(ids, cache=memory).logits)
    assert all(torch.equal(mem, old) for mem, old in zip(mems, before, strict=True))


# --- positions that are projected once


def change_position_projections(model: Any) -> None:
    with torch.no_grad():
        for layer in model.base_model.layers:
            layer.dec_attn.r_net.weight.data.mul_(3.0)


@pytest.mark.parametrize(
    "segments", [[1] * 40, [4, 4, 4, 4], [2, 5, 1, 1, 4, 1], [1, 3, 30, 1, 9, 40], [40, 1, 1], [1, 5, 20, 21, 21]]
)
@torch.no_grad()
def test_each_distance_is_projected_once_per_layer_and_stream(
    segments: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that is far from being needed."""
    model = make_model(mem_len=20, n_layer=2)
    projected: list[list[int]] = [[], []]
    project_relative_keys = TransfoXLAttention.project_relative_keys

    def note_distances(attention: TransfoXLAttention, table: PositionTable) -> torch.Tensor:
        projected[attention.layer_idx] += table.distances.tolist()
        return project_relative_keys(attention, table)

    monkeypatch.setattr(TransfoXLAttention, "project_relative_keys", note_distances)
    memory = model.init_memory(2)
    for _ in range(2):
        for length in segments:
            keys = memory.stored_length + length
            model(random_ids(2, length), cache=memory)
            for distances in projected:
                distant = [distance for distance in distances if distance > 0]
                assert len(set(distant)) == len(distant) and keys - 1 <= len(distant) < 2 * 20 + 2 * max(segments)
                # distance 0 stands for all future keys too
                assert distances.count(0) <= 1 + max(segments)
        # twice what a first segment needs, at most
        first = segments[0]
        memory.reset()
        projected[:] = [], []
        model(random_ids(2, first), cache=memory)
        assert all(max(distances) < 2 * first for distances in projected)
        memory.reset()
        projected[:] = [], []


RESTARTS: dict[str, Callable[[Any, TransfoXLMemory], TransfoXLMemory]] = {
    "a new memory": lambda model, memory: model.init_memory(2),
    "reset": lambda model, memory: (memory.reset(), memory)[1],
    "reset of all rows": lambda model, memory: (memory.reset([0, 1]), memory)[1],
    "reset row by row": lambda model, memory: (memory.reset([1]), memory.reset([0]), memory)[2],
    "reset by booleans": lambda model, memory: (memory.reset(torch.ones(2, dtype=torch.bool)), memory)[1],
    "reset of a branch": lambda model, memory: RESTARTS["reset of all rows"](model, copy.copy(memory)),
    "reset of a selection": lambda model, memory: RESTARTS["reset of all rows"](model, memory.select([1, 0])),
}


@pytest.mark.parametrize("mem_len", [0, 6])
@pytest.mark.parametrize("restart", list(RESTARTS))
@torch.no_grad()
def test_a_stream_that_starts_afresh_is_read_with_the_weights_of_now(restart: str, mem_len: int) -> None:
    """`weight.data.mul_` leaves no trace on a parameter, so nothing may be kept for longer than a stream."""
    model = make_model(mem_len=mem_len, **LARGE_WEIGHTS)
    ids = random_ids(2, 5)
    memory = model.init_memory(2)
    model(ids, cache=memory)
    for changes_before in (True, False):
        if changes_before:
            change_position_projections(model)
        memory = RESTARTS[restart](model, memory)
        if not changes_before:
            change_position_projections(model)
        expected = model(ids, cache=model.init_memory(2)).logits
        assert_close("logits", model(ids, cache=memory).logits, expected, **FLOAT32)


@torch.no_grad()
def test_segments_without_memory_are_read_with_the_weights_of_now() -> None:
    """C11: with `mem_len=0` every call is independent, so nothing is kept at all."""
    model = make_model(mem_len=0, **LARGE_WEIGHTS)
    memory = model.init_memory(2)
    ids = random_ids(2, 5)
    model(ids, cache=memory)
    change_position_projections(model)
    assert_close("logits", model(ids, cache=memory).logits, model(ids, use_cache=False).logits, **FLOAT32)


@torch.no_grad()
def test_a_failed_first_call_keeps_no_positions() -> None:
    model = make_model(**LARGE_WEIGHTS)
    memory = model.init_memory(2)
    ids = random_ids(2, 5)
    hook = fail_in(model.transformer.layers[2])
    with pytest.raises(LayerError):
        model(ids, cache=memory)
    hook.remove()
    change_position_projections(model)
    expected = model(ids, cache=model.init_memory(2)).logits
    assert_close("logits", model(ids, cache=memory).logits, expected, **FLOAT32)


@torch.no_grad()
def test_a_library_cache_that_is_reset_is_read_with_the_weights_of_now() -> None:
    model = make_model(**LARGE_WEIGHTS)
    ids = random_ids(2, 5)
    cache, fresh = (StaticCache(model.config, max_cache_len=16) for _ in range(2))
    model(ids, cache=cache)
    cache.reset()
    change_position_projections(model)
    assert_close("logits", model(ids, cache=cache).logits, model(ids, cache=fresh).logits, **FLOAT32)


@torch.no_grad()
def test_positions_dropped_in_train_mode_are_not_kept() -> None:
    """A stream read in train mode without gradients, then in eval mode: only what it remembers is noisy."""
    model = make_model(dropout=0.5, **LARGE_WEIGHTS)
    ids = random_ids(2, 5)
    memory = model.init_memory(2)
    model.train()
    model(ids, cache=memory)
    model.eval()
    memory.reset([0, 1])
    assert_close("logits", model(ids, cache=memory).logits, model(ids, use_cache=False).logits, **FLOAT32)


@torch.no_grad()
def test_branches_of_a_stream_do_not_disturb_each_other() -> None:
    """Two continuations of one past, read in turns."""
    model = make_model(**LARGE_WEIGHTS)
    memory = model.init_memory(2)
    start = random_ids(2, 7)
    model(start, cache=memory)
    branches = [copy.copy(memory), copy.copy(memory)]
    alone = [model.init_memory(2), model.init_memory(2)]
    for other in alone:
        model(start, cache=other)
    for seed in range(3):
        for number in range(2):
            ids = random_ids(2, 3, seed=10 * number + seed)
            logits = model(ids, cache=branches[number]).logits
            assert_close("logits", logits, model(ids, cache=alone[number]).logits, **FLOAT32)
    ids = random_ids(2, 3)
    fresh = model.init_memory(2)
    model(start, cache=fresh)
    assert_close("the past itself", model(ids, cache=memory).logits, model(ids, cache=fresh).logits, **FLOAT32)


# --- every model class, and the reference memory itself


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
@torch.no_grad()
def test_every_model_class_advances_the_memory(model_class: Any) -> None:
    model = make_model(model_class, same_length=True, **LARGE_WEIGHTS)
    ids = random_ids(2, 9)
    memory = model.init_memory(2)
    outputs = [model(ids[:, segment], cache=memory) for segment in cut(9, [5, 4])]
    assert all(returned_cache(output) is memory for output in outputs)
    assert_close("last output", outputs[-1][0][..., -1, :], model(ids)[0][..., -1, :], **FLOAT32)


@torch.no_grad()
def test_lengths_of_a_memory_win_over_those_of_the_configuration() -> None:
    """Training and evaluation differ in lengths without touching the model."""
    model = make_model(**LARGE_WEIGHTS).double()
    before = model.config.to_dict()
    twin = slow_twin(model)
    ids = random_ids(1, 12)
    for settings in ({"mem_len": 3}, {"clamp_len": 2}, {"same_length": True}, {"mem_len": 9, "memory_init": "zeros"}):
        memory, slow_memory = model.init_memory(1, **settings), [SlowMemory(model.config, **settings)]
        for segment in cut(12, [5, 7]):
            logits = model(ids[:, segment], cache=memory).logits.log_softmax(-1)
            expected = twin.scores(twin.read(ids[:, segment], slow_memory), segment.stop - segment.start)
            assert_close(f"{settings}", logits, expected, **FLOAT64)
    assert model.config.to_dict() == before

"""`torch.compile(fullgraph=True)` and `torch.export`, with and without a memory (C115).

Whether a call is one graph, and what autograd makes of it, does not depend on the backend: most tests use one that
generates no code, since generating it takes up to a minute each time. One test of the full set compiles for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree
from transformers import DynamicCache

from hf_txl import TransfoXLForSequenceClassification, TransfoXLMemory
from tests.helpers import assert_close
from tests.model.tiny_models import STARTS, STORAGES, random_ids, slow_log_probabilities, tiny_model
from tests.sizes import first, full

EAGER = 1e-5
# gradients are sums over all positions
EAGER_GRADIENTS = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Any, backend: str = "eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def assert_same_output(name: str, actual: Any, expected: Any, real: torch.Tensor | None = None) -> None:
    """Compare logits (at real tokens), losses and loss of two outputs."""
    real = torch.ones(expected.logits.shape[:2], dtype=torch.bool) if real is None else real
    assert_close(f"{name} logits", actual.logits[real], expected.logits[real], EAGER)
    if expected.loss is not None:
        assert_close(f"{name} losses", actual.losses, expected.losses, EAGER)
        assert_close(f"{name} loss", actual.loss, expected.loss, EAGER)


# ---- torch.compile ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("start", STARTS)
@torch.no_grad()
def test_a_compiled_forward_without_memory_equals_eager(start: str) -> None:
    model = tiny_model(memory_init=start)
    ids = random_ids(2, 7)
    run = compiled(model)
    actual = run(ids, use_cache=False)
    assert_same_output("forward", actual, model(ids, use_cache=False))
    (expected,) = slow_log_probabilities(model, [ids])
    assert_close("log-probabilities", actual.logits, expected, EAGER)
    labels = ids.clone()
    labels[0, 2:5] = -100
    assert_same_output("with labels", run(ids, labels=labels), model(ids, labels=labels))


@pytest.mark.parametrize("storage", first(STORAGES))
@torch.no_grad()
def test_a_compiled_forward_with_memory_equals_eager_over_segments(storage: str) -> None:
    model = tiny_model(memory_init="zeros")
    ids = random_ids(2, 16)
    memories = [TransfoXLMemory(model.config, stores=storage) for _ in range(2)]
    run = compiled(model)
    for start in range(0, 15, 5):
        segment, targets = ids[:, start : start + 5], ids[:, start + 1 : start + 6]
        outputs = [
            function(segment, cache=memory, shift_labels=targets)
            for function, memory in zip((run, model), memories, strict=True)
        ]
        assert_same_output(f"segment at {start}", *outputs)
    for name, tensor in memories[1].state_dict().items():
        if torch.is_tensor(tensor):
            assert_close(f"memory {name}", memories[0].state_dict()[name], tensor, EAGER)


@pytest.mark.full
@pytest.mark.parametrize("state", ["none", *STORAGES])
@torch.no_grad()
def test_a_compiled_forward_with_a_padding_mask_equals_eager(state: str) -> None:
    model = tiny_model()
    ids = random_ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    run = compiled(model)
    memories = [None if state == "none" else TransfoXLMemory(model.config, stores=state) for _ in range(2)]
    for segment in range(1 if state == "none" else 2):
        outputs = [
            function(ids, cache=memory, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
            for function, memory in zip((run, model), memories, strict=True)
        ]
        assert_same_output(f"segment {segment}", *outputs, real=mask.bool())


def train_step(function: Any, model: Any, memory: TransfoXLMemory, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    function(ids[:, :-1], cache=memory, shift_labels=ids[:, 1:]).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def filled_memories(model: Any, ids: torch.Tensor, number: int) -> list[TransfoXLMemory]:
    """Equal memories that are full, so that a step compiles once."""
    memories = [TransfoXLMemory(model.config, stores="hidden_states") for _ in range(number)]
    with torch.no_grad():
        for memory in memories:
            model(ids, cache=memory)
            assert memory.stored_length == model.config.mem_len
    return memories


@pytest.mark.parametrize("changes", [{}, full({"memory_init": "zeros", "pre_lnorm": True, "untie_r": False})])
def test_a_compiled_training_step_has_the_gradients_of_eager(changes: dict[str, Any]) -> None:
    model = tiny_model(**changes).train()
    ids = random_ids(2, 8)
    memories = filled_memories(model, ids, 2)
    # the backward pass is traced, too
    run = compiled(model, "aot_eager")
    for step in range(2):
        gradients = train_step(run, model, memories[0], ids)
        expected = train_step(model, model, memories[1], ids)
        for name, gradient in expected.items():
            assert_close(f"step {step} gradient of {name}", gradients[name], gradient, **EAGER_GRADIENTS)
    for actual, kept in zip(memories[0].to_mems(), memories[1].to_mems(), strict=True):
        assert not actual.requires_grad
        assert_close("memory", actual, kept, EAGER)


@pytest.mark.full
def test_generated_code_has_the_loss_and_gradients_of_eager() -> None:
    """The only default test that generates code: a training step, which holds a forward and a backward pass."""
    model = tiny_model(cutoffs=[20]).train()
    ids = random_ids(2, 8)
    memories = filled_memories(model, ids, 2)
    gradients = train_step(compiled(model, "inductor"), model, memories[0], ids)
    expected = train_step(model, model, memories[1], ids)
    for name, gradient in expected.items():
        assert_close(f"gradient of {name}", gradients[name], gradient, **EAGER_GRADIENTS)
    for actual, kept in zip(memories[0].to_mems(), memories[1].to_mems(), strict=True):
        assert_close("memory", actual, kept, EAGER)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["none", *STORAGES])
@torch.no_grad()
def test_generated_code_for_inference_equals_eager(state: str) -> None:
    model = tiny_model()
    ids = random_ids(2, 8)
    memories = [None if state == "none" else TransfoXLMemory(model.config, stores=state) for _ in range(2)]
    run = compiled(model, "inductor")
    for segment in range(1 if state == "none" else 3):
        outputs = [
            function(ids, cache=memory, labels=ids) for function, memory in zip((run, model), memories, strict=True)
        ]
        assert_same_output(f"segment {segment}", *outputs)


@pytest.mark.full
@torch.no_grad()
def test_a_compiled_classifier_equals_eager() -> None:
    model = tiny_model(TransfoXLForSequenceClassification, num_labels=3)
    ids = random_ids(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    labels = torch.tensor([2, 0])
    actual = compiled(model)(ids, attention_mask=mask, labels=labels)
    expected = model(ids, attention_mask=mask, labels=labels)
    assert_close("logits", actual.logits, expected.logits, EAGER)
    assert_close("loss", actual.loss, expected.loss, EAGER)


@pytest.mark.parametrize("start", first(STARTS))
@pytest.mark.parametrize("state", ["library", *map(full, STORAGES)])
@torch.no_grad()
def test_decoding_compiles_a_few_times_while_the_memory_grows_and_never_again(state: str, start: str) -> None:
    """Single tokens: nothing stored, one position, any number of them; no other program for a full memory."""
    model = tiny_model(memory_init=start, mem_len=60)
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(step)
        return graph.forward

    run = torch.compile(model, fullgraph=True, backend=backend)
    caches: list[Any] = [
        DynamicCache(config=model.config) if state == "library" else TransfoXLMemory(model.config, stores=state)
        for _ in range(2)
    ]
    ids = random_ids(2, 75)
    for step in range(75):
        outputs = [
            function(ids[:, step : step + 1], cache=memory, logits_to_keep=1)
            for function, memory in zip((run, model), caches, strict=True)
        ]
        assert_same_output(f"step {step}", *outputs)
    # step 60 is the first with a full memory
    assert compilations == [0, 1, 2]
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        named = [layer.__dict__ if state == "library" else layer.tensors for layer in layers]
        for name in {"keys", "values", "hidden_states"} & {*named[1]}:
            assert named[1][name].shape[-2] == 60
            assert_close(name, named[0][name], named[1][name], EAGER)


# ---- torch.export ----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("start", STARTS)
@torch.no_grad()
def test_an_exported_program_of_ids_equals_eager(start: str) -> None:
    model = tiny_model(memory_init=start)
    program = torch.export.export(model, (random_ids(2, 7),)).module()
    ids = random_ids(2, 7, seed=3)
    assert_same_output("program", program(ids), model(ids))


@pytest.mark.full
@torch.no_grad()
def test_an_exported_program_with_a_mask_equals_eager() -> None:
    model = tiny_model()
    ids = random_ids(2, 6)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    program = torch.export.export(model, (), inputs).module()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    output = program(input_ids=ids, attention_mask=mask)
    assert_same_output("program", output, model(ids, attention_mask=mask), real=mask.bool())


@pytest.mark.full
@torch.no_grad()
def test_an_exported_program_takes_batches_and_lengths_that_it_was_not_traced_with() -> None:
    model = tiny_model(memory_init="zeros")
    ids = random_ids(2, 7)
    shape = {0: Dim("batch", min=1, max=8), 1: Dim("time", min=3, max=64)}
    inputs = {"input_ids": ids, "labels": ids}
    exported = torch.export.export(model, (), inputs, dynamic_shapes={"input_ids": shape, "labels": shape})
    program = exported.module()
    for batch_size, length in ((1, 3), (3, 13), (8, 64)):
        other = random_ids(batch_size, length, seed=length)
        output = program(input_ids=other, labels=other)
        assert_same_output(f"{batch_size} x {length}", output, model(other, labels=other))


def memory_after(model: Any, ids: torch.Tensor, storage: str) -> TransfoXLMemory:
    memory = TransfoXLMemory(model.config, stores=storage)
    model(ids, cache=memory)
    return memory


@pytest.mark.parametrize("storage", first(STORAGES))
@torch.no_grad()
def test_an_exported_program_of_ids_and_memory_equals_eager_over_segments(storage: str) -> None:
    model = tiny_model(memory_init="zeros")
    past, ids = random_ids(2, 7), random_ids(2, 12, seed=2)
    traced, memory, expected_memory = (memory_after(model, past, storage) for _ in range(3))
    exported = torch.export.export(model, (), {"input_ids": ids[:, :4], "cache": traced})
    # the memory is an input and an output of the program, tensor by tensor
    num_tensors = len(pytree.tree_leaves(memory))
    assert num_tensors == 2 * (1 if storage == "hidden_states" else 2)
    assert len(exported.graph_signature.user_inputs) == 1 + num_tensors
    program = exported.module()
    for start in range(0, 12, 4):
        segment = ids[:, start : start + 4]
        output = program(input_ids=segment, cache=memory)
        memory = output.past_key_values
        assert isinstance(memory, TransfoXLMemory)
        assert_same_output(f"segment at {start}", output, model(segment, cache=expected_memory))
    assert_close(
        "memory",
        next(iter(memory.layers[1].tensors.values())),
        next(iter(expected_memory.layers[1].tensors.values())),
        EAGER,
    )


@pytest.mark.full
@pytest.mark.parametrize("storage", STORAGES)
@torch.no_grad()
def test_an_exported_program_takes_segments_of_any_length_with_a_full_memory(storage: str) -> None:
    """Shorter than the memory, as long, and longer."""
    model = tiny_model()
    past = random_ids(2, 7)
    traced, memory, expected_memory = (memory_after(model, past, storage) for _ in range(3))
    shapes = {"input_ids": {1: Dim("time", min=1, max=64)}, "cache": [None] * len(pytree.tree_leaves(memory))}
    inputs = {"input_ids": random_ids(2, 9), "cache": traced}
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for length in (2, 5, 1, 13):
        segment = random_ids(2, length, seed=length)
        output = program(input_ids=segment, cache=memory)
        memory = output.past_key_values
        assert_same_output(f"segment of {length}", output, model(segment, cache=expected_memory))


@torch.no_grad()
def test_a_memory_survives_being_flattened() -> None:
    """As a pytree: settings and progress are part of the structure, tensors have their names."""
    model = tiny_model()
    ids = random_ids(2, 4)
    memory = memory_after(model, ids, "hidden_states")
    with_names, _ = pytree.tree_flatten_with_path(memory)
    assert [path[0].key for path, _ in with_names] == ["layers.0.hidden_states", "layers.1.hidden_states"]
    leaves, structure = pytree.tree_flatten(memory)
    again = pytree.tree_unflatten(leaves, structure)
    assert_same_output("next segment", model(ids, cache=again), model(ids, cache=memory))
    assert pytree.tree_structure(memory) == pytree.tree_structure(again)
    assert pytree.tree_structure(memory) != pytree.tree_structure(TransfoXLMemory(model.config))


@pytest.fixture
def caches_as_pytrees() -> Iterator[None]:
    """The library's own registration, taken back: other tests see caches as they are without it."""
    exporter = pytest.importorskip("transformers.exporters.exporter_dynamo")
    before = set(pytree.SUPPORTED_NODES)
    exporter.register_cache_pytrees_for_model(tiny_model())
    yield
    for kind in set(pytree.SUPPORTED_NODES) - before:
        pytree._deregister_pytree_node(kind)


@pytest.mark.full
@pytest.mark.usefixtures("caches_as_pytrees")
@torch.no_grad()
def test_a_cache_of_the_library_holds_the_same_tensors_in_eager_calls_and_in_an_exported_program() -> None:
    """R22: exporters turn every attribute of a cache into inputs and outputs; ours are no part of its state."""
    model = tiny_model(memory_init="zeros", same_length=True)
    ids = random_ids(2, 9)
    eager = model(ids[:, :4], use_cache=True).past_key_values
    # as many as the library's own layers have
    plain, states = DynamicCache(config=model.config), torch.zeros(2, 3, 4, 6)
    for layer_idx in range(model.config.n_layer):
        plain.update(states, states, layer_idx)
    num_leaves = len(pytree.tree_leaves(plain))
    program = torch.export.export(model, (), {"input_ids": ids[:, :4], "use_cache": True}).module()
    exported = program(input_ids=ids[:, :4], use_cache=True).past_key_values
    for step in range(4, 9):
        leaves, structure = pytree.tree_flatten(eager)
        others, other_structure = pytree.tree_flatten(exported)
        assert len(leaves) == len(others) == num_leaves and structure == other_structure
        for ours, theirs in zip(leaves, others, strict=True):
            assert_close(f"stored before token {step}", theirs, ours, EAGER)
        # rolls in both: what came out of a program goes on in eager mode
        outputs = [model(ids[:, step : step + 1], cache=cache) for cache in (eager, exported)]
        assert_same_output(f"token {step}", outputs[1], outputs[0])
    again = pytree.tree_unflatten(*pytree.tree_flatten(eager))
    segment = random_ids(2, 3, seed=3)
    step = torch.export.export(model, (), {"input_ids": segment, "cache": eager}).module()
    output = step(input_ids=segment, cache=again)
    assert_same_output("a step of a program", output, model(segment, cache=eager))
    assert len(pytree.tree_leaves(output.past_key_values)) == num_leaves

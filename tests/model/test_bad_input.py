"""Wrong calls: the error names the argument, what it must be and what it is, and nothing has changed."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_txl import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLMemory,
    TransfoXLModel,
)
from tests.t0 import make_model, random_ids, returned_cache

MODEL_CLASSES = [TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification]
every_class = pytest.mark.parametrize("model_class", MODEL_CLASSES)
STORAGES = ["hidden_states", "keys_values"]


def tensors_in(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of an argument: its own, or those of a cache."""
    if isinstance(value, torch.Tensor):
        return {"": value}
    if isinstance(value, TransfoXLMemory):
        return {name: tensor for name, tensor in value.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if isinstance(value, DynamicCache):
        return {
            f"{index}.{name}": getattr(layer, name)
            for index, layer in enumerate(value.layers)
            for name in ("keys", "values")
            if getattr(layer, name) is not None
        }
    return {}


def refusal(call: Callable[..., Any], error: type[Exception] = ValueError, **arguments: Any) -> str:
    """The message of a refused call, after which all that was passed in must be as it was."""
    before = {
        name: {key: tensor.clone() for key, tensor in tensors_in(value).items()} for name, value in arguments.items()
    }
    settings = {name: repr(value) for name, value in arguments.items() if isinstance(value, TransfoXLMemory)}
    with pytest.raises(error) as caught:
        call(**arguments)
    for name, value in arguments.items():
        now = tensors_in(value)
        assert now.keys() == before[name].keys(), name
        for key, tensor in before[name].items():
            # on the meta device there are no values to compare
            assert now[key].is_meta or torch.equal(now[key], tensor), f"{name} {key}"
        if name in settings:
            assert repr(value) == settings[name]
    return str(caught.value)


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert re.search(part, message), f"{part!r} is not in {message!r}"


# --- ids and labels out of range


@every_class
@pytest.mark.parametrize(("ids", "lowest", "highest"), [([3, 99], 3, 99), ([-1, 5], -1, 5), ([-100, 7], -100, 7)])
def test_token_ids_out_of_range(ids: list[int], lowest: int, highest: int, model_class: Any) -> None:
    message = refusal(make_model(model_class), input_ids=torch.tensor([ids, [0, 1]]))
    assert_says(message, "`input_ids`", "between 0 and 98", "99", f"from {min(lowest, 0)} to {highest}")


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
@pytest.mark.parametrize("wrong", [99, -1, -101, 10**6])
@pytest.mark.parametrize("fields", [{}, {"cutoffs": [], "div_val": 1}])
def test_labels_out_of_range(fields: dict[str, Any], wrong: int, name: str) -> None:
    """-100 is allowed; clusters must not hide a wrong label."""
    ids = random_ids(2, 5)
    labels = ids.clone()
    labels[0, 1] = -100
    labels[1, 3] = wrong
    message = refusal(make_model(**fields), input_ids=ids, **{name: labels})
    assert_says(message, f"`{name}`", "between 0 and 98", "-100", str(wrong))


@pytest.mark.parametrize("wrong", [3, -1, 99])
def test_classes_out_of_range(wrong: int) -> None:
    model = make_model(TransfoXLForSequenceClassification, num_labels=3)
    message = refusal(model, input_ids=random_ids(2, 5), labels=torch.tensor([1, wrong]))
    assert_says(message, "`labels`", "between 0 and 2", str(wrong))


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (5,)])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_another_shape(name: str, shape: tuple[int, ...]) -> None:
    labels = random_ids(*shape)
    for inputs in ({"input_ids": random_ids(2, 5)}, {"inputs_embeds": torch.randn(2, 5, 32)}):
        message = refusal(make_model(), **inputs, **{name: labels})
        assert_says(message, f"`{name}`", r"\[2, 5\]", re.escape(str(list(shape))))


def test_classes_of_another_batch_size() -> None:
    model = make_model(TransfoXLForSequenceClassification, num_labels=3)
    message = refusal(model, input_ids=random_ids(2, 5), labels=torch.tensor([1, 0, 2]))
    assert_says(message, "`labels`", "2", "3")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("name", ["input_ids", "labels", "shift_labels"])
def test_ids_that_are_no_integers(name: str, dtype: torch.dtype) -> None:
    arguments = {"input_ids": random_ids(2, 5), name: random_ids(2, 5).to(dtype)}
    message = refusal(make_model(), TypeError, **arguments)
    assert_says(message, f"`{name}`", "integers", str(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
@torch.no_grad()
def test_every_integer_type_is_an_id(dtype: torch.dtype) -> None:
    """No error from inside the embedding."""
    model = make_model()
    ids = random_ids(2, 5)
    assert torch.equal(model(ids.to(dtype)).logits, model(ids).logits)


# --- shapes


@every_class
@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_empty_segments(shape: tuple[int, int], model_class: Any) -> None:
    model = make_model(model_class)
    message = refusal(model, input_ids=torch.zeros(*shape, dtype=torch.long))
    assert_says(message, "`input_ids`", "at least one token", re.escape(str(list(shape))))
    message = refusal(model, inputs_embeds=torch.zeros(*shape, 32))
    assert_says(message, "`inputs_embeds`", "at least one token", re.escape(str([*shape, 32])))


@every_class
@pytest.mark.parametrize("shape", [(5,), (2, 5, 1), ()])
def test_ids_of_another_rank(shape: tuple[int, ...], model_class: Any) -> None:
    message = refusal(make_model(model_class), input_ids=torch.ones(shape, dtype=torch.long))
    assert_says(message, "`input_ids`", r"\(batch_size, sequence_length\)", re.escape(str(list(shape))))


@every_class
@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 31), (2, 5, 32, 1), (32,)])
def test_embeddings_of_another_shape(shape: tuple[int, ...], model_class: Any) -> None:
    message = refusal(make_model(model_class), inputs_embeds=torch.ones(shape))
    assert_says(
        message, "`inputs_embeds`", r"\(batch_size, sequence_length, d_model=32\)", re.escape(str(list(shape)))
    )


@every_class
@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (5,), (2, 1, 5, 5)])
def test_masks_of_another_shape(shape: tuple[int, ...], model_class: Any) -> None:
    message = refusal(make_model(model_class), input_ids=random_ids(2, 5), attention_mask=torch.ones(shape))
    assert_says(message, "`attention_mask`", r"[\[(]2, 5[\])]", re.escape(str(list(shape))))


# --- both or neither


@every_class
def test_both_kinds_of_input(model_class: Any) -> None:
    message = refusal(make_model(model_class), input_ids=random_ids(2, 5), inputs_embeds=torch.zeros(2, 5, 32))
    assert_says(message, "`input_ids`", "`inputs_embeds`", "(?i)exactly one", "both")


@every_class
def test_no_input_at_all(model_class: Any) -> None:
    for arguments in ({}, {"attention_mask": torch.ones(2, 5)}):
        message = refusal(make_model(model_class), **arguments)
        assert_says(message, "`input_ids`", "`inputs_embeds`", "(?i)exactly one", "neither")


def test_labels_without_any_input() -> None:
    message = refusal(make_model(), labels=random_ids(2, 5))
    assert_says(message, "`input_ids`", "`inputs_embeds`", "neither")


# --- names


@pytest.mark.parametrize(
    ("model_class", "wrong", "right"),
    [
        (TransfoXLForCausalLM, "lables", "labels"),
        (TransfoXLForCausalLM, "label", "labels"),
        (TransfoXLForCausalLM, "shift_label", "shift_labels"),
        (TransfoXLForCausalLM, "inputs_ids", "input_ids"),
        (TransfoXLForCausalLM, "atention_mask", "attention_mask"),
        (TransfoXLForCausalLM, "past_key_value", "past_key_values"),
        (TransfoXLForCausalLM, "output_hidden_state", "output_hidden_states"),
        (TransfoXLForSequenceClassification, "lables", "labels"),
        (TransfoXLForSequenceClassification, "input_embeds", "inputs_embeds"),
        (TransfoXLModel, "caches", "cache"),
        (TransfoXLModel, "use_caches", "use_cache"),
    ],
)
def test_misspelt_arguments(model_class: Any, wrong: str, right: str) -> None:
    """A run without a loss, or without memory, would be the alternative."""
    value = random_ids(2, 5)
    message = refusal(make_model(model_class), TypeError, input_ids=random_ids(2, 5), **{wrong: value})
    assert_says(message, f"`{wrong}`", f"`{right}`", model_class.__name__)


@pytest.mark.parametrize(
    ("model_class", "name"),
    [
        (TransfoXLModel, "labels"),
        (TransfoXLModel, "shift_labels"),
        (TransfoXLForSequenceClassification, "shift_labels"),
        (TransfoXLForCausalLM, "token_type_ids"),
        (TransfoXLForCausalLM, "something_else"),
    ],
)
def test_arguments_of_other_models(model_class: Any, name: str) -> None:
    """Nobody would read them."""
    message = refusal(make_model(model_class), TypeError, input_ids=random_ids(2, 5), **{name: random_ids(2, 5)})
    assert_says(message, f"`{name}`", model_class.__name__)


@every_class
def test_memory_under_its_old_name(model_class: Any) -> None:
    mems = [torch.zeros(6, 2, 32)] * 3
    message = refusal(make_model(model_class), TypeError, input_ids=random_ids(2, 5), mems=mems)
    assert_says(message, "`mems`", "`cache=TransfoXLMemory.from_mems")


@every_class
def test_two_different_caches(model_class: Any) -> None:
    model = make_model(model_class)
    memories = {"cache": model.init_memory(2), "past_key_values": model.init_memory(2)}
    message = refusal(model, input_ids=random_ids(2, 5), **memories)
    assert_says(message, "`cache`", "`past_key_values`", "differ")


@every_class
def test_bidirectional_attention(model_class: Any) -> None:
    message = refusal(make_model(model_class), input_ids=random_ids(2, 5), is_causal=False)
    assert_says(message, "`is_causal`", "True", "False")


# --- memory of another model, batch, type or device


@torch.no_grad()
def memory_of(model: Any, stores: str, batch_size: int = 2, seed: int = 1) -> TransfoXLMemory:
    memory = model.init_memory(batch_size, stores=stores)
    model(random_ids(batch_size, 5, seed=seed), cache=memory)
    return memory


@torch.no_grad()
def library_cache_of(model: Any, batch_size: int = 2) -> Any:
    return returned_cache(model(random_ids(batch_size, 5), use_cache=True))


def held_by(kind: str, model: Any, batch_size: int = 2) -> Any:
    return library_cache_of(model, batch_size) if kind == "library" else memory_of(model, kind, batch_size)


every_cache = pytest.mark.parametrize("kind", [*STORAGES, "library"])


@every_cache
@every_class
@torch.no_grad()
def test_memory_of_another_batch_size(model_class: Any, kind: str) -> None:
    model = make_model(model_class)
    message = refusal(model, input_ids=random_ids(2, 5), cache=held_by(kind, model, batch_size=3))
    assert_says(message, "`cache`", r"batch size.*\b2\b.*\b3\b")


@torch.no_grad()
def test_memory_made_for_another_batch_size() -> None:
    """Before it has read anything."""
    model = make_model()
    message = refusal(model, input_ids=random_ids(2, 5), cache=model.init_memory(3))
    assert_says(message, "`cache`", r"batch size.*\b2\b.*\b3\b")


@every_cache
@pytest.mark.parametrize("n_layer", [2, 4])
@torch.no_grad()
def test_memory_of_another_number_of_layers(n_layer: int, kind: str) -> None:
    message = refusal(make_model(), input_ids=random_ids(2, 5), cache=held_by(kind, make_model(n_layer=n_layer)))
    assert_says(message, "`cache`", r"`n_layer` \(3\)", str(n_layer))


@torch.no_grad()
def test_empty_memory_of_another_number_of_layers() -> None:
    message = refusal(make_model(), input_ids=random_ids(2, 5), cache=make_model(n_layer=2).init_memory(2))
    assert_says(message, "`cache`", r"`n_layer` \(3\)", "2")


@every_cache
@torch.no_grad()
def test_memory_of_another_type(kind: str) -> None:
    cache = held_by(kind, make_model().double())
    message = refusal(make_model(), input_ids=random_ids(2, 5), cache=cache)
    assert_says(message, "`cache`", "torch.float32", "torch.float64")


@pytest.mark.parametrize("stores", STORAGES)
@torch.no_grad()
def test_memory_on_another_device(stores: str) -> None:
    model = make_model()
    memory = memory_of(model, stores).to("meta")
    message = refusal(model, input_ids=random_ids(2, 5), cache=memory)
    assert_says(message, "`cache`", "cpu", "meta")


@torch.no_grad()
def test_hidden_states_of_another_width() -> None:
    memory = memory_of(make_model(d_model=16, d_embed=16), "hidden_states")
    message = refusal(make_model(), input_ids=random_ids(2, 5), cache=memory)
    assert_says(message, "`cache`", "32", "16")


@pytest.mark.parametrize("kind", ["keys_values", "library"])
@torch.no_grad()
def test_keys_of_other_heads(kind: str) -> None:
    for fields in ({"n_head": 2}, {"d_head": 4}):
        cache = held_by(kind, make_model(**fields))
        message = refusal(make_model(), input_ids=random_ids(2, 5), cache=cache)
        assert_says(message, "`cache`", "4 heads", str(next(iter(fields.values()))))


@pytest.mark.parametrize("cache", [[torch.zeros(6, 2, 32)] * 3, (1, 2), "memory", torch.zeros(2)])
def test_what_is_no_memory(cache: Any) -> None:
    """A legacy list among others."""
    message = refusal(make_model(), TypeError, input_ids=random_ids(2, 5), cache=cache)
    assert_says(message, "`cache`", "TransfoXLMemory", type(cache).__name__)


# --- what a refused call leaves behind


@every_class
def test_a_refused_call_changes_no_weight_and_no_mode(model_class: Any) -> None:
    model = make_model(model_class).train()
    before = copy.deepcopy(model.state_dict())
    refusal(model, input_ids=torch.full((2, 5), 99))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@torch.no_grad()
def test_a_library_cache_is_as_it_was_after_a_refused_call() -> None:
    model = make_model()
    cache, untouched = library_cache_of(model), library_cache_of(model)
    for arguments in (
        {"input_ids": torch.full((2, 3), 99)},
        {"input_ids": random_ids(2, 3), "labels": torch.full((2, 3), 99)},
        {"input_ids": random_ids(2, 3), "attention_mask": torch.ones(2, 4)},
        {"input_ids": random_ids(3, 3)},
    ):
        refusal(model, cache=cache, **arguments)
    ids = random_ids(2, 4, seed=3)
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=untouched).logits)

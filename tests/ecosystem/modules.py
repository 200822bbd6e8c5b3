"""Small models of every kind, and everything that can be asked of one, for tests of what other tools do to modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from hf_txl import TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from tests.helpers import assert_close, cut
from tests.model.tiny_models import random_ids, tiny_model
from tests.sizes import full

# float32, sums of a few dozen numbers; what is compared are two orders of the same operations
EQUAL = {"atol": 2e-5, "rtol": 2e-5}
# a module that is passed over changes its result by far more than that
CHANGED = 1e-3

ONE_LAYER: dict[str, Any] = {"n_layer": 1, "cutoffs": [], "div_val": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # one table per cluster, each with a projection
    "clusters": {"d_embed": 12},
    # one table for all clusters, of which each has rows; one projection per cluster in the softmax
    "one table": {"n_layer": 1, "div_val": 1, "d_embed": 10, "memory_init": "zeros"},
    "plain": ONE_LAYER,
    "shared biases": {**ONE_LAYER, "untie_r": False},
    "pre_lnorm": {**ONE_LAYER, "pre_lnorm": True, "memory_init": "zeros", "same_length": True},
    "learned_relative": {**ONE_LAYER, "attention_kind": "learned_relative", "max_klen": 9},
    "shaw": {**ONE_LAYER, "attention_kind": "shaw", "max_relative_distance": 4},
    "huang": {**ONE_LAYER, "attention_kind": "huang", "max_relative_distance": 4},
    "absolute_sinusoid": {**ONE_LAYER, "attention_kind": "absolute_sinusoid"},
    "absolute_learned": {**ONE_LAYER, "attention_kind": "absolute_learned", "max_klen": 9},
}
# every attention kind and layout as a language model; the classes around the same layers where they differ
MODELS = [
    *((TransfoXLForCausalLM, name) for name in CONFIGURATIONS),
    (TransfoXLModel, "clusters"),
    (TransfoXLModel, "shared biases"),
    (TransfoXLForSequenceClassification, "one table"),
]
MODEL_IDS = [f"{model_class.__name__}-{name}" for model_class, name in MODELS]
# for tests that take a second or more a model: by default one table and one per cluster, shared biases, an absolute
# kind, the classifier
DEFAULT_IDS = [
    *(f"TransfoXLForCausalLM-{name}" for name in ("clusters", "shared biases", "absolute_learned")),
    "TransfoXLForSequenceClassification-one table",
]
SOME_MODELS = [
    pytest.param(*model, id=label) if label in DEFAULT_IDS else full(*model, id=label)
    for model, label in zip(MODELS, MODEL_IDS, strict=True)
]


class Mode(NamedTuple):
    """One way to call a model: in train mode or not, in segments behind a memory or at once, with targets or not."""

    training: bool
    memory: bool
    labels: bool


# with a memory of hidden states, which is the last segment's context and gets the gradients of it
TRAINING = Mode(training=True, memory=True, labels=True)
MODES = [
    Mode(training=False, memory=False, labels=True),
    Mode(training=False, memory=True, labels=True),
    Mode(training=True, memory=False, labels=False),
    TRAINING,
]


def small_model(model_class: Any, name: str, **changes: Any) -> Any:
    if model_class is TransfoXLForSequenceClassification:
        changes = {"num_labels": 3, **changes}
    if model_class is not TransfoXLForCausalLM:
        changes = {"n_layer": 1, **changes}
    return tiny_model(model_class, **{**CONFIGURATIONS[name], **changes})


def text(model: Any) -> torch.Tensor:
    """Two rows of 11 tokens, of all clusters."""
    ids = random_ids(2, 11, vocab_size=model.config.vocab_size)
    ids[:, 1:4] = torch.tensor([3, 17, 31])
    ids[:, 7:10] = torch.tensor([38, 5, 19])
    return ids


def read(model: Any, mode: Mode) -> dict[str, torch.Tensor]:
    """What a model says of a text, by name.

    Behind a memory in eval mode, all that a memory can do takes its turn: hidden states are stored while gradients are
    recorded, read without, turned into keys and values at a single token, and these are read by what follows.
    """
    model.train(mode.training)
    ids = text(model)
    # each position is scored
    targets = ids.roll(-1, dims=1)
    memory = model.init_memory(len(ids)) if mode.memory else None
    lengths = [11] if not mode.memory else [6, 5] if mode.training else [5, 3, 1, 2]
    parts: dict[str, list[torch.Tensor]] = {}
    for number, here in enumerate(cut(11, lengths)):
        labels: Any = {}
        if mode.labels and isinstance(model, TransfoXLForCausalLM):
            labels = {"shift_labels": targets[:, here]}
        elif mode.labels and isinstance(model, TransfoXLForSequenceClassification):
            labels = {"labels": torch.tensor([2, 0])}
        with torch.set_grad_enabled(mode.training or number == 0):
            output = model(ids[:, here], cache=memory, use_cache=False, **labels)
        for field in ("last_hidden_state", "logits", "losses"):
            if output.get(field) is not None:
                parts.setdefault(field, []).append(output[field])
    return {field: torch.cat(tensors, dim=1) for field, tensors in parts.items()}


def read_all(model: Any) -> dict[str, torch.Tensor]:
    """What a model says in every mode, with what it generates and what its memory holds."""
    was_training = model.training
    results = {f"{mode}: {key}": value for mode in MODES for key, value in read(model, mode).items()}
    model.eval()
    if isinstance(model, TransfoXLForCausalLM):
        ids = text(model)[:, :5]
        options: Any = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "pad_token_id": 0}
        for cache in (None, model.init_memory(2), model.init_memory(2, stores="hidden_states")):
            if cache is not None:
                with torch.no_grad():
                    model(text(model)[:, 5:], cache=cache)
            output = model.generate(
                ids, cache=cache, return_dict_in_generate=True, attention_mask=torch.ones_like(ids), **options
            )
            key = f"generate behind {getattr(cache, 'stores', None)}"
            results[f"{key}: logits"], results[f"{key}: ids"] = torch.stack(output.logits), output.sequences
        # greedy decoding without scores looks at the likeliest tokens alone
        results["generate: ids"] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train(was_training)
    return results


def assert_all_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], about: str = "", **tolerance: float
) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert_close(f"{about} {key}", actual[key], value, **(tolerance or EQUAL))


def untied(model: Any) -> Any:
    """A copy in which every module has weights of its own."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return model


def change_first(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """`values` with a tensor changed: itself, the first of a tuple, the first of a mapping (an output of a model)."""
    if torch.is_tensor(values):
        return change(values)
    if isinstance(values, dict):
        changed = type(values)(**values) if isinstance(values, ModelOutput) else dict(values)
        for key in [key for key, value in values.items() if torch.is_tensor(value)]:
            changed[key] = change(values[key])
        return changed
    index = next(index for index, value in enumerate(values) if torch.is_tensor(value))
    return tuple(change(value) if place == index else value for place, value in enumerate(values))


def ramp(value: torch.Tensor) -> torch.Tensor:
    """Numbers from -1 to 1 over the features: not zero where a state is, and a normalisation does not undo them."""
    return torch.linspace(-1, 1, value.shape[-1] if value.dim() else 1, dtype=value.dtype).reshape(value.shape[-1:])


def change_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Another first input: other states, or ids in reverse order."""

    def change(value: torch.Tensor) -> torch.Tensor:
        return 1.25 * value + 0.3 * ramp(value) if value.is_floating_point() else value.flip(-1)

    if any(torch.is_tensor(value) for value in args):
        return change_first(change, args), kwargs
    return args, change_first(change, kwargs)


def change_output(output: Any) -> Any:
    """Another first output."""
    return change_first(lambda value: 1.25 * value + 0.2 * ramp(value), output)


class Changed(nn.Module):
    """A user's module around another: nothing but its `forward` can be used, so it has to be called."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.inner = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = change_input(args, kwargs)
        return change_output(self.inner(*args, **kwargs))

"""Modules and weights that a user puts in the place of others, for a while or for good."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_txl import TransfoXLForCausalLM
from tests.ecosystem.modules import (
    MODES,
    TRAINING,
    Changed,
    assert_all_close,
    read,
    read_all,
    small_model,
    text,
    untied,
)
from tests.helpers import assert_close

names = pytest.mark.parametrize("name", ["clusters", "one table", "plain", "pre_lnorm"])


class Called(nn.Module):
    """A module without effect that can be called and nothing else."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    return {key: module for key, module in model.named_modules() if isinstance(module, nn.Linear)}


@names
@pytest.mark.parametrize("bias", ["one where there was none", "none where there was one"])
def test_linear_layers_with_and_without_bias(bias: str, name: str) -> None:
    """A bias counts for the memory and for zero states too, and none is needed."""
    for layer_name in linear_layers(small_model(TransfoXLForCausalLM, name)):
        model = untied(small_model(TransfoXLForCausalLM, name))
        layer: Any = model.get_submodule(layer_name)
        if (layer.bias is None) != bias.startswith("one"):
            continue
        other = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is None)
        with torch.no_grad():
            other.weight.copy_(layer.weight)
            if other.bias is not None:
                other.bias.normal_()
        model.set_submodule(layer_name, other)
        expected = copy.deepcopy(model)
        expected.set_submodule(layer_name, Called(copy.deepcopy(other)))
        for mode in MODES:
            assert_all_close(read(model, mode), read(expected, mode), f"`{layer_name}` in {mode}:")


class ScaledLinear(nn.Linear):
    """A user's subclass."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return 1.25 * super().forward(states)


@names
def test_subclasses_of_linear(name: str) -> None:
    model = untied(small_model(TransfoXLForCausalLM, name))
    expected = copy.deepcopy(model)
    for key, layer in linear_layers(model).items():
        layer.__class__ = ScaledLinear
        with torch.no_grad():
            for parameter in expected.get_submodule(key).parameters():
                parameter.mul_(1.25)
    assert_all_close(read_all(model), read_all(expected))


@pytest.mark.parametrize("activation", [nn.GELU(), nn.Identity(), nn.ReLU6(), nn.ReLU(inplace=True)])
def test_another_activation(activation: nn.Module) -> None:
    """In train mode too, where activation and dropout are one function."""
    model = small_model(TransfoXLForCausalLM, "clusters")
    expected = copy.deepcopy(model)
    for layer, other in zip(model.transformer.layers, expected.transformer.layers, strict=True):
        layer.pos_ff.CoreNet[1] = activation
        other.pos_ff.CoreNet = Called(nn.Sequential(*layer.pos_ff.CoreNet))
    for mode in MODES:
        assert_all_close(read(model, mode), read(expected, mode), str(mode))


def test_dropout_taken_out() -> None:
    """`nn.Identity` for each dropout: train mode then equals a model without dropout."""
    model = small_model(TransfoXLForCausalLM, "clusters", dropout=0.5)
    assert torch.allclose(*(read(model, TRAINING)["losses"] for _ in range(2))) is False
    for key, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            model.set_submodule(key, nn.Identity())
    assert_all_close(read(model, TRAINING), read(small_model(TransfoXLForCausalLM, "clusters"), TRAINING))


def test_dropout_in_eval_mode_and_of_other_strength() -> None:
    """Monte-Carlo dropout (only dropout in train mode), dropout switched off by mode, and a changed `p`."""
    model = small_model(TransfoXLForCausalLM, "clusters", dropout=0.5)
    without = small_model(TransfoXLForCausalLM, "clusters")
    ids = text(model)

    def dropouts() -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, nn.Dropout)]

    model.eval()
    for module in dropouts():
        module.train()
    one, other = (model(ids).logits for _ in range(2))
    assert (one - other).abs().max() > 0.1
    model.train()
    for module in dropouts():
        module.eval()
    assert_close("switched off", model(ids).logits, without.train()(ids).logits, atol=2e-5)
    model.train()
    for module in dropouts():
        module.p = 0.0
    assert_close("of strength 0", model(ids).logits, without.train()(ids).logits, atol=2e-5)


@names
def test_functional_call(name: str) -> None:
    """`torch.func.functional_call` with other weights is a model with those; gradients flow to them."""
    model = untied(small_model(TransfoXLForCausalLM, name))
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    weights = {key: value.detach().clone().requires_grad_() for key, value in expected.named_parameters()}
    ids = text(model)
    for training in (False, True):
        model.train(training), expected.train(training)
        memories = model.init_memory(2, stores="hidden_states"), model.init_memory(2, stores="hidden_states")
        for segment in ids.split(6, dim=1):
            output = torch.func.functional_call(model, weights, (segment,), {"cache": memories[0], "labels": segment})
            other = expected(segment, cache=memories[1], labels=segment)
            assert_close("losses", output.losses, other.losses, atol=2e-5, rtol=2e-5)
        expected.zero_grad()
        other.loss.backward()
        gradients = torch.autograd.grad(output.loss, list(weights.values()), allow_unused=True)
        for (key, parameter), gradient in zip(expected.named_parameters(), gradients, strict=True):
            assert (gradient is None) == (parameter.grad is None), key
            if gradient is not None:
                assert_close(f"gradient of {key}", gradient, parameter.grad, atol=1e-4, rtol=1e-4)


@names
def test_a_model_within_another_module(name: str) -> None:
    """The whole model and each of its children behind modules that only call."""
    model = small_model(TransfoXLForCausalLM, name)
    expected = {mode: read(model, mode) for mode in MODES}
    for key, module in list(model.named_modules()):
        if key and not isinstance(module, nn.ModuleList):
            model.set_submodule(key, Called(module))
            assert_all_close(read(model, TRAINING), expected[TRAINING], key)
            model.set_submodule(key, module)
    model.transformer.layers[0].dec_attn.r_net = Changed(model.transformer.layers[0].dec_attn.r_net)
    assert (read(model, TRAINING)["losses"] - expected[TRAINING]["losses"]).abs().max() > 1e-2

"""Whatever stands between a model and one of its weights acts, for every module: hooks, adapters, parametrizations.

`ROWS` has a row for each module by its name. A new module without a row fails the walk, and so does a module that is
called in no mode. The right answers: a model in which the module is replaced by a user's own, which can only be called
(`Changed`), and a model whose weights are changed in place.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from hf_txl import TransfoXLForCausalLM
from tests.ecosystem.modules import (
    CHANGED,
    MODEL_IDS,
    MODELS,
    MODES,
    SOME_MODELS,
    TRAINING,
    Changed,
    assert_all_close,
    change_input,
    change_output,
    ramp,
    read,
    small_model,
    untied,
)
from tests.helpers import assert_close

walk = pytest.mark.parametrize("model_class, name", MODELS, ids=MODEL_IDS)
walk_some = pytest.mark.parametrize("model_class, name", SOME_MODELS)


class Row(NamedTuple):
    """What is expected of a module.

    Args:
        acts_on: Results that the module is part of, a regular expression of their names; None: never called.
        reason: Why it is never called.
    """

    acts_on: str | None
    reason: str = ""


EVERYTHING = Row(r"")
HEAD = Row(r"logits|losses")
CONTAINER = Row(None, "a container, whose members are called in turn")

# by the name within its model, without `transformer.`
ROWS: dict[str, Row] = {
    r"": EVERYTHING,
    r"word_emb": EVERYTHING,
    r"word_emb\.emb_layers": CONTAINER,
    r"word_emb\.emb_layers\.\d+": EVERYTHING,
    r"word_emb\.emb_projs": EVERYTHING,
    r"layers": CONTAINER,
    r"layers\.\d+": EVERYTHING,
    r"layers\.\d+\.dec_attn": EVERYTHING,
    r"layers\.\d+\.dec_attn\.(qkv_net|q_net|kv_net|r_net|o_net|layer_norm|drop)": EVERYTHING,
    r"layers\.\d+\.pos_ff": EVERYTHING,
    r"layers\.\d+\.pos_ff\.(CoreNet|CoreNet\.\d+|layer_norm)": EVERYTHING,
    r"drop": EVERYTHING,
    r"crit": HEAD,
    r"crit\.out_layers": CONTAINER,
    r"crit\.out_layers\.\d+": HEAD,
    r"crit\.out_projs": HEAD,
    r"score": HEAD,
}


def row_of(name: str) -> Row:
    within = "" if name == "transformer" else name.removeprefix("transformer.")
    rows = [row for pattern, row in ROWS.items() if re.fullmatch(pattern, within)]
    assert len(rows) == 1, f"`{name}` must have one row in ROWS, but has {len(rows)}"
    return rows[0]


def is_empty(module: nn.Module) -> bool:
    """A dictionary of projections that this configuration has none of."""
    return isinstance(module, nn.ParameterDict) and len(module) == 0


@walk
def test_every_module_has_a_row(model_class: Any, name: str) -> None:
    for module_name, _ in small_model(model_class, name).named_modules():
        row = row_of(module_name)
        assert (row.acts_on is None) == bool(row.reason)


@walk_some
def test_hooks_on_every_module_act(model_class: Any, name: str) -> None:
    """A forward pre-hook and a forward hook act in every mode, and do what another module in that place does."""
    model = small_model(model_class, name)
    without = {mode: read(model, mode) for mode in MODES}
    wrong = []
    for module_name, module in list(model.named_modules()):
        row = row_of(module_name)
        if row.acts_on is None or is_empty(module):
            continue
        handles = [
            module.register_forward_pre_hook(lambda _, args, kwargs: change_input(args, kwargs), with_kwargs=True),
            module.register_forward_hook(lambda _, args, output: change_output(output)),
        ]
        hooked = {mode: read(model, mode) for mode in MODES}
        for handle in handles:
            handle.remove()
        if module_name:
            model.set_submodule(module_name, Changed(module))
        for mode in MODES:
            for key, value in hooked[mode].items():
                if re.search(row.acts_on, key) and not differ(value, without[mode][key]):
                    wrong.append(f"hooks on `{module_name}` do not act on {key} in {mode}")
            if module_name:
                try:
                    assert_all_close(hooked[mode], read(model, mode), f"`{module_name}` in {mode}:")
                except Exception as error:
                    wrong.append(f"{type(error).__name__}: `{module_name}` in {mode}: {error}")
        if module_name:
            model.set_submodule(module_name, module)
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong)


def differ(actual: torch.Tensor, other: torch.Tensor) -> bool:
    return float((actual - other).detach().abs().max()) > CHANGED


def test_a_hook_that_only_looks_sees_each_call() -> None:
    """Forward hooks for all modules at once (profilers, interpretability tools) see each module of a training step."""
    model = small_model(TransfoXLForCausalLM, "clusters")
    seen: set[nn.Module] = set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.add(module))
    try:
        for mode in MODES:
            seen.clear()
            read(model, mode)
            for module_name, module in model.named_modules():
                if row_of(module_name).acts_on is not None:
                    assert module in seen, f"`{module_name}` in {mode}"
    finally:
        handle.remove()


@pytest.mark.parametrize("module_class", [nn.Linear, nn.Embedding, nn.ReLU, nn.Dropout, nn.LayerNorm])
def test_a_hook_on_all_modules_acts(module_class: Any) -> None:
    """A hook for all modules does what a hook on each of a class does."""
    model = small_model(TransfoXLForCausalLM, "one table")

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return change_output(output) if type(module) is module_class else None

    for mode in MODES:
        handles = [torch.nn.modules.module.register_module_forward_hook(after)]
        globally = read(model, mode)
        handles[0].remove()
        handles = [module.register_forward_hook(after) for module in model.modules()]
        assert_all_close(globally, read(model, mode), str(mode))
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["clusters", "one table"])
def test_backward_hooks_on_every_module_fire(name: str) -> None:
    model = small_model(TransfoXLForCausalLM, name)
    fired: set[str] = set()
    names = [key for key, module in model.named_modules() if row_of(key).acts_on is not None and not is_empty(module)]
    for module_name in names:
        module = model.get_submodule(module_name)
        module.register_full_backward_hook(lambda *_, module_name=module_name: fired.add(module_name))
    sum_of(read(model, TRAINING)).backward()
    # it returns no tensor but a mapping, of which torch finds none
    assert fired | {"", "transformer"} == {*names}


def sum_of(results: dict[str, torch.Tensor]) -> torch.Tensor:
    """One number with gradients: results weighted so that a constant under softmax does not cancel."""
    total: Any = 0.0
    for value in results.values():
        total = total + (value * ramp(value)).sum() + value.square().sum()
    return total


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    sum_of(read(model, TRAINING)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@walk_some
def test_lora_on_every_matrix_acts(model_class: Any, name: str) -> None:
    """An adapter does in every mode what its product does within the weight, and gets the gradient of that."""
    peft = pytest.importorskip("peft")
    base = untied(small_model(model_class, name))
    targets = [key for key, module in base.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    adapted = peft.inject_adapter_in_model(config, copy.deepcopy(base))
    without = {mode: read(base, mode) for mode in MODES}
    for mode in MODES:
        assert_all_close(read(adapted, mode), without[mode], f"without effect, {mode}:")
    for target in targets:
        layer, matrix = adapted.get_submodule(target), base.get_submodule(target)
        is_linear = isinstance(matrix, nn.Linear)
        down, up = (
            (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            if is_linear
            else (layer.lora_embedding_A["default"], layer.lora_embedding_B["default"])
        )
        torch.nn.init.normal_(down)
        torch.nn.init.normal_(up, std=0.2)
        # outputs are W x + 2 B A x, with alpha / r = 2
        change = 2 * (up @ down if is_linear else (up @ down).t())
        with torch.no_grad():
            matrix.weight += change
        for mode in (MODES[1], TRAINING):
            changed = read(adapted, mode)
            assert_all_close(changed, read(base, mode), f"`{target}`, {mode}:")
            for key, value in changed.items():
                if re.search(str(row_of(target).acts_on), key):
                    assert differ(value, without[mode][key]), f"`{target}` does not act on {key} in {mode}"
        with torch.no_grad():
            matrix.weight -= change
            up.zero_()
    of_weights, of_adapters = gradients(base), gradients(adapted)
    for target in targets:
        layer, matrix = adapted.get_submodule(target), base.get_submodule(target)
        of_weight = of_weights[f"{target}.weight"]
        if isinstance(matrix, nn.Linear):
            expected = 2 * of_weight @ layer.lora_A["default"].weight.t()
            actual = of_adapters[f"{target}.lora_B.default.weight"]
        else:
            expected = 2 * (layer.lora_embedding_A["default"] @ of_weight).t()
            actual = of_adapters[f"{target}.lora_embedding_B.default"]
        assert expected.abs().max() > CHANGED
        assert_close(f"gradient of the adapter of `{target}`", actual, expected, atol=1e-4, rtol=1e-3)


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.25 * weight + 0.05 * ramp(weight)


@walk_some
def test_parametrizations_of_every_parameter_act(model_class: Any, name: str) -> None:
    """Biases, tables and projections too: what counts is what the module's attribute gives."""
    base = untied(small_model(model_class, name))
    parameters = [
        (module_name, parameter_name)
        for module_name, module in base.named_modules()
        for parameter_name, _ in module.named_parameters(recurse=False)
    ]
    for module_name, parameter_name in parameters:
        model, expected = copy.deepcopy(base), copy.deepcopy(base)
        parametrize.register_parametrization(model.get_submodule(module_name), parameter_name, Scaled())
        with torch.no_grad():
            parameter = getattr(expected.get_submodule(module_name), parameter_name)
            parameter.copy_(Scaled()(parameter))
        about = f"`{module_name}.{parameter_name}`"
        assert_all_close(read(model, TRAINING), read(expected, TRAINING), about)
    # all at once, in every mode and with gradients: those of the original are 1.25 times those of what is used
    model, expected = copy.deepcopy(base), copy.deepcopy(base)
    for module_name, parameter_name in parameters:
        parametrize.register_parametrization(model.get_submodule(module_name), parameter_name, Scaled())
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.copy_(Scaled()(parameter))
    for mode in MODES:
        assert_all_close(read(model, mode), read(expected, mode), f"all, {mode}:")
    actual, of_expected = gradients(model), gradients(expected)
    assert len(actual) == len(of_expected)
    for module_name, parameter_name in parameters:
        prefix = f"{module_name}." if module_name else ""
        assert_close(
            f"gradient of `{module_name}.{parameter_name}`",
            actual[f"{prefix}parametrizations.{parameter_name}.original"],
            1.25 * of_expected[f"{prefix}{parameter_name}"],
            atol=1e-3,
            rtol=1e-3,
        )


@pytest.mark.parametrize("normalise", [weight_norm, spectral_norm])
@pytest.mark.parametrize("name", ["clusters", "one table"])
def test_normalised_weights(normalise: Any, name: str) -> None:
    model = untied(small_model(TransfoXLForCausalLM, name))
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Embedding):
            normalise(module)
            with torch.no_grad():
                for original in list(module.parametrizations.weight.parameters())[:1]:
                    original.mul_(1.5)
    model.eval()
    expected = untied(small_model(TransfoXLForCausalLM, name))
    with torch.no_grad():
        for module_name, module in expected.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.copy_(model.get_submodule(module_name).weight)
    for mode in MODES:
        if not mode.training:
            assert_all_close(read(model, mode), read(expected, mode), str(mode))


@walk
def test_pruned_weights(model_class: Any, name: str) -> None:
    """Pruning computes a weight anew before each call of its module; what lies there before is the last call's."""
    model, expected = (untied(small_model(model_class, name)) for _ in range(2))
    for module_name, module in expected.named_modules():
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                mask = (torch.arange(parameter.numel()).view_as(parameter) % 3 != 0).to(parameter.dtype)
                pruned = model.get_submodule(module_name)
                prune.custom_from_mask(pruned, parameter_name, mask)
                with torch.no_grad():
                    # a step of an optimizer
                    getattr(pruned, f"{parameter_name}_orig").mul_(1.25)
                    parameter.mul_(1.25 * mask)
    for mode in MODES:
        assert_all_close(read(model, mode), read(expected, mode), str(mode))

"""Decides whether a weight may be read without calling its module.

A module's call may do more than the formula of its class: run hooks, load offloaded weights, add an adapter,
dequantise, or evaluate a parametrization. Faster formulations of a layer read weights directly, but only if `is_plain`
is true; otherwise the module is called.
"""

from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

# instance attributes that hold hooks, empty by default
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module], *parameters: str) -> bool:
    """Whether calling a module certainly computes the formula of its class on its own tensors.

    Args:
        module (`nn.Module`): The module.
        kind (`type`): The class whose formula is meant, such as `nn.Linear`.
        parameters (`str`): Parameters in the caller's formula, such as `"weight"` for a layer without bias.

    Returns:
        `bool`: `True` if the module is exactly of this class (adapters, parametrizations and most quantisers replace
        it), has no hooks, uses the class's `forward` (offloading replaces it on the instance), and has exactly these
        parameters (a user's layer may have a bias or lack one), which are plain `nn.Parameter`s (other quantisers and
        sharding use subclasses) and not on the meta device.
    """
    if type(module) is not kind:
        return False
    state = module.__dict__
    if "forward" in state or _has_any_global_hook() or any(state[hooks] for hooks in HOOKS):
        return False
    owns_others = any(value is not None and name not in parameters for name, value in state["_parameters"].items())
    return not owns_others and all(is_at_hand(state["_parameters"].get(name)) for name in parameters)


def is_at_hand(weight: Any) -> bool:
    """Whether a weight is a plain parameter in memory: not quantised, sharded, parametrized or offloaded."""
    return type(weight) is nn.Parameter and not weight.is_meta


__all__ = ["is_at_hand", "is_plain"]

"""When a weight may be read without calling the module that owns it.

A module's call may do more than the formula of its class: run hooks, fetch weights that are offloaded, add an adapter,
dequantise, or evaluate a parametrization. Faster formulations of a layer read weights directly, and each of them asks
`is_plain` first; everything else calls the module.
"""

from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

# instance attributes that hold hooks; a module has empty ones
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module], *parameters: str) -> bool:
    """Whether calling a module is certain to compute the formula of its class on the tensors that it holds.

    Args:
        module (`nn.Module`): The module.
        kind (`type`): The class whose formula is meant, such as `nn.Linear`.
        parameters (`str`): Those that the caller's formula reads, such as `"weight"` for a layer without a bias.

    Returns:
        `bool`: `True` if the module is exactly of that class (adapters, parametrizations and most quantisers replace
        it), has no hooks, keeps the class's `forward` (offloading replaces it on the instance), has these parameters
        and no others (a layer that a user put there may have a bias or lack one), and they are plain `nn.Parameter`s
        (other quantisers and sharding keep tensors of their own class in them) that are not on the meta device.
    """
    if type(module) is not kind:
        return False
    state = module.__dict__
    if "forward" in state or _has_any_global_hook() or any(state[hooks] for hooks in HOOKS):
        return False
    owns_others = any(value is not None and name not in parameters for name, value in state["_parameters"].items())
    return not owns_others and all(is_at_hand(state["_parameters"].get(name)) for name in parameters)


def is_at_hand(weight: Any) -> bool:
    """Whether a weight is a plain parameter with its values: not packed, sharded, computed or offloaded."""
    return type(weight) is nn.Parameter and not weight.is_meta


__all__ = ["is_at_hand", "is_plain"]

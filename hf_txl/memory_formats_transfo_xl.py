"""Formats of a memory: `mems` of transformers 2 to 4, `state_dict`, and the pytree that compilers use.

`TransfoXLMemory` documents them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from .configuration_transfo_xl import TransfoXLConfig
from .key_value_buffer_transfo_xl import newest_positions
from .memory_rows_transfo_xl import MemoryRows

SETTINGS = ("mem_len", "clamp_len", "same_length", "same_length_includes_oldest", "memory_init", "stores")
PROGRESS = ("_batch_size", "shortest")

# --- mems


def rows_from_mems(config: TransfoXLConfig, mems: Sequence[torch.Tensor], mem_len: int) -> MemoryRows:
    """Rows with the newest `mem_len` positions of `mems`, `(mem_time, batch_size, d_model)` per layer."""
    if len(mems) not in (config.n_layer, config.n_layer + 1):
        raise ValueError(f"`mems` must have `n_layer` ({config.n_layer}) entries, but has {len(mems)}.")
    mems = mems[: config.n_layer]
    shape = mems[0].shape
    if any(mem.dim() != 3 or mem.shape != shape or mem.shape[-1] != config.d_model for mem in mems):
        raise ValueError(
            f"`mems` must all have shape (mem_time, batch_size, {config.d_model}), but have "
            f"{[list(mem.shape) for mem in mems]}."
        )
    rows = MemoryRows(config.n_layer)
    if kept := min(mem_len, shape[0]):
        rows.shortest = kept
        for layer, mem in zip(rows.layers, mems, strict=True):
            layer.replace({"hidden_states": newest_positions(mem.transpose(0, 1), kept).detach().clone()})
    return rows


def mems_of(rows: MemoryRows, start_slots: int, zero_filled: bool) -> list[torch.Tensor]:
    """`mems` of stored hidden states, preceded by `start_slots` zero vectors; `[]` if nothing is stored."""
    if rows.storage == "keys_values":
        raise ValueError(
            "`to_mems` needs hidden states, but the memory stores keys and values; create it with "
            "`stores='hidden_states'`."
        )
    if rows.length == 0:
        return []
    mask = rows.real_mask()
    if mask is not None and not zero_filled and not mask.all():
        raise ValueError(
            f"`to_mems` needs streams of equal length, but they have {mask.sum(dim=1).tolist()} stored positions."
        )
    mems = []
    for layer in rows.layers:
        states = layer.tensors["hidden_states"]
        if mask is not None:
            states = states * mask[..., None]
        mems.append(F.pad(states, (0, 0, start_slots, 0)).transpose(0, 1))
    return mems


# --- state dict


def settings_of(memory: Any) -> dict[str, Any]:
    """Arguments of a memory, and its number of layers."""
    return {name: getattr(memory, name) for name in SETTINGS} | {"num_layers": len(memory.layers)}


def progress_of(memory: Any) -> dict[str, Any]:
    """State of a memory besides settings and tensors."""
    return {"_batch_size": memory.batch_size, "shortest": memory.rows.shortest}


def named_tensors(rows: MemoryRows) -> dict[str, torch.Tensor]:
    """Stored tensors by name, with a copy of the shared prefix for each row."""
    tensors = {
        f"layers.{layer_idx}.{name}": tensor
        for layer_idx, layer in enumerate(rows.layers)
        for name, tensor in layer.materialized().items()
    }
    return tensors if rows.lengths is None else {**tensors, "lengths": rows.lengths}


def rows_from_state(state: dict[str, Any], num_layers: int) -> MemoryRows:
    """Rows from a `state_dict`.

    Raises:
        ValueError: for another structure, which the message names.
    """
    if set(state["progress"]) != set(PROGRESS):
        raise ValueError(f"`state` must have the progress {list(PROGRESS)}, but has {list(state['progress'])}.")
    tensors: list[dict[str, Any]] = []
    for layer_idx in range(num_layers):
        prefix = f"layers.{layer_idx}."
        tensors.append({name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)})
    names = [sorted(of_layer) for of_layer in tensors]
    if names[0] not in ([], ["hidden_states"], ["keys", "values"]) or names != names[:1] * len(names):
        raise ValueError(
            "`state` must hold the same tensors for each layer (`hidden_states`; or `keys` and `values`; or none), "
            f"but holds {names}."
        )
    rows = MemoryRows(num_layers)
    rows.shortest = state["progress"]["shortest"]
    rows.lengths = state.get("lengths")
    for layer, of_layer in zip(rows.layers, tensors, strict=True):
        layer.replace(of_layer)
    return rows


# --- pytree: makes the tensors inputs and outputs of `torch.export` and `torch.compile`


def _flatten(memory: Any) -> tuple[list[torch.Tensor], Any]:
    named = named_tensors(memory.rows)
    return list(named.values()), (list(named), settings_of(memory), progress_of(memory))


def _flatten_with_keys(memory: Any) -> tuple[list[tuple[Any, torch.Tensor]], Any]:
    tensors, context = _flatten(memory)
    return [(pytree.MappingKey(name), tensor) for name, tensor in zip(context[0], tensors, strict=True)], context


def register_pytree(cls: Any, from_state: Callable[[dict[str, Any]], Any]) -> None:
    """Register a memory class as a pytree node; `from_state` builds a memory from a `state_dict`."""

    def unflatten(tensors: Iterable[Any], context: Any) -> Any:
        names, settings, progress = context
        return from_state({**dict(zip(names, tensors, strict=True)), "settings": settings, "progress": progress})

    pytree.register_pytree_node(
        cls,
        _flatten,
        unflatten,
        flatten_with_keys_fn=_flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__name__}",
    )


__all__ = [
    "SETTINGS",
    "mems_of",
    "named_tensors",
    "progress_of",
    "register_pytree",
    "rows_from_mems",
    "rows_from_state",
    "settings_of",
]

"""Tensors that a memory stores per batch row and layer, with the number of real positions and shared prefixes.

Rows are right-aligned: the newest position of each row is the last. Stored tensors are never changed in place, so
copies of a memory may share them.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from .key_value_buffer_transfo_xl import KeyValueBuffer
from .shared_prefix_transfo_xl import KeyValuePrefix, equal_groups

# B batch   S stored positions   H heads   D head size


class TransfoXLMemoryLayer(CacheLayerMixin):
    """Memory of a layer: `hidden_states` `(B, S, d_model)`, or `keys` and `values` `(B, H, S, D)`, or nothing yet.

    The first positions of keys and values may be a prefix that rows share; `keys` and `values` then hold the rest.
    """

    is_sliding = True
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None
        self.prefix: KeyValuePrefix | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors stored per row, by name; time is the second to last dimension."""
        named = {"hidden_states": self.hidden_states, "keys": self.keys, "values": self.values}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def materialized(self, rows: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """As `tensors`, with a copy of the shared prefix for each row, or only for these rows."""
        if self.prefix is None:
            if rows is None:
                return self.tensors
            return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        assert self.keys is not None and self.values is not None
        return dict(zip(("keys", "values"), self.prefix.materialize(self.keys, self.values, rows), strict=True))

    @property
    def stored_length(self) -> int:
        """Number of stored positions S, prefix included."""
        tensor = next(iter(self.tensors.values()), None)
        own_length = 0 if tensor is None else tensor.shape[-2]
        return own_length if self.prefix is None else own_length + self.prefix.length

    def replace(self, tensors: dict[str, torch.Tensor], prefix: KeyValuePrefix | None = None) -> None:
        """Replace everything stored."""
        self.hidden_states, self.keys, self.values = (
            tensors.get(name) for name in ("hidden_states", "keys", "values")
        )
        self.prefix = prefix
        self.is_initialized = bool(tensors)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: tensors are stored as they come."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not supported: the memory updates its layers."""
        raise TypeError(
            "A layer of a `TransfoXLMemory` is updated by its memory only; call the model with `cache=memory`."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the segment, which starts at 0 in every call."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Always 0: input ids never repeat stored ones."""
        return 0

    def get_max_length(self) -> int:
        return -1


class MemoryRows:
    """Stored positions of all layers, one stream per batch row.

    Args:
        num_layers (`int`): Number of layers of the model.
    """

    def __init__(self, num_layers: int):
        self.layers = [TransfoXLMemoryLayer() for _ in range(num_layers)]
        self.clear()

    def clear(self) -> None:
        """Store nothing."""
        for layer in self.layers:
            layer.replace({})
        # number of real positions per row; `None`: all stored positions are real
        self.lengths: torch.Tensor | None = None
        # a lower bound of `lengths` that needs no device synchronisation
        self.shortest = 0
        # holds keys and values, if there are free slots behind them
        self.buffer: KeyValueBuffer | None = None
        # compiled programs take one tensor per layer: after one has run, prefixes are no longer shared
        self.may_share = True

    def __copy__(self) -> "MemoryRows":
        branch = type(self).__new__(type(self))
        branch.__dict__.update(self.__dict__)
        branch.layers = [copy.copy(layer) for layer in self.layers]
        return branch

    # --- state

    @property
    def tensor(self) -> torch.Tensor | None:
        """One of the stored tensors, for its shape, dtype and device."""
        return next(iter(self.layers[0].tensors.values()), None)

    @property
    def length(self) -> int:
        """Number of stored positions S, the same in all layers."""
        return self.layers[0].stored_length

    @property
    def storage(self) -> str | None:
        """Storage mode: `"hidden_states"`, `"keys_values"`, or `None` if nothing is stored."""
        tensors = self.layers[0].tensors
        return None if not tensors else "hidden_states" if "hidden_states" in tensors else "keys_values"

    def real_mask(self) -> torch.Tensor | None:
        """Mask of the real positions, `(B, S)`; `None` if all are real."""
        if self.lengths is None:
            return None
        age = torch.arange(self.length, 0, -1, device=self.lengths.device)
        return age <= self.lengths[:, None]

    def lengths_of(self, batch_size: int) -> torch.Tensor:
        """Number of real positions of each row, `(B,)`."""
        if self.lengths is not None:
            return self.lengths
        assert self.tensor is not None
        return torch.full((batch_size,), self.length, device=self.tensor.device)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a function to each stored tensor."""
        for layer in self.layers:
            tensors = {name: function(tensor) for name, tensor in layer.tensors.items()}
            layer.replace(tensors, None if layer.prefix is None else layer.prefix.map(function))
        self.buffer = None

    # --- rows

    def index(self, rows: Sequence[int] | torch.Tensor, batch_size: int) -> torch.Tensor:
        """Indices of rows, as [`row_index`] gives them, on the device of the stored tensors."""
        return row_index(rows, batch_size, torch.device("cpu") if self.tensor is None else self.tensor.device)

    def reset(self, index: torch.Tensor, batch_size: int) -> None:
        """Remove everything stored for these rows."""
        self.materialize()
        self.lengths = self.lengths_of(batch_size).index_fill(0, index, 0)
        self.shortest = 0
        # removed values may be infinite or NaN, which a mask would not stop
        self.map(lambda tensor: tensor.index_fill(0, index, 0))

    def select(self, index: torch.Tensor) -> None:
        """Keep these rows, in this order; rows that are repeated equally often, consecutively, share a prefix."""
        if not self._share(index):
            self.materialize(index)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, index)

    def _share(self, index: torch.Tensor) -> bool:
        """Select rows as a shared prefix; returns `False` and changes nothing if these rows cannot share one."""
        if self.storage != "keys_values" or self.lengths is not None or not self.may_share:
            return False
        # the prefixes shared so far; a row without one becomes a prefix as a whole
        common = [layer.prefix or KeyValuePrefix(**layer.tensors, rows_each=1) for layer in self.layers]
        shared = equal_groups(index // common[0].rows_each)
        if shared is None:
            return False
        groups, rows_each = shared
        is_all = torch.equal(groups, torch.arange(len(common[0].keys), device=groups.device))
        for layer, prefix in zip(self.layers, common, strict=True):
            own = layer.tensors
            if layer.prefix is None:
                own = {name: tensor.narrow(-2, 0, 0) for name, tensor in own.items()}
            own = {name: tensor.index_select(0, index) for name, tensor in own.items()}
            prefix = dataclasses.replace(prefix, rows_each=rows_each)
            layer.replace(own, prefix if is_all else prefix.map(lambda states: states.index_select(0, groups)))
        self.buffer = None
        return True

    def materialize(self, rows: torch.Tensor | None = None) -> None:
        """Give each row its own copy of a shared prefix; with `rows`, keep only these rows."""
        if rows is None and self.layers[0].prefix is None:
            return
        for layer in self.layers:
            layer.replace(layer.materialized(rows))
        self.buffer = None

    @classmethod
    def concatenate(cls, parts: Sequence[tuple["MemoryRows", int]]) -> "MemoryRows":
        """The rows of several objects, each given with its number of rows, in order."""
        joined = copy.copy(max((rows for rows, _ in parts), key=lambda rows: rows.length))
        length = joined.length
        for layer_idx, layer in enumerate(joined.layers):
            stored = [rows.layers[layer_idx].materialized() for rows, _ in parts]
            tensors = {}
            for name, like in layer.tensors.items():
                padded = []
                for (_, batch_size), of_rows in zip(parts, stored, strict=True):
                    tensor = of_rows.get(name)
                    if tensor is None:
                        tensor = like.new_zeros(batch_size, *like.shape[1:-2], 0, like.shape[-1])
                    padded.append(F.pad(tensor, (0, 0, length - tensor.shape[-2], 0)))
                tensors[name] = torch.cat(padded)
            layer.replace(tensors)
        joined.buffer = None
        if joined.tensor is not None:
            device = joined.tensor.device
            joined.lengths = torch.cat(
                [
                    torch.zeros(size, dtype=torch.long, device=device)
                    if rows.tensor is None
                    else rows.lengths_of(size)
                    for rows, size in parts
                ]
            )
        joined.shortest = min(rows.shortest for rows, _ in parts)
        return joined


def row_index(rows: Sequence[int] | torch.Tensor, batch_size: int, device: torch.device) -> torch.Tensor:
    """Indices of batch rows, given as indices or as one boolean per row.

    Raises:
        ValueError: for other shapes and dtypes, and for indices out of range.
    """
    index = torch.as_tensor(rows, device=device)
    if index.dtype == torch.bool:
        if index.shape != (batch_size,):
            raise ValueError(
                f"`rows` must have one boolean per stream ({batch_size}), but has shape {list(index.shape)}."
            )
        return index.nonzero().flatten()
    # `uint8` may be meant as flags
    is_no_index = index.is_floating_point() or index.is_complex() or index.dtype == torch.uint8
    if index.dim() > 1 or (index.numel() and is_no_index):
        raise ValueError(
            "`rows` must be a list of indices or one boolean per stream, but has dtype "
            f"{index.dtype} and shape {list(index.shape)}."
        )
    index = index.long().flatten()
    if ((index < 0) | (index >= batch_size)).any():
        raise ValueError(f"`rows` must be between 0 and {batch_size - 1}, but is {index.tolist()}.")
    return index


__all__ = ["MemoryRows", "TransfoXLMemoryLayer", "row_index"]

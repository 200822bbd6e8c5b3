"""Segment memory: what each layer remembers of the segments it has read, one stream per batch row.

Follows section 3.2 of [Dai et al., 2019](https://arxiv.org/abs/1901.02860) and `_update_mems` of the original PyTorch
code. It stores layer *inputs*, through which training reaches the key and value projections, or the projected keys and
values, which inference need not compute again; the results are the same numbers. What is stored is never changed in
place, so copies may share tensors; new keys and values are written behind it (`RollingStorage`), and rows that go on
from the same text share what it left (`SharedStates`).
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from .configuration_transfo_xl import MEMORY_INITS, TransfoXLConfig, segment_window
from .rolling_transfo_xl import RollingStorage, claim_rolling
from .sharing_transfo_xl import SharedStates

# B batch   S stored positions   Q positions of a segment   H heads   D head size
STORAGES = ("auto", "hidden_states", "keys_values")
# what a saved memory has besides settings and tensors
PROGRESS = ("_batch_size", "shortest")


class TransfoXLMemoryLayer(CacheLayerMixin):
    """Memory of a layer: `hidden_states` `(B, S, d_model)`, or `keys` and `values` `(B, H, S, D)`, or nothing yet.

    The first positions of keys and values may be `shared` by rows; `keys` and `values` then begin behind them.
    """

    is_sliding = True
    is_compileable = False
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None
        self.shared: SharedStates | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is stored of each row, by name; time is the last dimension but one."""
        named = {"hidden_states": self.hidden_states, "keys": self.keys, "values": self.values}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def unshared(self, rows: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """As `tensors`, with a copy of what rows share for each row, or for each of these rows."""
        if self.shared is None:
            if rows is None:
                return self.tensors
            return {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}
        assert self.keys is not None and self.values is not None
        return dict(zip(("keys", "values"), self.shared.in_front_of(self.keys, self.values, rows), strict=True))

    @property
    def stored_length(self) -> int:
        """Stored positions S, shared ones included."""
        tensor = next(iter(self.tensors.values()), None)
        own_length = 0 if tensor is None else tensor.shape[-2]
        return own_length if self.shared is None else own_length + self.shared.length

    def replace(self, tensors: dict[str, torch.Tensor], shared: SharedStates | None = None) -> None:
        """Store these tensors and nothing else."""
        self.hidden_states, self.keys, self.values = (
            tensors.get(name) for name in ("hidden_states", "keys", "values")
        )
        self.shared = shared
        self.is_initialized = bool(tensors)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is allocated before there is something to keep."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "A layer of a `TransfoXLMemory` is written by its memory only; call the model with `cache=memory`."
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


@dataclass
class SegmentInProgress:
    """What a forward is about to write: nothing of the memory changes before the segment ends."""

    # which positions of memory and segment are real, `(B, S + Q)`, and an order that moves those to the right, still
    # in sequence; `None`: all of the segment is real
    real: torch.Tensor | None
    order: torch.Tensor | None
    # the memory after the segment, per layer
    staged: list[dict[str, torch.Tensor]]
    # where keys and values are appended in place: keys of layer 0, values of layer 0, keys of layer 1 …; the slots of
    # the segment, and those of memory and segment
    slots: tuple[torch.Tensor, ...] = ()
    full: tuple[torch.Tensor, ...] = ()


class TransfoXLMemory(Cache):
    """Memory of a Transformer-XL, passed to a model as `cache=`; a call of the model advances it.

    The model attends to all of it and, causally, to its own segment; with `same_length` to a sliding window. Lengths
    belong to the memory, so evaluation can use others than training without touching `model.config`.

    Args:
        config (`TransfoXLConfig`): Configuration of the model; gives the defaults of what follows.
        mem_len (`int`, *optional*): Positions M kept per layer.
        clamp_len (`int`, *optional*): Distances above it count as it; not used if 0 or below.
        same_length (`bool`, *optional*): Whether every position attends to the same number of keys.
        memory_init (`str`, *optional*): `"empty"` or `"zeros"`: what is remembered before the first token.
        stores (`str`, defaults to `"auto"`):
            `"hidden_states"` (needed where a memory filled without gradients is trained on), `"keys_values"`
            (inference), or `"auto"`: hidden states where the model's forward records gradients, else keys and values;
            such hidden states become keys and values at the first single-token step without gradients. Keys and values
            are frozen: after a change of the weights, `reset()` or start a new memory.
        batch_size (`int`, *optional*): Number of streams; taken from the first segment if not given.

    Example:

    ```python
    >>> memory = TransfoXLMemory(model.config)
    >>> for segment in stream.split(128, dim=1):
    ...     output = model(segment, cache=memory)
    ```
    """

    layers: list[TransfoXLMemoryLayer]  # type: ignore[assignment]

    def __init__(
        self,
        config: TransfoXLConfig,
        *,
        mem_len: int | None = None,
        clamp_len: int | None = None,
        same_length: bool | None = None,
        memory_init: str | None = None,
        stores: str = "auto",
        batch_size: int | None = None,
    ):
        # fields may have been set since it was made
        config.validate_architecture()
        super().__init__(layers=[TransfoXLMemoryLayer() for _ in range(config.n_layer)])
        self.mem_len = config.mem_len if mem_len is None else mem_len
        self.clamp_len = config.clamp_len if clamp_len is None else clamp_len
        self.same_length = config.same_length if same_length is None else same_length
        self.same_length_includes_oldest = config.same_length_includes_oldest
        self.memory_init = config.memory_init if memory_init is None else memory_init
        self.stores = stores
        self._batch_size = batch_size
        if not isinstance(self.mem_len, int) or self.mem_len < 0:
            raise ValueError(f"`mem_len` must be an int of 0 or more, but is {self.mem_len!r}.")
        if self.memory_init not in MEMORY_INITS:
            raise ValueError(f"`memory_init` must be one of {list(MEMORY_INITS)}, but is {self.memory_init!r}.")
        if config.is_absolute:
            if stores == "keys_values" or self.memory_init != "empty":
                raise ValueError(
                    f"`stores` must be 'hidden_states' or 'auto' and `memory_init` 'empty' for `attention_kind="
                    f"{config.attention_kind!r}`, whose positions change from call to call, but they are {stores!r} "
                    f"and {self.memory_init!r}."
                )
            self.stores = "hidden_states"
        if stores not in STORAGES:
            raise ValueError(f"`stores` must be one of {list(STORAGES)}, but is {stores!r}.")
        self._forget()

    def _forget(self) -> None:
        for layer in self.layers:
            layer.replace({})
        # real positions per row, right-aligned in the stored tensors; `None`: all of them are real
        self.lengths: torch.Tensor | None = None
        # a lower bound of `lengths` that is known without asking the device
        self.shortest = 0
        # projected position tables of the stream, kept as long as the keys are
        self.relative_keys: Any = None
        # where keys and values lie, if there is room behind them
        self.rolling: RollingStorage | None = None
        # a program knows one tensor per layer only: what it has read is not shared any more
        self.may_share = True
        self._segment: SegmentInProgress | None = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(stored_length={self.stored_length}, batch_size={self.batch_size}, "
            f"storage={self.storage!r}, mem_len={self.mem_len}, clamp_len={self.clamp_len}, "
            f"same_length={self.same_length}, memory_init={self.memory_init!r})"
        )

    # --- what the model asks

    @property
    def batch_size(self) -> Any:
        """Number of streams (`int`), `None` before the first segment."""
        return self._batch_size

    @property
    def window(self) -> int | None:
        """Keys a query may see, itself included, or `None` for all of memory and segment so far."""
        return segment_window(self.mem_len, self.same_length, self.same_length_includes_oldest)

    @property
    def stored_length(self) -> int:
        """Stored positions S, the same in all layers."""
        return self.layers[0].stored_length

    @property
    def storage(self) -> str | None:
        """What is stored now: `"hidden_states"`, `"keys_values"`, or `None` for nothing."""
        tensors = self.layers[0].tensors
        return None if not tensors else "hidden_states" if "hidden_states" in tensors else "keys_values"

    @property
    def start_slots(self) -> int:
        """Zero states attended to before the stored positions."""
        return self.mem_len - self.stored_length if self.memory_init == "zeros" else 0

    def stored_mask(self) -> torch.Tensor | None:
        """Which stored positions a row really has, `(B, S)`, or `None` if all."""
        if self.lengths is None:
            return None
        age = torch.arange(self.stored_length, 0, -1, device=self.lengths.device)
        return age <= self.lengths[:, None]

    def begin(self, inputs_embeds: torch.Tensor, segment_mask: torch.Tensor | None, records_gradients: bool) -> str:
        """Check the memory against a segment and decide what is stored.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): Input of the first layer.
            segment_mask (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): Real tokens.
            records_gradients (`bool`): Whether the forward that begins can be differentiated.

        Returns:
            `str`: `"hidden_states"` or `"keys_values"`: what this segment will be remembered by.

        Raises:
            ValueError: if the memory belongs to another batch, device, type or model, or holds keys and values where
                gradients are recorded.
        """
        self._check(inputs_embeds)
        if torch.compiler.is_compiling():
            self.may_share = False
        if segment_mask is not None or not self.may_share:
            self._unshare()
        if self.stores != "auto":
            storage = self.stores
        elif records_gradients:
            storage = self.storage or "hidden_states"
        else:
            # single tokens come in long rows: then it pays not to project the memory again each time
            goes_on = self.storage == "hidden_states" and inputs_embeds.shape[1] > 1
            storage = "hidden_states" if goes_on else "keys_values"
        if records_gradients and storage == "keys_values":
            raise ValueError(
                "`cache` must store hidden states where gradients are recorded, but holds keys and values: through "
                "them no gradient reaches the key and value projections from the memory, about half of it. "
                "Use `TransfoXLMemory(config, stores='hidden_states')`, or `torch.no_grad()` for inference."
            )
        real = order = None
        if segment_mask is not None:
            stored_mask = self.stored_mask()
            if stored_mask is None:
                real = F.pad(segment_mask, (self.stored_length, 0), value=True)
            else:
                real = torch.cat([stored_mask, segment_mask], dim=1)
            order = torch.argsort(real.int(), dim=1, stable=True)
        self._segment = SegmentInProgress(real, order, [{} for _ in self.layers])
        if self.storage == "keys_values" and order is None and not torch.compiler.is_compiling():
            self._roll(self._segment, inputs_embeds.shape[1])
        return storage

    def _roll(self, segment: SegmentInProgress, query_length: int) -> None:
        """Find slots for the keys and values of a segment behind those that are stored, if it is short."""
        stored = [tensor for layer in self.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        claimed = claim_rolling(stored, query_length, self.rolling)
        if claimed is None:
            self.rolling = None
            return
        self.rolling, first, end = claimed
        segment.slots = self.rolling.views(end - query_length, end)
        segment.full = self.rolling.views(first, end)
        kept = self.rolling.views(end - self._kept_length(stored[0].shape[-2], query_length), end)
        segment.staged = [
            dict(zip(("keys", "values"), pair, strict=True)) for pair in zip(*[iter(kept)] * 2, strict=True)
        ]

    def _check(self, inputs_embeds: torch.Tensor) -> None:
        batch_size, _, width = inputs_embeds.shape
        if self.batch_size not in (None, batch_size):
            raise ValueError(
                f"`cache` must have the batch size of the input ({batch_size}), but holds {self.batch_size} streams. "
                "`select(rows)` keeps some of them; `reset()` and a new memory start afresh."
            )
        stored = next(iter(self.layers[0].tensors.values()), None)
        if stored is None:
            return
        if stored.device != inputs_embeds.device:
            raise ValueError(
                f"`cache` must be on the device of the model ({inputs_embeds.device}), but is on {stored.device}; "
                "move it with `to(device)`."
            )
        if self.storage == "hidden_states" and (stored.shape[-1] != width or stored.dtype != inputs_embeds.dtype):
            raise ValueError(
                f"`cache` must hold states of width `d_model` ({width}) and dtype {inputs_embeds.dtype}, as the model "
                f"computes, but holds width {stored.shape[-1]} and dtype {stored.dtype}."
            )

    @property
    def real_mask(self) -> torch.Tensor | None:
        """Which positions of memory and the segment that began are real, `(B, S + Q)`, or `None` if the segment is."""
        return self._in_progress.real

    @property
    def _in_progress(self) -> SegmentInProgress:
        assert self._segment is not None, "a segment is read between `begin` and `commit`"
        return self._segment

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of memory and segment, `(B, H, S + Q, D)`; the newest are kept when the segment ends.

        Of a memory that rows share, those of the rows' own positions. Of one that stores hidden states, the new ones
        begin with those that the layer computed of the stored states.
        """
        segment, index = self._in_progress, 2 * layer_idx
        if segment.slots:
            for slots, new in zip(segment.slots[index : index + 2], (key_states, value_states), strict=True):
                check_keys(slots, new)
                slots.copy_(new)
            return segment.full[index], segment.full[index + 1]
        before = self.layers[layer_idx].tensors
        full = {}
        for name, new in (("keys", key_states), ("values", value_states)):
            stored = before.get(name)
            if stored is None:
                full[name] = new
            else:
                check_keys(stored, new)
                full[name] = torch.cat([stored, new], dim=2)
            segment.staged[layer_idx][name] = self._keep(stored, new, full[name])
        return full["keys"], full["values"]

    def write(self, layer_idx: int, hidden_states: torch.Tensor) -> None:
        """Remember the input of a layer, `(B, Q, d_model)`, without its gradient, when the segment ends."""
        stored = self.layers[layer_idx].hidden_states
        self._in_progress.staged[layer_idx]["hidden_states"] = self._keep(stored, hidden_states.detach(), None)

    def _keep(self, stored: torch.Tensor | None, new: torch.Tensor, full: torch.Tensor | None) -> torch.Tensor:
        """The newest `mem_len` real positions of each row, right-aligned; time is the last dimension but one."""
        stored_length, new_length = 0 if stored is None else stored.shape[-2], new.shape[-2]
        kept = self._kept_length(stored_length, new_length)
        order = self._in_progress.order
        if order is None and stored is not None and torch.compiler.is_compiling():
            # a program for segments of any length must not compare that length with the memory's
            full = torch.cat([stored, new], dim=-2) if full is None else full
            return full.narrow(-2, full.shape[-2] - kept, kept).clone(memory_format=torch.contiguous_format)
        if order is None:
            from_new = min(kept, new_length)
            newest = new.narrow(-2, new_length - from_new, from_new)
            if stored is None or kept == from_new:
                # a view would keep the whole segment alive, and a caller's hand on the model's hidden states
                return newest.clone(memory_format=torch.contiguous_format)
            if full is not None:
                return full.narrow(-2, full.shape[-2] - kept, kept)
            oldest = stored.narrow(-2, stored_length - (kept - from_new), kept - from_new)
            return torch.cat([oldest, newest], dim=-2)
        if full is None:
            full = new if stored is None else torch.cat([stored, new], dim=-2)
        index = order[:, full.shape[-2] - kept :].reshape(order.shape[0], *[1] * (full.dim() - 3), kept, 1)
        return full.gather(-2, index.expand(*full.shape[:-2], kept, full.shape[-1]))

    def _kept_length(self, stored_length: int, new_length: int) -> int:
        """Positions stored after a segment; a memory that is full stays full."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            # a program for a memory of any length must not ask whether it is full
            return torch.sym_min(self.mem_len, stored_length + new_length)
        return self.mem_len if stored_length >= self.mem_len else min(self.mem_len, stored_length + new_length)

    def commit(self, batch_size: int, query_length: int) -> None:
        """End a segment: what was staged becomes the memory. Until then a failed forward leaves it as it was."""
        kept = self._kept_length(self.stored_length, query_length)
        if self._in_progress.real is not None:
            self.lengths = self._in_progress.real.sum(dim=1).clamp(max=self.mem_len)
        else:
            self.shortest = self._kept_length(self.shortest, query_length)
            if self.lengths is not None:
                self.lengths = (self.lengths + query_length).clamp(max=self.mem_len)
        if self.shortest >= kept:
            self.lengths = None
        if kept:
            for layer, tensors in zip(self.layers, self._in_progress.staged, strict=True):
                own_length = next(iter(tensors.values())).shape[-2]
                layer.replace(tensors, None if layer.shared is None else layer.shared.newest(kept - own_length))
        self._batch_size = batch_size
        self._segment = None

    # --- what users do with it

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        """Start afresh, in all streams or in some.

        Args:
            rows (`list[int]` or `torch.Tensor`, *optional*):
                Streams that end: different indices, or a boolean per stream; integers are always indices, so flags
                must be booleans (`dones.bool()`). `None`: all; the batch size may then change.
        """
        if rows is None:
            self._forget()
            self._batch_size = None
            return
        if self.batch_size is None:
            return
        tensor = next(iter(self.layers[0].tensors.values()), None)
        device = torch.device("cpu") if tensor is None else tensor.device
        index = self._row_index(rows, device)
        if len(index.unique()) < len(index):
            raise ValueError(
                f"`rows` must be different indices, or a boolean per stream, but is {index.tolist()}: integers are "
                "indices of streams, flags must be booleans (`rows.bool()`)."
            )
        if tensor is None:
            return
        self._unshare()
        # a stream that starts afresh is read with the weights of now
        self.relative_keys = None
        if self.lengths is None:
            self.lengths = torch.full((self.batch_size,), self.stored_length, device=device)
        self.lengths = self.lengths.index_fill(0, index, 0)
        self.shortest = 0
        # a forgotten value may be infinite or NaN, which no mask would stop
        self._map(lambda tensor: tensor.index_fill(0, index, 0))

    def select(self, rows: Sequence[int] | torch.Tensor) -> "TransfoXLMemory":
        """A new memory of these streams, in this order; a stream may be taken more than once.

        Equally many rows that go on from each of some streams, side by side, share its keys and values: they are
        stored once and read once for all of them.

        Args:
            rows (`list[int]` or `torch.Tensor`): Indices, or a boolean per stream.
        """
        selected = copy.copy(self)
        if selected.batch_size is None:
            return selected
        tensor = next(iter(self.layers[0].tensors.values()), None)
        index = self._row_index(rows, torch.device("cpu") if tensor is None else tensor.device)
        if torch.equal(index, torch.arange(selected.batch_size, device=index.device)):
            # beams often stay where they are
            return selected
        if not selected._share(index):
            selected._unshare(index)
        if selected.lengths is not None:
            selected.lengths = selected.lengths.index_select(0, index)
        selected._batch_size = len(index)
        return selected

    def _share(self, index: torch.Tensor) -> bool:
        """Take streams so that rows share what they go on from; `False` if these rows share nothing."""
        if self.storage != "keys_values" or self.lengths is not None or not self.may_share:
            return False
        # what streams have in common already: of one that shares nothing, its own
        common = [layer.shared or SharedStates(**layer.tensors, rows_each=1) for layer in self.layers]
        groups, counts = (index // common[0].rows_each).unique_consecutive(return_counts=True)
        rows_each = len(index) // max(1, len(groups))
        if rows_each < 2 or (counts != rows_each).any():
            return False

        is_all = torch.equal(groups, torch.arange(len(common[0].keys), device=groups.device))
        for layer, shared in zip(self.layers, common, strict=True):
            own = layer.tensors
            if layer.shared is None:
                own = {name: tensor.narrow(-2, 0, 0) for name, tensor in own.items()}
            own = {name: tensor.index_select(0, index) for name, tensor in own.items()}
            shared = dataclasses.replace(shared, rows_each=rows_each)
            layer.replace(own, shared if is_all else shared.map(lambda states: states.index_select(0, groups)))
        self.rolling = None
        return True

    def _unshare(self, rows: torch.Tensor | None = None) -> None:
        """Give each row, or each of these rows, which alone stay, its own copy of what rows share."""
        if rows is None and self.layers[0].shared is None:
            return
        for layer in self.layers:
            layer.replace(layer.unshared(rows))
        self.rolling = None

    @classmethod
    def concatenate(cls, memories: Sequence["TransfoXLMemory"]) -> "TransfoXLMemory":
        """One memory of all the streams of several memories with the same settings, in order."""
        if not memories:
            raise ValueError("`memories` must hold at least one memory, but is empty.")
        first = memories[0]
        for memory in memories:
            if memory.batch_size is None:
                raise ValueError("`memories` must each know their `batch_size`, but one has not read anything yet.")
            if memory._settings() != first._settings() or {memory.storage, first.storage} - {None} not in (
                set(),
                {"hidden_states"},
                {"keys_values"},
            ):
                raise ValueError(
                    f"`memories` must have the same settings and storage, but are {first!r} and {memory!r}."
                )
        joined = copy.copy(max(memories, key=lambda memory: memory.stored_length))
        length = joined.stored_length
        for index, layer in enumerate(joined.layers):
            tensors = {}
            stored = [memory.layers[index].unshared() for memory in memories]
            for name, like in layer.tensors.items():
                parts = []
                for memory, of_memory in zip(memories, stored, strict=True):
                    part = of_memory.get(name)
                    if part is None:
                        part = like.new_zeros(memory.batch_size, *like.shape[1:-2], 0, like.shape[-1])
                    parts.append(F.pad(part, (0, 0, length - part.shape[-2], 0)))
                tensors[name] = torch.cat(parts)
            layer.replace(tensors)
        joined.rolling = None
        if length:
            device = next(iter(joined.layers[0].tensors.values())).device
            joined.lengths = torch.cat(
                [
                    torch.full((memory.batch_size,), memory.stored_length, device=device)
                    if memory.lengths is None
                    else memory.lengths
                    for memory in memories
                ]
            )
        joined.shortest = min(memory.shortest for memory in memories)
        joined._batch_size = sum(memory.batch_size for memory in memories)
        return joined

    def _row_index(self, rows: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
        index = torch.as_tensor(rows, device=device)
        if index.dtype == torch.bool:
            if index.shape != (self.batch_size,):
                raise ValueError(
                    f"`rows` must have one boolean per stream ({self.batch_size}), but has shape {list(index.shape)}."
                )
            return index.nonzero().flatten()
        # `uint8` was once the type of flags
        is_no_index = index.is_floating_point() or index.is_complex() or index.dtype == torch.uint8
        if index.dim() > 1 or (index.numel() and is_no_index):
            raise ValueError(
                "`rows` must be a list of indices or a boolean per stream, but has dtype "
                f"{index.dtype} and shape {list(index.shape)}."
            )
        index = index.long().flatten()
        if ((index < 0) | (index >= self.batch_size)).any():
            raise ValueError(f"`rows` must be between 0 and {self.batch_size - 1}, but is {index.tolist()}.")
        return index

    def to(self, device: torch.device | str) -> "TransfoXLMemory":
        """Move to a device; returns itself."""
        self._map(lambda tensor: tensor.to(device))
        if self.lengths is not None:
            self.lengths = self.lengths.to(device)
        self.relative_keys = None
        return self

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.layers:
            tensors = {name: function(tensor) for name, tensor in layer.tensors.items()}
            layer.replace(tensors, None if layer.shared is None else layer.shared.map(function))
        self.rolling = None

    def __copy__(self) -> "TransfoXLMemory":
        """A branch: it shares what is stored so far, which is never changed in place, and nothing later."""
        branch = type(self).__new__(type(self))
        branch.__dict__.update(self.__dict__)
        branch.layers = [copy.copy(layer) for layer in self.layers]
        return branch

    # --- other forms

    @classmethod
    def from_mems(cls, config: TransfoXLConfig, mems: Sequence[torch.Tensor], **settings: Any) -> "TransfoXLMemory":
        """Read the `mems` of transformers 2 to 4 or of the original PyTorch code.

        Args:
            config (`TransfoXLConfig`): Configuration of the model.
            mems (`list[torch.Tensor]`):
                `n_layer` tensors of shape `(mem_time, batch_size, d_model)`: the input of each layer; `[]`: nothing
                read yet. The original's additional entry, the last layer's output, is left out: nothing reads it.
            settings: As for [`TransfoXLMemory`].
        """
        if not mems:
            return cls(config, **{"stores": "hidden_states", **settings})
        if len(mems) not in (config.n_layer, config.n_layer + 1):
            raise ValueError(f"`mems` must have `n_layer` ({config.n_layer}) entries, but has {len(mems)}.")
        mems = mems[: config.n_layer]
        shape = mems[0].shape
        if any(mem.dim() != 3 or mem.shape != shape or mem.shape[-1] != config.d_model for mem in mems):
            raise ValueError(
                f"`mems` must all have shape (mem_time, batch_size, {config.d_model}), but have "
                f"{[list(mem.shape) for mem in mems]}."
            )
        memory = cls(config, **{"stores": "hidden_states", **settings})
        kept = min(memory.mem_len, shape[0])
        memory._batch_size = shape[1]
        if kept:
            memory.shortest = kept
            for layer, mem in zip(memory.layers, mems, strict=True):
                layer.replace({"hidden_states": mem[shape[0] - kept :].transpose(0, 1).detach().clone()})
        return memory

    def to_mems(self) -> list[torch.Tensor]:
        """The legacy form: `n_layer` tensors of shape `(mem_time, batch_size, d_model)`.

        With `memory_init="zeros"` free slots are zero vectors and `mem_time` is `mem_len`. Before the first segment:
        `[]`.

        Raises:
            ValueError: if keys and values are stored, or rows of different length have no zeros to fill them.
        """
        if self.storage == "keys_values":
            raise ValueError("`to_mems` needs hidden states, but this memory stores keys and values (`stores=`).")
        if self.stored_length == 0:
            return []
        mask = self.stored_mask()
        if mask is not None and self.memory_init == "empty" and not mask.all():
            raise ValueError(
                f"`to_mems` needs rows of one length, but they remember {mask.sum(dim=1).tolist()} positions."
            )
        mems = []
        for layer in self.layers:
            states = layer.tensors["hidden_states"]
            if mask is not None:
                states = states * mask[..., None]
            mems.append(F.pad(states, (0, 0, self.start_slots, 0)).transpose(0, 1))
        return mems

    def _settings(self) -> dict[str, Any]:
        names = ("mem_len", "clamp_len", "same_length", "same_length_includes_oldest", "memory_init", "stores")
        return {name: getattr(self, name) for name in names} | {"num_layers": len(self.layers)}

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, and under `"settings"` and `"progress"` what else is needed to go on from them.

        What rows share is saved for each row.
        """
        # contiguous: without the room behind them
        tensors = {name: tensor.contiguous() for name, tensor in self._named_tensors().items()}
        return {**tensors, "settings": self._settings(), "progress": self._progress()}

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        tensors = {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.unshared().items()
        }
        return tensors if self.lengths is None else {**tensors, "lengths": self.lengths}

    def _progress(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another memory of the same settings was; refuses other settings and layers, naming them."""
        different = {
            name: (value, state["settings"].get(name))
            for name, value in self._settings().items()
            if state["settings"].get(name) != value
        }
        if different:
            raise ValueError(
                f"`state` must come from a memory of the same settings, but differs in (here, there): {different}."
            )
        if set(state["progress"]) != set(PROGRESS):
            raise ValueError(f"`state` must have the progress {list(PROGRESS)}, but has {list(state['progress'])}.")
        tensors: list[dict[str, Any]] = []
        for index in range(len(self.layers)):
            prefix = f"layers.{index}."
            tensors.append({name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)})
        names = [sorted(of_layer) for of_layer in tensors]
        if names[0] not in ([], ["hidden_states"], ["keys", "values"]) or names != names[:1] * len(names):
            raise ValueError(
                "`state` must have `hidden_states`, `keys` and `values`, or nothing, the same for each layer, but its "
                f"layers have {names}."
            )
        self._forget()
        for name, value in state["progress"].items():
            setattr(self, name, value)
        self.lengths = state.get("lengths")
        for layer, of_layer in zip(self.layers, tensors, strict=True):
            layer.replace(of_layer)

    # --- what the library's generate asks

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: ids given with a memory are new ids, never a repetition of what it has read."""
        return 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row `i` continue the stream of row `beam_idx[i]`."""
        self.__dict__.update(self.select(beam_idx).__dict__)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each stream `repeats` times, side by side."""
        if self.batch_size is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these streams."""
        self.reorder_cache(indices)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("A `TransfoXLMemory` cannot go back; branch it with `copy.copy(memory)` before reading on.")

    def activate_past_recording(self) -> None:
        raise ValueError(
            "Assisted decoding takes tokens back, which a `TransfoXLMemory` cannot do; generate without `cache`."
        )


def check_keys(stored: torch.Tensor, new: torch.Tensor) -> None:
    """Refuse stored keys or values `(B, H, S, D)` that another model, batch or type has left."""
    if stored.shape[:2] != new.shape[:2] or stored.shape[3] != new.shape[3]:
        raise ValueError(
            f"`cache` must hold keys and values of batch size {new.shape[0]} and {new.shape[1]} heads with "
            f"{new.shape[3]} numbers each, as the model computes, but has batch size {stored.shape[0]} and "
            f"{stored.shape[1]} heads with {stored.shape[3]} numbers."
        )
    if stored.dtype != new.dtype or stored.device != new.device:
        raise ValueError(
            f"`cache` must hold keys and values of dtype {new.dtype} on {new.device}, as the model computes, but they "
            f"have dtype {stored.dtype} on {stored.device}."
        )


# --- pytree: lets torch.export and torch.compile see the tensors


def _names_and_tensors(memory: TransfoXLMemory) -> tuple[list[str], list[torch.Tensor]]:
    named = memory._named_tensors()
    return list(named), list(named.values())


def _flatten(memory: TransfoXLMemory) -> tuple[list[torch.Tensor], Any]:
    names, tensors = _names_and_tensors(memory)
    return tensors, (names, memory._settings(), memory._progress())


def _flatten_with_keys(memory: TransfoXLMemory) -> tuple[list[tuple[Any, torch.Tensor]], Any]:
    tensors, context = _flatten(memory)
    return [(pytree.MappingKey(name), tensor) for name, tensor in zip(context[0], tensors, strict=True)], context


def _unflatten(tensors: Iterable[Any], context: Any) -> TransfoXLMemory:
    names, settings, progress = context
    memory = TransfoXLMemory.__new__(TransfoXLMemory)
    Cache.__init__(memory, layers=[TransfoXLMemoryLayer() for _ in range(settings["num_layers"])])
    memory.__dict__.update({name: value for name, value in settings.items() if name != "num_layers"})
    memory.load_state_dict({**dict(zip(names, tensors, strict=True)), "settings": settings, "progress": progress})
    return memory


pytree.register_pytree_node(
    TransfoXLMemory,
    _flatten,
    _unflatten,
    flatten_with_keys_fn=_flatten_with_keys,
    serialized_type_name=f"{TransfoXLMemory.__module__}.{TransfoXLMemory.__name__}",
)


__all__ = ["TransfoXLMemory"]

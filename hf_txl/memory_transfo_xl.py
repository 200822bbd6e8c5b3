"""Segment memory of a Transformer-XL: its settings and its streams, one per batch row.

Follows section 3.2 of [Dai et al., 2019](https://arxiv.org/abs/1901.02860) and `_update_mems` of the original PyTorch
code. A memory stores layer *inputs* (hidden states), through which gradients reach the key and value projections, or
the projected keys and values, which inference need not compute again; both give the same results.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

from .configuration_transfo_xl import MEMORY_INITS, TransfoXLConfig, segment_window
from .memory_formats_transfo_xl import (
    SETTINGS,
    mems_of,
    named_tensors,
    progress_of,
    register_pytree,
    rows_from_mems,
    rows_from_state,
    settings_of,
)
from .memory_rows_transfo_xl import MemoryRows, TransfoXLMemoryLayer

# storage modes
STORAGES = ("auto", "hidden_states", "keys_values")


class StreamCache(Cache):
    """A cache in the library's terms whose input ids are always new ones, and which cannot be cropped."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: input ids never repeat stored ones."""
        return 0

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("A `TransfoXLMemory` is updated by its model only; call the model with `cache=memory`.")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("A `TransfoXLMemory` cannot be cropped; keep `copy.copy(memory)` to return to its state.")

    def activate_past_recording(self) -> None:
        raise ValueError(
            "Assisted decoding removes tokens from the cache, which a `TransfoXLMemory` cannot do; generate without "
            "`cache`."
        )


class TransfoXLMemory(StreamCache):
    """Memory of a Transformer-XL, passed to a model as `cache=`; each call of the model advances it.

    The model attends to the whole memory and, causally, to the segment; with `same_length` to a sliding window. The
    lengths are settings of the memory, so evaluation can use others than training without changing `model.config`.

    Args:
        config (`TransfoXLConfig`): Configuration of the model, from which the other arguments take their defaults.
        mem_len (`int`, *optional*): Number of positions M stored per layer.
        clamp_len (`int`, *optional*): Distances are clamped to this value; 0 or below: not clamped.
        same_length (`bool`, *optional*): Whether every position attends to the same number of keys.
        memory_init (`str`, *optional*): Memory before the first token: `"empty"` or `"zeros"` (`mem_len` zero states).
        stores (`str`, defaults to `"auto"`):
            Storage mode: `"hidden_states"` (required to train on a memory filled without gradients), `"keys_values"`
            (inference), or `"auto"`: hidden states where the model's forward records gradients, else keys and values;
            stored hidden states become keys and values at the first single-token step without gradients. Stored keys
            and values do not follow changes of the weights: call `reset()` or create a new memory after one.
        batch_size (`int`, *optional*): Number of streams. Default: the batch size of the first segment.

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
        # fields may have been set after construction
        config.validate_architecture()
        self._set_rows(MemoryRows(config.n_layer), batch_size)
        self.mem_len = config.mem_len if mem_len is None else mem_len
        self.clamp_len = config.clamp_len if clamp_len is None else clamp_len
        self.same_length = config.same_length if same_length is None else same_length
        self.same_length_includes_oldest = config.same_length_includes_oldest
        self.memory_init = config.memory_init if memory_init is None else memory_init
        self.stores = "hidden_states" if config.is_absolute else stores
        if not isinstance(self.mem_len, int) or self.mem_len < 0:
            raise ValueError(f"`mem_len` must be an int of 0 or more, but is {self.mem_len!r}.")
        if self.memory_init not in MEMORY_INITS:
            raise ValueError(f"`memory_init` must be one of {list(MEMORY_INITS)}, but is {self.memory_init!r}.")
        if stores not in STORAGES:
            raise ValueError(f"`stores` must be one of {list(STORAGES)}, but is {stores!r}.")
        if config.is_absolute and (stores == "keys_values" or self.memory_init != "empty"):
            raise ValueError(
                f"`stores` must be 'hidden_states' or 'auto' and `memory_init` 'empty' for `attention_kind="
                f"{config.attention_kind!r}`, but they are {stores!r} and {self.memory_init!r}: absolute positions "
                "change in every call."
            )

    def _set_rows(self, rows: MemoryRows, batch_size: int | None) -> None:
        """Replace everything stored by these rows."""
        layers: Any = rows.layers
        super().__init__(layers=layers)
        self.rows = rows
        self._batch_size = batch_size
        # relative keys of the streams, cached as long as keys and values are stored
        self.position_table: Any = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(stored_length={self.stored_length}, batch_size={self.batch_size}, "
            f"storage={self.storage!r}, mem_len={self.mem_len}, clamp_len={self.clamp_len}, "
            f"same_length={self.same_length}, memory_init={self.memory_init!r})"
        )

    # --- state

    @property
    def batch_size(self) -> Any:
        """Number of streams (`int`); `None` if not known before the first segment."""
        return self._batch_size

    @property
    def window(self) -> int | None:
        """Number of keys a query attends to, itself included; `None`: the memory and the segment so far."""
        return segment_window(self.mem_len, self.same_length, self.same_length_includes_oldest)

    @property
    def stored_length(self) -> int:
        """Number of stored positions S, the same in all layers."""
        return self.rows.length

    @property
    def storage(self) -> str | None:
        """Current storage mode: `"hidden_states"`, `"keys_values"`, or `None` if nothing is stored."""
        return self.rows.storage

    @property
    def start_slots(self) -> int:
        """Number of zero states attended to in front of the stored positions."""
        return self.mem_len - self.stored_length if self.memory_init == "zeros" else 0

    # --- streams

    def reset(self, rows: Sequence[int] | torch.Tensor | None = None) -> None:
        """Forget all streams, or some of them.

        Args:
            rows (`list[int]` or `torch.Tensor`, *optional*):
                Streams to forget: distinct indices, or one boolean per stream. Integers are always indices, so flags
                must be booleans (`dones.bool()`). `None`: all; the batch size may then change.
        """
        if rows is None:
            self.rows.clear()
            self.position_table = None
            self._batch_size = None
        elif self.batch_size is not None:
            index = self.rows.index(rows, self.batch_size)
            if len(index.unique()) < len(index):
                raise ValueError(
                    f"`rows` must be distinct indices, or a boolean per stream, but is {index.tolist()}: integers "
                    "are indices of streams, flags must be booleans (`rows.bool()`)."
                )
            if self.rows.tensor is not None:
                # a new stream uses the current weights
                self.position_table = None
                self.rows.reset(index, self.batch_size)

    def select(self, rows: Sequence[int] | torch.Tensor) -> "TransfoXLMemory":
        """A new memory of these streams, in this order; a stream may be selected more than once.

        If every selected stream is repeated equally often, in consecutive rows, these share its keys and values as a
        prefix, which is stored and read once.

        Args:
            rows (`list[int]` or `torch.Tensor`): Indices, or one boolean per stream.
        """
        selected = copy.copy(self)
        if self.batch_size is None:
            return selected
        index = self.rows.index(rows, self.batch_size)
        # beams often keep their order
        if not torch.equal(index, torch.arange(self.batch_size, device=index.device)):
            selected.rows.select(index)
            selected._batch_size = len(index)
        return selected

    @classmethod
    def concatenate(cls, memories: Sequence["TransfoXLMemory"]) -> "TransfoXLMemory":
        """One memory with the streams of several memories of the same settings, in order."""
        if not memories:
            raise ValueError("`memories` must hold at least one memory, but is empty.")
        first = memories[0]
        for memory in memories:
            if memory.batch_size is None:
                raise ValueError(
                    "`memories` must each have a `batch_size`, but one has None: pass it, or read a segment first."
                )
            if settings_of(memory) != settings_of(first) or len({memory.storage, first.storage} - {None}) > 1:
                raise ValueError(
                    f"`memories` must have the same settings and storage, but are {first!r} and {memory!r}."
                )
        joined = copy.copy(max(memories, key=lambda memory: memory.stored_length))
        table = joined.position_table
        joined._set_rows(
            MemoryRows.concatenate([(memory.rows, memory.batch_size) for memory in memories]),
            sum(memory.batch_size for memory in memories),
        )
        joined.position_table = table
        return joined

    def to(self, device: torch.device | str) -> "TransfoXLMemory":
        """Move everything stored to a device; returns the memory itself."""
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"`device` must be a device, but is {device}: a memory has the dtype of the model that fills it."
            )
        self.rows.map(lambda tensor: tensor.to(device))
        if self.rows.lengths is not None:
            self.rows.lengths = self.rows.lengths.to(device)
        self.position_table = None
        return self

    def __copy__(self) -> "TransfoXLMemory":
        """A branch: shares the tensors stored so far, which are never changed in place, and advances on its own."""
        branch = type(self).__new__(type(self))
        branch.__dict__.update(self.__dict__)
        branch.rows = copy.copy(self.rows)
        branch.layers = branch.rows.layers
        return branch

    # --- streams, by the library's names

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder beams in place: row `i` continues the stream of row `beam_idx[i]`."""
        self.__dict__.update(self.select(beam_idx).__dict__)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each stream `repeats` times in consecutive rows, in place."""
        if self.batch_size is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these streams, in place."""
        self.reorder_cache(indices)

    # --- formats

    @classmethod
    def from_mems(cls, config: TransfoXLConfig, mems: Sequence[torch.Tensor], **settings: Any) -> "TransfoXLMemory":
        """Build a memory from `mems` of transformers 2 to 4 or of the original PyTorch code.

        Args:
            config (`TransfoXLConfig`): Configuration of the model.
            mems (`list[torch.Tensor]`):
                `n_layer` tensors of shape `(mem_time, batch_size, d_model)`: the input of each layer; `[]`: no
                segment yet. The original's additional entry, the output of the last layer, is ignored: no layer uses
                it.
            settings: As for [`TransfoXLMemory`].
        """
        memory = cls(config, **{"stores": "hidden_states", **settings})
        if mems:
            rows = rows_from_mems(config, mems, memory.mem_len)
            memory._set_rows(rows, mems[0].shape[1])
        return memory

    def to_mems(self) -> list[torch.Tensor]:
        """The legacy form: `n_layer` tensors of shape `(mem_time, batch_size, d_model)`.

        With `memory_init="zeros"` free slots are zero vectors and `mem_time` is `mem_len`. Before the first segment:
        `[]`.

        Raises:
            ValueError: if keys and values are stored, or streams differ in length and `memory_init` is `"empty"`.
        """
        return mems_of(self.rows, self.start_slots, zero_filled=self.memory_init == "zeros")

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, with `"settings"` and `"progress"`: all that is needed to resume the streams.

        A prefix that rows share is saved once per row.
        """
        # contiguous copies, without the free slots of a buffer
        tensors = {name: tensor.contiguous() for name, tensor in named_tensors(self.rows).items()}
        return {**tensors, "settings": settings_of(self), "progress": progress_of(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the streams of a memory with the same settings; an error names settings that differ."""
        own, given = settings_of(self), state["settings"]
        if different := [name for name, value in own.items() if given.get(name) != value]:
            expected, found = ({name: settings.get(name) for name in different} for settings in (own, given))
            raise ValueError(f"`state` must come from a memory with the settings {expected}, but has {found}.")
        self._set_rows(rows_from_state(state, len(self.layers)), state["progress"]["_batch_size"])


def memory_from_state(state: dict[str, Any]) -> TransfoXLMemory:
    """A memory with the settings and tensors of a `state_dict`."""
    memory = TransfoXLMemory.__new__(TransfoXLMemory)
    settings = state["settings"]
    memory._set_rows(rows_from_state(state, settings["num_layers"]), state["progress"]["_batch_size"])
    memory.__dict__.update({name: settings[name] for name in SETTINGS})
    return memory


register_pytree(TransfoXLMemory, memory_from_state)


__all__ = ["TransfoXLMemory"]

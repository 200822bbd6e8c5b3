"""A segment that continues a memory: what layers read from it, and its update to the newest `mem_len` positions.

The update follows `_update_mems` of the original PyTorch code, except that pads take no position. It comes after the
last layer, so a call that fails leaves the memory unchanged.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .configuration_transfo_xl import TransfoXLConfig
from .key_value_buffer_transfo_xl import check_keys, claim_slots, newest_positions
from .layout_transfo_xl import AttentionLayout
from .memory_transfo_xl import TransfoXLMemory
from .packed_texts_transfo_xl import packed_layout, text_numbers
from .segment_transfo_xl import Segment
from .shared_prefix_transfo_xl import KeyValuePrefix

# B batch   S stored positions   Q positions of the segment   H heads   D head size


class MemorySegment(Segment):
    """A segment that continues a memory: queries attend to all of it and, causally, to the segment.

    With `same_length`, to a sliding window of both.

    Args:
        config (`TransfoXLConfig`): Configuration of the model.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): Input of the first layer.
        attention_mask (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): 0 for pads.
        memory (`TransfoXLMemory`): The memory.
        records_gradients (`bool`): Whether the call records gradients.
        starts (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): Tokens that begin a text.

    Raises:
        ValueError: if batch size, device, dtype or shape of the memory do not fit the call, or it stores keys and
            values where gradients are recorded.
    """

    def __init__(
        self,
        config: TransfoXLConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        memory: TransfoXLMemory,
        records_gradients: bool,
        starts: torch.Tensor | None = None,
    ):
        super().__init__(config, inputs_embeds, attention_mask, starts=starts)
        check_memory(memory, config, inputs_embeds)
        self.memory = self.cache = memory
        self.clamp_len = memory.clamp_len
        self.storage = choose_storage(memory, self.query_length, records_gradients)
        if torch.compiler.is_compiling():
            memory.rows.may_share = False
        if self.mask is not None or not memory.rows.may_share:
            memory.rows.materialize()
        # mask of the real positions of memory and segment, `(B, S + Q)`; of those to be stored, which belong to the
        # last text of each row; and the permutation that right-aligns these; `None`: all tokens of the segment are
        # real, and of one text
        self.real = self.stays = self.order = None
        if self.mask is not None:
            stored_mask = memory.rows.real_mask()
            if stored_mask is None:
                self.real = F.pad(self.mask, (memory.stored_length, 0), value=True)
            else:
                self.real = torch.cat([stored_mask, self.mask], dim=1)
            self.stays = self.real
            if starts is not None:
                text = text_numbers(starts, memory.stored_length)
                self.stays = self.real & (text == text[:, -1:])
            self.order = torch.argsort(self.stays.int(), dim=1, stable=True)
        # tensors of each layer that replace the stored ones after the segment
        self.staged: list[dict[str, torch.Tensor]] = [{} for _ in memory.layers]
        # slots of the segment, and of memory and segment, where keys and values are appended in place: keys of layer
        # 0, values of layer 0, keys of layer 1 …
        self.slots: tuple[torch.Tensor, ...] = ()
        self.full: tuple[torch.Tensor, ...] = ()
        if memory.storage == "keys_values" and self.order is None and not torch.compiler.is_compiling():
            self._claim_slots()

    def _claim_slots(self) -> None:
        """Claim slots for the keys and values of a short segment."""
        rows = self.memory.rows
        stored = [tensor for layer in rows.layers for tensor in (layer.keys, layer.values) if tensor is not None]
        claimed = claim_slots(stored, self.query_length, rows.buffer)
        if claimed is None:
            rows.buffer = None
            return
        rows.buffer, first, end = claimed
        self.slots = rows.buffer.views(end - self.query_length, end)
        self.full = rows.buffer.views(first, end)
        kept = rows.buffer.views(end - self._kept_length(stored[0].shape[-2], self.query_length), end)
        self.staged = [
            dict(zip(("keys", "values"), pair, strict=True)) for pair in zip(*[iter(kept)] * 2, strict=True)
        ]

    # --- read by layers

    @property
    def key_value_writer(self) -> Any:
        return self if self.storage == "keys_values" else None

    def layout(self) -> AttentionLayout:
        memory, stored_length, query_length = self.memory, self.memory.stored_length, self.query_length
        start_slots, zero_start = memory.start_slots, memory.memory_init == "zeros"
        if self.real is not None and self.starts is not None:
            return packed_layout(self.real, self.starts, memory.window, memory.mem_len, zero_start)
        if self.real is not None:
            lengths = memory.rows.lengths
            stored = torch.tensor(stored_length, device=self.device) if lengths is None else lengths
            oldest = (stored - memory.mem_len).view(-1, 1)
            window = memory.window
            return AttentionLayout.from_mask(
                self.real, stored_length, query_length, start_slots, window, zero_start, oldest
            )
        key_length = start_slots + stored_length + query_length
        stored_mask = memory.rows.real_mask()
        key_mask = start_mask = None
        if stored_mask is not None and zero_start:
            start_mask = F.pad(~stored_mask, (start_slots, query_length), value=False)
        elif stored_mask is not None:
            key_mask = F.pad(stored_mask, (0, query_length), value=True)
        return AttentionLayout(query_length, key_length, start_slots, zero_start, memory.window, key_mask, start_mask)

    def memory_states(self, layer_idx: int, hidden_states: torch.Tensor) -> torch.Tensor | None:
        stored = self.memory.layers[layer_idx].hidden_states
        if self.storage == "hidden_states":
            # no gradient flows into earlier segments
            self.staged[layer_idx]["hidden_states"] = self._newest(stored, hidden_states.detach(), None)
        return stored

    def shared_prefix(self, layer_idx: int) -> KeyValuePrefix | None:
        return self.memory.layers[layer_idx].prefix

    @property
    def has_history(self) -> bool:
        return self.memory.stored_length > 0

    @property
    def max_stored(self) -> int:
        return self.memory.mem_len

    def may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        # a memory does not count the tokens read: in rows with history positions may continue or restart with each
        # segment, but in all of them alike
        lengths = self.memory.rows.lengths
        if lengths is None:
            has_history = torch.full_like(positions, self.memory.stored_length > 0, dtype=torch.bool)
        else:
            has_history = lengths.to(self.device) > 0
        if self.mask is not None:
            has_history &= self.mask.any(1)
        restarts = has_history & (positions == 0)
        return ~restarts | (restarts == has_history).all()

    def positions_begin(self) -> str:
        return "0, or from 0 in no row with a stored history (`memory.reset(rows)` starts a new text)"

    # --- update of the memory

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values `(B, H, Q, D)` of a layer and return those of memory and segment, `(B, H, S + Q, D)`.

        A shared prefix is not included. While the memory still stores hidden states, the new keys and values include
        those projected from them.
        """
        index = 2 * layer_idx
        if self.slots:
            for slots, new in zip(self.slots[index : index + 2], (key_states, value_states), strict=True):
                check_keys(slots, new)
                slots.copy_(new)
            return self.full[index], self.full[index + 1]
        layer = self.memory.layers[layer_idx]
        full = []
        for name, stored, new in (("keys", layer.keys, key_states), ("values", layer.values, value_states)):
            if stored is not None:
                check_keys(stored, new)
            full.append(new if stored is None else torch.cat([stored, new], dim=2))
            self.staged[layer_idx][name] = self._newest(stored, new, full[-1])
        return full[0], full[1]

    def _newest(self, stored: torch.Tensor | None, new: torch.Tensor, full: torch.Tensor | None) -> torch.Tensor:
        """The newest `mem_len` real positions of each row, right-aligned; time is the second to last dimension."""
        stored_length, new_length = 0 if stored is None else stored.shape[-2], new.shape[-2]
        kept = self._kept_length(stored_length, new_length)
        if self.order is None and stored is not None and torch.compiler.is_compiling():
            # comparing the lengths of segment and memory would fix them in a program
            full = torch.cat([stored, new], dim=-2) if full is None else full
            return newest_positions(full, kept).clone(memory_format=torch.contiguous_format)
        if self.order is None:
            from_new = min(kept, new_length)
            newest = newest_positions(new, from_new)
            if stored is None or kept == from_new:
                # a view would keep the whole segment alive, and callers may change the hidden states they receive
                return newest.clone(memory_format=torch.contiguous_format)
            if full is not None:
                return newest_positions(full, kept)
            return torch.cat([newest_positions(stored, kept - from_new), newest], dim=-2)
        if full is None:
            full = new if stored is None else torch.cat([stored, new], dim=-2)
        order = self.order[:, full.shape[-2] - kept :]
        index = order.reshape(order.shape[0], *[1] * (full.dim() - 3), kept, 1)
        return full.gather(-2, index.expand(*full.shape[:-2], kept, full.shape[-1]))

    def _kept_length(self, stored_length: int, new_length: int) -> int:
        """Number of positions stored after a segment; a full memory stays full."""
        mem_len = self.memory.mem_len
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            # branching on a full memory would fix its length in a program
            return torch.sym_min(mem_len, stored_length + new_length)
        return mem_len if stored_length >= mem_len else min(mem_len, stored_length + new_length)

    def end(self) -> None:
        rows, query_length = self.memory.rows, self.query_length
        kept = self._kept_length(rows.length, query_length)
        if self.stays is not None:
            rows.lengths = self.stays.sum(dim=1).clamp(max=self.memory.mem_len)
            if self.starts is not None:
                rows.shortest = 0
        else:
            rows.shortest = self._kept_length(rows.shortest, query_length)
            if rows.lengths is not None:
                rows.lengths = (rows.lengths + query_length).clamp(max=self.memory.mem_len)
        if rows.shortest >= kept:
            rows.lengths = None
        if kept:
            for layer, tensors in zip(rows.layers, self.staged, strict=True):
                own_length = next(iter(tensors.values())).shape[-2]
                layer.replace(tensors, None if layer.prefix is None else layer.prefix.newest(kept - own_length))
        self.memory._batch_size = self.batch_size


def choose_storage(memory: TransfoXLMemory, query_length: int, records_gradients: bool) -> str:
    """Storage mode after a segment, `"hidden_states"` or `"keys_values"`."""
    if memory.stores != "auto":
        storage = memory.stores
    elif records_gradients:
        storage = memory.storage or "hidden_states"
    else:
        # decoding reads many single tokens: keys and values then save projecting the memory in each step
        stays = memory.storage == "hidden_states" and query_length > 1
        storage = "hidden_states" if stays else "keys_values"
    if records_gradients and storage == "keys_values":
        raise ValueError(
            "`cache` must store hidden states where gradients are recorded, but stores keys and values: the key and "
            "value projections would receive no gradient from memory positions, about half of the total. Use "
            "`TransfoXLMemory(config, stores='hidden_states')`, or `torch.no_grad()` for inference."
        )
    return storage


def check_memory(memory: TransfoXLMemory, config: TransfoXLConfig, inputs_embeds: torch.Tensor) -> None:
    """Refuse a memory whose number of layers, batch size, device, width or dtype do not fit."""
    if len(memory.layers) != config.n_layer:
        raise ValueError(f"`cache` must have `n_layer` ({config.n_layer}) layers, but has {len(memory.layers)}.")
    batch_size, _, width = inputs_embeds.shape
    if memory.batch_size not in (None, batch_size):
        raise ValueError(
            f"`cache` must have the batch size of the input ({batch_size}), but holds {memory.batch_size} streams. "
            "`select(rows)` keeps some of them; `reset()` or a new memory starts new streams."
        )
    stored = memory.rows.tensor
    if stored is None:
        return
    if stored.device != inputs_embeds.device:
        raise ValueError(
            f"`cache` must be on the device of the model ({inputs_embeds.device}), but is on {stored.device}; "
            "move it with `to(device)`."
        )
    if memory.storage == "hidden_states" and (stored.shape[-1] != width or stored.dtype != inputs_embeds.dtype):
        raise ValueError(
            f"`cache` must hold states of width `d_model` ({width}) and dtype {inputs_embeds.dtype}, as the model "
            f"computes, but holds width {stored.shape[-1]} and dtype {stored.dtype}."
        )


__all__ = ["MemorySegment"]

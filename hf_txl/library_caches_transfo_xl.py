"""Caches of the library under the window rule: each position attends to itself and to what a memory would hold.

Under this rule results do not depend on how a text is fed: in chunks, left-padded in a batch, or as beams.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from .arguments_transfo_xl import refuse_any
from .configuration_transfo_xl import TransfoXLConfig
from .key_value_buffer_transfo_xl import KeyValueBuffer, check_keys, claim_slots, newest_positions
from .layout_transfo_xl import AttentionLayout
from .segment_transfo_xl import Segment

TWO_RULES = (
    "Without a cache, a position attends to the whole segment before it; with one, to as many positions as a memory "
    "holds. Pass `cache=DynamicCache(config=model.config)` (`past_key_values` before transformers 5.24) or a "
    "`TransfoXLMemory` from the first segment on, or set `same_length=True`, which makes the two rules equal"
)

# B batch   H heads   S stored positions   Q positions of the segment   D head size


class LibrarySegment(Segment):
    """A segment that continues a cache of the library, by the window rule."""

    def __init__(
        self, config: TransfoXLConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, cache: Any
    ):
        super().__init__(config, inputs_embeds, None, cache, writer_of(cache))
        # read once: attributes of a configuration are slow
        self.window = config.sliding_window
        self._check_fits()
        self.cached_length = cache.get_seq_length()
        self._check_room()
        self._check_rule()
        self.mask = self.real_tokens(attention_mask, self.cached_length)
        self._check_pads()
        self._check_covered(attention_mask)

    def _check_pads(self) -> None:
        """Refuse pads among the cached positions of a row that has lost tokens: they occupy slots of the window."""
        if self.mask is None:
            return
        num_evicted = self.cached_length - (self.window - 1)
        if not torch.compiler.is_compiling() and num_evicted <= 0:
            return
        index = torch.arange(self.mask.shape[1], device=self.device)
        is_evicted, is_cached = index < num_evicted, index < self.cached_length
        lost_tokens = (self.mask & is_evicted).any(1)
        refuse_any(
            lost_tokens & (~self.mask & is_cached & ~is_evicted).any(1),
            "`attention_mask` must have no pads after real tokens once a row is longer than the window of the cache "
            f"({self.window} positions), but has some: pads occupy slots of the window. Pad the whole text on the "
            "left, or use a `TransfoXLMemory`, which stores no pads",
        )

    def _check_covered(self, attention_mask: torch.Tensor | None) -> None:
        """Refuse a mask of the segment alone, or none, behind positions that were masked: they would become real."""
        total = self.cached_length + self.query_length
        covers = attention_mask is not None and attention_mask.shape[1] == total
        if getattr(self.cache, "has_pads", False) and self.cached_length and not covers:
            given = "None" if attention_mask is None else f"of shape {list(attention_mask.shape)}"
            raise ValueError(
                f"`attention_mask` must cover the cached positions too, [{self.batch_size}, {total}], but is {given}: "
                "earlier calls had pads, which the cache does not record."
            )

    def _check_room(self) -> None:
        """Refuse a static cache that the text outgrows although the window does not: its window would be smaller."""
        if not self.cache.is_compileable or torch.compiler.is_compiling():
            return
        room, total = self.cache.layers[0].max_cache_len, int(self.cached_length) + self.query_length
        if room < min(total, self.window):
            raise ValueError(
                f"`cache` must have a `max_cache_len` of at least {min(total, self.window)} for a text "
                f"of {total} tokens and a window of {self.window}, but has {room}."
            )

    def _check_rule(self) -> None:
        """Refuse a cache that a call without one has filled by the segment rule, where the two rules differ."""
        length = getattr(self.cache, "segment_length", 0)
        if length and self.cached_length == 0:
            # the cache was emptied
            self.cache.segment_length = 0
        elif length and not rules_agree(self.config, length):
            raise ValueError(
                "`cache` must have been filled under the window rule, but was filled under the segment rule, by a "
                f"call of {length} positions without a cache. {TWO_RULES}."
            )

    def _check_fits(self) -> None:
        """Refuse the cache of another model or batch; the library would fail late, or not at all."""
        config, layers = self.config, self.cache.layers
        # a cache without a configuration creates its layers on first use
        if len(layers) not in (0, config.n_layer):
            raise ValueError(f"`cache` must have `n_layer` ({config.n_layer}) layers, but has {len(layers)}.")
        if self.cache.is_compileable and config.memory_init == "zeros":
            raise ValueError(
                "A static cache needs `memory_init='empty'`, but `memory_init` is 'zeros': it has no slots for zero "
                "states. Use a dynamic cache (the default) or a `TransfoXLMemory`."
            )
        own_window = getattr(layers[0], "sliding_window", self.window) if layers else self.window
        if not self.cache.is_compileable and own_window != self.window:
            raise ValueError(
                f"`cache` must have the window of the model ({self.window}, from `mem_len` and "
                f"`same_length`), but has {own_window}: make a new cache after a change of the configuration."
            )
        stored = getattr(layers[0], "keys", None) if layers else None
        if stored is not None and stored.numel():
            # under autocast the dtype of new keys is not known yet
            dtype = stored.dtype if torch.is_autocast_enabled(self.device.type) else self.dtype
            shape = (self.batch_size, config.n_head, 0, config.d_head)
            check_keys(stored, torch.empty(shape, dtype=dtype, device=self.device))

    def may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        length: Any = self.cached_length
        return positions == (length if self.mask is None else self.mask[:, :length].sum(1))

    def positions_begin(self) -> str:
        return f"the number of real tokens that `cache` has read (it has read {int(self.cached_length)} tokens in all)"

    def layout(self) -> AttentionLayout:
        config, cache = self.config, self.cache
        zero_start = config.memory_init == "zeros"
        window = self.window
        if isinstance(self.key_value_writer, CompiledWindows):
            # branching on a full window would fix the length in a program
            stored_length = cache.layers[0].keys.shape[2]
            key_length, key_start = stored_length + self.query_length, self.cached_length - stored_length
        else:
            key_length, key_start = cache.get_mask_sizes(self.query_length, 0)
            stored_length = min(self.cached_length, window - 1)
        start_slots = window - 1 - stored_length if zero_start else 0
        mask = self.mask
        if mask is None and not cache.is_compileable:
            return AttentionLayout(self.query_length, start_slots + key_length, start_slots, zero_start, window)
        if mask is None:
            mask = torch.ones(1, self.cached_length + self.query_length, dtype=torch.bool, device=self.device)
        # a static cache has free slots behind the segment
        mask = mask[:, key_start:]
        mask = F.pad(mask, (0, key_length - mask.shape[1]), value=False)
        return AttentionLayout.from_mask(
            mask, self.cached_length - key_start, self.query_length, start_slots, window, zero_start
        )

    @property
    def has_history(self) -> bool:
        return self.cached_length > 0

    def end(self) -> None:
        mark_pads(self.cache, self.mask)


def mark_pads(cache: Any, mask: torch.Tensor | None) -> None:
    """Record in a cache whether its positions include pads, which later masks must then cover."""
    has_pads = mask is not None
    if not torch.compiler.is_compiling() and has_pads != getattr(cache, "has_pads", False):
        cache.has_pads = has_pads


def new_cache_for(config: TransfoXLConfig, length: int) -> DynamicCache:
    """An empty cache for a segment of this length, which follows the segment rule: `segment_length` records that."""
    cache = DynamicCache(config=config)
    if torch.compiler.is_exporting() and not rules_agree(config, length):
        # a program returns the tensors of a cache, not its `segment_length`
        raise ValueError(
            f"`cache` must be given where a call of {length} positions that returns one is exported, but is None. "
            f"{TWO_RULES}."
        )
    cache.segment_length = length  # type: ignore[attr-defined]
    return cache


def rules_agree(config: TransfoXLConfig, length: int) -> bool:
    """Whether segment rule and window rule give the same keys for a segment of this length at the start of a stream.

    Under the segment rule each position attends to all earlier ones and to all `mem_len` zero states.
    """
    if config.same_length or length <= 1:
        return True
    return config.memory_init == "empty" and length <= config.sliding_window


# --- layers of the cache


def writer_of(cache: Any) -> Any:
    """Appends keys and values to a cache: in place where possible; while compiling, for any cached length."""
    if not torch.compiler.is_compiling():
        return BufferedWindows(cache)
    return CompiledWindows(cache) if all(map(can_compile, cache.layers)) else cache


# buffers of the library's layers; the layers themselves get no attributes, which `torch.export` and pickling would see
window_buffers: "WeakKeyDictionary[DynamicSlidingWindowLayer, KeyValueBuffer]" = WeakKeyDictionary()


class BufferedWindows:
    """Appends to the library's sliding layers in buffers, where possible.

    Args:
        cache (`Cache`): The cache; its own `update` serves layers of other kinds and offloaded ones.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; returns those of cache and segment, `(B, H, S + Q, D)`, and keeps the newest."""
        cache = self.cache
        # a cache without a configuration creates its layers on first use
        layer: Any = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
        needs_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if needs_gradient or cache.offloading or not can_buffer(layer):
            return self._update_unrolled(key_states, value_states, layer_idx)
        new_length = key_states.shape[-2]
        claimed = claim_slots((layer.keys, layer.values), new_length, window_buffers.get(layer))
        if claimed is None:
            window_buffers.pop(layer, None)
            return self._update_unrolled(key_states, value_states, layer_idx)
        layer.cumulative_length += new_length
        buffer, first, end = claimed
        window_buffers[layer] = buffer
        for slots, new in zip(buffer.views(end - new_length, end), (key_states, value_states), strict=True):
            slots.copy_(new)
        layer.keys, layer.values = buffer.views(max(first, end - layer.sliding_window + 1), end)
        keys, values = buffer.views(first, end)
        return keys, values

    def _update_unrolled(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.cache.update(key_states, value_states, layer_idx)
        return keys, values


def can_buffer(layer: Any) -> bool:
    """Whether a buffer can hold the positions of a layer: a sliding one of the library's own class."""
    return type(layer) is DynamicSlidingWindowLayer and can_compile(layer)


def can_compile(layer: Any) -> bool:
    """Whether `CompiledWindows` can update a layer: a sliding one with stored positions, those of its window only."""
    # `record_past`: the layer keeps positions beyond the window, for assisted decoding to remove
    return isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized and not layer.record_past


class CompiledWindows:
    """Appends to the sliding layers of a cache in compiled programs that serve any number of stored positions.

    Args:
        cache (`DynamicCache`): A cache for whose layers `can_compile` holds.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; returns those of cache and segment, `(B, H, S + Q, D)`, and keeps the newest."""
        layer = self.cache.layers[layer_idx]
        layer.cumulative_length += key_states.shape[-2]
        full = torch.cat([layer.keys, key_states], dim=-2), torch.cat([layer.values, value_states], dim=-2)
        kept = torch.sym_min(layer.sliding_window - 1, full[0].shape[-2])
        layer.keys, layer.values = (
            newest_positions(states, kept).clone(memory_format=torch.contiguous_format) for states in full
        )
        return full


__all__ = ["LibrarySegment", "new_cache_for", "writer_of"]

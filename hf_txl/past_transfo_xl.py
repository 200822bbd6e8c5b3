"""What a call of the model continues from: nothing, a segment memory, or one of the library's caches.

Each is a `Past` that says where the call's queries and keys lie, hands the layers what they remember and takes what
they are to remember. It is apart because the two kinds of state follow different rules (`TransfoXLMemory`: the segment
rule of section 3.2 in [Dai et al., 2019](https://arxiv.org/abs/1901.02860); library caches: a sliding window), of
which the model need know nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.utils import logging

from .cache_transfo_xl import TransfoXLMemory, check_keys
from .configuration_transfo_xl import TransfoXLConfig, segment_window
from .positions_transfo_xl import AttentionLayout, RelativeKeys, sinusoid_embeddings
from .rolling_transfo_xl import CompiledWindows, RollingWindows, can_compile
from .sharing_transfo_xl import SharedStates

logger = logging.get_logger(__name__)

TWO_RULES = (
    "without a cache a position sees the whole segment before it, with one only what the memory would hold. Read the "
    "beginning with `cache=DynamicCache(config=model.config)` (`past_key_values` before transformers 5.24) or with a "
    "`TransfoXLMemory`; or use `same_length=True`, where both are one"
)

# B batch   S stored positions   Q positions of the segment   K keys


class Past:
    """One segment at the start of a stream, and what the other pasts share.

    Args:
        config (`TransfoXLConfig`): Configuration of the model.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): Input of the first layer.
        attention_mask (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): 0 for pads.
        new_cache (*optional*): An empty cache of the library to fill with this segment.
    """

    def __init__(
        self,
        config: TransfoXLConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        new_cache: Any = None,
    ):
        self.config = config
        self.batch_size, self.query_length = inputs_embeds.shape[:2]
        self.device, self.dtype = inputs_embeds.device, inputs_embeds.dtype
        self.clamp_len = config.clamp_len
        # what the model returns, and where keys and values are kept, if anywhere
        self.cache = self.key_value_store = new_cache
        if new_cache is not None and not torch.compiler.is_compiling():
            self.key_value_store = RollingWindows(new_cache)
        self.mask = self._real_tokens(attention_mask, 0)

    def _real_tokens(self, attention_mask: torch.Tensor | None, past_length: int) -> torch.Tensor | None:
        """The mask as booleans over past and segment, `None` if all of it is real."""
        if attention_mask is None:
            return None
        total = past_length + self.query_length
        if attention_mask.dim() != 2 or list(attention_mask.shape) not in (
            [self.batch_size, self.query_length],
            [self.batch_size, total],
        ):
            either = f" or [{self.batch_size}, {total}], the cache included," if past_length else ","
            raise ValueError(
                f"`attention_mask` must have shape [{self.batch_size}, {self.query_length}]{either} "
                f"but has {list(attention_mask.shape)}."
            )
        # in a step of decoding it is the mask of the prompt and a new token
        if self.query_length > 1:
            check_mask_values(attention_mask)
        mask = attention_mask.to(device=self.device, dtype=torch.bool)
        mask = F.pad(mask, (total - mask.shape[1], 0), value=True)
        return None if not torch.compiler.is_compiling() and mask.all() else mask

    def check_position_ids(self, position_ids: torch.Tensor) -> None:
        """Refuse positions other than those the model computes with, which the order of the real tokens gives.

        Args:
            position_ids (`torch.Tensor` of shape `(batch_size, query_length)` or `(1, query_length)`): At pads, any.

        Raises:
            ValueError: if they restart, leave gaps, go back or begin elsewhere; in a program, which reads no values.
        """
        shapes = [[self.batch_size, self.query_length], [1, self.query_length]]
        if list(position_ids.shape) not in shapes:
            raise ValueError(f"`position_ids` must have shape {shapes[0]}, but has {list(position_ids.shape)}.")
        if torch.compiler.is_compiling():
            raise ValueError(
                "`position_ids` must be None where the model is compiled or exported, but is given: a program cannot "
                "read whether they are those of the order of the tokens, which are computed with."
            )
        if position_ids.is_meta or self.device.type == "meta":
            return
        real = torch.ones(self.batch_size, self.query_length, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            real = self.mask[:, -self.query_length :]
        # the position before the first real token, as each real token has it
        origin = position_ids.to(self.device) - real.long().cumsum(1)
        row_origin = origin.gather(1, real.int().argmax(1, keepdim=True))
        wrong = ((origin != row_origin) & real).any(1)
        wrong |= real.any(1) & ~self._may_begin_at(row_origin.flatten() + 1)
        if wrong.any():
            row = int(wrong.int().argmax())
            values = position_ids.expand(self.batch_size, -1)[row].tolist()
            raise ValueError(
                f"`position_ids` must count the real tokens of each row one by one from {self._positions_begin()}, "
                f"but is {values} in row {row}: a row is read as one text in the order of its tokens. Leave them out; "
                "give each text a row of its own, padded on either side, instead of packing several into one."
            )

    def _may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether `(B,)` positions may be those of the first real tokens of the segment."""
        return positions == 0

    def _positions_begin(self) -> str:
        """The same for an error message."""
        return "0"

    def layout(self) -> AttentionLayout:
        """Where queries and keys lie: the segment, causally (or the window, with `same_length`)."""
        config = self.config
        zero_start = config.memory_init == "zeros"
        window = segment_window(config.mem_len, config.same_length, config.same_length_includes_oldest)
        start_slots = config.mem_len if zero_start else 0
        if self.mask is None:
            key_length = start_slots + self.query_length
            return AttentionLayout(self.query_length, key_length, start_slots, zero_start, window)
        oldest = torch.full((1, 1), -config.mem_len, device=self.device)
        return AttentionLayout.from_mask(self.mask, 0, self.query_length, start_slots, window, zero_start, oldest)

    def read(self, layer_idx: int, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Stored inputs of a layer, `(B, S, d_model)`, if it kept inputs; `hidden_states` is its input now."""
        return None

    def shared_states(self, layer_idx: int) -> SharedStates | None:
        """Keys and values of a layer that rows share, in front of those that `key_value_store` returns."""
        return None

    def end(self) -> None:
        """The forward is complete: what was read becomes the past of the next call."""

    def relative_keys(
        self,
        layout: AttentionLayout,
        dropout: Callable[[torch.Tensor], torch.Tensor],
        uses_sinusoids: bool,
        keeps: bool,
    ) -> RelativeKeys:
        """Position table of this call; it stays on the cache where keys and values do.

        Args:
            layout (`AttentionLayout`): Where queries and keys lie.
            dropout (`Callable`): Applied to the sinusoids.
            uses_sinusoids (`bool`): Whether the model's attention kind reads them.
            keeps (`bool`): Whether this call is inference, so that projections may be kept.
        """
        store: Any = self.cache if self.key_value_store is not None else None
        num_distances, num_future, smaller = layout.key_length, layout.query_length, None
        if store is not None and keeps:
            compiles = torch.compiler.is_compiling()
            # all distances that calls with as many queries will ask for: a program knows one size only
            longest = max(num_distances, self.reach + num_future)
            needed = longest if compiles else num_distances
            kept = getattr(store, "relative_keys", None) if self.goes_on else None
            if kept is not None and kept.fits(self.clamp_len, self.dtype, self.device):
                if kept.num_distances >= needed and kept.num_future >= num_future:
                    return kept
                if not compiles:
                    smaller, num_future = kept, max(num_future, kept.num_future)
            if smaller is not None and smaller.num_distances >= needed:
                num_distances = smaller.num_distances
            else:
                # a short text needs little of the table, and a long one makes it in a few pieces
                num_distances = longest if compiles else min(longest, 2 * num_distances)
        distances = torch.arange(num_distances - 1, -num_future - 1, -1, device=self.device)
        distances = distances.clamp(min=0)
        embeddings = None
        if uses_sinusoids:
            clamped = distances.clamp(max=self.clamp_len) if self.clamp_len > 0 else distances
            embeddings = dropout(sinusoid_embeddings(clamped, self.config.d_model).to(self.dtype))
        keeps = keeps and store is not None
        table = RelativeKeys(distances, num_future, self.clamp_len, self.dtype, embeddings, keeps, smaller)
        if table.keeps:
            store.relative_keys = table
        return table

    @property
    def goes_on(self) -> bool:
        """Whether the cache has read something before."""
        return False

    @property
    def reach(self) -> int:
        """How many positions the cache holds at most."""
        return self.config.mem_len


class MemoryPast(Past):
    """A `TransfoXLMemory`: all of it and the segment, causally (or the window, with `same_length`)."""

    def __init__(
        self,
        config: TransfoXLConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        memory: TransfoXLMemory,
        records_gradients: bool,
    ):
        super().__init__(config, inputs_embeds, attention_mask)
        if len(memory.layers) != config.n_layer:
            raise ValueError(f"`cache` must have `n_layer` ({config.n_layer}) layers, but has {len(memory.layers)}.")
        self.memory = self.cache = memory
        self.clamp_len = memory.clamp_len
        storage = memory.begin(inputs_embeds, self.mask, records_gradients)
        self.key_value_store = memory if storage == "keys_values" else None

    def _may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        # a memory does not count what it has read: positions may go on or be those of each segment, the same way in
        # all rows that remember something, of which none begins a text
        lengths = self.memory.lengths
        if lengths is None:
            remembers = torch.full_like(positions, self.memory.stored_length > 0, dtype=torch.bool)
        else:
            remembers = lengths.to(self.device) > 0
        if self.mask is not None:
            remembers &= self.mask.any(1)
        restarts = remembers & (positions == 0)
        return ~restarts | (restarts == remembers).all()

    def _positions_begin(self) -> str:
        return "0, or in no row that remembers something from 0 (`memory.reset(rows)` begins a text)"

    def layout(self) -> AttentionLayout:
        memory, stored_length = self.memory, self.memory.stored_length
        start_slots = memory.start_slots
        zero_start = memory.memory_init == "zeros"
        if memory.real_mask is not None:
            stored = torch.tensor(stored_length, device=self.device) if memory.lengths is None else memory.lengths
            return AttentionLayout.from_mask(
                memory.real_mask,
                stored_length,
                self.query_length,
                start_slots,
                memory.window,
                zero_start,
                oldest=(stored - memory.mem_len).view(-1, 1),
            )
        key_length = start_slots + stored_length + self.query_length
        stored_mask = memory.stored_mask()
        key_mask = start_mask = None
        if stored_mask is not None and zero_start:
            start_mask = F.pad(~stored_mask, (start_slots, self.query_length), value=False)
        elif stored_mask is not None:
            key_mask = F.pad(stored_mask, (0, self.query_length), value=True)
        return AttentionLayout(
            self.query_length, key_length, start_slots, zero_start, memory.window, key_mask, start_mask
        )

    def read(self, layer_idx: int, hidden_states: torch.Tensor) -> torch.Tensor | None:
        if self.key_value_store is None:
            self.memory.write(layer_idx, hidden_states)
        return self.memory.layers[layer_idx].hidden_states

    def shared_states(self, layer_idx: int) -> SharedStates | None:
        return self.memory.layers[layer_idx].shared

    def end(self) -> None:
        self.memory.commit(self.batch_size, self.query_length)

    @property
    def goes_on(self) -> bool:
        return self.memory.stored_length > 0

    @property
    def reach(self) -> int:
        return self.memory.mem_len


class LibraryPast(Past):
    """A cache of the library that was given: every position sees itself and what the memory would hold."""

    def __init__(
        self, config: TransfoXLConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, cache: Any
    ):
        super().__init__(config, inputs_embeds, None, new_cache=cache)
        self._check()
        if torch.compiler.is_compiling() and all(map(can_compile, cache.layers)):
            self.key_value_store = CompiledWindows(cache)
        self.past_length = cache.get_seq_length()
        self._check_rule()
        self.mask = self._real_tokens(attention_mask, self.past_length)

    def _check_rule(self) -> None:
        """Refuse what a call without a cache has left where it reads by another rule than what goes on from it."""
        length = getattr(self.cache, "segment_length", 0)
        if length and self.past_length == 0:
            # it was emptied
            self.cache.segment_length = 0
        elif length and not rules_agree(self.config, length):
            raise ValueError(
                f"`cache` must have been filled by the window rule, by which it goes on, but a call without a cache "
                f"has filled it with one segment of {length} positions: {TWO_RULES}."
            )

    def _check(self) -> None:
        """Refuse what another model or batch has left; the library would fail deep inside, or not at all."""
        config, layers = self.config, self.cache.layers
        # a cache without a configuration makes its layers one by one
        if len(layers) not in (0, config.n_layer):
            raise ValueError(f"`cache` must have `n_layer` ({config.n_layer}) layers, but has {len(layers)}.")
        if self.cache.is_compileable and config.memory_init == "zeros":
            raise ValueError(
                "A static cache needs `memory_init='empty'`: zero states before the first token are not stored, "
                "but `memory_init` is 'zeros'. Use a dynamic cache (the default) or a `TransfoXLMemory`."
            )
        stored = getattr(layers[0], "keys", None) if layers else None
        if stored is not None and stored.numel():
            # under autocast the type of new keys is decided later
            dtype = stored.dtype if torch.is_autocast_enabled(self.device.type) else self.dtype
            shape = (self.batch_size, config.n_head, 0, config.d_head)
            check_keys(stored, torch.empty(shape, dtype=dtype, device=self.device))

    def _may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        return positions == (self.past_length if self.mask is None else self.mask[:, : self.past_length].sum(1))

    def _positions_begin(self) -> str:
        return f"the number of real tokens that `cache` has read (it has read {int(self.past_length)} in all)"

    def layout(self) -> AttentionLayout:
        config, cache = self.config, self.cache
        zero_start = config.memory_init == "zeros"
        window = config.sliding_window
        if isinstance(self.key_value_store, CompiledWindows):
            # asks no length whether it is that of the window, which would take another program
            stored_length = cache.layers[0].keys.shape[2]
            key_length, key_start = stored_length + self.query_length, self.past_length - stored_length
        else:
            key_length, key_start = cache.get_mask_sizes(self.query_length, 0)
            stored_length = min(self.past_length, window - 1)
        start_slots = window - 1 - stored_length if zero_start else 0
        mask = self.mask
        if mask is None and not cache.is_compileable:
            return AttentionLayout(self.query_length, start_slots + key_length, start_slots, zero_start, window)
        if mask is None:
            mask = torch.ones(1, self.past_length + self.query_length, dtype=torch.bool, device=self.device)
        # a static cache has free slots behind the segment
        mask = mask[:, key_start:]
        mask = F.pad(mask, (0, key_length - mask.shape[1]), value=False)
        return AttentionLayout.from_mask(
            mask, self.past_length - key_start, self.query_length, start_slots, window, zero_start
        )

    @property
    def goes_on(self) -> bool:
        return self.past_length > 0


def _cache_of_a_segment(config: TransfoXLConfig, length: int) -> DynamicCache:
    """An empty cache for a segment that is read by the segment rule; it knows that, see `LibraryPast`."""
    cache = DynamicCache(config=config)
    if torch.compiler.is_exporting() and not rules_agree(config, length):
        # outside a program a cache is its tensors
        raise ValueError(
            f"`cache` must be given to export a call of {length} positions that returns one, but is None: {TWO_RULES}."
        )
    cache.segment_length = length  # type: ignore[attr-defined]
    return cache


def rules_agree(config: TransfoXLConfig, length: int) -> bool:
    """Whether a segment of this length at the start of a stream has the same keys by the segment and the window rule.

    By the segment rule each position sees all before it, and all the zero states there may be before the first.
    """
    if config.same_length or length <= 1:
        return True
    return config.memory_init == "empty" and length <= config.sliding_window


def check_mask_values(attention_mask: torch.Tensor) -> None:
    """Refuse masks with other values than 0 and 1, such as numbers of packed texts, or terms added to scores."""
    if attention_mask.dtype == torch.bool or torch.compiler.is_compiling() or attention_mask.is_meta:
        return
    if ((attention_mask != 0) & (attention_mask != 1)).any():
        raise ValueError(
            "`attention_mask` must hold 1 for real tokens and 0 for pads, but has values from "
            f"{attention_mask.min().item()} to {attention_mask.max().item()}. Token ids are passed as `labels=`; give "
            "texts that are numbered rows of their own."
        )


def open_past(
    config: TransfoXLConfig,
    cache: Any,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    fills_new_cache: bool,
    records_gradients: bool,
) -> Past:
    """The past that an argument `cache` means.

    Args:
        config (`TransfoXLConfig`): Configuration of the model.
        cache (`TransfoXLMemory` or a cache of the library, *optional*): The argument.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): Input of the first layer.
        attention_mask (`torch.Tensor`, *optional*): 0 for pads.
        fills_new_cache (`bool`): Whether a call without a cache returns one.
        records_gradients (`bool`): Whether the call can be differentiated.

    Raises:
        TypeError: if `cache` is something else.
        ValueError: if it belongs to another model or batch.
    """
    if isinstance(cache, TransfoXLMemory):
        return MemoryPast(config, inputs_embeds, attention_mask, cache, records_gradients)
    if cache is not None and config.is_absolute:
        raise ValueError(
            f"`cache` must be a `TransfoXLMemory` for `attention_kind={config.attention_kind!r}`, whose keys and "
            f"values change from call to call with the positions, but is a {type(cache).__name__}."
        )
    remembers = config.sliding_window > 1 and not config.is_absolute
    if cache is None:
        new_cache = _cache_of_a_segment(config, inputs_embeds.shape[1]) if fills_new_cache and remembers else None
        return Past(config, inputs_embeds, attention_mask, new_cache)
    if not hasattr(cache, "get_mask_sizes"):
        raise TypeError(
            "`cache` must be a `TransfoXLMemory` or a `Cache` of transformers, but is a "
            f"{type(cache).__name__}; `TransfoXLMemory.from_mems` reads a list of tensors."
        )
    if not remembers:
        logger.warning_once(f"`cache` is ignored: with `mem_len={config.mem_len}` nothing is remembered.")
        return Past(config, inputs_embeds, attention_mask)
    return LibraryPast(config, inputs_embeds, attention_mask, cache)


__all__ = ["LibraryPast", "MemoryPast", "Past", "open_past"]

"""State of one call of a model: its mask, the layout of queries and keys, and its position table.

`Segment` is a call without a memory or cache; subclasses in `memory_update_transfo_xl.py` and
`library_caches_transfo_xl.py` continue one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .arguments_transfo_xl import refuse_any
from .configuration_transfo_xl import TransfoXLConfig, segment_window
from .layout_transfo_xl import AttentionLayout
from .packed_texts_transfo_xl import packed_layout
from .positions_transfo_xl import PositionTable, grow_table, sinusoid_embeddings
from .shared_prefix_transfo_xl import KeyValuePrefix

# B batch   S stored positions   Q positions of the segment   K keys


class Segment:
    """A segment at the start of a stream.

    Args:
        config (`TransfoXLConfig`): Configuration of the model.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, query_length, d_model)`): Input of the first layer.
        attention_mask (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): 0 for pads.
        cache (*optional*): Cache that the call returns; the segment is appended to it.
        writer (*optional*): Appends keys and values to `cache`, see `key_value_writer`.
        starts (`torch.Tensor` of shape `(batch_size, query_length)`, *optional*): Tokens that begin a text.
    """

    def __init__(
        self,
        config: TransfoXLConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any = None,
        writer: Any = None,
        starts: torch.Tensor | None = None,
    ):
        self.config = config
        self.batch_size, self.query_length = inputs_embeds.shape[:2]
        self.device, self.dtype = inputs_embeds.device, inputs_embeds.dtype
        self.clamp_len = config.clamp_len
        self.cache, self._writer = cache, writer
        self.starts = starts
        self.mask = self.real_tokens(attention_mask, 0)
        if self.mask is None and starts is not None:
            self.mask = torch.ones_like(starts)

    @property
    def key_value_writer(self) -> Any:
        """Its `update(keys, values, layer_idx)` appends keys and values of a layer and returns all; or `None`."""
        return self._writer

    def real_tokens(self, attention_mask: torch.Tensor | None, cached_length: int) -> torch.Tensor | None:
        """Boolean mask of cached positions and segment, `(B, cached_length + Q)`; `None` if all tokens are real."""
        if attention_mask is None:
            return None
        total = cached_length + self.query_length
        if attention_mask.dim() != 2 or list(attention_mask.shape) not in (
            [self.batch_size, self.query_length],
            [self.batch_size, total],
        ):
            either = f" or [{self.batch_size}, {total}], the cache included," if cached_length else ","
            raise ValueError(
                f"`attention_mask` must have shape [{self.batch_size}, {self.query_length}]{either} "
                f"but has {list(attention_mask.shape)}."
            )
        # a decoding step has the mask of the prompt, extended by the library
        if torch.compiler.is_compiling() or self.query_length > 1:
            check_mask_values(attention_mask)
        mask = attention_mask.to(device=self.device, dtype=torch.bool)
        mask = F.pad(mask, (total - mask.shape[1], 0), value=True)
        return None if not torch.compiler.is_compiling() and mask.all() else mask

    def layout(self) -> AttentionLayout:
        """Layout of queries and keys: the segment, causally, or a sliding window with `same_length`."""
        config = self.config
        zero_start = config.memory_init == "zeros"
        window = segment_window(config.mem_len, config.same_length, config.same_length_includes_oldest)
        start_slots = config.mem_len if zero_start else 0
        if self.starts is not None and self.mask is not None:
            return packed_layout(self.mask, self.starts, window, config.mem_len, zero_start)
        if self.mask is None:
            key_length = start_slots + self.query_length
            return AttentionLayout(self.query_length, key_length, start_slots, zero_start, window)
        oldest = torch.full((1, 1), -config.mem_len, device=self.device)
        return AttentionLayout.from_mask(self.mask, 0, self.query_length, start_slots, window, zero_start, oldest)

    def memory_states(self, layer_idx: int, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Stored hidden states of a layer, `(B, S, d_model)`, if any.

        Args:
            layer_idx (`int`): Index of the layer.
            hidden_states (`torch.Tensor` of shape `(B, Q, d_model)`): Its input in this segment, to be stored.
        """
        return None

    def shared_prefix(self, layer_idx: int) -> KeyValuePrefix | None:
        """Keys and values of a layer that batch rows share; they precede those that `key_value_writer` returns."""
        return None

    def end(self) -> None:
        """Called after all layers: advances the memory."""

    # --- positions

    def check_position_ids(self, position_ids: torch.Tensor) -> None:
        """Refuse positions other than those implied by the order of the real tokens.

        Args:
            position_ids (`torch.Tensor` of shape `(batch_size, query_length)` or `(1, query_length)`):
                Positions; those of pads are ignored.

        Raises:
            ValueError: if positions are not consecutive or start elsewhere; always while compiling or exporting.
        """
        shapes = [[self.batch_size, self.query_length], [1, self.query_length]]
        if list(position_ids.shape) not in shapes:
            raise ValueError(f"`position_ids` must have shape {shapes[0]}, but has {list(position_ids.shape)}.")
        if torch.compiler.is_compiling():
            raise ValueError(
                "`position_ids` must be None where the model is compiled or exported, but is given: a program cannot "
                "check that they follow the order of the tokens."
            )
        if position_ids.is_meta or self.device.type == "meta":
            return
        real = torch.ones(self.batch_size, self.query_length, dtype=torch.bool, device=self.device)
        if self.mask is not None:
            real = self.mask[:, -self.query_length :]
        # the position before the first real token, derived from each real token
        origin = position_ids.to(self.device) - real.long().cumsum(1)
        row_origin = origin.gather(1, real.int().argmax(1, keepdim=True))
        misplaced = origin != row_origin
        if self.starts is not None:
            # texts after the first of a row count from 0
            count = real.long().cumsum(1)
            begin = (count * self.starts).cummax(1).values
            misplaced = torch.where(begin > 0, position_ids.to(self.device) != count - begin, misplaced)
        wrong = (misplaced & real).any(1)
        wrong |= real.any(1) & ~self.may_begin_at(row_origin.flatten() + 1)
        if wrong.any():
            row = int(wrong.int().argmax())
            values = position_ids.expand(self.batch_size, -1)[row].tolist()
            raise ValueError(
                f"`position_ids` must number the real tokens of each row consecutively from {self.positions_begin()}, "
                f"and from 0 again where a further text begins, but is {values} in row {row}."
            )

    def may_begin_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether `(B,)` positions are valid for the first real token of each row."""
        return positions == 0

    def positions_begin(self) -> str:
        """The valid first positions, in words."""
        return "0"

    @property
    def has_history(self) -> bool:
        """Whether the memory or cache holds positions of earlier segments."""
        return False

    @property
    def max_stored(self) -> int:
        """Maximum number of positions that the memory or cache stores."""
        return self.config.mem_len

    def position_table(
        self,
        layout: AttentionLayout,
        dropout: Callable[[torch.Tensor], torch.Tensor],
        uses_sinusoids: bool,
        keeps: bool,
    ) -> PositionTable:
        """Position table of this call, cached together with keys and values.

        Args:
            layout (`AttentionLayout`): Layout of queries and keys.
            dropout (`Callable`): Applied to the sinusoids.
            uses_sinusoids (`bool`): Whether the attention kind uses sinusoids.
            keeps (`bool`): Whether relative keys may be cached, as in inference.
        """
        owner: Any = self.cache if self.key_value_writer is not None else None
        keeps = keeps and owner is not None

        def make(num_distances: int, num_future: int, smaller: PositionTable | None) -> PositionTable:
            distances = torch.arange(num_distances - 1, -num_future - 1, -1, device=self.device).clamp(min=0)
            embeddings = None
            if uses_sinusoids:
                clamped = distances.clamp(max=self.clamp_len) if self.clamp_len > 0 else distances
                embeddings = dropout(sinusoid_embeddings(clamped, self.config.d_model).to(self.dtype))
            return PositionTable(distances, num_future, self.clamp_len, self.dtype, embeddings, keeps, smaller)

        if not keeps:
            return make(layout.key_length, layout.query_length, None)
        previous = getattr(owner, "position_table", None) if self.has_history else None
        if previous is not None and not previous.fits(self.clamp_len, self.dtype, self.device):
            previous = None
        longest = max(layout.key_length, self.max_stored + layout.query_length)
        owner.position_table = grow_table(previous, layout, longest, make)
        return owner.position_table


def check_mask_values(attention_mask: torch.Tensor) -> None:
    """Refuse masks with values other than 0 and 1, such as ids of packed texts or additive masks."""
    if attention_mask.dtype == torch.bool or attention_mask.is_meta:
        return
    refuse_any(
        (attention_mask != 0) & (attention_mask != 1),
        "`attention_mask` must be 1 for real tokens and 0 for pads",
        lambda: (
            f", but has values from {attention_mask.min().item()} to {attention_mask.max().item()} (labels are passed "
            "as `labels=`; each text needs a row of its own)"
        ),
    )


__all__ = ["Segment"]

"""Classifiers: one label for a text of any length, which is read segment by segment with a memory, or one per token.

As in training ([Dai et al., 2019](https://arxiv.org/abs/1901.02860), section 3.2), the memory carries hidden states
from segment to segment, and no gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import can_return_tuple

from .arguments_transfo_xl import check_ids, merge_caches
from .configuration_transfo_xl import POOLINGS, TransfoXLConfig
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import TransfoXLModel, TransfoXLPreTrainedModel
from .outputs_transfo_xl import (
    CACHE_NAME,
    TransfoXLModelOutput,
    TransfoXLSequenceClassifierOutput,
    TransfoXLTokenClassifierOutput,
)


class Piece(NamedTuple):
    """Part of a batch of texts that one call reads.

    Args:
        inputs (`torch.Tensor` of shape `(batch_size, piece_length)` or `(batch_size, piece_length, d_model)`): Inputs.
        mask (`torch.Tensor` of shape `(batch_size, piece_length)`): False for pads.
        is_last (`bool`): Whether the texts end with it.
    """

    inputs: torch.Tensor
    mask: torch.Tensor
    is_last: bool


def pieces_of(
    inputs: torch.Tensor, attention_mask: torch.Tensor | None, segment_length: int, gradient_segments: int = 1
) -> Iterator[Piece]:
    """Cut texts of different lengths so that all of them end with a full segment; the first segment holds the rest.

    Pads are moved to the left, and columns of nothing but pads are left out. The last `gradient_segments` segments are
    one piece, so that gradients pass between them.

    Args:
        inputs (`torch.Tensor` of shape `(batch_size, text_length)` or `(batch_size, text_length, d_model)`): Texts.
        attention_mask (`torch.Tensor` of shape `(batch_size, text_length)`, *optional*): 1 for tokens, 0 for pads.
        segment_length (`int`): Positions of a segment.
        gradient_segments (`int`, defaults to 1): Segments of the last piece.
    """
    mask = inputs.new_ones(inputs.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if not mask.all():
        # a stable sort of 0 for pads and 1 for tokens keeps the order of the tokens
        order = mask.to(torch.uint8).argsort(dim=1, stable=True)
        order = order[:, -max(1, int(mask.sum(dim=1).max())) :]
        rows = torch.arange(len(inputs), device=inputs.device)[:, None]
        mask, inputs = mask[rows, order], inputs[rows, order]
    length = inputs.shape[1]
    last = max(0, length - segment_length * gradient_segments)
    starts = sorted({0, *range(last, 0, -segment_length)})
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        yield Piece(inputs[:, start:stop], mask[:, start:stop], start == last)


class Pool:
    """One vector for each text, of the hidden states of its tokens, which are added piece by piece.

    Args:
        kind (`str`): `"last"`, `"mean"` or `"max"`.
    """

    def __init__(self, kind: str):
        if kind not in POOLINGS:
            raise ValueError(f"`pooling` must be one of {list(POOLINGS)}, but is {kind!r}.")
        self.kind = kind
        self.vectors: torch.Tensor | None = None
        self.num_tokens: torch.Tensor | None = None

    def add(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> None:
        """Add `(batch_size, piece_length, d_model)`, without the positions where the mask is False."""
        vectors, num_tokens = self._pool(hidden_states, mask), mask.sum(dim=1, keepdim=True)
        if self.vectors is None or self.num_tokens is None:
            self.vectors, self.num_tokens = vectors, num_tokens
            return
        self.num_tokens = self.num_tokens + num_tokens
        if self.kind == "mean":
            self.vectors = self.vectors + vectors
        elif self.kind == "max":
            self.vectors = torch.maximum(self.vectors, vectors)
        else:
            self.vectors = torch.where(num_tokens > 0, vectors, self.vectors)

    def _pool(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Of one piece: the state of the rightmost token (the first state without any), the sum or the maximum."""
        if self.kind == "mean":
            return (hidden_states * mask[..., None]).sum(dim=1)
        if self.kind == "max":
            return hidden_states.masked_fill(~mask[..., None], float("-inf")).amax(dim=1)
        rightmost = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
        return hidden_states[torch.arange(len(mask), device=mask.device), rightmost]

    def result(self) -> torch.Tensor:
        """`(batch_size, d_model)`."""
        assert self.vectors is not None and self.num_tokens is not None
        return self.vectors / self.num_tokens.clamp_min(1) if self.kind == "mean" else self.vectors


def read_pieces(model: TransfoXLModel, pieces: Iterator[Piece], memory: TransfoXLMemory, pooling: str) -> torch.Tensor:
    """Read texts with a memory; gradients come from the last piece only.

    Returns:
        `torch.Tensor` of shape `(batch_size, d_model)`: the pooled hidden states.
    """
    pool = Pool(pooling)
    for inputs, mask, is_last in pieces:
        name = "input_ids" if inputs.dim() == 2 else "inputs_embeds"
        # not without gradients, so that the memory stores hidden states, of which the last piece makes its keys
        states = model(**{name: inputs}, attention_mask=None if mask.all() else mask, cache=memory).last_hidden_state
        pool.add(states if is_last else states.detach(), mask)
    return pool.result()


class TransfoXLForSequenceClassification(TransfoXLPreTrainedModel):
    """Transformer-XL with a linear classifier of texts: of the last token, or of all (`config.classifier_pooling`)."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.transformer = TransfoXLModel(config)
        # published name
        self.score = nn.Linear(config.d_model, self.num_labels, bias=False)
        # not inferred from the class name, which is another one in remote code
        self.loss_type = "ForSequenceClassification"
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        segment_length: int | None = None,
        gradient_segments: int = 1,
        **kwargs: Any,
    ) -> TransfoXLSequenceClassifierOutput:
        """Classify each row by the hidden state of its rightmost token, or by all (`config.classifier_pooling`).

        Args:
            input_ids, attention_mask, inputs_embeds, cache, past_key_values, use_cache, output_attentions,
            output_hidden_states, position_ids: As for [`TransfoXLModel`]. Without a mask, `config.pad_token_id` marks
                the positions that do not count, if it is set.
            labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
                Class indices, regression targets or 0/1 per class, depending on `config.problem_type`.
            segment_length (`int`, *optional*):
                Read texts of any length in segments of so many tokens with a memory: `cache`, or a fresh one, which is
                not returned. Texts are cut from the end: all texts of a batch end with a full segment. Default: the
                whole row is one segment.
            gradient_segments (`int`, defaults to 1):
                With `segment_length`, number of segments at the end through which gradients pass. They are read in one
                call, so they are one long segment for the rule of attention; `same_length=True` gives the same logits
                for any number.

        Returns:
            [`TransfoXLSequenceClassifierOutput`] with `logits` of shape `(batch_size, num_labels)`.

        Raises:
            ValueError, TypeError: for invalid arguments; the message names the argument.
        """
        self._check_keywords(kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        inputs: Any = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and inputs is not None:
            self._check_labels(labels, len(inputs))
        options = {
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            **kwargs,
        }
        check_segments(segment_length, gradient_segments, options)
        if segment_length is None:
            outputs = self.transformer(
                input_ids=input_ids,
                attention_mask=attention_mask,
                inputs_embeds=inputs_embeds,
                cache=cache,
                past_key_values=past_key_values,
                return_dict=True,
                **options,
            )
            states = outputs.last_hidden_state
            vectors = self._pool(states, self._token_mask(input_ids, attention_mask, states))
        else:
            outputs = TransfoXLModelOutput()
            if not isinstance(inputs, torch.Tensor):
                raise TypeError(f"`input_ids` must be a tensor, but is a {type(inputs).__name__}.")
            mask = self._token_mask(input_ids, attention_mask, inputs)
            pieces = pieces_of(inputs, mask, segment_length, gradient_segments)
            vectors = self._read(pieces, merge_caches(cache, past_key_values), len(inputs))
        logits = self.score(vectors)

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=num_items
            )
        return TransfoXLSequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )

    def _pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pool = Pool(self.config.classifier_pooling)
        pool.add(states, mask)
        return pool.result()

    def _read(self, pieces: Iterator[Piece], memory: Any, batch_size: int) -> torch.Tensor:
        """Pooled hidden states of texts in pieces, `(batch_size, d_model)`."""
        memory = self.init_memory(batch_size) if memory is None else memory
        return read_pieces(self.transformer, pieces, memory, self.config.classifier_pooling)

    def _token_mask(
        self, input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, inputs: torch.Tensor
    ) -> torch.Tensor:
        """True for tokens, False for pads, `(batch_size, length of the inputs)`."""
        if attention_mask is not None:
            return attention_mask[:, -inputs.shape[1] :].to(inputs.device) != 0
        if input_ids is not None and self.config.pad_token_id is not None:
            return input_ids != self.config.pad_token_id
        return torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)

    def _check_labels(self, labels: torch.Tensor, batch_size: int) -> None:
        if len(labels) != batch_size:
            raise ValueError(f"`labels` must have one entry per row ({batch_size}), but has {len(labels)}.")
        is_class = self.config.problem_type == "single_label_classification" or (
            self.config.problem_type is None and self.num_labels > 1 and not labels.is_floating_point()
        )
        if is_class:
            check_ids("labels", labels, self.num_labels, ignored=-100, bound="num_labels")


def check_segments(segment_length: int | None, gradient_segments: int, options: dict[str, Any]) -> None:
    """Refuse lengths that are none, and options that reading in segments would ignore."""
    for name, number in (("segment_length", segment_length), ("gradient_segments", gradient_segments)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"`{name}` must be an int of 1 or more, but is {number!r}.")
    if segment_length is None:
        if gradient_segments != 1:
            raise ValueError(f"`gradient_segments` must be 1 without `segment_length`, but is {gradient_segments}.")
        return
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(
                f"`{name}` must be None with `segment_length`, which returns logits only, but is {value!r}."
            )


class TransfoXLForTokenClassification(TransfoXLPreTrainedModel):
    """Transformer-XL with a linear classifier of each token. The memory goes on from call to call."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.transformer = TransfoXLModel(config)
        self.score = nn.Linear(config.d_model, self.num_labels)
        # not inferred from the class name, which is another one in remote code
        self.loss_type = "ForTokenClassification"
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> TransfoXLTokenClassifierOutput:
        """Classify each token from what precedes it and from itself.

        Args:
            input_ids, attention_mask, inputs_embeds, cache, past_key_values, use_cache, output_attentions,
            output_hidden_states, position_ids: As for [`TransfoXLModel`].
            labels (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
                Class of each token, not shifted; -100 where there is none, as on pads.

        Returns:
            [`TransfoXLTokenClassifierOutput`] with `logits` of shape `(batch_size, sequence_length, num_labels)`.

        Raises:
            ValueError, TypeError: for invalid arguments; the message names the argument.
        """
        self._check_keywords(kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        logits = self.score(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"`labels` must have shape (batch_size, sequence_length) = {list(logits.shape[:2])}, "
                    f"but has {list(labels.shape)}."
                )
            check_ids("labels", labels, self.num_labels, ignored=-100, bound="num_labels")
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=num_items)
        return TransfoXLTokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )


# see the end of `modeling_transfo_xl`
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.setdefault(
    TransfoXLConfig.model_type, TransfoXLForSequenceClassification.__name__
)
MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.setdefault(
    TransfoXLConfig.model_type, TransfoXLForTokenClassification.__name__
)

__all__ = [
    "Piece",
    "Pool",
    "TransfoXLForSequenceClassification",
    "TransfoXLForTokenClassification",
    "pieces_of",
    "read_pieces",
]

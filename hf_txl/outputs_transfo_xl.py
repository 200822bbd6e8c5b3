"""Outputs of the models.

`CACHE_NAME` is the name of the cache field in the installed release of transformers, which 5.24 renamed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)

from .legacy_names_transfo_xl import LegacyOutputNames

CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class TransfoXLModelOutput(LegacyOutputNames, BaseModelOutputWithPast):
    """Output of [`TransfoXLModel`]: fields of `BaseModelOutputWithPast`."""


@dataclass
class TransfoXLSequenceClassifierOutput(LegacyOutputNames, SequenceClassifierOutputWithPast):
    """Output of [`TransfoXLForSequenceClassification`]: fields of `SequenceClassifierOutputWithPast`."""


@dataclass
class TransfoXLTokenClassifierOutput(LegacyOutputNames, TokenClassifierOutput):
    """Output of [`TransfoXLForTokenClassification`]: fields of `TokenClassifierOutput`, and the cache.

    Args:
        cache / past_key_values: State to continue from; both names are fields, and one of them is set.
    """

    cache: Any = None
    past_key_values: Any = None


@dataclass
class TransfoXLCausalLMOutput(LegacyOutputNames, CausalLMOutputWithPast):
    """Output of [`TransfoXLForCausalLM`].

    Args:
        loss (`torch.Tensor` of shape `()`, *optional*): Sum of `losses` divided by the number of targets not ignored.
        logits (`torch.Tensor` of shape `(batch_size, sequence_length, vocab_size)`, *optional*):
            Log-probabilities with clusters, else plain logits; `softmax` of either is the distribution.
        cache / past_key_values: State to continue from; the name depends on the release.
        hidden_states (`tuple`, *optional*): Embeddings and the output of each layer.
        attentions (`tuple`, *optional*): Attention probabilities of each layer, keys of memory first.
        losses (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
            Negative log-likelihood (nats, float32) of the target of each position; 0 if ignored.
    """

    losses: torch.Tensor | None = None


__all__ = [
    "CACHE_NAME",
    "TransfoXLCausalLMOutput",
    "TransfoXLModelOutput",
    "TransfoXLSequenceClassifierOutput",
    "TransfoXLTokenClassifierOutput",
]

"""Registers the classes with the Auto classes of transformers, as model type `transfo-xl`."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .classification_transfo_xl import TransfoXLForSequenceClassification, TransfoXLForTokenClassification
from .configuration_transfo_xl import TransfoXLConfig
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import (
    TransfoXLForCausalLM,
    TransfoXLLMHeadModel,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from .tokenization_transfo_xl import TransfoXLTokenizer

AutoConfig.register("transfo-xl", TransfoXLConfig, exist_ok=True)
AutoModel.register(TransfoXLConfig, TransfoXLModel, exist_ok=True)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(TransfoXLConfig, TransfoXLForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(TransfoXLConfig, TransfoXLForTokenClassification, exist_ok=True)
AutoTokenizer.register(TransfoXLConfig, tokenizer_class=TransfoXLTokenizer, exist_ok=True)

__all__ = [
    "TransfoXLConfig",
    "TransfoXLForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLForTokenClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLMemory",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
    "TransfoXLTokenizer",
]

"""Transformer-XL for transformers: importing this package registers model type `transfo-xl` with the Auto classes."""

from typing import NoReturn

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from .configuration_transfo_xl import TransfoXLConfig
from .legacy_names_transfo_xl import IMPORTS, describe
from .memory_transfo_xl import TransfoXLMemory
from .modeling_transfo_xl import (
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLLMHeadModel,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from .tokenization_transfo_xl import TransfoXLTokenizer

__version__ = "0.1.0.dev0"

AutoConfig.register("transfo-xl", TransfoXLConfig, exist_ok=True)
AutoModel.register(TransfoXLConfig, TransfoXLModel, exist_ok=True)
AutoModelForCausalLM.register(TransfoXLConfig, TransfoXLForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(TransfoXLConfig, TransfoXLForSequenceClassification, exist_ok=True)
AutoTokenizer.register(TransfoXLConfig, tokenizer_class=TransfoXLTokenizer, exist_ok=True)

__all__ = [
    "TransfoXLConfig",
    "TransfoXLForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLMemory",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
    "TransfoXLTokenizer",
]


def __getattr__(name: str) -> NoReturn:
    if name in IMPORTS:
        # of all errors, `from hf_txl import …` shows the message of an `ImportError` only
        raise ImportError(describe(name, IMPORTS), name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

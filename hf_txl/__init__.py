"""Transformer-XL for transformers: importing this package registers model type `transfo-xl` with the Auto classes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .legacy_names_transfo_xl import IMPORTS, describe

# in the process of the command, classes are imported when one is needed: `hf-txl --help` need not wait for torch
if TYPE_CHECKING or Path(sys.argv[0] if sys.argv else "").stem != "hf-txl":
    from .auto_classes import (
        TransfoXLConfig,
        TransfoXLForCausalLM,
        TransfoXLForSequenceClassification,
        TransfoXLForTokenClassification,
        TransfoXLLMHeadModel,
        TransfoXLMemory,
        TransfoXLModel,
        TransfoXLPreTrainedModel,
        TransfoXLTokenizer,
    )

__version__ = "0.1.0.dev0"

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
    "example_model",
]


def example_model() -> Path:
    """The folder of a small model in the package, for examples and first trials: it loads like any other.

    It has 2 million parameters and 8,002 words and was trained on four novels of the nineteenth century; its card,
    `README.md`, tells how.
    """
    return Path(__file__).parent / "example"


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import auto_classes

        return getattr(auto_classes, name)
    if name in IMPORTS:
        # of all errors, `from hf_txl import …` shows the message of an `ImportError` only
        raise ImportError(describe(name, IMPORTS), name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

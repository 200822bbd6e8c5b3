"""T0, the small model with which reports of users are told, as most tests of single parts use it."""

from typing import Any

import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.outputs_transfo_xl import CACHE_NAME
from tests.model.tiny_models import T0, t0_model

# with the initial weights of T0 attention is nearly uniform; with these a wrong context moves logits by 0.1 and more
LARGE_WEIGHTS = {"init_std": 0.3, "proj_init_std": 0.3}

# how far two correct float32 programs may be apart: hidden states of order 1 to 10, logits and losses likewise
FLOAT32 = {"atol": 2e-5, "rtol": 2e-5}
# a float64 model still takes its sinusoids in float32
FLOAT64 = {"atol": 1e-5, "rtol": 1e-5}
# gradients are sums over many positions, so a relative part is needed
GRADIENTS = {"atol": 1e-5, "rtol": 1e-4}


def make_config(**fields: Any) -> TransfoXLConfig:
    return TransfoXLConfig(**{**T0, **fields})


def make_model(model_class: Any = TransfoXLForCausalLM, **fields: Any) -> Any:
    """T0 with other values for some fields, in eval mode; the same weights for the same fields."""
    return t0_model(model_class, **fields)


def random_ids(*shape: int, seed: int = 1, vocab_size: int = T0["vocab_size"]) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def returned_cache(output: Any) -> Any:
    """The cache of an output, under the name that this version of transformers uses."""
    return output[CACHE_NAME] if CACHE_NAME in output else None


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by name; a parameter without one is left out."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

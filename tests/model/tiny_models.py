"""Small models with weights large enough to matter, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.reference.transformer_xl import SlowMemory, SlowTransfoXL

# odd on purpose: n_head * d_head differs from d_model, clusters have different sizes, the memory is short
TINY: dict[str, Any] = {
    "vocab_size": 41,
    "cutoffs": [11, 23],
    "div_val": 2,
    "d_model": 16,
    "n_head": 3,
    "d_head": 6,
    "d_inner": 24,
    "n_layer": 2,
    "mem_len": 5,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "dropatt": 0.0,
}

# the model that reported cases are described with
T0: dict[str, Any] = {
    "vocab_size": 99,
    "cutoffs": [10, 50, 80],
    "d_model": 32,
    "d_embed": 32,
    "n_head": 4,
    "d_head": 8,
    "d_inner": 64,
    "div_val": 2,
    "n_layer": 3,
    "mem_len": 6,
    "clamp_len": -1,
    "same_length": False,
    "dropout": 0.0,
    "dropatt": 0.0,
    "eos_token_id": 0,
}

WINDOWS = {
    "all": {"same_length": False},
    "window": {"same_length": True},
    "window-with-oldest": {"same_length": True, "same_length_includes_oldest": True},
}
STARTS = ["empty", "zeros"]
STORAGES = ["hidden_states", "keys_values"]


def tiny_config(**changes: Any) -> TransfoXLConfig:
    return TransfoXLConfig(**{**TINY, **changes})


@torch.no_grad()
def randomise(model: Any, seed: int = 0) -> Any:
    """Give every parameter values that no initialisation gives: nothing is zero, nothing is negligible."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_scale = name.endswith("layer_norm.weight")
        parameter.copy_(1 + 0.2 * noise if is_scale else 0.3 * noise)
    return model


def tiny_model(model_class: Any = TransfoXLForCausalLM, seed: int = 0, **changes: Any) -> Any:
    """A random model in eval mode, the same for the same arguments."""
    return randomise(model_class(tiny_config(**changes)), seed).eval()


def t0_model(model_class: Any = TransfoXLForCausalLM, **changes: Any) -> Any:
    """T0 with its own initialisation, as the reports have it."""
    torch.manual_seed(0)
    return model_class(TransfoXLConfig(**{**T0, **changes})).eval()


def slow_twin(model: Any) -> SlowTransfoXL:
    """The slow reference with the weights of a model."""
    state = model.state_dict()
    if not any(name.startswith("transformer.") for name in state):
        state = {f"transformer.{name}": tensor for name, tensor in state.items()}
    return SlowTransfoXL(model.config, state)


@torch.no_grad()
def slow_log_probabilities(
    model: Any,
    segments: list[torch.Tensor],
    memory: list[SlowMemory] | None = None,
    window_rule: bool = False,
    masks: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """What a language model must return for consecutive segments, `(batch, time, vocab)` each; zeros at pads."""
    twin = slow_twin(model)
    memory = twin.new_memory(len(segments[0])) if memory is None else memory
    scores = []
    for index, segment in enumerate(segments):
        mask = None if masks is None else masks[index]
        rows = twin.read(segment, memory, attention_mask=mask, window_rule=window_rule)
        scores.append(twin.scores(rows, segment.shape[1]))
    return scores


def random_ids(*shape: int, vocab_size: int = TINY["vocab_size"], seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed))

"""Random small models and streams for the property tests: odd sizes, all dialects, every bucket in use."""

from typing import Any

import torch
from hypothesis import strategies as st

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM

VOCAB_SIZE = 23

VOCABULARIES = [
    {"cutoffs": [], "div_val": 1, "d_embed": 6},
    {"cutoffs": [], "div_val": 1, "d_embed": 4},
    {"cutoffs": [7, 15], "div_val": 1, "d_embed": 6},
    {"cutoffs": [5, 9, 16], "div_val": 1, "d_embed": 4},
    {"cutoffs": [7, 15], "div_val": 2, "d_embed": 8},
    {"cutoffs": [7, 15], "div_val": 2, "d_embed": 24, "proj_same_dim": False},
    {"cutoffs": [6], "div_val": 3, "d_embed": 6, "tie_projs": [True, False]},
    {"cutoffs": [7, 15], "div_val": 2, "d_embed": 8, "tie_word_embeddings": False, "tie_projs": [False, True, True]},
]


@st.composite
def model_fields(draw: Any, **fixed: Any) -> dict[str, Any]:
    """Fields of a `TransfoXLConfig`; `n_head * d_head` never equals `d_model`."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 6,
        "d_inner": 7,
        "n_head": draw(st.sampled_from([1, 2])),
        "d_head": draw(st.sampled_from([2, 5])),
        "n_layer": draw(st.sampled_from([1, 2])),
        "mem_len": draw(st.integers(0, 7)),
        "clamp_len": draw(st.sampled_from([-1, 2, 4])),
        "same_length": draw(st.booleans()),
        "same_length_includes_oldest": draw(st.booleans()),
        "memory_init": draw(st.sampled_from(["empty", "zeros"])),
        "pre_lnorm": draw(st.booleans()),
        "untie_r": draw(st.booleans()),
        "dropout": 0.0,
        "dropatt": 0.0,
        **draw(st.sampled_from(VOCABULARIES)),
    }
    return {**fields, **fixed}


def build_model(fields: dict[str, Any], backend: str = "eager") -> TransfoXLForCausalLM:
    """A float64 model in eval mode with weights so large that every part of it matters."""
    model = TransfoXLForCausalLM(TransfoXLConfig(**fields)).double().eval()
    model.set_attn_implementation(backend)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if name.endswith("layer_norm.weight") else 0.4 * noise)
    return model


def random_ids(batch_size: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed))


@st.composite
def cuts(draw: Any, length: int) -> list[int]:
    """Segment lengths that add up to `length`, segments of one token among them."""
    ends = draw(st.lists(st.integers(1, length - 1), max_size=4, unique=True)) if length > 1 else []
    bounds = [0, *sorted(ends), length]
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


@st.composite
def masks(draw: Any, batch_size: int, length: int) -> torch.Tensor | None:
    """No mask, left pads, right pads, or pads anywhere; a segment of a row may be all pads."""
    kind = draw(st.sampled_from(["none", "left", "right", "anywhere"]))
    if kind == "none":
        return None
    if kind == "anywhere":
        flags = draw(st.lists(st.booleans(), min_size=batch_size * length, max_size=batch_size * length))
        return torch.tensor(flags).view(batch_size, length).long()
    real = draw(st.lists(st.integers(0, length), min_size=batch_size, max_size=batch_size))
    index = torch.arange(length)
    edge = torch.tensor(real)[:, None]
    return ((index >= length - edge) if kind == "left" else (index < edge)).long()

"""The slow references of the position encodings: against recorded outputs, and against what their equations imply.

`learned_relative` and the absolute kinds have recorded outputs. There are none of `shaw` and `huang`, so those are
tied to the recorded kind where the equations coincide, and to sums done by hand.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_txl.reference.kinds import SlowShaw, slow_model_of
from hf_txl.reference.transformer_xl import SlowMemory, SlowTransfoXL, last_hidden, stacked_memory
from tests.helpers import assert_close
from tests.parity.original_keys import tied_names
from tests.parity.recorded_cases import (
    HIDDEN_STATES,
    LOG_PROBABILITIES,
    LOSSES,
    Recorded,
    case_names,
    evaluation_lengths,
    pytorch_case,
)

# both sides are float64 and do the same sums
EXACT = 1e-12
RELATIVE_OR_WITHOUT_MEMORY = [
    name for pattern in ("shaw-*", "abs-*-no-mem") for name in case_names("pytorch_original", pattern)
]
ABSOLUTE_WITH_MEMORY = [
    "abs-learned-longer-than-table",
    "abs-learned-mem",
    "abs-sin-mem",
    "abs-sin-mem-pre-lnorm-clamp",
]


def slow_model(recorded: Recorded) -> SlowTransfoXL:
    tied = tied_names(recorded.fields)
    return slow_model_of(recorded.namespace, {name: t for name, t in recorded.state.items() if name not in tied})


def compare_segment(recorded: Recorded, model: SlowTransfoXL, memory: list[SlowMemory], index: int) -> None:
    segment = recorded.segment(index)
    name = f"{recorded.name} segment {index}"
    rows = model.read(segment["input_ids"], memory)
    assert_close(f"{name} losses", model.losses(rows, segment["target"]), segment["nll"], LOSSES)
    assert_close(f"{name} hidden states", last_hidden(rows), segment["hidden"], **HIDDEN_STATES)
    if index == recorded.num_segments() - 1:
        scores = model.scores(rows, segment["input_ids"].shape[1])
        assert_close(f"{name} log-probabilities", scores, recorded.expected["last.logprobs"], LOG_PROBABILITIES)


@pytest.mark.parametrize("name", RELATIVE_OR_WITHOUT_MEMORY)
@torch.no_grad()
def test_reference_reproduces_the_original(name: str) -> None:
    recorded = pytorch_case(name)
    model = slow_model(recorded)
    memory = model.new_memory(recorded.case["batch"], **evaluation_lengths(recorded))
    for index in range(recorded.num_segments()):
        compare_segment(recorded, model, memory, index)
        for layer in range(model.config.n_layer):
            if (expected := recorded.segment(index).get(f"mems.{layer}")) is not None:
                actual = stacked_memory(memory, layer)
                assert_close(f"{name} segment {index} memory {layer}", actual, expected, **HIDDEN_STATES)


@pytest.mark.parametrize("name", ABSOLUTE_WITH_MEMORY)
@torch.no_grad()
def test_reference_of_absolute_kinds_reproduces_the_original_given_the_memory_it_used(name: str) -> None:
    """The original adds positions to its stored memory again and again; a memory with that sum, less ours, must do."""
    recorded = pytorch_case(name)
    model = slow_model(recorded)
    lengths = evaluation_lengths(recorded)
    for index in range(recorded.num_segments()):
        memory = model.new_memory(recorded.case["batch"], **lengths)
        segment = recorded.segment(index)
        for row, row_memory in enumerate(memory):
            for layer in range(model.config.n_layer):
                used = segment[f"mems_in_after_call.{layer}"][:, row].double() if index else []
                seen = len(used) + segment["input_ids"].shape[1]
                row_memory.layers[layer] = [
                    vector - model.position(layer, seen - 1 - place, row_memory.clamp_len)
                    for place, vector in enumerate(used)
                ]
        compare_segment(recorded, model, memory, index)


# ---- what the equations imply ----------------------------------------------------------------------------------

FIELDS: dict[str, Any] = {
    "vocab_size": 11,
    "cutoffs": [],
    "div_val": 1,
    "d_model": 6,
    "d_embed": 6,
    "d_inner": 5,
    "n_head": 2,
    "d_head": 4,
    "n_layer": 2,
    "mem_len": 5,
    "clamp_len": -1,
    "same_length": False,
    "same_length_includes_oldest": False,
    "memory_init": "zeros",
    "pre_lnorm": False,
    "untie_r": True,
    "proj_same_dim": True,
    "tie_projs": [False],
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "max_klen": 4,
    "max_relative_distance": 3,
    "shaw_keys": True,
    "shaw_values": True,
}


def random_state(tables: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Weights under published names, of any kind that reads `qkv_net`, and the kind's own."""
    d_model, d_inner, width = FIELDS["d_model"], FIELDS["d_inner"], FIELDS["n_head"] * FIELDS["d_head"]
    shapes = {"transformer.word_emb.emb_layers.0.weight": (11, d_model), "crit.out_layers.0.bias": (11,)}
    for layer in range(FIELDS["n_layer"]):
        prefix = f"transformer.layers.{layer}"
        shapes |= {
            f"{prefix}.dec_attn.qkv_net.weight": (3 * width, d_model),
            f"{prefix}.dec_attn.o_net.weight": (d_model, width),
            f"{prefix}.pos_ff.CoreNet.0.weight": (d_inner, d_model),
            f"{prefix}.pos_ff.CoreNet.0.bias": (d_inner,),
            f"{prefix}.pos_ff.CoreNet.3.weight": (d_model, d_inner),
            f"{prefix}.pos_ff.CoreNet.3.bias": (d_model,),
            **{f"{prefix}.{part}.layer_norm.weight": (d_model,) for part in ("dec_attn", "pos_ff")},
            **{f"{prefix}.{part}.layer_norm.bias": (d_model,) for part in ("dec_attn", "pos_ff")},
            **{f"{prefix}.dec_attn.{name}": shape for name, shape in tables.items()},
        }
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in sorted(shapes.items())
    }


def read_two_segments(kind: str, state: dict[str, torch.Tensor], **fields: Any) -> torch.Tensor:
    config = SimpleNamespace(**{**FIELDS, "attention_kind": kind, **fields})
    model = slow_model_of(config, state)
    memory = model.new_memory(1)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    return torch.cat([last_hidden(model.read(part, memory)) for part in ids.split([5, 4], dim=1)], dim=1)


def in_each_layer(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"transformer.layers.{layer}.dec_attn.{name}": tensor for layer in range(FIELDS["n_layer"])}


@torch.no_grad()
def test_huang_is_the_recorded_kind_without_its_biases() -> None:
    """Its table, nearest distance first, is the original's, farthest first; u and b are zero."""
    heads, size = FIELDS["n_head"], FIELDS["d_head"]
    state = random_state({"relative_key_table": (4, heads, size)})
    tables = {name: tensor.flip(0) for name, tensor in state.items() if name.endswith("relative_key_table")}
    other = {name.replace("relative_key_table", "r_emb"): tensor for name, tensor in tables.items()}
    other |= in_each_layer("r_bias", torch.zeros(4, heads)) | in_each_layer("r_w_bias", torch.zeros(heads, size))
    actual = read_two_segments("huang", state)
    assert_close("hidden states", actual, read_two_segments("learned_relative", state | other), EXACT)


@torch.no_grad()
def test_shaw_without_values_is_huang_with_equal_heads() -> None:
    state = random_state({"relative_key_table": (4, FIELDS["d_head"])})
    per_head = {
        name: tensor[:, None].expand(-1, FIELDS["n_head"], -1)
        for name, tensor in state.items()
        if name.endswith("relative_key_table")
    }
    actual = read_two_segments("shaw", state, shaw_values=False)
    assert_close("hidden states", actual, read_two_segments("huang", state | per_head), EXACT)


@pytest.mark.parametrize("table", ["keys", "values"])
@torch.no_grad()
def test_a_shaw_table_of_zeros_is_no_table(table: str) -> None:
    rows = (4, FIELDS["d_head"])
    state = random_state({"relative_key_table": rows, "relative_value_table": rows})
    name = {"keys": "relative_key_table", "values": "relative_value_table"}[table]
    with_zeros = read_two_segments("shaw", state | in_each_layer(name, torch.zeros(rows)))
    assert_close("hidden states", with_zeros, read_two_segments("shaw", state, **{f"shaw_{table}": False}), EXACT)
    assert (with_zeros - read_two_segments("shaw", state)).abs().max() > 0.01


def test_shaw_by_hand() -> None:
    """One head of one number, tables of two rows, three tokens: every term of equations 3 and 4 written out."""
    config = SimpleNamespace(
        **{**FIELDS, "n_head": 1, "d_head": 1, "d_model": 1, "memory_init": "empty", "max_relative_distance": 1}
    )
    key_table, value_table = [0.3, -0.2], [10.0, 20.0]
    state = {
        "transformer.layers.0.dec_attn.qkv_net.weight": torch.tensor([[2.0], [3.0], [5.0]]),
        "transformer.layers.0.dec_attn.o_net.weight": torch.tensor([[1.0]]),
        "transformer.layers.0.dec_attn.relative_key_table": torch.tensor(key_table)[:, None].double(),
        "transformer.layers.0.dec_attn.relative_value_table": torch.tensor(value_table)[:, None].double(),
    }
    x = [0.1, -0.4, 0.7]
    vectors = [torch.tensor([number], dtype=torch.float64) for number in x]
    model = SlowShaw(config, state)
    outputs, weights = model.attend(0, vectors, SlowMemory(config), window_rule=False)
    # the last token: distances 2, 1 and 0, of which 2 is clipped to 1
    e = [2 * x[2] * (3 * x[0] - 0.2), 2 * x[2] * (3 * x[1] - 0.2), 2 * x[2] * (3 * x[2] + 0.3)]
    total = sum(math.exp(score) for score in e)
    alpha = [math.exp(score) / total for score in e]
    z = alpha[0] * (5 * x[0] + 20) + alpha[1] * (5 * x[1] + 20) + alpha[2] * (5 * x[2] + 10)
    # the tables are given as float32
    assert outputs[2].item() == pytest.approx(z, abs=1e-5)
    assert weights[0, 2].tolist() == pytest.approx(alpha, abs=1e-6)
    assert outputs[0].item() == pytest.approx(5 * x[0] + 10, abs=1e-12)

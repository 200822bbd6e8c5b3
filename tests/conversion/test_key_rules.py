"""The rules of every format there and back, and every tensor and weight accounted for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from hf_txl.conversion.convert import wanted_shapes
from hf_txl.conversion.key_rules import FORMATS
from hf_txl.conversion.state_dict import Fitting, entries, to_source
from tests.parity.recorded_cases import Recorded, case_names, legacy_case, nvidia_case, pytorch_case, tensorflow_case

# d_embed differs from d_model, so that projections exist; buckets and heads of different sizes; 3 layers
SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "d_model": 16,
    "n_head": 3,
    "d_head": 6,
    "d_inner": 20,
    "n_layer": 3,
    "mem_len": 5,
}
VOCABULARIES: dict[str, dict[str, Any]] = {
    "plain": {"cutoffs": [], "div_val": 1},
    "plain, projected": {"cutoffs": [], "div_val": 1, "d_embed": 12, "tie_projs": [False]},
    "one table": {"cutoffs": [11, 23], "div_val": 1, "tie_projs": [False, True, True]},
    "one table, projected": {"cutoffs": [11, 23], "div_val": 1, "d_embed": 12, "tie_projs": [False, True, True]},
    "own projections": {"cutoffs": [11, 23], "div_val": 1, "d_embed": 12, "tie_projs": [False, False, False]},
    "tables": {"cutoffs": [11, 23], "div_val": 2, "tie_projs": [False, True, True]},
    "tables, own projections": {"cutoffs": [11, 23, 30], "div_val": 2, "tie_projs": [False] * 4},
}
UNTIED = {"tie_word_embeddings": False}
# kinds and ties that a format can hold
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "pytorch": {
        "shared biases": {"untie_r": False},
        "untied words": {"untie_r": False, **UNTIED},
        "learned distances": {"attention_kind": "learned_relative", "max_klen": 7},
        "sinusoids": {"attention_kind": "absolute_sinusoid"},
        "learned positions": {"attention_kind": "absolute_learned", "n_head": 2, "d_head": 8, "max_klen": 7},
    },
    "nvidia": {
        "shared biases": {"untie_r": False},
        "untied words": {"untie_r": False, **UNTIED},
        "learned distances": {"attention_kind": "learned_relative", "max_klen": 7},
        "learned positions": {"attention_kind": "absolute_learned", "max_klen": 7},
    },
    "tensorflow": {"shared biases": {"untie_r": False}, "untied biases": {"untie_r": True}},
    "transformers": {
        "shared biases": {"untie_r": False},
        "untied biases": {"untie_r": True},
        "untied words": {"untie_r": True, **UNTIED},
    },
}
each_model = pytest.mark.parametrize(
    ("format", "fields"),
    [
        pytest.param(format, {**SIZES, **vocabulary, **kind}, id=f"{format}-{kind_name}-{vocabulary_name}")
        for format, kinds in KINDS.items()
        for kind_name, kind in kinds.items()
        for vocabulary_name, vocabulary in VOCABULARIES.items()
    ],
)


def random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@each_model
def test_weights_come_back_after_a_round_trip(format: str, fields: dict[str, Any]) -> None:
    config = TransfoXLConfig(**fields)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    weights = random_weights(wanted)
    tensors = to_source(FORMATS[format], config, weights)
    fitting = Fitting(FORMATS[format], config, shapes_of(tensors), wanted)
    back = fitting.read(tensors)
    assert set(back) == set(wanted)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert sorted(fitting.account.used) == sorted(tensors)


@each_model
def test_every_name_stands_for_one_weight(format: str, fields: dict[str, Any]) -> None:
    written_out = entries(FORMATS[format], TransfoXLConfig(**fields))
    for side in ("sources", "targets"):
        names = [name for entry in written_out for name in getattr(entry, side)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("model_class", [TransfoXLModel, TransfoXLForSequenceClassification])
def test_models_without_a_softmax_are_filled(model_class: Any) -> None:
    config = TransfoXLConfig(**SIZES, **VOCABULARIES["tables"], num_labels=3)
    wanted = wanted_shapes(model_class, config)
    weights = random_weights(wanted)
    tensors = to_source(FORMATS["transformers"], config, weights)
    back = Fitting(FORMATS["transformers"], config, shapes_of(tensors), wanted).read(tensors)
    assert all(torch.equal(back[name], weights[name]) for name in wanted)


# ---- recorded checkpoints ----------------------------------------------------------------------------------------

RECORDED = [
    (format, case, name)
    for format, family, case in (
        ("pytorch", "pytorch_original", pytorch_case),
        ("nvidia", "nvidia", nvidia_case),
        ("tensorflow", "tf_original", tensorflow_case),
    )
    for name in case_names(family)
]


@pytest.mark.parametrize(
    ("format", "case", "name"), RECORDED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_rules_give_the_weights_of_the_recorded_cases(format: str, case: Any, name: str) -> None:
    """Against the mapping of the parity tests, which was written independently."""
    recorded: Recorded = case(name)
    config = TransfoXLConfig(**recorded.fields)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    tensors = to_source(FORMATS[format], config, recorded.state)
    back = Fitting(FORMATS[format], config, shapes_of(tensors), wanted).read(tensors)
    assert set(back) == set(wanted)
    assert all(torch.equal(back[name], recorded.state[name]) for name in wanted)


@pytest.mark.parametrize("name", case_names("hf_legacy"))
def test_legacy_names_are_all_known(name: str) -> None:
    recorded = legacy_case(name)
    fitting = Fitting(
        FORMATS["transformers"],
        TransfoXLConfig(**recorded.fields),
        shapes_of(torch.load(recorded.folder / "pytorch_model.bin", weights_only=True)),
        wanted_shapes(
            TransfoXLForSequenceClassification if "seqcls" in name else TransfoXLForCausalLM,
            TransfoXLConfig(**recorded.fields, num_labels=3),
        ),
    )
    fitting.account.raise_if_incomplete()


# ---- what does not fit -------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_named_at_once() -> None:
    config = TransfoXLConfig(**SIZES, **VOCABULARIES["tables"], untie_r=False)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    tensors = to_source(FORMATS["pytorch"], config, random_weights(wanted))
    del tensors["r_w_bias"], tensors["layers.2.pos_ff.CoreNet.0.bias"]
    tensors["crit.cluster_bias"] = torch.zeros(5)
    tensors["layers.3.dec_attn.o_net.weight"] = torch.zeros(2, 2)
    tensors["pos_emb.inv_freq"] = torch.zeros(8)
    fitting = Fitting(FORMATS["pytorch"], config, shapes_of(tensors), wanted)
    with pytest.raises(ValueError) as error:
        fitting.read(tensors)
    message = str(error.value)
    assert "missing: `r_w_bias` (3, 6), `layers.2.pos_ff.CoreNet.0.bias` (20,)" in message
    assert "of another shape: `crit.cluster_bias` (5,) where (2,) is needed" in message
    assert "unexpected: `layers.3.dec_attn.o_net.weight` (2, 2)" in message
    assert "inv_freq" not in message
    assert sum(map(len, fitting.account.ignored.values())) == 1


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("pytorch", "pos_emb.inv_freq2"),
        ("pytorch", "my.pos_emb.inv_freq"),
        ("transformers", "transformer.pos_emb.inv_freq.scale"),
        ("tensorflow", "transformer/r_w_bias/Adam_2"),
        ("tensorflow", "beta1_power_mine"),
        ("tensorflow", "transformer/global_step"),
    ],
)
def test_what_only_looks_like_a_tensor_to_leave_out_is_unexpected(format: str, name: str) -> None:
    config = TransfoXLConfig(**SIZES, **VOCABULARIES["tables"], untie_r=False)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    found = {**shapes_of(to_source(FORMATS[format], config, random_weights(wanted))), name: (1,)}
    account = Fitting(FORMATS[format], config, found, wanted).account
    assert account.unexpected == [f"`{name}` (1,)"]
    assert account.ignored == {}


def test_a_tied_tensor_under_its_second_name_only_is_found() -> None:
    config = TransfoXLConfig(**SIZES, **VOCABULARIES["tables"], untie_r=False)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    weights = random_weights(wanted)
    tensors = to_source(FORMATS["transformers"], config, weights)
    for table in range(3):
        tensors[f"crit.out_layers.{table}.weight"] = tensors.pop(f"transformer.word_emb.emb_layers.{table}.weight")
    for layer in range(3):
        tensors[f"transformer.layers.{layer}.dec_attn.r_w_bias"] = tensors["transformer.r_w_bias"].clone()
    del tensors["transformer.r_w_bias"]
    back = Fitting(FORMATS["transformers"], config, shapes_of(tensors), wanted).read(tensors)
    assert all(torch.equal(back[name], weights[name]) for name in wanted)


def test_tensors_that_should_repeat_another_and_differ_are_refused() -> None:
    config = TransfoXLConfig(**SIZES, **VOCABULARIES["tables"], untie_r=False)
    wanted = wanted_shapes(TransfoXLForCausalLM, config)
    tensors = to_source(FORMATS["pytorch"], config, random_weights(wanted))
    tensors["crit.out_layers.1.weight"] = tensors["word_emb.emb_layers.1.weight"] + 1
    fitting = Fitting(FORMATS["pytorch"], config, shapes_of(tensors), wanted)
    with pytest.raises(ValueError, match="tied by the configuration: `crit.out_layers.1.weight` and `word_emb"):
        fitting.read(tensors)

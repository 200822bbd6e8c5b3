"""Settings that are read off a checkpoint: shapes, ties, what is stored, and what the formats mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.conversion.checkpoint import Checkpoint
from hf_txl.conversion.convert import wanted_shapes
from hf_txl.conversion.key_rules import FORMATS
from hf_txl.conversion.settings import Settings
from hf_txl.conversion.state_dict import Fitting, State, to_source

SIZES: dict[str, Any] = {
    "vocab_size": 41,
    "d_model": 16,
    "n_head": 4,
    "d_head": 6,
    "d_inner": 20,
    "n_layer": 2,
    "untie_r": False,
    "mem_len": 5,
    "clamp_len": 7,
    "same_length": False,
}
ASKED: dict[str, Any] = {"mem_len": 5, "clamp_len": 7, "same_length": False, "pre_lnorm": False}


def checkpoint_of(format: str, tensors: State, **stored: Any) -> Checkpoint:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(format, f"a checkpoint of {format}", [Path("model")], tensors, shapes, stored, "log.txt")


def source_tensors(format: str, **fields: Any) -> State:
    """What a source of a model with these fields holds, tied tensors under their first names only."""
    config = TransfoXLConfig(**{**SIZES, "cutoffs": [], "div_val": 1, **fields})
    generator = torch.Generator().manual_seed(0)
    shapes = wanted_shapes(TransfoXLForCausalLM, config)
    return to_source(
        FORMATS[format], config, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    )


@pytest.mark.parametrize(
    ("dataset", "cutoffs"), [("wt103", [20000, 40000, 200000]), ("lm1b", [60000, 100000, 640000])]
)
@pytest.mark.parametrize("adaptive", [True, False])
def test_an_adaptive_run_on_a_known_corpus_has_its_cutoffs(dataset: str, cutoffs: list[int], adaptive: bool) -> None:
    """`train.py` of the original sets them so; with one table they show nowhere else."""
    vocab_size = cutoffs[-1] + 100
    small = {"d_model": 2, "d_head": 1, "n_head": 1, "d_inner": 2, "n_layer": 1}
    tensors = source_tensors(
        "pytorch", vocab_size=vocab_size, cutoffs=cutoffs, tie_projs=[False] + [True] * 3, **small
    )
    checkpoint = checkpoint_of("pytorch", tensors, dataset=dataset, adaptive=adaptive)
    if adaptive:
        assert Settings(checkpoint, ASKED).config.cutoffs == cutoffs
    else:
        with pytest.raises(ValueError, match=r"must be given.*`cutoffs`"):
            Settings(checkpoint, ASKED)


@pytest.mark.parametrize("cutoffs", [[11, 23], [0, 11, 23], [11, 23, 41], [0, 11, 23, 41]])
def test_cutoffs_may_have_the_ends_of_the_vocabulary(cutoffs: list[int]) -> None:
    """The modules of the original keep the vocabulary size behind them, other readers a 0 before."""
    tensors = source_tensors("pytorch", cutoffs=[11, 23])
    assert Settings(checkpoint_of("pytorch", tensors), {**ASKED, "cutoffs": cutoffs}).config.cutoffs == [11, 23]
    stored = checkpoint_of("pytorch", tensors, cutoffs=cutoffs, n_token=41)
    assert Settings(stored, ASKED).config.cutoffs == [11, 23]


@pytest.mark.parametrize("share_proj", [True, False, [False, True, True]])
def test_projections_are_tied_as_another_reader_calls_it(share_proj: Any) -> None:
    """`share_proj` of keras-transformer-xl; where the shapes show it, they win."""
    config = {"share_proj": share_proj, "cutoffs": [11, 23], "mem_len": 5}
    tied = [share_proj] * 3 if isinstance(share_proj, bool) else share_proj
    tensors = source_tensors("pytorch", cutoffs=[11, 23], tie_projs=tied)
    found = Settings(checkpoint_of("pytorch", tensors, **config), {**ASKED})
    # d_embed is d_model: there are no projections, and the stored value is all there is
    expected = [False, share_proj, share_proj] if isinstance(share_proj, bool) else share_proj
    assert found.config.tie_projs == expected


@pytest.mark.parametrize("copied", [True, False])
def test_tensors_of_equal_values_are_tied_whether_they_share_memory_or_not(copied: bool) -> None:
    """Some ways to save a state dict keep only values."""
    tensors = source_tensors("pytorch", cutoffs=[11, 23], div_val=2, tie_projs=[False, True, True])
    for table in range(3):
        word = tensors[f"word_emb.emb_layers.{table}.weight"]
        tensors[f"crit.out_layers.{table}.weight"] = word.clone() if copied else word
    for bucket in (1, 2):
        projection = tensors[f"word_emb.emb_projs.{bucket}"]
        tensors[f"crit.out_projs.{bucket}"] = projection.clone() if copied else projection
    config = Settings(checkpoint_of("pytorch", tensors), ASKED).config
    assert (config.tie_word_embeddings, config.tie_projs) == (True, [False, True, True])
    tensors["crit.out_layers.1.weight"] = tensors["crit.out_layers.1.weight"] + 1
    tensors["crit.out_projs.2"] = tensors["crit.out_projs.2"] + 1
    config = Settings(checkpoint_of("pytorch", tensors), ASKED).config
    assert (config.tie_word_embeddings, config.tie_projs) == (False, [False, True, False])


@pytest.mark.parametrize("format", ["pytorch", "nvidia"])
def test_heads_are_read_where_tables_are_split_into_them(format: str) -> None:
    """NVIDIA's table of absolute positions is not, so that nobody may guess."""
    fields = {"attention_kind": "absolute_learned", "n_head": 2, "d_head": 8, "max_klen": 9}
    tensors = source_tensors(format, **fields)
    if format == "nvidia":
        with pytest.raises(ValueError, match=r"`n_head` \(.*`d_head` \("):
            Settings(checkpoint_of(format, tensors), ASKED)
    given = ASKED if format == "pytorch" else {**ASKED, "n_head": 2, "d_head": 8}
    config = Settings(checkpoint_of(format, tensors), given).config
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_source_that_is_no_transformer_xl_is_refused_by_the_first_missing_tensor() -> None:
    with pytest.raises(ValueError, match="must hold a Transformer-XL.*word_emb.emb_layers.0.weight"):
        Settings(checkpoint_of("pytorch", {"linear.weight": torch.zeros(2, 2)}), ASKED)


STORED: dict[str, Any] = {
    "vocab_size": 42,
    "cutoffs": [11, 24],
    "d_model": 18,
    "d_embed": 18,
    "n_head": 3,
    "d_head": 8,
    "d_inner": 21,
    "div_val": 4,
    "n_layer": 3,
    "attn_type": 2,
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("format", ["pytorch", "nvidia", "tensorflow"])
def test_a_size_that_is_stored_otherwise_than_the_tensors_have_it_is_refused(format: str, name: str) -> None:
    """One of the two belongs to another model, or tensors were lost; the caller may say that they are right."""
    asked = {key: value for key, value in ASKED.items() if format != "tensorflow" or key != "pre_lnorm"}
    tensors = source_tensors(format, cutoffs=[11, 23], div_val=2)
    right = Settings(checkpoint_of(format, tensors), asked).config
    field = "attention_kind" if name == "attn_type" else name
    with pytest.raises(ValueError, match=rf"must be those of the model that log\.txt describes.*`{field}` is "):
        Settings(checkpoint_of(format, tensors, **{name: STORED[name]}), asked)
    overridden = Settings(
        checkpoint_of(format, tensors, **{name: STORED[name]}), {**asked, field: getattr(right, field)}
    )
    assert overridden.config == right


def test_all_sizes_that_differ_are_in_one_message() -> None:
    with pytest.raises(ValueError) as raised:
        Settings(checkpoint_of("pytorch", source_tensors("pytorch", cutoffs=[11, 23], div_val=2), **STORED), ASKED)
    for name in STORED:
        assert f"`{'attention_kind' if name == 'attn_type' else name}` is" in str(raised.value)


def test_where_stored_ties_differ_from_the_tensors_both_are_shown() -> None:
    """Tensors of equal values can be tied whatever was said."""
    tensors = source_tensors("pytorch")
    tensors["crit.out_layers.0.weight"] = tensors["word_emb.emb_layers.0.weight"].clone()
    found = Settings(
        checkpoint_of("pytorch", tensors, tie_weight=False, d_inner=20, mem_len=5), {**ASKED, "mem_len": 9}
    )
    assert (found.config.tie_word_embeddings, found.config.mem_len) == (True, 9)
    assert found.origins["tie_word_embeddings"] == "shapes (log.txt: False)"
    assert found.origins["d_inner"] == "shapes"
    assert found.origins["mem_len"] == "given (log.txt: 5)"
    assert found.origins["memory_init"] == "format"


@pytest.mark.parametrize("stored", [{}, {"div_val": 4}, {"div_val": 1, "d_embed": -1}])
@pytest.mark.parametrize("div_val", [1, 2, 4])
@pytest.mark.parametrize("d_embed", [16, 12])
def test_a_plain_softmax_may_have_any_div_val(d_embed: int, div_val: int, stored: dict[str, Any]) -> None:
    """The original then projects one table although it may be as wide as the model."""
    fields = {"cutoffs": [], "div_val": div_val, "d_embed": d_embed, "tie_projs": [True]}
    tensors = source_tensors("pytorch", **fields)
    assert ("word_emb.emb_projs.0" in tensors) == (div_val > 1 or d_embed != 16)
    said = stored.get("div_val", div_val)
    if d_embed == 16 and (said > 1) != (div_val > 1):
        with pytest.raises(ValueError, match="`div_val` is"):
            Settings(checkpoint_of("pytorch", tensors, **stored), ASKED)
        return
    config = Settings(checkpoint_of("pytorch", tensors, **stored), ASKED).config
    if "div_val" in stored:
        assert config.div_val == said
    assert fitting_of("pytorch", tensors, config).read(tensors)


@pytest.mark.parametrize(("widths", "div_val"), [((48, 12, 3), 4), ((48, 24, 12), 2), ((10, 2), 5), ((27, 9, 3), 3)])
def test_the_factor_of_the_widths_is_one_that_divides(widths: tuple[int, ...], div_val: int) -> None:
    cutoffs = [11, 23][: len(widths) - 1]
    tensors = source_tensors("pytorch", cutoffs=cutoffs, div_val=div_val, d_embed=widths[0])
    assert tuple(tensors[f"word_emb.emb_layers.{table}.weight"].shape[1] for table in range(len(widths))) == widths
    assert Settings(checkpoint_of("pytorch", tensors), ASKED).config.div_val == div_val


def test_widths_are_rounded_down_as_in_the_original() -> None:
    """50 // 4 and 50 // 16."""
    tensors = source_tensors("pytorch", cutoffs=[11, 23], div_val=4, d_embed=50)
    assert [tensors[f"word_emb.emb_layers.{table}.weight"].shape[1] for table in range(3)] == [50, 12, 3]
    for stored in ({}, {"div_val": 4, "d_embed": 50}):
        config = Settings(checkpoint_of("pytorch", tensors, **stored), ASKED).config
        assert (config.div_val, config.d_embed) == (4, 50)
        assert fitting_of("pytorch", tensors, config).read(tensors)


@pytest.mark.parametrize("format", FORMATS)
def test_more_layers_than_tensors_are_refused_before_a_model_is_built(format: str) -> None:
    """A configuration of a few bytes would make one that fills the memory."""
    tensors = source_tensors(format)
    fields = {**SIZES, "cutoffs": [], "div_val": 1, "tie_word_embeddings": True}
    stored = fields if format == "transformers" else {}
    with pytest.raises(ValueError, match=rf"`n_layer` must be .* but is 10000000, and .* has {len(tensors)} tensors"):
        Settings(checkpoint_of(format, tensors, **stored), {**options_of(format), "n_layer": 10_000_000})


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [41, -1, [3, 41]])
def test_a_token_that_the_vocabulary_does_not_have_is_refused(name: str, value: Any) -> None:
    tensors = source_tensors("transformers")
    fields = {**SIZES, "cutoffs": [], "div_val": 1}
    if isinstance(value, list) and name != "eos_token_id":
        return
    with pytest.raises(ValueError, match=rf"`{name}` must be between 0 and 40 .*, but is "):
        Settings(checkpoint_of("transformers", tensors, **fields, **{name: value}), {})
    assert Settings(checkpoint_of("transformers", tensors, **fields, **{name: value}), {name: 40})


@pytest.mark.parametrize(
    "odd",
    [
        *({"torch_dtype": value} for value in ("torch.float16", "auto", "float99", 5)),
        *({"dtype": "auto"}, {"quantization_config": {"load_in_8bit": True}}, {"auto_map": {"AutoModel": "x.Y"}}),
        *({"_attn_implementation": "flash_attention_2"}, {"_name_or_path": "somewhere"}),
    ],
    ids=str,
)
def test_how_a_model_was_loaded_once_is_not_part_of_it(odd: dict[str, Any]) -> None:
    tensors = source_tensors("transformers")
    fields = {**SIZES, "cutoffs": [], "div_val": 1}
    config = Settings(checkpoint_of("transformers", tensors, **fields, **odd), {}).config
    plain = Settings(checkpoint_of("transformers", tensors, **fields), {}).config
    assert config.to_dict() == plain.to_dict()


@pytest.mark.parametrize("odd", [{"id2label": [1]}, {"num_labels": "x"}, {"n_head": "four"}], ids=str)
def test_a_field_of_another_type_is_one_message_with_the_file(odd: dict[str, Any]) -> None:
    fields = {**SIZES, "cutoffs": [], "div_val": 1, **odd}
    with pytest.raises(ValueError, match="Settings, given or in log.txt, must have the type of their field"):
        Settings(checkpoint_of("transformers", source_tensors("transformers"), **fields), {})


def options_of(format: str) -> dict[str, Any]:
    return {name: value for name, value in ASKED.items() if format != "tensorflow" or name != "pre_lnorm"}


def read_as(format: str, tensors: State, **stored: Any) -> None:
    """What a conversion does before it writes."""
    config = Settings(checkpoint_of(format, tensors, **stored), options_of(format)).config
    fitting_of(format, tensors, config).read(tensors)


def fitting_of(format: str, tensors: State, config: TransfoXLConfig) -> Fitting:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Fitting(FORMATS[format], config, shapes, wanted_shapes(TransfoXLForCausalLM, config))


DAMAGED = {
    # `crit` of NVIDIA's and of the TensorFlow code has the same shapes
    "pytorch": {"cutoffs": [11, 23], "div_val": 2, "tie_projs": [False, True, True]},
    "nvidia": {"cutoffs": [11, 23], "div_val": 2, "tie_projs": [False, True, True]},
    "tensorflow": {"cutoffs": [11, 23], "div_val": 2, "tie_projs": [False, True, True], "untie_r": True},
}


@pytest.mark.parametrize("format", DAMAGED)
def test_a_missing_tensor_is_named_together_with_all_else(format: str) -> None:
    """Also one that settings are read from; only without the embeddings nothing else is known."""
    whole = source_tensors(format, **DAMAGED[format])
    read_as(format, whole)
    # a projection that is lost looks as if it were tied; NVIDIA's code stores which are
    stored = {"tie_projs": DAMAGED[format]["tie_projs"]}
    for name in whole:
        other = next(each for each in reversed(whole) if re.search(r"pos_ff|/ff/", each) and each != name)
        tensors = {key: tensor for key, tensor in whole.items() if key not in (name, other)}
        with pytest.raises(ValueError) as raised:
            read_as(format, {**tensors, "surplus": torch.zeros(1)}, **stored)
        if re.search(r"emb|cutoff_\d/b", name):
            # sizes of the vocabulary are unknown, or do not fit each other
            assert "must" in str(raised.value), name
        else:
            for each in (name, other, "surplus"):
                assert f"`{each}`" in str(raised.value), name


@pytest.mark.parametrize("format", DAMAGED)
@pytest.mark.parametrize("shape", [(), (5,), (4, 0)])
def test_a_tensor_of_any_other_shape_is_refused_by_one_message(format: str, shape: tuple[int, ...]) -> None:
    whole = source_tensors(format, **DAMAGED[format])
    for name in whole:
        with pytest.raises(ValueError, match="must"):
            read_as(format, {**whole, name: torch.zeros(shape)})


def test_a_missing_table_is_named_with_what_it_tells() -> None:
    tensors = source_tensors("pytorch")
    del tensors["word_emb.emb_layers.0.weight"], tensors["r_w_bias"], tensors["r_r_bias"]
    with pytest.raises(ValueError) as raised:
        Settings(checkpoint_of("pytorch", tensors), ASKED)
    assert "`word_emb.emb_layers.0.weight` (determines `vocab_size` and `d_embed`)" in str(raised.value)
    assert "`r_w_bias` (determines `n_head` and `d_head`)" in str(raised.value)


def test_arguments_of_the_original_without_effect_may_be_given() -> None:
    """As in a copy of its arguments; those without meaning are still refused."""
    checkpoint = checkpoint_of("pytorch", source_tensors("pytorch"))
    given = {**ASKED, "tgt_len": 5, "adapt_inp": False, "adaptive": True, "dataset": "enwik8", "n_token": 41}
    assert Settings(checkpoint, given).config == Settings(checkpoint, ASKED).config
    with pytest.raises(ValueError, match="`tgt_length` is not"):
        Settings(checkpoint, {**ASKED, "tgt_length": 5})


@pytest.mark.parametrize("cutoffs", [[11, 23], [11, 23, 41], [0, 11, 23, 41]])
@pytest.mark.parametrize("size", ["vocab_size", "n_token"])
def test_a_configuration_of_transformers_may_have_the_ends_of_the_vocabulary(size: str, cutoffs: list[int]) -> None:
    stored = {**SIZES, "cutoffs": cutoffs, "model_type": "transfo-xl", "title": "kept"}
    stored[size] = stored.pop("vocab_size")
    config = Settings(checkpoint_of("transformers", source_tensors("transformers"), **stored), {}).config
    assert (config.cutoffs, config.vocab_size) == ([11, 23], 41)
    assert config.to_dict()["title"] == "kept"
    # what says nothing is the default, as in the arguments of the original
    stored |= {"d_embed": -1, "mem_len": None, "attn_type": 0, "share_proj": [False, True, False]}
    config = Settings(checkpoint_of("transformers", source_tensors("transformers"), **stored), {}).config
    assert (config.d_embed, config.mem_len, config.tie_projs) == (16, TransfoXLConfig().mem_len, [False, True, False])
    assert (config.attention_kind, "share_proj" in config.to_dict()) == ("transformer_xl", False)
    assert (
        Settings(
            checkpoint_of("transformers", source_tensors("transformers"), **stored), {"mem_len": 9}
        ).config.mem_len
        == 9
    )


@pytest.mark.parametrize("value", ["0", 7, [0], {}, 1.5])
def test_an_odd_attention_type_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`attn_type` must be one of"):
        Settings(checkpoint_of("pytorch", source_tensors("pytorch"), attn_type=value), ASKED)


@pytest.mark.parametrize("format", ["pytorch", "nvidia"])
def test_output_weights_that_are_said_to_be_own_and_are_not_there_are_missing(format: str) -> None:
    """Without a word about it they are taken for tied: a way to save a state dict keeps one name only."""
    tensors = source_tensors(format, cutoffs=[11, 23], div_val=2)
    read_as(format, tensors)
    with pytest.raises(ValueError, match=r"missing: `crit\.out_layers"):
        read_as(format, tensors, tie_weight=False)

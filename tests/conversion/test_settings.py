"""Settings that are read off a checkpoint: shapes, ties, what is stored, and what the formats mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM
from hf_txl.conversion.checkpoint import Checkpoint
from hf_txl.conversion.convert import wanted_shapes
from hf_txl.conversion.key_rules import FORMATS
from hf_txl.conversion.settings import Settings
from hf_txl.conversion.state_dict import State, to_source

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


def test_where_a_stored_value_differs_from_the_shapes_both_are_shown() -> None:
    tensors = source_tensors("pytorch")
    found = Settings(checkpoint_of("pytorch", tensors, n_layer=7, d_inner=20, mem_len=5), {**ASKED, "mem_len": 9})
    assert (found.config.n_layer, found.config.mem_len) == (2, 9)
    assert found.origins["n_layer"] == "shapes (log.txt: 7)"
    assert found.origins["d_inner"] == "shapes"
    assert found.origins["mem_len"] == "given (log.txt: 5)"
    assert found.origins["memory_init"] == "format"


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

"""The configuration of a checkpoint: from the caller, its shapes, what is stored with it, what its format means."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_txl import TransfoXLConfig
from hf_txl.configuration_transfo_xl import ATTENTION_KINDS

from .checkpoint import Checkpoint
from .state_dict import Shapes, is_same

Fields = dict[str, Any]

# What a format means without saying so: the original PyTorch code begins with nothing and lets a query see `mem_len`
# keys, the TensorFlow code begins with zeros and lets it see one more, NVIDIA's code is a mixture.
DIALECTS: dict[str, Fields] = {
    "pytorch": {
        "memory_init": "empty",
        "same_length_includes_oldest": False,
        "layer_norm_epsilon": 1e-5,
        "untie_r": False,
        "proj_same_dim": True,
    },
    "nvidia": {
        "memory_init": "empty",
        "same_length_includes_oldest": True,
        "layer_norm_epsilon": 1e-5,
        "untie_r": False,
        "proj_same_dim": True,
    },
    "tensorflow": {
        "memory_init": "zeros",
        "same_length_includes_oldest": True,
        "layer_norm_epsilon": 1e-12,
        "pre_lnorm": False,
    },
    "transformers": {"memory_init": "zeros", "same_length_includes_oldest": False},
}

# The cutoffs that `train.py --adaptive` takes for a data set, for checkpoints whose shapes do not show them.
CUTOFFS = {"wt103": [20000, 40000, 200000], "lm1b": [60000, 100000, 640000]}

# what neither shapes nor formats tell and nobody may guess
NEEDED = {
    "n_head": "number of attention heads",
    "d_head": "width of a head",
    "cutoffs": "ends of the vocabulary's buckets, without the last: [] for a plain softmax",
    "mem_len": "positions that are remembered",
    "clamp_len": "largest distance that is told apart, -1 for no limit",
    "same_length": "whether every position sees the same number of keys",
    "pre_lnorm": "whether normalisation comes before each sublayer",
}

# names of the original codes that a configuration spells otherwise
RENAMED = {**TransfoXLConfig.attribute_map, "tie_weight": "tie_word_embeddings"}
READ = {name for name in TransfoXLConfig.__annotations__ if not name.startswith("_")}


class Settings:
    """The configuration of a checkpoint, and where each of its fields comes from.

    What the caller gives comes first, then what the shapes show, then what is stored, then what the format means.

    Args:
        checkpoint (`Checkpoint`): What was found.
        given (`dict`): What the caller says, under names of `TransfoXLConfig` or of the original codes.

    Raises:
        ValueError: if a field stays unknown, a name in `given` is no setting, or the values make no model.
    """

    def __init__(self, checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
        given = _renamed(given)
        if unknown := sorted(set(given) - READ):
            raise ValueError(
                f"Settings must be fields of `TransfoXLConfig` or arguments of the original codes, but "
                f"{', '.join(f'`{name}`' for name in unknown)} is not."
            )
        stored = _renamed(checkpoint.stored)
        known = {
            "given": given,
            "shapes": _fields_from_shapes(checkpoint),
            checkpoint.stored_in: {name: value for name, value in stored.items() if name in READ},
            "format": DIALECTS[checkpoint.format],
        }
        self.origins: dict[str, str] = {}
        """Field -> where its value comes from."""
        fields: Fields = {}
        for origin, values in known.items():
            for name, value in values.items():
                if name not in fields:
                    fields[name] = value
                    self.origins[name] = origin
                elif fields[name] != value and origin == checkpoint.stored_in:
                    self.origins[name] += f" ({origin}: {value})"
        if checkpoint.format == "transformers":
            # the file is a configuration already; whatever else it holds is kept
            self.config = _configuration(TransfoXLConfig.from_dict, {**checkpoint.stored, **fields})
            return
        if isinstance(cutoffs := fields.get("cutoffs"), list):
            # the originals keep the vocabulary size behind them, other readers a 0 before
            fields["cutoffs"] = [end for end in cutoffs if end not in (0, fields["vocab_size"])]
        if missing := [name for name in NEEDED if name not in fields]:
            raise ValueError(
                f"These settings must be given, since {checkpoint.found} does not tell them: "
                + ", ".join(f"`{name}` ({NEEDED[name]})" for name in missing)
                + "."
            )
        self.config = _configuration(lambda values: TransfoXLConfig(**values), fields)


def _configuration(make: Callable[[Fields], TransfoXLConfig], fields: Fields) -> TransfoXLConfig:
    """A configuration, or a `ValueError` that names the field whose type is wrong."""
    try:
        return make(fields)
    except StrictDataclassError as error:
        # its first line names the field, the others the types
        raise ValueError("Settings must have the type of their field: " + " ".join(str(error).split())) from error


def _renamed(values: Mapping[str, Any]) -> Fields:
    """Settings of an original code under the names of `TransfoXLConfig`; what says nothing is left out."""
    fields = {RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    if "attn_type" in fields:
        number = fields.pop("attn_type")
        if number not in ATTENTION_KINDS:
            raise ValueError(f"`attn_type` must be one of {list(ATTENTION_KINDS)}, but is {number!r}.")
        fields["attention_kind"] = ATTENTION_KINDS[number]
    if fields.get("adaptive") and fields.get("dataset") in CUTOFFS:
        fields.setdefault("cutoffs", CUTOFFS[fields["dataset"]])
    if (share := fields.pop("share_proj", None)) is not None:
        fields.setdefault("proj_share_all_but_first" if isinstance(share, bool) else "tie_projs", share)
    return fields


# --- shapes


def _fields_from_shapes(checkpoint: Checkpoint) -> Fields:
    if checkpoint.format == "transformers":
        return {}
    read = _tensorflow_fields if checkpoint.format == "tensorflow" else _pytorch_fields
    try:
        return read(checkpoint.shapes, checkpoint.tensors)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint.files[0]} must hold a Transformer-XL, but {checkpoint.found} has no tensor {error}."
        ) from None


def _pytorch_fields(shapes: Shapes, tensors: Mapping[str, torch.Tensor]) -> Fields:
    """Names of the original PyTorch code and, for the softmax, of NVIDIA's."""
    tables = _numbered(shapes, r"word_emb\.emb_layers\.(\d+)\.weight")
    attention = "layers.0.dec_attn."
    fields: Fields = {
        **_vocabulary_fields(tables or [shapes["word_emb.emb_layers.0.weight"]]),
        "n_layer": len(_numbered(shapes, r"layers\.(\d+)\.dec_attn\.o_net\.weight")),
        "d_model": shapes[attention + "layer_norm.weight"][0],
        "d_inner": shapes["layers.0.pos_ff.CoreNet.0.weight"][0],
        "attention_kind": _attention_kind(shapes),
    }
    if "r_emb" in shapes:
        fields["max_klen"] = shapes["r_emb"][1]
    by_head = shapes.get("r_w_bias") or shapes.get("r_emb", ())
    # NVIDIA's table of absolute positions is not split into heads
    if "r_w_bias" in shapes or len(by_head) == 4:
        fields["n_head"], fields["d_head"] = by_head[-2:]
    if "crit.cluster_weight" not in shapes:
        fields["cutoffs"] = []
    outputs = ("crit.out_layers.{}.weight", "crit.out_layers_weights.{}")
    fields["tie_word_embeddings"] = all(
        _is_tied(tensors, output.format(table), f"word_emb.emb_layers.{table}.weight")
        for output in outputs
        for table in range(len(tables))
    )
    if projections := _numbered(shapes, r"word_emb\.emb_projs\.(\d+)"):
        num_buckets = shapes.get("crit.cluster_weight", (0,))[0] + 1
        fields["tie_projs"] = [
            _is_tied(tensors, f"crit.out_projs.{bucket}", f"word_emb.emb_projs.{min(bucket, len(projections) - 1)}")
            for bucket in range(num_buckets)
        ]
    return fields


def _attention_kind(shapes: Shapes) -> str:
    if "layers.0.dec_attn.r_net.weight" in shapes:
        return "transformer_xl"
    if "r_emb" not in shapes:
        return "absolute_sinusoid"
    return "learned_relative" if "r_bias" in shapes else "absolute_learned"


def _tensorflow_fields(shapes: Shapes, tensors: Mapping[str, torch.Tensor]) -> Fields:
    """Names of the original TensorFlow code, whose softmax always shares the embedding's tables."""
    embed, softmax = "transformer/adaptive_embed/", "transformer/adaptive_softmax/"
    tables = _numbered(shapes, embed + r"cutoff_(\d+)/lookup_table")
    biases = _numbered(shapes, softmax + r"cutoff_(\d+)/b")
    d_model = shapes["transformer/layer_0/rel_attn/LayerNorm/gamma"][0]
    fields: Fields = {
        **_vocabulary_fields(tables or [shapes[embed + "lookup_table"]]),
        "cutoffs": _ends([size for (size,) in biases])[:-1],
        "n_layer": len(_numbered(shapes, r"transformer/layer_(\d+)/rel_attn/o/kernel")),
        "d_model": d_model,
        "d_inner": shapes["transformer/layer_0/ff/layer_1/kernel"][1],
        "attention_kind": "transformer_xl",
        "tie_word_embeddings": True,
        "untie_r": len(shapes["transformer/r_w_bias"]) == 3,
        "proj_same_dim": all(
            f"{embed}cutoff_{table}/proj_W" in shapes for table, (_, width) in enumerate(tables) if width == d_model
        ),
        # a plain softmax shares the projection whatever it was told
        "tie_projs": [f"{softmax}cutoff_{bucket}/proj" not in shapes for bucket in range(max(1, len(biases)))],
    }
    fields["n_head"], fields["d_head"] = shapes["transformer/r_w_bias"][-2:]
    return fields


def _vocabulary_fields(tables: list[tuple[int, ...]]) -> Fields:
    """Sizes and widths of the buckets, from the embedding tables (words, width)."""
    fields: Fields = {
        "vocab_size": sum(words for words, _ in tables),
        "d_embed": tables[0][1],
        "div_val": tables[0][1] // tables[1][1] if len(tables) > 1 else 1,
    }
    if len(tables) > 1:
        fields["cutoffs"] = _ends([words for words, _ in tables])[:-1]
    return fields


def _numbered(shapes: Shapes, pattern: str) -> list[tuple[int, ...]]:
    """Shapes of the tensors whose name is `pattern` with 0, 1, 2, … for the group."""
    found = {int(match[1]): shape for name, shape in shapes.items() if (match := re.fullmatch(pattern, name))}
    return [found[number] for number in range(len(found)) if number in found]


def _ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def _is_tied(tensors: Mapping[str, torch.Tensor], name: str, first: str) -> bool:
    """Whether a weight is another one; one that is not there is."""
    if name not in tensors or first not in tensors:
        return name not in tensors
    return is_same(tensors[name], tensors[first])

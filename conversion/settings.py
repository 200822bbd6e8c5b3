"""The configuration of a checkpoint: from the caller, the shapes, stored settings and the defaults of its format."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_txl import TransfoXLConfig
from hf_txl.configuration_transfo_xl import ABSOLUTE_KINDS, ATTENTION_KINDS

from .checkpoint import Checkpoint
from .state_dict import Shapes, is_same

Fields = dict[str, Any]

# What each code does without a setting: in the original PyTorch code the memory starts empty and a query sees
# `mem_len` keys; in the TensorFlow code it starts with zeros and a query sees one more; in NVIDIA's code it starts
# empty and a query sees one more.
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

# The cutoffs that `train.py --adaptive` uses for a data set, for checkpoints whose tensors do not show them.
CUTOFFS = {"wt103": [20000, 40000, 200000], "lm1b": [60000, 100000, 640000]}

# settings that neither shapes nor the format determine; they must be given
NEEDED = {
    "n_head": "number of attention heads",
    "d_head": "width of a head",
    "cutoffs": "ends of the vocabulary's buckets, without the last: [] for a plain softmax",
    "mem_len": "length of the memory in tokens",
    "clamp_len": "distances are clamped to this, -1 for no limit",
    "same_length": "whether every query sees the same number of keys",
    "pre_lnorm": "whether layer normalisation comes before each sublayer",
}

# names of the original codes that differ in the configuration
RENAMED = {**TransfoXLConfig.attribute_map, "tie_weight": "tie_word_embeddings"}
READ = {name for name in TransfoXLConfig.__annotations__ if not name.startswith("_")}
# arguments that are translated to other fields
READ_OTHERWISE = {"attn_type", "share_proj"}
# how a model was loaded; the written weights are plain and in a precision of their own
NOT_OF_THE_MODEL = {
    *("dtype", "torch_dtype", "quantization_config", "auto_map", "_attn_implementation", "attn_implementation"),
    *("_attn_implementation_autoset", "_name_or_path"),
}
# arguments of the original codes without effect on weights and results, or only through other arguments
WITHOUT_EFFECT = {"tgt_len", "adapt_inp", "adaptive", "dataset"}

# determined by the tensors: if a file beside them states another value, it belongs to another model
CERTAIN = {
    *("vocab_size", "cutoffs", "d_model", "d_embed", "n_head", "d_head", "d_inner", "div_val", "n_layer", "max_klen"),
    "attention_kind",
}


class Settings:
    """The configuration of a checkpoint, and where each of its fields comes from.

    The order of precedence: given by the caller, from the shapes, stored, default of the format.

    Args:
        checkpoint (`Checkpoint`): The opened checkpoint.
        given (`dict`): Settings of the caller, under names of `TransfoXLConfig` or of the original codes.

    Raises:
        ValueError: if a field stays unknown, a name in `given` is not a setting, or the values are not valid together.
    """

    def __init__(self, checkpoint: Checkpoint, given: Mapping[str, Any]) -> None:
        given, stored = _renamed(given), _renamed(checkpoint.stored)
        if unknown := sorted(set(given) - READ - WITHOUT_EFFECT):
            raise ValueError(
                f"Settings must be fields of `TransfoXLConfig` or arguments of the original codes, but "
                f"{', '.join(f'`{name}`' for name in unknown)} is not."
            )
        said = {**stored, **given}
        shapes = _fields_from_shapes(checkpoint, said)
        # the originals append the vocabulary size to the cutoffs, other codes prepend a 0
        ends = (0, given.get("vocab_size", shapes.get("vocab_size", stored.get("vocab_size"))))
        for values in (given, stored):
            if isinstance(cutoffs := values.get("cutoffs"), list | tuple):
                values["cutoffs"] = [end for end in cutoffs if end not in ends]
        _check_agreement(given, shapes, stored, checkpoint)
        known = {
            "given": given,
            "shapes": shapes,
            checkpoint.stored_in: stored,
            "data set": _cutoffs_of_data_set(said),
            "format": DIALECTS[checkpoint.format],
        }
        self.origins: dict[str, str] = {}
        """Field -> where its value comes from."""
        fields: Fields = {}
        for origin, values in known.items():
            for name, value in values.items():
                if name not in READ:
                    continue
                if name not in fields:
                    fields[name] = value
                    self.origins[name] = origin
                elif fields[name] != value and origin == checkpoint.stored_in:
                    self.origins[name] += f" ({origin}: {value})"
        if checkpoint.format == "transformers":
            # the file is a configuration already; its other entries are kept
            rest = {
                name: value
                for name, value in checkpoint.stored.items()
                if RENAMED.get(name, name) not in READ and name not in READ_OTHERWISE | NOT_OF_THE_MODEL
            }
            self.config = _configuration(TransfoXLConfig.from_dict, {**rest, **fields}, checkpoint)
        else:
            _check_known(fields, checkpoint)
            self.config = _configuration(lambda values: TransfoXLConfig(**values), fields, checkpoint)
        _check_bounds(self.config, checkpoint)


def _configuration(
    make: Callable[[Fields], TransfoXLConfig], fields: Fields, checkpoint: Checkpoint
) -> TransfoXLConfig:
    """A configuration, or a `ValueError` that names the field whose type is wrong."""
    try:
        return make(fields)
    # fields of the library raise the other two
    except (StrictDataclassError, AttributeError, TypeError) as error:
        # the first line names the field, the others the types
        raise ValueError(
            f"Settings, given or in {checkpoint.stored_in}, must have the type of their field: "
            + " ".join(str(error).split())
        ) from error


def _check_bounds(config: TransfoXLConfig, checkpoint: Checkpoint) -> None:
    """Refuse values that contradict the tensors, before a model is built."""
    # every layer has tensors
    if config.n_layer > len(checkpoint.shapes):
        raise ValueError(
            f"`n_layer` must be the number of layers in the checkpoint, but is {config.n_layer}, and "
            f"{checkpoint.found} has {len(checkpoint.shapes)} tensors in all."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not 0 <= each < config.vocab_size for each in ids):
            raise ValueError(
                f"`{name}` must be between 0 and {config.vocab_size - 1} (`vocab_size` is {config.vocab_size}), but "
                f"is {value}. Give another one (`--set {name}=…`)."
            )


def _renamed(values: Mapping[str, Any]) -> Fields:
    """Settings of an original code under the names of `TransfoXLConfig`; None is left out."""
    fields = {RENAMED.get(name, name): value for name, value in values.items() if value is not None}
    # the default of the argument, which means `d_model`
    if fields.get("d_embed") == -1:
        del fields["d_embed"]
    if "attn_type" in fields:
        number = fields.pop("attn_type")
        if type(number) is not int or number not in ATTENTION_KINDS:
            raise ValueError(f"`attn_type` must be one of {list(ATTENTION_KINDS)}, but is {number!r}.")
        fields["attention_kind"] = ATTENTION_KINDS[number]
    if (share := fields.pop("share_proj", None)) is not None:
        fields.setdefault("proj_share_all_but_first" if isinstance(share, bool) else "tie_projs", share)
    return fields


def _cutoffs_of_data_set(said: Fields) -> Fields:
    """The cutoffs that `train.py` derives from `--adaptive` and `--dataset`."""
    known = CUTOFFS.get(str(said.get("dataset")))
    return {"cutoffs": known} if said.get("adaptive") and known else {}


def _check_agreement(given: Fields, shapes: Fields, stored: Fields, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors contradict its stored settings, such as one with missing layers."""
    differing = [
        f"`{name}` is {shapes[name]!r} by the tensors and {stored[name]!r} by {checkpoint.stored_in}"
        for name in shapes
        if name in CERTAIN and name in stored and name not in given and stored[name] != shapes[name]
    ]
    if differing:
        raise ValueError(
            f"The tensors must be those of the model that {checkpoint.stored_in} describes, but "
            f"{', '.join(differing)}. If the tensors are right, give these settings (`--set name=value`)."
        )


def _check_known(fields: Fields, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that lacks tensors that determine settings, or settings that no tensor determines."""
    lacking: dict[str, list[str]] = {}
    is_absolute = fields.get("attention_kind") in ABSOLUTE_KINDS
    for name, tensor in DETERMINED_BY[checkpoint.format].items():
        if name not in fields and not (is_absolute and name in ("n_head", "d_head")):
            lacking.setdefault(tensor, []).append(f"`{name}`")
    if lacking:
        raise ValueError(
            f"{checkpoint.files[0]} must hold a Transformer-XL, but {checkpoint.found} lacks or has in another shape "
            + ", ".join(f"`{tensor}` (determines {' and '.join(names)})" for tensor, names in lacking.items())
            + "."
        )
    if missing := [name for name in NEEDED if name not in fields]:
        raise ValueError(
            f"These settings must be given (`--set name=value`), since {checkpoint.found} does not state them: "
            + ", ".join(f"`{name}` ({NEEDED[name]})" for name in missing)
            + "."
        )


# --- shapes

# the tensors that determine settings; of several, the first
DETERMINED_BY = {
    "pytorch": {
        "vocab_size": "word_emb.emb_layers.0.weight",
        "d_embed": "word_emb.emb_layers.0.weight",
        "n_layer": "layers.0.dec_attn.layer_norm.weight",
        "d_model": "layers.0.dec_attn.layer_norm.weight",
        "d_inner": "layers.0.pos_ff.CoreNet.0.weight",
        "n_head": "r_w_bias",
        "d_head": "r_w_bias",
    },
    "tensorflow": {
        "vocab_size": "transformer/adaptive_embed/lookup_table",
        "d_embed": "transformer/adaptive_embed/lookup_table",
        "n_layer": "transformer/layer_0/rel_attn/LayerNorm/gamma",
        "d_model": "transformer/layer_0/rel_attn/LayerNorm/gamma",
        "d_inner": "transformer/layer_0/ff/layer_1/kernel",
        "n_head": "transformer/r_w_bias",
        "d_head": "transformer/r_w_bias",
    },
}
DETERMINED_BY["nvidia"] = DETERMINED_BY["pytorch"]


def _fields_from_shapes(checkpoint: Checkpoint, said: Fields) -> Fields:
    """Fields that the tensors determine; each is read from any tensor that has it, since one may be missing."""
    if checkpoint.format == "transformers":
        return {}
    read = _tensorflow_fields if checkpoint.format == "tensorflow" else _pytorch_fields
    return read(checkpoint.shapes, checkpoint.tensors, said)


def _pytorch_fields(shapes: Shapes, tensors: Mapping[str, torch.Tensor], said: Fields) -> Fields:
    """Names of the original PyTorch code and, for the softmax, of NVIDIA's."""
    tables = _numbered(shapes, r"(?:word_emb\.emb_layers|crit\.out_layers)\.(\d+)\.weight", 2)
    projections = _numbered(shapes, r"word_emb\.emb_projs\.(\d+)", 2)
    clusters = [*_all(shapes, r"crit\.cluster_weight", 2), *_all(shapes, r"crit\.cluster_bias", 1)]
    num_clusters = clusters[0][0] if clusters else 0
    kind = _attention_kind(shapes)
    fields: Fields = {
        **_layer_fields(shapes, r"layers\.(\d+)\..*", r"layers\.\d+\.\w+\.layer_norm\.\w+"),
        **_vocabulary_fields(tables, num_clusters, projections, said),
        "attention_kind": kind,
    }
    for inner, _ in _all(shapes, r"layers\.\d+\.pos_ff\.CoreNet\.0\.weight", 2)[:1]:
        fields["d_inner"] = inner
    # Learned tables and their biases are one tensor for all layers. NVIDIA's of absolute positions are not split into
    # heads.
    biases = _all(shapes, "r_[wr]_bias", 2 if kind == "transformer_xl" else 3)
    learned = [*_all(shapes, "r_emb", 4), *_all(shapes, "r_emb", 3)]
    for by_head in [*biases, *(table for table in learned if len(table) == 4)][:1]:
        fields["n_head"], fields["d_head"] = by_head[-2:]
    for table in learned:
        fields["max_klen"] = table[1]
    if not num_clusters:
        fields["cutoffs"] = []
    fields["tie_word_embeddings"] = all(
        _is_tied(
            tensors,
            [f"crit.out_layers.{bucket}.weight", f"crit.out_layers_weights.{bucket}"],
            f"word_emb.emb_layers.{bucket}.weight",
            said.get("tie_word_embeddings"),
        )
        for bucket in range(len(tables))
    )
    if projections:
        fields["tie_projs"] = [
            _is_tied(
                tensors,
                [f"crit.out_projs.{bucket}"],
                f"word_emb.emb_projs.{min(bucket, len(projections) - 1)}",
                _entry(said.get("tie_projs"), bucket),
            )
            for bucket in range(num_clusters + 1)
        ]
    return fields


def _attention_kind(shapes: Shapes) -> str:
    if _all(shapes, r"layers\.\d+\.dec_attn\.r_net\.weight", 2):
        return "transformer_xl"
    if "r_emb" not in shapes:
        return "absolute_sinusoid"
    return "learned_relative" if "r_bias" in shapes else "absolute_learned"


def _tensorflow_fields(shapes: Shapes, tensors: Mapping[str, torch.Tensor], said: Fields) -> Fields:
    """Names of the original TensorFlow code, whose softmax always shares the embedding's tables."""
    embed, softmax = "transformer/adaptive_embed/", "transformer/adaptive_softmax/"
    tables = _numbered(shapes, embed + r"(?:cutoff_(\d+)/)?lookup_table", 2)
    projections = _numbered(shapes, embed + r"(?:cutoff_(\d+)/)?proj_W", 2)
    biases = _numbered(shapes, softmax + r"cutoff_(\d+)/b", 1)
    fields: Fields = {
        **_layer_fields(shapes, r"transformer/layer_(\d+)/.*", r"transformer/layer_\d+/\w+/LayerNorm/\w+"),
        **_vocabulary_fields(tables, max(0, len(biases) - 1), projections, said),
        "cutoffs": _ends([size for (size,) in biases])[:-1],
        "attention_kind": "transformer_xl",
        "tie_word_embeddings": True,
        # a plain softmax always shares the projection
        "tie_projs": [
            f"{softmax}cutoff_{bucket}/proj" not in shapes and _entry(said.get("tie_projs"), bucket) is not False
            for bucket in range(len(biases))
        ]
        or [True],
    }
    fields["proj_same_dim"] = all(
        f"{embed}cutoff_{bucket}/proj_W" in shapes
        for bucket, (_, width) in enumerate(tables)
        if len(tables) > 1 and width == fields.get("d_model")
    )
    for _, inner in _all(shapes, r"transformer/layer_\d+/ff/layer_1/kernel", 2)[:1]:
        fields["d_inner"] = inner
    for by_head in [*_all(shapes, "transformer/r_[wr]_bias", 3), *_all(shapes, "transformer/r_[wr]_bias", 2)][:1]:
        fields["untie_r"] = len(by_head) == 3
        fields["n_head"], fields["d_head"] = by_head[-2:]
    return fields


def _layer_fields(shapes: Shapes, layer: str, norm: str) -> Fields:
    """Number and width of the layers, by the patterns of the names of a layer and of its normalisations."""
    fields: Fields = {}
    if layers := {match[1] for name in shapes if (match := re.fullmatch(layer, name))}:
        fields["n_layer"] = len(layers)
    for (width,) in _all(shapes, norm, 1)[:1]:
        fields["d_model"] = width
    return fields


def _vocabulary_fields(
    tables: list[tuple[int, ...]], num_clusters: int, projections: list[tuple[int, ...]], said: Fields
) -> Fields:
    """Sizes and widths of the buckets, from the embedding tables (words, width)."""
    if not tables:
        return {}
    widths = [width for _, width in tables]
    fields: Fields = {"vocab_size": sum(words for words, _ in tables), "d_embed": widths[0]}
    if len(tables) > 1:
        fields["cutoffs"] = _ends([words for words, _ in tables])[:-1]
    # with `div_val` 1 there is one table, projected only if its width differs
    if len(tables) > 1 or (not num_clusters and any(rows == columns for rows, columns in projections)):
        fields["div_val"] = _factor(widths, said.get("div_val"))
    elif num_clusters or not projections:
        fields["div_val"] = 1
    return fields


def _factor(widths: list[int], said: Any) -> int:
    """The `div_val` above 1 that gives these widths. If several do, the models are equal; the stated one is used."""
    last = len(widths) - 1
    # first those for which no width is rounded
    factors = sorted(range(2, widths[0] + 1), key=lambda factor: widths[0] % factor**last != 0)
    if type(said) is int and said > 1:
        factors.insert(0, said)
    fitting = (f for f in factors if all(width == widths[0] // f**bucket for bucket, width in enumerate(widths)))
    return next(fitting, 2)


def _all(shapes: Shapes, pattern: str, num_axes: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors whose name matches and that have `num_axes` axes, none of length 0."""
    return [
        shape
        for name, shape in shapes.items()
        if len(shape) == num_axes and 0 not in shape and re.fullmatch(pattern, name)
    ]


def _numbered(shapes: Shapes, pattern: str, num_axes: int) -> list[tuple[int, ...]]:
    """As `_all`, in the order of the number in the name, each number once."""
    found: Shapes = {}
    for name, shape in shapes.items():
        if len(shape) == num_axes and 0 not in shape and (match := re.fullmatch(pattern, name)):
            found.setdefault(match[1] or "0", shape)
    return [found[number] for number in sorted(found, key=int)]


def _ends(sizes: list[int]) -> list[int]:
    return list(itertools.accumulate(sizes))


def _is_tied(tensors: Mapping[str, torch.Tensor], names: list[str], first: str, said: Any) -> bool:
    """Whether a weight, under any of its names, equals another one; a missing one counts as tied unless stated not."""
    own = [name for name in names if name in tensors]
    if not own:
        return said is not False
    return first in tensors and is_same(tensors[own[0]], tensors[first])


def _entry(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, list | tuple) and index < len(values) else None

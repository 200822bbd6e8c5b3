"""Names, layouts and settings of the original implementations, in terms of this package.

Each `…_state` function takes the tensors of one checkpoint and returns a state dict under the published names of
`TransfoXLForCausalLM`; each `…_fields` function turns the recorded constructor arguments into the arguments of
`TransfoXLConfig`. The notes in brackets (P3, T5, …) name facts about the originals that are explained where they are
used. Written independently of the package's own converters, so that each can be checked with the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

Fields = dict[str, Any]
State = dict[str, torch.Tensor]

# `attn_type` of the PyTorch codes
ATTENTION_KINDS = ["transformer_xl", "learned_relative", "absolute_sinusoid", "absolute_learned"]
LENGTHS = ("tgt_len", "ext_len", "mem_len")


def read_tensors(path: Path) -> State:
    """All tensors of a safetensors file, and the tied ones again under their second name."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
    return tensors | {name: tensors[source] for name, source in aliases.items()}


# ---- settings --------------------------------------------------------------------------------------------------


def common_fields(constructor: Mapping[str, Any]) -> Fields:
    """Arguments that every original spells alike; none of the recorded cases uses dropout."""
    cutoffs = list(constructor["cutoffs"])
    tie_projs = list(constructor["tie_projs"] or [])
    return {
        "vocab_size": constructor["n_token"],
        "cutoffs": cutoffs,
        "d_model": constructor["d_model"],
        "d_embed": constructor["d_embed"] or constructor["d_model"],
        "n_head": constructor["n_head"],
        "d_head": constructor["d_head"],
        "d_inner": constructor["d_inner"],
        "div_val": constructor["div_val"],
        "n_layer": constructor["n_layer"],
        # entries missing at the end mean "own"
        "tie_projs": tie_projs + [False] * (len(cutoffs) + 1 - len(tie_projs)),
        "dropout": 0.0,
        "dropatt": 0.0,
        "proj_same_dim": True,
        "pre_lnorm": False,
        "tie_word_embeddings": True,
    }


def pytorch_fields(constructor: Mapping[str, Any]) -> Fields:
    """The original PyTorch code: empty memory at the start, `mem_len` keys with `same_length`, shared biases.

    Its learned tables have a row for every distance of a segment and its memory, as they were when it was constructed.
    """
    kind = ATTENTION_KINDS[constructor["attn_type"]]
    tables = {} if kind == "transformer_xl" else {"max_klen": sum(constructor[name] for name in LENGTHS)}
    return common_fields(constructor) | {
        "attention_kind": kind,
        "pre_lnorm": constructor["pre_lnorm"],
        "mem_len": constructor["mem_len"],
        "clamp_len": constructor["clamp_len"],
        "same_length": constructor["same_length"],
        "tie_word_embeddings": constructor["tie_weight"],
        "untie_r": False,
        "memory_init": "empty",
        "same_length_includes_oldest": False,
        "layer_norm_epsilon": 1e-5,
        **tables,
    }


def nvidia_fields(constructor: Mapping[str, Any]) -> Fields:
    """NVIDIA's code: as the original, but one key more with `same_length`."""
    return pytorch_fields(constructor) | {"same_length_includes_oldest": True}


def tensorflow_fields(constructor: Mapping[str, Any], run: Mapping[str, Any]) -> Fields:
    """The original TensorFlow code: zeros at the start, `mem_len + 1` keys with `same_length`, epsilon 1e-12."""
    fields = common_fields(constructor) | {
        "mem_len": run["mem_len"],
        "clamp_len": run["clamp_len"],
        "same_length": run["same_length"],
        "untie_r": constructor["untie_r"],
        "proj_same_dim": constructor["proj_same_dim"],
        "memory_init": "zeros",
        "same_length_includes_oldest": True,
        "layer_norm_epsilon": 1e-12,
    }
    if not fields["cutoffs"]:
        # a plain softmax shares the embedding's projection whatever `tie_projs` says
        fields["tie_projs"] = [True]
    return fields


def legacy_fields(config: Mapping[str, Any]) -> Fields:
    """A `config.json` of transformers 2 to 4 with the meaning that version gave it: zeros at the start."""
    names = (
        "vocab_size d_model d_embed n_head d_head d_inner div_val n_layer pre_lnorm mem_len clamp_len same_length "
        "untie_r tie_projs layer_norm_epsilon cutoffs"
    ).split()
    return {name: config[name] for name in names} | {
        "dropout": 0.0,
        "dropatt": 0.0,
        "proj_same_dim": True,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "memory_init": "zeros",
        "same_length_includes_oldest": False,
    }


def keras_fields(config: Mapping[str, Any]) -> Fields:
    """The hyper-parameter files of keras-transformer-xl, which describe TensorFlow checkpoints.

    `cutoffs` run from 0 to the vocabulary size, and `share_proj` is `tie_projs`.
    """
    share_proj = config["share_proj"]
    constructor = {
        **config,
        "n_token": config["vocab_size"],
        "cutoffs": config.get("cutoffs", [])[1:-1],
        "div_val": config.get("div_val", 1),
        "tie_projs": [share_proj] if isinstance(share_proj, bool) else share_proj,
        "untie_r": config.get("untie_r", False),
    }
    return tensorflow_fields(constructor, {"mem_len": config["mem_len"], "clamp_len": -1, "same_length": False})


# ---- ties ------------------------------------------------------------------------------------------------------


def tied_names(fields: Mapping[str, Any]) -> dict[str, str]:
    """Which published name stands for the tensor of which other one, by the settings alone."""
    buckets = range(len(fields["cutoffs"]) + 1)
    tied = {}
    if fields["tie_word_embeddings"]:
        # with equal widths there is one table for the whole vocabulary
        for table in buckets if fields["div_val"] > 1 else [0]:
            tied[f"crit.out_layers.{table}.weight"] = f"transformer.word_emb.emb_layers.{table}.weight"
    for bucket in buckets:
        width = fields["d_embed"] // fields["div_val"] ** bucket
        if fields["div_val"] == 1:
            exists = fields["d_embed"] != fields["d_model"]
        else:
            exists = fields["proj_same_dim"] or width != fields["d_model"]
        if exists and fields["tie_projs"][bucket]:
            source = bucket if fields["div_val"] > 1 else 0
            tied[f"crit.out_projs.{bucket}"] = f"transformer.word_emb.emb_projs.{source}"
    return tied


def add_tied_names(state: State, fields: Mapping[str, Any]) -> State:
    """Complete a state dict in which some tied tensors are under one name only."""
    missing = {name: state[source] for name, source in tied_names(fields).items() if name not in state}
    return state | missing


# ---- names and layouts -----------------------------------------------------------------------------------------


def flip_clusters(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reverse the rows of the cluster weights: the PyTorch codes read cluster i from the i-th row from the end."""
    return tensor.flip(0) if name in ("crit.cluster_weight", "crit.cluster_bias") else tensor


def pytorch_state(tensors: Mapping[str, torch.Tensor]) -> State:
    """Original PyTorch names: ours without `transformer.`. Works for any dictionary by name, gradients too.

    Tables of positions, and biases with tables, are stacked over the layers there; those of absolute positions (no
    `r_bias`) are split into heads that add up to `d_model`.
    """
    state = {}
    for name, tensor in tensors.items():
        if name == "pos_emb.inv_freq":
            continue
        if name in ("r_emb", "r_bias") or (name == "r_w_bias" and "r_emb" in tensors):
            is_absolute = name == "r_emb" and "r_bias" not in tensors
            for layer, part in enumerate(tensor):
                # (rows, heads, head size) -> (rows, d_model)
                part = part.flatten(1) if is_absolute else part
                state[f"transformer.layers.{layer}.dec_attn.{name}"] = part.contiguous()
            continue
        ours = name if name.startswith("crit.") else f"transformer.{name}"
        state[ours] = flip_clusters(ours, tensor)
    return state


def nvidia_state(tensors: Mapping[str, torch.Tensor]) -> State:
    """NVIDIA's names: the original's, but for the softmax.

    `shared_out_projs` repeats the embedding's projections whether they are used or not; `tie_projs` decides.
    """
    renamed = {}
    for name, tensor in tensors.items():
        if name.startswith("crit.shared_out_projs."):
            continue
        name = re.sub(r"^crit\.out_layers_biases\.(\d+)$", r"crit.out_layers.\1.bias", name)
        name = re.sub(r"^crit\.out_layers_weights\.(\d+)$", r"crit.out_layers.\1.weight", name)
        renamed[name] = tensor
    state = pytorch_state(renamed)
    biases = [name for name in state if re.fullmatch(r"crit\.out_layers\.\d+\.bias", name)]
    tables = [name for name in state if re.fullmatch(r"transformer\.word_emb\.emb_layers\.\d+\.weight", name)]
    if len(tables) == 1 and len(biases) > 1:
        # one table for the whole vocabulary, but a bias for each cluster
        parts = [state.pop(f"crit.out_layers.{cluster}.bias") for cluster in range(len(biases))]
        state["crit.out_layers.0.bias"] = torch.cat(parts)
    return state


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous()


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# TensorFlow name after `transformer/`, ours, and what happens to the tensor: kernels are [in, out] and projections
# [width, d_model] there
TENSORFLOW_RULES: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    (r"layer_(\d+)/rel_attn/(qkv|r|o)/kernel", r"transformer.layers.\1.dec_attn.\2_net.weight", _transposed),
    (r"layer_(\d+)/rel_attn/LayerNorm/gamma", r"transformer.layers.\1.dec_attn.layer_norm.weight", _unchanged),
    (r"layer_(\d+)/rel_attn/LayerNorm/beta", r"transformer.layers.\1.dec_attn.layer_norm.bias", _unchanged),
    (r"layer_(\d+)/ff/LayerNorm/gamma", r"transformer.layers.\1.pos_ff.layer_norm.weight", _unchanged),
    (r"layer_(\d+)/ff/LayerNorm/beta", r"transformer.layers.\1.pos_ff.layer_norm.bias", _unchanged),
    (r"layer_(\d+)/ff/layer_1/kernel", r"transformer.layers.\1.pos_ff.CoreNet.0.weight", _transposed),
    (r"layer_(\d+)/ff/layer_1/bias", r"transformer.layers.\1.pos_ff.CoreNet.0.bias", _unchanged),
    (r"layer_(\d+)/ff/layer_2/kernel", r"transformer.layers.\1.pos_ff.CoreNet.3.weight", _transposed),
    (r"layer_(\d+)/ff/layer_2/bias", r"transformer.layers.\1.pos_ff.CoreNet.3.bias", _unchanged),
    (r"adaptive_embed/lookup_table", r"transformer.word_emb.emb_layers.0.weight", _unchanged),
    (r"adaptive_embed/proj_W", r"transformer.word_emb.emb_projs.0", _transposed),
    (r"adaptive_embed/cutoff_(\d+)/lookup_table", r"transformer.word_emb.emb_layers.\1.weight", _unchanged),
    (r"adaptive_embed/cutoff_(\d+)/proj_W", r"transformer.word_emb.emb_projs.\1", _transposed),
    (r"adaptive_softmax/bias", r"crit.out_layers.0.bias", _unchanged),
    (r"adaptive_softmax/cutoff_(\d+)/b", r"crit.out_layers.\1.bias", _unchanged),
    (r"adaptive_softmax/cutoff_(\d+)/proj", r"crit.out_projs.\1", _transposed),
    (r"adaptive_softmax/cutoff_0/cluster_W", r"crit.cluster_weight", _unchanged),
    (r"adaptive_softmax/cutoff_0/cluster_b", r"crit.cluster_bias", _unchanged),
]


def tensorflow_state(tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> State:
    """TensorFlow variables: other names, most matrices transposed, biases of all layers stacked."""
    state: State = {}
    for name, tensor in tensors.items():
        if name in ("global_step", "beta1_power", "beta2_power") or "/Adam" in name:
            continue
        short = name.removeprefix("transformer/")
        if short in ("r_w_bias", "r_r_bias"):
            if fields["untie_r"]:
                for layer, bias in enumerate(tensor):
                    state[f"transformer.layers.{layer}.dec_attn.{short}"] = bias.contiguous()
            else:
                state[f"transformer.{short}"] = tensor
            continue
        for pattern, replacement, change in TENSORFLOW_RULES:
            if match := re.fullmatch(pattern, short):
                state[match.expand(replacement)] = change(tensor)
                break
        else:
            raise KeyError(f"no rule for the variable `{name}`")
    if fields["div_val"] == 1 and fields["cutoffs"]:
        # one table for the whole vocabulary, but a bias for each cluster
        parts = [state.pop(f"crit.out_layers.{bucket}.bias") for bucket in range(len(fields["cutoffs"]) + 1)]
        state["crit.out_layers.0.bias"] = torch.cat(parts)
    return add_tied_names(state, fields)


def legacy_state(state_dict: Mapping[str, torch.Tensor]) -> State:
    """A state dict of transformers 2 to 4: our names, but for a buffer and shared biases repeated under each layer."""
    state = {name: tensor for name, tensor in state_dict.items() if name != "transformer.pos_emb.inv_freq"}
    if "transformer.r_w_bias" in state:
        repeated = re.compile(r"transformer\.layers\.\d+\.dec_attn\.r_[wr]_bias")
        state = {name: tensor for name, tensor in state.items() if not repeated.fullmatch(name)}
    return state

"""The weights of a Transformer-XL under their published names, and which of them are tied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class NamedWeights:
    """Float64 weights by their place in the model: ties, and the embedding and softmax of each cluster.

    Args:
        config: an object with the fields of `TransfoXLConfig`.
        state_dict: weights under their published names. A tied tensor may be given under both names or only under the
            name it is tied to. Tensors that are float64 already are used as they are, so they may require gradients.
    """

    def __init__(self, config: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in state_dict.items()}
        self.cutoffs: list[int] = list(config.cutoffs or [])
        self.bounds: list[int] = [0, *self.cutoffs, config.vocab_size]
        self.num_clusters = len(self.cutoffs)
        self.shortlist_size = self.bounds[1]

    def weight(self, name: str, tied_to: str | None = None) -> torch.Tensor:
        """The tensor of this name; without it, the one it is tied to. Both given: they must agree."""
        if tied_to is None:
            return self.weights[name]
        if name not in self.weights:
            return self.weights[tied_to]
        if tied_to in self.weights and not torch.equal(self.weights[name], self.weights[tied_to]):
            raise ValueError(f"`{name}` is tied to `{tied_to}` by the configuration, but their values differ.")
        return self.weights[name]

    def layer_weight(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"transformer.layers.{layer}.{name}"]

    def bias_vector(self, layer: int, name: str) -> torch.Tensor:
        """`r_w_bias` (u of the paper) or `r_r_bias` (v), (H, d_head): one pair per layer, or one for all."""
        if self.config.untie_r:
            return self.layer_weight(layer, f"dec_attn.{name}")
        return self.weights[f"transformer.{name}"]

    def cluster_width(self, cluster: int) -> int:
        return int(self.config.d_embed // self.config.div_val**cluster)

    def has_projection(self, cluster: int) -> bool:
        if self.config.div_val == 1:
            return bool(self.config.d_embed != self.config.d_model)
        return bool(self.config.proj_same_dim or self.cluster_width(cluster) != self.config.d_model)

    def projection_is_tied(self, cluster: int) -> bool:
        tie_projs = self.config.tie_projs
        if tie_projs is None:
            return self.config.proj_share_all_but_first and cluster > 0
        return cluster < len(tie_projs) and tie_projs[cluster]

    def embedding_table(self, cluster: int) -> torch.Tensor:
        """(words of the cluster, width)"""
        if self.config.div_val == 1:
            table = self.weights["transformer.word_emb.emb_layers.0.weight"]
            return table[self.bounds[cluster] : self.bounds[cluster + 1]]
        return self.weights[f"transformer.word_emb.emb_layers.{cluster}.weight"]

    def embedding_projection(self, cluster: int) -> torch.Tensor | None:
        """(d_model, width), or None"""
        if not self.has_projection(cluster):
            return None
        return self.weights[f"transformer.word_emb.emb_projs.{0 if self.config.div_val == 1 else cluster}"]

    def softmax_table(self, cluster: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight (words of the cluster, width) and bias of one cluster's output layer."""
        index = 0 if self.config.div_val == 1 else cluster
        source = f"transformer.word_emb.emb_layers.{index}.weight" if self.config.tie_word_embeddings else None
        table = self.weight(f"crit.out_layers.{index}.weight", source)
        bias = self.weights[f"crit.out_layers.{index}.bias"]
        if self.config.div_val == 1:
            words = slice(self.bounds[cluster], self.bounds[cluster + 1])
            return table[words], bias[words]
        return table, bias

    def softmax_projection(self, cluster: int) -> torch.Tensor | None:
        """(d_model, width), or None"""
        if not self.has_projection(cluster):
            return None
        source = f"transformer.word_emb.emb_projs.{0 if self.config.div_val == 1 else cluster}"
        return self.weight(f"crit.out_projs.{cluster}", source if self.projection_is_tied(cluster) else None)

"""Adaptive embedding and adaptive softmax: a vocabulary cut by frequency into buckets of falling width.

Bucket 0 is the shortlist of frequent tokens, the others are clusters of rarer ones. Follows `AdaptiveEmbedding` and
`ProjectedAdaptiveLogSoftmax` of the original PyTorch code ([Dai et al., 2019](https://arxiv.org/abs/1901.02860);
[Grave et al., 2017](https://arxiv.org/abs/1609.04309)) with the cluster order of its TensorFlow twin: the softmax head
holds the shortlist and then one column per cluster, in order. Both are apart from the model since they share nothing
with it but the width of the hidden states.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .configuration_transfo_xl import TransfoXLConfig
from .recompute_transfo_xl import BucketLossFunction, TableGradient, TablePartsFunction
from .weights_transfo_xl import is_plain

# logits of one bucket that are held at once while scoring: 2**25 float32 numbers are 128 MiB
MAX_LOGITS = 2**25

# a cluster is left out only where its probability is below that of a candidate by this factor (nats): more than
# rounding, here and in what is done to the scores later, can make up for
CANDIDATE_MARGIN = 1e-3

Tables: TypeAlias = list[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]]

# T tokens   V vocabulary   S size of a bucket   E width of a bucket's embeddings


class BucketProjections(nn.ParameterDict):
    """Projections between `d_model` and the width E of each bucket: one `(d_model, E)` matrix under its number.

    Args:
        config (`TransfoXLConfig`): Configuration of the model.
        buckets (iterable of `int`): Buckets that get a matrix if the configuration gives them a projection.
        reduces (`bool`): Whether hidden states are projected to E (softmax), or embeddings to `d_model`.
    """

    # a dictionary of parameters is not callable, but hooks and offloading act on calls only
    __call__ = nn.Module.__call__

    def __init__(self, config: TransfoXLConfig, buckets: Iterable[int], reduces: bool):
        super().__init__(
            {
                str(bucket): nn.Parameter(torch.empty(config.d_model, config.bucket_width(bucket)))
                for bucket in buckets
                if config.has_projection(bucket)
            }
        )
        self.reduces = reduces

    def forward(self, states: torch.Tensor, bucket: int) -> torch.Tensor:
        """Project states of one bucket, `(…, E)` -> `(…, d_model)`, or back; unchanged without a matrix."""
        name = str(bucket)
        if name not in self:
            return states
        return F.linear(states, self[name].t() if self.reduces else self[name])


class ScaledEmbedding(nn.Embedding):
    """Embedding of the whole vocabulary whose output is scaled, so that its output is the input of the first layer.

    Args:
        num_embeddings (`int`): Size of the vocabulary.
        embedding_dim (`int`): Width of the embeddings.
        embed_scale (`float`): Factor of the output; adapters of peft read it under this name.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, embed_scale: float):
        super().__init__(num_embeddings, embedding_dim)
        self.embed_scale = embed_scale

    @classmethod
    def adopt(cls, table: nn.Embedding, embed_scale: float) -> None:
        """Scale the output of a plain embedding from now on; weights and identity of the module stay."""
        table.__class__ = cls
        table.embed_scale = embed_scale  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`(batch_size, sequence_length)` -> `(batch_size, sequence_length, embedding_dim)`."""
        return super().forward(input_ids) * self.embed_scale


class BucketTables(nn.ModuleList):
    """The layers that hold the table of each bucket, shared with those of the other side where the weights are tied.

    An adapter changes the output of one of two layers that share a table, and merging it writes into the table. So a
    layer that an adapter wraps gets a copy of its table and shares it no more: the merged model computes what the
    adapted one did.

    Args:
        is_tied (`bool`): Whether tables are shared at first; `untied` holds the numbers of those that are no more.
    """

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.untied: set[int] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        layer: Any = self._modules.get(name) if self.__dict__.get("is_tied") else None
        # both kinds of wrappers of peft have one of these methods; those that shard or recompute have none
        merges = any(hasattr(value, method) for method in ("merge", "unload_and_optionally_merge_module"))
        if (
            layer is not None
            and merges
            and any(module is layer for module in value.modules())
            and type(layer.weight) is nn.Parameter  # a quantised one is shared no more
        ):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
            self.untied.add(int(name))
        super().__setattr__(name, value)


class AdaptiveEmbedding(nn.Module):
    """Token embedding whose width falls with rarity, projected to `d_model` and scaled by its square root."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.bucket_ends = config.bucket_ends
        self.scale = config.d_model**0.5
        # published name; one table for the whole vocabulary where no cluster is narrower
        self.emb_layers = BucketTables(config.tie_word_embeddings)
        if config.has_one_embedding:
            self.emb_layers.append(ScaledEmbedding(config.vocab_size, config.d_embed, self.scale))
        elif config.div_val == 1:
            self.emb_layers.append(nn.Embedding(config.vocab_size, config.d_embed))
        else:
            starts = [0, *config.cutoffs]
            for bucket, (start, end) in enumerate(zip(starts, self.bucket_ends, strict=True)):
                self.emb_layers.append(nn.Embedding(end - start, config.bucket_width(bucket)))
        self.emb_projs = BucketProjections(config, range(len(self.emb_layers)), reduces=False)
        self.is_one_embedding = config.has_one_embedding
        # whether its weights may be those of the softmax
        self.is_shared = True

    @property
    def num_embeddings(self) -> int:
        """Size of the vocabulary."""
        return self.bucket_ends[-1]

    @property
    def word_embeddings(self) -> "AdaptiveEmbedding":
        """Itself: peft looks for the embedding of a model as `embeddings.word_embeddings`."""
        return self

    def __getattr__(self, name: str) -> Any:
        # `weight` is no property, whose message `nn.Module` would replace by its own
        if name == "weight" and "_modules" in self.__dict__:
            if len(self.emb_layers) == 1:
                return self.emb_layers[0].weight
            raise AttributeError(
                f"The embedding has no single `weight`: with `cutoffs` and `div_val` above 1 it has "
                f"{len(self.emb_layers)} tables, `emb_layers`. `model.get_input_embeddings()(input_ids)` gives the "
                "vectors of tokens; prompts of peft need `prompt_tuning_init='RANDOM'`, and trainable tokens the name "
                "of a table, as in `trainable_token_indices={'emb_layers.0': [...]}`."
            )
        return super().__getattr__(name)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up tokens.

        Every bucket is looked up for every token and the right one kept: the widths fall so fast that this costs
        little, and the shapes depend on no data (no host synchronisation; `torch.compile` and `torch.export` work).

        Args:
            input_ids (`torch.Tensor` of shape `(batch_size, sequence_length)`): Token ids, below `vocab_size`.

        Returns:
            `torch.Tensor` of shape `(batch_size, sequence_length, d_model)`.
        """
        if self.is_one_embedding:
            return self.emb_layers[0](input_ids)
        if len(self.emb_layers) == 1:
            return self.emb_projs(self.emb_layers[0](input_ids), 0) * self.scale
        embeddings = None
        start = 0
        for bucket, (end, table) in enumerate(zip(self.bucket_ends, self.emb_layers, strict=True)):
            rows = (input_ids - start).clamp(0, end - start - 1)
            candidate = self.emb_projs(table(rows), bucket)
            if embeddings is None:
                embeddings = candidate
            else:
                embeddings = torch.where((input_ids >= start)[..., None], candidate, embeddings)
            start = end
        return embeddings * self.scale


class AdaptiveLogSoftmax(nn.Module):
    """Log-probabilities over a bucketed vocabulary; a plain softmax without clusters.

    `log p(w) = log p_head(w)` in the shortlist and `log p_head(cluster) + log p_cluster(w)` elsewhere. Everything from
    the logits on is float32 (float64 for a float64 model).
    """

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.bucket_ends = config.bucket_ends
        self.shortlist_size = self.bucket_ends[0]
        self.num_clusters = config.num_clusters
        # whether its weights may be those of the embedding
        self.is_shared = True
        # published name; weights are those of the embedding where `tie_word_embeddings`
        self.out_layers = BucketTables(config.tie_word_embeddings)
        if config.div_val == 1:
            self.out_layers.append(nn.Linear(config.d_embed, config.vocab_size))
        else:
            starts = [0, *config.cutoffs]
            for bucket, (start, end) in enumerate(zip(starts, self.bucket_ends, strict=True)):
                self.out_layers.append(nn.Linear(config.bucket_width(bucket), end - start))
        # each bucket may have a projection of its own even where they are equally wide
        self.out_projs = BucketProjections(config, range(self.num_clusters + 1), reduces=True)
        if self.num_clusters:
            self.cluster_weight = nn.Parameter(torch.empty(self.num_clusters, config.d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(self.num_clusters))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "The adaptive softmax is no single matrix and has no `weight`. With clusters or a projection, programs"
                " that multiply hidden states by the output embeddings themselves (TRL's SFT and GRPO among them) "
                "cannot use this model. Use `TransfoXLTrainer` or the library's `Trainer`, whose loss the model "
                "computes, or a model with `cutoffs=[]` and `d_embed` equal to `d_model`."
            )
        return super().__getattr__(name)

    def _logits(self, bucket: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of one bucket, `(…, S)`; those of the shortlist are followed by one column per cluster."""
        hidden_states = self.out_projs(hidden_states, bucket)
        if len(self.out_layers) == self.num_clusters + 1:
            logits = self.out_layers[bucket](hidden_states)
        else:
            table: Any = self.out_layers[0]
            rows = slice([0, *self.bucket_ends][bucket], self.bucket_ends[bucket])
            if is_plain(table, nn.Linear, "weight", "bias"):
                logits = F.linear(hidden_states, table.weight[rows], table.bias[rows])
            else:
                logits = table(hidden_states)[..., rows]
        if bucket == 0 and self.num_clusters:
            logits = torch.cat([logits, F.linear(hidden_states, self.cluster_weight, self.cluster_bias)], dim=-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def logits(self, hidden_states: torch.Tensor, num_candidates: int | None = None) -> torch.Tensor:
        """What a language model returns as logits: plain logits without clusters, log-probabilities with them.

        `softmax` of it is the distribution either way.

        Args:
            hidden_states (`torch.Tensor` of shape `(…, d_model)`): Output of the last layer.
            num_candidates (`int`, *optional*): As for `log_prob`.

        Returns:
            `torch.Tensor` of shape `(…, vocab_size)`, float32.
        """
        return self.log_prob(hidden_states, num_candidates) if self.num_clusters else self._logits(0, hidden_states)

    def log_prob(self, hidden_states: torch.Tensor, num_candidates: int | None = None) -> torch.Tensor:
        """Log-probability of every token.

        Args:
            hidden_states (`torch.Tensor` of shape `(…, d_model)`): Output of the last layer.
            num_candidates (`int`, *optional*):
                How many of the likeliest tokens of each position matter. A cluster that can hold none of them, going
                by its probability as a whole, is then not read and its tokens get `-inf`. Not while compiling, where
                shapes must not depend on data.

        Returns:
            `torch.Tensor` of shape `(…, vocab_size)`, float32, natural logarithms.
        """
        head = F.log_softmax(self._logits(0, hidden_states), dim=-1)
        shortlist, columns = head[..., : self.shortlist_size], head[..., self.shortlist_size :]
        matters = [True] * self.num_clusters
        if num_candidates is not None and num_candidates <= self.shortlist_size and not torch.compiler.is_compiling():
            # no token of a cluster is likelier than the cluster
            least = shortlist.topk(num_candidates, sorted=False).values.amin(dim=-1, keepdim=True)
            matters = (~(columns < least - CANDIDATE_MARGIN)).flatten(0, -2).any(dim=0).tolist()
        parts = [shortlist]
        for cluster, is_read in enumerate(matters, start=1):
            if is_read:
                tail = F.log_softmax(self._logits(cluster, hidden_states), dim=-1)
                parts.append(tail + columns[..., cluster - 1 : cluster])
            else:
                size = self.bucket_ends[cluster] - self.bucket_ends[cluster - 1]
                parts.append(head.new_full((*head.shape[:-1], size), float("-inf")))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else head

    def forward(
        self, hidden_states: torch.Tensor, targets: torch.Tensor | None = None, num_candidates: int | None = None
    ) -> torch.Tensor:
        """Score one token per position or, without `targets`, return what a language model returns as logits.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, d_model)`): Output of the last layer.
            targets (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*): As for `losses`.
            num_candidates (`int`, *optional*): As for `log_prob`.

        Returns:
            `torch.Tensor`: `(batch_size, sequence_length)` as from `losses`, or `(batch_size, sequence_length,
            vocab_size)` as from `logits`.
        """
        return self.logits(hidden_states, num_candidates) if targets is None else self.losses(hidden_states, targets)

    def losses(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of one token per position, without a (tokens x vocabulary) tensor.

        Tokens are sorted by bucket, so that each cluster is computed for its own tokens only; the bucket sizes are
        read once from the device. While compiling or exporting, where shapes must not depend on data, every cluster is
        computed for all tokens instead.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch_size, sequence_length, d_model)`): Output of the last layer.
            targets (`torch.Tensor` of shape `(batch_size, sequence_length)`): Token ids; -100 is ignored.

        Returns:
            `torch.Tensor` of shape `(batch_size, sequence_length)`, float32 nats in token order, 0 where ignored.
        """
        # (batch, time) -> (T,)
        flat_hidden = hidden_states.flatten(0, -2)
        flat_targets = targets.flatten()
        if self.num_clusters == 0:
            losses = self._bucket_losses(0, flat_hidden, flat_targets, self._tables())
        elif torch.compiler.is_compiling():
            losses = self._losses_of_all(flat_hidden, flat_targets)
        else:
            losses = self._losses_by_bucket(flat_hidden, flat_targets)
        return losses.view(targets.shape)

    def _losses_by_bucket(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ignored = self.num_clusters + 1
        buckets = self._bucket_of(targets).masked_fill(targets < 0, ignored)
        sizes = torch.bincount(buckets, minlength=ignored + 1).tolist()
        order = torch.argsort(buckets, stable=True)[: targets.numel() - sizes[ignored]]
        hidden_sorted, targets_sorted, buckets_sorted = hidden_states[order], targets[order], buckets[order]
        tables = self._tables()
        losses = self._bucket_losses(0, hidden_sorted, self._head_column(targets_sorted, buckets_sorted), tables)
        parts = [losses[: sizes[0]]]
        start = sizes[0]
        # an empty cluster is computed too (on no tokens): each parameter takes part in every step, as DDP expects
        for cluster in range(1, self.num_clusters + 1):
            rows = slice(start, start + sizes[cluster])
            columns = targets_sorted[rows] - self.bucket_ends[cluster - 1]
            parts.append(losses[rows] + self._bucket_losses(cluster, hidden_sorted[rows], columns, tables))
            start = rows.stop
        return losses.new_zeros(targets.shape).index_copy(0, order, torch.cat(parts))

    def _losses_of_all(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counted = targets >= 0
        buckets = self._bucket_of(targets)
        losses = self._bucket_losses(0, hidden_states, self._head_column(targets.clamp(min=0), buckets), None)
        for cluster in range(1, self.num_clusters + 1):
            start, end = self.bucket_ends[cluster - 1], self.bucket_ends[cluster]
            tail = self._bucket_losses(cluster, hidden_states, (targets - start).clamp(0, end - start - 1), None)
            losses = losses + torch.where(buckets == cluster, tail, 0.0)
        return torch.where(counted, losses, 0.0)

    def _bucket_of(self, targets: torch.Tensor) -> torch.Tensor:
        # comparisons rather than a table of cutoffs: a buffer would be lost between meta device and checkpoint
        buckets = torch.zeros_like(targets)
        for end in self.bucket_ends[:-1]:
            buckets = buckets + (targets >= end)
        return buckets

    def _head_column(self, targets: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        return torch.where(buckets == 0, targets, self.shortlist_size + buckets - 1)

    def _bucket_losses(
        self, bucket: int, hidden_states: torch.Tensor, columns: torch.Tensor, tables: Tables | None
    ) -> torch.Tensor:
        """Negative log-likelihood of one column per token within a bucket, `(T,)`; 0 where the column is -100."""
        if tables is not None:
            weight, bias, of_weight = tables[bucket]
            clusters = (self.cluster_weight, self.cluster_bias) if bucket == 0 and self.num_clusters else (None, None)
            states = self.out_projs(hidden_states, bucket)
            return BucketLossFunction.apply(states, columns, weight, bias, *clusters, of_weight, MAX_LOGITS)

        def losses_of(hidden: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self._logits(bucket, hidden), column, reduction="none")

        if torch.compiler.is_compiling():
            return losses_of(hidden_states, columns)
        if len(columns) == 0:
            # layers that quantise their input find no range in no tokens
            return losses_of(F.pad(hidden_states, (0, 0, 0, 1)), F.pad(columns, (0, 1)))[:0]
        size = self.bucket_ends[bucket] - (self.bucket_ends[bucket - 1] if bucket else 0)
        block = max(1, MAX_LOGITS // size)
        # with gradients the logits of a block are computed again in the backward pass rather than kept
        keep = len(columns) <= block or not torch.is_grad_enabled()
        blocks = [
            losses_of(hidden, column) if keep else checkpoint(losses_of, hidden, column, use_reentrant=False)
            for hidden, column in zip(hidden_states.split(block), columns.split(block), strict=True)
        ]
        return torch.cat(blocks)

    def _tables(self) -> Tables | None:
        """Weight and bias per bucket, and where the gradient of a weight goes if it is part of a table.

        `None` where layers must be called instead: while compiling, or where one of them is not plain.
        """
        layers: list[Any] = list(self.out_layers)
        are_plain = all(is_plain(layer, nn.Linear, "weight", "bias") for layer in layers)
        if torch.compiler.is_compiling() or not are_plain:
            return None
        if len(layers) == self.num_clusters + 1:
            return [(layer.weight, layer.bias, None) for layer in layers]
        starts, ends = [0, *self.bucket_ends[:-1]], self.bucket_ends
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        gradient = TableGradient(layers[0].weight)
        weights = TablePartsFunction.apply(layers[0].weight, sizes, gradient)
        parts = [partial(gradient.part, start, end) for start, end in zip(starts, ends, strict=True)]
        return list(zip(weights, layers[0].bias.split(sizes), parts, strict=True))


__all__ = ["AdaptiveEmbedding", "AdaptiveLogSoftmax", "ScaledEmbedding"]

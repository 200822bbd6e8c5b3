"""Adaptive embedding and adaptive softmax: a vocabulary split by frequency into buckets of decreasing width.

Bucket 0 is the shortlist of frequent tokens, the others are clusters of rarer ones. Follows `AdaptiveEmbedding` and
`ProjectedAdaptiveLogSoftmax` of the original PyTorch code ([Dai et al., 2019](https://arxiv.org/abs/1901.02860);
[Grave et al., 2017](https://arxiv.org/abs/1609.04309)) with the cluster order of the TensorFlow code: the softmax head
has one column per token of the shortlist and then one per cluster, in order.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .autograd_transfo_xl import first_order_only
from .configuration_transfo_xl import TransfoXLConfig
from .weights_transfo_xl import is_at_hand, is_plain

# maximum logits of a bucket in memory at once: 2**25 float32 numbers are 128 MiB
MAX_LOGITS = 2**25

# a cluster is skipped only if its log-probability is below that of every candidate by this margin (nats), larger than
# rounding errors here and in later processing of the scores
CANDIDATE_MARGIN = 1e-3

Tables: TypeAlias = list[tuple[torch.Tensor, torch.Tensor, Callable[[], torch.Tensor] | None]]

# T tokens   V vocabulary   S size of a bucket   E width of a bucket's embeddings


class BucketProjections(nn.ParameterDict):
    """Projections between `d_model` and the width E of each bucket: a `(d_model, E)` matrix per bucket number.

    Args:
        config (`TransfoXLConfig`): Configuration of the model; decides which buckets have a projection.
        buckets (iterable of `int`): Buckets.
        reduces (`bool`): Whether hidden states are projected to E (softmax), or embeddings to `d_model`.
    """

    # `nn.ParameterDict` is not callable, but hooks and offloading act on calls only
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
        """Project states of a bucket, `(…, E)` -> `(…, d_model)` or the reverse; the identity without a matrix."""
        name = str(bucket)
        if name not in self:
            return states
        return F.linear(states, self[name].t() if self.reduces else self[name])


class ScaledEmbedding(nn.Embedding):
    """Embedding of the whole vocabulary with scaled output, which is the input of the first layer.

    Args:
        num_embeddings (`int`): Size of the vocabulary.
        embedding_dim (`int`): Width of the embeddings.
        embed_scale (`float`): Factor of the output; peft's adapters look it up by this name.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, embed_scale: float):
        super().__init__(num_embeddings, embedding_dim)
        self.embed_scale = embed_scale

    @classmethod
    def adopt(cls, table: nn.Embedding, embed_scale: float) -> None:
        """Convert a plain embedding in place; the module keeps its identity and weights."""
        table.__class__ = cls
        table.embed_scale = embed_scale  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`(batch_size, sequence_length)` -> `(batch_size, sequence_length, embedding_dim)`."""
        return super().forward(input_ids) * self.embed_scale


class BucketTables(nn.ModuleList):
    """Layers with the weight table of each bucket, which embedding and softmax share if weights are tied.

    An adapter changes the output of one of the two layers that share a table, but merging it would change the table
    of both. A layer that an adapter wraps therefore gets its own copy, so that merging does not change the results.

    Args:
        is_tied (`bool`): Whether tables are tied initially; `untied` has the indices of those that no longer are.
    """

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.untied: set[int] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        layer: Any = self._modules.get(name) if self.__dict__.get("is_tied") else None
        # peft's wrappers have one of these methods; wrappers for sharding or recomputation have none
        merges = any(hasattr(value, method) for method in ("merge", "unload_and_optionally_merge_module"))
        if (
            layer is not None
            and merges
            and any(module is layer for module in value.modules())
            and type(layer.weight) is nn.Parameter  # quantised weights are not shared
        ):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
            self.untied.add(int(name))
        super().__setattr__(name, value)


class AdaptiveEmbedding(nn.Module):
    """Token embedding with narrower vectors for rarer tokens, projected to `d_model` and scaled by its square root."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.bucket_ends = config.bucket_ends
        self.scale = config.d_model**0.5
        # published name; one table for the whole vocabulary if all buckets have the same width
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
        # whether its weights may be tied to those of the softmax
        self.is_shared = True

    @property
    def num_embeddings(self) -> int:
        """Size of the vocabulary."""
        return self.bucket_ends[-1]

    @property
    def word_embeddings(self) -> "AdaptiveEmbedding":
        """The embedding itself, which peft looks up as `embeddings.word_embeddings`."""
        return self

    def __getattr__(self, name: str) -> Any:
        # not a property, whose error `nn.Module` would replace by its own
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

        Every token is looked up in every bucket, and the result of its own bucket is selected: narrow buckets cost
        little, and shapes do not depend on data (no device synchronisation, suitable for compilation and export).

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
            index = (input_ids - start).clamp(0, end - start - 1)
            candidate = self.emb_projs(table(index), bucket)
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
        # whether its weights may be tied to those of the embedding
        self.is_shared = True
        # published name; weights are tied to those of the embedding with `tie_word_embeddings`
        self.out_layers = BucketTables(config.tie_word_embeddings)
        if config.div_val == 1:
            self.out_layers.append(nn.Linear(config.d_embed, config.vocab_size))
        else:
            starts = [0, *config.cutoffs]
            for bucket, (start, end) in enumerate(zip(starts, self.bucket_ends, strict=True)):
                self.out_layers.append(nn.Linear(config.bucket_width(bucket), end - start))
        # each bucket may have its own projection even if all have the same width
        self.out_projs = BucketProjections(config, range(self.num_clusters + 1), reduces=True)
        if self.num_clusters:
            self.cluster_weight = nn.Parameter(torch.empty(self.num_clusters, config.d_embed))
            self.cluster_bias = nn.Parameter(torch.empty(self.num_clusters))

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                "The adaptive softmax has no `weight`: with clusters or a projection it is not a single matrix, and "
                "programs that multiply hidden states by the output embeddings (TRL's SFT and GRPO among them) cannot "
                "use this model. Use `TransfoXLTrainer` or the library's `Trainer`, which use the model's loss, or "
                "a model with `cutoffs=[]` and `d_embed` equal to `d_model`."
            )
        return super().__getattr__(name)

    def _logits(self, bucket: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of one bucket, `(…, S)`; the shortlist has one more column per cluster."""
        hidden_states = self.out_projs(hidden_states, bucket)
        if len(self.out_layers) == self.num_clusters + 1:
            logits = self.out_layers[bucket](hidden_states)
        else:
            table: Any = self.out_layers[0]
            part = slice([0, *self.bucket_ends][bucket], self.bucket_ends[bucket])
            if is_plain(table, nn.Linear, "weight", "bias"):
                logits = F.linear(hidden_states, table.weight[part], table.bias[part])
            else:
                logits = table(hidden_states)[..., part]
        if bucket == 0 and self.num_clusters:
            logits = torch.cat([logits, F.linear(hidden_states, self.cluster_weight, self.cluster_bias)], dim=-1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def logits(self, hidden_states: torch.Tensor, num_candidates: int | None = None) -> torch.Tensor:
        """Logits of the language model: log-probabilities with clusters, else plain logits.

        `softmax` of either is the distribution.

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
                How many of the likeliest tokens per position are needed. A cluster whose total probability is too low
                to contain any of them is not computed; its tokens get `-inf`. Ignored while compiling, since shapes
                must not depend on data.

        Returns:
            `torch.Tensor` of shape `(…, vocab_size)`, float32, natural logarithms.
        """
        head = F.log_softmax(self._logits(0, hidden_states), dim=-1)
        shortlist, columns = head[..., : self.shortlist_size], head[..., self.shortlist_size :]
        matters = [True] * self.num_clusters
        if num_candidates is not None and num_candidates <= self.shortlist_size and not torch.compiler.is_compiling():
            # no token is more probable than its cluster
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
        """Loss of one token per position or, without `targets`, logits.

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

        Tokens are sorted by bucket, so that each cluster is computed for its own tokens only, with one device
        synchronisation for the bucket sizes. While compiling or exporting, where shapes must not depend on data, every
        cluster is computed for all tokens.

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
        # empty clusters are computed too (on no tokens): DDP expects every parameter to take part in each step
        for cluster in range(1, self.num_clusters + 1):
            tokens = slice(start, start + sizes[cluster])
            columns = targets_sorted[tokens] - self.bucket_ends[cluster - 1]
            parts.append(losses[tokens] + self._bucket_losses(cluster, hidden_sorted[tokens], columns, tables))
            start = tokens.stop
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
        # comparisons instead of a buffer of cutoffs, which loading via the meta device would lose
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
            # layers that quantise their input fail on no tokens
            return losses_of(F.pad(hidden_states, (0, 0, 0, 1)), F.pad(columns, (0, 1)))[:0]
        size = self.bucket_ends[bucket] - (self.bucket_ends[bucket - 1] if bucket else 0)
        block = max(1, MAX_LOGITS // size)
        # with gradients, the logits of a block are recomputed in the backward pass instead of saved
        keep = len(columns) <= block or not torch.is_grad_enabled()
        blocks = [
            losses_of(hidden, column) if keep else checkpoint(losses_of, hidden, column, use_reentrant=False)
            for hidden, column in zip(hidden_states.split(block), columns.split(block), strict=True)
        ]
        return torch.cat(blocks)

    def _tables(self) -> Tables | None:
        """Weight and bias per bucket, and where to write the gradient of a weight that is part of a table.

        `None` if layers must be called instead: while compiling, or if one of them is not plain.
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


# --- resizing


def resized_size(config: TransfoXLConfig, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """Size of a resized vocabulary; raises a `ValueError` unless it is an integer above the last cutoff."""
    for name, number in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise ValueError(f"`{name}` must be an int, but is {number!r}.")
    if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
        raise ValueError(f"`pad_to_multiple_of` must be at least 1, but is {pad_to_multiple_of}.")
    size = config.vocab_size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
    last_cutoff = config.cutoffs[-1] if config.cutoffs else 0
    if size <= last_cutoff:
        raise ValueError(f"`new_num_tokens` must be above the last cutoff ({last_cutoff}), but is {size}.")
    return size


def resize_vocabulary(
    config: TransfoXLConfig, size: int, embedding: AdaptiveEmbedding, softmax: Any, mean_resizing: bool
) -> None:
    """Grow or shrink the last bucket of an embedding and, if there is one, of its softmax.

    Args:
        config (`TransfoXLConfig`): Configuration of the model; its size is updated.
        size (`int`): New size of the vocabulary.
        embedding ([`AdaptiveEmbedding`]): The embedding.
        softmax ([`AdaptiveLogSoftmax`], *optional*): The softmax.
        mean_resizing (`bool`): Initialise new tokens with the mean of their bucket instead of randomly.
    """
    table: Any = embedding.emb_layers[-1]
    output: Any = softmax.out_layers[-1] if isinstance(softmax, AdaptiveLogSoftmax) else None
    _check_resizable("emb_layers", table)
    if output is not None:
        _check_resizable("out_layers", output)
    change = size - config.vocab_size
    config.vocab_size = size
    # buckets of equal width share one table
    first_entry = config.cutoffs[-1] if config.cutoffs and config.div_val == 1 else 0
    random_std = None if mean_resizing else config.init_std

    old_weight, table.weight = table.weight, _resized(table.weight, change, first_entry, random_std)
    table.num_embeddings = len(table.weight)
    embedding.bucket_ends = config.bucket_ends
    if output is not None:
        is_tied = output.weight is old_weight
        output.weight = table.weight if is_tied else _resized(output.weight, change, first_entry, random_std)
        output.bias = _resized(output.bias, change, first_entry, random_std)
        output.out_features = len(output.weight)
        softmax.bucket_ends = config.bucket_ends
        softmax.shortlist_size = softmax.bucket_ends[0]


def _check_resizable(name: str, module: nn.Module) -> None:
    """Refuse a table that is quantised, sharded or offloaded."""
    weight = getattr(module, "weight", None)
    if not is_at_hand(weight):
        where = " on the meta device" if getattr(weight, "is_meta", False) else ""
        raise ValueError(
            f"The last table of `{name}` must be a plain parameter to be resized, but is a "
            f"{type(weight).__name__}{where}; resize before quantising, sharding or offloading."
        )


@torch.no_grad()
def _resized(weight: nn.Parameter, change: int, first_entry: int, random_std: float | None) -> nn.Parameter:
    """A table with entries appended or removed at its end; the last bucket starts at `first_entry`."""
    old = weight.data
    if change < 0:
        return nn.Parameter(old[:change].clone(), requires_grad=weight.requires_grad)
    new = old[first_entry:].float().mean(dim=0).to(old.dtype).expand(change, *old.shape[1:]).clone()
    if random_std is not None:
        new = torch.zeros_like(new) if old.dim() == 1 else torch.empty_like(new).normal_(0.0, random_std)
    return nn.Parameter(torch.cat([old, new]), requires_grad=weight.requires_grad)


# --- losses of a bucket, recomputed in the backward pass


class TableGradient:
    """Gradient of a table whose consecutive parts are used by one matrix product each.

    Each product writes its part once; autograd would sum one gradient of full size per product.

    Args:
        table (`torch.Tensor` of shape `(entries, width)`): The table.
    """

    def __init__(self, table: torch.Tensor):
        self.like = torch.empty_like(table, device="meta")
        self.device = table.device
        self.whole: torch.Tensor | None = None

    def part(self, start: int, end: int) -> torch.Tensor:
        """A part of the gradient, to be overwritten completely by one product."""
        if self.whole is None:
            self.whole = torch.empty_like(self.like, device=self.device)
        return self.whole[start:end]


class TablePartsFunction(torch.autograd.Function):
    """Splits a table into parts of given sizes whose gradients are written into one [`TableGradient`]."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, sizes: list[int], gradient: TableGradient) -> tuple[torch.Tensor, ...]:
        ctx.sizes, ctx.gradient = sizes, gradient
        return tuple(part.detach() for part in table.split(sizes))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *parts: torch.Tensor) -> Any:
        whole, ctx.gradient.whole = ctx.gradient.whole, None
        if whole is not None and all(
            part.data_ptr() == own.data_ptr() for part, own in zip(parts, whole.split(ctx.sizes), strict=True)
        ):
            return whole, None, None
        return torch.cat(parts), None, None


class BucketLossFunction(torch.autograd.Function):
    """Negative log-likelihood of one column per token: `logsumexp(logits) - logits[column]`.

    The logits are those of a table, followed by those of an optional second one (the clusters in the softmax head).
    The backward pass computes probabilities from saved logits or, if there are more than `most_logits`, from logits
    recomputed in blocks of tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `(T, E)`): Inputs.
        columns (`torch.Tensor` of shape `(T,)`): Targets; -100 is ignored.
        weight, bias (`torch.Tensor` of shape `(S, E)` and `(S,)`): The table.
        more_weight, more_bias (`torch.Tensor` of shape `(C, E)` and `(C,)`, *optional*): The second table.
        of_weight (`Callable`, *optional*): Returns the tensor `(S, E)` to write the gradient of `weight` to.
        most_logits (`int`): Maximum number of logits in memory.

    Returns:
        `torch.Tensor` of shape `(T,)`, at least float32, 0 where ignored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        columns: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        more_weight: torch.Tensor | None,
        more_bias: torch.Tensor | None,
        of_weight: Callable[[], torch.Tensor] | None,
        most_logits: int,
    ) -> torch.Tensor:
        device = hidden_states.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype
        ctx.of_weight = of_weight
        ctx.block = max(1, most_logits // len(weight))
        tables = _in_dtype(ctx.dtype, weight, bias, more_weight, more_bias)
        losses: list[torch.Tensor] = []
        kept: list[Any] = [None, None, None]
        with torch.autocast(device, enabled=False):
            for hidden, column in zip(hidden_states.split(ctx.block), columns.split(ctx.block), strict=True):
                logits, more, lse = kept = list(_logits(hidden.to(ctx.dtype), *tables))
                losses.append(_losses(logits, more, lse, column))
        if len(losses) > 1:
            kept = [None, None, None]
        ctx.save_for_backward(hidden_states, columns, weight, bias, more_weight, more_bias, *kept)
        return torch.cat(losses) if len(losses) > 1 else losses[0]

    @staticmethod
    @first_order_only
    def backward(ctx: Any, of_losses: torch.Tensor) -> Any:
        hidden_states, columns, weight, bias, more_weight, more_bias, *kept = ctx.saved_tensors
        tables = _in_dtype(ctx.dtype, weight, bias, more_weight, more_bias)
        of_hidden = torch.empty_like(hidden_states)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = torch.empty_like(weight) if ctx.of_weight is None else ctx.of_weight()
        of_bias = torch.zeros_like(bias)
        of_more = None if more_weight is None else (torch.zeros_like(more_weight), torch.zeros_like(more_bias))
        size = len(weight)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, max(1, len(columns)), ctx.block):
                tokens = slice(start, start + ctx.block)
                hidden, column = hidden_states[tokens].to(ctx.dtype), columns[tokens]
                logits, more, lse = kept if kept[0] is not None else _logits(hidden, *tables)
                of_loss = of_losses[tokens].masked_fill(column < 0, 0.0)[:, None]
                of_logits = _of_logits(logits, lse, of_loss, column).to(ctx.dtype)
                of_states = torch.mm(of_logits, tables[0])
                if of_more is not None:
                    assert more is not None
                    of_columns = _of_logits(more, lse, of_loss, column - size).to(ctx.dtype)
                    of_states.addmm_(of_columns, tables[2])
                    of_more[0].add_(torch.mm(of_columns.t(), hidden))
                    of_more[1].add_(of_columns.sum(dim=0, dtype=more_bias.dtype))
                of_hidden[tokens] = of_states
                of_bias.add_(of_logits.sum(dim=0, dtype=bias.dtype))
                if of_weight is None:
                    continue
                # the first block initialises all entries, also for a cluster without tokens
                if ctx.dtype != of_weight.dtype:
                    product = torch.mm(of_logits.t(), hidden)
                    of_weight.add_(product) if start else of_weight.copy_(product)
                elif start:
                    of_weight.addmm_(of_logits.t(), hidden)
                else:
                    torch.mm(of_logits.t(), hidden, out=of_weight)
        return of_hidden, None, of_weight, of_bias, *(of_more or (None, None)), None, None


def _in_dtype(dtype: torch.dtype, *tables: torch.Tensor | None) -> list[Any]:
    return [None if table is None else table.to(dtype) for table in tables]


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    more_weight: torch.Tensor | None,
    more_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Logits of both tables, `(t, S)` and `(t, C)`, and their joint `logsumexp`, `(t,)`."""
    logits = torch.addmm(bias, hidden, weight.t())
    precision = torch.promote_types(logits.dtype, torch.float32)
    lse = torch.logsumexp(logits.to(precision), dim=-1)
    if more_weight is None or more_bias is None:
        return logits, None, lse
    more = torch.addmm(more_bias, hidden, more_weight.t())
    return logits, more, torch.logaddexp(lse, torch.logsumexp(more.to(precision), dim=-1))


def _losses(logits: torch.Tensor, more: torch.Tensor | None, lse: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    size = logits.shape[1]
    chosen = logits.gather(1, columns.clamp(0, size - 1)[:, None])[:, 0]
    if more is not None:
        behind = more.gather(1, (columns - size).clamp(0, more.shape[1] - 1)[:, None])[:, 0]
        chosen = torch.where(columns < size, chosen, behind)
    return (lse - chosen).masked_fill_(columns < 0, 0.0)


def _of_logits(logits: torch.Tensor, lse: torch.Tensor, of_loss: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gradient of the losses, `(probabilities - one-hot target) of_loss`; targets in the other table count as zero."""
    gradient = (logits.to(lse.dtype) - lse[:, None]).exp_().mul_(of_loss)
    inside = (columns >= 0) & (columns < logits.shape[1])
    at_column = -of_loss * inside[:, None]
    return gradient.scatter_add_(1, columns.clamp(0, logits.shape[1] - 1)[:, None], at_column.to(gradient.dtype))


__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveLogSoftmax",
    "BucketProjections",
    "ScaledEmbedding",
    "resize_vocabulary",
    "resized_size",
]

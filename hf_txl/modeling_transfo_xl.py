"""Transformer-XL models: layers, base model, language model, sequence classification.

Follows [Dai et al., 2019](https://arxiv.org/abs/1901.02860) and `mem_transformer.py` of the original PyTorch code.
Modules keep the published weight names, so every Transformer-XL checkpoint loads without a mapping.
"""

import copy
import difflib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import can_return_tuple, logging

from .adaptive_transfo_xl import AdaptiveEmbedding, AdaptiveLogSoftmax, ScaledEmbedding
from .attention_transfo_xl import ATTENTION_CLASSES, SegmentAttention
from .cache_transfo_xl import TransfoXLMemory
from .configuration_transfo_xl import TransfoXLConfig
from .keywords_transfo_xl import KEYWORDS, check_keyword
from .legacy_names_transfo_xl import (
    EXPORT,
    FORWARD,
    GENERATE,
    LOADING,
    MEMORY,
    MODEL,
    RESIZING,
    LegacyOutputNames,
    attribute_error,
    refuse_arguments,
)
from .past_transfo_xl import open_past
from .recompute_transfo_xl import ReluDropoutFunction
from .weights_transfo_xl import is_at_hand, is_plain

# B batch   Q positions of the segment

# transformers 5.24 renamed the argument and output field; everything version-dependent about it is here and in
# `TransfoXLForCausalLM.generate`
CACHE_NAME = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

logger = logging.get_logger(__name__)


@dataclass
class TransfoXLModelOutput(LegacyOutputNames, BaseModelOutputWithPast):
    """Output of [`TransfoXLModel`]: fields of `BaseModelOutputWithPast`."""


@dataclass
class TransfoXLSequenceClassifierOutput(LegacyOutputNames, SequenceClassifierOutputWithPast):
    """Output of [`TransfoXLForSequenceClassification`]: fields of `SequenceClassifierOutputWithPast`."""


@dataclass
class TransfoXLCausalLMOutput(LegacyOutputNames, CausalLMOutputWithPast):
    """Output of [`TransfoXLForCausalLM`].

    Args:
        loss (`torch.Tensor` of shape `()`, *optional*): Sum of `losses` over the number of targets that count.
        logits (`torch.Tensor` of shape `(batch_size, sequence_length, vocab_size)`, *optional*):
            Log-probabilities where there are clusters, else plain logits; `softmax` of either is the distribution.
        cache / past_key_values: The state to continue from (two names of one thing).
        hidden_states (`tuple`, *optional*): Embeddings and the output of each layer.
        attentions (`tuple`, *optional*): Attention probabilities of each layer, keys of memory first.
        losses (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
            Negative log-likelihood (nats, float32) of the token that follows each position; 0 where it is ignored.
    """

    losses: torch.Tensor | None = None


class TransfoXLFeedForward(nn.Module):
    """Position-wise feed-forward sublayer with its residual and normalisation."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__()
        self.pre_lnorm = config.pre_lnorm
        # published name
        self.CoreNet = nn.Sequential(
            nn.Linear(config.d_model, config.d_inner),
            nn.ReLU(),
            nn.Dropout(config.dropout),
            nn.Linear(config.d_inner, config.d_model),
            nn.Dropout(config.dropout),
        )
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, Q, d_model)` -> `(B, Q, d_model)`."""
        if self.pre_lnorm:
            return hidden_states + self._transform(self.layer_norm(hidden_states))
        return self.layer_norm(hidden_states + self._transform(hidden_states))

    def _transform(self, states: torch.Tensor) -> torch.Tensor:
        if not (self.training and self._keeps_one_tensor()):
            return self.CoreNet(states)
        expand, _, drop, contract, drop_last = self.CoreNet
        return drop_last(contract(ReluDropoutFunction.apply(expand(states), drop.p)))

    def _keeps_one_tensor(self) -> bool:
        """Whether activation and dropout may be one function, of which the backward pass keeps only the result."""
        if torch.compiler.is_compiling() or not is_plain(self.CoreNet, nn.Sequential) or len(self.CoreNet) != 5:
            return False
        _, relu, drop, *_ = self.CoreNet
        return drop.training and is_plain(relu, nn.ReLU) and is_plain(drop, nn.Dropout)


class TransfoXLLayer(GradientCheckpointingLayer):
    """One layer: relative attention over memory and segment, then feed-forward."""

    def __init__(self, config: TransfoXLConfig, layer_idx: int):
        super().__init__()
        # published names
        self.dec_attn = ATTENTION_CLASSES[config.attention_kind](config, layer_idx)
        self.pos_ff = TransfoXLFeedForward(config)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Arguments and shapes as in `SegmentAttention.forward`."""
        hidden_states, probabilities = self.dec_attn(hidden_states, *args, **kwargs)
        return self.pos_ff(hidden_states), probabilities


class TransfoXLPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation for all Transformer-XL models."""

    config_class = TransfoXLConfig
    config: TransfoXLConfig
    base_model_prefix = "transformer"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TransfoXLLayer", "AdaptiveEmbedding", "AdaptiveLogSoftmax"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = True
    # the sinusoid's frequencies are computed, and shared biases are stored once
    _keys_to_ignore_on_load_unexpected = [r"pos_emb\.inv_freq$", r"layers\.\d+\.dec_attn\.r_[rw]_bias$"]

    def __init__(self, config: TransfoXLConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # fields may have been set since it was made
        config.validate_architecture()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model; see the library's `from_pretrained`. A pickle that is more than tensors is never executed."""
        refuse_arguments(kwargs, LOADING)
        if kwargs.get("weights_only") is False:
            raise ValueError(
                "`weights_only` must be True: a `pytorch_model.bin` may hold code, and none is ever run, but is False."
            )
        return super().from_pretrained(*args, **kwargs)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # modules and parameters first, which are looked up here in every call
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name not in MODEL:
                    raise
            raise attribute_error(type(self), name, MODEL)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config

        def fill(weight: torch.Tensor, std: float) -> None:
            if config.init == "uniform":
                init.uniform_(weight, -config.init_range, config.init_range)
            else:
                init.normal_(weight, 0.0, std)

        if isinstance(module, nn.Linear | nn.Embedding):
            fill(module.weight, config.init_std)
            if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                init.zeros_(bias)
        elif isinstance(module, nn.LayerNorm):
            init.normal_(module.weight, 1.0, config.init_std)
            init.zeros_(module.bias)
        elif isinstance(module, nn.ParameterDict):
            for projection in module.values():
                init.normal_(projection, 0.0, config.proj_init_std)
        elif isinstance(module, AdaptiveLogSoftmax) and module.num_clusters:
            fill(module.cluster_weight, config.init_std)
            init.zeros_(module.cluster_bias)
        elif isinstance(module, TransfoXLModel | SegmentAttention):
            # biases u and v, tables
            for parameter in module.parameters(recurse=False):
                fill(parameter, config.init_std)

    def init_memory(self, batch_size: int, **settings: Any) -> TransfoXLMemory:
        """Memory at the start of `batch_size` streams; settings as for [`TransfoXLMemory`]."""
        return TransfoXLMemory(self.config, batch_size=batch_size, **settings)

    def _refuse_unknown(self, arguments: dict[str, Any], also_known: tuple[str, ...] = ()) -> None:
        """Keyword arguments that nobody reads are mistakes: a misspelt `labels` must not give a run without a loss.

        The library's own are obeyed or refused, see `KEYWORDS`.
        """
        refuse_arguments(arguments, FORWARD)
        for name, value in arguments.items():
            if name in KEYWORDS:
                check_keyword(name, value)
            elif name not in also_known:
                known = [*KEYWORDS, *also_known]
                near = difflib.get_close_matches(name, [*inspect.signature(self.forward).parameters, *known], n=1)
                hint = f"; did you mean `{near[0]}`?" if near else "; see its docstring for those it takes."
                raise TypeError(f"`{type(self).__name__}` takes no argument `{name}`{hint}")

    # --- vocabulary

    def __setattr__(self, name: str, value: Any) -> None:
        # `modules_to_save` of peft trains a copy of one side, whose weights are those of the other side no more
        if name in ("crit", "word_emb") and hasattr(value, "unload_and_optionally_merge_module"):
            for module in value.modules():
                if isinstance(module, AdaptiveEmbedding | AdaptiveLogSoftmax):
                    module.is_shared = False
        super().__setattr__(name, value)

    @property
    def embeddings(self) -> AdaptiveEmbedding:
        """The whole input embedding, whatever its tables. peft finds it as `embeddings.word_embeddings`."""
        base: Any = self.base_model
        return base.word_emb

    def get_input_embeddings(self) -> nn.Module:
        """The module that turns token ids into what `inputs_embeds` holds: `(…)` -> `(…, d_model)`, scaled.

        Returns:
            `nn.Module`: A [`ScaledEmbedding`] where there is one table of width `d_model`, else the
            [`AdaptiveEmbedding`].
        """
        return self.embeddings.emb_layers[0] if self.config.has_one_embedding else self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the module of `get_input_embeddings`.

        A plain `nn.Embedding` in the place of the one table becomes a [`ScaledEmbedding`]: a checkpoint holds the
        table and not its scale. Any other module is used as it is.
        """
        base: Any = self.base_model
        if not self.config.has_one_embedding:
            base.word_emb = value
            return
        if type(value) is nn.Embedding:
            ScaledEmbedding.adopt(value, self.embeddings.scale)
        base.word_emb.emb_layers[0] = value

    def resize_token_embeddings(  # type: ignore[override]
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
        **kwargs: Any,
    ) -> nn.Module:
        """Grow or shrink the vocabulary at its end, in the last bucket; cutoffs stay.

        Args:
            new_num_tokens (`int`, *optional*): Size of the new vocabulary.
            pad_to_multiple_of (`int`, *optional*): Round the size up to a multiple of this.
            mean_resizing (`bool`): Start new tokens at the mean of their bucket, instead of at random.

        Returns:
            `nn.Module`: The embedding, resized; `get_input_embeddings()`.

        Raises:
            ValueError: if one is no integer, or the size not above the last cutoff.
        """
        refuse_arguments(kwargs, RESIZING)
        if kwargs:
            raise TypeError(f"`resize_token_embeddings` takes no argument `{next(iter(kwargs))}`.")
        config = self.config
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
        embedding: Any = self.embeddings
        if size != config.vocab_size:
            self._check_resizable()
            change = size - config.vocab_size
            config.vocab_size = size
            # buckets of equal width share one table
            first_row = last_cutoff if config.div_val == 1 else 0
            table = embedding.emb_layers[-1]
            old_weight, table.weight = table.weight, self._resized(table.weight, change, mean_resizing, first_row)
            table.num_embeddings = len(table.weight)
            embedding.bucket_ends = config.bucket_ends
            if isinstance(crit := getattr(self, "crit", None), AdaptiveLogSoftmax):
                output: Any = crit.out_layers[-1]
                is_tied = output.weight is old_weight
                output.weight = (
                    table.weight if is_tied else self._resized(output.weight, change, mean_resizing, first_row)
                )
                output.bias = self._resized(output.bias, change, mean_resizing, first_row)
                output.out_features = len(output.weight)
                crit.bucket_ends = config.bucket_ends
                crit.shortlist_size = crit.bucket_ends[0]
        return self.get_input_embeddings()

    def _check_resizable(self) -> None:
        """Refuse tables that are packed, sharded or offloaded before anything is changed."""
        for name, module in self.named_modules():
            if name.endswith(("emb_layers", "out_layers")):
                weight = getattr(list(module.children())[-1], "weight", None)
                if not is_at_hand(weight):
                    where = " on the meta device" if getattr(weight, "is_meta", False) else ""
                    raise ValueError(
                        f"The last table of `{name}` must be a plain parameter to be resized, but is of type "
                        f"{type(weight).__name__}{where}; resize before quantising, sharding or offloading."
                    )

    @torch.no_grad()
    def _resized(self, weight: nn.Parameter, change: int, mean_resizing: bool, first_row: int) -> nn.Parameter:
        """The table with rows added or taken away at its end; the last bucket begins at `first_row`."""
        old = weight.data
        if change < 0:
            return nn.Parameter(old[:change].clone(), requires_grad=weight.requires_grad)
        new = old[first_row:].float().mean(dim=0).to(old.dtype).expand(change, *old.shape[1:]).clone()
        if not mean_resizing:
            new = torch.zeros_like(new) if old.dim() == 1 else torch.empty_like(new).normal_(0.0, self.config.init_std)
        return nn.Parameter(torch.cat([old, new]), requires_grad=weight.requires_grad)


def merge_caches(cache: Any, past_key_values: Any) -> Any:
    """One cache of the two names of the argument."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("`cache` and `past_key_values` are two names of one argument, but are given and differ.")
    return past_key_values if cache is None else cache


def check_ids(name: str, ids: torch.Tensor, size: int, ignored: int | None = None, bound: str = "vocab_size") -> None:
    """Refuse ids that no embedding row or output column has. Not while compiling: it reads values."""
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise TypeError(f"`{name}` must hold integers, but has dtype {ids.dtype}.")
    if torch.compiler.is_compiling() or ids.is_meta or ids.numel() == 0:
        return
    wrong = (ids < 0) | (ids >= size)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        also = f" or {ignored}" if ignored is not None else ""
        raise ValueError(
            f"`{name}` must be between 0 and {size - 1} (`{bound}` is {size}){also}, "
            f"but has values from {ids.min().item()} to {ids.max().item()}."
        )


def check_mask(mask: Any) -> None:
    """Refuse what older releases took in second place: a list of memory states."""
    if isinstance(mask, list | tuple):
        raise TypeError(
            f"`attention_mask` must be a tensor, but is a {type(mask).__name__}. In second place transformers 2 to 4 "
            f"took `mems`. Here: {MEMORY}. See docs/migration.md."
        )


def selected_indices(output_hidden_states: Any, number: int) -> Collection[int]:
    """Which of `number` hidden states the argument asks for, as GPT-2 reads it in transformers 5.24.

    Raises:
        ValueError: for what is no such index.
    """
    if output_hidden_states is None or isinstance(output_hidden_states, bool):
        return range(number) if output_hidden_states else ()
    indices = output_hidden_states
    if isinstance(indices, int):
        # 0 alone is a flag there
        indices = [indices] if indices else []
    if not isinstance(indices, list | tuple | set | range) or not all(
        isinstance(index, int) and -number <= index < number for index in indices
    ):
        raise ValueError(
            f"`output_hidden_states` must be True, False or indices from {-number} to {number - 1} (`n_layer` + 1 "
            f"hidden states), but is {output_hidden_states!r}."
        )
    return {index % number for index in indices}


class TransfoXLModel(TransfoXLPreTrainedModel):
    """Transformer-XL without a head: hidden states of a segment, given what went before."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        # published names
        self.word_emb = AdaptiveEmbedding(config)
        self.layers = nn.ModuleList([TransfoXLLayer(config, layer_idx) for layer_idx in range(config.n_layer)])
        self.drop = nn.Dropout(config.dropout)
        self.shares_biases = ATTENTION_CLASSES[config.attention_kind].has_biases and not config.untie_r
        if self.shares_biases:
            # u and v of section 3.3, shared: one parameter here, handed to the layers
            self.r_w_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
            self.r_r_bias = nn.Parameter(torch.empty(config.n_head, config.d_head))
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> TransfoXLModelOutput:
        """Read one segment.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*): Token ids.
            attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
                1 for real tokens, 0 for pads, which may lie anywhere: they take no distance and are not remembered.
                With one of the library's caches it may cover what the cache has seen as well, as in `generate`; there,
                pads between tokens take up slots of the window until they leave it.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, sequence_length, d_model)`, *optional*):
                Input of the first layer instead of `input_ids`, used as it is (`get_input_embeddings()` scales).
            cache / past_key_values (`TransfoXLMemory` or a cache of the library, *optional*):
                What went before; two names of one argument. A `TransfoXLMemory` advances. Without any, the call is one
                segment at the start of a stream.
            use_cache (`bool`, *optional*):
                Whether to return a filled `DynamicCache` if no cache is given, in eval mode. Default: the
                configuration's. What goes on from a cache is read by the window rule, this call by the segment rule:
                a segment for which they differ (longer than `config.sliding_window`, without `same_length`) fills a
                cache that is refused later. `cache=DynamicCache(config=model.config)` reads by the window rule.
            output_attentions (`bool`, *optional*): Whether to return attention probabilities.
            output_hidden_states (`bool`, an index or `list[int]`, *optional*):
                Whether to return all hidden states, or which: 0 in a list is the input of the first layer, -1 the last
                hidden state; `None` takes the place of the others.
            position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*, a keyword):
                Only positions that follow from the order of the real tokens, as `generate` counts them; never needed.

        Returns:
            [`TransfoXLModelOutput`]: `last_hidden_state` `(batch_size, sequence_length, d_model)`, the cache,
            `n_layer + 1` hidden states of that shape and `n_layer` attentions
            `(batch_size, n_head, sequence_length, keys)`.

        Raises:
            ValueError, TypeError: for inputs that cannot be read; the message names the argument.
        """
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            raise NotImplementedError(
                "`torch.jit.trace` must not be used: the lengths of one call and the ways chosen for them become "
                f"constants, and another length gives wrong numbers. Here: {EXPORT}. See docs/migration.md."
            )
        self._refuse_unknown(kwargs)
        check_mask(attention_mask)
        config = self.config
        cache = merge_caches(cache, past_key_values)
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        if output_attentions not in (True, False, None):
            raise ValueError(
                f"`output_attentions` must be True or False, for all layers, but is {output_attentions!r}."
            )
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        selected = selected_indices(output_hidden_states, config.n_layer + 1)
        hidden_states = self._embed(input_ids, inputs_embeds)
        records_gradients = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        )

        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and cache is not None and not isinstance(cache, TransfoXLMemory):
            raise ValueError(
                "`cache` must be a `TransfoXLMemory` under gradient checkpointing, which cannot write the keys and "
                f"values of a layer twice, but is a {type(cache).__name__}."
            )
        if use_cache is None:
            # an exported program returns tensors; ask for a cache explicitly to export with one
            use_cache = config.use_cache and not torch.compiler.is_exporting()
        past = open_past(
            config,
            cache,
            hidden_states,
            attention_mask,
            fills_new_cache=use_cache and not self.training,
            records_gradients=records_gradients,
        )
        if (position_ids := kwargs.get("position_ids")) is not None:
            past.check_position_ids(position_ids)
        layout = past.layout()
        kind = ATTENTION_CLASSES[config.attention_kind]
        relative_keys = past.relative_keys(
            layout, self.drop, kind.uses_sinusoids, keeps=not records_gradients and not self.training
        )

        hidden_states = self.drop(hidden_states)
        biases = (self.r_w_bias, self.r_r_bias) if self.shares_biases else None
        all_hidden_states, all_attentions = [hidden_states], []
        layer: Any
        for layer_idx, layer in enumerate(self.layers):
            memory_states = past.read(layer_idx, hidden_states)
            hidden_states, probabilities = layer(
                hidden_states,
                layout,
                relative_keys,
                memory_states,
                past.key_value_store,
                past.shared_states(layer_idx),
                biases,
                output_attentions,
            )
            all_hidden_states.append(hidden_states)
            all_attentions.append(probabilities)
        hidden_states = self.drop(hidden_states)
        all_hidden_states[-1] = hidden_states
        past.end()
        taken: Any = selected and tuple(
            states if index in selected else None for index, states in enumerate(all_hidden_states)
        )
        return TransfoXLModelOutput(
            last_hidden_state=hidden_states,
            hidden_states=taken or None,
            attentions=tuple(all_attentions) if output_attentions else None,
            **{CACHE_NAME: past.cache},
        )

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Input of the first layer, `(B, Q, d_model)`, before dropout."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, but {given} are.")
        d_model = self.config.d_model
        if input_ids is not None and input_ids.dim() != 2:
            raise ValueError(
                f"`input_ids` must have shape (batch_size, sequence_length), but has {list(input_ids.shape)}."
            )
        if inputs_embeds is not None and (inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != d_model):
            raise ValueError(
                f"`inputs_embeds` must have shape (batch_size, sequence_length, d_model={d_model}), "
                f"but has {list(inputs_embeds.shape)}."
            )
        for name, tensor in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds)):
            if tensor is not None and 0 in tensor.shape[:2]:
                raise ValueError(f"`{name}` must hold at least one token per row, but has shape {list(tensor.shape)}.")
        if inputs_embeds is not None:
            # a copy, since a memory may keep the input of the first layer
            return inputs_embeds.clone()
        assert input_ids is not None
        check_ids("input_ids", input_ids, self.config.vocab_size)
        return self.word_emb(input_ids.long())


class TransfoXLForCausalLM(TransfoXLPreTrainedModel, GenerationMixin):
    """Transformer-XL with an adaptive softmax: a language model over one long stream per batch row."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        self.transformer = TransfoXLModel(config)
        # published name
        self.crit = AdaptiveLogSoftmax(config)
        # the library would take it from the name of the class, which a subclass may change
        self.loss_type = "ForCausalLM"
        # not empty, so that the library knows that this model ties weights; which ones, `get_expanded_…` says
        self._tied_weights_keys = self._tied_weights()
        self.post_init()

    def _get_name(self) -> str:
        """The library's `Trainer` shifts the targets of a smoothed loss for classes that it knows by this name.

        So subclasses keep it.
        """
        return TransfoXLForCausalLM.__name__

    def _tied_weights(self) -> dict[str, str]:
        """Softmax weight -> embedding weight that it is. Projections are tied whether or not the tables are."""
        config = self.config
        ties: dict[str, str] = {}
        if not (self.crit.is_shared and self.transformer.word_emb.is_shared):
            return ties
        if config.tie_word_embeddings:
            # without those that an adapter has given a table of their own
            untied = self.crit.out_layers.untied | self.transformer.word_emb.emb_layers.untied
            for index in set(range(len(self.crit.out_layers))) - untied:
                ties[f"crit.out_layers.{index}.weight"] = f"transformer.word_emb.emb_layers.{index}.weight"
        for bucket in range(config.num_clusters + 1):
            if config.ties_projection(bucket):
                source = bucket if config.div_val > 1 else 0
                ties[f"crit.out_projs.{bucket}"] = f"transformer.word_emb.emb_projs.{source}"
        return ties

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """The library's own version ties nothing at all where `tie_word_embeddings` is `False`."""
        return self._tied_weights()

    def get_output_embeddings(self) -> nn.Module:
        """The layer whose output is the logits, `(…, d_model)` -> `(…, vocab_size)`, where there is one.

        Returns:
            `nn.Module`: An `nn.Linear` without clusters and projection, else the whole [`AdaptiveLogSoftmax`], which
            has no `weight` and says so.
        """
        return self.crit.out_layers[0] if self.config.has_one_head else self.crit

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the module of `get_output_embeddings`."""
        if self.config.has_one_head:
            self.crit.out_layers[0] = value
        elif isinstance(value, AdaptiveLogSoftmax):
            self.crit = value
        else:
            raise TypeError(
                "`value` must be an `AdaptiveLogSoftmax`, since the head is no single matrix, but is a "
                f"{type(value).__name__}."
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_logits: bool | None = None,
        num_candidates: int | None = None,
        **kwargs: Any,
    ) -> TransfoXLCausalLMOutput:
        """Score or predict the tokens of one segment.

        Args:
            input_ids, attention_mask, inputs_embeds, cache, past_key_values, use_cache, output_attentions,
            output_hidden_states, position_ids: As for [`TransfoXLModel`].
            labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
                The tokens of the segment (`labels=input_ids`): position t is scored on `labels[:, t + 1]`, so the last
                position is not scored. -100 is ignored.
            shift_labels (`torch.LongTensor` of the same shape, *optional*, a keyword):
                Targets already shifted: position t is scored on `shift_labels[:, t]`, so that the last token of a
                segment is scored on the first of the next. They win over `labels`.
            logits_to_keep (`int` or `torch.Tensor`):
                Logits of the last positions only (0: all), or of these positions.
            return_logits (`bool`, *optional*):
                Whether to compute `logits`. Default: yes, except in train mode with labels, where `logits` is None and
                no (tokens x vocabulary) tensor is built. A loss of one's own on the logits needs `return_logits=True`.
            num_candidates (`int`, *optional*):
                Only this many of the likeliest tokens of each position matter: the logits of a cluster that can hold
                none of them may be `-inf`. `generate` says so where it is true.
            num_items_in_batch (*optional*, a keyword): Divides the sum of the losses instead of the number of targets.

        Returns:
            [`TransfoXLCausalLMOutput`]
        """
        shift_labels = kwargs.pop("shift_labels", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        if (skip_logits := kwargs.pop("skip_logits", None)) is not None and return_logits is None:
            return_logits = not skip_logits
        self._refuse_unknown(kwargs, also_known=("shift_labels",))
        inputs = input_ids if input_ids is not None else inputs_embeds
        targets = self._targets(labels, shift_labels, inputs)

        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state

        loss = losses = None
        if targets is not None:
            losses = self.crit(hidden_states, targets)
            count = (targets != -100).sum().clamp(min=1) if num_items is None else num_items
            loss = losses.sum() / (count.to(losses.device) if isinstance(count, torch.Tensor) else count)
        if return_logits is None:
            return_logits = targets is None or not self.training
        logits = None
        if return_logits:
            positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.crit(hidden_states[:, positions], num_candidates=num_candidates)
        return TransfoXLCausalLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            losses=losses,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )

    def _targets(
        self, labels: torch.Tensor | None, shift_labels: torch.Tensor | None, inputs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The token to score at each position, `(B, Q)`, -100 where there is none."""
        for name, given in (("labels", labels), ("shift_labels", shift_labels)):
            if given is not None and inputs is not None:
                if given.shape != inputs.shape[:2]:
                    raise ValueError(
                        f"`{name}` must have the shape of the segment, {list(inputs.shape[:2])}, "
                        f"but has {list(given.shape)}."
                    )
                check_ids(name, given, self.config.vocab_size, ignored=-100)
        if shift_labels is not None:
            return shift_labels.long()
        if labels is None:
            return None
        return F.pad(labels[:, 1:].long(), (0, 1), value=-100)

    # --- generation

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate tokens; see the library's `generate`.

        `cache=` (or `past_key_values=`) takes a [`TransfoXLMemory`], which then holds the stream so far; the ids are
        new ones, and the memory advances by all of them but the last generated token. It is read and written whatever
        `use_cache` says. Beams and several returned sequences go on from it side by side and leave it where it is;
        with `return_dict_in_generate` theirs is returned. Without a memory the library's own cache gives the numbers
        of the window rule; `use_cache=False` reads the whole text as one segment for each token.
        """
        refuse_arguments(kwargs, GENERATE)
        cache = merge_caches(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE_NAME] = cache

        def setting(name: str) -> Any:
            """What counts: the call's word, then its configuration's, then the model's."""
            if name in kwargs:
                return kwargs[name]
            given = (getattr(config, name, None) for config in (generation_config, self.generation_config))
            return next((value for value in given if value is not None), None)

        # the library's own criterion fails with tokenizers that do not know the word it tries
        if stop_strings := setting("stop_strings"):
            stop = StopTexts(kwargs.get("tokenizer"), stop_strings)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), stop])
            kwargs.pop("stop_strings", None)
            if generation_config is not None:
                generation_config = copy.copy(generation_config)
                generation_config.stop_strings = None
            if self.generation_config.stop_strings:
                kwargs["stop_strings"] = None
        if setting("cache_implementation") == "quantized":
            raise ValueError(
                "`cache_implementation` must not be 'quantized': the library quantises caches of full attention only, "
                "and this model's is a sliding window."
            )
        check_prompt(inputs, kwargs, cache)
        if self.config.is_absolute and kwargs.get("position_ids") is not None:
            raise ValueError(
                f"`position_ids` must be None for `attention_kind={self.config.attention_kind!r}`, whose positions "
                "are those of the newest tokens at each step, but is given."
            )
        remembers = self.config.sliding_window > 1 and not self.config.is_absolute
        if remembers and cache is None and kwargs.get("use_cache") is None and setting("use_cache") is False:
            logger.warning_once(
                "`generate` reads the whole text again for each token, as one segment, since a configuration says "
                "`use_cache=False` (the library's `Trainer` writes that into `model.config`, from which a generation "
                "configuration takes it). Pass `use_cache=True`, or set `model.generation_config.use_cache = True`."
            )
        if isinstance(cache, TransfoXLMemory):
            if setting("prefill_chunk_size") is not None:
                raise ValueError("`prefill_chunk_size` must be None with a `TransfoXLMemory`; feed segments yourself.")
            if kwargs.get("assistant_model") is not None or setting("prompt_lookup_num_tokens") is not None:
                raise ValueError("Assisted decoding takes tokens back, which a `TransfoXLMemory` cannot do.")
            if isinstance(mask := kwargs.get("attention_mask"), torch.Tensor):
                check_prompt_mask(mask)
            remembers = cache.mem_len > 0
            if remembers:
                # else each step would read the whole text behind the memory of it
                kwargs["use_cache"] = True
        if not remembers:
            if kwargs.get("inputs_embeds") is not None:
                raise ValueError(
                    "`inputs_embeds` must be None where nothing is remembered (`mem_len` is 0, or an absolute "
                    "attention kind without a `TransfoXLMemory`): every step reads the whole text again, of which "
                    "only ids are known later. Pass `input_ids`."
                )
            # every step reads the whole segment again
            kwargs["use_cache"] = False
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The library's greedy decoding and sampling, told how many tokens can be chosen from.

        A cluster without any of them need not be read. Nothing but speed depends on this method being called.
        """
        num_candidates = count_candidates(logits_processor, generation_config)
        if num_candidates is not None and self.config.num_clusters:
            kwargs["num_candidates"] = num_candidates
        library: Any = super()
        return library._sample(input_ids, logits_processor, stopping_criteria, generation_config, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported: paged attention knows no position scores."""
        raise NotImplementedError("Continuous batching has no relative positions; use `generate` on a padded batch.")

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The library's own, and the mask of the new tokens only where a memory knows the rest."""
        # given for stop strings or healed prompts, the library hands it on to the model
        kwargs.pop("tokenizer", None)
        inputs = super().prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        cache = inputs.get(CACHE_NAME)
        if self.config.is_absolute and not (isinstance(cache, TransfoXLMemory) and cache.mem_len):
            # everything is read again at each step, but no more than positions reach
            for name in ("input_ids", "inputs_embeds", "attention_mask"):
                if inputs.get(name) is not None:
                    inputs[name] = inputs[name][:, -self.config.max_klen :]
        mask = inputs.get("attention_mask")
        if mask is not None and isinstance(inputs.get(CACHE_NAME), TransfoXLMemory):
            ids = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            # the memory knows which of its positions are real, and a single token is: a generated one, or a prompt of
            # which the library may think that it is a pad
            inputs["attention_mask"] = mask[:, -ids.shape[1] :] if ids.shape[1] > 1 else None
            if ids.shape[1] > 1:
                check_prompt_mask(inputs["attention_mask"])
        if CACHE_NAME in inputs:
            # peft puts its prompts in front of the text where it finds no filled cache under the old name
            inputs["past_key_values"] = inputs.pop(CACHE_NAME)
        return inputs

    @staticmethod
    def create_masks_for_generate(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The model makes its own masks for every cache, from the two-dimensional one."""
        return attention_mask

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        """Beams and several returned sequences each go on from their row's memory, which they share."""
        memory, ids = kwargs.get(CACHE_NAME), kwargs.get("input_ids")
        if expand_size > 1 and isinstance(memory, TransfoXLMemory):
            if ids is not None and memory.batch_size not in (None, len(ids)):
                raise ValueError(
                    f"`cache` must have the batch size of the prompt ({len(ids)}), but holds {memory.batch_size} "
                    "streams; each row is repeated for its beams or sequences."
                )
            kwargs[CACHE_NAME] = memory = copy.copy(memory)
            memory.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)  # type: ignore[misc]


def check_prompt(inputs: Any, arguments: dict[str, Any], cache: Any) -> None:
    """Refuse prompts without a token to predict from; the library would fail at their last one, or read them again.

    Args:
        inputs, arguments, cache: Of `generate`: its first argument, its keywords, and the cache of either name.
    """
    prompts = {"inputs": inputs, **{name: arguments.get(name) for name in ("input_ids", "inputs_embeds")}}
    prompts = {
        name: prompt for name, prompt in prompts.items() if isinstance(prompt, torch.Tensor) and prompt.dim() > 1
    }
    if not prompts:
        return
    # embeddings win over ids
    name, prompt = max(prompts.items(), key=lambda item: item[1].dim())
    if prompt.shape[1] == 0:
        instead = "begin with `bos_token_id`, or with whatever a text begins with"
        if cache is not None:
            instead = (
                "a past keeps no prediction: hold back its last token, do not let it be read, and begin with that"
            )
        raise ValueError(
            f"`{name}` must hold at least one token per row, from which the first new one is predicted, but has "
            f"shape {list(prompt.shape)}; {instead}."
        )
    past_length = 0 if cache is None or not hasattr(cache, "get_seq_length") else int(cache.get_seq_length())
    mask = arguments.get("attention_mask")
    # the library takes embeddings for the whole text whatever the mask
    only_new = name != "inputs_embeds" and isinstance(mask, torch.Tensor) and mask.shape[1] != prompt.shape[1]
    if prompt.shape[1] <= past_length and not only_new:
        raise ValueError(
            f"`{name}` must hold the whole text, more than the {past_length} tokens that `cache` has read, but holds "
            f"{prompt.shape[1]}; new tokens alone need an `attention_mask` of all."
        )


def check_prompt_mask(mask: torch.Tensor) -> None:
    """Refuse rows that end with a pad: the first new token is predicted from their last one."""
    if not (mask[:, -1] != 0).all():
        raise ValueError(
            "`attention_mask` must end with a real token in each row, from which the first new one is predicted, but "
            f"ends with {mask[:, -1].int().tolist()}. Pad on the left; where it is not given, the library takes each "
            "`pad_token_id` of a prompt for a pad."
        )


def count_candidates(logits_processor: Any, generation_config: Any) -> int | None:
    """How many of the likeliest tokens a step of greedy decoding or sampling looks at; `None`: maybe all.

    Greedy decoding looks at one and top-k sampling at k, as long as nothing before it changes the order of tokens.
    """
    if generation_config.return_dict_in_generate and (
        generation_config.output_scores or generation_config.output_logits
    ):
        return None
    for processor in logits_processor:
        if type(processor) is TopKLogitsWarper and processor.filter_value == -float("inf"):
            # what comes later sees `-inf` for all others
            return processor.top_k
        if type(processor) is not TemperatureLogitsWarper:
            return None
    return None if generation_config.do_sample else 1


class StopTexts(StoppingCriteria):
    """Ends a row when the newest token completes one of several texts.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Decodes the tokens.
        stop_strings (`str` or `list[str]`): The texts.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | list[str]):
        self.texts = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given together with `stop_strings`, but is None.")
        if not all(isinstance(text, str) and text for text in self.texts):
            raise ValueError(f"`stop_strings` must be texts that are not empty, but are {stop_strings!r}.")
        self.tokenizer = tokenizer
        # a token that decodes to nothing is rare; spaces and context before the text need a few more
        self.num_tokens = max(map(len, self.texts)) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = [self._completes(row) for row in input_ids[:, -self.num_tokens :].tolist()]
        return torch.tensor(done, device=input_ids.device)

    def _completes(self, token_ids: list[int]) -> bool:
        before, after = self.tokenizer.decode(token_ids[:-1]), self.tokenizer.decode(token_ids)
        return any(after.count(text) > before.count(text) for text in self.texts)


# the name in published `config.json` files; the same class, so that the library's pipelines inject no prompt
TransfoXLLMHeadModel = TransfoXLForCausalLM


class TransfoXLForSequenceClassification(TransfoXLPreTrainedModel):
    """Transformer-XL with a linear classifier on the last real token of each row."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.transformer = TransfoXLModel(config)
        # published name
        self.score = nn.Linear(config.d_model, self.num_labels, bias=False)
        # as above
        self.loss_type = "ForSequenceClassification"
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> TransfoXLSequenceClassifierOutput:
        """Classify rows by their rightmost real token.

        Args:
            input_ids, attention_mask, inputs_embeds, cache, past_key_values, use_cache, output_attentions,
            output_hidden_states, position_ids: As for [`TransfoXLModel`]. Without a mask the rightmost token that is
                not `pad_token_id` counts, if the configuration has one.
            labels (`torch.Tensor` of shape `(batch_size,)` or `(batch_size, num_labels)`, *optional*):
                Classes, numbers (regression) or 0/1 per class, by `config.problem_type`.

        Returns:
            [`TransfoXLSequenceClassifierOutput`] with `logits` of shape `(batch_size, num_labels)`.
        """
        self._refuse_unknown(kwargs)
        num_items = kwargs.pop("num_items_in_batch", None)
        inputs = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and inputs is not None:
            self._check_labels(labels, len(inputs))
        outputs = self.transformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cache=cache,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        batch_size, query_length = hidden_states.shape[:2]
        if attention_mask is not None:
            real = attention_mask[:, -query_length:].to(hidden_states.device) != 0
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = input_ids != self.config.pad_token_id
        else:
            real = torch.ones(batch_size, query_length, dtype=torch.bool, device=hidden_states.device)
        # index of the rightmost real token; 0 in a row without any
        last = (real * torch.arange(query_length, device=real.device)).argmax(dim=-1)
        pooled_logits = self.score(hidden_states[torch.arange(batch_size, device=last.device), last])

        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=pooled_logits,
                labels=labels,
                pooled_logits=pooled_logits,
                config=self.config,
                num_items_in_batch=num_items,
            )
        return TransfoXLSequenceClassifierOutput(
            loss=loss,
            logits=pooled_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )

    def _check_labels(self, labels: torch.Tensor, batch_size: int) -> None:
        if len(labels) != batch_size:
            raise ValueError(f"`labels` must have one entry per row ({batch_size}), but has {len(labels)}.")
        is_class = self.config.problem_type == "single_label_classification" or (
            self.config.problem_type is None and self.num_labels > 1 and not labels.is_floating_point()
        )
        if is_class:
            check_ids("labels", labels, self.num_labels, ignored=-100, bound="num_labels")


# The lists in which the library's `Trainer` and programs such as lm-eval look up what a model is for. The lists of
# configurations and tokenizers stay as they are: for their entries the library imports a module of its own.
MODEL_MAPPING_NAMES.setdefault(TransfoXLConfig.model_type, TransfoXLModel.__name__)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(TransfoXLConfig.model_type, TransfoXLForCausalLM.__name__)
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.setdefault(
    TransfoXLConfig.model_type, TransfoXLForSequenceClassification.__name__
)

__all__ = [
    "TransfoXLForCausalLM",
    "TransfoXLForSequenceClassification",
    "TransfoXLLMHeadModel",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
]

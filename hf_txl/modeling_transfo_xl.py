"""Transformer-XL models: layers, base model, language model.

Follows [Dai et al., 2019](https://arxiv.org/abs/1901.02860) and `mem_transformer.py` of the original PyTorch code.
Modules keep the published weight names, so every Transformer-XL checkpoint loads without a mapping.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers.utils import can_return_tuple, logging

from .adaptive_softmax_transfo_xl import (
    AdaptiveEmbedding,
    AdaptiveLogSoftmax,
    ScaledEmbedding,
    resize_vocabulary,
    resized_size,
)
from .arguments_transfo_xl import check_ids, check_keywords, check_mask, merge_caches, selected_indices
from .attention_transfo_xl import ATTENTION_CLASSES, SegmentAttention
from .autograd_transfo_xl import first_order_only
from .configuration_transfo_xl import TransfoXLConfig
from .gating_transfo_xl import Gate, join, make_gate
from .generation_transfo_xl import TransfoXLGenerationMixin
from .legacy_names_transfo_xl import (
    EXPORT,
    LOADING,
    MODEL,
    RESIZING,
    attribute_error,
    refuse_arguments,
)
from .library_caches_transfo_xl import LibrarySegment, mark_pads, new_cache_for, writer_of
from .library_check_transfo_xl import AT_IMPORT, BEFORE_LOADING, check_library
from .memory_transfo_xl import TransfoXLMemory
from .memory_update_transfo_xl import MemorySegment
from .outputs_transfo_xl import (
    CACHE_NAME,
    TransfoXLCausalLMOutput,
    TransfoXLModelOutput,
)
from .packed_texts_transfo_xl import end_texts, text_starts
from .segment_transfo_xl import Segment
from .weights_transfo_xl import is_plain

logger = logging.get_logger(__name__)

# B batch   Q positions of the segment


class ReluDropoutFunction(torch.autograd.Function):
    """`dropout(relu(x))` that saves only its output for the backward pass: where it is positive, gradients pass."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, dropout: float) -> torch.Tensor:
        output = F.dropout(torch.relu(states), dropout)
        ctx.save_for_backward(output)
        ctx.factor = 1 / (1 - dropout) if dropout < 1 else 0.0
        return output

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.aten.threshold_backward(gradient, ctx.saved_tensors[0], 0).mul_(ctx.factor), None


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
        self.gate = make_gate(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(B, Q, d_model)` -> `(B, Q, d_model)`."""
        if self.pre_lnorm:
            return join(self.gate, hidden_states, self._transform(self.layer_norm(hidden_states)))
        return self.layer_norm(hidden_states + self._transform(hidden_states))

    def _transform(self, states: torch.Tensor) -> torch.Tensor:
        if not (self.training and self._can_fuse()):
            return self.CoreNet(states)
        expand, _, drop, contract, drop_last = self.CoreNet
        return drop_last(contract(ReluDropoutFunction.apply(expand(states), drop.p)))

    def _can_fuse(self) -> bool:
        """Whether activation and dropout may run as one function, which saves one tensor for the backward pass."""
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
    # frequencies of the sinusoids are computed, and biases that layers share are stored once, on the model
    _keys_to_ignore_on_load_unexpected = [r"pos_emb\.inv_freq$", r"layers\.\d+\.dec_attn\.r_[rw]_bias$"]

    def __init__(self, config: TransfoXLConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        # fields may have been set after construction
        config.validate_architecture()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as the library does, but never execute pickled code in `pytorch_model.bin`."""
        refuse_arguments(kwargs, LOADING)
        if kwargs.get("weights_only") is False:
            raise ValueError(
                "`weights_only` must be True, but is False: `pytorch_model.bin` may hold pickled code, which is never "
                "executed."
            )
        check_library(TransfoXLForCausalLM, BEFORE_LOADING)
        return super().from_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Does nothing for the classes here, whose code is always saved; registers subclasses as the library does."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # modules and parameters first: every call looks them up here
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
        elif isinstance(module, Gate) and module.has_bias:
            init.constant_(module.gate_bias, config.gating_bias)
        elif isinstance(module, TransfoXLModel | SegmentAttention):
            # biases u and v, position tables
            for parameter in module.parameters(recurse=False):
                fill(parameter, config.init_std)

    def init_memory(self, batch_size: int, **settings: Any) -> TransfoXLMemory:
        """Empty memory for `batch_size` streams; settings as for [`TransfoXLMemory`]."""
        return TransfoXLMemory(self.config, batch_size=batch_size, **settings)

    def _check_keywords(self, arguments: dict[str, Any], also_known: tuple[str, ...] = ()) -> None:
        check_keywords(type(self).__name__, self.forward, arguments, also_known)

    # --- vocabulary

    def __setattr__(self, name: str, value: Any) -> None:
        # `modules_to_save` of peft trains a copy of one side, whose weights are then no longer tied to the other's
        if name in ("crit", "word_emb") and hasattr(value, "unload_and_optionally_merge_module"):
            for module in value.modules():
                if isinstance(module, AdaptiveEmbedding | AdaptiveLogSoftmax):
                    module.is_shared = False
        super().__setattr__(name, value)

    @property
    def embeddings(self) -> Any:
        """The input embedding with all its tables; peft looks it up as `embeddings.word_embeddings`."""
        base: Any = self.base_model
        return base.word_emb

    def get_input_embeddings(self) -> Any:
        """The module that maps token ids to `inputs_embeds`, `(…)` -> `(…, d_model)`, scale included.

        Returns:
            `nn.Module`: A [`ScaledEmbedding`] if there is one table of width `d_model`, else the
            [`AdaptiveEmbedding`]; `None` with `vocab_size=0`.
        """
        if self.embeddings is None:
            return None
        return self.embeddings.emb_layers[0] if self.config.has_one_embedding else self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the module of `get_input_embeddings`.

        If there is one table of width `d_model`, a plain `nn.Embedding` becomes a [`ScaledEmbedding`], since
        checkpoints hold the unscaled table. Other modules are used as they are.
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
            mean_resizing (`bool`): Initialise new tokens with the mean of their bucket instead of randomly.

        Returns:
            `nn.Module`: The embedding, resized; `get_input_embeddings()`.

        Raises:
            ValueError: if an argument is not an integer, or the size does not exceed the last cutoff.
        """
        refuse_arguments(kwargs, RESIZING)
        if kwargs:
            raise TypeError(f"`resize_token_embeddings` takes no argument `{next(iter(kwargs))}`.")
        if self.embeddings is None:
            raise ValueError("`resize_token_embeddings` needs a vocabulary, but `vocab_size` is 0.")
        size = resized_size(self.config, new_num_tokens, pad_to_multiple_of)
        if size != self.config.vocab_size:
            resize_vocabulary(self.config, size, self.embeddings, getattr(self, "crit", None), mean_resizing)
        # the library's own method sets this attribute too
        self.vocab_size = size
        return self.get_input_embeddings()


class TransfoXLModel(TransfoXLPreTrainedModel):
    """Transformer-XL without a head: hidden states of a segment, given the memory or cache."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        # published names
        self.word_emb: Any = AdaptiveEmbedding(config) if config.vocab_size else None
        self.layers = nn.ModuleList([TransfoXLLayer(config, layer_idx) for layer_idx in range(config.n_layer)])
        self.drop = nn.Dropout(config.dropout)
        self.shares_biases = ATTENTION_CLASSES[config.attention_kind].has_biases and not config.untie_r
        if self.shares_biases:
            # u and v of section 3.3, shared by all layers, which receive them as arguments
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
        """Compute the hidden states of one segment.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*): Token ids.
            attention_mask (`torch.Tensor` of shape `(batch_size, sequence_length)`, *optional*):
                1 for real tokens, 0 for pads, which may be anywhere: they take no position and are not stored. With a
                cache of the library it may also cover the cached tokens, as in `generate`; there, pads between tokens
                occupy slots of the window.
            inputs_embeds (`torch.FloatTensor` of shape `(batch_size, sequence_length, d_model)`, *optional*):
                Input of the first layer instead of `input_ids`, not scaled again (`get_input_embeddings()` scales).
            cache / past_key_values (`TransfoXLMemory` or a cache of the library, *optional*):
                State to continue from; two names of one argument. A `TransfoXLMemory` is advanced in place. Without
                either, the segment starts a stream.
            use_cache (`bool`, *optional*):
                Whether to return a filled `DynamicCache` if no cache is given, in eval mode. Default:
                `config.use_cache`. Calls that continue a cache follow the window rule, this call the segment rule:
                where they differ (segments longer than `config.sliding_window`, without `same_length`), the cache
                cannot be continued. `cache=DynamicCache(config=model.config)` applies the window rule from the start.
            output_attentions (`bool`, *optional*): Whether to return attention probabilities.
            output_hidden_states (`bool`, an index or `list[int]`, *optional*):
                Whether to return all hidden states, or indices of those to return, with `None` in place of the others:
                `[0]` is the input of the first layer, `[-1]` the last hidden state.
            position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*, a keyword):
                Positions of the real tokens. Where they start again from 0 inside a row, a further text begins; other
                positions than those that follow from the order of the tokens are errors.
            reset_before (`torch.BoolTensor` of shape `(batch_size, sequence_length)`, *optional*, a keyword):
                Tokens that begin a text: they and what follows attend to nothing before them, in a memory either, and
                the memory keeps the last text of each row. `cu_seq_lens_q`, `cu_seq_lens_k`, `seq_idx` and
                `position_ids` mark the texts of packed rows too; the first text of a row continues the memory.

        Returns:
            [`TransfoXLModelOutput`]: `last_hidden_state` `(batch_size, sequence_length, d_model)`, the cache,
            `n_layer + 1` hidden states of that shape and `n_layer` attentions
            `(batch_size, n_head, sequence_length, keys)`.

        Raises:
            ValueError, TypeError: for invalid arguments; the message names the argument.
        """
        if not torch.compiler.is_compiling() and torch.jit.is_tracing():
            raise NotImplementedError(
                "`torch.jit.trace` is not supported: a traced program keeps the lengths of one call and gives wrong "
                f"numbers for others. Here: {EXPORT}. See docs/migration.md."
            )
        self._check_keywords(kwargs)
        check_mask(attention_mask)
        cache = merge_caches(cache, past_key_values)
        output_attentions = self._wants_attentions(output_attentions)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        selected = selected_indices(output_hidden_states, self.config.n_layer + 1)
        hidden_states = self._embed(input_ids, inputs_embeds)
        records_gradients = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        )
        if use_cache is None:
            # an exported program returns tensors only, unless a cache is asked for explicitly
            use_cache = self.config.use_cache and not torch.compiler.is_exporting()
        segment = self._open_segment(
            cache,
            hidden_states,
            attention_mask,
            returns_cache=use_cache and not self.training,
            records_gradients=records_gradients,
            starts=text_starts(kwargs, hidden_states, attention_mask),
        )
        if (position_ids := kwargs.get("position_ids")) is not None:
            segment.check_position_ids(position_ids)

        is_inference = not records_gradients and not self.training
        all_hidden_states, attentions = self._run_layers(segment, hidden_states, is_inference, output_attentions)
        segment.end()
        returned: Any = selected and tuple(
            states if index in selected else None for index, states in enumerate(all_hidden_states)
        )
        return TransfoXLModelOutput(
            last_hidden_state=all_hidden_states[-1],
            hidden_states=returned or None,
            attentions=tuple(attentions) if output_attentions else None,
            **{CACHE_NAME: segment.cache},
        )

    def _run_layers(
        self, segment: Segment, inputs_embeds: torch.Tensor, is_inference: bool, output_attentions: bool
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """The `n_layer + 1` hidden states, `(B, Q, d_model)`, and the attention probabilities of each layer."""
        layout = segment.layout()
        uses_sinusoids = ATTENTION_CLASSES[self.config.attention_kind].uses_sinusoids
        table = segment.position_table(layout, self.drop, uses_sinusoids, keeps=is_inference)
        biases = (self.r_w_bias, self.r_r_bias) if self.shares_biases else None
        hidden_states = self.drop(inputs_embeds)
        all_hidden_states = [hidden_states]
        attentions: list[Any] = []
        writer = segment.key_value_writer
        layer: Any
        for layer_idx, layer in enumerate(self.layers):
            memory_states = segment.memory_states(layer_idx, hidden_states)
            hidden_states, probabilities = layer(
                hidden_states,
                layout,
                table,
                memory_states,
                writer,
                segment.shared_prefix(layer_idx),
                biases,
                output_attentions,
            )
            all_hidden_states.append(hidden_states)
            attentions.append(probabilities)
        all_hidden_states[-1] = self.drop(hidden_states)
        return all_hidden_states, attentions

    def _wants_attentions(self, output_attentions: Any) -> bool:
        """Whether to return attention probabilities, by the argument or else by the configuration."""
        wanted: Any = self.config.output_attentions if output_attentions is None else output_attentions
        if wanted not in (True, False, None):
            raise ValueError(f"`output_attentions` must be True or False, for all layers, but is {wanted!r}.")
        return wanted

    def _open_segment(
        self,
        cache: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        returns_cache: bool,
        records_gradients: bool,
        starts: torch.Tensor | None,
    ) -> Segment:
        """The segment that starts a stream or continues `cache`."""
        config = self.config
        if cache is not None and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "`cache` must be None in a backward pass, such as a recomputation by `torch.utils.checkpoint`, but is "
                f"a {type(cache).__name__}: it would advance twice. Use `model.gradient_checkpointing_enable()`: it "
                "recomputes layers only."
            )
        if type(cache).__name__ == TransfoXLMemory.__name__ and not isinstance(cache, TransfoXLMemory):
            raise TypeError(
                f"`cache` must be a `TransfoXLMemory` of the model's own code ({TransfoXLMemory.__module__}), as "
                f"`model.init_memory(batch_size)` makes, but is one of {type(cache).__module__}."
            )
        if isinstance(cache, TransfoXLMemory):
            return MemorySegment(config, inputs_embeds, attention_mask, cache, records_gradients, starts)
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError(
                "`cache` must be a `TransfoXLMemory` under gradient checkpointing, but is a "
                f"{type(cache).__name__}: recomputing a layer would append its keys and values twice."
            )
        if cache is not None and config.is_absolute:
            raise ValueError(
                f"`cache` must be a `TransfoXLMemory` for `attention_kind={config.attention_kind!r}`, but is a "
                f"{type(cache).__name__}: keys and values depend on absolute positions, which change in every call."
            )
        stores_keys = config.sliding_window > 1 and not config.is_absolute
        if cache is None:
            # a cache of the library cannot forget the texts before the last
            if not (returns_cache and stores_keys) or starts is not None:
                return Segment(config, inputs_embeds, attention_mask, starts=starts)
            new_cache = new_cache_for(config, inputs_embeds.shape[1])
            segment = Segment(config, inputs_embeds, attention_mask, new_cache, writer_of(new_cache))
            mark_pads(new_cache, segment.mask)
            return segment
        if not hasattr(cache, "get_mask_sizes"):
            raise TypeError(
                "`cache` must be a `TransfoXLMemory` or a `Cache` of transformers, but is a "
                f"{type(cache).__name__}; `TransfoXLMemory.from_mems` converts a list of tensors."
            )
        if not stores_keys:
            logger.warning_once(f"`cache` is ignored, because nothing is stored with `mem_len={config.mem_len}`.")
            return Segment(config, inputs_embeds, attention_mask, starts=starts)
        if starts is not None:
            raise ValueError(
                f"`cache` must be None or a `TransfoXLMemory` where `position_ids`, `cu_seq_lens_q`, `seq_idx` or "
                f"`reset_before` mark several texts, but is a {type(cache).__name__}, which keeps all texts."
            )
        return LibrarySegment(config, inputs_embeds, attention_mask, cache)

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        """Input of the first layer, `(B, Q, d_model)`, before dropout."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"Exactly one of `input_ids` and `inputs_embeds` must be given, but {given} are.")
        name, tensor = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"`{name}` must be a tensor, but is a {type(tensor).__name__}.")
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
        if 0 in tensor.shape[:2]:
            raise ValueError(f"`{name}` must hold at least one token per row, but has shape {list(tensor.shape)}.")
        if inputs_embeds is not None:
            # a copy, since a memory may store the input of the first layer
            return inputs_embeds.clone()
        assert input_ids is not None
        if self.word_emb is None:
            raise ValueError("`input_ids` must be None with `vocab_size=0`, but is given. Pass `inputs_embeds`.")
        check_ids("input_ids", input_ids, self.config.vocab_size)
        return self.word_emb(input_ids.long())


class TransfoXLForCausalLM(TransfoXLPreTrainedModel, TransfoXLGenerationMixin):
    """Transformer-XL with an adaptive softmax: a language model over one long stream per batch row."""

    def __init__(self, config: TransfoXLConfig):
        super().__init__(config)
        if config.vocab_size == 0:
            raise ValueError("`vocab_size` must be at least 1 for a language model, but is 0.")
        self.transformer = TransfoXLModel(config)
        # published name
        self.crit = AdaptiveLogSoftmax(config)
        # the library would infer it from the class name, which a subclass may change
        self.loss_type = "ForCausalLM"
        # if empty, the library ties no weights; `get_expanded_tied_weights_keys` decides which
        self._tied_weights_keys = self._tied_weights()
        self.post_init()

    def _get_name(self) -> str:
        """The same name for subclasses: the library's `Trainer` shifts labels for label smoothing by class name."""
        return TransfoXLForCausalLM.__name__

    def _tied_weights(self) -> dict[str, str]:
        """Softmax weight -> embedding weight it is tied to. Projections are tied independently of tables."""
        config = self.config
        ties: dict[str, str] = {}
        if not (self.crit.is_shared and self.transformer.word_emb.is_shared):
            return ties
        if config.tie_word_embeddings:
            # without those whose table an adapter has copied
            untied = self.crit.out_layers.untied | self.transformer.word_emb.emb_layers.untied
            for index in set(range(len(self.crit.out_layers))) - untied:
                ties[f"crit.out_layers.{index}.weight"] = f"transformer.word_emb.emb_layers.{index}.weight"
        for bucket in range(config.num_clusters + 1):
            if config.ties_projection(bucket):
                source = bucket if config.div_val > 1 else 0
                ties[f"crit.out_projs.{bucket}"] = f"transformer.word_emb.emb_projs.{source}"
        return ties

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """All tied weights; the library's version ties no projections with `tie_word_embeddings=False`."""
        return self._tied_weights()

    def get_output_embeddings(self) -> nn.Module:
        """The module that maps hidden states to logits, `(…, d_model)` -> `(…, vocab_size)`.

        Returns:
            `nn.Module`: An `nn.Linear` without clusters and projection, else the whole [`AdaptiveLogSoftmax`], whose
            `weight` raises an `AttributeError`.
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
                f"`value` must be an `AdaptiveLogSoftmax`, but is a {type(value).__name__}: with clusters or a "
                "projection the head is not a single matrix."
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
                Labels already shifted: position t is scored on `shift_labels[:, t]`, so that the last position of a
                segment can be scored on the first token of the next. They take precedence over `labels`.
            logits_to_keep (`int` or `torch.Tensor`):
                Number of last positions to compute logits for (0: all), or indices of positions.
            return_logits (`bool`, *optional*):
                Whether to compute `logits`. Default: yes, except in train mode with labels, where `logits` is None and
                no (tokens x vocabulary) tensor is built. A custom loss on the logits needs `return_logits=True`.
            num_candidates (`int`, *optional*):
                How many of the likeliest tokens per position are needed: logits of a cluster that cannot contain any
                of them may be `-inf`. Set by `generate` for greedy decoding and top-k sampling.
            num_items_in_batch (*optional*, a keyword): Divisor of the summed losses instead of the number of targets.

        Returns:
            [`TransfoXLCausalLMOutput`]
        """
        shift_labels = kwargs.pop("shift_labels", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        if (skip_logits := kwargs.pop("skip_logits", None)) is not None and return_logits is None:
            return_logits = not skip_logits
        self._check_keywords(kwargs, also_known=("shift_labels",))
        inputs = input_ids if input_ids is not None else inputs_embeds
        targets = self._targets(labels, shift_labels, inputs)
        if targets is not None and shift_labels is None and inputs is not None:
            targets = end_texts(targets, text_starts(kwargs, inputs, attention_mask))

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
        """The target of each position, `(B, Q)`; -100 where there is none."""
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


# the name in published `config.json` files; an alias, since the library's text generation pipeline prepends a prompt
# for classes of this name
TransfoXLLMHeadModel = TransfoXLForCausalLM


# Mappings by which the library's `Trainer` and programs such as lm-eval look up the task of a model. Those of
# configurations and tokenizers are left as they are: for their entries the library imports a module of its own.
MODEL_MAPPING_NAMES.setdefault(TransfoXLConfig.model_type, TransfoXLModel.__name__)
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(TransfoXLConfig.model_type, TransfoXLForCausalLM.__name__)

check_library(TransfoXLForCausalLM, AT_IMPORT)

__all__ = [
    "TransfoXLForCausalLM",
    "TransfoXLLMHeadModel",
    "TransfoXLModel",
    "TransfoXLPreTrainedModel",
]

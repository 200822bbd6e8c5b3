"""Configuration of a Transformer-XL model: its fields, the rules they obey, and the reading of published files.

It reads every key of published `config.json` files (the original PyTorch and TensorFlow scripts, transformers 2 to 4)
and keeps their names; further fields cover the differences between those implementations, so that one model class
reproduces each of them. Formulas follow [Dai et al., 2019](https://arxiv.org/abs/1901.02860).
"""

import dataclasses
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .legacy_names_transfo_xl import CONFIGURATION, CONFIGURATION_ARGUMENTS, refuse_arguments, without_attributes
from .remote_code_transfo_xl import CODE_VERSION, VERSION_KEY, code_files, merged_auto_map, warn_if_newer, write_code

if TYPE_CHECKING:
    # `None` only until `__post_init__` has derived a value
    DerivedInt: TypeAlias = Any
    DerivedList: TypeAlias = Any
    DerivedFlags: TypeAlias = Any
else:
    DerivedInt = int | None
    DerivedList = list[int] | tuple[int, ...] | None
    DerivedFlags = list[bool] | tuple[bool, ...] | None

# `attn_type` of the original code -> name here
ATTENTION_KINDS = {
    0: "transformer_xl",
    1: "learned_relative",
    2: "absolute_sinusoid",
    3: "absolute_learned",
}
# kinds that add absolute positions to the hidden states
ABSOLUTE_KINDS = ("absolute_sinusoid", "absolute_learned")
RELATIVE_KINDS = ("transformer_xl", "learned_relative", "shaw", "huang")
MEMORY_INITS = ("empty", "zeros")
SIZES = ("d_model", "d_embed", "n_head", "d_head", "d_inner", "n_layer")
POOLINGS = ("last", "mean", "max")
GATINGS = (None, "residual", "input", "output", "highway", "sigmoid_tanh", "gru")
# fields whose default is derived from other fields
DERIVED_FIELDS = (
    "cutoffs",
    "d_embed",
    "d_head",
    "d_inner",
    "div_val",
    "max_klen",
    "max_relative_distance",
    "tie_projs",
)
# of the published WikiText-103 models; by default a vocabulary of at most 200,000 tokens has no clusters
PUBLISHED_CUTOFFS = [20000, 40000, 200000]

# message, and replacement values with which a file of another implementation can still be loaded
Violation: TypeAlias = tuple[str, dict[str, Any]]


def segment_window(mem_len: int, same_length: bool, includes_oldest: bool) -> int | None:
    """Number of keys a query attends to in memory and segment, itself included; `None`: all that precede it.

    Without memory `same_length` has no effect; the original PyTorch code then masks every key.
    """
    return mem_len + int(includes_oldest) if same_length and mem_len else None


def beyond_memory(same_length: bool, includes_oldest: bool) -> int:
    """Keys by which `sliding_window` exceeds `mem_len`: 0 or 1."""
    return int(not same_length or includes_oldest)


def mem_len_of_window(window: Any, same_length: bool, includes_oldest: bool) -> int:
    """The `mem_len` that gives a sliding window of `window` keys, the position itself included."""
    least = beyond_memory(same_length, includes_oldest)
    if not isinstance(window, int) or isinstance(window, bool) or window < least:
        raise ValueError(f"`sliding_window` must be an int of at least {least}, but is {window!r}.")
    return window - least


@without_attributes(CONFIGURATION)
@strict
class TransfoXLConfig(PreTrainedConfig):
    r"""
    Configuration of [`TransfoXLModel`] and its heads. The defaults describe the published WikiText-103 model.

    Args:
        vocab_size (`int`, defaults to 267735): Number of tokens, the most frequent first; 0: only `inputs_embeds`.
        cutoffs (`list[int]`, *optional*):
            Ends of the vocabulary buckets, without 0 and without `vocab_size`. Tokens below the first cutoff form the
            shortlist; each further bucket is a cluster of rarer tokens. `[]` means a plain softmax. Default: the
            published ones for a vocabulary larger than 200,000, none otherwise. The original TensorFlow form
            `[0, …, vocab_size]` is read too.
        d_model (`int`, defaults to 1024): Width of the hidden states; even, for sines and cosines.
        d_embed (`int`, *optional*): Width of the shortlist's embeddings. Default: `d_model`.
        n_head (`int`, defaults to 16): Number of attention heads.
        d_head (`int`, *optional*):
            Width of a head; `n_head * d_head` may differ from `d_model`. Default: `d_model // n_head`.
        d_inner (`int`, *optional*): Width of the feed-forward layer. Default: `4 * d_model`.
        div_val (`int`, *optional*):
            Cluster `i` has embeddings of width `d_embed // div_val**i`. Default: 4 with clusters, 1 without. Without
            clusters any other value than 1 only means that the embeddings are projected, as in transformers 4; 0 and
            below become 2.
        pre_lnorm (`bool`, defaults to `False`): Normalise the input of each sublayer instead of its output.
        gating (`str`, *optional*):
            Gates of GTrXL ([Parisotto et al., 2019](https://arxiv.org/abs/1910.06764)) for residual sums: `"gru"`,
            `"output"`, `"highway"`, `"input"`, `"sigmoid_tanh"`, `"residual"` (a ReLU alone). Needs `pre_lnorm`.
        gating_bias (`float`, defaults to 2.0): Initial bias b_g of the gates; above 0, layers begin near the identity.
        n_layer (`int`, defaults to 18): Number of layers.
        mem_len (`int`, defaults to 1600): Number of positions M that the memory stores of earlier segments.
        clamp_len (`int`, defaults to 1000): Distances are clamped to this value; 0 or below: not clamped.
        same_length (`bool`, defaults to `True`):
            Whether every position attends to the same number of keys (a sliding window) instead of the whole memory
            and its segment so far. Without memory (`mem_len=0`) it has no effect.
        same_length_includes_oldest (`bool`, defaults to `False`):
            Width of that window: `mem_len` keys including the position itself (original PyTorch code, transformers)
            or, if `True`, `mem_len + 1` (TensorFlow, NVIDIA).
        memory_init (`str`, *optional*, defaults to `"empty"`):
            Memory before the first token: nothing (`"empty"`: original PyTorch code, NVIDIA) or `mem_len` zero
            vectors, which are attended to (`"zeros"`: TensorFlow, transformers). A `config.json` without this key was
            written by transformers 2 to 4 and means `"zeros"`.
        attention_kind (`str`, *optional*, defaults to `"transformer_xl"`):
            Position encoding: `"transformer_xl"`, `"learned_relative"` (the original code's reading of Shaw et al.),
            `"shaw"` (Shaw et al. 2018), `"huang"` (Music Transformer), `"absolute_sinusoid"` (Vaswani et al. 2017) or
            `"absolute_learned"` (Al-Rfou et al. 2018). The original code's `attn_type` is also accepted.
            See `docs/positions.md`.
        max_klen (`int`, *optional*):
            Entries of the learned position tables (`learned_relative`, `absolute_learned`); larger distances use
            the largest. Absolute kinds generate from the last `max_klen` tokens. Default: segment and memory of an old
            file (`tgt_len + ext_len + mem_len`), else `2 * mem_len`, else 512.
        max_relative_distance (`int`, *optional*):
            Largest distance K of `shaw` and `huang`. Default: 16 as in Shaw et al.; `mem_len` or 512 for `huang`.
        shaw_keys, shaw_values (`bool`, default to `True`): Whether kind `shaw` has a key and a value table.
        untie_r (`bool`, defaults to `True`): Biases u and v (section 3.3) per layer instead of shared by all layers.
        tie_word_embeddings (`bool`, defaults to `True`): Share each bucket's output weights with its embeddings.
        proj_share_all_but_first (`bool`, defaults to `True`): Default of `tie_projs` for the clusters.
        tie_projs (`list[bool]`, *optional*):
            Per bucket: share the output projection with the embedding's. Missing entries mean `False`.
        proj_same_dim (`bool`, defaults to `True`):
            With `div_val > 1`, project a bucket even if its embeddings already have `d_model` numbers
            (`False`: One Billion Word).
        dropout (`float`, defaults to 0.1): Dropout of embeddings, positions, both sublayers and the final output.
        dropatt (`float`, defaults to 0.0): Dropout of attention probabilities.
        layer_norm_epsilon (`float`, defaults to 1e-5): 1e-12 in the TensorFlow original.
        init (`str`, defaults to `"normal"`): `"normal"` or `"uniform"`.
        init_range (`float`, defaults to 0.01): Half width of the uniform initialisation.
        init_std (`float`, defaults to 0.02): Standard deviation of the normal initialisation.
        proj_init_std (`float`, defaults to 0.01): The same for the projections of the adaptive embedding and softmax.
        sample_softmax (`int`, defaults to -1): Read from old files; positive values are not supported.
        ext_len (`int`, defaults to 0):
            Read from old files: number of tokens that evaluation repeats at the start of the next segment.
        classifier_pooling (`str`, defaults to `"last"`):
            What a text is classified by: the hidden state of its `"last"` token, or the `"mean"` or `"max"` of all.
        save_code (`bool`, defaults to `True`):
            Whether `save_pretrained` and `push_to_hub` also write the code of the models and an `auto_map`, so that
            the folder loads with `trust_remote_code=True` where this package is not installed.

    Raises:
        ValueError: for values that no model can have; the message names every violated rule.

    Example:

    ```python
    >>> from hf_txl import TransfoXLConfig, TransfoXLForCausalLM

    >>> config = TransfoXLConfig(vocab_size=205, d_model=128, n_head=4, n_layer=4, mem_len=256, clamp_len=-1)
    >>> model = TransfoXLForCausalLM(config)
    ```
    """

    model_type = "transfo-xl"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "losses"]
    attribute_map = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "d_inner",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_head",
        "head_dim": "d_head",
        "num_hidden_layers": "n_layer",
    }
    base_model_fsdp_plan = {"word_emb": "free_full_weight", "layers.*": "free_full_weight"}

    vocab_size: int = 267735
    cutoffs: DerivedList = None
    d_model: int = 1024
    d_embed: DerivedInt = None
    n_head: int = 16
    d_head: DerivedInt = None
    d_inner: DerivedInt = None
    div_val: DerivedInt = None
    pre_lnorm: bool = False
    gating: str | None = None
    gating_bias: float | int = 2.0
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    same_length_includes_oldest: bool = False
    memory_init: str = "empty"
    attention_kind: str = "transformer_xl"
    max_klen: DerivedInt = None
    max_relative_distance: DerivedInt = None
    shaw_keys: bool = True
    shaw_values: bool = True
    untie_r: bool = True
    tie_word_embeddings: bool = True
    proj_share_all_but_first: bool = True
    tie_projs: DerivedFlags = None
    proj_same_dim: bool = True
    dropout: float | int = 0.1
    dropatt: float | int = 0.0
    layer_norm_epsilon: float | int = 1e-5
    init: str = "normal"
    init_range: float | int = 0.01
    init_std: float | int = 0.02
    proj_init_std: float | int = 0.01
    sample_softmax: int = -1
    ext_len: int = 0
    use_cache: bool = True
    classifier_pooling: str = "last"
    save_code: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_arguments(kwargs, CONFIGURATION_ARGUMENTS)
        # derived properties, not fields: values given for them are checked once the fields are known
        sliding_window, layer_types = kwargs.pop("sliding_window", None), kwargs.pop("layer_types", None)
        warn_if_newer(kwargs.pop(VERSION_KEY, None))
        found = read_attn_type(self, kwargs.pop("attn_type", None))
        read_tying(self, kwargs)
        refuse_misspelt(kwargs, [field.name for field in dataclasses.fields(type(self))])
        # sets the aliases of `attribute_map` too, so whatever depends on another field comes after
        super().__post_init__(**kwargs)
        derive_fields(self, kwargs.get("tgt_len"))
        # `strict` would wrap the error in a class that is no ValueError
        self._refuse(found)
        if sliding_window not in (None, self.sliding_window):
            raise ValueError(
                f"`sliding_window` must be {self.sliding_window}, which follows from `mem_len={self.mem_len}` and "
                f"`same_length={self.same_length}`, but is {sliding_window!r}. Choose the window by `mem_len`."
            )
        if layer_types is not None:
            self.layer_types = layer_types

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration from the contents of a `config.json`.

        Keyword arguments that name a field replace the file's value *before* anything is derived or checked.
        """
        config_dict = dict(config_dict)
        replace_fields(config_dict, kwargs, cls)
        kind = config_dict.get("attention_kind") or ATTENTION_KINDS.get(config_dict.get("attn_type", 0))
        config_dict.setdefault("memory_init", "empty" if kind in ABSOLUTE_KINDS else "zeros")
        return super().from_dict(config_dict, **kwargs)

    # --- files

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save as the library does; with `save_code`, the code of the models as well.

        Models, trainers and `push_to_hub` save their configuration by this method, so all of them write the code.
        """
        loaded = self.__dict__.pop("auto_map", None)
        if self.save_code and not os.path.isfile(save_directory):
            write_code(save_directory)
            self.auto_map = merged_auto_map(save_directory, loaded)
            setattr(self, VERSION_KEY, CODE_VERSION)
        try:
            return super().save_pretrained(save_directory, push_to_hub, **kwargs)
        finally:
            for name in ("auto_map", VERSION_KEY):
                self.__dict__.pop(name, None)
            if loaded is not None:
                self.auto_map = loaded

    def _get_files_timestamps(self, working_dir: str | os.PathLike[str]) -> dict[str, float]:
        # called after the code has been written, which is uploaded only if it counts as new
        timestamps = super()._get_files_timestamps(working_dir)
        ours = {file.name for file in code_files()}
        return {name: changed for name, changed in timestamps.items() if name not in ours}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing for this class, whose code is always saved; registers subclasses as the library does."""
        if cls is not TransfoXLConfig:
            super().register_for_auto_class(auto_class)

    # --- derived values

    @property
    def bucket_ends(self) -> list[int]:
        """Ends of all buckets: `cutoffs` and `vocab_size`."""
        return [*self.cutoffs, self.vocab_size]

    @property
    def num_clusters(self) -> int:
        """Number of clusters besides the shortlist."""
        return len(self.cutoffs)

    def bucket_width(self, bucket: int) -> int:
        """Width of the embeddings in bucket 0 (the shortlist) or cluster `bucket`."""
        return self.d_embed // self.div_val**bucket

    def has_projection(self, bucket: int) -> bool:
        """Whether embeddings of this bucket are projected to `d_model` (original `proj_adaptive_softmax.py`)."""
        if self.div_val == 1:
            return self.d_embed != self.d_model
        return self.proj_same_dim or self.bucket_width(bucket) != self.d_model

    def ties_projection(self, bucket: int) -> bool:
        """Whether the output projection of this bucket is the embedding's."""
        return self.has_projection(bucket) and bucket < len(self.tie_projs) and self.tie_projs[bucket]

    @property
    def has_one_embedding(self) -> bool:
        """Whether the input embedding is one table of width `d_model`."""
        return (self.div_val == 1 or not self.cutoffs) and not self.has_projection(0)

    @property
    def has_one_head(self) -> bool:
        """Whether the logits are one linear function of the hidden states."""
        return not self.cutoffs and not self.has_projection(0)

    @property
    def is_absolute(self) -> bool:
        """Whether positions are added to the hidden states, so that keys and values cannot be cached."""
        return self.attention_kind in ABSOLUTE_KINDS

    @property
    def sliding_window(self) -> int:
        """Number of keys a position attends to under the window rule: itself and those a memory would hold.

        The library's caches store `sliding_window - 1` positions, so a window of 1 stores nothing.
        """
        return self.mem_len + beyond_memory(self.same_length, self.same_length_includes_oldest)

    @sliding_window.setter
    def sliding_window(self, window: int) -> None:
        """Set the `mem_len` that gives this window."""
        self.mem_len = mem_len_of_window(window, self.same_length, self.same_length_includes_oldest)

    @property
    def layer_types(self) -> list[str]:
        """Attention type of each layer in the library's terms: all are sliding windows."""
        return ["sliding_attention"] * self.n_layer

    @layer_types.setter
    def layer_types(self, kinds: list[str]) -> None:
        """Accept the value of the property and no other."""
        if list(kinds) != self.layer_types:
            raise ValueError(
                f"`layer_types` must be {self.layer_types} (`n_layer` sliding windows), but is {kinds!r}."
            )

    @property
    def attn_type(self) -> int | None:
        """Number of `attention_kind` in the original code; `None` for kinds it does not have."""
        return next((number for number, kind in ATTENTION_KINDS.items() if kind == self.attention_kind), None)

    # --- rules

    def validate_architecture(self) -> None:
        """Raise an error for values that no model can have.

        Models and memories call it too, since fields may have been set after construction.
        """
        self._refuse()

    def _refuse(self, found: Iterable[Violation] = ()) -> None:
        """Raise one `ValueError` that names every violated rule, `found` first."""
        violations = [*found, *find_violations(self)]
        messages = [message for message, _ in violations]
        if len(messages) > 1:
            messages = [f"The configuration breaks {len(messages)} rules:", *(f"- {message}" for message in messages)]
        if changes := ", ".join(f"{name}={value!r}" for _, valid in violations for name, value in valid.items()):
            messages.append(f"To load a file with such values: `from_pretrained(folder, {changes})`.")
        if messages:
            raise ValueError("\n".join(messages))


# --- reading of old files


def refuse_misspelt(arguments: Mapping[str, Any], fields: Iterable[str]) -> None:
    """Refuse names that are almost those of a field; the library would keep them without effect.

    Raises:
        ValueError: with the name and the field.
    """
    known = set(fields)
    for name in arguments:
        if name not in known and (near := difflib.get_close_matches(name, known, n=2, cutoff=0.8)):
            meant = " or ".join(f"`{each}`" for each in near)
            raise ValueError(f"`{name}` must be a setting of the model, but is none; did you mean {meant}?")


def read_attn_type(config: TransfoXLConfig, attn_type: Any) -> list[Violation]:
    """Set `attention_kind` from its number in the original code, if one is given; returns what is wrong with it."""
    if attn_type is None:
        return []
    kind = ATTENTION_KINDS.get(attn_type)
    if kind is None:
        return [(f"`attn_type` must be one of {list(ATTENTION_KINDS)}, but is {attn_type!r}.", {})]
    if config.attention_kind not in (kind, type(config).attention_kind):
        message = f"`attention_kind` must be {kind!r} with `attn_type={attn_type}`, but is {config.attention_kind!r}."
        return [(message, {})]
    config.attention_kind = kind
    return []


def read_tying(config: TransfoXLConfig, arguments: Mapping[str, Any]) -> None:
    """Set the fields of weight tying from their names in old files, `tie_weight` and `share_proj`."""
    if arguments.get("tie_weight") is False:
        config.tie_word_embeddings = False
    share_proj = arguments.get("share_proj")
    if share_proj is None or config.tie_projs is not None:
        return
    if isinstance(share_proj, bool):
        config.proj_share_all_but_first = share_proj
    else:
        config.tie_projs = share_proj


def replace_fields(stored: dict[str, Any], arguments: dict[str, Any], config_class: Any) -> None:
    """Move arguments that name a field, under any of its names, into a file's contents and replace its values.

    Args:
        stored (`dict`): Contents of a `config.json`; changed.
        arguments (`dict`): Keyword arguments of the caller; those that name a field are removed.
        config_class (`type`): Gives the aliases of fields.
    """
    gives_length = "mem_len" in arguments
    if {"attention_kind", "attn_type"} & set(arguments):
        for name in ("attention_kind", "attn_type"):
            stored.pop(name, None)
    if "attn_type" in arguments:
        stored["attn_type"] = arguments.pop("attn_type")
    aliases = config_class.attribute_map
    for name in list(arguments):
        field = aliases.get(name, name)
        if field in TransfoXLConfig.__annotations__:
            for alias in (alias for alias, target in aliases.items() if target == field):
                stored.pop(alias, None)
            stored[field] = arguments.pop(name)
    if "sliding_window" in arguments:
        window = stored["sliding_window"] = arguments.pop("sliding_window")
        if not gives_length:
            same_length = stored.get("same_length", config_class.same_length)
            includes_oldest = stored.get("same_length_includes_oldest", config_class.same_length_includes_oldest)
            stored["mem_len"] = mem_len_of_window(window, same_length, includes_oldest)


# --- derived fields


def derive_fields(config: TransfoXLConfig, segment_length: int | None) -> None:
    """Set the fields that are `None` to their derived defaults.

    Args:
        config (`TransfoXLConfig`): The configuration.
        segment_length (`int`, *optional*): `tgt_len` of an old file.
    """
    if config.cutoffs is None:
        config.cutoffs = list(PUBLISHED_CUTOFFS) if config.vocab_size > PUBLISHED_CUTOFFS[-1] else []
    config.cutoffs = list(config.cutoffs)
    if config.cutoffs[:1] == [0] and config.cutoffs[-1] == config.vocab_size:
        config.cutoffs = config.cutoffs[1:-1]
    if config.d_embed is None:
        config.d_embed = config.d_model
    if config.d_head is None:
        config.d_head = config.d_model // config.n_head if config.n_head else 0
    if config.d_inner is None:
        config.d_inner = 4 * config.d_model
    if config.div_val is None:
        config.div_val = 4 if config.cutoffs else 1
    if not config.cutoffs and config.div_val < 1:
        # without clusters `div_val` only decides whether embeddings are projected; 2 stands for all but 1
        config.div_val = 2
    if config.tie_projs is None:
        config.tie_projs = [False] + [config.proj_share_all_but_first] * len(config.cutoffs)
    config.tie_projs = list(config.tie_projs)
    if config.max_klen is None:
        config.max_klen = ((segment_length or config.mem_len) + config.ext_len + config.mem_len) or 512
    if config.max_relative_distance is None:
        config.max_relative_distance = (config.mem_len or 512) if config.attention_kind == "huang" else 16


# --- rules


def find_violations(config: TransfoXLConfig) -> Iterator[Violation]:
    """Every rule that a configuration violates; if derived fields are missing, only these."""
    if missing := [name for name in DERIVED_FIELDS if getattr(config, name) is None]:
        for name in missing:
            yield f"`{name}` must have a value, but is None: it is derived only when the configuration is created.", {}
        return
    yield from size_violations(config)
    yield from vocabulary_violations(config)
    yield from range_violations(config)
    yield from attention_violations(config)


def size_violations(config: TransfoXLConfig) -> Iterator[Violation]:
    for name, least in (("vocab_size", 0), *((name, 1) for name in SIZES)):
        if getattr(config, name) < least:
            yield f"`{name}` must be at least {least}, but is {getattr(config, name)}.", {}
    if config.vocab_size == 0 and config.cutoffs:
        yield f"`cutoffs` must be [] with `vocab_size=0`, but is {config.cutoffs}.", {}
    if config.div_val < 1:
        yield f"`div_val` must be at least 1, but is {config.div_val}.", {"div_val": 1}
    if config.d_model % 2:
        yield f"`d_model` must be even, but is {config.d_model}: a sinusoid is half sines, half cosines.", {}
    if config.mem_len < 0:
        yield f"`mem_len` must be 0 (no memory) or more, but is {config.mem_len}.", {"mem_len": 0}
    if config.ext_len < 0:
        yield f"`ext_len` must be 0 or more, but is {config.ext_len}.", {"ext_len": 0}


def vocabulary_violations(config: TransfoXLConfig) -> Iterator[Violation]:
    starts, ends = [0, *config.cutoffs], config.bucket_ends
    if any(end <= start for start, end in zip(starts, ends, strict=True)) and config.vocab_size > 0:
        yield (
            (
                f"`cutoffs` must be strictly increasing, above 0 and below `vocab_size` ({config.vocab_size}), but "
                f"is {config.cutoffs}. For a plain softmax, which suits a small vocabulary, pass `cutoffs=[]`."
            ),
            {},
        )
    # a width that is not divisible is rounded down, as in the original code
    narrowing = max(config.div_val, 1) ** config.num_clusters
    if 1 <= config.d_embed < narrowing:
        yield (
            (
                f"`d_embed` must be at least `div_val` ** number of clusters ({config.div_val}**{config.num_clusters} "
                f"= {narrowing}), but is {config.d_embed}: the last cluster is narrower by this factor."
            ),
            {},
        )


def range_violations(config: TransfoXLConfig) -> Iterator[Violation]:
    for name in ("init_range", "init_std", "proj_init_std"):
        if getattr(config, name) < 0:
            yield f"`{name}` must be 0 or more, but is {getattr(config, name)}.", {}
    for name in ("dropout", "dropatt"):
        if not 0 <= getattr(config, name) < 1:
            yield f"`{name}` must be at least 0 and below 1, but is {getattr(config, name)}.", {}
    if config.layer_norm_epsilon <= 0:
        yield f"`layer_norm_epsilon` must be above 0, but is {config.layer_norm_epsilon}.", {}


def attention_violations(config: TransfoXLConfig) -> Iterator[Violation]:
    for name, allowed in (
        ("memory_init", MEMORY_INITS),
        ("classifier_pooling", POOLINGS),
        ("gating", GATINGS),
        ("attention_kind", (*RELATIVE_KINDS, *ABSOLUTE_KINDS)),
        ("init", ("normal", "uniform")),
    ):
        if getattr(config, name) not in allowed:
            yield f"`{name}` must be one of {list(allowed)}, but is {getattr(config, name)!r}.", {}
    if config.gating is not None and not config.pre_lnorm:
        yield f"`pre_lnorm` must be True with `gating={config.gating!r}`, but is False.", {}
    # the default is a sum of lengths, whose own violations suffice
    if config.max_klen < 1 and config.mem_len >= 0 and config.ext_len >= 0:
        yield f"`max_klen` must be at least 1, but is {config.max_klen}.", {}
    if config.max_relative_distance < 0 and config.mem_len >= 0:
        yield f"`max_relative_distance` must be 0 or more, but is {config.max_relative_distance}.", {}
    if config.attention_kind == "shaw" and not (config.shaw_keys or config.shaw_values):
        yield "`shaw_keys` or `shaw_values` must be True for `attention_kind='shaw'`, but both are False.", {}
    if config.is_absolute and config.memory_init != "empty":
        yield (
            (
                f"`memory_init` must be 'empty' for `attention_kind={config.attention_kind!r}`, but is "
                f"{config.memory_init!r}: a zero state would carry a position."
            ),
            {},
        )
    if config.sample_softmax > 0:
        yield (
            (
                f"`sample_softmax` must be 0 or below, but is {config.sample_softmax}: a sampled softmax is not "
                "supported (no published code could train with it)."
            ),
            {"sample_softmax": -1},
        )


__all__ = ["TransfoXLConfig"]

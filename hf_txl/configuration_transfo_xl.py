"""Configuration of a Transformer-XL model.

It reads every key that was ever published (the original PyTorch and TensorFlow scripts, transformers 2 to 4) and adds
the fields in which those implementations disagree, so that one model class reproduces each of them. It is apart
because it must load without torch modules; names follow the published `config.json` files, formulas
[Dai et al., 2019](https://arxiv.org/abs/1901.02860).
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .legacy_names_transfo_xl import CONFIGURATION, CONFIGURATION_ARGUMENTS, refuse_arguments, without_attributes

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
# kinds that number positions and add them to the states, instead of reading distances
ABSOLUTE_KINDS = ("absolute_sinusoid", "absolute_learned")
RELATIVE_KINDS = ("transformer_xl", "learned_relative", "shaw", "huang")
MEMORY_INITS = ("empty", "zeros")
# whose default is derived from other fields when a configuration is made
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
# the published WikiText-103 models; a vocabulary that does not reach beyond the last one gets no clusters
PUBLISHED_CUTOFFS = [20000, 40000, 200000]


# what is wrong, and valid values of fields that files of other codes have with values like these
Violation: TypeAlias = tuple[str, dict[str, Any]]


def segment_window(mem_len: int, same_length: bool, includes_oldest: bool) -> int | None:
    """Keys a query may see within memory and segment, itself included; `None`: everything before it.

    The original PyTorch code masks everything for `same_length` without memory; here it then has no effect.
    """
    return mem_len + int(includes_oldest) if same_length and mem_len else None


def beyond_memory(same_length: bool, includes_oldest: bool) -> int:
    """Keys that the window of the library's caches has beyond `mem_len`."""
    return int(not same_length or includes_oldest)


def memory_of_window(window: Any, same_length: bool, includes_oldest: bool) -> int:
    """The `mem_len` with which a position attends to `window` keys, itself included."""
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
        vocab_size (`int`, defaults to 267735):
            Number of tokens, sorted by falling frequency when there are clusters.
        cutoffs (`list[int]`, *optional*):
            Ends of the vocabulary buckets, without 0 and without `vocab_size`. Tokens below the first cutoff form the
            shortlist; each further bucket is a cluster of rarer tokens. `[]` means a plain softmax. Default: the
            published ones for a vocabulary larger than 200,000, none otherwise. The original TensorFlow form
            `[0, …, vocab_size]` is read too.
        d_model (`int`, defaults to 1024): Width of the hidden states; even, since half of a sinusoid is sines.
        d_embed (`int`, *optional*): Width of the shortlist's embeddings. Default: `d_model`.
        n_head (`int`, defaults to 16): Attention heads.
        d_head (`int`, *optional*):
            Width of a head; `n_head * d_head` may differ from `d_model`. Default: `d_model // n_head`.
        d_inner (`int`, *optional*): Width of the feed-forward layer. Default: `4 * d_model`.
        div_val (`int`, *optional*):
            Cluster `i` has embeddings of width `d_embed // div_val**i`. Default: 4 with clusters, 1 without. Without
            clusters any other value than 1 only means that the embeddings are projected, as in transformers 4; 0 and
            below become 2.
        pre_lnorm (`bool`, defaults to `False`): Normalise the input of each sublayer instead of its output.
        n_layer (`int`, defaults to 18): Layers.
        mem_len (`int`, defaults to 1600): Positions of memory M that each layer keeps from earlier segments.
        clamp_len (`int`, defaults to 1000): Distances above it count as it; not used if 0 or below.
        same_length (`bool`, defaults to `True`):
            Let every position attend to the same number of keys, a sliding window, instead of to the whole memory and
            its segment so far. Without memory (`mem_len=0`) it has no effect.
        same_length_includes_oldest (`bool`, defaults to `False`):
            Width of that window: `mem_len` keys including the position itself (original PyTorch code, transformers)
            or, if `True`, `mem_len + 1` (TensorFlow, NVIDIA).
        memory_init (`str`, *optional*, defaults to `"empty"`):
            What is remembered before the first token: nothing (`"empty"`: original PyTorch code, NVIDIA) or `mem_len`
            zero vectors that are attended to (`"zeros"`: TensorFlow, transformers). A `config.json` without this
            key was written by transformers 2 to 4 and means `"zeros"`.
        attention_kind (`str`, *optional*, defaults to `"transformer_xl"`):
            Position encoding: `"transformer_xl"`, `"learned_relative"` (the original code's reading of Shaw et al.),
            `"shaw"` (Shaw et al. 2018), `"huang"` (Music Transformer), `"absolute_sinusoid"` (Vaswani et al. 2017) or
            `"absolute_learned"` (Al-Rfou et al. 2018). `attn_type` of the original code is read. See
            `docs/positions.md`.
        max_klen (`int`, *optional*):
            Rows of the learned tables (`learned_relative`, `absolute_learned`), beyond which the farthest is repeated;
            absolute kinds generate from the last `max_klen` tokens. Default: segment and memory of an old file
            (`tgt_len + ext_len + mem_len`), else `2 * mem_len`, else 512.
        max_relative_distance (`int`, *optional*):
            Distance K to which `shaw` and `huang` clip. Default: 16 as in Shaw et al.; `mem_len` or 512 for `huang`.
        shaw_keys, shaw_values (`bool`, default to `True`): Whether kind `shaw` has its key and its value table.
        untie_r (`bool`, defaults to `True`): Biases u and v (section 3.3) per layer instead of shared by all layers.
        tie_word_embeddings (`bool`, defaults to `True`): Share each bucket's output weights with its embeddings.
        proj_share_all_but_first (`bool`, defaults to `True`): Default of `tie_projs` for the clusters.
        tie_projs (`list[bool]`, *optional*):
            Per bucket: share the output projection with the embedding's. Missing entries mean `False`.
        proj_same_dim (`bool`, defaults to `True`):
            With `div_val > 1`, project a bucket even if its embeddings already have `d_model` numbers
            (`False`: One Billion Word).
        dropout (`float`, defaults to 0.1): On embeddings, positions, both sublayers and the final output.
        dropatt (`float`, defaults to 0.0): On attention probabilities.
        layer_norm_epsilon (`float`, defaults to 1e-5): 1e-12 in the TensorFlow original.
        init (`str`, defaults to `"normal"`): `"normal"` or `"uniform"`.
        init_range (`float`, defaults to 0.01): Half width of the uniform initialisation.
        init_std (`float`, defaults to 0.02): Standard deviation of the normal initialisation.
        proj_init_std (`float`, defaults to 0.01): The same for the projections of the adaptive embedding and softmax.
        sample_softmax (`int`, defaults to -1): Read from old files; a positive value is refused (it never worked).
        ext_len (`int`, defaults to 0):
            Read from old files: how many tokens of a segment an evaluation feeds again with the next one.

    Raises:
        ValueError: for a combination of values that no model can have; the message names it and shows the numbers.

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
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_arguments(kwargs, CONFIGURATION_ARGUMENTS)
        # both follow from other fields and are no fields: checked below, when those are known
        sliding_window, layer_types = kwargs.pop("sliding_window", None), kwargs.pop("layer_types", None)
        found: list[Violation] = []
        if (attn_type := kwargs.pop("attn_type", None)) is not None:
            kind = ATTENTION_KINDS.get(attn_type)
            if kind is None:
                found.append((f"`attn_type` must be one of {list(ATTENTION_KINDS)}, but is {attn_type!r}.", {}))
            elif self.attention_kind not in (kind, type(self).attention_kind):
                found.append(
                    (
                        f"`attention_kind` must be {kind!r} with `attn_type={attn_type}`, but is "
                        f"{self.attention_kind!r}.",
                        {},
                    )
                )
            else:
                self.attention_kind = kind
        if kwargs.get("tie_weight") is False:
            self.tie_word_embeddings = False
        # name used by other readers of the TensorFlow models
        if (share_proj := kwargs.get("share_proj")) is not None and self.tie_projs is None:
            if isinstance(share_proj, bool):
                self.proj_share_all_but_first = share_proj
            else:
                self.tie_projs = share_proj
        # aliases of `attribute_map` arrive with these, so whatever depends on another field comes after
        super().__post_init__(**kwargs)
        if self.cutoffs is None:
            self.cutoffs = list(PUBLISHED_CUTOFFS) if self.vocab_size > PUBLISHED_CUTOFFS[-1] else []
        self.cutoffs = list(self.cutoffs)
        if self.cutoffs[:1] == [0] and self.cutoffs[-1] == self.vocab_size:
            self.cutoffs = self.cutoffs[1:-1]
        if self.d_embed is None:
            self.d_embed = self.d_model
        if self.d_head is None:
            self.d_head = self.d_model // self.n_head if self.n_head else 0
        if self.d_inner is None:
            self.d_inner = 4 * self.d_model
        if self.div_val is None:
            self.div_val = 4 if self.cutoffs else 1
        if not self.cutoffs and self.div_val < 1:
            # only whether it is 1 is read then (projected or not); 2 is saved for what is not
            self.div_val = 2
        if self.tie_projs is None:
            self.tie_projs = [False] + [self.proj_share_all_but_first] * len(self.cutoffs)
        self.tie_projs = list(self.tie_projs)
        if self.max_klen is None:
            segment_length = kwargs.get("tgt_len") or self.mem_len
            self.max_klen = (segment_length + self.ext_len + self.mem_len) or 512
        if self.max_relative_distance is None:
            self.max_relative_distance = (self.mem_len or 512) if self.attention_kind == "huang" else 16
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
        config_dict, given = dict(config_dict), set(kwargs)
        # one meaning under two names: what the caller says replaces the file's, whichever name either uses
        if {"attention_kind", "attn_type"} & set(kwargs):
            for name in ("attention_kind", "attn_type"):
                config_dict.pop(name, None)
        if "attn_type" in kwargs:
            config_dict["attn_type"] = kwargs.pop("attn_type")
        for name in list(kwargs):
            field = cls.attribute_map.get(name, name)
            if field in TransfoXLConfig.__annotations__:
                # the file may hold it under another of its names
                for alias in (alias for alias, target in cls.attribute_map.items() if target == field):
                    config_dict.pop(alias, None)
                config_dict[field] = kwargs.pop(name)
        if "sliding_window" in kwargs:
            window = config_dict["sliding_window"] = kwargs.pop("sliding_window")
            if "mem_len" not in given:
                same_length = config_dict.get("same_length", cls.same_length)
                includes_oldest = config_dict.get("same_length_includes_oldest", cls.same_length_includes_oldest)
                config_dict["mem_len"] = memory_of_window(window, same_length, includes_oldest)
        kind = config_dict.get("attention_kind") or ATTENTION_KINDS.get(config_dict.get("attn_type", 0))
        config_dict.setdefault("memory_init", "empty" if kind in ABSOLUTE_KINDS else "zeros")
        return super().from_dict(config_dict, **kwargs)

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
        """Whether the logits are hidden states times one matrix."""
        return not self.cutoffs and not self.has_projection(0)

    @property
    def is_absolute(self) -> bool:
        """Whether positions are added to the states, so that neither keys nor values can be kept."""
        return self.attention_kind in ABSOLUTE_KINDS

    @property
    def sliding_window(self) -> int:
        """Keys that a position attends to under the window rule: itself and what the memory holds.

        The library's caches keep `sliding_window - 1` positions. With a window of 1 nothing is kept.
        """
        return self.mem_len + beyond_memory(self.same_length, self.same_length_includes_oldest)

    @sliding_window.setter
    def sliding_window(self, window: int) -> None:
        """Sets `mem_len` to what such a window remembers."""
        self.mem_len = memory_of_window(window, self.same_length, self.same_length_includes_oldest)

    @property
    def layer_types(self) -> list[str]:
        """What the library calls the attention of each layer: all are sliding windows."""
        return ["sliding_attention"] * self.n_layer

    @layer_types.setter
    def layer_types(self, kinds: list[str]) -> None:
        """Accepts what the property returns and refuses the rest."""
        if list(kinds) != self.layer_types:
            raise ValueError(
                f"`layer_types` must be {self.layer_types} (`n_layer` sliding windows), but is {kinds!r}."
            )

    @property
    def attn_type(self) -> int | None:
        """`attention_kind` as the original code numbers it, `None` for kinds that it does not know."""
        return next((number for number, kind in ATTENTION_KINDS.items() if kind == self.attention_kind), None)

    # --- rules

    def validate_architecture(self) -> None:
        """Refuse what no model can have. Called again where a model or a memory is made of a configuration, whose
        fields may have been set since.
        """
        self._refuse()

    def _refuse(self, found: Iterable[Violation] = ()) -> None:
        """Raise one `ValueError` that names every violated rule, those `found` before first."""
        violations = [*found, *self._violations()]
        messages = [message for message, _ in violations]
        if len(messages) > 1:
            messages = [f"The configuration breaks {len(messages)} rules:", *(f"- {message}" for message in messages)]
        if changes := ", ".join(f"{name}={value!r}" for _, valid in violations for name, value in valid.items()):
            messages.append(f"To load a file with such values: `from_pretrained(folder, {changes})`.")
        if messages:
            raise ValueError("\n".join(messages))

    def _violations(self) -> Iterator[Violation]:
        unknown = [name for name in DERIVED_FIELDS if getattr(self, name) is None]
        if unknown:
            for name in unknown:
                yield f"`{name}` must have a value once the configuration is made, which derives it, but is None.", {}
            return
        sizes = ("vocab_size", "d_model", "d_embed", "n_head", "d_head", "d_inner", "n_layer")
        for name in sizes:
            if getattr(self, name) < 1:
                yield f"`{name}` must be at least 1, but is {getattr(self, name)}.", {}
        if self.div_val < 1:
            yield f"`div_val` must be at least 1, but is {self.div_val}.", {"div_val": 1}
        if self.d_model % 2:
            yield f"`d_model` must be even (half of a position is sines), but is {self.d_model}.", {}
        if self.mem_len < 0:
            yield f"`mem_len` must be 0 (no memory) or more, but is {self.mem_len}.", {"mem_len": 0}
        if self.ext_len < 0:
            yield f"`ext_len` must be 0 or more, but is {self.ext_len}.", {"ext_len": 0}
        starts = [0, *self.cutoffs]
        if any(end <= start for start, end in zip(starts, self.bucket_ends, strict=True)) and self.vocab_size > 0:
            yield (
                (
                    f"`cutoffs` must be strictly increasing, above 0 and below `vocab_size` ({self.vocab_size}), but "
                    f"is {self.cutoffs}. For a plain softmax, which suits a small vocabulary, pass `cutoffs=[]`."
                ),
                {},
            )
        # rounded down where it does not divide, as in the original code
        narrowing = max(self.div_val, 1) ** self.num_clusters
        if 1 <= self.d_embed < narrowing:
            yield (
                (
                    f"`d_embed` must be at least `div_val` ** number of clusters ({self.div_val}**{self.num_clusters} "
                    f"= {narrowing}), the factor by which the last cluster is narrower, but is {self.d_embed}."
                ),
                {},
            )
        for name in ("init_range", "init_std", "proj_init_std"):
            if getattr(self, name) < 0:
                yield f"`{name}` must be 0 or more, but is {getattr(self, name)}.", {}
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) < 1:
                yield f"`{name}` must be at least 0 and below 1, but is {getattr(self, name)}.", {}
        if self.layer_norm_epsilon <= 0:
            yield f"`layer_norm_epsilon` must be above 0, but is {self.layer_norm_epsilon}.", {}
        for name, allowed in (
            ("memory_init", MEMORY_INITS),
            ("attention_kind", (*RELATIVE_KINDS, *ABSOLUTE_KINDS)),
            ("init", ("normal", "uniform")),
        ):
            if getattr(self, name) not in allowed:
                yield f"`{name}` must be one of {list(allowed)}, but is {getattr(self, name)!r}.", {}
        # by default a sum of lengths that are refused above
        if self.max_klen < 1 and self.mem_len >= 0 and self.ext_len >= 0:
            yield f"`max_klen` must be at least 1, but is {self.max_klen}.", {}
        if self.max_relative_distance < 0 and self.mem_len >= 0:
            yield f"`max_relative_distance` must be 0 or more, but is {self.max_relative_distance}.", {}
        if self.attention_kind == "shaw" and not (self.shaw_keys or self.shaw_values):
            yield ("`shaw_keys` or `shaw_values` must be True for `attention_kind='shaw'`, but both are False."), {}
        if self.is_absolute and self.memory_init != "empty":
            yield (
                (
                    f"`memory_init` must be 'empty' for `attention_kind={self.attention_kind!r}`: a zero state before "
                    f"the first token would have a position, but is {self.memory_init!r}."
                ),
                {},
            )
        if self.sample_softmax > 0:
            yield (
                (
                    "`sample_softmax` must be 0 or below: a sampled softmax is not supported (no published code could "
                    f"train with it), but is {self.sample_softmax}."
                ),
                {"sample_softmax": -1},
            )


__all__ = ["TransfoXLConfig"]

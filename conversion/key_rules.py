"""Maps the tensors of each format to the weights of the model: data only.

A format has a rule for every weight. In a name, `{layer}` runs over the layers, `{table}` over the embedding tables
(one per bucket of the vocabulary, or a single one with `div_val` 1), `{projection}` over the embedding's projections
and `{bucket}` over all buckets. A placeholder on one side only means that the other side is a single tensor for all of
its values. `state_dict.py` applies the same rules in both directions.

Sources: `pytorch/mem_transformer.py` and `pytorch/utils/proj_adaptive_softmax.py` of the original, its `tf/model.py`,
NVIDIA's DeepLearningExamples, `models/transfo_xl` of transformers 2 to 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hf_txl import TransfoXLConfig

# whether a name exists in a model; the number is the index of the table, projection or bucket
Condition = Callable[[TransfoXLConfig, int], bool]


# --- conditions


def always(config: TransfoXLConfig, number: int) -> bool:
    return True


def is_transformer_xl(config: TransfoXLConfig, number: int) -> bool:
    return config.attention_kind == "transformer_xl"


def is_learned_relative(config: TransfoXLConfig, number: int) -> bool:
    return config.attention_kind == "learned_relative"


def is_absolute_learned(config: TransfoXLConfig, number: int) -> bool:
    return config.attention_kind == "absolute_learned"


def is_absolute(config: TransfoXLConfig, number: int) -> bool:
    return config.is_absolute


def is_relative(config: TransfoXLConfig, number: int) -> bool:
    return not config.is_absolute


def biases_are_shared(config: TransfoXLConfig, number: int) -> bool:
    return is_transformer_xl(config, number) and not config.untie_r


def biases_are_untied(config: TransfoXLConfig, number: int) -> bool:
    return is_transformer_xl(config, number) and config.untie_r


def has_clusters(config: TransfoXLConfig, number: int) -> bool:
    return config.num_clusters > 0


def clusters_share_a_table(config: TransfoXLConfig, number: int) -> bool:
    return config.num_clusters > 0 and config.div_val == 1


def is_plain_softmax(config: TransfoXLConfig, number: int) -> bool:
    return config.num_clusters == 0


def clusters_have_tables(config: TransfoXLConfig, number: int) -> bool:
    return config.num_clusters > 0 and config.div_val > 1


def is_one_table(config: TransfoXLConfig, number: int) -> bool:
    return bool(config.div_val == 1)


def is_table_per_bucket(config: TransfoXLConfig, number: int) -> bool:
    return bool(config.div_val > 1)


def is_one_table_projected(config: TransfoXLConfig, number: int) -> bool:
    return is_one_table(config, number) and config.has_projection(number)


def is_table_per_bucket_projected(config: TransfoXLConfig, number: int) -> bool:
    return is_table_per_bucket(config, number) and config.has_projection(number)


def has_own_projection(config: TransfoXLConfig, number: int) -> bool:
    return config.has_projection(number) and not config.ties_projection(number)


def has_tied_projection(config: TransfoXLConfig, number: int) -> bool:
    return config.ties_projection(number)


def has_projection(config: TransfoXLConfig, number: int) -> bool:
    return config.has_projection(number)


def words_are_untied(config: TransfoXLConfig, number: int) -> bool:
    return not config.tie_word_embeddings


def words_are_tied(config: TransfoXLConfig, number: int) -> bool:
    return config.tie_word_embeddings


# --- parts of a format


@dataclass(frozen=True)
class Rule:
    """One weight under both of its names; `layout` is how it is stored in the source (`state_dict.LAYOUTS`)."""

    source: str
    target: str
    when: Condition = always
    layout: str = "same"


@dataclass(frozen=True)
class Alias:
    """A further name under which a source may store a tied tensor again."""

    source: str
    of: str
    when: Condition = always


@dataclass(frozen=True)
class Format:
    """The names of a format: weights, further names of tied weights, and patterns to leave out with the reason."""

    rules: tuple[Rule, ...]
    aliases: tuple[Alias, ...]
    ignored: tuple[tuple[str, str], ...] = ()


# --- transformers 2 to 4, whose names are ours, and the PyTorch codes, which have them without `transformer.`

EMBEDDING = "word_emb.emb_layers.{table}.weight"
PROJECTION = "word_emb.emb_projs.{projection}"
LAYER = "layers.{layer}."

EVERYWHERE: tuple[tuple[str, Condition], ...] = (
    (EMBEDDING, always),
    (PROJECTION, has_projection),
    ("r_w_bias", biases_are_shared),
    ("r_r_bias", biases_are_shared),
    (LAYER + "dec_attn.r_net.weight", is_transformer_xl),
    (LAYER + "dec_attn.qkv_net.weight", is_relative),
    (LAYER + "dec_attn.q_net.weight", is_absolute),
    (LAYER + "dec_attn.kv_net.weight", is_absolute),
    (LAYER + "dec_attn.o_net.weight", always),
    (LAYER + "dec_attn.layer_norm.weight", always),
    (LAYER + "dec_attn.layer_norm.bias", always),
    (LAYER + "pos_ff.CoreNet.0.weight", always),
    (LAYER + "pos_ff.CoreNet.0.bias", always),
    (LAYER + "pos_ff.CoreNet.3.weight", always),
    (LAYER + "pos_ff.CoreNet.3.bias", always),
    (LAYER + "pos_ff.layer_norm.weight", always),
    (LAYER + "pos_ff.layer_norm.bias", always),
)
FREQUENCIES = (r"(transformer\.)?pos_emb\.inv_freq", "frequencies of the sinusoids, which follow from `d_model`")

TRANSFORMERS = Format(
    rules=(
        *(Rule(f"transformer.{name}", f"transformer.{name}", when) for name, when in EVERYWHERE),
        *(
            Rule(f"transformer.{LAYER}dec_attn.{name}", f"transformer.{LAYER}dec_attn.{name}", when)
            for name, when in (
                ("r_w_bias", biases_are_untied),
                ("r_r_bias", biases_are_untied),
                ("r_w_bias", is_learned_relative),
                ("r_bias", is_learned_relative),
                ("r_emb", is_learned_relative),
                ("r_emb", is_absolute_learned),
            )
        ),
        Rule("crit.cluster_weight", "crit.cluster_weight", has_clusters),
        Rule("crit.cluster_bias", "crit.cluster_bias", has_clusters),
        Rule("crit.out_layers.{table}.weight", "crit.out_layers.{table}.weight", words_are_untied),
        Rule("crit.out_layers.{table}.bias", "crit.out_layers.{table}.bias"),
        Rule("crit.out_projs.{bucket}", "crit.out_projs.{bucket}", has_own_projection),
        Rule("score.weight", "score.weight"),
    ),
    aliases=(
        Alias("crit.out_layers.{table}.weight", f"transformer.{EMBEDDING}", words_are_tied),
        Alias("crit.out_projs.{bucket}", f"transformer.{PROJECTION}", has_tied_projection),
        Alias(f"transformer.{LAYER}dec_attn.r_w_bias", "transformer.r_w_bias", biases_are_shared),
        Alias(f"transformer.{LAYER}dec_attn.r_r_bias", "transformer.r_r_bias", biases_are_shared),
    ),
    ignored=(FREQUENCIES,),
)

PYTORCH_BODY = (
    *(Rule(name, f"transformer.{name}", when) for name, when in EVERYWHERE),
    # tables of positions, and the biases that go with them, are one tensor for all layers
    Rule("r_w_bias", f"transformer.{LAYER}dec_attn.r_w_bias", is_learned_relative, "layers stacked"),
    Rule("r_bias", f"transformer.{LAYER}dec_attn.r_bias", is_learned_relative, "layers stacked"),
    Rule("r_emb", f"transformer.{LAYER}dec_attn.r_emb", is_learned_relative, "layers stacked"),
    # cluster i is read from the i-th row from the end
    Rule("crit.cluster_weight", "crit.cluster_weight", has_clusters, "rows reversed"),
    Rule("crit.cluster_bias", "crit.cluster_bias", has_clusters, "rows reversed"),
    Rule("crit.out_projs.{bucket}", "crit.out_projs.{bucket}", has_own_projection),
)

PYTORCH = Format(
    rules=(
        *PYTORCH_BODY,
        # the heads' parts add up to `d_model`
        Rule("r_emb", f"transformer.{LAYER}dec_attn.r_emb", is_absolute_learned, "layers stacked, heads apart"),
        Rule("crit.out_layers.{table}.weight", "crit.out_layers.{table}.weight", words_are_untied),
        Rule("crit.out_layers.{table}.bias", "crit.out_layers.{table}.bias"),
    ),
    aliases=(
        Alias("crit.out_layers.{table}.weight", EMBEDDING, words_are_tied),
        Alias("crit.out_projs.{bucket}", PROJECTION, has_tied_projection),
    ),
    ignored=(FREQUENCIES,),
)

# --- NVIDIA's PyTorch code: the softmax has other names

NVIDIA = Format(
    rules=(
        *PYTORCH_BODY,
        Rule("r_emb", f"transformer.{LAYER}dec_attn.r_emb", is_absolute_learned, "layers stacked"),
        Rule("crit.out_layers_weights.{table}", "crit.out_layers.{table}.weight", words_are_untied),
        Rule("crit.out_layers_biases.{table}", "crit.out_layers.{table}.bias"),
    ),
    aliases=(
        Alias("crit.out_layers_weights.{table}", EMBEDDING, words_are_tied),
        # there whether the softmax uses it or not; `tie_projs` decides
        Alias("crit.shared_out_projs.{projection}", PROJECTION, has_projection),
    ),
    ignored=(FREQUENCIES,),
)

# --- the original TensorFlow code: dense kernels are (in, out) and projections (width, d_model)

EMBED = "transformer/adaptive_embed/"
SOFTMAX = "transformer/adaptive_softmax/"
BLOCK = "transformer/layer_{layer}/"

TENSORFLOW = Format(
    rules=(
        Rule(EMBED + "lookup_table", f"transformer.{EMBEDDING}", is_one_table),
        Rule(EMBED + "proj_W", f"transformer.{PROJECTION}", is_one_table_projected, "transposed"),
        Rule(EMBED + "cutoff_{table}/lookup_table", f"transformer.{EMBEDDING}", is_table_per_bucket),
        Rule(
            EMBED + "cutoff_{projection}/proj_W",
            f"transformer.{PROJECTION}",
            is_table_per_bucket_projected,
            "transposed",
        ),
        Rule("transformer/r_w_bias", "transformer.r_w_bias", biases_are_shared),
        Rule("transformer/r_r_bias", "transformer.r_r_bias", biases_are_shared),
        Rule("transformer/r_w_bias", f"transformer.{LAYER}dec_attn.r_w_bias", biases_are_untied, "layers stacked"),
        Rule("transformer/r_r_bias", f"transformer.{LAYER}dec_attn.r_r_bias", biases_are_untied, "layers stacked"),
        *(
            Rule(BLOCK + source, f"transformer.{LAYER}{target}", layout=layout)
            for source, target, layout in (
                ("rel_attn/qkv/kernel", "dec_attn.qkv_net.weight", "transposed"),
                ("rel_attn/r/kernel", "dec_attn.r_net.weight", "transposed"),
                ("rel_attn/o/kernel", "dec_attn.o_net.weight", "transposed"),
                ("rel_attn/LayerNorm/gamma", "dec_attn.layer_norm.weight", "same"),
                ("rel_attn/LayerNorm/beta", "dec_attn.layer_norm.bias", "same"),
                ("ff/layer_1/kernel", "pos_ff.CoreNet.0.weight", "transposed"),
                ("ff/layer_1/bias", "pos_ff.CoreNet.0.bias", "same"),
                ("ff/layer_2/kernel", "pos_ff.CoreNet.3.weight", "transposed"),
                ("ff/layer_2/bias", "pos_ff.CoreNet.3.bias", "same"),
                ("ff/LayerNorm/gamma", "pos_ff.layer_norm.weight", "same"),
                ("ff/LayerNorm/beta", "pos_ff.layer_norm.bias", "same"),
            )
        ),
        Rule(SOFTMAX + "cutoff_0/cluster_W", "crit.cluster_weight", has_clusters),
        Rule(SOFTMAX + "cutoff_0/cluster_b", "crit.cluster_bias", has_clusters),
        Rule(SOFTMAX + "bias", "crit.out_layers.0.bias", is_plain_softmax),
        Rule(SOFTMAX + "cutoff_{bucket}/b", "crit.out_layers.0.bias", clusters_share_a_table, "buckets joined"),
        Rule(SOFTMAX + "cutoff_{table}/b", "crit.out_layers.{table}.bias", clusters_have_tables),
        Rule(SOFTMAX + "cutoff_{bucket}/proj", "crit.out_projs.{bucket}", has_own_projection, "transposed"),
    ),
    aliases=(),
    ignored=(
        (r".*/Adam(_1)?", "moments of the optimizer"),
        (r"beta[12]_power|global_step", "state of the optimizer"),
    ),
)

FORMATS = {"pytorch": PYTORCH, "nvidia": NVIDIA, "tensorflow": TENSORFLOW, "transformers": TRANSFORMERS}

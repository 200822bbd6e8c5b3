"""Names of transformers 2 to 4 and pytorch_pretrained_bert that have changed, with their replacements.

Using one raises an error that names the replacement. `docs/migration.md` contains these tables and the names that work
as before; a test tries every name on that page.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MEMORY = "`cache=TransfoXLMemory.from_mems(config, mems)`"
START = "`model.init_memory(batch_size)`, passed as `cache=`"
SET_LENGTH = "`model.init_memory(batch_size, mem_len=…)`: lengths belong to the memory"
CONVERT = "`hf-txl convert SOURCE FOLDER`"
NO_TENSORFLOW = "the PyTorch classes of the same name without `TF`; `hf-txl convert` reads TensorFlow checkpoints"
EXPORT = "`torch.export.export(model, (input_ids,))`"
HUB = "the name of a folder or of a repository of the Hub, passed to `from_pretrained`"
BUILD = "`build_vocabulary(texts, mode, …)` of `hf_txl.tokenization_transfo_xl`, or `hf-txl build-tokenizer`"
OWN_VOCABULARY = "`TransfoXLTokenizer.from_vocabulary(symbols, mode)`"
OLD_VOCABULARY = (
    "`hf-txl convert FILE FOLDER`, then `TransfoXLTokenizer.from_pretrained(FOLDER)`; pickles are never executed"
)
MOSES = "mode `moses`, whose rules are in `tokenizer.json`"
STREAMS = "`hf_txl.data.TokenStreams`"
DOCUMENTS = "`hf_txl.data.DocumentStreams`"
ATTENTION = "`hf_txl.attention_transfo_xl`, whose classes are built from the configuration"

# names that `hf_txl` does not export
IMPORTS = {
    "TransfoXLModelOutput": "`hf_txl.outputs_transfo_xl.TransfoXLModelOutput`, with `cache` instead of `mems`",
    "TransfoXLLMHeadModelOutput": "`hf_txl.outputs_transfo_xl.TransfoXLCausalLMOutput`",
    "TransfoXLSequenceClassifierOutputWithPast": "`hf_txl.outputs_transfo_xl.TransfoXLSequenceClassifierOutput`",
    "TransfoXLTokenizerFast": "`TransfoXLTokenizer`, which is a fast tokenizer",
    "TransfoXLCorpus": "`hf_txl.corpus.tokenize_corpus` and `hf_txl.data.TokenStreams`",
    "get_lm_corpus": "`hf_txl.corpus.tokenize_corpus` and `hf_txl.data.TokenStreams`",
    "LMOrderedIterator": STREAMS,
    "LMShuffledIterator": DOCUMENTS,
    "LMMultiFileIterator": DOCUMENTS,
    "AdaptiveEmbedding": "`hf_txl.adaptive_softmax_transfo_xl.AdaptiveEmbedding(config)`",
    "ProjectedAdaptiveLogSoftmax": "`hf_txl.adaptive_softmax_transfo_xl.AdaptiveLogSoftmax(config)`",
    "PositionalEmbedding": "`hf_txl.positions_transfo_xl`",
    "PositionwiseFF": "`hf_txl.modeling_transfo_xl.TransfoXLFeedForward(config)`",
    **dict.fromkeys(
        ("DecoderLayer", "RelLearnableDecoderLayer", "RelPartialLearnableDecoderLayer"),
        "`hf_txl.modeling_transfo_xl.TransfoXLLayer(config, layer_idx)`",
    ),
    **dict.fromkeys(
        ("MultiHeadAttn", "RelMultiHeadAttn", "RelLearnableMultiHeadAttn", "RelPartialLearnableMultiHeadAttn"),
        ATTENTION,
    ),
    "LogUniformSampler": "no counterpart: a sampled softmax is not supported",
    "sample_logits": "no counterpart: a sampled softmax is not supported",
    "load_tf_weights_in_transfo_xl": CONVERT,
    "build_tf_to_pytorch_map": CONVERT,
    "tokenize_numbers": MOSES,
    "detokenize_numbers": MOSES,
    "MATCH_NUMBERS": MOSES,
    "DETOKENIZE_NUMBERS": MOSES,
    "CORPUS_NAME": CONVERT,
    "VOCAB_NAME": CONVERT,
    "TF_WEIGHTS_NAME": CONVERT,
    **dict.fromkeys(("VOCAB_FILES_NAMES", "VOCAB_FILES_NAMES_FAST"), "`TransfoXLTokenizer.vocab_files_names`"),
    **dict.fromkeys(
        (
            "PRETRAINED_CONFIG_ARCHIVE_MAP",
            "PRETRAINED_CORPUS_ARCHIVE_MAP",
            "PRETRAINED_MODEL_ARCHIVE_MAP",
            "PRETRAINED_POSITIONAL_EMBEDDINGS_SIZES",
            "PRETRAINED_VOCAB_ARCHIVE_MAP",
            "PRETRAINED_VOCAB_FILES_MAP",
            "PRETRAINED_VOCAB_FILES_MAP_FAST",
            "TF_TRANSFO_XL_PRETRAINED_MODEL_ARCHIVE_LIST",
            "TRANSFO_XL_PRETRAINED_CONFIG_ARCHIVE_MAP",
            "TRANSFO_XL_PRETRAINED_MODEL_ARCHIVE_LIST",
        ),
        HUB,
    ),
    **dict.fromkeys(
        (
            "TFAdaptiveEmbedding",
            "TFAdaptiveSoftmaxMask",
            "TFPositionalEmbedding",
            "TFPositionwiseFF",
            "TFRelPartialLearnableDecoderLayer",
            "TFRelPartialLearnableMultiHeadAttn",
            "TFTransfoEmbeddings",
            "TFTransfoXLForSequenceClassification",
            "TFTransfoXLLMHead",
            "TFTransfoXLLMHeadModel",
            "TFTransfoXLLMHeadModelOutput",
            "TFTransfoXLMHead",
            "TFTransfoXLMainLayer",
            "TFTransfoXLModel",
            "TFTransfoXLModelOutput",
            "TFTransfoXLPreTrainedModel",
            "TFTransfoXLSequenceClassifierOutputWithPast",
        ),
        NO_TENSORFLOW,
    ),
}

# attributes and methods of models
MODEL = {
    "init_mems": START,
    "reset_memory_length": SET_LENGTH,
    "reset_length": SET_LENGTH,
    "mem_len": "`model.config.mem_len`, or `memory.mem_len` of a memory",
    "clamp_len": "`model.config.clamp_len`, or `memory.clamp_len` of a memory",
    "same_length": "`model.config.same_length`, or `memory.same_length` of a memory",
    **{
        name: f"`model.config.{name}`"
        for name in (
            *("attn_type", "d_embed", "d_head", "d_model", "ext_len", "max_klen", "n_head", "n_layer", "n_token"),
            *("output_attentions", "output_hidden_states", "sample_softmax", "untie_r"),
        )
    },
    "tgt_len": "the length of `input_ids`, which may change from call to call",
    "pos_emb": "functions in `hf_txl.positions_transfo_xl`: sinusoids have no weights",
    "r_emb": "`model.layers[i].dec_attn`: each layer has a table",
    "r_bias": "`model.layers[i].dec_attn`: each layer has a table",
    "out_layer": "`model.crit.out_layers`",
    "sampler": "no counterpart: a sampled softmax is not supported",
    "trainer_compatible": "nothing to set: `loss` is always a scalar and the first output",
    "compute_logits": "`model.crit.logits(hidden_states)`",
    "backward_compatible": "no counterpart: a sampled softmax is not supported",
    "prepare_model_inputs_for_generation": "`model.prepare_inputs_for_generation(input_ids, …)`",
    "load_tf_weights": CONVERT,
    "init_weight": "`model.init_weights()`",
    "init_bias": "`model.init_weights()`",
    "set_num_special_tokens": "`model.resize_token_embeddings(new_num_tokens)`",
}

# keyword arguments of `forward`, `generate`, `from_pretrained` and `resize_token_embeddings`
FORWARD = {
    "mems": MEMORY,
    "head_mask": "no counterpart: heads cannot be switched off",
    "target": "`labels=input_ids`, or `shift_labels=` for targets that are already shifted",
    "inputs": "`input_ids=` or `inputs_embeds=`",
    "training": "`model.train()` or `model.eval()`",
}
GENERATE = {"mems": MEMORY, "past": "`past_key_values=` or `cache=`"}
LOADING = {
    "torchscript": EXPORT,
    "from_tf": CONVERT,
    "from_flax": CONVERT,
}
RESIZING = {"layer": "no counterpart: new tokens are appended to the last bucket"}

# keys and attributes of outputs
OUTPUT = {
    "mems": "`cache=memory` of the call, which advances it; `memory.to_mems()` gives the former list",
    "prediction_scores": "`outputs.logits`",
}

# keyword arguments and attributes of a configuration
CONFIGURATION_ARGUMENTS = {
    "vocab_size_or_config_json_file": "`vocab_size=`, or `TransfoXLConfig.from_pretrained(folder)`"
}
CONFIGURATION = {
    "adaptive": "`config.cutoffs`, which is empty for a plain softmax",
    "max_position_embeddings": "no counterpart: texts may have any length; `config.mem_len` limits the memory",
    "tgt_len": "the length of `input_ids`, which may change from call to call",
    "tie_weight": "`config.tie_word_embeddings`",
    "torchscript": EXPORT,
    "trainer_compatible": "nothing to set: `loss` is always a scalar and the first output",
}

# arguments of the constructor of `TransfoXLTokenizer`
TOKENIZER_ARGUMENTS = {
    "pretrained_vocab_file": OLD_VOCABULARY,
    "vocab_file": OLD_VOCABULARY,
    "special": f"{BUILD}: `special=`",
    "min_freq": f"{BUILD}: `min_freq=`",
    "max_size": f"{BUILD}: `max_size=`",
    "lower_case": "`TransfoXLTokenizer.from_vocabulary(symbols, mode, lower_case=True)`",
    "delimiter": "`mode='characters'` of `TransfoXLTokenizer.from_vocabulary` for an empty one, else `'pretokenized'`",
    "never_split": "`extra_special_tokens=` of `TransfoXLTokenizer.from_vocabulary`",
    "additional_special_tokens": "`extra_special_tokens=` of `TransfoXLTokenizer.from_vocabulary`",
    "unk_token": "`unk_token=` of `TransfoXLTokenizer.from_vocabulary`",
    "eos_token": "`eos_token=` of `TransfoXLTokenizer.from_vocabulary`",
    "language": "no counterpart: mode `moses` has the rules of English",
    "normalization": "no counterpart: each mode defines its normalization; see `docs/tokenizers.md`",
    "add_eos": "`line_end=` of `TransfoXLTokenizer.from_vocabulary`",
    "add_double_eos": "`line_start=` and `line_end=` of `TransfoXLTokenizer.from_vocabulary`",
}
TOKENIZER = {
    "sym2idx": "`tokenizer.get_vocab()`",
    "idx2sym": "`tokenizer.symbols`",
    "get_sym": "`tokenizer.convert_ids_to_tokens(index)`",
    "get_idx": "`tokenizer.convert_tokens_to_ids(symbol)`",
    "unk_idx": "`tokenizer.unk_token_id`",
    "additional_special_tokens": "`tokenizer.extra_special_tokens`",
    "special": "`tokenizer.all_special_tokens`",
    "never_split": "`tokenizer.all_special_tokens`",
    "lower_case": "`tokenizer.init_kwargs['lower_case']`",
    "do_lower_case": "`tokenizer.init_kwargs['lower_case']`",
    "delimiter": "`tokenizer.mode`",
    "language": "`tokenizer.mode`: `moses` has the rules of English",
    **dict.fromkeys(("counter", "min_freq", "max_size", "build_vocab", "count_file", "count_sents"), BUILD),
    **dict.fromkeys(("add_special", "add_symbol"), "`tokenizer.add_tokens([symbol])`"),
    "move_added_token": f"{OWN_VOCABULARY}, with the symbols in their order",
    "encode_file": "`encode_file(tokenizer, path)` of `hf_txl.tokenization_transfo_xl`",
    "encode_sents": "`encode_lines(tokenizer, lines)` of `hf_txl.tokenization_transfo_xl`",
    "convert_to_tensor": "`torch.tensor(tokenizer.convert_tokens_to_ids(symbols))`",
    "prepare_for_tokenization": "`tokenizer(text)`",
    **dict.fromkeys(("encode_plus", "batch_encode_plus"), "`tokenizer(text)`"),
    "max_len": "`tokenizer.model_max_length`",
    "vocab_file": "`tokenizer.save_pretrained(folder)`, which writes `tokenizer.json`",
    "max_model_input_sizes": "`tokenizer.model_max_length`",
    **dict.fromkeys(
        (
            "moses_detokenizer",
            "moses_pipeline",
            "moses_punct_norm",
            "moses_punct_normalizer",
            "moses_tokenize",
            "moses_tokenizer",
            "punction_without_space_before_pattern",
            "punctuation_symbols",
            "punctuation_with_space_around_pattern",
        ),
        MOSES,
    ),
}


def describe(name: str, names: Mapping[str, str]) -> str:
    """A sentence that names the replacement of an old name."""
    return f"`{name}` is a name of transformers 2 to 4. Here: {names[name]}. See docs/migration.md."


def refuse_arguments(given: Iterable[str], names: Mapping[str, str]) -> None:
    """Raise a `TypeError` for the first argument with an old name."""
    for name in given:
        if name in names:
            raise TypeError(describe(name, names))


def attribute_error(owner: Any, name: str, names: Mapping[str, str]) -> AttributeError:
    """The error for an attribute with an old name."""
    return AttributeError(f"{owner.__name__!r} object has no attribute {name!r}. {describe(name, names)}")


class LegacyAttribute:
    """Descriptor of an absent attribute (`hasattr` is false until it is set) whose error names the replacement."""

    def __init__(self, name: str, names: Mapping[str, str]):
        self.name = name
        self.names = names

    def __get__(self, instance: Any, owner: type) -> Any:
        raise attribute_error(owner, self.name, self.names)


def without_attributes(names: Mapping[str, str]) -> Callable[[T], T]:
    """Class decorator: accessing attributes with these old names raises an error that names the replacement.

    For classes without `__getattr__`, which would replace the error by its own.
    """

    def decorate(owner: T) -> T:
        for name in names:
            setattr(owner, name, LegacyAttribute(name, names))
        return owner

    return decorate


@without_attributes(OUTPUT)
class LegacyOutputNames:
    """Mixin for outputs: reading a former field as a key raises an error that names the replacement."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and key in OUTPUT:
            raise KeyError(describe(key, OUTPUT))
        library: Any = super()
        return library.__getitem__(key)

"""The sizes that run, and tiny models and tokenizers on the disk for the release's pipeline and tokenizer tests."""

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import ByteLevelBPETokenizer
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLModel,
    TransfoXLTokenizer,
)

SIZES = {"vocab_size": 99, "d_model": 32, "n_head": 4, "d_inner": 37, "n_layer": 2, "pad_token_id": 0}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {**SIZES, "mem_len": 30, "same_length": False},
    "clusters": {**SIZES, "mem_len": 30, "same_length": False, "cutoffs": [20, 50], "div_val": 2},
    "zeros": {**SIZES, "mem_len": 30, "same_length": True, "memory_init": "zeros"},
}
GPT2_VALUES = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 37,
    "n_layer": 2,
    "n_positions": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = (TransfoXLModel, TransfoXLForCausalLM, TransfoXLForSequenceClassification)
GPT2_MODELS = (GPT2Model, GPT2LMHeadModel, GPT2ForSequenceClassification)

TEXT = (
    "This is a test of a small model that reads words one after the other and never forgets what it has read . "
    "I have a problem with my phone that needs to be resolved soon , said no one . Hello there , how are you ?"
)


def write_tokenizers(folder: Path) -> tuple[TransfoXLTokenizer, GPT2Tokenizer]:
    """A tokenizer of ours of whole words, and one of GPT-2 of pieces of words, trained on a text of two sentences."""
    symbols = ["<pad>", "<unk>", "<eos>", "<bos>", *dict.fromkeys(TEXT.split())]
    symbols += ["".join(letters) for letters in itertools.product("bdfglmnprst", "aeiou", "bd")][
        : SIZES["vocab_size"] - len(symbols)
    ]
    ours = TransfoXLTokenizer.from_vocabulary(symbols, bos_token="<bos>", pad_token="<pad>")
    ours.save_pretrained(folder / "transfo-xl-tokenizer")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([TEXT], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    (folder / "trained").mkdir()
    trained.save_model(str(folder / "trained"))
    gpt2 = GPT2Tokenizer(
        vocab=str(folder / "trained" / "vocab.json"),
        merges=str(folder / "trained" / "merges.txt"),
        pad_token="<|endoftext|>",
        model_max_length=GPT2_VALUES["n_positions"],
    )
    gpt2.save_pretrained(folder / "gpt2-tokenizer")
    return ours, gpt2


def write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tiny_models(folder: Path) -> None:
    """The folder that `TRANSFORMERS_TINY_MODEL_PATH` names, laid out as the release's pipeline mixin reads it."""
    folder.mkdir(parents=True)
    ours, gpt2 = write_tokenizers(folder)
    for name, values in CONFIGURATIONS.items():
        values = {**values, "eos_token_id": ours.eos_token_id, "bos_token_id": ours.bos_token_id}
        for kind in MODELS:
            place = folder / "transfo-xl" / f"{name}-{kind.__name__}"
            write_model(place, kind(TransfoXLConfig(**values)), ours)
    values = {
        **GPT2_VALUES,
        "vocab_size": len(gpt2),
        "eos_token_id": gpt2.eos_token_id,
        "bos_token_id": gpt2.eos_token_id,
    }
    for kind in GPT2_MODELS:
        write_model(folder / "gpt2" / kind.__name__, kind(GPT2Config(**values)), gpt2)
    entry = {"tokenizer_classes": ["AutoTokenizer"], "processor_classes": []}
    summary = {kind.__name__: entry for kind in (*MODELS, *GPT2_MODELS)}
    (folder / "reports").mkdir()
    (folder / "reports" / "tiny_model_summary.json").write_text(json.dumps(summary), encoding="utf-8")

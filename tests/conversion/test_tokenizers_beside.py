"""What the command makes of a vocabulary or a tokenizer beside the source, or named."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner, Result

from hf_txl import TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.cli import app
from tests.helpers import FIXTURES

LEGACY = FIXTURES / "hf_legacy" / "legacy-div1"
SIZE = json.loads((LEGACY / "config.json").read_text(encoding="utf-8"))["vocab_size"]
WORDS = ["<eos>", "<unk>", *(f"word{number}" for number in range(SIZE - 2))]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(LEGACY, tmp_path / "source")
    return tmp_path / "source"


def run(source: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["convert", str(source), str(source.parent / "out"), *map(str, options)])


def assert_refused(source: Path, message: str, *options: object) -> None:
    result = run(source, *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("named", [None, "source", "source/tokenizer.json"])
def test_a_tokenizer_of_the_models_size_is_copied_as_it_is(named: str | None, source: Path) -> None:
    TransfoXLTokenizer.from_vocabulary(WORDS, "moses").save_pretrained(source)
    options = [] if named is None else ["--vocabulary", source.parent / named]
    assert run(source, *options).exit_code == 0
    output = source.parent / "out"
    assert (output / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(output)("word3 word1").input_ids == [5, 3]
    assert AutoConfig.from_pretrained(output).eos_token_id == 0


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "more"]])
@pytest.mark.parametrize("mode", [[], ["--tokenizer-mode", "pretokenized"]])
def test_a_tokenizer_of_another_size_is_refused(words: list[str], mode: list[str], source: Path) -> None:
    TransfoXLTokenizer.from_vocabulary(words, "moses").save_pretrained(source)
    assert_refused(source, f"as many symbols as the model has ids ({SIZE})", *mode)
    assert run(source, "--no-vocabulary").exit_code == 0


def test_a_vocabulary_and_none_cannot_both_be_asked_for(source: Path) -> None:
    assert_refused(source, "Only one of `--vocabulary` and", "--no-vocabulary", "--vocabulary", source)


def test_a_tokenizer_of_this_package_can_be_given_another_mode(source: Path) -> None:
    TransfoXLTokenizer.from_vocabulary(WORDS, "moses").save_pretrained(source)
    result = run(source, "--tokenizer-mode", "pretokenized")
    assert result.exit_code == 0
    assert "in mode `pretokenized`" in result.output
    tokenizer = TransfoXLTokenizer.from_pretrained(source.parent / "out")
    assert (tokenizer.mode, tokenizer.symbols) == ("pretokenized", WORDS)


def foreign_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_of_others_keeps_its_way_to_cut_text(source: Path) -> None:
    foreign_tokenizer(source)
    assert_refused(source, "`tokenizer_mode` must be left out", "--tokenizer-mode", "moses")
    result = run(source)
    assert result.exit_code == 0, result.output
    assert AutoTokenizer.from_pretrained(source.parent / "out")("word3").input_ids == [5]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": 3}', ""])
def test_a_damaged_tokenizer_is_named(content: str, source: Path) -> None:
    (source / "tokenizer.json").write_text(content, encoding="utf-8")
    assert_refused(source, "tokenizer.json must be")


def test_a_mode_without_a_vocabulary_is_refused(source: Path) -> None:
    assert_refused(source, "`tokenizer_mode` must come with a vocabulary", "--tokenizer-mode", "moses")


def vocab_pkl(folder: Path, symbols: list[str], **files: Any) -> None:
    stored = {"sym2idx": {symbol: index for index, symbol in enumerate(symbols)}, "idx2sym": symbols}
    (folder / "vocab.pkl").write_bytes(pickle.dumps({**stored, "lower_case": False, "delimiter": None}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("is_resized", [True, False])
def test_a_resized_model_has_the_added_tokens(is_resized: bool, source: Path) -> None:
    """`added_tokens.json` of transformers 4, whether the model was resized for it or not."""
    vocab_pkl(source, WORDS, added_tokens={"<pad>": SIZE}, special_tokens_map={"pad_token": {"content": "<pad>"}})
    if is_resized:
        model = TransfoXLForCausalLM.from_pretrained(LEGACY)
        model.resize_token_embeddings(SIZE + 1)
        model.save_pretrained(source)
        (source / "pytorch_model.bin").unlink()
    result = run(source)
    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(source.parent / "out")
    assert len(tokenizer) == SIZE + is_resized
    assert tokenizer.pad_token_id == (SIZE if is_resized else None)


def test_the_end_token_is_that_of_the_tokenizer_in_both_configurations(source: Path) -> None:
    """A character of the vocabulary was the end token by transformers' default, 0."""
    words = [*WORDS[1:], "<eos>"]
    vocab_pkl(source, words)
    result = run(source)
    assert result.exit_code == 0, result.output
    output = source.parent / "out"
    assert AutoConfig.from_pretrained(output).eos_token_id == SIZE - 1
    assert GenerationConfig.from_pretrained(output).eos_token_id == SIZE - 1
    assert f"| `eos_token_id` | `{SIZE - 1}` | tokenizer |" in (output / "README.md").read_text(encoding="utf-8")
    assert run(source, "--force", "--set", "eos_token_id=4").exit_code == 0
    assert GenerationConfig.from_pretrained(output).eos_token_id == 4


def test_a_vocabulary_without_an_end_token_leaves_none(source: Path) -> None:
    vocab_pkl(source, ["<unk>", *(f"word{number}" for number in range(SIZE - 1))])
    assert run(source).exit_code == 0
    assert AutoConfig.from_pretrained(source.parent / "out").eos_token_id is None
    assert GenerationConfig.from_pretrained(source.parent / "out").eos_token_id is None


@pytest.mark.parametrize("mode", ["bytes", "characters", "words"])
def test_a_mode_that_does_not_suit_the_vocabulary_is_refused(mode: str, source: Path) -> None:
    vocab_pkl(source, WORDS)
    assert_refused(source, "`mode` must be", "--tokenizer-mode", mode)


def test_a_model_is_not_read_from_a_vocabulary(source: Path) -> None:
    torch.save({"sym2idx": {"a": 0}}, source / "pytorch_model.bin")
    assert_refused(source, "must hold a model, a state dict")

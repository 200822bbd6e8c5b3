"""R17: a vocabulary without a model: the tokenizer alone is written, and nothing is executed."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from hf_txl.cli import app
from hf_txl.conversion.checkpoint import VocabularyError
from hf_txl.conversion.convert import convert
from hf_txl.conversion.read_pytorch import StoredObject
from hf_txl.conversion.vocabulary import is_vocabulary, read_vocabulary
from tests.helpers import FIXTURES

from .hostile import PROGRAMS, WRAPPERS

FOLDER = FIXTURES / "vocabularies"
WORDS = ["<eos>", "<unk>", "der", "Bär", "schläft"]


def run(source: Path, output: Path, *options: object) -> Result:
    return CliRunner().invoke(app, ["convert", str(source), str(output), *map(str, options)])


def legacy(folder: Path, name: str) -> Path:
    """A vocabulary as transformers stored it."""
    attributes = {"sym2idx": {word: index for index, word in enumerate(WORDS)}, "idx2sym": WORDS, "lower_case": False}
    if name.endswith(".pkl"):
        (folder / name).write_bytes(pickle.dumps(attributes))
    else:
        torch.save(attributes, folder / name)
    return folder / name


@pytest.mark.parametrize(
    "file", ["corpus-text8/data/cache.pt", "legacy-tokenizer/vocab.pkl", "legacy-tokenizer/vocab.bin"]
)
def test_the_tokenizer_alone_is_written_and_gives_the_recorded_ids(file: str, tmp_path: Path) -> None:
    result = run(FOLDER / file, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "without a model" in result.stdout and "The tokenizer alone is written" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = json.loads((FOLDER / file.split("/")[0] / "expected.json").read_text(encoding="utf-8"))
    symbols = read_vocabulary(FOLDER / file).symbols
    assert tokenizer.convert_ids_to_tokens(list(range(len(symbols)))) == symbols
    sentences = [sentence for sentence in expected["sentences"] if sentence["ids"]]
    ours = tokenizer([sentence["text"] for sentence in sentences]).input_ids
    agreeing = [ids == sentence["ids"] for ids, sentence in zip(ours, sentences, strict=True)]
    # docs/tokenizers.md says which kinds of text differ
    assert sum(agreeing) >= 0.9 * len(sentences) > 15


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.txt", "\n".join(WORDS) + "\n"),
        ("kmers.txt", "\n".join(f"{word} 17" for word in WORDS)),
        ("vocab.json", json.dumps(WORDS)),
        ("ids.json", json.dumps({word: index for index, word in enumerate(WORDS)})),
    ],
)
def test_a_list_of_words_is_one_by_its_form(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    result = run(tmp_path / name, tmp_path / "out", "--tokenizer-mode", "moses")
    assert result.exit_code == 0, result.output
    assert "5 symbols, mode `moses`" in result.stdout
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("der Bär schnarcht").input_ids == [2, 3, 1]


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin"])
def test_added_tokens_are_named_and_belong_to_it_if_the_size_counts_them(name: str, tmp_path: Path) -> None:
    file = legacy(tmp_path, name)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": 5, "<mask>": 6}), encoding="utf-8")
    result = run(file, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "<pad>, <mask>" in result.stdout and "`--set vocab_size=7`" in result.stdout
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 5
    result = run(file, tmp_path / "out", "--force", "--set", "vocab_size=7")
    assert result.exit_code == 0 and "Left out" not in result.stdout
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("der <mask>").input_ids == [2, 6]
    result = run(file, tmp_path / "other", "--set", "vocab_size=8")
    assert result.exit_code == 2 and "`vocab_size` must be the number of symbols (5), but is 8" in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dtype", "float16"], "--dtype"),
        (["--verify", "--license", "mit"], "--license, --verify"),
        (["--format", "pytorch"], "--format"),
        (["--set", "mem_len=3"], "`mem_len`"),
    ],
)
def test_options_of_models_are_refused(options: list[str], named: str, tmp_path: Path) -> None:
    result = run(legacy(tmp_path, "vocab.pkl"), tmp_path / "out", *options)
    assert result.exit_code == 2 and named in result.stderr and not (tmp_path / "out").exists()


def test_python_is_told_which_function_reads_it(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="`convert_vocabulary`"):
        convert(legacy(tmp_path, "vocab.bin"), tmp_path / "out", progress=False)


def test_a_folder_without_a_model_says_that_it_has_a_vocabulary(tmp_path: Path) -> None:
    """It may be a download that is not complete."""
    legacy(tmp_path, "vocab.pkl")
    result = run(tmp_path, tmp_path / "out")
    assert result.exit_code == 2 and "only a vocabulary (vocab.pkl" in result.stderr


def test_an_existing_folder_is_not_replaced_unless_told(tmp_path: Path) -> None:
    file = legacy(tmp_path, "vocab.pkl")
    shutil.copytree(FOLDER / "legacy-tokenizer", tmp_path / "out")
    assert run(file, tmp_path / "out").exit_code == 2
    assert run(file, tmp_path, "--force").exit_code == 2 and file.is_file()


@pytest.mark.parametrize("file", ["vocab.pkl", "vocab.bin", "cache.pt", "cache.pkl", "corpus.bin"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hostile_vocabulary_is_refused(file: str, wrapper: str, tmp_path: Path) -> None:
    """C90"""
    make, refused_name = PROGRAMS["os_system"]
    (tmp_path / file).write_bytes(WRAPPERS[wrapper](make(tmp_path / "sentinel")))
    result = run(tmp_path / file, tmp_path / "out")
    assert result.exit_code == 2 and refused_name in result.stderr
    assert not (tmp_path / "sentinel").exists() and not (tmp_path / "out").exists()


def test_a_model_or_checkpoint_with_a_vocabulary_is_none() -> None:
    vocabulary = StoredObject("vocabulary.Vocab", (), {"sym2idx": {"a": 0}})
    assert is_vocabulary(vocabulary) and is_vocabulary({"sym2idx": {"a": 0}})
    assert is_vocabulary(StoredObject("data_utils.Corpus", (), {"vocab": vocabulary, "train": None}))
    assert not is_vocabulary(StoredObject("model.Model", (), {"vocab": vocabulary, "_modules": {}}))
    assert not is_vocabulary({"weights": torch.zeros(2), "vocab": vocabulary})
    assert not is_vocabulary(StoredObject("model.Model", (), {"vocab": 3})) and not is_vocabulary(None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_other_files_of_a_model_are_no_vocabulary(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"model_type": "transfo-xl", "version": 1}), encoding="utf-8")
    result = run(tmp_path / name, tmp_path / "out")
    assert result.exit_code == 2 and "cannot be read" in result.stderr

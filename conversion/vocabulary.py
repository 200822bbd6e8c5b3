"""Reads the vocabulary of an old checkpoint or corpus, with what is needed to cut a text as its own code did.

Vocabularies were kept in many ways, mostly as pickles: the whole corpus (`cache.pt`, `cache.pkl`), the attributes of a
tokenizer (`vocab.pkl`, `vocab.bin`), a list of words (`vocab.txt`, `1b_word_vocab.txt`). Their classes are `Vocab` of
`utils/vocabulary.py` and `Corpus` of `data_utils.py` in kimiyoung/transformer-xl (of the same names in its TensorFlow
code and in NVIDIA's), and `TransfoXLTokenizer` of transformers 2 to 4. None of them is imported.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_txl.tokenization_transfo_xl import END_TOKENS, UNKNOWN_TOKENS, TransfoXLTokenizer

from .read_pytorch import StoredObject, read_file

# what is looked for in a folder, the surest first: a corpus says more than a list
FILES = ("cache.pt", "cache.pkl", "vocab.pkl", "vocab.bin", "1b_word_vocab.txt", "vocab.txt", "vocab.json")
CORPUS_INFO = "corpus-info.json"
# files in which transformers kept the names of special tokens
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
# what the tokenizer of transformers treats as special where its files name nothing else
LEGACY_SPECIAL = ("<formula>",)


@dataclass(frozen=True)
class Vocabulary:
    """The symbols of a vocabulary and the settings of the code that it comes from.

    Args:
        symbols (`list[str]`): Index = id.
        mode (`str`): How that code cuts text, a mode of [`TransfoXLTokenizer`].
        lower_case (`bool`): Whether it lower-cases text first.
        unk_token (`str`, *optional*): The token of unknown symbols. None: the original stops at such a symbol.
        eos_token (`str`, *optional*): The token at the end of a line or sentence.
        line_start, line_end (`str`, *optional*): What it puts before and after every line of a file.
        extra_special_tokens (`tuple[str, ...]`): Further tokens that are never split.
    """

    symbols: list[str] = field(repr=False)
    mode: str = "pretokenized"
    lower_case: bool = False
    unk_token: str | None = None
    eos_token: str | None = None
    line_start: str | None = None
    line_end: str | None = None
    extra_special_tokens: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.symbols)

    @property
    def raw_mode(self) -> str:
        """The mode for text that nobody has prepared: the original's scripts did that before its own code."""
        ordinary = set(self.symbols) - {self.unk_token, self.eos_token, *self.extra_special_tokens}
        if all(symbol.isascii() and symbol.isdecimal() and int(symbol) < 256 for symbol in ordinary):
            return "bytes"
        return "characters" if all(len(symbol) == 1 for symbol in ordinary) else "moses"

    def tokenizer(self, mode: str | None = None, **kwargs: Any) -> TransfoXLTokenizer:
        """The tokenizer with this vocabulary; `mode` instead of its own."""
        mode = mode or self.mode
        return TransfoXLTokenizer.from_vocabulary(
            self.symbols,
            mode,
            # the original lower-cased the numbers of bytes, which changes nothing
            lower_case=self.lower_case and mode != "bytes",
            unk_token=self.unk_token,
            eos_token=self.eos_token,
            line_start=self.line_start,
            line_end=self.line_end,
            extra_special_tokens=self.extra_special_tokens,
            **kwargs,
        )


def read_vocabulary(source: Any) -> Vocabulary:
    """Read a vocabulary; nothing in the source is executed.

    Args:
        source (`str | os.PathLike` or an object that `read_file` gave):
            A file (`cache.pt`, `cache.pkl`, `vocab.pkl`, `vocab.bin`; a list of symbols in `.txt`, one a line, or in
            `.json`; `corpus-info.json` beside one of these), a folder with such a file, or what is in it: a corpus, a
            vocabulary, a dictionary of a vocabulary's attributes, a checkpoint with an entry `vocab`.

    Raises:
        ValueError: The source holds no vocabulary, or one that contradicts itself; `FileNotFoundError`: no such file.
    """
    if not isinstance(source, str | os.PathLike):
        return _from_object(source, "the object given", {})
    path = Path(source)
    if path.is_dir():
        path = _find(path)
    if path.name == CORPUS_INFO:
        return _with_corpus_info(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file.")
    if path.suffix == ".txt":
        return _from_symbols(_read_lines(path), str(path))
    if path.suffix == ".json":
        return _from_symbols(json.loads(path.read_text(encoding="utf-8")), str(path))
    return _from_object(read_file(path), str(path), _settings_beside(path))


def file_in(folder: Path) -> Path | None:
    """The file of a vocabulary in a folder."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def _find(folder: Path) -> Path:
    if (path := file_in(folder)) is None:
        raise ValueError(f"{folder}: has no vocabulary; looked for {', '.join(FILES)}.")
    return path


def _with_corpus_info(path: Path) -> Vocabulary:
    """The file of the TensorFlow code that gives the size of a vocabulary, which is in a file beside it."""
    file = _find(path.parent)
    vocabulary = read_vocabulary(file)
    stated = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    if stated != len(vocabulary):
        raise ValueError(
            f"{path}: `vocab_size` must be the number of symbols in {file.name} ({len(vocabulary)}), but is {stated}."
        )
    return vocabulary


def _read_lines(path: Path) -> list[str]:
    """The first word of every line, as the original reads it: what follows may be a count."""
    with open(path, encoding="utf-8") as lines:
        words = [line.split(maxsplit=1)[:1] for line in lines]
    if [] in words:
        raise ValueError(f"{path}: line {words.index([]) + 1} must hold a symbol, but is blank.")
    return [word for [word] in words]


def _settings_beside(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        if (path.parent / name).is_file():
            settings |= json.loads((path.parent / name).read_text(encoding="utf-8"))
    return settings


def _from_object(stored: Any, name: str, settings: Mapping[str, Any]) -> Vocabulary:
    attributes = stored.state if isinstance(stored, StoredObject) else stored
    if isinstance(attributes, Mapping) and isinstance(attributes.get("vocab"), StoredObject | Mapping):
        return _from_object(attributes["vocab"], name, settings)
    if not isinstance(attributes, Mapping) or "sym2idx" not in attributes:
        raise ValueError(f"{name}: holds no vocabulary, which is an object or a dictionary with `sym2idx`.")
    symbols = _symbols(attributes, name)
    if isinstance(stored, StoredObject):
        return _from_symbols(symbols, name, mode="pretokenized", settings=attributes)
    # transformers stored the attributes alone, and what its other files say came before them
    named = attributes.get("_special_tokens_map") or {}
    settings = {"additional_special_tokens": LEGACY_SPECIAL, **attributes, **named, **settings}
    return _from_symbols(symbols, name, mode="moses", settings=settings)


def _symbols(attributes: Mapping[str, Any], name: str) -> list[str]:
    """The symbols in the order of their ids, which is stored twice, but not by every release of transformers."""
    sym2idx, idx2sym = attributes["sym2idx"], attributes.get("idx2sym")
    symbols = sorted(sym2idx, key=sym2idx.__getitem__)
    if [sym2idx[symbol] for symbol in symbols] != list(range(len(symbols))):
        raise ValueError(f"{name}: `sym2idx` must give the ids 0 to {len(symbols) - 1} once each, but does not.")
    if idx2sym and list(idx2sym) != symbols:
        raise ValueError(f"{name}: `sym2idx` and `idx2sym` must be the same vocabulary, but differ.")
    return symbols


def _from_symbols(symbols: Any, name: str, mode: str = "pretokenized", settings: Mapping[str, Any] = {}) -> Vocabulary:
    """Complete the settings by what the symbols are: the original code asks for the same names."""
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise ValueError(f"{name}: a vocabulary must be a list of texts, at least one, but is not.")
    known = set(symbols)
    if len(known) < len(symbols):
        repeated = [symbol for symbol, count in Counter(symbols).items() if count > 1]
        raise ValueError(f"{name}: symbols must differ from each other, but these are repeated: {repeated[:10]}.")
    delimiter = settings.get("delimiter")
    if delimiter not in (None, ""):
        raise ValueError(f"{name}: `delimiter` must be None (white space) or empty, but is {delimiter!r}.")
    unk_token, eos_token = (
        next((token for token in (settings.get(key), *usual) if token in known), None)
        for key, usual in (("unk_token", UNKNOWN_TOKENS), ("eos_token", END_TOKENS))
    )
    return Vocabulary(
        symbols,
        mode="characters" if delimiter == "" else mode,
        lower_case=bool(settings.get("lower_case")),
        unk_token=unk_token,
        eos_token=eos_token,
        line_start=eos_token if eos_token == "<S>" else None,
        line_end=eos_token,
        # transformers gives a special token that is not in the vocabulary an id that the model does not have
        extra_special_tokens=tuple(t for t in settings.get("additional_special_tokens", ()) if t in known),
    )

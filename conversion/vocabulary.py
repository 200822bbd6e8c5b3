"""Reads the vocabulary of an old checkpoint or corpus, with the settings to tokenize text as its own code did.

Vocabularies were stored in many ways, mostly as pickles: the whole corpus (`cache.pt`, `cache.pkl`), attributes of a
tokenizer (`vocab.pkl`, `vocab.bin`), a list of words (`vocab.txt`, `1b_word_vocab.txt`). Their classes are `Vocab` of
`utils/vocabulary.py` and `Corpus` of `data_utils.py` in kimiyoung/transformer-xl (of the same names in its TensorFlow
code and in NVIDIA's), and `TransfoXLTokenizer` of transformers 2 to 4. None of them is imported.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_txl.tokenization_transfo_xl import END_TOKENS, UNKNOWN_TOKENS, TransfoXLTokenizer

from .read_pytorch import StoredObject, read_file
from .text_files import read_json, read_json_object, read_text

# files to look for in a folder, the most informative first: a corpus has settings, a list has none
FILES = ("cache.pt", "cache.pkl", "vocab.pkl", "vocab.bin", "1b_word_vocab.txt", "vocab.txt", "vocab.json")
CORPUS_INFO = "corpus-info.json"
# files in which transformers stored the names of special tokens, and the tokens added to a vocabulary
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
ADDED_TOKENS = "added_tokens.json"
# names of bytes in a vocabulary of bytes
BYTES = frozenset(map(str, range(256)))
# special tokens of the tokenizer of transformers by default
LEGACY_SPECIAL = ("<formula>",)


@dataclass(frozen=True)
class Vocabulary:
    """The symbols of a vocabulary and the tokenization settings of the code that it comes from.

    Args:
        symbols (`list[str]`): Index = id.
        mode (`str`): How that code splits text, a mode of [`TransfoXLTokenizer`].
        lower_case (`bool`): Whether it lower-cases text first.
        unk_token (`str`, *optional*): The token of unknown symbols. None: the original code raises for such a symbol.
        eos_token (`str`, *optional*): The token at the end of a line or sentence.
        line_start, line_end (`str`, *optional*): Tokens that it adds before and after every line of a file.
        pad_token (`str`, *optional*): The padding token.
        extra_special_tokens (`tuple[str, ...]`): Further tokens that are never split.
        added_tokens (`tuple[str, ...]`):
            Tokens that transformers added behind the symbols. Not every model has rows for them; see `of_size`.
    """

    symbols: list[str] = field(repr=False)
    mode: str = "pretokenized"
    lower_case: bool = False
    unk_token: str | None = None
    eos_token: str | None = None
    line_start: str | None = None
    line_end: str | None = None
    pad_token: str | None = None
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.symbols)

    def of_size(self, size: int) -> Vocabulary:
        """The vocabulary with the added tokens, if that gives `size` symbols."""
        if not self.added_tokens or len(self) + len(self.added_tokens) != size:
            return self
        return replace(
            self,
            symbols=[*self.symbols, *self.added_tokens],
            extra_special_tokens=tuple(dict.fromkeys([*self.extra_special_tokens, *self.added_tokens])),
            added_tokens=(),
        )

    @property
    def raw_mode(self) -> str:
        """The mode for raw text; the original's mode takes text that its scripts have prepared."""
        special = {self.unk_token, self.eos_token, self.pad_token, *self.extra_special_tokens}
        ordinary = set(self.symbols) - special
        if ordinary <= BYTES:
            return "bytes"
        return "characters" if all(len(symbol) == 1 for symbol in ordinary) else "moses"

    def tokenizer(self, mode: str | None = None, **kwargs: Any) -> TransfoXLTokenizer:
        """The tokenizer with this vocabulary; `mode` instead of its own."""
        mode = mode or self.mode
        return TransfoXLTokenizer.from_vocabulary(
            self.symbols,
            mode,
            # the original lower-cased the decimal numbers of bytes, without effect
            lower_case=self.lower_case and mode != "bytes",
            unk_token=self.unk_token,
            eos_token=self.eos_token,
            line_start=self.line_start,
            line_end=self.line_end,
            pad_token=self.pad_token if self.pad_token in self.symbols else None,
            extra_special_tokens=self.extra_special_tokens,
            **kwargs,
        )


def read_vocabulary(source: Any) -> Vocabulary:
    """Read a vocabulary; nothing in the source is executed.

    Args:
        source (`str | os.PathLike` or an object that `read_file` gave):
            A file (`cache.pt`, `cache.pkl`, `vocab.pkl`, `vocab.bin`; symbols in `.txt`, one a line, or in `.json`, a
            list or a dictionary of ids; `corpus-info.json` beside one of these), a folder with such a file, or what
            is in it: a corpus, a vocabulary, a dictionary of a vocabulary's attributes, a checkpoint with an entry
            `vocab`.

    Raises:
        ValueError: if the source holds no vocabulary, or one that contradicts itself.
        FileNotFoundError: if there is no such file.
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
        stored = read_json(path)
        symbols = _symbols({"sym2idx": stored}, str(path)) if isinstance(stored, dict) else stored
        vocabulary = _from_symbols(symbols, str(path))
        # no script prepared text for such a list, so characters are those of raw text
        return replace(vocabulary, mode="characters") if vocabulary.raw_mode == "characters" else vocabulary
    return _from_object(read_file(path), str(path), _settings_beside(path))


def describe(vocabulary: Vocabulary, tokenizer: TransfoXLTokenizer, mode: str | None) -> str:
    """Description of a tokenizer, with the mode for raw text if the vocabulary's mode needs prepared text."""
    sentence = f"{len(vocabulary)} symbols, mode `{tokenizer.mode}`"
    if mode is None and vocabulary.raw_mode != vocabulary.mode:
        sentence += f" for text prepared as the original's was (`{vocabulary.raw_mode}` takes raw text)"
    return sentence


def is_word_list(path: Path) -> bool:
    """Whether a file is a vocabulary in text form: by its name, or by its contents if it is JSON."""
    if path.suffix != ".json" or not path.is_file():
        return path.suffix == ".txt"
    stored = read_json(path)
    ids = isinstance(stored, dict) and len(stored) > 0 and all(type(index) is int for index in stored.values())
    return path.name == CORPUS_INFO or isinstance(stored, list) or ids


def is_vocabulary(stored: Any) -> bool:
    """Whether the contents of a file are a vocabulary or a corpus, not a model or checkpoint that contains one."""
    if not isinstance(stored, StoredObject):
        return isinstance(stored, Mapping) and "sym2idx" in stored
    corpus = stored.state.get("vocab") if isinstance(stored.state, Mapping) else None
    vocabulary = corpus if isinstance(corpus, StoredObject) and "_modules" not in stored.state else stored
    return isinstance(vocabulary.state, Mapping) and "sym2idx" in vocabulary.state


def file_in(folder: Path) -> Path | None:
    """The file of a vocabulary in a folder."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def _find(folder: Path) -> Path:
    if (path := file_in(folder)) is None:
        raise ValueError(f"{folder}: has no vocabulary; looked for {', '.join(FILES)}.")
    return path


def _with_corpus_info(path: Path) -> Vocabulary:
    """The vocabulary beside `corpus-info.json` of the TensorFlow code, which states its size."""
    file = _find(path.parent)
    vocabulary = read_vocabulary(file)
    stated = read_json_object(path).get("vocab_size")
    if stated != len(vocabulary):
        raise ValueError(
            f"{path}: `vocab_size` must be the number of symbols in {file.name} ({len(vocabulary)}), but is {stated}."
        )
    return vocabulary


def _read_lines(path: Path) -> list[str]:
    """The first word of every line, as the original code reads it; a count may follow."""
    words = [line.split(maxsplit=1)[:1] for line in read_text(path).rstrip("\n").split("\n")]
    if [] in words:
        raise ValueError(f"{path}: line {words.index([]) + 1} must hold a symbol, but is blank.")
    return [word for [word] in words]


def _settings_beside(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        if (path.parent / name).is_file():
            settings |= read_json_object(path.parent / name)
    if (path.parent / ADDED_TOKENS).is_file():
        settings["added_tokens"] = read_json_object(path.parent / ADDED_TOKENS)
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
    # transformers stored the attributes only; its other files take precedence
    named = attributes.get("_special_tokens_map")
    named = named if isinstance(named, Mapping) else {}
    settings = {"additional_special_tokens": LEGACY_SPECIAL, **attributes, **named, **settings}
    return _from_symbols(symbols, name, mode="moses", settings=settings)


def _symbols(attributes: Mapping[str, Any], name: str) -> list[str]:
    """The symbols in the order of their ids, which most releases of transformers stored twice."""
    sym2idx, idx2sym = attributes["sym2idx"], attributes.get("idx2sym")
    if not isinstance(sym2idx, Mapping) or not all(type(index) is int for index in sym2idx.values()):
        raise ValueError(f"{name}: `sym2idx` must give a whole number for each symbol, but does not.")
    if idx2sym and not isinstance(idx2sym, list | tuple):
        raise ValueError(f"{name}: `idx2sym` must be a list, but is a {type(idx2sym).__name__}.")
    symbols = sorted(sym2idx, key=sym2idx.__getitem__)
    if [sym2idx[symbol] for symbol in symbols] != list(range(len(symbols))):
        raise ValueError(f"{name}: `sym2idx` must give the ids 0 to {len(symbols) - 1} once each, but does not.")
    if idx2sym and list(idx2sym) != symbols:
        raise ValueError(f"{name}: `sym2idx` and `idx2sym` must be the same vocabulary, but differ.")
    return symbols


def _from_symbols(symbols: Any, name: str, mode: str = "pretokenized", settings: Mapping[str, Any] = {}) -> Vocabulary:
    """Complete the settings by the special tokens among the symbols, which the original code looks up by name."""
    if not isinstance(symbols, list) or not symbols or not all(isinstance(symbol, str) for symbol in symbols):
        raise ValueError(f"{name}: a vocabulary must be a list of texts, at least one, but is not.")
    known = set(symbols)
    if len(known) < len(symbols):
        repeated = [symbol for symbol, count in Counter(symbols).items() if count > 1]
        raise ValueError(f"{name}: symbols must be distinct, but these are repeated: {repeated[:10]}.")
    delimiter = settings.get("delimiter")
    if delimiter not in (None, ""):
        raise ValueError(f"{name}: `delimiter` must be None (white space) or empty, but is {delimiter!r}.")
    unk_token, eos_token = (
        next((token for token in (_text_of(settings.get(key)), *usual) if token in known), None)
        for key, usual in (("unk_token", UNKNOWN_TOKENS), ("eos_token", END_TOKENS))
    )
    extra = settings.get("additional_special_tokens")
    return Vocabulary(
        symbols,
        mode="characters" if delimiter == "" else mode,
        lower_case=bool(settings.get("lower_case")),
        unk_token=unk_token,
        eos_token=eos_token,
        line_start=eos_token if eos_token == "<S>" else None,
        line_end=eos_token,
        pad_token=_text_of(settings.get("pad_token")),
        # transformers gives a special token that is not in the vocabulary an id that the model does not have
        extra_special_tokens=tuple(
            token
            for token in map(_text_of, extra if isinstance(extra, list | tuple) else ())
            if token and token in known
        ),
        added_tokens=_added(settings.get("added_tokens", {}), symbols, name),
    )


def _added(ids: Mapping[str, Any], symbols: list[str], name: str) -> tuple[str, ...]:
    """The added tokens in the order of their ids, without those that are in the vocabulary already."""
    new = {token: index for token, index in ids.items() if token not in symbols}
    whole = all(type(index) is int for index in new.values())
    if not whole or sorted(new.values()) != list(range(len(symbols), len(symbols) + len(new))):
        raise ValueError(
            f"{name}: {ADDED_TOKENS} beside it must give the ids from {len(symbols)} on once each, but gives {new}."
        )
    return tuple(sorted(new, key=new.__getitem__))


def _text_of(token: Any) -> str | None:
    """A token that transformers stored as a string, or with its properties."""
    if isinstance(token, StoredObject):
        token = token.state
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


__all__ = ["Vocabulary", "read_vocabulary"]

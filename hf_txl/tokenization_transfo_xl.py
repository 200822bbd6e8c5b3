"""Tokenizers of Transformer-XL: Moses rules for raw text, splitting at white space, characters, or bytes.

Each mode consists of components of the `tokenizers` library (normalizer, pre-tokenizer, vocabulary, decoder), so a
saved `tokenizer.json` gives the same ids without this file. The file builds tokenizers, from a vocabulary or from
texts, and adds the originals' tokens at the start and end of each line.

`moses` follows `TransfoXLTokenizer` of transformers 4: it normalises punctuation and splits words by the Moses rules
with aggressive dash splitting, and numbers at commas and points; `docs/tokenizers.md` lists the differences. The other
modes follow `utils/vocabulary.py` and the data scripts of the original code (`pytorch/` in kimiyoung/transformer-xl).
"""

import io
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from transformers.utils import cached_file, logging

from .legacy_names_transfo_xl import (
    OLD_VOCABULARY,
    OWN_VOCABULARY,
    TOKENIZER,
    TOKENIZER_ARGUMENTS,
    attribute_error,
    refuse_arguments,
)

# default of arguments whose value is derived from the vocabulary or read from the tokenizer's files
AUTO = "auto"
UNKNOWN_TOKENS = ("<unk>", "<UNK>")
# the second one starts and ends every sentence of the One Billion Word corpus
END_TOKENS = ("<eos>", "<S>")
# the library's error for an unknown word if there is no unknown token
MISSING_UNKNOWN = "Missing [UNK]"
# characters encoded at a time
BATCH_CHARACTERS = 1 << 18

# moses: characters
# Moses does not count Han and Hangul as letters: each of their characters is a token.
LETTER = r"[\p{Alphabetic}&&[^\p{Han}\p{Hangul}]]"
DIGIT = r"\p{Nd}"
ALNUM = rf"[{LETTER}{DIGIT}]"
# characters that the detokeniser joins without spaces
IDEOGRAPH = r"[\p{Han}\p{Hangul}\p{Hiragana}\p{Katakana}\p{Bopomofo}]"
CLOSING = r",.?!:;\\%}\])"

# moses: abbreviations that keep their full stop, and those that keep it only before a number
ABBREVIATIONS = (
    "[A-Z] Mr Mrs Ms MR MRS MS MM Messrs Mlle Mme Dr Drs DR Prof Hon Hr Sr Msgr Rev St Rt Ph "  # with names
    "Adm Brig Capt Cmdr Col Comdr Cpl Ens Gen Lt Maj Pfc Pvt Sfc Sgt "  # ranks
    "Asst Bart Con Gov Insp Rep Reps Sen Sens Supt Surg "  # offices
    "Adj Adv Bldg Bros Corp Hosp Nos Nr Op Ord Res Rs rev v vs "
    "Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec"
)
NUMBER_ABBREVIATIONS = "No Art pp"

# moses: replacements in the text, in this order
MOSES_TEXT = (
    (r"[`']{2}", ' " '),
    (r"[`´‘’‚]", "'"),
    (r"''|[„“”«»]", '"'),
    (r"…", "..."),
    (r"—", " - "),
    (r"–", "-"),
    # a quotation mark moves behind the full stops and commas that follow it: inserted there, then removed here
    (r'"[.,]+\K', '"'),
    (r'"(?=[.,]+")', ""),
    (r"[\x00-\x08\x0E-\x1F]", ""),
    (rf"(?<={ALNUM})-(?={ALNUM})", " @-@ "),
    (rf"(?<={DIGIT}),(?={DIGIT})", " @,@ "),
    (rf"(?<={DIGIT})\.(?={DIGIT})", " @.@ "),
)

# moses: patterns of a token; the first match counts
# A piece of a word has no full stop. An apostrophe splits a word, except between a digit and a letter ("50'S").
PIECE = rf"(?:[{ALNUM}-]|(?<={DIGIT})'(?=[{LETTER}&&[^s]]))+"
WORD_ENDS = rf"(?![{ALNUM}.-])"
# "it" + "'s"; two apostrophes cannot share a letter: "rock" + "'n'roll"; "1980" + "'s"; "<unk>" + "'s", where the text
# after the special token is matched separately
CONTRACTION = (
    rf"(?:(?<={LETTER})'(?={LETTER})(?:{LETTER}'(?={LETTER}))?|(?<={DIGIT})'(?=s)|\A'(?=(?i:s|t|d|m|re|ve|ll)\b))"
)
MOSES_TOKENS = (
    r"(?<!\S)@[-,.]@(?!\S)",
    r"\.{2,}",
    rf"(?:{'|'.join(ABBREVIATIONS.split())})\.{WORD_ENDS}",
    rf"(?:{'|'.join(NUMBER_ABBREVIATIONS.split())})\.(?=\s+[0-9])",
    # letters with full stops between them keep the last one: "U.S."
    rf"{CONTRACTION}?(?=[{DIGIT}.-]*{LETTER})(?>(?:{PIECE})?(?:\.{PIECE})+)\.{WORD_ENDS}",
    # a word keeps it before a lower-case word, where the sentence continues: "approx. ten"
    rf"{CONTRACTION}?(?>{PIECE}(?:\.{PIECE})*|(?:\.{PIECE})+)(?:\.(?=\s+\p{{Lowercase}}))?",
    r"\S",
)

# moses: replacements that join tokens, each surrounded by spaces, in this order
# an apostrophe that is a token, and text without one
QUOTE = rf"(?<= )'(?=[ {CLOSING}])"
NO_QUOTE = rf"(?>(?:[^']|(?!{QUOTE})')*)"
MOSES_JOINS = (
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (rf"(?<!\A) (?='{LETTER})", ""),
    (rf" (?=[{CLOSING}]+ )", ""),
    # Quotation marks come in pairs: no space after the first, none before the second. The search continues where the
    # last match ended (`\G`), between pairs. An apostrophe after an "s" opens no quotation: "classes'".
    (rf"(?:\A|\G(?!\A){NO_QUOTE}')(?:{NO_QUOTE}(?<=s )')*{NO_QUOTE}(?<!s )\K' ?", "'"),
    (rf" (?='[ {CLOSING}])", ""),
    (r"""(?:\A|\G(?!\A)[^"]*")[^"]*\K" ?""", '"'),
    (r"""(?:\A|\G(?!\A))[^"]*"[^"]*?\K ?\"""", '"'),
    (r"""(?<![^ "'])[\p{Sc}(\[{¿¡]+\K """, ""),
    (rf"(?<={IDEOGRAPH}) (?={IDEOGRAPH})", ""),
    (r"\A +| +\z", ""),
)

# white space of Python's `str.split`
SPACES = r"[\s\x1C-\x1F]+"

# bytes: the printable character by which the library represents each byte
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_CHARACTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}

# characters and bytes: line breaks are removed if the vocabulary does not have them, as in enwik8 …
NO_NEWLINE = normalizers.Replace("\n", "")
# … and kept while a vocabulary is counted
UNCOUNTED = {" ", "\n", BYTE_CHARACTERS[ord("\n")]}


class Parts(NamedTuple):
    """Components of a mode besides the vocabulary; all lists may be empty."""

    normalizers: list[Any]
    pre_tokenizers: list[Any]
    decoders: list[Any]


def _replacements(table: Iterable[tuple[str, str]], kind: Any) -> list[Any]:
    return [kind.Replace(Regex(pattern), content) for pattern, content in table]


def _moses(tokens: set[str], special: Sequence[str]) -> Parts:
    # a special token in another case is an ordinary token, but not split either
    whole = [rf"(?i:{'|'.join(re.escape(token) for token in special)})"] if special else []
    return Parts(
        _replacements(MOSES_TEXT, normalizers),
        [pre_tokenizers.Split(Regex("|".join([*whole, *MOSES_TOKENS])), "removed", invert=True)],
        [
            decoders.Replace(Regex(r"\A"), " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\z"), " "),
            *_replacements(MOSES_JOINS, decoders),
        ],
    )


def _pretokenized(tokens: set[str], special: Sequence[str]) -> Parts:
    return Parts([], [pre_tokenizers.Split(Regex(SPACES), "removed")], [])


def _characters(tokens: set[str], special: Sequence[str]) -> Parts:
    written = "_" in tokens and " " not in tokens  # text8
    return Parts(
        ([normalizers.Replace(" ", "_")] if written else []) + ([] if "\n" in tokens else [NO_NEWLINE]),
        [pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")],
        [decoders.Fuse()] + ([decoders.Replace("_", " ")] if written else []),
    )


def _bytes(tokens: set[str], special: Sequence[str]) -> Parts:
    return Parts(
        [] if BYTE_CHARACTERS[ord("\n")] in tokens else [NO_NEWLINE],
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex("."), "isolated"),
        ],
        [decoders.ByteLevel()],
    )


MODES = {"moses": _moses, "pretokenized": _pretokenized, "characters": _characters, "bytes": _bytes}


def _parts(mode: str, tokens: set[str], special: Sequence[str], lower_case: bool) -> Parts:
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {list(MODES)}, but is {mode!r}.")
    parts = MODES[mode](tokens, special)
    return parts._replace(normalizers=[normalizers.Lowercase(), *parts.normalizers]) if lower_case else parts


def _token(symbol: str, mode: str) -> str:
    """Name of a symbol in `tokenizer.json`: bytes, given as decimal numbers, are named by their characters."""
    return BYTE_CHARACTERS[int(symbol)] if mode == "bytes" and _is_byte(symbol) else symbol


def _is_byte(symbol: str) -> bool:
    return symbol.isascii() and symbol.isdecimal() and int(symbol) < 256 and str(int(symbol)) == symbol


def _ids_of(symbols: Sequence[str], mode: str) -> dict[str, int]:
    """Tokens of a vocabulary with their ids."""
    ids: dict[str, int] = {_token(symbol, mode): index for index, symbol in enumerate(symbols)}
    if len(ids) < len(symbols):
        repeated = [symbol for symbol, count in Counter(symbols).items() if count > 1]
        raise ValueError(f"`symbols` must be distinct, but these are repeated: {repeated[:10]}.")
    return ids


def _special_tokens(ids: Mapping[str, int], mode: str, arguments: dict[str, Any]) -> dict[str, str | None]:
    """The special tokens that have a name; they are taken out of the arguments."""
    unk_token, eos_token = arguments.pop("unk_token", AUTO), arguments.pop("eos_token", AUTO)
    if unk_token == AUTO:
        unk_token = next((token for token in UNKNOWN_TOKENS if token in ids), None)
        if unk_token is None and not (mode == "bytes" and ids.keys() >= set(BYTE_CHARACTERS.values())):
            raise ValueError(
                f"`symbols` must have an unknown token, {' or '.join(UNKNOWN_TOKENS)}, but has neither. Name "
                "another one as `unk_token`, or pass `unk_token=None`: an unknown symbol then raises an error."
            )
    if eos_token == AUTO:
        eos_token = next((token for token in END_TOKENS if token in ids), None)
    others = {name: arguments.pop(name, None) for name in ("bos_token", "pad_token")}
    return {"unk_token": unk_token, "eos_token": eos_token, **others}


def _check_mode(ids: Mapping[str, int], mode: str, special: Sequence[str]) -> None:
    """Refuse a vocabulary of words for a mode that splits text into characters or bytes."""
    if mode not in ("bytes", "characters"):
        return
    ordinary = [token for token in ids if token not in special]
    unreachable = [token for token in ordinary if len(token) > 1]
    if 2 * len(unreachable) > len(ordinary):
        raise ValueError(
            f"`mode` must be 'moses' or 'pretokenized' for a vocabulary of words, such as {unreachable[0]!r}, but is "
            f"{mode!r}."
        )


class FormerNames(TokenizersBackend):
    """Base class whose errors for former arguments and attributes name their replacement.

    It is separate because the library loads tokenizers whose own class defines `__init__` differently.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("tokenizer_object") is None and kwargs.get("tokenizer_file") is None:
            # not checked when loading: files of older releases may contain these arguments
            refuse_arguments(kwargs, TOKENIZER_ARGUMENTS)
            raise TypeError(
                f"`{type(self).__name__}` is not constructed directly. For your own vocabulary: {OWN_VOCABULARY}; for "
                f"an old file: {OLD_VOCABULARY}. See docs/migration.md."
            )
        super().__init__(*args, **kwargs)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name not in TOKENIZER:
                    raise
            raise attribute_error(type(self), name, TOKENIZER)


class TransfoXLTokenizer(FormerNames):
    """A vocabulary of whole symbols and one of four modes that split a text into them.

    | mode | a token is |
    |---|---|
    | `moses` | a word or a punctuation mark of raw English text, as in transformers 4 |
    | `pretokenized` | a string between white space: WikiText's files, number files of enwik8, other corpora |
    | `characters` | a character; a space is `_` if the vocabulary has only that (text8) |
    | `bytes` | a byte of the text in UTF-8, given by its decimal number in the vocabulary (enwik8) |

    Built by [`~TransfoXLTokenizer.from_vocabulary`] or loaded with `from_pretrained`; the mode is saved. It is a plain
    `TokenizersBackend`: its files load without this class and this package. Loading warns if the `config.json` in the
    same folder has another `vocab_size`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def from_vocabulary(
        cls,
        symbols: Sequence[str],
        mode: str = "moses",
        *,
        lower_case: bool = False,
        extra_special_tokens: Sequence[str] = (),
        line_start: str | None = None,
        line_end: str | None = AUTO,
        **kwargs: Any,
    ) -> Self:
        """Build a tokenizer.

        Args:
            symbols (`Sequence[str]`): The vocabulary; the id of a symbol is its index. For `bytes`: decimal numbers.
            mode (`str`, defaults to `"moses"`): `"moses"`, `"pretokenized"`, `"characters"` or `"bytes"`.
            lower_case (`bool`, defaults to `False`): Whether text is lower-cased first; special tokens are not.
            extra_special_tokens (`Sequence[str]`, *optional*): Further tokens that are never split.
            line_start, line_end (`str`, *optional*):
                What [`encode_lines`] writes before and after every line. By default the end token after a line of
                words, nothing for characters and bytes.
            kwargs: Special tokens, which must be in the vocabulary, and arguments of `TokenizersBackend`:

                - `unk_token` (`str`, *optional*): The token of unknown symbols; by default `<unk>` or `<UNK>`, one of
                  which must then be there. With None, an unknown symbol raises an error.
                - `eos_token` (`str`, *optional*): By default `<eos>` or `<S>` if the vocabulary has it.
                - `bos_token`, `pad_token` (`str`, *optional*): By default none.
                - `padding_side`, `model_max_length`, …: Passed to `TokenizersBackend`.

        Raises:
            ValueError: if `symbols` repeat each other, lack a special token or do not fit `mode`.
        """
        ids = _ids_of(symbols, mode)
        named = _special_tokens(ids, mode, kwargs)
        if line_end == AUTO:
            line_end = named["eos_token"] if mode in ("moses", "pretokenized") else None
        special = list(dict.fromkeys([*(token for token in named.values() if token), *extra_special_tokens]))
        if missing := [token for token in [*special, line_start, line_end] if token is not None and token not in ids]:
            raise ValueError(f"Special tokens must be among `symbols`, but these are not: {missing}.")
        _check_mode(ids, mode, special)

        parts = _parts(mode, set(ids), special, lower_case)
        backend = Tokenizer(models.WordLevel(ids, unk_token=named["unk_token"] or ""))
        backend.normalizer = normalizers.Sequence(parts.normalizers)
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts.pre_tokenizers)
        if parts.decoders:  # without any, tokens are joined by spaces
            backend.decoder = decoders.Sequence(parts.decoders)
        return cls(
            tokenizer_object=backend,
            **named,
            extra_special_tokens=[token for token in special if token not in named.values()],
            # saved with the tokenizer, whatever class loads it
            mode=mode,
            lower_case=lower_case,
            line_start=line_start,
            line_end=line_end,
            model_input_names=cls.model_input_names,
            clean_up_tokenization_spaces=False,
            **kwargs,
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *inputs: Any, **kwargs: Any
    ) -> Self:
        """Load a tokenizer as the library does; warns if the model in its folder has another vocabulary size."""
        source = pretrained_model_name_or_path
        if _file_of(source, "tokenizer.json", kwargs) is None:
            raise ValueError(
                f"{source}: has no `tokenizer.json`. The `vocab.pkl` and `vocab.bin` of transformers 2 to 4 are "
                "pickles, which are never loaded; `hf-txl convert` reads them without executing code."
            )
        tokenizer = super().from_pretrained(source, *inputs, **kwargs)
        if (config_file := _file_of(source, "config.json", kwargs)) is not None:
            config = json.loads(Path(config_file).read_text(encoding="utf-8"))
            vocab_size = config.get("vocab_size", config.get("n_token"))
            if vocab_size not in (None, len(tokenizer)):
                warnings.warn(
                    f"{source}: the tokenizer has {len(tokenizer)} tokens, but the model beside it has `vocab_size` "
                    f"{vocab_size}. If the tokenizer was rebuilt, its ids do not match the weights.",
                    stacklevel=2,
                )
        return tokenizer

    @property
    def mode(self) -> str:
        """How texts are split: `"moses"`, `"pretokenized"`, `"characters"` or `"bytes"`."""
        return self.init_kwargs["mode"]

    @property
    def symbols(self) -> list[str]:
        """The vocabulary as [`~TransfoXLTokenizer.from_vocabulary`] takes it: index = id."""
        numbers = {character: str(byte) for byte, character in BYTE_CHARACTERS.items()} if self.mode == "bytes" else {}
        return [numbers.get(token, token) for token in self.convert_ids_to_tokens(list(range(len(self))))]

    def in_mode(self, mode: str) -> Self:
        """The same vocabulary, special tokens and line tokens in another mode."""
        settings = {name: self.init_kwargs[name] for name in ("lower_case", "line_start", "line_end")}
        named = {name: getattr(self, name) for name in ("unk_token", "eos_token", "bos_token", "pad_token")}
        return type(self).from_vocabulary(
            self.symbols, mode, **named, extra_special_tokens=self.extra_special_tokens, **settings
        )

    def _save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> tuple[str, ...]:
        try:
            return super()._save_pretrained(save_directory, *args, **kwargs)
        except Exception as error:
            # for a full disk the library raises a plain `Exception`
            if type(error) is not Exception:
                raise
            raise OSError(f"The tokenizer cannot be written to {save_directory}: {error}") from error

    def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._encode_plus(text, *args, **kwargs)
        except Exception as error:
            if MISSING_UNKNOWN not in str(error):
                raise
            unknown = self._unknown_symbol([text] if isinstance(text, str) else text)
            raise ValueError(
                f"`text` must consist of symbols of the vocabulary, but has {unknown!r}, and the vocabulary has no "
                "unknown token."
            ) from error

    def _unknown_symbol(self, texts: Iterable[str]) -> str | None:
        known = self.get_vocab()
        backend = self.backend_tokenizer
        whole = re.compile("|".join(re.escape(token) for token in self.all_special_tokens) or r"(?!)")
        pieces = (backend.normalizer.normalize_str(piece) for text in texts for piece in whole.split(text))
        tokens = (token for piece in pieces for token, _ in backend.pre_tokenizer.pre_tokenize_str(piece))
        return next((token for token in tokens if token not in known), None)


def _file_of(source: str | os.PathLike[str], name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Path of a file in a model's folder or repository; None if it is missing or cannot be reached."""
    options = {key: kwargs[key] for key in ("cache_dir", "revision", "token", "local_files_only") if key in kwargs}
    try:
        return cached_file(source, name, subfolder=kwargs.get("subfolder") or "", **options)
    except OSError:
        return None


def encode_lines(
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    line_start: str | None = AUTO,
    line_end: str | None = AUTO,
) -> Iterator[list[int]]:
    """Ids of each line, blank ones included, with the tokens that start and end a line.

    As `encode_file` of the original code: `<eos>` after every line of WikiText-103, `<S>` before and after every
    sentence of the One Billion Word corpus, none in enwik8 and text8.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer; those of this package have default line tokens.
        lines (`Iterable[str]`): With line breaks or without. For characters and bytes a line break is a symbol.
        line_start, line_end (`str`, *optional*): Line tokens instead of the defaults; None for no token.
    """
    if isinstance(lines, str):
        raise TypeError("`lines` must be several texts, such as `text.splitlines()`, but is a single one.")
    start, end = line_tokens(tokenizer, line_start, line_end)
    # lines can be split unless tokens depend on their context
    cut = tokenizer.init_kwargs.get("mode") in ("pretokenized", "characters", "bytes")
    line_ids = [*start]
    for batch in _batches(chain.from_iterable(_pieces(line) if cut else [(line, True)] for line in lines)):
        texts = [text for text, _ in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        for ids, (_, is_last) in zip(encoded, batch, strict=True):
            line_ids += ids
            if is_last:
                yield [*line_ids, *end]
                line_ids = [*start]


def line_tokens(
    tokenizer: PreTrainedTokenizerBase, line_start: str | None, line_end: str | None
) -> tuple[list[int], list[int]]:
    """Ids of the tokens before and after every line."""
    ids: list[list[int]] = []
    for name, token in (("line_start", line_start), ("line_end", line_end)):
        token = tokenizer.init_kwargs.get(name) if token == AUTO else token
        tokens = [] if token is None else [token]
        ids.append(cast(list[int], tokenizer.convert_tokens_to_ids(tokens)))
        if tokenizer.convert_ids_to_tokens(ids[-1]) != tokens:
            raise ValueError(f"`{name}` must be in the vocabulary of `tokenizer`, but is {token!r}.")
    return ids[0], ids[1]


def _pieces(line: str) -> Iterator[tuple[str, bool]]:
    """Parts of a very long line (text8 is one line), split before spaces, and whether each is the last."""
    start = 0
    while len(line) - start > BATCH_CHARACTERS and (stop := line.rfind(" ", start + 1, start + BATCH_CHARACTERS)) > 0:
        yield line[start:stop], False
        start = stop
    yield line[start:], True


def _batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_file(
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike[str],
    *,
    line_start: str | None = AUTO,
    line_end: str | None = AUTO,
) -> np.ndarray:
    """Ids of a text file in UTF-8 as one stream, encoded line by line as by [`encode_lines`].

    A byte order mark is skipped. A tokenizer of mode `bytes` without line tokens reads any file, byte by byte.

    Returns:
        `np.ndarray` of shape `(num_tokens,)`, int64, as input of [`TokenStreams`].
    """
    around = line_tokens(tokenizer, line_start, line_end)
    settings = tokenizer.init_kwargs
    if settings.get("mode") == "bytes" and around == ([], []) and not settings.get("lower_case"):
        return _encode_bytes(tokenizer, np.fromfile(path, dtype=np.uint8))
    with decoding_utf8(path), open(path, encoding="utf-8-sig") as lines:
        encoded = encode_lines(tokenizer, lines, line_start=line_start, line_end=line_end)
        return np.fromiter(chain.from_iterable(encoded), dtype=np.int64)


@contextmanager
def decoding_utf8(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise a `ValueError` that names the file and the byte for text that is not UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        # read again, since a reader counts from the start of its buffer
        with open(path, "rb") as file:
            content = file.read()
        try:
            content.decode("utf-8")
            where = str(error)
        except UnicodeDecodeError as first:
            where = f"byte {first.start} is {content[first.start]:#04x} ({first.reason})"
        raise ValueError(f"{path} must be a text in UTF-8, but is not: {where}.") from error


def _encode_bytes(tokenizer: PreTrainedTokenizerBase, content: np.ndarray) -> np.ndarray:
    vocabulary = tokenizer.get_vocab()
    unknown = tokenizer.unk_token_id
    table = np.array([vocabulary.get(BYTE_CHARACTERS[byte], -1) for byte in range(256)], dtype=np.int64)
    if table[ord("\n")] == -1:
        content = content[content != ord("\n")]
    ids = table[content]
    if unknown is None and (ids == -1).any():
        missing = sorted(set(content[ids == -1].tolist()))
        raise ValueError(f"The file has bytes that are not in the vocabulary, which has no unknown token: {missing}.")
    return ids if unknown is None else np.where(ids == -1, unknown, ids)


def build_vocabulary(
    texts: Iterable[str | os.PathLike[str]],
    mode: str = "moses",
    *,
    min_freq: int = 0,
    max_size: int | None = None,
    special: Sequence[str] = ("<eos>", "<unk>"),
    lower_case: bool = False,
) -> list[str]:
    """Symbols of texts: special ones, then the others by decreasing frequency, ties by first appearance.

    The adaptive softmax requires this order, which is that of the original code: with `special=["<eos>"]` the training
    file of WikiText-103 gives the published vocabulary. The result is deterministic.

    Args:
        texts (`Iterable[str | os.PathLike[str]]`):
            A `str` is a text, a path is a file in UTF-8, read line by line; for `bytes` any file, byte by byte.
        mode (`str`, defaults to `"moses"`): Mode of [`TransfoXLTokenizer`] that splits the texts.
        min_freq (`int`, defaults to 0): Symbols that occur less often are omitted.
        max_size (`int`, *optional*): Maximum number of symbols besides the special ones.
        special (`Sequence[str]`, defaults to `("<eos>", "<unk>")`): First symbols; they are never split.
        lower_case (`bool`, defaults to `False`): Whether texts are lower-cased first.

    Returns:
        `list[str]`: Input of [`~TransfoXLTokenizer.from_vocabulary`].
    """
    if isinstance(texts, str | os.PathLike):
        raise TypeError("`texts` must be several texts or paths, such as `[path]`, but is a single one.")
    parts = _parts(mode, UNCOUNTED, special, lower_case)
    normalizer = normalizers.Sequence(parts.normalizers)
    pre_tokenizer = pre_tokenizers.Sequence(parts.pre_tokenizers)
    whole = re.compile("|".join(re.escape(token) for token in special) or r"(?!)")
    counts: Counter[str] = Counter()
    for text in _read(texts, as_bytes=mode == "bytes" and not lower_case):
        if isinstance(text, bytes):
            counts.update({BYTE_CHARACTERS[byte]: count for byte, count in Counter(text).items()})
            continue
        for piece in whole.split(text):
            counts.update(token for token, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(piece)))
    names = {character: str(byte) for byte, character in BYTE_CHARACTERS.items()} if mode == "bytes" else {}
    frequent = sorted((token for token in counts if counts[token] >= min_freq), key=counts.__getitem__, reverse=True)
    return [*special, *(names.get(token, token) for token in frequent[:max_size])]


def _read(texts: Iterable[str | os.PathLike[str]], as_bytes: bool) -> Iterator[str | bytes]:
    """Texts, and files line by line (with `as_bytes` in blocks of bytes) with a progress bar."""
    for text in texts:
        if isinstance(text, str):
            yield text
            continue
        with (
            open(text, "rb") as content,
            io.TextIOWrapper(content, encoding="utf-8-sig") as lines,
            # the bar is shown on terminals only
            logging.tqdm(total=os.path.getsize(text), unit="B", unit_scale=True, desc=str(text), disable=None) as bar,
        ):
            # counted here, since a disabled bar of the library has no count
            shown = 0
            pieces = iter(lambda: content.read(BATCH_CHARACTERS), b"") if as_bytes else lines
            with decoding_utf8(text):
                for piece in pieces:
                    bar.update(content.tell() - shown)
                    shown = content.tell()
                    yield piece


__all__ = ["TransfoXLTokenizer", "build_vocabulary", "encode_file", "encode_lines"]

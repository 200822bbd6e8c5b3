"""Tokenizers of Transformer-XL: raw text by the Moses rules, text split at white space, characters, bytes.

What a mode does is written in the terms of the `tokenizers` library (normalizer, pre-tokenizer, vocabulary, decoder),
so that the saved `tokenizer.json` gives the same ids where this file is not at hand. The file adds how one is built,
from a vocabulary or from texts, and what the originals did around it: tokens that begin and end each line.

`moses` follows `TransfoXLTokenizer` of transformers 4: punctuation is normalised, words are split by the Moses rules
with aggressive dash splitting, numbers at their commas and points. `docs/tokenizers.md` lists where it differs. The
other modes follow `utils/vocabulary.py` and the data scripts of the original code (`pytorch/` in
kimiyoung/transformer-xl).
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

# the value of an argument that is taken from the vocabulary or from the tokenizer's files
AUTO = "auto"
UNKNOWN_TOKENS = ("<unk>", "<UNK>")
# the second one begins and ends every sentence of the One Billion Word corpus
END_TOKENS = ("<eos>", "<S>")
# the library's error for an unknown word where there is no unknown token
MISSING_UNKNOWN = "Missing [UNK]"
# how much text is encoded at a time
BATCH_CHARACTERS = 1 << 18

# moses: characters
# Han and Hangul are no letters to Moses, so that each of their characters is a token.
LETTER = r"[\p{Alphabetic}&&[^\p{Han}\p{Hangul}]]"
DIGIT = r"\p{Nd}"
ALNUM = rf"[{LETTER}{DIGIT}]"
# what the detokeniser writes without spaces
IDEOGRAPH = r"[\p{Han}\p{Hangul}\p{Hiragana}\p{Katakana}\p{Bopomofo}]"
CLOSING = r",.?!:;\\%}\])"

# moses: abbreviations that keep their full stop, and those that keep it before a number
ABBREVIATIONS = (
    "[A-Z] Mr Mrs Ms MR MRS MS MM Messrs Mlle Mme Dr Drs DR Prof Hon Hr Sr Msgr Rev St Rt Ph "  # with names
    "Adm Brig Capt Cmdr Col Comdr Cpl Ens Gen Lt Maj Pfc Pvt Sfc Sgt "  # ranks
    "Asst Bart Con Gov Insp Rep Reps Sen Sens Supt Surg "  # offices
    "Adj Adv Bldg Bros Corp Hosp Nos Nr Op Ord Res Rs rev v vs "
    "Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec"
)
NUMBER_ABBREVIATIONS = "No Art pp"

# moses: what is replaced in the text, in this order
MOSES_TEXT = (
    (r"[`']{2}", ' " '),
    (r"[`´‘’‚]", "'"),
    (r"''|[„“”«»]", '"'),
    (r"…", "..."),
    (r"—", " - "),
    (r"–", "-"),
    # a quotation mark goes behind full stops and commas that follow it: one more there, then none here
    (r'"[.,]+\K', '"'),
    (r'"(?=[.,]+")', ""),
    (r"[\x00-\x08\x0E-\x1F]", ""),
    (rf"(?<={ALNUM})-(?={ALNUM})", " @-@ "),
    (rf"(?<={DIGIT}),(?={DIGIT})", " @,@ "),
    (rf"(?<={DIGIT})\.(?={DIGIT})", " @.@ "),
)

# moses: what a token is, the first that fits
# A piece of a word has no full stop. An apostrophe splits a word, but not between a digit and a letter ("50'S").
PIECE = rf"(?:[{ALNUM}-]|(?<={DIGIT})'(?=[{LETTER}&&[^s]]))+"
WORD_ENDS = rf"(?![{ALNUM}.-])"
# "it" + "'s"; such an apostrophe needs both letters for itself: "rock" + "'n'roll"; "1980" + "'s"; "<unk>" + "'s",
# where the text behind the special token is looked at alone
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
    # a word keeps it if the next begins in lower case, since the sentence goes on: "approx. ten"
    rf"{CONTRACTION}?(?>{PIECE}(?:\.{PIECE})*|(?:\.{PIECE})+)(?:\.(?=\s+\p{{Lowercase}}))?",
    r"\S",
)

# moses: joining tokens, with a space before and after each, in this order
# an apostrophe that is a token, and what has none
QUOTE = rf"(?<= )'(?=[ {CLOSING}])"
NO_QUOTE = rf"(?>(?:[^']|(?!{QUOTE})')*)"
MOSES_JOINS = (
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (rf"(?<!\A) (?='{LETTER})", ""),
    (rf" (?=[{CLOSING}]+ )", ""),
    # Quotation marks come in pairs: no space behind the first of two, none before the second. The search goes on where
    # the last match ended (`\G`), between pairs. An apostrophe behind an "s" begins no quotation: "classes'".
    (rf"(?:\A|\G(?!\A){NO_QUOTE}')(?:{NO_QUOTE}(?<=s )')*{NO_QUOTE}(?<!s )\K' ?", "'"),
    (rf" (?='[ {CLOSING}])", ""),
    (r"""(?:\A|\G(?!\A)[^"]*")[^"]*\K" ?""", '"'),
    (r"""(?:\A|\G(?!\A))[^"]*"[^"]*?\K ?\"""", '"'),
    (r"""(?<![^ "'])[\p{Sc}(\[{¿¡]+\K """, ""),
    (rf"(?<={IDEOGRAPH}) (?={IDEOGRAPH})", ""),
    (r"\A +| +\z", ""),
)

# white space as Python's `str.split` has it
SPACES = r"[\s\x1C-\x1F]+"

# bytes: the printable character that the library writes for each byte
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
BYTE_CHARACTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}

# characters and bytes: line breaks that the vocabulary does not have are left out, as in enwik8
NO_NEWLINE = normalizers.Replace("\n", "")
# … and are kept where a vocabulary is still to be counted
UNCOUNTED = {" ", "\n", BYTE_CHARACTERS[ord("\n")]}


class Parts(NamedTuple):
    """What a mode puts around the vocabulary; all lists may be empty."""

    normalizers: list[Any]
    pre_tokenizers: list[Any]
    decoders: list[Any]


def _replacements(table: Iterable[tuple[str, str]], kind: Any) -> list[Any]:
    return [kind.Replace(Regex(pattern), content) for pattern, content in table]


def _moses(tokens: set[str], special: Sequence[str]) -> Parts:
    # a special token in another case is not special, but not split either
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
    """How a symbol of a vocabulary is called in `tokenizer.json`: bytes, decimal numbers, by their characters."""
    return BYTE_CHARACTERS[int(symbol)] if mode == "bytes" and _is_byte(symbol) else symbol


def _is_byte(symbol: str) -> bool:
    return symbol.isascii() and symbol.isdecimal() and int(symbol) < 256 and str(int(symbol)) == symbol


class FormerNames(TokenizersBackend):
    """Former arguments and attributes raise errors that name the new way.

    A class of its own, because the library loads a tokenizer whose class has an `__init__` in another way.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("tokenizer_object") is None and kwargs.get("tokenizer_file") is None:
            # a file that was saved by an older release may bring these with it
            refuse_arguments(kwargs, TOKENIZER_ARGUMENTS)
            raise TypeError(
                f"`{type(self).__name__}` is not called itself. For a vocabulary of your own: {OWN_VOCABULARY}; for "
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
    """A vocabulary of whole symbols, and one of four ways to cut a text into them.

    | mode | a token is |
    |---|---|
    | `moses` | a word or a punctuation mark of raw English text, as in transformers 4 |
    | `pretokenized` | what stands between white space: WikiText's files, number files of enwik8, other corpora |
    | `characters` | a character; a space is `_` if the vocabulary has only that (text8) |
    | `bytes` | a byte of the text in UTF-8, called by its decimal number in a vocabulary (enwik8) |

    Made by [`~TransfoXLTokenizer.from_vocabulary`] or loaded with `from_pretrained`; the mode is saved. It is a plain
    `TokenizersBackend`: neither this class nor this package is needed to load its files. Loading warns if the
    `config.json` beside them has another `vocab_size`.
    """

    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def from_vocabulary(
        cls,
        symbols: Sequence[str],
        mode: str = "moses",
        *,
        lower_case: bool = False,
        unk_token: str | None = AUTO,
        eos_token: str | None = AUTO,
        bos_token: str | None = None,
        pad_token: str | None = None,
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
            unk_token (`str`, *optional*):
                The token of unknown symbols; by default `<unk>` or `<UNK>`, one of which must then be there. With
                None a text with an unknown symbol raises.
            eos_token (`str`, *optional*): By default `<eos>` or `<S>` if the vocabulary has it.
            bos_token, pad_token (`str`, *optional*): Must be in the vocabulary, as all special tokens.
            extra_special_tokens (`Sequence[str]`, *optional*): Further tokens that are never split.
            line_start, line_end (`str`, *optional*):
                What [`encode_lines`] writes before and after every line. By default the end token after a line of
                words, nothing for characters and bytes.
            kwargs: Passed to `TokenizersBackend`: `padding_side`, `model_max_length`, ….
        """
        ids: dict[str, int] = {_token(symbol, mode): index for index, symbol in enumerate(symbols)}
        if len(ids) < len(symbols):
            repeated = [symbol for symbol, count in Counter(symbols).items() if count > 1]
            raise ValueError(f"`symbols` must differ from each other, but these are repeated: {repeated[:10]}.")
        if unk_token == AUTO:
            unk_token = next((token for token in UNKNOWN_TOKENS if token in ids), None)
            if unk_token is None and not (mode == "bytes" and ids.keys() >= set(BYTE_CHARACTERS.values())):
                raise ValueError(
                    f"`symbols` must have an unknown token, {' or '.join(UNKNOWN_TOKENS)}, but has neither. Name "
                    "another one as `unk_token`, or pass `unk_token=None`: text with an unknown symbol then raises."
                )
        if eos_token == AUTO:
            eos_token = next((token for token in END_TOKENS if token in ids), None)
        if line_end == AUTO:
            line_end = eos_token if mode in ("moses", "pretokenized") else None
        named = {"unk_token": unk_token, "eos_token": eos_token, "bos_token": bos_token, "pad_token": pad_token}
        special = list(dict.fromkeys([*(token for token in named.values() if token), *extra_special_tokens]))
        if missing := [token for token in [*special, line_start, line_end] if token is not None and token not in ids]:
            raise ValueError(f"Special tokens must be among `symbols`, but these are not: {missing}.")
        if mode in ("bytes", "characters"):
            ordinary = [token for token in ids if token not in special]
            unreachable = [token for token in ordinary if len(token) > 1]
            if 2 * len(unreachable) > len(ordinary):
                raise ValueError(
                    f"`mode` must be 'moses' or 'pretokenized' for a vocabulary of words, such as "
                    f"{unreachable[0]!r}, but is {mode!r}."
                )

        parts = _parts(mode, set(ids), special, lower_case)
        backend = Tokenizer(models.WordLevel(ids, unk_token=unk_token or ""))
        backend.normalizer = normalizers.Sequence(parts.normalizers)
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts.pre_tokenizers)
        if parts.decoders:  # without any, tokens are joined by spaces
            backend.decoder = decoders.Sequence(parts.decoders)
        return cls(
            tokenizer_object=backend,
            **named,
            extra_special_tokens=[token for token in special if token not in named.values()],
            # what follows is saved with the tokenizer, for classes other than this one too
            mode=mode,
            lower_case=lower_case,
            line_start=line_start,
            line_end=line_end,
            model_input_names=cls.model_input_names,
            clean_up_tokenization_spaces=False,
            **kwargs,
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *inputs: Any, **kwargs: Any) -> Self:
        """Load a tokenizer as the library does, and warn if the model beside it has another vocabulary size."""
        source = pretrained_model_name_or_path
        if _file_of(source, "tokenizer.json", kwargs) is None:
            raise ValueError(
                f"{source}: has no `tokenizer.json`. What transformers 2 to 4 wrote, `vocab.pkl` and `vocab.bin`, are "
                "pickles, which are never loaded; `hf-txl convert` reads them without running anything."
            )
        tokenizer = super().from_pretrained(source, *inputs, **kwargs)
        if (config_file := _file_of(source, "config.json", kwargs)) is not None:
            config = json.loads(Path(config_file).read_text(encoding="utf-8"))
            vocab_size = config.get("vocab_size", config.get("n_token"))
            if vocab_size not in (None, len(tokenizer)):
                warnings.warn(
                    f"{source}: the tokenizer has {len(tokenizer)} tokens, but the model beside it has `vocab_size` "
                    f"{vocab_size}. If the tokenizer was built anew, its ids do not fit the weights.",
                    stacklevel=2,
                )
        return tokenizer

    @property
    def mode(self) -> str:
        return self.init_kwargs["mode"]

    @property
    def symbols(self) -> list[str]:
        """The vocabulary as [`~TransfoXLTokenizer.from_vocabulary`] takes it: index = id."""
        numbers = {character: str(byte) for byte, character in BYTE_CHARACTERS.items()} if self.mode == "bytes" else {}
        return [numbers.get(token, token) for token in self.convert_ids_to_tokens(list(range(len(self))))]

    def in_mode(self, mode: str) -> Self:
        """The same vocabulary, special tokens and lines, with another way to cut a text."""
        settings = {name: self.init_kwargs[name] for name in ("lower_case", "line_start", "line_end")}
        named = {name: getattr(self, name) for name in ("unk_token", "eos_token", "bos_token", "pad_token")}
        return type(self).from_vocabulary(
            self.symbols, mode, **named, extra_special_tokens=self.extra_special_tokens, **settings
        )

    def _save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        try:
            return super()._save_pretrained(save_directory, *args, **kwargs)
        except Exception as error:
            # what the library raises for a full disk has no class of its own
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
                f"The text has the symbol {unknown!r}, which is not in the vocabulary, and neither is a token for "
                "unknown symbols."
            ) from error

    def _unknown_symbol(self, texts: Iterable[str]) -> str | None:
        known = self.get_vocab()
        backend = self.backend_tokenizer
        whole = re.compile("|".join(re.escape(token) for token in self.all_special_tokens) or r"(?!)")
        pieces = (backend.normalizer.normalize_str(piece) for text in texts for piece in whole.split(text))
        tokens = (token for piece in pieces for token, _ in backend.pre_tokenizer.pre_tokenize_str(piece))
        return next((token for token in tokens if token not in known), None)


def _file_of(source: str | os.PathLike, name: str, kwargs: Mapping[str, Any]) -> str | None:
    """The path of a file of a model's folder or repository; None if it has none, or cannot be reached."""
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
    """Ids of one line after the other, each with the tokens that begin and end a line, blank lines too.

    This is what `encode_file` of the original code does: `<eos>` after every line of WikiText-103, `<S>` before and
    after every sentence of the One Billion Word corpus, nothing in enwik8 and text8.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Any tokenizer; one of this package knows its own line tokens.
        lines (`Iterable[str]`): With line breaks or without. For characters and bytes a line break is a symbol.
        line_start, line_end (`str`, *optional*): Other line tokens; None for no token.
    """
    if isinstance(lines, str):
        raise TypeError("`lines` must be several texts, such as `text.splitlines()`, but is a single one.")
    start, end = _line_tokens(tokenizer, line_start, line_end)
    # where a token depends on its neighbours, a line cannot be cut
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


def _line_tokens(
    tokenizer: PreTrainedTokenizerBase, line_start: str | None, line_end: str | None
) -> tuple[list[int], list[int]]:
    """The ids before and after every line."""
    ids: list[list[int]] = []
    for name, token in (("line_start", line_start), ("line_end", line_end)):
        token = tokenizer.init_kwargs.get(name) if token == AUTO else token
        tokens = [] if token is None else [token]
        ids.append(cast(list[int], tokenizer.convert_tokens_to_ids(tokens)))
        if tokenizer.convert_ids_to_tokens(ids[-1]) != tokens:
            raise ValueError(f"`{name}` must be in the vocabulary of `tokenizer`, but is {token!r}.")
    return ids[0], ids[1]


def _pieces(line: str) -> Iterator[tuple[str, bool]]:
    """The parts of a very long line (text8 is one), cut before a space, and whether each is the last."""
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
    path: str | os.PathLike,
    *,
    line_start: str | None = AUTO,
    line_end: str | None = AUTO,
) -> np.ndarray:
    """The ids of a whole text file in UTF-8 as one stream, line by line as [`encode_lines`] gives them.

    A byte order mark at its beginning is no part of the text.

    A tokenizer of mode `bytes` without line tokens reads any file, byte by byte.

    Returns:
        `np.ndarray` of shape `(num_tokens,)`, int64: what [`TokenStreams`] takes.
    """
    around = _line_tokens(tokenizer, line_start, line_end)
    settings = tokenizer.init_kwargs
    if settings.get("mode") == "bytes" and around == ([], []) and not settings.get("lower_case"):
        return _encode_bytes(tokenizer, np.fromfile(path, dtype=np.uint8))
    with _utf8(path), open(path, encoding="utf-8-sig") as lines:
        encoded = encode_lines(tokenizer, lines, line_start=line_start, line_end=line_end)
        return np.fromiter(chain.from_iterable(encoded), dtype=np.int64)


@contextmanager
def _utf8(path: str | os.PathLike) -> Iterator[None]:
    """Name the file that is not what it must be."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8, but is not: {error}.") from error


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
    texts: Iterable[str | os.PathLike],
    mode: str = "moses",
    *,
    min_freq: int = 0,
    max_size: int | None = None,
    special: Sequence[str] = ("<eos>", "<unk>"),
    lower_case: bool = False,
) -> list[str]:
    """Count the symbols of texts: the special ones first, then by falling frequency, then by first appearance.

    That is the order which the adaptive softmax needs, and that of the original code: with `special=["<eos>"]` the
    training file of WikiText-103 gives its vocabulary. The same texts always give the same list.

    Args:
        texts (`Iterable[str | os.PathLike]`):
            A `str` is a text, a path is a file in UTF-8, read line by line; for `bytes` any file, byte by byte.
        mode (`str`, defaults to `"moses"`): How texts are cut, as in [`TransfoXLTokenizer`].
        min_freq (`int`, defaults to 0): Symbols that occur less often are left out.
        max_size (`int`, *optional*): How many symbols at most besides the special ones.
        special (`Sequence[str]`, defaults to `("<eos>", "<unk>")`): First symbols; they are never split.
        lower_case (`bool`, defaults to `False`): Whether texts are lower-cased first.

    Returns:
        `list[str]`: What [`~TransfoXLTokenizer.from_vocabulary`] takes.
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


def _read(texts: Iterable[str | os.PathLike], as_bytes: bool) -> Iterator[str | bytes]:
    """The texts, files by their lines and with a progress bar; `as_bytes`: files as [`encode_file`] reads bytes."""
    for text in texts:
        if isinstance(text, str):
            yield text
            continue
        with (
            open(text, "rb") as content,
            io.TextIOWrapper(content, encoding="utf-8-sig") as lines,
            # a bar on terminals only
            logging.tqdm(total=os.path.getsize(text), unit="B", unit_scale=True, desc=str(text), disable=None) as bar,
        ):
            # counted here: where bars are switched off, the library's has no count
            shown = 0
            pieces = iter(lambda: content.read(BATCH_CHARACTERS), b"") if as_bytes else lines
            with _utf8(text):
                for piece in pieces:
                    bar.update(content.tell() - shown)
                    shown = content.tell()
                    yield piece


__all__ = ["TransfoXLTokenizer", "build_vocabulary", "encode_file", "encode_lines"]

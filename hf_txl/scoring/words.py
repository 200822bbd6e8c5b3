"""Texts as tokens and as words, with their places in the original text."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..tokenization_transfo_xl import AUTO, line_tokens

# how words are found in a text
WORDS = {
    # the field's default for reading times: what stands between white space
    "whitespace": re.compile(r"\S+"),
    # letters and digits with apostrophes and hyphens inside; each run of other marks is a word of its own
    "punctuation": re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]+"),
}
LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")
BYTE_ORDER_MARK = "\ufeff"


class Token(NamedTuple):
    """A token of a text: its id, the characters from `start` to `end`, and whether it begins or ends a line."""

    id: int
    start: int
    end: int
    is_line_token: bool = False


def encode_text(tokenizer: Any, text: str, line_start: str | None = AUTO, line_end: str | None = AUTO) -> list[Token]:
    """Tokens of a text with their characters, as [`~hf_txl.tokenization_transfo_xl.encode_lines`] encodes its lines.

    Every line break is one line break, also `\\r\\n`; a byte-order mark at the beginning is skipped.
    """
    before, after = line_tokens(tokenizer, line_start, line_end)
    keeps_breaks = tokenizer.init_kwargs.get("mode") in ("characters", "bytes")
    tokens = []
    position = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
    while position < len(text):
        found = LINE.match(text, position)
        assert found is not None
        (line, ending), end = found.groups(), found.end()
        tokens += [Token(id_, position, position, True) for id_ in before]
        encoded = tokenizer(
            line + "\n" if keeps_breaks and ending else line, add_special_tokens=False, return_offsets_mapping=True
        )
        for id_, (first, last) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            # the line break, which may be two characters long
            stop = end if last > len(line) else position + last
            tokens.append(Token(id_, position + first, stop))
        tokens += [Token(id_, found.end(1), end, True) for id_ in after]
        position = end
    return tokens


def words_of(text: str, tokens: Sequence[Token], rule: str) -> tuple[list[tuple[int, int]], list[int | None]]:
    """Words of a text, and for each token the index of its word.

    A token belongs to the word that holds its first character other than white space. White space belongs to the word
    before it, since a word is complete only there (the boundary rule of [Pimentel and Meister,
    2024](https://arxiv.org/abs/2406.14561)); at the beginning of a text, to the first word. Tokens that begin or end a
    line belong to no word.
    """
    spans = [found.span() for found in WORDS[rule].finditer(text.replace(BYTE_ORDER_MARK, " "))]
    places: list[int | None] = []
    word = 0
    for token in tokens:
        if token.is_line_token or not spans:
            places.append(None)
            continue
        piece = text[token.start : token.end]
        inside = token.start + len(piece) - len(piece.lstrip())
        if inside < token.end:
            while word + 1 < len(spans) and spans[word + 1][0] <= inside:
                word += 1
        places.append(word)
    return spans, places


def leading_space_tokens(tokenizer: Any) -> list[int]:
    """Ids of tokens that begin with a space, where a vocabulary has words with it (`Ġword`, `▁word`); else none."""
    if tokenizer.init_kwargs.get("mode") is not None:
        return []
    found = [id_ for token, id_ in tokenizer.get_vocab().items() if token[:1] in ("Ġ", "▁")]
    return sorted(found) if len(found) > 1 else []

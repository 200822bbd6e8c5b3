"""Surprisal of the tokens and words of texts, with their places in the original text.

The surprisal of a token is minus the logarithm of its probability given everything before it that the memory holds
([Hale, 2001](https://aclanthology.org/N01-1021)). That of a word is the sum over its tokens.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from ..data import check_sizes
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..tokenization_transfo_xl import AUTO, line_tokens
from .files import check_scorer
from .reading import batches_by_length, inference
from .sequences import set_losses, token_losses

# how words are found in a text
WORDS = {
    # the field's default for reading times: what stands between white space
    "whitespace": re.compile(r"\S+"),
    # letters and digits with apostrophes and hyphens inside; each run of other marks is a word of its own
    "punctuation": re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]+"),
}
UNITS = {"nats": 1.0, "bits": math.log(2)}
MEMORIES = ("fresh", "running")
LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|\Z)")
BYTE_ORDER_MARK = "\ufeff"


class Token(NamedTuple):
    """A token of a text: its id, the characters from `start` to `end`, and whether it begins or ends a line."""

    id: int
    start: int
    end: int
    is_line_token: bool = False


@dataclass(frozen=True)
class TokenScore:
    """Surprisal of a token.

    Args:
        token (`str`): The vocabulary's entry.
        start, end (`int`): Its characters in the text; none for a token that begins or ends a line without a break.
        surprisal (`float`, *optional*): Bits or nats; None for a first token, which nothing precedes.
        is_unknown (`bool`): Whether it is the unknown token.
        word (`int`, *optional*): Index of its word; None for a token that begins or ends a line.
    """

    token: str
    start: int
    end: int
    surprisal: float | None
    is_unknown: bool
    word: int | None


@dataclass(frozen=True)
class WordScore:
    """Surprisal of a word.

    Args:
        word (`str`): `text[start:end]`.
        start, end (`int`): Its characters.
        surprisal (`float`, *optional*): Sum over its tokens in bits or nats; None if one of them has none.
        num_tokens (`int`): Its tokens.
        has_unknown (`bool`): Whether one of them is the unknown token, whose probability is that of all unknown words.
    """

    word: str
    start: int
    end: int
    surprisal: float | None
    num_tokens: int
    has_unknown: bool


@dataclass(frozen=True)
class TextScore:
    """Tokens and words of a text, in order."""

    text: str
    tokens: list[TokenScore]
    words: list[WordScore]

    @property
    def total(self) -> float:
        """Sum of all surprisals of tokens."""
        return math.fsum(token.surprisal for token in self.tokens if token.surprisal is not None)


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


def score_texts(
    model: TransfoXLForCausalLM,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    memory: str = "fresh",
    first_token_after: str | None = None,
    unit: str = "bits",
    words: str = "whitespace",
    line_start: str | None = AUTO,
    line_end: str | None = AUTO,
    batch_size: int = 16,
    segment_length: int = 512,
    progress: bool = False,
    **settings: Any,
) -> list[TextScore]:
    """Surprisal of each token and word of texts.

    In vocabularies whose words begin with a space (`Ġword`), only the next token tells that a word has ended. There
    the probability of that end is moved from the next word to this one (Pimentel and Meister, 2024; [Oh and Schuler,
    2024](https://arxiv.org/abs/2406.10851)); scores of tokens are not changed.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        tokenizer: Its tokenizer, a fast one.
        texts (`list[str]`): Texts of any lengths, also empty ones.
        memory (`str`, defaults to `"fresh"`):
            `"fresh"`: each text begins with a fresh memory, and its score does not depend on the others.
            `"running"`: the texts are one stream in this order, and each is scored given those before it.
        first_token_after (`str`, *optional*):
            Token to put before a text, or before the stream, so that its first token has a surprisal: often `"<eos>"`.
            Default: the first token has none.
        unit (`str`, defaults to `"bits"`): `"bits"` or `"nats"`.
        words (`str`, defaults to `"whitespace"`):
            What a word is: `"whitespace"`: the characters between white space, punctuation included; `"punctuation"`:
            letters and digits, with apostrophes and hyphens inside, and each run of other marks.
        line_start, line_end (`str`, *optional*): Tokens around each line instead of the tokenizer's; None for none.
        batch_size (`int`, defaults to 16): Texts read together with a fresh memory.
        segment_length (`int`, defaults to 512): Maximum number of tokens of a text read in one call.
        progress (`bool`, defaults to `False`): Whether to show a progress bar.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).

    Returns:
        `list[TextScore]`, in the order of the texts.

    Raises:
        ValueError, TypeError: for arguments that are not as described; the message names the argument.

    Example:

    ```python
    >>> (score,) = score_texts(model, tokenizer, ["The old man the boat."], first_token_after="<eos>")
    >>> [(word.word, word.surprisal) for word in score.words]
    ```
    """
    for name, value, known in (("memory", memory, MEMORIES), ("unit", unit, UNITS), ("words", words, WORDS)):
        if value not in known:
            raise ValueError(f"`{name}` must be one of {list(known)}, but is {value!r}.")
    if isinstance(texts, str):
        raise TypeError("`texts` must be several texts, such as `[text]`, but is a single one.")
    check_sizes(batch_size=batch_size, segment_length=segment_length)
    check_scorer(model, tokenizer)
    prefix, _ = line_tokens(tokenizer, first_token_after, None)
    encoded = [encode_text(tokenizer, text, line_start, line_end) for text in texts]
    read = _Reader(model, segment_length, settings, _boundary_tokens(tokenizer, encoded))
    ids = [torch.tensor([token.id for token in tokens], dtype=torch.long) for tokens in encoded]
    start = torch.tensor(prefix, dtype=torch.long)
    scored: list[_Nats] = []
    with inference(model), tqdm(total=len(texts), unit="text", desc="scoring", disable=not progress) as bar:
        if memory == "running":
            (row,) = read([torch.cat([start, *ids])])
            sizes = [len(each) for each in ids]
            begins = [len(start) + sum(sizes[:index]) for index in range(len(sizes))]
            scored = [row.part(begin, size) for begin, size in zip(begins, sizes, strict=True)]
            bar.update(len(texts))
        else:
            found: dict[int, _Nats] = {}
            for indices in batches_by_length(ids, batch_size):
                rows = read([torch.cat([start, ids[index]]) for index in indices])
                for index, row in zip(indices, rows, strict=True):
                    found[index] = row.part(len(start), len(ids[index]))
                bar.update(len(indices))
            scored = [found[index] for index in range(len(ids))]
    return [
        _text_score(tokenizer, text, tokens, nats, unit, words, read.boundaries)
        for text, tokens, nats in zip(texts, encoded, scored, strict=True)
    ]


def _boundary_tokens(tokenizer: Any, encoded: list[list[Token]]) -> set[int]:
    """Tokens before which a word has ended, where a vocabulary has words with leading spaces; else none."""
    begins = leading_space_tokens(tokenizer)
    return {*begins, *(token.id for tokens in encoded for token in tokens if token.is_line_token)} if begins else set()


class _Nats(NamedTuple):
    """Surprisals in nats: of each token, and of the end of a word before each token and at the end."""

    tokens: list[float | None]
    ends: list[float]

    def part(self, start: int, length: int) -> "_Nats":
        return _Nats(self.tokens[start : start + length], self.ends[start : start + length + 1])


class _Reader:
    """Reads rows of ids, longest first, each with a fresh memory."""

    def __init__(
        self, model: TransfoXLForCausalLM, segment_length: int, settings: dict[str, Any], boundaries: set[int]
    ):
        self.model, self.segment_length, self.settings, self.boundaries = model, segment_length, settings, boundaries

    def __call__(self, rows: list[torch.Tensor]) -> list[_Nats]:
        arguments = (self.model, rows, self.segment_length, self.settings)
        # rows of fewer than two tokens have no losses
        losses = [row.tolist() for row in token_losses(*arguments)]
        losses += [[] for _ in rows[len(losses) :]]
        ends = [row.tolist() for row in set_losses(*arguments, sorted(self.boundaries))] if self.boundaries else []
        ends += [[] for _ in rows[len(ends) :]]
        return [
            _Nats([None, *row_losses][: len(row)], [math.nan, *row_ends])
            for row, row_losses, row_ends in zip(rows, losses, ends, strict=True)
        ]


def _text_score(
    tokenizer: Any, text: str, tokens: list[Token], nats: _Nats, unit: str, rule: str, boundaries: set[int]
) -> TextScore:
    """Put tokens and words together."""
    spans, places = words_of(text, tokens, rule)
    names = tokenizer.convert_ids_to_tokens([token.id for token in tokens])
    scored = [
        TokenScore(
            name,
            token.start,
            token.end,
            None if loss is None else loss / UNITS[unit],
            token.id == tokenizer.unk_token_id,
            place,
        )  # fmt: skip
        for name, token, loss, place in zip(names, tokens, nats.tokens, places, strict=True)
    ]
    words = []
    for index, (start, end) in enumerate(spans):
        own = [position for position, place in enumerate(places) if place == index]
        losses = [nats.tokens[position] for position in own]
        surprisal = None if None in losses else math.fsum(loss for loss in losses if loss is not None)
        if surprisal is not None and boundaries and own:
            surprisal += _end_of_word(tokens, nats, own[0], own[-1] + 1, boundaries)
        words.append(
            WordScore(
                text[start:end],
                start,
                end,
                None if surprisal is None else surprisal / UNITS[unit],
                len(own),
                any(scored[position].is_unknown for position in own),
            )  # fmt: skip
        )
    return TextScore(text, scored, words)


def _end_of_word(tokens: list[Token], nats: _Nats, first: int, behind: int, boundaries: set[int]) -> float:
    """Nats to add to a word: those of its own end, less those of the end before it, which its first token holds."""
    added = nats.ends[behind] if behind == len(tokens) or tokens[behind].id in boundaries else 0.0
    return added - (nats.ends[first] if first > 0 and tokens[first].id in boundaries else 0.0)


__all__ = ["TextScore", "Token", "TokenScore", "WordScore", "encode_text", "score_texts", "words_of"]

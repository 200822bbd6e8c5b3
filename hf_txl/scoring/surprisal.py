"""Surprisal of the tokens and words of texts.

The surprisal of a token is minus the logarithm of its probability given everything before it that the memory holds
([Hale, 2001](https://aclanthology.org/N01-1021)). That of a word is the sum over its tokens.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from ..data import check_sizes
from ..memory_transfo_xl import TransfoXLMemory
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..tokenization_transfo_xl import AUTO, line_tokens
from .files import check_scorer
from .reading import batches_by_length, inference
from .sequences import set_losses, token_losses
from .words import WORDS, Token, encode_text, leading_space_tokens, words_of

UNITS = {"nats": 1.0, "bits": math.log(2)}
MEMORIES = ("fresh", "running")


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


@dataclass(frozen=True)
class SurprisalOptions:
    """Options of [`score_texts`], which describes them; checked.

    Raises:
        ValueError: for values that are not as described; the message names the argument.
    """

    memory: str = "fresh"
    first_token_after: str | None = None
    unit: str = "bits"
    words: str = "whitespace"
    line_start: str | None = AUTO
    line_end: str | None = AUTO
    batch_size: int = 16
    segment_length: int = 512

    def __post_init__(self) -> None:
        for name, known in (("memory", MEMORIES), ("unit", UNITS), ("words", WORDS)):
            if getattr(self, name) not in known:
                raise ValueError(f"`{name}` must be one of {list(known)}, but is {getattr(self, name)!r}.")
        check_sizes(batch_size=self.batch_size, segment_length=self.segment_length)


def score_texts(
    model: TransfoXLForCausalLM, tokenizer: Any, texts: Sequence[str], *, progress: bool = False, **options: Any
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
        mem_len, clamp_len, same_length, memory_init (*optional*): Arguments of [`TransfoXLMemory`].

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
    if isinstance(texts, str):
        raise TypeError("`texts` must be several texts, such as `[text]`, but is a single one.")
    return TextScorer(model, tokenizer, **options)(texts, progress=progress)


class _Nats(NamedTuple):
    """Surprisals in nats: of each token, and of the end of a word before each token and at the end."""

    tokens: list[float | None]
    ends: list[float]

    def part(self, start: int, length: int) -> "_Nats":
        return _Nats(self.tokens[start : start + length], self.ends[start : start + length + 1])


class TextScorer:
    """Scores of one list of texts after another. With a running memory they are one stream.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        tokenizer: Its tokenizer, a fast one.
        options: As for [`score_texts`].

    Attributes:
        options, settings: Those of the surprisal and of the memory.
        is_stream (`bool`): Whether the memory is a running one.
        stream ([`TransfoXLMemory`]): With a running memory: that of all tokens so far but the last.
        last_ids (`list[int]`): The last token so far, which predicts the next one; none if there is none.
    """

    def __init__(self, model: TransfoXLForCausalLM, tokenizer: Any, **options: Any):
        check_scorer(model, tokenizer)
        self.model, self.tokenizer = model, tokenizer
        own = {each.name for each in fields(SurprisalOptions)}
        self.options = SurprisalOptions(**{name: value for name, value in options.items() if name in own})
        self.settings = {name: value for name, value in options.items() if name not in own}
        self.is_stream = self.options.memory == "running"
        self.stream: TransfoXLMemory = model.init_memory(1, **self.settings)
        self.last_ids, _ = line_tokens(tokenizer, self.options.first_token_after, None)
        # tokens before which a word has ended, where words begin with a space
        begins = leading_space_tokens(tokenizer)
        lines = line_tokens(tokenizer, self.options.line_start, self.options.line_end)
        self.boundaries = {*begins, *lines[0], *lines[1]} if begins else set()

    def __call__(self, texts: Sequence[str], progress: bool = False) -> list[TextScore]:
        options = self.options
        encoded = [encode_text(self.tokenizer, text, options.line_start, options.line_end) for text in texts]
        ids = [torch.tensor([token.id for token in tokens], dtype=torch.long) for tokens in encoded]
        with inference(self.model):
            nats = self._read_on(ids) if self.is_stream else self._read_each(ids, progress)
        return [
            self._text_score(text, tokens, of_text) for text, tokens, of_text in zip(texts, encoded, nats, strict=True)
        ]

    def _read_each(self, ids: list[torch.Tensor], progress: bool) -> list[_Nats]:
        """Each text with a fresh memory."""
        found: dict[int, _Nats] = {}
        before = torch.tensor(self.last_ids, dtype=torch.long)
        with tqdm(total=len(ids), unit="text", desc="scoring", disable=not progress) as bar:
            for indices in batches_by_length(ids, self.options.batch_size):
                rows = self._read([torch.cat([before, ids[index]]) for index in indices])
                for index, row in zip(indices, rows, strict=True):
                    found[index] = row.part(len(before), len(ids[index]))
                bar.update(len(indices))
        return [found[index] for index in range(len(ids))]

    def _read_on(self, ids: list[torch.Tensor]) -> list[_Nats]:
        """The next texts of the stream."""
        joined = torch.cat([torch.tensor(self.last_ids, dtype=torch.long), *ids])
        (row,) = self._read([joined], self.stream)
        begins = accumulate(map(len, ids), initial=len(self.last_ids))
        self.last_ids = joined[-1:].tolist()
        return [row.part(begin, len(of_text)) for begin, of_text in zip(begins, ids, strict=False)]

    def _read(self, rows: list[torch.Tensor], memory: TransfoXLMemory | None = None) -> list[_Nats]:
        """Rows, longest first, after a memory of all tokens before them; it then has all of theirs but the last."""
        arguments = (self.model, rows, self.options.segment_length, self.settings)
        ends: list[list[float]] = []
        if self.boundaries:
            ends = [row.tolist() for row in set_losses(*arguments, sorted(self.boundaries), copy.copy(memory))]
        losses = [row.tolist() for row in token_losses(*arguments, memory)]
        # shorter rows have no losses
        losses += [[] for _ in rows[len(losses) :]]
        ends += [[] for _ in rows[len(ends) :]]
        return [
            _Nats([None, *row_losses][: len(row)], [math.nan, *row_ends])
            for row, row_losses, row_ends in zip(rows, losses, ends, strict=True)
        ]

    def _text_score(self, text: str, tokens: list[Token], nats: _Nats) -> TextScore:
        """Put tokens and words together."""
        scale = UNITS[self.options.unit]
        spans, places = words_of(text, tokens, self.options.words)
        names = self.tokenizer.convert_ids_to_tokens([token.id for token in tokens])
        of_words: list[list[int]] = [[] for _ in spans]
        scored = []
        for position, (name, token, loss, place) in enumerate(zip(names, tokens, nats.tokens, places, strict=True)):
            is_unknown = token.id == self.tokenizer.unk_token_id
            surprisal = None if loss is None else loss / scale
            scored.append(TokenScore(name, token.start, token.end, surprisal, is_unknown, place))
            if place is not None:
                of_words[place].append(position)
        words = []
        for (start, end), own in zip(spans, of_words, strict=True):
            loss = self._word_loss(tokens, nats, own)
            surprisal = None if loss is None else loss / scale
            has_unknown = any(scored[position].is_unknown for position in own)
            words.append(WordScore(text[start:end], start, end, surprisal, len(own), has_unknown))
        return TextScore(text, scored, words)

    def _word_loss(self, tokens: list[Token], nats: _Nats, own: list[int]) -> float | None:
        """Nats of a word, the sum over its own tokens; None if one of them has none.

        Where words begin with a space, the end of this word is added, and that of what precedes it, which its first
        token holds, is subtracted.
        """
        losses = [nats.tokens[position] for position in own]
        if None in losses:
            return None
        loss = math.fsum(loss for loss in losses if loss is not None)
        if self.boundaries and own:
            first, behind = own[0], own[-1] + 1
            if behind == len(tokens) or tokens[behind].id in self.boundaries:
                loss += nats.ends[behind]
            if tokens[first].id in self.boundaries and not math.isnan(nats.ends[first]):
                loss -= nats.ends[first]
        return loss


__all__ = ["TextScore", "TokenScore", "WordScore", "score_texts"]

"""Rescoring of n-best lists: the language model's score is added to that of a speech recogniser.

The combined score is that of shallow fusion, as in NeMo's `eval_neural_rescorer.py`:

    total = score + alpha * lm_score + beta * length

where `lm_score` is the log-probability of the whole line in nats, with the token that ends it, given the context. All
hypotheses of an utterance share the memory of the context, which is read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from ..data import check_sizes
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..token_ids import checked_tokens
from ..tokenization_transfo_xl import encode_lines
from .nbest import Hypothesis, Utterance
from .reading import batches_by_length, inference
from .sequences import token_losses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# the grid of `tune_weights`
ALPHAS = tuple(step / 10 for step in range(21))
BETAS = tuple(step / 2 for step in range(-4, 9))


@dataclass(frozen=True)
class FusionWeights:
    """Weights of the combined score `score + alpha * lm_score + beta * length`.

    Args:
        alpha (`float`): Weight of the language model's log-probability.
        beta (`float`, defaults to 0): Bonus for each unit of length.
        length (`str`, defaults to `"words"`): The unit: `"words"`, or `"characters"` as in NeMo.
    """

    alpha: float
    beta: float = 0.0
    length: str = "words"

    def __post_init__(self) -> None:
        if self.length not in ("words", "characters"):
            raise ValueError(f"`length` must be 'words' or 'characters', but is {self.length!r}.")

    def total(self, hypothesis: Hypothesis) -> float:
        """The combined score of a hypothesis that has an `lm_score`."""
        length = len(hypothesis.text.split() if self.length == "words" else hypothesis.text)
        return hypothesis.score + self.alpha * (hypothesis.lm_score or 0.0) + self.beta * length


@dataclass(frozen=True)
class ErrorRates:
    """Word error rates of n-best lists with references.

    Args:
        first_pass (`float`): Of the hypotheses with the best score of the recogniser.
        rescored (`float`): Of those with the best combined score.
        oracle (`float`): Of the best choices that the lists allow.
        num_words (`int`): Words of the references.
    """

    first_pass: float
    rescored: float
    oracle: float
    num_words: int


class ContextScorer:
    """Scores lists of continuations of one text, which grows from list to list.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        context_ids (`list[int]`): The text so far. If it is empty, first tokens have no score.
        batch_size (`int`, defaults to 32): Continuations scored together.
        segment_length (`int`, defaults to 512): Most tokens that are read in one call.
        settings: Arguments of [`TransfoXLMemory`] (`mem_len`, `clamp_len`, `same_length`, `memory_init`).
    """

    def __init__(
        self,
        model: TransfoXLForCausalLM,
        context_ids: Sequence[int] = (),
        *,
        batch_size: int = 32,
        segment_length: int = 512,
        **settings: Any,
    ):
        check_sizes(batch_size=batch_size, segment_length=segment_length)
        self.model, self.batch_size, self.segment_length, self.settings = model, batch_size, segment_length, settings
        self.memory = model.init_memory(1, **settings)
        # the newest token, which predicts the first one of a continuation and is read with it
        self.last = torch.empty(0, dtype=torch.long)
        self.read(context_ids)

    def read(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        tokens = torch.cat([self.last, checked_tokens("token_ids", token_ids, self.model.config.vocab_size)])
        with inference(self.model):
            for piece in tokens[:-1].split(self.segment_length):
                if len(piece):
                    self.model.base_model(piece[None].to(self.model.device), cache=self.memory)
        self.last = tokens[-1:]

    def score(self, continuations: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probability of each continuation in nats, float64 `(num_continuations,)`; the text stays as it is."""
        vocab_size = self.model.config.vocab_size
        rows = [
            torch.cat([self.last, checked_tokens(f"continuations[{index}]", ids, vocab_size)])
            for index, ids in enumerate(continuations)
        ]
        scores = torch.zeros(len(rows), dtype=torch.float64)
        with inference(self.model):
            for indices in batches_by_length(rows, self.batch_size):
                batch = [rows[index] for index in indices]
                memory = self.memory.select([0] * len(batch))
                losses = token_losses(self.model, batch, self.segment_length, self.settings, memory)
                # rows without a scored token are last, and left out
                for index, row_losses in zip(indices, losses, strict=False):
                    scores[index] = -row_losses.double().sum()
        return scores


def rescore(
    model: TransfoXLForCausalLM,
    tokenizer: "PreTrainedTokenizerBase",
    utterances: Sequence[Utterance],
    weights: FusionWeights,
    *,
    context: str = "fresh",
    **options: Any,
) -> list[Utterance]:
    """Add the language model's scores to n-best lists, and sort each list by the combined score.

    Lines are encoded as in training (see `encode_lines`), and the token that ends a line precedes the first one, so
    that all its tokens have a score. Characters and bytes have a line break there. A tokenizer without such a token
    leaves the first token of a text without context unscored.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        utterances (`list[Utterance]`): The lists, from [`read_nbest`].
        weights ([`FusionWeights`]): Weights of the combined score.
        context (`str`, defaults to `"fresh"`):
            `"fresh"` scores each utterance alone. `"running"` takes the utterances as one text in order: each is
            scored after the chosen hypotheses of all before it, which stay in the memory.
        options: Arguments of [`ContextScorer`]: `batch_size`, `segment_length`, and settings of the memory.

    Returns:
        `list[Utterance]`: The same utterances, with `lm_score` and `total` for each hypothesis, best total first.
    """
    if context not in ("fresh", "running"):
        raise ValueError(f"`context` must be 'fresh' or 'running', but is {context!r}.")
    ending = _encode(tokenizer, [""])[0][-1:]
    scorer = ContextScorer(model, ending, **options)
    found = []
    for utterance in utterances:
        lines = _encode(tokenizer, [hypothesis.text for hypothesis in utterance.hypotheses])
        lm_scores = scorer.score(lines).tolist()
        scored = [
            replace(hypothesis, lm_score=lm_score)
            for hypothesis, lm_score in zip(utterance.hypotheses, lm_scores, strict=True)
        ]
        totals = [weights.total(hypothesis) for hypothesis in scored]
        order = sorted(range(len(scored)), key=lambda index: -totals[index])
        found.append(replace(utterance, hypotheses=[replace(scored[index], total=totals[index]) for index in order]))
        if context == "running":
            scorer.read(lines[order[0]])
    return found


def _encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Ids of lines; for characters and bytes the line break is a symbol."""
    end = "\n" if tokenizer.init_kwargs.get("mode") in ("characters", "bytes") else ""
    return list(encode_lines(tokenizer, [f"{text}{end}" for text in texts]))


def tune_weights(
    model: TransfoXLForCausalLM,
    tokenizer: "PreTrainedTokenizerBase",
    utterances: Sequence[Utterance],
    *,
    alphas: Sequence[float] = ALPHAS,
    betas: Sequence[float] = BETAS,
    length: str = "words",
    **options: Any,
) -> FusionWeights:
    """The weights of a grid with the fewest word errors on a development set.

    The language model reads the lists once, whatever the size of the grid. With `context="running"` the context is
    therefore that of the recogniser's best hypotheses, the same for all weights. Of equal weights the smallest `alpha`
    is taken, then the `beta` nearest to 0.

    Args:
        model, tokenizer, utterances: As for [`rescore`]; every utterance must have a reference.
        alphas, betas (`list[float]`): The grid, by default `alpha` from 0 to 2 and `beta` from -2 to 4.
        length (`str`, defaults to `"words"`): As for [`FusionWeights`].
        options: `context`, and further arguments of [`rescore`].

    Raises:
        ValueError: if a reference is missing or the grid is empty.
        ImportError: if jiwer is not installed.
    """
    if not alphas or not betas:
        raise ValueError(f"`alphas` and `betas` must not be empty, but are {alphas} and {betas}.")
    _check_references(utterances)
    scored = rescore(model, tokenizer, utterances, FusionWeights(0.0), **options)
    errors = [_word_errors(utterance) for utterance in scored]

    def rank(weights: FusionWeights) -> tuple[int, float, float]:
        return _num_errors(scored, errors, weights.total), weights.alpha, abs(weights.beta)

    return min((FusionWeights(alpha, beta, length) for alpha, beta in product(alphas, betas)), key=rank)


def error_rates(utterances: Sequence[Utterance]) -> ErrorRates:
    """Word error rates before and after rescoring, and the best that the lists allow.

    Words are what white space separates, without further normalisation. Errors are counted by jiwer.

    Args:
        utterances (`list[Utterance]`): From [`rescore`], each with a reference.

    Raises:
        ValueError: if a reference is missing, or all are empty.
        ImportError: if jiwer is not installed.
    """
    _check_references(utterances)
    num_words = sum(len((utterance.reference or "").split()) for utterance in utterances)
    if num_words == 0:
        raise ValueError("`utterances` must have words in their references, but all are empty.")
    errors = [_word_errors(utterance) for utterance in utterances]
    return ErrorRates(
        first_pass=_num_errors(utterances, errors, lambda each: each.score) / num_words,
        rescored=_num_errors(utterances, errors, lambda each: each.score if each.total is None else each.total)
        / num_words,
        oracle=sum(min(counts) for counts in errors) / num_words,
        num_words=num_words,
    )


def _check_references(utterances: Sequence[Utterance]) -> None:
    missing = [utterance.id for utterance in utterances if utterance.reference is None]
    if missing or not utterances:
        raise ValueError(f"`utterances` must have references, but these have none: {missing[:5] or 'all of 0'}.")


def _word_errors(utterance: Utterance) -> list[int]:
    """Substitutions, deletions and insertions of each hypothesis."""
    try:
        import jiwer
    except ImportError as error:
        raise ImportError("Word error rates need jiwer: `pip install hf-txl[rescoring]`.") from error
    reference = " ".join((utterance.reference or "").split())
    counts = []
    for hypothesis in utterance.hypotheses:
        if reference:
            found = jiwer.process_words(reference, " ".join(hypothesis.text.split()))
            counts.append(found.substitutions + found.deletions + found.insertions)
        else:
            counts.append(len(hypothesis.text.split()))
    return counts


def _num_errors(
    utterances: Sequence[Utterance], errors: Sequence[Sequence[int]], total: Callable[[Hypothesis], float]
) -> int:
    """Errors of the hypotheses with the largest totals, the first of equal ones."""
    num_errors = 0
    for utterance, counts in zip(utterances, errors, strict=True):
        totals = [total(hypothesis) for hypothesis in utterance.hypotheses]
        num_errors += counts[totals.index(max(totals))]
    return num_errors


__all__ = ["ContextScorer", "ErrorRates", "FusionWeights", "error_rates", "rescore", "tune_weights"]

"""The adapters for speech decoders, called as the beam searches of ESPnet and icefall call a language model.

The calls follow `espnet/nets/batch_beam_search.py` and `modified_beam_search_lm_shallow_fusion` in icefall's
`beam_search.py`. With a beam that holds all hypotheses, the best one is that of scoring every text alone.
"""

from itertools import product
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import score_continuations
from tests.tools.examples import example
from tests.unit.test_scoring import make_model

SYMBOLS = 5
START = 0
STEPS = 3
# up to three float32 log-probabilities are added
SUMS = 1e-5


@pytest.fixture(scope="module")
def model() -> TransfoXLForCausalLM:
    return make_model(vocab_size=SYMBOLS, cutoffs=[], div_val=1, mem_len=20)


def best_alone(model: TransfoXLForCausalLM, context: list[int]) -> tuple[list[int], float]:
    texts = [list(text) for text in product(range(SYMBOLS), repeat=STEPS)]
    scores = score_continuations(model, [*context, START], texts)
    return texts[int(scores.argmax())], scores.max().item()


def espnet_search(scorer: Any, beam: int) -> tuple[list[int], float]:
    """Scores of all hypotheses in one call, then a state by index for each hypothesis that is kept."""
    x = torch.zeros(7, 4)
    texts, totals, states = [[START]], torch.zeros(1), [scorer.batch_init_state(x)]
    for _ in range(STEPS):
        scores, states = scorer.batch_score(torch.tensor(texts), states, x.expand(len(texts), *x.shape))
        sums = (totals[:, None] + scores).flatten()
        kept = sums.topk(min(beam, len(sums))).indices.tolist()
        previous = [index // SYMBOLS for index in kept]
        texts = [[*texts[row], index % SYMBOLS] for row, index in zip(previous, kept, strict=True)]
        totals, states = sums[kept], [scorer.select_state(states, row) for row in previous]
    return texts[0][1:], totals[0].item() + scorer.final_score(states[0])


def icefall_search(scorer: Any, beam: int) -> tuple[list[int], float]:
    """Whole prefixes, right-padded, of those hypotheses that have a new token; others wait (a blank)."""
    assert scorer.lm_type == "transformer"
    texts, totals = [[START]], torch.zeros(1)
    for _ in range(STEPS):
        # two frames for each step: in the first, the second half of the hypotheses emits a blank
        half = (len(texts) + 1) // 2
        scores = torch.cat([icefall_scores(scorer, part) for part in (texts[:half], texts[half:]) if part])
        sums = (totals[:, None] + scores).flatten()
        kept = sums.topk(min(beam, len(sums))).indices.tolist()
        texts = [[*texts[index // SYMBOLS], index % SYMBOLS] for index in kept]
        totals = sums[kept]
    return texts[0][1:], totals[0].item()


def icefall_scores(scorer: Any, texts: list[list[int]]) -> torch.Tensor:
    lengths = torch.tensor([len(text) for text in texts])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
    scores, state = scorer.score_token(padded, lengths, None)
    assert state is None and scores.shape == (len(texts), SYMBOLS)
    return scores


@pytest.mark.parametrize("context", [[], [3, 1, 4, 1, 2]])
@pytest.mark.parametrize(("name", "search"), [("espnet_scorer", espnet_search), ("icefall_scorer", icefall_search)])
def test_a_full_beam_finds_the_best_text(
    model: TransfoXLForCausalLM, name: str, search: Any, context: list[int]
) -> None:
    scorer = example(name).TransfoXLScorer(model, context_ids=context)
    text, score = search(scorer, SYMBOLS**STEPS)
    expected, expected_score = best_alone(model, context)
    assert text == expected
    assert score == pytest.approx(expected_score, abs=SUMS)


@pytest.mark.parametrize(("name", "search"), [("espnet_scorer", espnet_search), ("icefall_scorer", icefall_search)])
def test_a_narrow_beam_returns_a_score_that_is_that_of_its_text(
    model: TransfoXLForCausalLM, name: str, search: Any
) -> None:
    text, score = search(example(name).TransfoXLScorer(model), 3)
    assert score == pytest.approx(score_continuations(model, [START], [text]).item(), abs=SUMS)


def test_espnet_scores_one_hypothesis_at_a_time_alike(model: TransfoXLForCausalLM) -> None:
    scorer = example("espnet_scorer").TransfoXLScorer(model)
    x = torch.zeros(7, 4)
    total, state, text = 0.0, scorer.init_state(x), [START]
    for token in [2, 4, 1]:
        scores, state = scorer.score(torch.tensor(text), state, x)
        total += scores[token].item()
        text.append(token)
    assert total == pytest.approx(score_continuations(model, [START], [text[1:]]).item(), abs=SUMS)


def test_icefall_prefixes_of_several_lengths_and_forgotten_ones_are_read_again(model: TransfoXLForCausalLM) -> None:
    scorer = example("icefall_scorer").TransfoXLScorer(model, num_states=1)
    texts = [[START, 2, 3], [START], [START, 4]]
    scores = icefall_scores(scorer, texts)
    for text, row in zip(texts, scores, strict=True):
        expected = score_continuations(model, text, [[token] for token in range(SYMBOLS)])
        assert row.tolist() == pytest.approx(expected.tolist(), abs=SUMS)

"""Rescoring of n-best lists and step-by-step scores, against joint texts alone, loops by hand and small examples."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_txl import TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.scoring import (
    ContextScorer,
    FusionWeights,
    Hypothesis,
    StepScorer,
    Utterance,
    error_rates,
    read_nbest,
    rescore,
    score_continuations,
    score_sequences,
    tune_weights,
)
from hf_txl.tokenization_transfo_xl import build_vocabulary
from tests.helpers import assert_close
from tests.unit.test_scoring import make_model, random_ids

# float64 models: the rounding of float32 losses, of which up to 15 are added
SUMS = 5e-5
WORDS = ["the", "man", "sat", "down", "old", "boat", "river", "went", "home", "again"]


@pytest.fixture(scope="module")
def tokenizer() -> TransfoXLTokenizer:
    vocabulary = build_vocabulary([" ".join(WORDS)], "pretokenized", special=("<eos>", "<unk>"))
    return TransfoXLTokenizer.from_vocabulary(vocabulary, "pretokenized", line_end="<eos>")


@pytest.fixture(scope="module")
def model() -> TransfoXLForCausalLM:
    return make_model(vocab_size=12, cutoffs=[5], mem_len=40)


def lists(count: int, size: int, seed: int = 0) -> list[Utterance]:
    chance = random.Random(seed)
    utterances = []
    for index in range(count):
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(0, 7))) for _ in range(size)]
        hypotheses = [Hypothesis(text, -chance.random() * 20) for text in texts]
        utterances.append(Utterance(str(index + 1), hypotheses, chance.choice(texts)))
    return utterances


def encode(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.convert_tokens_to_ids(text.split()), tokenizer.convert_tokens_to_ids("<eos>")]


def test_hypotheses_after_a_context_score_as_each_joint_text_alone() -> None:
    """20 hypotheses of 5 to 15 tokens after 400 tokens."""
    model = make_model(mem_len=450)
    context = random_ids(400).tolist()
    hypotheses = [random_ids(5 + index % 11, seed=index).tolist() for index in range(20)]
    found = ContextScorer(model, context, batch_size=7, segment_length=64).score(hypotheses)
    whole = [score_sequences(model, [context + each], segment_length=500) for each in hypotheses]
    before = score_sequences(model, [context], segment_length=500)
    # differences of sums over 400 float32 losses
    assert_close("joint texts", found, torch.cat(whole) - before, atol=1e-3)


def test_a_scorer_is_not_changed_by_its_lists_and_reads_on() -> None:
    model = make_model(mem_len=50)
    scorer = ContextScorer(model, [3])
    first = scorer.score([[4, 5], [6], []])
    scorer.read([7, 8, 9])
    later = scorer.score([[4, 5], [6]])
    assert first[2] == 0
    assert_close("first", first[:2], score_continuations(model, [3], [[4, 5], [6]]), atol=SUMS)
    assert_close("later", later, score_continuations(model, [3, 7, 8, 9], [[4, 5], [6]]), atol=SUMS)


def test_without_a_context_first_tokens_have_no_score() -> None:
    model = make_model()
    found = ContextScorer(model).score([[4, 5, 6], [7]])
    assert_close("scores", found, score_sequences(model, [[4, 5, 6], [7]]), atol=SUMS)


@pytest.mark.parametrize("length", ["words", "characters"])
def test_200_utterances_in_running_context_are_those_of_a_loop_by_hand(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, length: str
) -> None:
    utterances = lists(200 if length == "words" else 10, 4)
    weights = FusionWeights(0.7, 0.3, length)
    found = rescore(model, tokenizer, utterances, weights, context="running")
    context = encode(tokenizer, "")
    for utterance, rescored in zip(utterances, found, strict=True):
        lines = [encode(tokenizer, each.text) for each in utterance.hypotheses]
        # older tokens are out of reach of two layers with a memory of 40
        lm_scores = score_continuations(model, context[-100:], lines).tolist()
        expected = []
        for each, lm_score, line in zip(utterance.hypotheses, lm_scores, lines, strict=True):
            size = len(each.text.split()) if length == "words" else len(each.text)
            expected.append((each.score + 0.7 * lm_score + 0.3 * size, each.text, lm_score, line))
        expected.sort(key=lambda item: -item[0])
        assert [each.text for each in rescored.hypotheses] == [item[1] for item in expected]
        for each, (total, _, lm_score, _) in zip(rescored.hypotheses, expected, strict=True):
            assert each.lm_score == pytest.approx(lm_score, abs=SUMS)
            assert each.total == pytest.approx(total, abs=SUMS)
        context += expected[0][3]


def test_fresh_context_does_not_depend_on_the_order_of_utterances(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    utterances = lists(6, 3)
    forward = rescore(model, tokenizer, utterances, FusionWeights(1.0))
    backward = rescore(model, tokenizer, utterances[::-1], FusionWeights(1.0))[::-1]
    for one, other in zip(forward, backward, strict=True):
        assert [each.text for each in one.hypotheses] == [each.text for each in other.hypotheses]
        assert [each.total for each in one.hypotheses] == pytest.approx([each.total for each in other.hypotheses])


def test_characters_have_a_line_break_around_them() -> None:
    tokenizer = TransfoXLTokenizer.from_vocabulary(["\n", "a", "b", " "], "characters", unk_token=None)
    model = make_model(vocab_size=4, cutoffs=[], div_val=1)
    (found,) = rescore(model, tokenizer, [Utterance("1", [Hypothesis("ab", 0.0)])], FusionWeights(1.0))
    expected = score_sequences(model, [[1, 2, 0]], bos_token_id=0).item()
    assert found.hypotheses[0].lm_score == pytest.approx(expected, abs=SUMS)


def test_error_rates_of_a_list_by_hand() -> None:
    hypotheses = [
        Hypothesis("the man sat", -1.0, -9.0, -10.0),
        Hypothesis("the old man sat down", -2.0, -3.0, -5.0),
        Hypothesis("the old man sat", -3.0, -4.0, -7.0),
    ]
    other = [Hypothesis("", -1.0, -1.0, -2.0), Hypothesis("home", -2.0, -1.0, -3.0)]
    rates = error_rates([Utterance("1", hypotheses, "the old man sat"), Utterance("2", other, "")])
    assert (rates.first_pass, rates.rescored, rates.oracle, rates.num_words) == (0.25, 0.25, 0.0, 4)


def test_tuned_weights_have_the_fewest_errors_of_the_grid(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    utterances = lists(12, 4)
    alphas, betas = [0.0, 0.5, 1.0], [-1.0, 0.0, 2.0]
    tuned = tune_weights(model, tokenizer, utterances, alphas=alphas, betas=betas)
    rates = {
        (alpha, beta): error_rates(rescore(model, tokenizer, utterances, FusionWeights(alpha, beta))).rescored
        for alpha in alphas
        for beta in betas
    }
    assert rates[tuned.alpha, tuned.beta] == min(rates.values())


def test_files_of_nemo_and_espnet(tmp_path: Path) -> None:
    table, manifest = tmp_path / "beams.tsv", tmp_path / "manifest.json"
    table.write_text("the man\t-1.5\nthe men\t-2.5\n\t-0.5\nhome\t-3\n", encoding="utf-8")
    manifest.write_text('{"audio_filepath": "a", "text": "the man"}\n{"text": "home"}\n', encoding="utf-8")
    nemo = read_nbest(table, beam_size=2, references=manifest)
    assert [each.reference for each in nemo] == ["the man", "home"]
    assert [(each.text, each.score) for each in nemo[1].hypotheses] == [("", -0.5), ("home", -3.0)]
    espnet = tmp_path / "data.json"
    outputs = [
        {"name": f"target1[{rank}]", "text": "the man", "rec_text": f"{text}<eos>", "score": score, "token": "t"}
        for rank, (text, score) in enumerate([("the man", -1.5), ("the men", -2.5)], 1)
    ]
    espnet.write_text(json.dumps({"utts": {"a1": {"utt2spk": "a", "output": outputs}}}), encoding="utf-8")
    (found,) = read_nbest(espnet)
    assert (found.id, found.reference) == ("a1", "the man")
    assert found.hypotheses == nemo[0].hypotheses


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\t-1\nb\n", "line 2"),
        ("a\t-1\nb\tnan\n", "line 2"),
        ("a\t-1\n", "2 rows for each utterance"),
        ("", "has none"),
    ],
)
def test_bad_tables_are_refused(content: str, message: str, tmp_path: Path) -> None:
    table = tmp_path / "beams.tsv"
    table.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_nbest(table, beam_size=2)


@pytest.mark.parametrize("suffix", [".tsv", ".json"])
def test_the_command_writes_the_lists_best_first(
    suffix: str, model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, tmp_path: Path
) -> None:
    folder, file, output = tmp_path / "model", tmp_path / f"beams{suffix}", tmp_path / f"rescored{suffix}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    utterances = lists(3, 4)
    arguments = ["--context", "running", "-o", str(output)]
    if suffix == ".tsv":
        rows = [f"{each.text}\t{each.score!r}\n" for utterance in utterances for each in utterance.hypotheses]
        file.write_text("".join(rows), encoding="utf-8")
        references = tmp_path / "references.txt"
        references.write_text("".join(f"{each.reference}\n" for each in utterances), encoding="utf-8")
        arguments += ["--beam-size", "4", "--references", str(references), "--alpha", "0.5", "--beta", "0.1"]
        weights = FusionWeights(0.5, 0.1)
    else:
        content = {
            utterance.id: {
                "output": [
                    {"rec_text": each.text, "score": each.score, "text": utterance.reference, "name": "t[1]"}
                    for each in utterance.hypotheses
                ]
            }
            for utterance in utterances
        }
        file.write_text(json.dumps({"utts": content}), encoding="utf-8")
        arguments += ["--tune", str(file)]
        weights = tune_weights(model, tokenizer, utterances, context="running")
    result = CliRunner().invoke(app, ["rescore", str(folder), str(file), *arguments])
    assert result.exit_code == 0, result.output
    expected = rescore(model, tokenizer, utterances, weights, context="running")
    found = read_nbest(output, beam_size=4)
    for one, other in zip(found, expected, strict=True):
        assert [each.text for each in one.hypotheses] == [each.text for each in other.hypotheses]
        # the saved model is loaded as float32 or float64, as its configuration says
        assert [each.score for each in one.hypotheses] == pytest.approx([each.total for each in other.hypotheses])
    rates = error_rates(expected)
    assert f"{rates.first_pass:.2%} before, {rates.rescored:.2%} rescored, {rates.oracle:.2%} oracle" in result.output
    again = CliRunner().invoke(app, ["rescore", str(folder), str(file), *arguments])
    assert again.exit_code == 2 and "new file" in again.output


# --- one step at a time


def test_steps_give_the_log_probabilities_of_the_whole_text() -> None:
    model = make_model(mem_len=20)
    texts = random_ids(3, 9)
    scorer = StepScorer(model, eos_token_id=2)
    state = scorer.merge([scorer.init_state([1]) for _ in range(3)])
    whole = torch.cat([torch.ones(3, 1, dtype=torch.long), texts], dim=1)
    with torch.no_grad():
        expected = model.eval()(whole).logits.log_softmax(-1).float()
    assert_close("after the context", state.log_probabilities, expected[:, 0], atol=1e-5)
    for position in range(9):
        scores, state = scorer.score(texts[:, position : position + 1], state)
        assert_close("next token", scores, expected[:, position + 1], atol=1e-5)
        assert torch.equal(scorer.final(state), scores[:, 2])


def test_a_state_is_continued_by_several_tokens_and_kept() -> None:
    model = make_model(mem_len=20)
    scorer = StepScorer(model)
    start = scorer.init_state([1, 2, 3])
    two = scorer.select(start, [0, 0])
    _, continued = scorer.score([[4], [5]], two)
    last = scorer.select(continued, [1])
    scores, _ = scorer.score([[6]], last)
    (expected, _) = scorer.score([[1, 2, 3, 5, 6]], scorer.init_state())
    assert_close("scores", scores, expected, atol=1e-5)
    again, _ = scorer.score([[4]], start)
    assert_close("kept", again, scorer.select(continued, [0]).log_probabilities, atol=1e-5)


def test_wrong_states_and_tokens_are_refused() -> None:
    scorer = StepScorer(make_model())
    start = scorer.init_state()
    with pytest.raises(ValueError, match=r"`tokens` must have the shape \(1"):
        scorer.score([[1], [2]], start)
    with pytest.raises(ValueError, match="`eos_token_id` must be"):
        scorer.final(start)
    ending = StepScorer(scorer.model, eos_token_id=2)
    with pytest.raises(ValueError, match="`state` must have read a token"):
        ending.final(ending.merge([start, scorer.init_state([1])]))
    with pytest.raises(ValueError, match="`states` must hold"):
        scorer.merge([])

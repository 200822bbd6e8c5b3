"""lm-eval, minicons and surprisal on our models; `make test-tools` installs them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.scoring import evaluate_stream, score_continuations, score_sequences, score_texts
from hf_txl.tokenization_transfo_xl import build_vocabulary, encode_lines
from tests.tools.examples import example
from tests.unit.test_scoring import make_model

for package in ("lm_eval", "minicons", "surprisal"):
    pytest.importorskip(package, reason="`make test-tools` has an environment with it")

LINES = ["the man sat down", "the old boat went down the river", "again the man went home", "home again"]
# float32 log-probabilities of one token, and sums of them
NUMBERS = 1e-5
SUMS = 1e-4


@pytest.fixture(scope="module")
def tokenizer() -> TransfoXLTokenizer:
    vocabulary = build_vocabulary(LINES, "pretokenized", special=("<eos>", "<unk>"))
    return TransfoXLTokenizer.from_vocabulary(vocabulary, "pretokenized", line_end="<eos>")


@pytest.fixture(scope="module")
def model(tokenizer: TransfoXLTokenizer) -> TransfoXLForCausalLM:
    # segments of any length give the same numbers
    return make_model(vocab_size=len(tokenizer), cutoffs=[5], mem_len=12, same_length=True).float()


@pytest.fixture(scope="module")
def ids(tokenizer: TransfoXLTokenizer) -> list[int]:
    return [token for line in encode_lines(tokenizer, LINES * 6) for token in line]


@pytest.fixture(scope="module")
def harness(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer) -> Any:
    return example("lm_eval_model").TransfoXLLM(model, tokenizer=tokenizer, segment_length=7)


def test_lm_eval_reads_a_document_as_one_stream(
    harness: Any, model: TransfoXLForCausalLM, ids: list[int], tmp_path: Path, tokenizer: TransfoXLTokenizer
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask

    text = "".join(f"{line}\n" for line in LINES * 6)
    file = tmp_path / "data.json"
    file.write_text(json.dumps({"page": text}) + "\n", encoding="utf-8")
    task = ConfigurableTask(
        config={
            "task": "stream",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        }
    )
    found = simple_evaluate(model=harness, tasks=[task], bootstrap_iters=0)["results"]["stream"]
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    # `<eos>` precedes the text, so that its first token has a score
    score = evaluate_stream(model, [eos, *ids], segment_length=11, progress=False)
    nats = score.loss * score.predictions
    assert score.predictions == len(ids)
    assert found["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / len(text.encode()), abs=SUMS)
    assert found["byte_perplexity,none"] == pytest.approx(math.exp(nats / len(text.encode())), abs=SUMS)


def test_lm_eval_continuations_have_contexts_of_any_length_and_say_if_they_are_greedy(
    harness: Any, model: TransfoXLForCausalLM, ids: list[int]
) -> None:
    context = ids[:60]
    with torch.no_grad():
        greedy: list[int] = []
        for _ in range(3):
            # two layers reach 24 tokens back
            greedy.append(int(model.eval()(torch.tensor([context + greedy])).logits[0, -1].argmax()))
    other = [*greedy[:2], (greedy[2] + 1) % 10]
    requests = [(None, context, greedy), (None, context[:9], ids[9:12]), (None, context, other)]
    found = harness._loglikelihood_tokens(requests, disable_tqdm=True)
    for (_, before, after), (total, _) in zip(requests, found, strict=True):
        assert total == pytest.approx(score_continuations(model, before, [after]).item(), abs=SUMS)
    assert (found[0][1], found[2][1]) == (True, False)


def test_lm_eval_knows_the_name(harness: Any) -> None:
    from lm_eval.api.registry import get_model

    assert get_model("hf-txl") is type(harness)


def test_minicons_alone_equals_ours(model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer) -> None:
    from minicons.scorer import IncrementalLMScorer

    scorer = IncrementalLMScorer(model, "cpu", tokenizer=tokenizer)
    theirs = scorer.token_score(LINES, surprisal=True, base_two=True)
    ours = score_texts(model, tokenizer, LINES, line_end=None)
    for their, our in zip(theirs, ours, strict=True):
        assert [token for token, _ in their] == [token.token for token in our.tokens]
        bits = [token.surprisal for token in our.tokens[1:]]
        assert [score for _, score in their[1:]] == pytest.approx(bits, abs=NUMBERS)


def test_minicons_in_running_context_equals_one_stream(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer
) -> None:
    scorer = example("minicons_scorer").RunningScorer(model, tokenizer=tokenizer, segment_length=3)
    first, last = scorer.sequence_score(LINES[:1], reduction=sum), scorer.sequence_score(LINES[1:], reduction=sum)
    sentences = [tokenizer(line, add_special_tokens=False)["input_ids"] for line in LINES]
    expected = score_sequences(model, sentences, mode="stream")
    assert [float(score) for score in [*first, *last]] == pytest.approx(expected.tolist(), abs=SUMS)
    scorer.reset()
    tokens = scorer.token_score(LINES, surprisal=True)
    assert [len(row) for row in tokens] == [len(sentence) for sentence in sentences]
    assert sum(score for row in tokens for _, score in row) == pytest.approx(-expected.sum().item(), abs=SUMS)
    with pytest.raises(ValueError, match="`rank`"):
        scorer.compute_stats(scorer.prepare_text(LINES), rank=True)


def test_surprisal_needs_a_beginning_token(
    model: TransfoXLForCausalLM, tokenizer: TransfoXLTokenizer, tmp_path: Path
) -> None:
    from surprisal import AutoHuggingFaceModel
    from transformers import AutoTokenizer

    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path, bos_token="<eos>").save_pretrained(tmp_path)
    theirs = AutoHuggingFaceModel.from_pretrained(str(tmp_path), model_class="gpt")
    (found,) = theirs.surprise([LINES[1]])
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    ids = tokenizer(LINES[1], add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([[eos, *ids]])).logits[0, :-1]
    # the package gives `<eos>`, with which it pads, no probability
    logits[:, eos] = -math.inf
    expected = -logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert list(found.surprisals) == pytest.approx(expected.tolist(), abs=NUMBERS)

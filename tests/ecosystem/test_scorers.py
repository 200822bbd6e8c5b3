"""Programs that measure language models: the numbers are those of one call over each text."""

from typing import Any

import pytest
import torch

from hf_txl import TransfoXLTokenizer
from tests.helpers import assert_close
from tests.t0 import LARGE_WEIGHTS, make_model, random_ids


def tokenizer() -> TransfoXLTokenizer:
    words = [f"w{number}" for number in range(96)]
    return TransfoXLTokenizer.from_vocabulary(["<unk>", "<eos>", "<pad>", *words], "pretokenized", pad_token="<pad>")


@torch.no_grad()
def token_scores(model: Any, ids: torch.Tensor) -> torch.Tensor:
    scores = model(ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(-1, ids[:, 1:, None])[..., 0]


def test_lm_eval_takes_the_model_for_a_causal_one() -> None:
    """R01, R19"""
    pytest.importorskip("lm_eval", reason="lm-eval is not part of the development environment")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, words = make_model(**LARGE_WEIGHTS), tokenizer()
    harness = HFLM(pretrained=model, tokenizer=words, device="cpu", batch_size=1, max_length=32)
    assert harness.backend == "causal"
    request = Instance("loglikelihood", {}, ("w3 w4 w50", " w6 w7"), 0)
    [(score, _)] = harness.loglikelihood([request], disable_tqdm=True)
    ids = words("w3 w4 w50 w6 w7", return_tensors="pt", add_special_tokens=False).input_ids
    assert_close("score", torch.tensor(score), token_scores(model, ids)[0, -2:].sum(), atol=1e-4)


def test_minicons_scores_tokens_as_the_model_does() -> None:
    """R19"""
    pytest.importorskip("minicons", reason="minicons is not part of the development environment")
    from minicons.scorer import IncrementalLMScorer

    model, words = make_model(**LARGE_WEIGHTS), tokenizer()
    text = " ".join(f"w{int(index)}" for index in random_ids(6, vocab_size=90))
    scorer = IncrementalLMScorer(model, "cpu", tokenizer=words)
    [scored] = scorer.token_score([text])
    ids = words(text, return_tensors="pt", add_special_tokens=False).input_ids
    expected = token_scores(model, ids)[0]
    assert_close("scores", torch.tensor([score for _, score in scored][-5:]), expected, atol=1e-4)

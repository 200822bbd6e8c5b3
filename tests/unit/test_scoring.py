"""Scores of streams, sequences, hypotheses and documents against one text at a time, with loops or with all logits."""

import json
import math
from typing import Any

import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLForSequenceClassification, TransfoXLModel
from hf_txl.reference.transformer_xl import SlowTransfoXL
from hf_txl.scoring import (
    classify_documents,
    embed_documents,
    evaluate_stream,
    score_continuations,
    score_sequences,
)
from tests.helpers import FIXTURES, assert_close, cut
from tests.parity.recorded_cases import pytorch_case

# The models are float64, so what is left is the rounding of float32 losses, of order 1 to 10, and sinusoids,
NUMBERS = 1e-5
# and sums of ten of them.
SUMS = 5e-5

LENGTHS = {"n_layer": 2, "mem_len": 6, "clamp_len": -1, "same_length": True}


def make_config(**fields: Any) -> TransfoXLConfig:
    """Small and with clusters; weights so large that a wrong context shows."""
    sizes = {
        "vocab_size": 29,
        "cutoffs": [9, 17],
        "d_model": 16,
        "n_head": 3,
        "d_head": 5,
        "d_inner": 24,
        "div_val": 2,
    }
    return TransfoXLConfig(
        **{**sizes, **LENGTHS, "init_std": 0.3, "proj_init_std": 0.3, "dropout": 0.2, "dropatt": 0.2, **fields}
    )


def make_model(**fields: Any) -> TransfoXLForCausalLM:
    torch.manual_seed(1)
    return TransfoXLForCausalLM(make_config(**fields)).double()


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 29, shape, generator=torch.Generator().manual_seed(seed))


def slow_losses(
    model: TransfoXLForCausalLM, ids: torch.Tensor, segments: int | list[int], **lengths: Any
) -> torch.Tensor:
    """-log p of every token of one text but its first, by loops: `segments` cut its `len(ids) - 1` inputs."""
    slow = SlowTransfoXL(model.config, model.state_dict())
    memory = slow.new_memory(1, **lengths)
    with torch.no_grad():
        losses = [
            slow.losses(slow.read(ids[None, :-1][:, segment], memory), ids[None, 1:][:, segment])
            for segment in cut(len(ids) - 1, segments)
        ]
    return torch.cat(losses, dim=1)[0]


def log_probability(model: TransfoXLForCausalLM, ids: list[int], first: int = 1) -> float:
    """Sum of log p of the tokens from `first` on: one text, one pass, all logits, no memory."""
    model.eval()
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits.double().log_softmax(-1)
    return sum(scores[0, position - 1, ids[position]].item() for position in range(first, len(ids)))


# --- evaluate_stream


@pytest.mark.parametrize("segment_length", [40, 10, 5, 1, 7, 100])
def test_a_stream_scores_all_tokens_but_the_first(segment_length: int) -> None:
    """C30: 39 targets of 40 tokens and the same mean, whatever the segment length."""
    model, ids = make_model(), random_ids(40)
    expected = slow_losses(model, ids, 39)
    score = evaluate_stream(model, ids, segment_length=segment_length, return_losses=True, progress=False)
    assert score.predictions == 39
    assert_close("losses", score.losses[0], expected, NUMBERS)
    assert score.loss == pytest.approx(expected.mean().item(), abs=NUMBERS)


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("mem_len", [0, 4, 20])
def test_lengths_belong_to_the_evaluation(mem_len: int, same_length: bool, memory_init: str) -> None:
    """The originals evaluate with lengths other than those of training; the configuration stays as it is."""
    model, ids = make_model(), random_ids(23)
    before = model.config.to_dict()
    lengths = {"mem_len": mem_len, "clamp_len": 3, "same_length": same_length, "memory_init": memory_init}
    score = evaluate_stream(model, ids, segment_length=5, return_losses=True, progress=False, **lengths)
    assert_close("losses", score.losses[0], slow_losses(model, ids, 5, **lengths), NUMBERS)
    assert model.config.to_dict() == before


def test_rows_of_a_stream_are_scored_like_texts_of_their_own() -> None:
    """C30: N // batch - 1 tokens per row; what is left over at the end is dropped."""
    model, ids = make_model(), random_ids(32)
    score = evaluate_stream(model, ids.tolist(), batch_size=3, segment_length=4, return_losses=True, progress=False)
    assert score.predictions == 3 * 9
    rows = torch.stack([slow_losses(model, ids[10 * row : 10 * row + 10], 4) for row in range(3)])
    assert_close("losses", score.losses, rows, NUMBERS)
    assert score.loss == pytest.approx(rows.mean().item(), abs=NUMBERS)


@pytest.mark.parametrize("stores", ["hidden_states", "keys_values"])
def test_both_storages_give_the_same_score(stores: str) -> None:
    model, ids = make_model(), random_ids(30)
    score = evaluate_stream(model, ids, segment_length=4, stores=stores, return_losses=True, progress=False)
    assert_close("losses", score.losses[0], slow_losses(model, ids, 4), NUMBERS)


def test_a_trained_model_scores_as_recorded() -> None:
    """C104: lengths other than those of training, as the paper evaluates; recorded with transformers 4.30."""
    folder = FIXTURES / "hf_transfo_xl_small" / "word"
    recorded = json.loads((folder / "expected_eval.json").read_text(encoding="utf-8"))[-1]
    assert (recorded["tgt_len"], recorded["mem_len"], recorded["clamp_len"]) == (32, 256, 100)
    symbols = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
    index = {symbol: number for number, symbol in enumerate(symbols)}
    lines = (folder / "eval.txt").read_text(encoding="utf-8").splitlines()
    ids = [index[word] for line in lines for word in [*line.split(), "<eos>"]]
    score = evaluate_stream(
        TransfoXLForCausalLM.from_pretrained(folder),
        ids,
        batch_size=recorded["batch"],
        segment_length=recorded["tgt_len"],
        mem_len=recorded["mem_len"],
        clamp_len=recorded["clamp_len"],
        same_length=recorded["same_length"],
        memory_init=recorded["memory_at_start"],
        progress=False,
    )
    assert score.predictions == recorded["predictions"]
    assert score.loss == pytest.approx(recorded["nll_per_token"], abs=NUMBERS)
    # to the digits that are recorded
    assert score.perplexity == pytest.approx(recorded["perplexity"], rel=NUMBERS)


def test_units_are_nats_bits_and_perplexity() -> None:
    score = evaluate_stream(make_model(), random_ids(12), segment_length=4, progress=False)
    assert score.bits_per_token == pytest.approx(score.loss / 0.6931471805599453)
    assert score.perplexity == pytest.approx(2.718281828459045**score.loss)
    assert score.tokens_per_second == pytest.approx(11 / score.seconds)
    assert score.losses is None


def test_a_model_keeps_its_mode_and_is_scored_without_dropout() -> None:
    model, ids = make_model(), random_ids(12)
    model.train()
    model.transformer.layers[0].eval()
    modes = [module.training for module in model.modules()]
    first = evaluate_stream(model, ids, segment_length=4, progress=False)
    second = evaluate_stream(model, ids, segment_length=4, progress=False)
    assert first.loss == second.loss
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_comes_back_after_an_error() -> None:
    model = make_model().train()
    with pytest.raises(ValueError, match="mem_len"):
        evaluate_stream(model, random_ids(12), segment_length=4, mem_len=-1, progress=False)
    with pytest.raises(ValueError, match="stream"):
        score_sequences(model, [[1, 2]], mode="both")
    assert model.training


def test_tokens_read_again_match_the_original() -> None:
    """`ext_len` without memory, as the original PyTorch code recorded it. With memory it swaps two arguments."""
    recorded = pytorch_case("xl-ext-len-no-mem")
    model = TransfoXLForCausalLM(TransfoXLConfig(**recorded.fields))
    model.load_state_dict(recorded.state, strict=False)
    segments = [recorded.segment(index) for index in range(recorded.num_segments())]
    expected = torch.cat([segment["nll"] for segment in segments], dim=1)
    targets = torch.cat([segment["target"] for segment in segments], dim=1)
    texts = torch.cat([segments[0]["input_ids"][:, :1], targets], dim=1)
    score = evaluate_stream(
        model, texts.flatten(), batch_size=3, segment_length=6, ext_len=7, return_losses=True, progress=False
    )
    assert_close("losses", score.losses, expected, NUMBERS)


@pytest.mark.parametrize("ext_len", [2, 5, 9])
def test_tokens_read_again_enter_the_memory_once(ext_len: int) -> None:
    """The memory ends where the repeated tokens begin, and a query sees memory, repeated tokens and its segment."""
    model, ids = make_model(same_length=False, mem_len=4, ext_len=ext_len), random_ids(26)
    slow = SlowTransfoXL(model.config, model.state_dict())
    memory, expected = slow.new_memory(1)[0], []
    with torch.no_grad():
        for start in range(0, 25, 5):
            first = max(0, start - ext_len)
            read = slow.read(ids[None, first : start + 5], [memory.branch()])
            expected.append(slow.losses(read, ids[None, first + 1 : start + 6])[0, start - first :])
            if (kept := start + 5 - ext_len) > first:
                slow.read(ids[None, first:kept], [memory])
    score = evaluate_stream(model, ids, segment_length=5, return_losses=True, progress=False)
    assert_close("losses", score.losses[0], torch.cat(expected), NUMBERS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": [5], "segment_length": 3}, "`batch_size` \\(1\\) rows, but has 1"),
        ({"token_ids": range(7), "segment_length": 3, "batch_size": 4}, "\\(4\\) rows, but has 7"),
        ({"token_ids": range(7), "segment_length": 0}, "`segment_length` must be an int of at least 1, but is 0"),
        ({"token_ids": range(7), "segment_length": 3, "batch_size": 0}, "`batch_size`"),
        ({"token_ids": range(7), "segment_length": 3, "ext_len": -1}, "`ext_len`"),
        ({"token_ids": [1, 2, 29], "segment_length": 3}, "`token_ids` .* 0 and 28 .* has 29 at position 2"),
        ({"token_ids": [1.0, 2.0], "segment_length": 3}, "`token_ids` must hold integers"),
        ({"token_ids": [[1, 2]], "segment_length": 3}, "`token_ids` must have one dimension, time"),
    ],
)
def test_impossible_streams_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_stream(make_model(), progress=False, **arguments)


# --- score_sequences

SENTENCES = [random_ids(length, seed=length).tolist() for length in range(1, 10)]


@pytest.mark.parametrize("segment_length", [512, 3])
def test_sentences_score_the_same_batched_alone_and_in_any_order(segment_length: int) -> None:
    """C32: sentences of lengths 1 to 9, each with a fresh memory."""
    model = make_model()
    expected = torch.tensor([log_probability(model, sentence) for sentence in SENTENCES], dtype=torch.float64)
    together = score_sequences(model, SENTENCES, batch_size=4, segment_length=segment_length)
    assert together.dtype == torch.float64
    assert_close("together", together, expected, SUMS)
    alone = torch.cat([score_sequences(model, [s], segment_length=segment_length) for s in SENTENCES])
    assert_close("alone", alone, expected, SUMS)
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    shuffled = score_sequences(model, [SENTENCES[i] for i in order], batch_size=5, segment_length=segment_length)
    assert_close("shuffled", shuffled, expected[order], SUMS)


@pytest.mark.parametrize("same_length", [True, False])
@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
def test_sentences_in_segments_equal_loops(same_length: bool, memory_init: str) -> None:
    """C32: long sentences go through the memory; rows that end earlier leave no trace in those that go on."""
    model = make_model(same_length=same_length, memory_init=memory_init, mem_len=4)
    expected = torch.stack([-slow_losses(model, torch.tensor(s), 3).sum() for s in SENTENCES[1:]])
    scores = score_sequences(model, SENTENCES[1:], batch_size=8, segment_length=3)
    assert_close("scores", scores, expected, SUMS)


@pytest.mark.parametrize("segment_length", [512, 7])
def test_a_running_text_scores_each_sentence_after_the_others(segment_length: int) -> None:
    """C32: mode `stream`: sums add up to the joined text's; only the very first token is not scored."""
    model = make_model()
    scores = score_sequences(model, SENTENCES, mode="stream", segment_length=segment_length)
    so_far: list[int] = []
    for index, sentence in enumerate(SENTENCES):
        joined = so_far + sentence
        expected = log_probability(model, joined, first=max(1, len(so_far)))
        assert scores[index].item() == pytest.approx(expected, abs=SUMS), index
        so_far = joined
    assert scores.sum().item() == pytest.approx(log_probability(model, so_far), abs=3 * SUMS)


@pytest.mark.parametrize("mode", ["independent", "stream"])
def test_first_tokens_are_scored_after_a_context(mode: str) -> None:
    """C32: without context a sequence of n tokens has n - 1 scores, after one it has n."""
    model, context = make_model(), random_ids(11, seed=50).tolist()
    sentences = SENTENCES[:3]
    for given, prefix in (
        ({"context": context}, context),
        ({"bos_token_id": 7}, [7]),
        ({"context": context, "bos_token_id": 7}, [7, *context]),
    ):
        scores = score_sequences(model, sentences, mode=mode, **given)
        before = list(prefix)
        for index, sentence in enumerate(sentences):
            expected = log_probability(model, before + sentence, first=len(before))
            assert scores[index].item() == pytest.approx(expected, abs=SUMS)
            before += sentence if mode == "stream" else []
    assert score_sequences(model, [[5]], mode=mode).tolist() == [0.0]


@pytest.mark.parametrize("mode", ["independent", "stream"])
def test_empty_sequences_score_zero(mode: str) -> None:
    model = make_model()
    assert score_sequences(model, [], mode=mode).tolist() == []
    assert score_sequences(model, [[], []], mode=mode).tolist() == [0.0, 0.0]
    scores = score_sequences(model, [[], SENTENCES[4], []], mode=mode)
    assert scores[[0, 2]].tolist() == [0.0, 0.0]
    assert scores[1].item() == pytest.approx(log_probability(model, SENTENCES[4]), abs=SUMS)
    assert score_sequences(model, [[]], mode=mode, context=[3, 4]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: score_sequences(model, [[1], [2, 3, 77]]), r"`sequences\[1\]` .* has 77 at position 2"),
        (lambda model: score_sequences(model, [[1]], context=[-1]), r"`context` .* has -1 at position 0"),
        (lambda model: score_sequences(model, [[1]], bos_token_id=29), r"`bos_token_id` .* has 29"),
        (lambda model: score_sequences(model, [[0.5]]), r"`sequences\[0\]` must hold integers"),
        (lambda model: score_continuations(model, [1], [[2], [29]]), r"`continuations\[1\]` .* \(`vocab_size` 29\)"),
        (lambda model: score_continuations(model, [30], [[2]]), r"`context_ids` .* has 30"),
        (lambda model: score_continuations(model, [], [[2]]), "`context_ids` must hold at least one token"),
        (lambda model: embed_documents(model, [[1], [40]]), r"`documents\[1\]` .* has 40"),
        (lambda model: embed_documents(model, [[1], []]), r"`documents\[1\]` must hold at least one token"),
        (lambda model: embed_documents(model, [[1]], segment_length=0), "`segment_length`"),
    ],
)
def test_foreign_ids_are_reported_with_their_place(call: Any, message: str) -> None:
    """C128: ids of another tokenizer are named, with the item and the position."""
    with pytest.raises(ValueError, match=message):
        call(make_model())


# --- score_continuations


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("batch_size", [32, 3])
def test_hypotheses_score_like_joined_texts(batch_size: int, memory_init: str) -> None:
    """C128: a context of 50 tokens, 20 hypotheses of unequal length, a memory that is shorter than the context."""
    model = make_model(mem_len=13, same_length=True, memory_init=memory_init)
    context = random_ids(50, seed=99).tolist()
    hypotheses = [random_ids(1 + (5 * index) % 11, seed=index).tolist() for index in range(20)]
    expected = [log_probability(model, context + hypothesis, first=50) for hypothesis in hypotheses]
    scores = score_continuations(model, context, hypotheses, batch_size=batch_size, segment_length=16)
    assert_close("scores", scores, torch.tensor(expected, dtype=torch.float64), SUMS)


@pytest.mark.parametrize("context_length", [1, 2, 30])
def test_hypotheses_score_like_joined_texts_while_the_memory_holds_all(context_length: int) -> None:
    """C128: without `same_length` this needs a memory long enough for both, and one that starts empty."""
    model = make_model(mem_len=45, same_length=False)
    context = random_ids(context_length, seed=99).tolist()
    hypotheses = [random_ids(length, seed=length).tolist() for length in (3, 1, 14, 7)]
    expected = [log_probability(model, context + hypothesis, first=context_length) for hypothesis in hypotheses]
    scores = score_continuations(model, context, hypotheses, segment_length=8)
    assert_close("scores", scores, torch.tensor(expected, dtype=torch.float64), SUMS)


def test_hypotheses_read_the_context_once() -> None:
    """C128: the cost is that of one context, not of one per hypothesis."""
    model = make_model(mem_len=60)
    read = []
    model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: read.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    score_continuations(model, random_ids(50).tolist(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert sum(read) == 49 + 3 * 3


# --- documents

DOCUMENTS = [random_ids(length, seed=length).tolist() for length in (17, 1, 40, 8, 16, 23)]


def last_state(model: torch.nn.Module, document: list[int]) -> torch.Tensor:
    """One document, one pass, no memory."""
    model.eval()
    with torch.no_grad():
        return model.base_model(torch.tensor([document])).last_hidden_state[0, -1]


@pytest.mark.parametrize("head", [TransfoXLModel, TransfoXLForCausalLM])
@pytest.mark.parametrize("segment_length", [8, 3, 100])
def test_documents_of_any_length_embed_like_a_single_pass(head: type, segment_length: int) -> None:
    """C62: with `same_length`, in batches of different lengths."""
    torch.manual_seed(2)
    model = head(make_config()).double()
    expected = torch.stack([last_state(model, document) for document in DOCUMENTS])
    vectors = embed_documents(model, DOCUMENTS, segment_length=segment_length, batch_size=4)
    assert_close("vectors", vectors, expected, NUMBERS)
    alone = torch.cat([embed_documents(model, [d], segment_length=segment_length) for d in DOCUMENTS])
    assert_close("alone", alone, expected, NUMBERS)


def cut_from_the_end(length: int, segment_length: int) -> list[slice]:
    starts = [0, *range(length % segment_length or segment_length, length, segment_length)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], length], strict=True)]


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
def test_documents_in_segments_equal_loops(memory_init: str) -> None:
    """C62: without `same_length` the memory sets what is seen; a batch gives what each document gives alone.

    Documents are cut from the end.
    """
    model = make_model(same_length=False, mem_len=5, memory_init=memory_init)
    slow = SlowTransfoXL(model.config, model.state_dict())
    expected = []
    with torch.no_grad():
        for document in DOCUMENTS:
            memory = slow.new_memory(1)
            for segment in cut_from_the_end(len(document), 6):
                read = slow.read(torch.tensor([document])[:, segment], memory)
            expected.append(read[0].hidden_states[-1][-1])
    vectors = embed_documents(model, DOCUMENTS, segment_length=6, batch_size=3)
    assert_close("vectors", vectors, torch.stack(expected), NUMBERS)


def test_documents_are_classified_by_their_last_token() -> None:
    """C62: one row of scores per document, as the model gives for the document in one pass."""
    torch.manual_seed(3)
    model = TransfoXLForSequenceClassification(make_config(num_labels=4)).double().eval()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([document])).logits for document in DOCUMENTS])
    logits = classify_documents(model, DOCUMENTS, segment_length=5, batch_size=4)
    assert logits.shape == (6, 4)
    assert_close("logits", logits, expected, NUMBERS)
    assert not logits.requires_grad


def test_no_documents_give_no_vectors() -> None:
    assert embed_documents(make_model(), []).shape == (0, 16)


def test_a_long_text_of_one_kind_needs_no_clusters() -> None:
    """Without clusters the logits are plain, and the loss is what their softmax says."""
    model, ids = make_model(cutoffs=[], div_val=1), random_ids(30)
    score = evaluate_stream(model, ids, segment_length=30, mem_len=0, same_length=False, progress=False)
    model.eval()
    with torch.no_grad():
        memory = model.init_memory(1, mem_len=0, same_length=False)
        scores = model(ids[None], cache=memory).logits[0].double().log_softmax(-1)
    expected = -sum(scores[position, ids[position + 1]].item() for position in range(29)) / 29
    assert score.loss == pytest.approx(expected, abs=NUMBERS)
    assert math.isfinite(score.perplexity)

"""Surprisal of tokens and words against float64 loops, and their places in the text."""

import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.reference.transformer_xl import SlowTransfoXL
from hf_txl.scoring import TextScore, evaluate_stream, score_texts
from hf_txl.scoring.surprisal import TextScorer
from hf_txl.tokenization_transfo_xl import build_vocabulary

# float64 models, float32 losses of order 1 to 10
NUMBERS = 2e-5

TEXTS = {
    "quotes": "I don't know, “Mr. Brown” said.\nIt's the well-known (old) man's 'boat'!",
    "chinese": "他说：中文 很好。\n对",
    "unknown": "the zyzzyva sat on the qwertz, the end",
    "empty lines": "\n\nthe man\n\n\nsat\n",
    "crlf": "the man\r\nsat\r\n\r\ndown",
    "byte-order mark": "\ufeffthe man sat",
    "spaces": "  the   man\tsat  ",
    "empty": "",
    "blank": " ",
}
VOCABULARY = "I don't know Mr. Brown said. It's the well known old man boat sat on end down 他 说 中 文 很 好"
MODES = ["moses", "pretokenized", "characters", "bytes"]


def tokenizer_of(mode: str) -> TransfoXLTokenizer:
    special = ["<eos>", "<unk>"]
    symbols = build_vocabulary([VOCABULARY + "\n" + VOCABULARY], mode, special=special)
    return TransfoXLTokenizer.from_vocabulary(symbols, mode, line_end=None if mode in MODES[2:] else "<eos>")


def model_of(tokenizer: Any, **fields: Any) -> TransfoXLForCausalLM:
    torch.manual_seed(3)
    sizes = {"d_model": 12, "n_head": 2, "d_inner": 16, "n_layer": 2, "mem_len": 9, "clamp_len": -1, "cutoffs": []}
    large = {"init_std": 0.4, "proj_init_std": 0.4, "dropout": 0.0, "same_length": True}
    config = TransfoXLConfig(vocab_size=len(tokenizer), **{**sizes, **large, **fields})
    return TransfoXLForCausalLM(config).double().eval()


def slow_bits(model: TransfoXLForCausalLM, ids: list[int]) -> list[float]:
    """Surprisal of each token but the first: token by token with a memory, by loops over queries and keys."""
    slow = SlowTransfoXL(model.config, model.state_dict())
    memory, bits = slow.new_memory(1), []
    for token, following in zip(ids, ids[1:], strict=False):
        read = slow.read(torch.tensor([[token]]), memory)
        bits.append(slow.losses(read, torch.tensor([[following]]))[0, 0].item() / math.log(2))
    return bits


def words_by_hand(text: str) -> list[tuple[int, int]]:
    """Where white space begins and ends words."""
    spans, start = [], None
    for place, character in enumerate([*text.replace("\ufeff", " "), " "]):
        if character.isspace():
            if start is not None:
                spans.append((start, place))
            start = None
        elif start is None:
            start = place
    return spans


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_words_sum_the_surprisals_of_their_tokens(text: str, mode: str) -> None:
    tokenizer = tokenizer_of(mode)
    model = model_of(tokenizer)
    (score,) = score_texts(model, tokenizer, [text], first_token_after="<eos>")
    ids = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([token.token for token in score.tokens])]
    expected = slow_bits(model, ids)
    assert [token.surprisal for token in score.tokens] == pytest.approx(expected, abs=NUMBERS)
    assert [(word.start, word.end) for word in score.words] == words_by_hand(text)
    by_word: dict[int, float] = {}
    for token, bits in zip(score.tokens, expected, strict=True):
        if token.word is not None:
            by_word[token.word] = by_word.get(token.word, 0.0) + bits
    for index, word in enumerate(score.words):
        assert word.word == text[word.start : word.end]
        assert word.surprisal == pytest.approx(by_word.get(index, 0.0), abs=10 * NUMBERS)
    lines = [bits for token, bits in zip(score.tokens, expected, strict=True) if token.word is None]
    assert math.fsum([*lines, *(word.surprisal for word in score.words)]) == pytest.approx(score.total, abs=1e-3)
    assert score.total == pytest.approx(math.fsum(expected), abs=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokens_lie_in_their_words(text: str, mode: str) -> None:
    tokenizer = tokenizer_of(mode)
    (score,) = score_texts(model_of(tokenizer), tokenizer, [text])
    place = 0
    for token in score.tokens:
        assert place <= token.end and token.start <= token.end <= len(text)
        place = token.start
        piece = text[token.start : token.end].strip()
        if token.word is not None and piece:
            word = score.words[token.word]
            assert word.start <= token.start + text[token.start : token.end].index(piece) < word.end
        if not token.is_unknown and token.word is not None and mode == "pretokenized":
            assert token.token == piece
    assert "".join(text[token.start : token.end] for token in score.tokens if mode != "bytes").replace(
        " ", ""
    ).replace("\t", "") == ("" if mode == "bytes" else text.replace(" ", "").replace("\t", "").replace("\ufeff", ""))


def test_known_cases_are_cut_as_people_would() -> None:
    tokenizer = tokenizer_of("moses")
    model = model_of(tokenizer)
    (score,) = score_texts(model, tokenizer, ["It's the well-known man, zyzzyva."])
    assert [word.word for word in score.words] == ["It's", "the", "well-known", "man,", "zyzzyva."]
    assert [word.has_unknown for word in score.words] == [False, False, True, True, True]
    (apart,) = score_texts(model, tokenizer, ["It's the well-known man, zyzzyva."], words="punctuation")
    assert [word.word for word in apart.words] == ["It's", "the", "well-known", "man", ",", "zyzzyva", "."]


def test_the_first_token_has_a_surprisal_only_after_another() -> None:
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    (without,) = score_texts(model, tokenizer, ["the man sat"])
    (after,) = score_texts(model, tokenizer, ["the man sat"], first_token_after="<eos>")
    assert without.tokens[0].surprisal is None and without.words[0].surprisal is None
    assert after.tokens[0].surprisal is not None
    ids = tokenizer("the man sat").input_ids
    assert [token.surprisal for token in without.tokens[1:3]] == pytest.approx(slow_bits(model, ids), abs=NUMBERS)


def surprisals(scores: list[TextScore]) -> list[list[float | None]]:
    return [[token.surprisal for token in score.tokens] for score in scores]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_texts_do_not_depend_on_order_and_batch(batch_size: int) -> None:
    """C32: five texts of 0 to 9 tokens."""
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    texts = ["", "the", "the man", "the old man sat down", "I know the old man said the boat sat"]
    options = {"first_token_after": "<eos>", "line_end": None}
    expected = [slow_bits(model, [0, *tokenizer(text).input_ids]) for text in texts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 4, 3, 2, 0]):
        found = surprisals(score_texts(model, tokenizer, [texts[i] for i in order], batch_size=batch_size, **options))
        for index, bits in zip(order, found, strict=True):
            assert bits == pytest.approx(expected[index], abs=NUMBERS)


@pytest.mark.parametrize("segment_length", [1, 4, 100])
def test_running_texts_are_one_text(segment_length: int) -> None:
    """C32: the other mode, with its name."""
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    texts = ["the man sat", "", "down the boat", "end"]
    scores = score_texts(model, tokenizer, texts, memory="running", segment_length=segment_length, unit="bits")
    ids = [id_ for text in texts if text for id_ in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    found = [bits for row in surprisals(scores) for bits in row]
    assert found[0] is None
    assert found[1:] == pytest.approx(slow_bits(model, ids), abs=NUMBERS)


def test_nats_are_bits_times_the_logarithm_of_two() -> None:
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    (bits,), (nats,) = (score_texts(model, tokenizer, ["the man sat down"], unit=unit) for unit in ("bits", "nats"))
    for one, other in zip(bits.words[1:], nats.words[1:], strict=True):
        assert other.surprisal == pytest.approx(one.surprisal * math.log(2))


# --- words that begin with a space


@pytest.fixture(scope="module")
def pieces() -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the man sat on the boat. then the boats sank, the men swam."] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@torch.no_grad()
def test_the_end_of_a_word_belongs_to_the_word(pieces: PreTrainedTokenizerFast) -> None:
    """Pimentel and Meister 2024, theorem 1, by all logits of the text: p(word) · p(end | word) / p(end | before)."""
    model = model_of(pieces)
    text = "the boats sank, then the mat"
    (score,) = score_texts(model, pieces, [text], first_token_after="<eos>", segment_length=3)
    ids = [pieces.eos_token_id, *pieces(text).input_ids]
    logs = model(torch.tensor([ids]), use_cache=False).logits[0].double().log_softmax(-1)
    ends = [id_ for token, id_ in pieces.get_vocab().items() if token.startswith("Ġ")]
    end = logs[:, ends].logsumexp(-1)
    place = 1
    total = 0.0
    for word in score.words:
        # its tokens: the first one begins with a space, but in the first word
        own = [place]
        while place + len(own) < len(ids) and not pieces.convert_ids_to_tokens(ids[place + len(own)]).startswith("Ġ"):
            own.append(place + len(own))
        log = sum(logs[position - 1, ids[position]] for position in own) + end[own[-1]]
        if place > 1:
            log = log - end[place - 1]
        assert word.surprisal == pytest.approx(-log.item() / math.log(2), abs=1e-4)
        assert word.num_tokens == len(own)
        place += len(own)
        total -= log.item() / math.log(2)
    assert place == len(ids)
    # the ends cancel but for the last one
    assert total == pytest.approx(score.total - end[-1].item() / math.log(2), abs=1e-4)


@pytest.mark.parametrize("sizes", [(1, 0, 2, 1), (4,)])
def test_a_scorer_goes_on_with_its_stream(sizes: tuple[int, ...], pieces: PreTrainedTokenizerFast) -> None:
    """Ends of words, too, have the memory of the lists of texts before."""
    model = model_of(pieces)
    texts = ["the boats sank", "", " then the men", " swam, the mat"]
    options: dict[str, Any] = {"memory": "running", "first_token_after": "<eos>"}
    (whole,) = score_texts(model, pieces, ["".join(texts)], **options)
    scorer, found, left = TextScorer(model, pieces, **options), [], list(texts)
    for size in sizes:
        found += scorer(left[:size])
        del left[:size]
    tokens = [token.surprisal for score in found for token in score.tokens]
    assert tokens == pytest.approx([token.surprisal for token in whole.tokens], abs=NUMBERS)
    words = [(word.word, word.surprisal) for score in found for word in score.words]
    assert [word for word, _ in words] == [word.word for word in whole.words]
    assert [bits for _, bits in words] == pytest.approx([word.surprisal for word in whole.words], abs=1e-4)


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "none"}, "`memory` must be one of"),
        ({"unit": "bytes"}, "`unit` must be one of"),
        ({"words": "all"}, "`words` must be one of"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"first_token_after": "<bos>"}, "must be in the vocabulary"),
    ],
)
def test_arguments_that_are_not_as_described_are_refused(changes: dict[str, Any], message: str) -> None:
    tokenizer = tokenizer_of("pretokenized")
    with pytest.raises(ValueError, match=message):
        score_texts(model_of(tokenizer), tokenizer, ["the man"], **changes)


def test_a_model_that_cannot_score_is_refused() -> None:
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    with pytest.raises(ValueError, match=r"`tokenizer` must have as many tokens as the model \(\d+\), but has"):
        score_texts(model, tokenizer_of("characters"), ["the man"])
    with pytest.raises(TypeError, match="`texts` must be several texts"):
        score_texts(model, tokenizer, "the man")
    next(model.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match="`model` must have finite weights, but `.*` has NaN or infinity"):
        score_texts(model, tokenizer, ["the man"])


def test_the_mean_of_the_surprisals_is_the_loss_of_the_stream() -> None:
    tokenizer = tokenizer_of("pretokenized")
    model = model_of(tokenizer)
    (score,) = score_texts(model, tokenizer, ["the man sat down on the old boat"], unit="nats", line_end=None)
    loss = evaluate_stream(model, tokenizer(score.text).input_ids, segment_length=3, progress=False).loss
    assert score.total / (len(score.tokens) - 1) == pytest.approx(loss, abs=1e-5)

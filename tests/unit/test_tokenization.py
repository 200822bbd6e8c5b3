"""The tokenizer gives the recorded ids, is the same wherever it is loaded, and says what it cannot do."""

import json
import lzma
import os
import pickle
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TokenizersBackend
from transformers.utils import logging
from typer.testing import CliRunner, Result

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer, tokenization_transfo_xl
from hf_txl.cli import app
from hf_txl.data import TokenStreams
from hf_txl.tokenization_transfo_xl import build_vocabulary, encode_file, encode_lines
from tests.helpers import FIXTURES

VOCABULARIES = FIXTURES / "vocabularies"
LEGACY: dict[str, Any] = json.loads((VOCABULARIES / "legacy-tokenizer" / "expected.json").read_text(encoding="utf-8"))
MODES = ("moses", "pretokenized", "characters", "bytes")
WORDS = ["<eos>", "<unk>", "the", ",", "."]

MARKS_STAY = "`@-@`, `@,@` and `@.@` of a text that is already tokenised are tokens, and not cut into three"
QUOTES_SPLIT = "an apostrophe at the beginning or the end of a text is a quotation mark there as elsewhere"
# sentences with other tokens than those of transformers 4: its tokens, ours, and the reason
DIFFERENT: dict[str, tuple[list[str], list[str], str]] = {
    "'single quoted'": (["'single", "quoted'"], ["'", "single", "quoted", "'"], QUOTES_SPLIT),
    "“curly double” and ‘curly single’": (
        ['"', "curly", "double", '"', "and", "'", "curly", "single'"],
        ['"', "curly", "double", '"', "and", "'", "curly", "single", "'"],
        QUOTES_SPLIT,
    ),
    "@-@ @,@ @.@": (["@", "-", "@", "@", ",", "@", "@", ".", "@"], ["@-@", "@,@", "@.@"], MARKS_STAY),
    "state @-@ of @-@ the @-@ art": (
        ["state", "@", "-", "@", "of", "@", "-", "@", "the", "@", "-", "@", "art"],
        ["state", "@-@", "of", "@-@", "the", "@-@", "art"],
        MARKS_STAY,
    ),
    "1 @,@ 234 @.@ 56": (
        ["1", "@", ",", "@", "234", "@", ".", "@", "56"],
        ["1", "@,@", "234", "@.@", "56"],
        MARKS_STAY,
    ),
}


@pytest.fixture(scope="module")
def legacy() -> TransfoXLTokenizer:
    return TransfoXLTokenizer.from_vocabulary(list(LEGACY["sym2idx"]), extra_special_tokens=["<formula>"])


def all_words(text: str) -> list[str]:
    """Tokens in mode `moses` of a vocabulary that has them all."""
    words = build_vocabulary([text], special=("<eos>", "<unk>", "<formula>"))
    tokenizer = TransfoXLTokenizer.from_vocabulary(words, extra_special_tokens=["<formula>"])
    return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)


# --- moses


def test_sentences_get_the_ids_of_transformers_4(legacy: TransfoXLTokenizer) -> None:
    same = [sentence for sentence in LEGACY["sentences"] if sentence["text"] not in DIFFERENT]
    assert (len(same), len(LEGACY["sentences"])) == (72, 77)
    for sentence in same:
        assert legacy(sentence["text"]).input_ids == sentence["ids"], sentence["text"]


def test_words_are_those_of_transformers_4_whatever_the_vocabulary() -> None:
    """Ids hide a difference between two unknown words."""
    for sentence in LEGACY["sentences"]:
        if sentence["text"] not in DIFFERENT:
            assert all_words(sentence["text"]) == sentence["tokens"]


@pytest.mark.parametrize("text", DIFFERENT)
def test_where_tokens_differ_from_transformers_4_both_are_known(text: str) -> None:
    theirs, ours, _ = DIFFERENT[text]
    [recorded] = [sentence["tokens"] for sentence in LEGACY["sentences"] if sentence["text"] == text]
    assert recorded == theirs
    assert all_words(text) == ours != theirs


def test_decoded_sentences_are_those_of_transformers_4(legacy: TransfoXLTokenizer) -> None:
    """Those with unknown words too, which the recorded strings hold as `<unk>`."""
    for sentence in LEGACY["sentences"]:
        assert legacy.decode(sentence["ids"]) == sentence["decoded"]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello (bracket)", "Hello ( bracket )"),
        ("Hello, the.", "Hello , the ."),
        ("$5,000 1.73 m", "$ 5 @,@ 000 1 @.@ 73 m"),
        ("state-of-the-art", "state @-@ of @-@ the @-@ art"),
        ("the U.S. and Mr. Smith, i.e. him.", "the U.S. and Mr. Smith , i.e. him ."),
        ('He said: "It\'s 5%!"', 'He said : " It \'s 5 % ! "'),
        ("<unk>'s name <eos> and <formula>", "<unk> 's name <eos> and <formula>"),
    ],
)
def test_text_is_cut_at_punctuation_and_decoded_as_it_was(text: str, tokens: str) -> None:
    """C78, C79"""
    assert all_words(text) == tokens.split(" ")
    words = ["<unk>", *dict.fromkeys(token for token in tokens.split(" ") if token != "<unk>")]
    special = [token for token in ("<formula>",) if token in words]
    tokenizer = TransfoXLTokenizer.from_vocabulary(words, extra_special_tokens=special)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # WikiText-103 has these words
        ("rock'n'roll in the '50's and 42'W", "rock 'n'roll in the ' 50 's and 42'W"),
        ("No. 5, no. Of the No. the", "No. 5 , no . Of the No. the"),
        ("approx. ten. Ten", "approx. ten . Ten"),
        ("v3.5. 1.5. End..5", "v3 @.@ 5 . 1 @.@ 5 . End .. 5"),
        ('"yes", "no".', '" yes , " " no . "'),
        ("日本語 text 한국", "日 本 語 text 한 국"),
        ("a\x01b\tc\x85d", "ab c d"),
        ("the<EOS>end", "the <EOS> end"),
    ],
)
def test_rules_for_words_quotes_and_other_scripts(text: str, tokens: str) -> None:
    assert all_words(text) == tokens.split(" ")


def test_a_quotation_is_joined_on_its_inner_side() -> None:
    words = ["<unk>", '"', "'", "a", "b", "s", ",", ".", "(", ")", "classes"]
    tokenizer = TransfoXLTokenizer.from_vocabulary(words)

    def decoded(tokens: str) -> str:
        return tokenizer.decode(tokenizer.convert_tokens_to_ids(tokens.split(" ")))

    assert decoded('a " b " , " a " .') == 'a "b", "a".'
    assert decoded("a ' b ' , ' a ' .") == "a 'b', 'a'."
    assert decoded("the classes ' a ' b '") == "<unk> classes' a 'b'"
    assert decoded("( \" a \" ) ( ' b ' )") == "(\"a\") ('b')"
    assert decoded('" a') == '"a'
    assert decoded('"') == '"'
    assert tokenizer.decode([]) == ""


def test_offsets_are_where_a_token_stands(legacy: TransfoXLTokenizer) -> None:
    for sentence in LEGACY["sentences"]:
        text = sentence["text"]
        encoded = legacy(text, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        assert all(start < end <= len(text) for start, end in spans)
        assert all(first[0] <= second[0] for first, second in pairwise(spans))
        for token_id, (start, end) in zip(encoded.input_ids, spans, strict=True):
            token = legacy.convert_ids_to_tokens(token_id)
            # a mark such as `@-@` stands where its character does, a quotation mark for one of another form
            if token not in ("<unk>", "@-@", '"', "'", "-", "...", "'s"):
                assert text[start:end] in (token, token.strip("@"))
    assert legacy("well-known", return_offsets_mapping=True)["offset_mapping"] == [(0, 4), (4, 5), (5, 10)]
    assert legacy("a  1,234 <eos>", return_offsets_mapping=True)["offset_mapping"] == [
        (0, 1),
        (3, 4),
        (4, 5),
        (5, 8),
        (9, 14),
    ]


# --- pretokenized, characters, bytes


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_pretokenized_is_a_plain_split(text: str) -> None:
    words = ["<unk>", *dict.fromkeys(text.split())]
    ids = TransfoXLTokenizer.from_vocabulary(words, "pretokenized")(text).input_ids
    assert ids == [words.index(word) for word in text.split()]


def test_wikitext_is_split_and_looked_up(tmp_path: Path) -> None:
    path = VOCABULARIES / "wikitext-103" / "valid-beginning.tokens"
    words = build_vocabulary([path], "pretokenized", special=["<eos>"])
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 197
    expected = [words.index(word) for line in lines for word in [*line.split(), "<eos>"]]
    ids = encode_file(TransfoXLTokenizer.from_vocabulary(words, "pretokenized"), path)
    assert ids.dtype == "int64"
    assert ids.tolist() == expected


@pytest.mark.slow
def test_wikitext_103_with_its_whole_vocabulary() -> None:
    """Needs the corpus: `WIKITEXT_103` names a folder with the validation file and the words' counts."""
    folder = Path(os.environ.get("WIKITEXT_103", "/nowhere"))
    if not folder.is_dir():
        pytest.skip("WIKITEXT_103 names no folder with wiki.valid.tokens and train-vocab-counts.txt.xz")
    with lzma.open(folder / "train-vocab-counts.txt.xz", "rt", encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\n").rsplit(" ", 1) for line in file]
    # the list leaves out `<unk>`, whose count is what the other words leave of the published number of tokens
    counts = {word: int(count) for word, count in rows if int(count)} | {"<unk>": 441_959}
    symbols = ["<eos>", *sorted(counts, key=counts.__getitem__, reverse=True)]
    assert len(symbols) == 267_735
    tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "pretokenized")
    ids = encode_file(tokenizer, folder / "wiki.valid.tokens")
    number = {symbol: index for index, symbol in enumerate(symbols)}
    with open(folder / "wiki.valid.tokens", encoding="utf-8") as lines:
        expected = [number[word] for line in lines for word in [*line.split(), "<eos>"]]
    assert len(ids) == 217_646
    assert ids.tolist() == expected


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1))
def test_characters_are_decoded_to_the_same_text(text: str) -> None:
    words = ["<unk>", *dict.fromkeys(text), *({"\n", " "} - set(text))]
    tokenizer = TransfoXLTokenizer.from_vocabulary(words, "characters")
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert encoded.input_ids == [words.index(character) for character in text]
    assert encoded["offset_mapping"] == [(index, index + 1) for index in range(len(text))]
    assert tokenizer.decode(encoded.input_ids) == text


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_bytes_are_those_of_the_text(text: str) -> None:
    tokenizer = TransfoXLTokenizer.from_vocabulary([str(byte) for byte in range(256)], "bytes")
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_line_breaks_that_the_vocabulary_lacks_are_left_out(tmp_path: Path) -> None:
    """As in enwik8, where the original code never sees them."""
    numbers = [str(byte) for byte in range(256) if byte != ord("\n")]
    tokenizer = TransfoXLTokenizer.from_vocabulary(numbers, "bytes", unk_token=None)
    assert tokenizer.decode(tokenizer("a\n\nb\n").input_ids) == "ab"
    path = tmp_path / "bytes"
    # the second half of a character, as where a corpus is cut at a number of bytes
    path.write_bytes(b"\xa4\nab\n")
    assert encode_file(tokenizer, path).tolist() == [numbers.index(str(byte)) for byte in b"\xa4ab"]
    characters = TransfoXLTokenizer.from_vocabulary(["<unk>", "a", "b"], "characters")
    assert characters("a\nb").input_ids == [1, 2]


def test_a_file_of_bytes_has_the_ids_of_its_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("naïve\n日本 text\n", encoding="utf-8")
    symbols = ["<unk>", *build_vocabulary([path], "bytes", special=(), max_size=9)]
    tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "bytes")
    expected = tokenizer(path.read_text(encoding="utf-8")).input_ids
    assert encode_file(tokenizer, path).tolist() == expected
    assert 0 in expected
    closed = TransfoXLTokenizer.from_vocabulary(symbols[1:], "bytes", unk_token=None)
    with pytest.raises(ValueError, match="bytes that are not in the vocabulary"):
        encode_file(closed, path)


def test_text_is_lower_cased_but_special_tokens_are_not() -> None:
    words = ["<S>", "<UNK>", "the", "a"]
    tokenizer = TransfoXLTokenizer.from_vocabulary(words, "pretokenized", lower_case=True)
    assert tokenizer("<S> The A B <UNK>").input_ids == [0, 2, 3, 1, 1]


# --- building


@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>"])
def test_either_unknown_token_is_found(unknown: str, tmp_path: Path) -> None:
    """C81"""
    TransfoXLTokenizer.from_vocabulary(["the", unknown]).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.unk_token == unknown
    assert tokenizer("the unseen").input_ids == [0, 1]


def test_a_vocabulary_without_unknown_token_must_say_so() -> None:
    with pytest.raises(ValueError, match="must have an unknown token, <unk> or <UNK>"):
        TransfoXLTokenizer.from_vocabulary(["the", "a"])
    closed = TransfoXLTokenizer.from_vocabulary(["the", "a"], unk_token=None)
    assert closed("the a the").input_ids == [0, 1, 0]
    with pytest.raises(ValueError, match="must consist of symbols of the vocabulary, but has 'unseen'"):
        closed(["the", "the unseen word"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "words"}, r"`mode` must be one of \['moses', .*but is 'words'"),
        ({"pad_token": "<pad>"}, r"must be among `symbols`, but these are not: \['<pad>'\]"),
        ({"extra_special_tokens": ["<formula>"]}, r"these are not: \['<formula>'\]"),
        ({"line_start": "<S>"}, r"these are not: \['<S>'\]"),
        ({"symbols": ["<unk>", "a", "b", "a"]}, r"repeated: \['a'\]"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransfoXLTokenizer.from_vocabulary(**{"symbols": WORDS, **options})


def test_words_are_ordered_by_frequency_and_then_by_first_appearance(tmp_path: Path) -> None:
    """C86"""
    text = "d b a c a b, the\nend of a b . d . <eos> <unk>'s"
    ordered = build_vocabulary([text], special=["<unk>", "<eos>"])
    assert ordered == ["<unk>", "<eos>", "b", "a", "d", ".", "c", ",", "the", "end", "of", "'s"]
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    assert build_vocabulary([path], special=["<unk>", "<eos>"]) == ordered
    assert build_vocabulary([path, path], special=["<unk>", "<eos>"]) == ordered
    assert build_vocabulary([text], special=["<unk>"], min_freq=3) == ["<unk>", "b", "a"]
    assert build_vocabulary([text], special=["<unk>"], max_size=1) == ["<unk>", "b"]
    with pytest.raises(TypeError, match="must be several texts or paths"):
        build_vocabulary(text)


@pytest.mark.parametrize("enabled", [True, False])
def test_files_are_counted_with_progress_bars_on_and_off(enabled: bool, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b a\nb a c\n", encoding="utf-8")
    was_enabled = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
    try:
        assert build_vocabulary([tmp_path / "text"], "pretokenized", special=[]) == ["a", "b", "c"]
    finally:
        (logging.enable_progress_bar if was_enabled else logging.disable_progress_bar)()


def test_a_vocabulary_counted_as_the_original_does_is_the_original_one() -> None:
    case = VOCABULARIES / "corpus-wt103"
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    assert build_vocabulary([case / "data" / "train.txt"], "pretokenized", special=["<eos>"]) == expected["idx2sym"]


def test_a_vocabulary_counted_as_transformers_4_does_has_its_words() -> None:
    """Only those at the beginning or the end of a line differ where they have an apostrophe there."""
    special = ["<eos>", "<unk>", "<formula>"]
    words = build_vocabulary([VOCABULARIES / "legacy-tokenizer" / "train.txt"], special=special)
    missing = [word for word in LEGACY["sym2idx"] if word not in words]
    assert missing == ["0'", "140000'", "'Coordinates", "81W'", "'left", "'int"]


def test_characters_of_a_mixed_text_are_counted_and_found_again(tmp_path: Path) -> None:
    """C84"""
    text = "深度学习 deep learning 学习"
    words = build_vocabulary([text], "characters", special=["<unk>"])
    assert words == ["<unk>", *" e学习n深度dplarig"]
    tokenizer = TransfoXLTokenizer.from_vocabulary(words, "characters")
    assert tokenizer.decode(tokenizer(text).input_ids) == text


# --- files and lines


def test_every_line_ends_with_the_end_token_blank_ones_too(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the , the\n\n \n.", encoding="utf-8")
    tokenizer = TransfoXLTokenizer.from_vocabulary(WORDS)
    assert encode_file(tokenizer, path).tolist() == [2, 3, 2, 0, 0, 0, 4, 0]
    assert encode_file(tokenizer, path, line_end=None).tolist() == [2, 3, 2, 4]
    assert list(encode_lines(tokenizer, ["the", ""], line_start=".")) == [[4, 2, 0], [4, 0]]
    with pytest.raises(ValueError, match="`line_end` must be in the vocabulary of `tokenizer`, but is '<S>'"):
        encode_file(tokenizer, path, line_end="<S>")
    (tmp_path / "empty").touch()
    assert encode_file(tokenizer, tmp_path / "empty").shape == (0,)


def test_ids_of_a_file_make_streams(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the , the .\n" * 9, encoding="utf-8")
    words = build_vocabulary([path], max_size=3)
    ids = encode_file(TransfoXLTokenizer.from_vocabulary(words), path)
    streams = TokenStreams(ids, batch_size=2, segment_length=5)
    assert next(streams.segments())["input_ids"].shape == (2, 5)
    assert max(Counter(ids.tolist())) < len(words)


def test_lines_are_encoded_with_any_tokenizer() -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = TokenizersBackend(tokenizer_object=backend)
    assert list(encode_lines(plain, ["a b", ""])) == [[0, 1], []]
    assert list(encode_lines(plain, ["a b", ""], line_end="</s>")) == [[0, 1, 2], [2]]


@pytest.mark.parametrize("mode", MODES)
def test_a_very_long_line_has_the_same_ids(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "the end of Mr. Smith's 1,000 words " * 20
    tokenizer = TransfoXLTokenizer.from_vocabulary(["<unk>", *build_vocabulary([line], mode, special=())], mode)
    monkeypatch.setattr(tokenization_transfo_xl, "BATCH_CHARACTERS", 50)
    assert list(encode_lines(tokenizer, [line, line[:9]])) == [
        tokenizer(line).input_ids,
        tokenizer(line[:9]).input_ids,
    ]


# --- loading


def saved(folder: Path, mode: str, **options: Any) -> TransfoXLTokenizer:
    text = (VOCABULARIES / "legacy-tokenizer" / "train.txt").read_text(encoding="utf-8")
    tokenizer = TransfoXLTokenizer.from_vocabulary(build_vocabulary([text, "日本語 <unk>"], mode), mode, **options)
    tokenizer.save_pretrained(folder)
    TransfoXLConfig(vocab_size=len(tokenizer), cutoffs=[]).save_pretrained(folder)
    return tokenizer


TEXT = "The object's well-known 1,234.5 values <eos> are <unk>'s \"日本\" state @-@ of.\n"
READ_ELSEWHERE = """
import json, sys
sys.modules["hf_txl"] = None  # cannot be imported
from transformers import AutoTokenizer
result = {}
for mode in sys.argv[3:]:
    # the folder holds the code of the model, not of the tokenizer
    tokenizer = AutoTokenizer.from_pretrained(f"{sys.argv[1]}/{mode}", trust_remote_code=True)
    encoded = tokenizer(sys.argv[2])
    ids, special = encoded["input_ids"], tokenizer.all_special_tokens
    result[mode] = [type(tokenizer).__name__, ids, tokenizer.decode(ids), sorted(encoded), special]
print(json.dumps(result))
"""


@pytest.mark.full
def test_files_give_the_same_ids_in_a_process_without_this_package(tmp_path: Path) -> None:
    tokenizers = {mode: saved(tmp_path / mode, mode) for mode in MODES}
    command = [sys.executable, "-c", READ_ELSEWHERE, str(tmp_path), TEXT, *MODES]
    elsewhere = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    for mode, made in tokenizers.items():
        loaded = AutoTokenizer.from_pretrained(tmp_path / mode)
        assert type(loaded) is TransfoXLTokenizer
        encoded = loaded(TEXT)
        ids = encoded["input_ids"]
        assert ids == made(TEXT).input_ids
        # no `token_type_ids`: the model would refuse them
        keys = ["attention_mask", "input_ids"]
        assert elsewhere[mode] == ["TokenizersBackend", ids, loaded.decode(ids), keys, ["<eos>", "<unk>"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_tokenizer_is_whole(mode: str, tmp_path: Path) -> None:
    """C80"""
    made = saved(tmp_path, mode, padding_side="left")
    loaded = TransfoXLTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == loaded.vocab_size == len(made)
    tokens = loaded.convert_ids_to_tokens(list(range(len(loaded))))
    assert loaded.convert_tokens_to_ids(tokens) == list(range(len(loaded)))
    assert loaded.get_vocab() == made.get_vocab()
    assert (loaded.eos_token_id, loaded.unk_token_id, loaded.bos_token, loaded.pad_token) == (0, 1, None, None)
    assert (loaded.mode, loaded.padding_side, loaded.symbols) == (mode, "left", made.symbols)
    assert list(encode_lines(loaded, [TEXT])) == list(encode_lines(made, [TEXT]))


def test_a_vocabulary_can_be_used_in_another_mode(tmp_path: Path) -> None:
    moses = saved(tmp_path, "moses")
    plain = TransfoXLTokenizer.from_pretrained(tmp_path).in_mode("pretokenized")
    assert plain.symbols == moses.symbols
    assert plain.decode(plain("the end, ,").input_ids) == "the <unk> ,"
    assert plain.in_mode("moses")(TEXT).input_ids == moses(TEXT).input_ids
    lower = TransfoXLTokenizer.from_vocabulary(WORDS, "moses", lower_case=True).in_mode("pretokenized")
    assert lower("THE ,").input_ids == [2, 3]
    numbers = [str(byte) for byte in range(256)]
    assert TransfoXLTokenizer.from_vocabulary(numbers, "bytes").in_mode("pretokenized")("10 9").input_ids == [10, 9]


def test_a_model_of_another_size_is_reported(tmp_path: Path) -> None:
    """C84"""
    size = len(saved(tmp_path, "moses"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AutoTokenizer.from_pretrained(tmp_path)
    TransfoXLConfig(vocab_size=84827).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"has {size} tokens, but the model beside it has `vocab_size` 84827"):
        AutoTokenizer.from_pretrained(tmp_path)


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["vocab.pkl", "vocab.bin"])
def test_a_folder_of_transformers_4_leads_to_the_converter(name: str, tmp_path: Path) -> None:
    """C90"""
    trace = tmp_path / "trace"
    (tmp_path / name).write_bytes(pickle.dumps(Opens(trace)))
    TransfoXLConfig(vocab_size=9).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no `tokenizer\.json`.*`hf-txl convert`"):
        AutoTokenizer.from_pretrained(tmp_path)
    assert not trace.exists()


# --- padding


def test_a_pad_token_of_its_own_keeps_the_end_tokens_in_the_loss() -> None:
    """C83"""
    tokenizer = TransfoXLTokenizer.from_vocabulary(WORDS)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model = TransfoXLForCausalLM(
        TransfoXLConfig(
            vocab_size=len(WORDS), cutoffs=[], d_model=8, d_embed=8, n_head=2, d_head=4, d_inner=8, n_layer=1
        )
    )
    model.resize_token_embeddings(len(tokenizer))
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collator([tokenizer(text) for text in ("the , the <eos>", "the <eos>")])
    assert batch["labels"].tolist() == [[2, 3, 2, 0], [2, 0, -100, -100]]
    assert model(**batch).loss.isfinite()


def test_the_end_token_as_pad_token_is_ignored_in_the_loss() -> None:
    """C83: the trap that the guide names."""
    tokenizer = TransfoXLTokenizer.from_vocabulary(WORDS, pad_token="<eos>")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batch = collator([tokenizer(text) for text in ("the , the <eos>", "the <eos>")])
    assert batch["labels"].tolist() == [[2, 3, 2, -100], [2, -100, -100, -100]]


# --- building from files


def build(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["build-tokenizer", *map(str, arguments)])


ANY_BYTES = bytes(range(256)) * 3 + b"caf\xe9\r\n\r\rline\r\n<eos>\xff\xfe" + "größer".encode()


def test_bytes_are_counted_as_files_of_bytes_are_read(tmp_path: Path) -> None:
    """All of them: carriage returns, and what is no UTF-8."""
    file = tmp_path / "file"
    file.write_bytes(ANY_BYTES)
    counts = Counter(ANY_BYTES)
    expected = sorted(counts, key=lambda byte: (-counts[byte], ANY_BYTES.index(byte)))
    assert build_vocabulary([file], "bytes", special=["<unk>"]) == ["<unk>", *map(str, expected)]
    assert build_vocabulary([file, file], "bytes", special=[], max_size=5) == [str(byte) for byte in expected[:5]]
    result = build(file, "--output", tmp_path / "out", "--mode", "bytes")
    assert result.exit_code == 0, result.output
    tokenizer = TransfoXLTokenizer.from_pretrained(tmp_path / "out")
    ids = encode_file(tokenizer, file)
    symbols = tokenizer.symbols
    assert bytes(int(symbols[index]) for index in ids) == ANY_BYTES


def test_a_file_of_bytes_and_its_text_have_the_same_symbols(tmp_path: Path) -> None:
    text = "größer\r\nals „das“\n" * 30
    (tmp_path / "file").write_bytes(text.encode())
    assert build_vocabulary([tmp_path / "file"], "bytes") == build_vocabulary([text], "bytes")


@pytest.mark.parametrize("mode", ["moses", "pretokenized", "characters"])
def test_a_file_that_is_no_utf_8_is_named(mode: str, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 caf\xe9")
    result = build(tmp_path / "latin.txt", "--output", tmp_path / "out", "--mode", mode)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and "latin.txt must be a text in UTF-8" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["a b a", "a <unk> b a"])
def test_a_vocabulary_needs_no_token_for_unknown_symbols(content: str, tmp_path: Path) -> None:
    """WikiText-103 has `<unk>` in its text, other corpora have none at all."""
    (tmp_path / "text").write_text(content, encoding="utf-8")
    result = build(tmp_path / "text", "--output", tmp_path / "out", "--special", "<eos>", "--mode", "pretokenized")
    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a").input_ids == [1]
    if "<unk>" in content:
        assert tokenizer("zebra").input_ids == [tokenizer.unk_token_id]
    else:
        assert "text that contains one raises an error" in result.output
        with pytest.raises(ValueError, match="must consist of symbols of the vocabulary, but has 'zebra'"):
            tokenizer("zebra")


def test_special_tokens_of_the_command_are_special(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b <sep> a", encoding="utf-8")
    options = [option for token in ("<unk>", "<sep>", "<eos>") for option in ("--special", token)]
    assert build(tmp_path / "text", "--output", tmp_path / "out", *options).exit_code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a<sep>b").input_ids == [3, 1, 4]
    assert tokenizer.decode([3, 1, 4], skip_special_tokens=True) == "a b"

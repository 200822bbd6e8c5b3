"""Vocabularies of every origin are read without running anything, and give the ids that the original code gave."""

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hf_txl.conversion.read_pytorch import StoredObject
from hf_txl.conversion.vocabulary import Vocabulary, read_vocabulary
from hf_txl.tokenization_transfo_xl import encode_file, encode_lines
from tests.helpers import FIXTURES

VOCABULARIES = FIXTURES / "vocabularies"
CORPORA = ("enwik8", "lm1b", "text8", "wt103")
CHECKPOINTS = {"nv-div4": "checkpoint_last.pt", "nv-same-length": "checkpoint_best.pt"}
LEGACY = VOCABULARIES / "legacy-tokenizer"


def expected_of(case: str) -> dict[str, Any]:
    return json.loads((VOCABULARIES / case / "expected.json").read_text(encoding="utf-8"))


def source_of(case: str) -> Path:
    if case in CHECKPOINTS:
        return FIXTURES / "nvidia" / case / CHECKPOINTS[case]
    return VOCABULARIES / case / "data" / "cache.pt"


CASES = [*(f"corpus-{name}" for name in CORPORA), *CHECKPOINTS]


@pytest.mark.parametrize("case", CASES)
def test_symbols_and_settings_are_those_of_the_original(case: str) -> None:
    expected = expected_of(case)
    vocabulary = read_vocabulary(source_of(case))
    assert vocabulary.symbols == expected["idx2sym"]
    assert vocabulary.lower_case == expected["lower_case"]
    assert vocabulary.mode == "pretokenized"
    if expected["eos_idx"] is not None:
        assert vocabulary.symbols.index(vocabulary.eos_token or "") == expected["eos_idx"]
    if expected["unk_idx"] is not None:
        assert vocabulary.symbols.index(vocabulary.unk_token or "") == expected["unk_idx"]


@pytest.mark.parametrize("name", CORPORA)
def test_files_get_the_ids_that_the_original_gave_them(name: str) -> None:
    case = VOCABULARIES / f"corpus-{name}"
    tokenizer = read_vocabulary(case / "data" / "cache.pt").tokenizer()
    recorded = load_file(case / "expected.safetensors")
    splits = [split for split in ("train", "valid", "test") if split in recorded]
    assert len(splits) == (2 if name == "lm1b" else 3)
    for split in splits:
        path = case / "data" / f"{split}.txt"
        assert encode_file(tokenizer, path).tolist() == recorded[split].tolist()
        # the sentences of the One Billion Word corpus are kept apart
        if f"{split}.lengths" in recorded:
            with open(path, encoding="utf-8") as lines:
                lengths = [len(ids) for ids in encode_lines(tokenizer, lines)]
            assert lengths == recorded[f"{split}.lengths"].tolist()


@pytest.mark.parametrize("case", CASES)
def test_sentences_get_the_ids_that_the_original_gave_them(case: str) -> None:
    vocabulary = read_vocabulary(source_of(case))
    tokenizer = vocabulary.tokenizer()
    sentences = [sentence for sentence in expected_of(case)["sentences"] if sentence["ids"] is not None]
    assert len(sentences) > 5
    for sentence in sentences:
        [ids] = encode_lines(tokenizer, [sentence["text"]])
        assert ids == sentence["ids"], sentence["text"]
        known = [symbol if symbol in vocabulary.symbols else "<UNK>" for symbol in sentence["symbols"]]
        assert tokenizer.decode(ids) == " ".join(known)


@pytest.mark.parametrize("case", CASES)
def test_where_the_original_raises_unknown_words_are_unknown_or_an_error(case: str) -> None:
    """Its `Vocab` knows an unknown token only if it was read from a list. Here it is `<unk>`, if the list has it."""
    vocabulary = read_vocabulary(source_of(case))
    tokenizer = vocabulary.tokenizer()
    sentences = [sentence for sentence in expected_of(case)["sentences"] if sentence["ids"] is None]
    assert bool(sentences) == (case != "corpus-lm1b")
    for sentence in sentences:
        if vocabulary.unk_token is None:
            with pytest.raises(ValueError, match="must consist of symbols of the vocabulary"):
                next(encode_lines(tokenizer, [sentence["text"]]))
            continue
        words = [word if word in vocabulary.symbols else "<unk>" for word in sentence["symbols"]]
        [ids] = encode_lines(tokenizer, [sentence["text"]])
        assert tokenizer.convert_ids_to_tokens(ids) == words
        assert "<unk>" in words


def test_a_published_corpus_gives_its_own_ids() -> None:
    folder = VOCABULARIES / "txl-cache-pt"
    vocabulary = read_vocabulary(folder)
    assert len(vocabulary) == 84
    ids = encode_file(vocabulary.tokenizer(), folder / "train.txt").tolist()
    assert len(ids) == 137
    assert ids[:16] == [0, 11, 3, 7, 12, 11, 0, 0, 24, 25, 3, 13, 14, 15, 7, 26]


@pytest.mark.parametrize("source", ["vocab.pkl", "vocab.bin", "saved", "saved/vocab.pkl"])
def test_files_of_transformers_4_are_one_vocabulary(source: str) -> None:
    vocabulary = read_vocabulary(LEGACY / source)
    assert vocabulary == Vocabulary(
        list(expected_of("legacy-tokenizer")["sym2idx"]),
        mode="moses",
        unk_token="<unk>",
        eos_token="<eos>",
        line_end="<eos>",
        extra_special_tokens=("<formula>",),
    )


def attributes(**changes: Any) -> dict[str, Any]:
    symbols = ["<eos>", "a", "<unk>", "b"]
    stored = {"sym2idx": {symbol: index for index, symbol in enumerate(symbols)}, "idx2sym": symbols}
    return {**stored, "lower_case": False, "delimiter": None, **changes}


def test_ids_are_enough_where_the_list_of_words_is_empty() -> None:
    """transformers 4.35 saved such tokenizers, and could not decode with them."""
    assert read_vocabulary(attributes(idx2sym=[])).symbols == ["<eos>", "a", "<unk>", "b"]


def test_a_special_token_that_the_vocabulary_lacks_is_none() -> None:
    """transformers 4 gave it the first id past the end, for which a model has no row."""
    vocabulary = read_vocabulary(attributes(_special_tokens_map={"additional_special_tokens": ["<formula>", "b"]}))
    assert vocabulary.extra_special_tokens == ("b",)
    assert len(vocabulary.tokenizer()) == 4


def test_objects_and_checkpoints_are_searched_for_their_vocabulary() -> None:
    vocab = StoredObject("utils.vocabulary.Vocab", (), attributes())
    corpus = StoredObject("data_utils.Corpus", (), {"dataset": "wt103", "vocab": vocab})
    assert read_vocabulary(vocab) == read_vocabulary(corpus) == read_vocabulary({"vocab": vocab, "args": None})
    assert read_vocabulary(vocab).mode == "pretokenized"


def test_an_empty_delimiter_means_characters() -> None:
    vocab = StoredObject("utils.vocabulary.Vocab", (), attributes(delimiter=""))
    assert read_vocabulary(vocab).tokenizer()("ab").input_ids == [1, 3]


def test_lists_of_words_are_read_by_their_first_column(tmp_path: Path) -> None:
    listed = tmp_path / "1b_word_vocab.txt"
    listed.write_text("<S>\nthe 120\n<UNK>\t3\n", encoding="utf-8")
    vocabulary = read_vocabulary(listed)
    assert vocabulary.symbols == ["<S>", "the", "<UNK>"]
    assert (vocabulary.line_start, vocabulary.line_end, vocabulary.unk_token) == ("<S>", "<S>", "<UNK>")
    assert list(encode_lines(vocabulary.tokenizer(), ["the end"])) == [[0, 1, 2, 0]]


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    """Some editors put one before a list."""
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_bytes(mark + b"<eos>\na\n<unk>\n")
    marked = read_vocabulary(tmp_path / "marked" / "vocab.txt")
    assert marked == read_vocabulary(tmp_path / "plain" / "vocab.txt")
    assert list(marked.symbols) == ["<eos>", "a", "<unk>"]


def test_the_list_and_the_corpus_of_the_one_billion_words_agree() -> None:
    folder = VOCABULARIES / "corpus-lm1b" / "data"
    assert read_vocabulary(folder / "1b_word_vocab.txt") == read_vocabulary(folder / "cache.pt")


def test_corpus_info_leads_to_the_vocabulary_beside_it(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("<eos>\na\n<unk>\n", encoding="utf-8")
    info = tmp_path / "corpus-info.json"
    info.write_text('{"vocab_size": 3, "cutoffs": [], "dataset": "wt103"}', encoding="utf-8")
    assert read_vocabulary(info).symbols == ["<eos>", "a", "<unk>"]
    info.write_text('{"vocab_size": 4}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"corpus-info\.json.*vocab_size.*\(3\).*is 4"):
        read_vocabulary(info)


@pytest.mark.parametrize(
    ("name", "mode"), [("enwik8", "bytes"), ("text8", "characters"), ("lm1b", "moses"), ("wt103", "moses")]
)
def test_the_mode_for_text_that_is_not_prepared_follows_from_the_symbols(name: str, mode: str) -> None:
    assert read_vocabulary(source_of(f"corpus-{name}")).raw_mode == mode


def test_raw_bytes_and_characters_get_the_ids_of_the_prepared_files() -> None:
    """The data scripts of the original code write numbers for bytes, and `_` for a space, with spaces between them."""
    enwik8 = read_vocabulary(source_of("corpus-enwik8"))
    numbers = (VOCABULARIES / "corpus-enwik8" / "data" / "valid.txt").read_text(encoding="utf-8")
    raw = b"\n".join(bytes(int(number) for number in line.split()) for line in numbers.split("\n"))
    prepared = [token_id for ids in encode_lines(enwik8.tokenizer(), [numbers]) for token_id in ids]
    assert enwik8.tokenizer("bytes")(raw.decode("utf-8")).input_ids == prepared

    text8 = read_vocabulary(source_of("corpus-text8"))
    symbols = (VOCABULARIES / "corpus-text8" / "data" / "valid.txt").read_text(encoding="utf-8").split()
    tokenizer = text8.tokenizer("characters")
    text = "".join(symbols).replace("_", " ")
    assert tokenizer(text).input_ids == text8.tokenizer()(" ".join(symbols)).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"weights": 1}, "holds no vocabulary"),
        ([1, 2], "holds no vocabulary"),
        (attributes(sym2idx={"a": 0, "b": 2}), "ids 0 to 1 once each"),
        (attributes(sym2idx={"a": 0, "b": 0}), "ids 0 to 1 once each"),
        (attributes(idx2sym=["<eos>", "b", "<unk>", "a"]), "differ"),
        (attributes(sym2idx={}, idx2sym=[]), "at least one"),
        (attributes(sym2idx={1: 0}, idx2sym=[]), "list of texts"),
        (attributes(delimiter="|"), "`delimiter` must be None"),
    ],
)
def test_what_is_no_vocabulary_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_vocabulary(source)


def test_files_that_are_no_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no vocabulary; looked for cache.pt"):
        read_vocabulary(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        read_vocabulary(tmp_path / "missing.txt")
    listed = tmp_path / "vocab.txt"
    listed.write_text("a\n\nb\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.txt: line 2 must hold a symbol"):
        read_vocabulary(listed)
    listed.write_text("a\nb\na\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"vocab\.txt: .*repeated: \['a'\]"):
        read_vocabulary(listed)


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["cache.pt", "cache.pkl", "vocab.pkl", "vocab.bin"])
def test_a_pickle_that_acts_is_refused_and_does_nothing(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / name).write_bytes(pickle.dumps({**attributes(), "counter": Opens(trace)}))
    with pytest.raises(ValueError, match=name):
        read_vocabulary(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
@pytest.mark.parametrize("protocol", range(4))
def test_a_corpus_with_arrays_of_numpy_is_read(
    protocol: int, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the TensorFlow code keeps beside the vocabulary in its `cache.pkl`; NumPy 2 moved its own modules."""
    classes = {}
    for file, name in (("data_utils", "Corpus"), ("vocabulary", "Vocab")):
        classes[name] = type(name, (), {"__module__": file})
        code = types.ModuleType(file)
        setattr(code, name, classes[name])
        monkeypatch.setitem(sys.modules, file, code)
    corpus, vocabulary = classes["Corpus"](), classes["Vocab"]()
    symbols = ["<eos>", "b", "a", "<unk>"]
    attributes = {"special": ["<eos>"], "lower_case": False, "idx2sym": symbols, "delimiter": None, "vocab_file": None}
    vars(vocabulary).update(attributes, sym2idx={symbol: index for index, symbol in enumerate(symbols)})
    vars(corpus).update(
        dataset="wt103", vocab=vocabulary, train=np.arange(5), valid=np.array([], np.int64), test=[np.int64(3)]
    )
    content = pickle.dumps(corpus, protocol).replace(b"numpy._core", module.encode())
    (tmp_path / "cache.pkl").write_bytes(content)
    for name in ("data_utils", "vocabulary"):
        monkeypatch.delitem(sys.modules, name)
    assert read_vocabulary(tmp_path / "cache.pkl").symbols == symbols


# ---- what transformers wrote beside a vocabulary -----------------------------------------------------------------


def legacy_folder(folder: Path, **files: Any) -> Path:
    """A folder as transformers 4 left it, with further files in JSON."""
    folder.mkdir(exist_ok=True)
    (folder / "vocab.pkl").write_bytes(pickle.dumps(attributes()))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
        )
    return folder


def with_properties(token: str) -> dict[str, Any]:
    return {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def test_special_tokens_may_be_written_with_their_properties(tmp_path: Path) -> None:
    names = {"eos_token": "a", "unk_token": "b", "additional_special_tokens": ["<unk>"], "pad_token": "<eos>"}
    plain = read_vocabulary(legacy_folder(tmp_path, special_tokens_map=names))
    written = {
        key: [with_properties(each) for each in value] if isinstance(value, list) else with_properties(value)
        for key, value in names.items()
    }
    assert read_vocabulary(legacy_folder(tmp_path, special_tokens_map=written)) == plain
    assert (plain.eos_token, plain.unk_token, plain.extra_special_tokens) == ("a", "b", ("<unk>",))
    assert plain.tokenizer().pad_token == "<eos>"


@pytest.mark.parametrize("value", [None, 3, {}, {"content": 3}, [], [None, 3, {}]])
@pytest.mark.parametrize("name", ["eos_token", "unk_token", "pad_token", "additional_special_tokens"])
def test_odd_special_tokens_are_none(name: str, value: Any, tmp_path: Path) -> None:
    vocabulary = read_vocabulary(legacy_folder(tmp_path, special_tokens_map={name: value}))
    assert (vocabulary.eos_token, vocabulary.unk_token, vocabulary.pad_token) == ("<eos>", "<unk>", None)
    assert vocabulary.extra_special_tokens == ()
    assert read_vocabulary(attributes(_special_tokens_map={name: value})).unk_token == "<unk>"


def test_added_tokens_are_symbols_where_the_model_has_rows_for_them(tmp_path: Path) -> None:
    """A model that was resized has; others are still of the size of the vocabulary."""
    folder = legacy_folder(
        tmp_path,
        added_tokens={"<sep>": 5, "<pad>": 4, "a": 1},
        special_tokens_map={"pad_token": "<pad>", "unk_token": "<unk>"},
    )
    vocabulary = read_vocabulary(folder)
    assert vocabulary.added_tokens == ("<pad>", "<sep>")
    assert vocabulary.symbols == ["<eos>", "a", "<unk>", "b"]
    for size in (4, 5, 7):
        assert vocabulary.of_size(size) == vocabulary
    assert vocabulary.tokenizer().pad_token is None
    tokenizer = vocabulary.of_size(6).tokenizer()
    assert len(tokenizer) == 6
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 4)
    assert tokenizer("a<sep>b <pad>").input_ids == [1, 5, 3, 4]


@pytest.mark.parametrize(
    "added", [{"<pad>": 5}, {"<pad>": 4, "<sep>": 4}, {"<pad>": 0}, {"<pad>": "4"}, {"<pad>": 4.5}]
)
def test_added_tokens_with_other_ids_are_refused(added: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"added_tokens\.json beside it must give the ids from 4 on"):
        read_vocabulary(legacy_folder(tmp_path, added_tokens=added))


@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map", "added_tokens"])
@pytest.mark.parametrize("content", ["{", "", "[]", "null", "[" * 100_000])
def test_a_damaged_file_beside_a_vocabulary_is_named(name: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.json must"):
        read_vocabulary(legacy_folder(tmp_path, **{name: content}))


@pytest.mark.parametrize("name", ["vocab.json", "corpus-info.json", "vocab.txt"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfea", b"", b"3", b"{}", b'{"a": "b"}', b'["a", 3]', b"null"])
def test_damaged_text_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a\n", encoding="utf-8")
    (tmp_path / name).write_bytes(content)
    if name == "vocab.txt" and content[:1] not in (b"\xff", b""):
        assert len(read_vocabulary(tmp_path / name)) == 1
        return
    with pytest.raises(ValueError, match=name):
        read_vocabulary(tmp_path / name)


ODD: dict[str, Any] = {
    "no dictionary": {"sym2idx": ["a"]},
    "nothing": {"sym2idx": None},
    "texts for ids": {"sym2idx": {"a": "0"}},
    "numbers for ids": {"sym2idx": {"a": 0.0}},
    "truth for ids": {"sym2idx": {"a": False}},
    "mixed ids": {"sym2idx": {"a": 0, "b": None}},
    "mixed symbols": {"sym2idx": {"a": 0, None: 1}, "idx2sym": []},
    "a list in words": {"idx2sym": 7},
    "a dictionary of words": {"idx2sym": {0: "a"}},
    "a delimiter of lists": {"delimiter": []},
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("is_object", [True, False])
def test_odd_vocabularies_are_refused_by_one_message(case: str, is_object: bool) -> None:
    stored = attributes(**ODD[case])
    with pytest.raises(ValueError, match="must"):
        read_vocabulary(StoredObject("utils.vocabulary.Vocab", (), stored) if is_object else stored)


def test_a_dictionary_of_ids_in_json_is_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"b": 2, "<unk>": 0, "the": 1}', encoding="utf-8")
    vocabulary = read_vocabulary(tmp_path)
    assert (vocabulary.symbols, vocabulary.mode) == (["<unk>", "the", "b"], "pretokenized")


def test_a_list_of_characters_in_json_is_for_text_as_it_is() -> None:
    """White space is among them, which `pretokenized` never sees."""
    tokenizer = read_vocabulary(FIXTURES / "hf_transfo_xl_small" / "char" / "vocab.json").tokenizer()
    assert tokenizer.mode == "characters"
    assert tokenizer.decode(tokenizer("to be\nor not").input_ids) == "to be\nor not"


@pytest.mark.parametrize("mode", ["bytes", "characters"])
def test_words_are_no_bytes_and_no_characters(mode: str) -> None:
    words = read_vocabulary(VOCABULARIES / "txl-cache-pt")
    with pytest.raises(ValueError, match=rf"`mode` must be 'moses' or 'pretokenized' .* but is '{mode}'"):
        words.tokenizer(mode)
    with pytest.raises(ValueError, match="`mode` must be"):
        words.tokenizer().in_mode(mode)

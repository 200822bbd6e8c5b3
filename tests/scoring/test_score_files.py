"""`score_file` and `hf-txl score`: tables, streams, killed runs, several processes, and what is refused."""

import csv
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_txl import TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.scoring import TextScore, evaluate_files, score_file, score_files, score_texts
from hf_txl.scoring.tables import COLUMNS
from tests.scoring.test_words import MODES, model_of, tokenizer_of

ROOT = Path(__file__).parents[2]
LINES = [
    'I don\'t know, "Mr. Brown" said.\n',
    "\n",
    "the old\tman's boat\r\n",
    "他说 中文 zyzzyva\n",
    "  the well-known   end \r\n",
    "\r\n",
    "It's \x0b down\x0c on\u2028the boat\n",
    *[f"the man {'sat ' * number}down\n" for number in range(9)],
    "no break at the end",
]
EOS: dict[str, Any] = {"first_token_after": "<eos>"}


@pytest.fixture(params=MODES[:3])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(folder: Path, mode: str = "pretokenized") -> tuple[Any, TransfoXLTokenizer, Path]:
    """A model, its tokenizer and a text, in a folder."""
    tokenizer = tokenizer_of(mode)
    model = model_of(tokenizer).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "text.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "".join(LINES).encode())
    return model, tokenizer, file


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(score_files, "BLOCK_LINES", 3)
    patch.setattr(score_files, "BLOCK_CHARACTERS", 60)


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Rows of any of the three formats, with the types of their columns."""
    if output.suffix == ".parquet":
        return list(pyarrow.parquet.read_table(output).to_pylist())
    with output.open(encoding="utf-8", newline="") as file:
        if output.suffix == ".jsonl":
            return [json.loads(line) for line in file]
        kinds: dict[str, Callable[[str], Any]] = {
            "int64": int,
            "float64": float,
            "string": str,
            "bool": lambda flag: bool(int(flag)),
        }
        types = {**COLUMNS["word"], **COLUMNS["token"]}
        return [
            {name: None if cell == "" else kinds[types[name]](cell) for name, cell in row.items()}
            for row in csv.DictReader(file, dialect="excel-tab")
        ]


def expected_rows(scores: list[TextScore], level: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, score in enumerate(scores):
        if level == "word":
            rows += [
                {"text": number, "word_index": index, "word": each.word, "start": each.start, "end": each.end,
                 "surprisal": each.surprisal, "tokens": each.num_tokens, "unknown": each.has_unknown}
                for index, each in enumerate(score.words)
            ]  # fmt: skip
        else:
            rows += [
                {"text": number, "word_index": each.word, "token": each.token, "start": each.start, "end": each.end,
                 "surprisal": each.surprisal, "unknown": each.is_unknown}
                for each in score.tokens
            ]  # fmt: skip
    return rows


def assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    numbers = [row.pop("surprisal") for row in found]
    assert numbers == pytest.approx([row.pop("surprisal") for row in expected], abs=1e-4)
    assert found == expected


@pytest.mark.parametrize("level", COLUMNS)
@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
def test_a_table_has_the_scores_of_the_lines(
    kind: str, level: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, file = save(tmp_path, mode)
    small_blocks(monkeypatch)
    output = tmp_path / f"scores.{kind}"
    assert score_file(model, tokenizer, file, output, level=level, batch_size=3) == len(LINES)
    found = rows_of(output)
    for row in found:
        line = LINES[row["text"]]
        if level == "word":
            assert row["word"] == line[row["start"] : row["end"]] == line.split()[row["word_index"]]
    assert_same_rows(found, expected_rows(score_texts(model, tokenizer, LINES), level))
    assert not (tmp_path / f"scores.{kind}.parts").exists()


def test_a_parquet_file_without_any_surprisal_has_the_same_columns(tmp_path: Path) -> None:
    """Also words that look like dates stay words."""
    model, tokenizer, file = save(tmp_path)
    file.write_text("the\nman\n2019-01-01\n", encoding="utf-8")
    score_file(model, tokenizer, file, tmp_path / "scores.parquet", line_end=None)
    table = pyarrow.parquet.read_table(tmp_path / "scores.parquet")
    assert {field.name: str(field.type) for field in table.schema}["surprisal"] == "double"
    assert table.column("surprisal").to_pylist() == [None] * 3
    assert table.column("word").to_pylist() == ["the", "man", "2019-01-01"]


def test_a_running_memory_reads_the_file_as_one_stream(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `score_texts` and as the evaluation of the file, whose float64 sums come from other code."""
    model, tokenizer, file = save(tmp_path, mode)
    small_blocks(monkeypatch)
    options: dict[str, Any] = {"memory": "running", "same_length": True, "segment_length": 5}
    score_file(model, tokenizer, file, tmp_path / "scores.jsonl", level="token", **options)
    found = rows_of(tmp_path / "scores.jsonl")
    assert found[0]["surprisal"] is None
    bits = [row["surprisal"] for row in found[1:]]
    (whole,) = evaluate_files(model, tokenizer, [file], same_length=True, progress=False)
    assert len(bits) == whole.predictions
    assert math.fsum(bits) == pytest.approx(whole.predictions * whole.loss / math.log(2), abs=1e-4 * len(bits))
    assert_same_rows(found, expected_rows(score_texts(model, tokenizer, LINES, **options), "token"))


def test_blocks_are_all_lines_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    monkeypatch.setattr(score_files, "MOST_BLOCKS", 2)
    for blocks in (
        list(score_files.equal_blocks(LINES, 1)),
        list(score_files.equal_blocks(LINES, 100)),
        list(score_files.stream_blocks(LINES)),
    ):
        assert [line for block in blocks for line in block.lines] == LINES
        assert [block.first for block in blocks] == [LINES.index(block.lines[0]) for block in blocks]
    assert [len(block.lines) for block in score_files.equal_blocks(LINES, 1)] == [9, 8]


# --- runs that end early, and several processes


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a killed run is a fork")
@pytest.mark.parametrize("memory", ["fresh", "running"])
def test_a_run_that_was_killed_ends_with_the_bytes_of_an_undisturbed_run(memory: str, tmp_path: Path) -> None:
    """Killed once at every moment of its files, and ten times in a row."""
    save(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", "tests.scoring.score_jobs", str(tmp_path), memory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = re.search(r"(\d+) moments, 10 in a row", result.stdout)
    assert found is not None and int(found[1]) > 20, result.stdout


@pytest.mark.full
@pytest.mark.parametrize("memory", ["fresh", "running"])
def test_two_processes_write_the_bytes_of_one(memory: str, tmp_path: Path) -> None:
    model, tokenizer, file = save(tmp_path)
    file.write_bytes(file.read_bytes() + b"".join(b"\n" + "".join(LINES).encode() for _ in range(10)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*launcher, "-m", "hf_txl.cli", "score", tmp_path, file, "-o", tmp_path / "two.tsv", "--memory", memory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" lines") == 1
    score_file(model, tokenizer, file, tmp_path / "one.tsv", memory=memory)
    assert (tmp_path / "two.tsv").read_bytes() == (tmp_path / "one.tsv").read_bytes()


def limited(size: int, call: Callable[[], Any]) -> Any:
    """Call while files cannot grow beyond a size, which does what a full disk does."""
    import resource

    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, earlier[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of file sizes are those of Unix")
@pytest.mark.parametrize(
    ("memory", "sizes"), [("fresh", {50: False, 700: True}), ("running", {50: False, 700: False})]
)
def test_a_full_disk_is_one_message_and_the_run_can_go_on(
    memory: str, sizes: dict[int, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole parts are left, or nothing: full in the settings, in the first memory, in the output."""
    model, tokenizer, file = save(tmp_path)
    small_blocks(monkeypatch)
    output, parts = tmp_path / "scores.tsv", tmp_path / "scores.tsv.parts"
    before = sorted(tmp_path.iterdir())
    arguments = (tmp_path, file, "-o", output, "--memory", memory, "--batch-size", 3, "--mem-len", 2)
    whole = tmp_path / "whole.tsv"
    score_file(model, tokenizer, file, whole, memory=memory, batch_size=3, mem_len=2)
    before.append(whole)
    for size, leaves_parts in {**sizes, whole.stat().st_size - 1: True}.items():
        result = limited(size, lambda: run(*arguments))
        assert result.exit_code == 2 and result.stderr.count("Error:") == 1, result.output
        assert "Traceback" not in result.output and "too large" in result.stderr
        assert sorted(path for path in tmp_path.iterdir() if path != parts) == sorted(before)
        assert parts.exists() == leaves_parts
    assert not list(parts.glob("joined"))
    assert run(*arguments).exit_code == 0
    assert output.read_bytes() == whole.read_bytes() and not parts.exists()


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(path)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["score", *map(str, arguments)])


def test_the_command_passes_its_options_on(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "memory": "running",
        "first_token_after": "<eos>",
        "unit": "nats",
        "words": "punctuation",
        "segment_length": 4,
        "mem_len": 3,
        "clamp_len": 2,
    }
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    output = tmp_path / "scores.tsv"
    result = run(folder, folder / "text.txt", "-o", output, *given, "--no-same-length", "--level", "token")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"{output}: {len(LINES)} lines"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), TransfoXLTokenizer.from_pretrained(folder)
    expected = score_texts(model, tokenizer, LINES, same_length=False, **options)
    assert_same_rows(rows_of(output), expected_rows(expected, "token"))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", (), "`file` must hold text, but .* is empty"),
        (b"the man \xff sat", (), "must be a text in UTF-8, but is not: byte 8 is 0xff"),
        (b"the " * 3000 + b"\xc3(", (), "byte 12000 is 0xc3"),
        (b"xyzzy qwertz\n\nxyzzy", (), "`file` must hold a token of the vocabulary, but .* has none"),
        (b"\n\n", (), "`file` must hold a token of the vocabulary, but .* has none"),
        (b"the man", ("--first-token-after", "<s>"), "must be in the vocabulary of `tokenizer`, but is '<s>'"),
        (b"the man", ("-o", "scores.csv"), "`kind` must be one of .*, or `output` end with one"),
        (b"the man", ("-o", "text.txt"), "`output` must be a new file, but .*text.txt exists"),
    ],
)
def test_what_cannot_be_scored_is_one_message(
    content: bytes,
    options: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_bytes(content)
    result = run(
        folder, "text.txt", "-o", "scores.tsv", *options, *(["--format", "tsv"] if "text.txt" in options else [])
    )
    assert result.exit_code == 2
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert "Traceback" not in result.output and result.stderr.count("Error:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_models_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = tmp_path / "other"
    model.save_pretrained(other)
    tokenizer_of("characters").save_pretrained(other)
    arguments = (other, folder / "text.txt", "-o", tmp_path / "scores.tsv")
    assert "`tokenizer` must have as many tokens as the model" in run(*arguments).stderr
    next(model.parameters()).data.fill_(math.nan)
    tokenizer_of("pretokenized").save_pretrained(other)
    model.save_pretrained(other)
    result = run(*arguments)
    assert result.exit_code == 2 and "must have finite weights" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_parts_of_other_settings_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer, file = save(tmp_path)
    small_blocks(monkeypatch)
    output = tmp_path / "scores.tsv"
    with pytest.raises(OSError, match="File too large"):
        limited(900, lambda: score_file(model, tokenizer, file, output, level="token", batch_size=3))
    assert (tmp_path / "scores.tsv.parts").exists()
    with pytest.raises(FileExistsError, match="same settings, but the parts in .* have other `level`, `unit`; remove"):
        score_file(model, tokenizer, file, output, unit="nats", batch_size=3)
    next(model.parameters()).data.add_(1)
    with pytest.raises(FileExistsError, match="have other `model`"):
        score_file(model, tokenizer, file, output, level="token", batch_size=3)
    file.write_text("the end", encoding="utf-8")
    with pytest.raises(FileExistsError, match="have other `model`, `text`"):
        score_file(model, tokenizer, file, output, level="token", batch_size=3)


@pytest.mark.parametrize(("name", "value"), [("level", "line"), ("kind", "csv"), ("threads", 0)])
def test_arguments_that_are_not_as_described_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    model, tokenizer, file = save(tmp_path)
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        score_file(model, tokenizer, file, tmp_path / "scores.tsv", **{name: value})

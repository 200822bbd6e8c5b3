"""`evaluate_files` and `hf-txl evaluate` against recorded numbers, formulas and the original's scripts."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_txl import TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.demo import demo_text
from hf_txl.scoring import PRESETS, Evaluation, evaluate_files
from hf_txl.scoring.files import TextSize, plot_evaluations
from hf_txl.tokenization_transfo_xl import build_vocabulary
from tests.parity.test_trained_models import FOLDER, NATS_PER_TOKEN, evaluation_settings
from tests.scoring.test_words import model_of, slow_bits

TEXT = "the man sat\n\n the old man  sat down\nend\n"
# TEST_TGT_LEN, TEST_MEM_LEN, TEST_CLAMP_LEN (or --tgt_len, --mem_len, --clamp_len), and `add_eos` or `add_double_eos`
# in data_utils.py, by the original script that is named; all have --same_length
SCRIPTS = {
    "wt103": ("tf/sota/wt103.sh", 128, 1600, 1000, (None, "<eos>")),
    "wt103-base": ("pytorch/run_wt103_base.sh", 64, 640, 400, (None, "<eos>")),
    "enwik8": ("tf/sota/enwik8.sh", 128, 3800, 1000, (None, None)),
    "enwik8-base": ("pytorch/run_enwik8_base.sh", 80, 2100, 820, (None, None)),
    "text8": ("tf/sota/text8.sh", 128, 3800, 1000, (None, None)),
    "text8-base": ("tf/scripts/text8_base_gpu.sh", 80, 2100, 820, (None, None)),
    "lm1b": ("tf/sota/lm1b.sh", 32, 128, -1, ("<S>", "<S>")),
}


def tokenizer_of(mode: str = "pretokenized", special: tuple[str, ...] = ("<eos>", "<unk>")) -> TransfoXLTokenizer:
    return TransfoXLTokenizer.from_vocabulary(build_vocabulary([TEXT], mode, special=special), mode)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_presets_are_the_numbers_of_the_original_scripts() -> None:
    assert {
        name: (each.source, each.segment_length, each.mem_len, each.clamp_len, (each.line_start, each.line_end))
        for name, each in PRESETS.items()
    } == SCRIPTS
    assert all(each.same_length for each in PRESETS.values())


def test_recipes_and_presets_evaluate_alike() -> None:
    recipes = Path(__file__).parents[2] / "examples" / "recipes"
    for name in ("wt103-base", "enwik8-base", "text8-base"):
        training = json.loads((recipes / f"{name.replace('-', '_')}.json").read_text(encoding="utf-8"))["training"]
        recorded = {key.removeprefix("eval_"): value for key, value in training.items() if key.startswith("eval_")}
        assert PRESETS[name].settings() == recorded


@pytest.mark.parametrize(("kind", "setting"), evaluation_settings())
def test_files_give_every_recorded_loss_of_the_trained_models(
    kind: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    """Recorded with transformers 4 (`expected_eval.json`), from the text that the models held out."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER / kind)
    if kind == "word":
        symbols = (FOLDER / "word" / "vocab.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "pretokenized", line_end="<eos>", unk_token=None)
        text = FOLDER / "word" / "eval.txt"
    else:
        symbols = json.loads((FOLDER / "char" / "vocab.json").read_text(encoding="utf-8"))
        tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, "characters", unk_token=None)
        text = tmp_path / "text.txt"
        text.write_text(demo_text()[1_003_854:], encoding="utf-8", newline="")
    (found,) = evaluate_files(
        model,
        tokenizer,
        [text],
        segment_length=setting["tgt_len"],
        mem_len=setting["mem_len"],
        clamp_len=setting["clamp_len"],
        same_length=setting["same_length"],
        memory_init={"none": "empty", "empty": "empty", "zeros": "zeros"}[setting["memory_at_start"]],
        batch_size=setting["batch"],
        progress=False,
    )
    assert found.predictions == setting["predictions"]
    assert found.loss == pytest.approx(setting["nll_per_token"], abs=NATS_PER_TOKEN)


def test_a_file_is_one_stream_with_the_rules_of_its_preset(file: Path) -> None:
    tokenizer = tokenizer_of(special=("<eos>", "<unk>", "<S>"))
    model = model_of(tokenizer)
    lines = [tokenizer(line, add_special_tokens=False).input_ids for line in TEXT.splitlines()]
    eos, sentence = tokenizer.convert_tokens_to_ids(["<eos>", "<S>"])
    streams = {
        "wt103": [id_ for line in lines for id_ in [*line, eos]],
        "lm1b": [id_ for line in lines for id_ in [sentence, *line, sentence]],
        "text8": [id_ for line in lines for id_ in line],
    }
    for preset, ids in streams.items():
        model.config.same_length, model.config.mem_len = True, PRESETS[preset].mem_len
        (found,) = evaluate_files(model, tokenizer, [file], preset=preset, progress=False)
        expected = slow_bits(model, ids)
        assert found.predictions == len(expected) and found.size.tokens == len(ids)
        assert found.figures()["bits_per_token"] == pytest.approx(math.fsum(expected) / len(expected), abs=1e-5)
    again = evaluate_files(model, tokenizer, [file, file], preset="wt103", progress=False)
    assert again[0].size.tokens == 2 * len(streams["wt103"])


def test_units_are_the_mean_loss_times_tokens_per_unit() -> None:
    figures = Evaluation({}, math.log(8), 9, 1.0, TextSize(tokens=10, words=5, characters=30, bytes=60)).figures()
    assert figures == pytest.approx(
        {
            "nats_per_token": math.log(8),
            "nats": 9 * math.log(8),
            "perplexity": 8,
            "word_perplexity": 64,
            "bits_per_token": 3,
            "bits_per_word": 6,
            "bits_per_character": 1,
            "bits_per_byte": 0.5,
        }
    )


@pytest.mark.parametrize(
    ("mode", "text", "size"),
    [
        ("pretokenized", "the mañ\nsat\n", (5, 3, 12, 13)),
        ("characters", "the mañ\nsat\n", (12, 3, 12, 13)),
        ("pretokenized", "\ufeffthe man", (3, 2, 7, 7)),
    ],
)
def test_sizes_are_those_of_the_text(mode: str, text: str, size: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    symbols = build_vocabulary(["the mañ sat man\n"], mode)
    tokenizer = TransfoXLTokenizer.from_vocabulary(symbols, mode)
    (found,) = evaluate_files(model_of(tokenizer), tokenizer, [path], progress=False)
    assert found.size == TextSize(*size)


def test_a_vocabulary_without_line_breaks_drops_them_from_the_size(tmp_path: Path) -> None:
    """As that of enwik8, whose figure is per character that is left."""
    path = tmp_path / "text.txt"
    path.write_text("ab\nba\n", encoding="utf-8")
    tokenizer = TransfoXLTokenizer.from_vocabulary(["a", "b"], "characters", unk_token=None)
    (found,) = evaluate_files(model_of(tokenizer), tokenizer, [path], progress=False)
    assert found.size == TextSize(4, 2, 4, 4)


def test_lists_of_lengths_give_all_combinations(file: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of()
    model = model_of(tokenizer)
    found = evaluate_files(model, tokenizer, [file], segment_length=[2, 5], mem_len=[0, 3, 9], progress=False)
    lengths = [(each.settings["segment_length"], each.settings["mem_len"]) for each in found]
    assert lengths == [(2, 0), (2, 3), (2, 9), (5, 0), (5, 3), (5, 9)]
    (alone,) = evaluate_files(model, tokenizer, [file], segment_length=5, mem_len=3, progress=False)
    assert alone.loss == found[4].loss
    plot_evaluations(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="one length or two that vary, but none of them do"):
        plot_evaluations([alone], tmp_path / "no.png")


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(path)
    model_of(tokenizer).float().save_pretrained(path)
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def test_the_command_prints_a_table_or_json(folder: Path, file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    result = run(folder, file, "--mem-len", "0,3", "--segment-length", 4, "--plot", plot)
    assert result.exit_code == 0, result.output
    size, head, *rows = result.stdout.splitlines()
    assert size.startswith("13 tokens (12 scored), 9 words, ") and "bits/char" in head and len(rows) == 2
    assert plot.exists()
    result = run(folder, file, "--mem-len", "0,3", "--segment-length", 4, "--json")
    found = json.loads(result.stdout)
    for row, printed in zip(found, rows, strict=True):
        assert f"{row['perplexity']:.4f}" in printed and row["counts"]["tokens"] == 13
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), TransfoXLTokenizer.from_pretrained(folder)
    for row, each in zip(
        found, evaluate_files(model, tokenizer, [file], mem_len=[0, 3], segment_length=4), strict=True
    ):
        assert row["nats_per_token"] == each.loss


@pytest.mark.full
def test_processes_share_the_lengths(folder: Path, file: Path) -> None:
    """Two processes print what one does, once."""
    arguments = ["evaluate", str(folder), str(file), "--mem-len", "0,3,9", "--segment-length", "4,5,7", "--json"]
    code = "import sys; sys.argv[0] = 'hf-txl'; from hf_txl.cli import app; app()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    results = []
    for start in ([], launch):
        command = [sys.executable, *start, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        results.append(
            [{name: value for name, value in row.items() if name != "seconds"} for row in json.loads(done.stdout)]
        )
    assert len(results[0]) == 9 and results[0] == results[1]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", (), "`files` must hold text, but .* is empty"),
        (b"the man \xff sat", (), "must be a text in UTF-8, but is not: byte 8 is 0xff"),
        (b"the " * 3000 + b"\xc3(", (), "byte 12000 is 0xc3"),
        (b"xyzzy qwertz\n", (), "`files` must hold a token of the vocabulary, but .* has none"),
        (b"the man sat", ("--preset", "ptb"), "`preset` must be one of"),
        (b"the man sat", ("--mem-len", "a,3"), "`--mem-len` must be integers separated by commas, but is 'a,3'"),
        (b"the man sat", ("--batch-size", "9"), "`token_ids` must hold at least 2 tokens for each of `batch_size`"),
        (b"the man sat", ("--preset", "lm1b"), "`line_start` must be in the vocabulary"),
    ],
)
def test_what_cannot_be_evaluated_is_one_message(
    content: bytes, options: tuple[str, ...], message: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    result = run(folder, path, *options)
    assert result.exit_code == 2
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr
    assert "Traceback" not in result.output and result.stderr.count("Error:") == 1


def test_models_that_do_not_fit_are_refused(folder: Path, file: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    other = tmp_path / "other"
    model.save_pretrained(other)
    tokenizer_of("characters").save_pretrained(other)
    assert "`tokenizer` must have as many tokens as the model" in run(other, file).stderr
    next(model.parameters()).data.fill_(math.nan)
    TransfoXLTokenizer.from_pretrained(folder).save_pretrained(other)
    model.save_pretrained(other)
    result = run(other, file)
    assert result.exit_code == 2 and "must have finite weights" in result.stderr

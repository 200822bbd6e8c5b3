"""The demo at toy size: what it writes loads again, and it neither destroys nor leaves behind anything else."""

import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from typer.testing import CliRunner

from hf_txl import demo
from hf_txl.cli import app
from hf_txl.demo import DemoResult, DemoSettings, demo_text, run_demo
from hf_txl.remote_code_transfo_xl import code_files
from hf_txl.scoring import StreamScore, evaluate_stream
from hf_txl.training import TransfoXLTrainer

TINY = DemoSettings(
    steps=4, batch_size=3, segment_length=8, n_layer=2, d_model=16, n_head=2, d_inner=32, sample_length=12
)
FILES = {
    "config.json",
    "demo.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    # the code of the model
    *(file.name for file in code_files()),
}


@pytest.fixture(scope="module")
def text() -> str:
    return demo_text()[:3000]


def run(folder: Path, text: str, **arguments: Any) -> DemoResult:
    return run_demo(folder, **{"settings": TINY, "text": text, "progress": False, **arguments})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the whole run


def test_the_saved_folder_gives_the_numbers_of_the_table(tmp_path: Path, text: str) -> None:
    result = run(tmp_path / "model", text)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == FILES
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert result.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert result.trained_tokens == 4 * 3 * 8

    held_out = tokenizer(text[2700:]).input_ids
    assert list(result.scores) == [0, 8, 32]
    for mem_len, score in result.scores.items():
        # eight rows of 37 characters, of which all but the first are predicted
        assert score.predictions == 8 * 36
        again = evaluate_stream(model, held_out, segment_length=8, batch_size=8, mem_len=mem_len, progress=False)
        assert score.loss == pytest.approx(again.loss, abs=1e-6)
    assert result.prompt == text[2700:2716]
    assert len(result.sample) == 12

    saved = json.loads((tmp_path / "model" / "demo.json").read_text(encoding="utf-8"))
    assert set(saved["files"]) == FILES
    assert saved["loss_by_memory_length"] == {str(length): score.loss for length, score in result.scores.items()}


def draw() -> list[float]:
    """A number of each of the generators that `set_seed` of transformers seeds."""
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_a_seed_gives_the_same_run_and_leaves_random_numbers_alone(tmp_path: Path, text: str) -> None:
    set_seed(5)
    expected = draw()
    set_seed(5)
    first = run(tmp_path / "first", text, seed=1)
    assert draw() == expected
    second = run(tmp_path / "second", text, seed=1)
    other = run(tmp_path / "other", text, seed=2)
    # the same sums, up to the order in which threads add them
    assert first.scores[8].loss == pytest.approx(second.scores[8].loss, abs=1e-5)
    assert first.sample == second.sample
    assert abs(first.scores[8].loss - other.scores[8].loss) > 1e-4


def test_the_number_of_steps_can_be_given(tmp_path: Path, text: str) -> None:
    assert run(tmp_path / "model", text, steps=2).trained_tokens == 2 * 3 * 8
    with pytest.raises(ValueError, match="`steps` must be at least 1, but is 0"):
        run(tmp_path / "other", text, steps=0)
    with pytest.raises(ValueError, match="`seed` must be between 0 and 2\\*\\*32 - 1, but is -1"):
        run(tmp_path / "other", text, seed=-1)


def test_the_demo_learns_a_simple_text_with_the_trainer_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C113: after its first characters the text is certain: almost no loss, with warm-up and clipping at 0.25."""
    trainers = []

    class Recorded(TransfoXLTrainer):
        def __init__(self, *args: Any, **settings: Any) -> None:
            trainers.append(self)
            super().__init__(*args, **settings)

    monkeypatch.setattr(demo, "TransfoXLTrainer", Recorded)
    text = "to be, or not to be: " * 600
    settings = replace(
        TINY, steps=120, batch_size=4, segment_length=16, n_layer=1, d_model=32, d_inner=64, learning_rate=1e-2
    )
    result = run(tmp_path / "model", text, settings=settings)
    # all characters equally likely would be 2.4
    assert result.scores[16].loss < 0.5
    (trainer,) = trainers
    assert trainer.state.global_step == 120
    args = trainer.args
    assert (args.segment_length, args.per_device_train_batch_size, args.warmup_steps) == (16, 4, 6)
    assert (args.learning_rate, args.max_grad_norm, args.weight_decay) == (1e-2, 0.25, 0.01)


def test_a_run_prints_nothing_without_progress(tmp_path: Path, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "model", text)
    assert capfd.readouterr().out == ""


# --- the folder


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> float:
        pytest.fail("trains although the folder is refused")

    monkeypatch.setattr(demo, "TransfoXLTrainer", fail)


@pytest.mark.usefixtures("no_training")
def test_a_foreign_folder_is_refused_at_once_and_unchanged(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="`output_dir` must be a new or empty folder, .*chapter1.txt"):
        run(folder, text)
    assert contents(tmp_path) == {"thesis/chapter1.txt": b"precious"}


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("results", ["{}", "[1]", "not json", '{"files": ["demo.json"]}', '{"files": 3}'])
def test_a_file_of_our_name_does_not_make_a_folder_ours(tmp_path: Path, text: str, results: str) -> None:
    (tmp_path / "demo.json").write_text(results)
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="notes.txt"):
        run(tmp_path, text)
    assert contents(tmp_path) == {"demo.json": results.encode(), "notes.txt": b"precious"}


@pytest.mark.usefixtures("no_training")
def test_a_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model").write_text("precious")
    with pytest.raises(FileExistsError, match="must be a folder"):
        run(tmp_path / "model", text)


def test_an_empty_folder_is_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "model").mkdir()
    run(tmp_path / "model", text)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_an_earlier_demo_is_replaced_but_not_what_was_added_to_it(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "new" / "model"
    run(folder, text, seed=1)
    first = contents(folder)
    run(folder, text, seed=2)
    second = contents(folder)
    assert set(second) == FILES
    assert second["model.safetensors"] != first["model.safetensors"]
    assert {path.name for path in folder.parent.iterdir()} == {"model"}
    (folder / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="notes.txt"):
        run(folder, text, seed=3)
    assert contents(folder) == {**second, "notes.txt": b"precious"}


@pytest.mark.parametrize(
    "where", ["TransfoXLTrainer", "evaluate_stream", "AutoTokenizer", "generate_text", "_write_results"]
)
def test_a_failed_run_leaves_things_as_they_were(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run(tmp_path / "earlier", text)
    before = contents(tmp_path)

    class Interrupting:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        from_pretrained = __call__

    monkeypatch.setattr(demo, where, Interrupting())
    for name in ("earlier", "new"):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / name, text)
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"earlier"}


def test_a_failed_move_brings_the_earlier_folder_back(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "model", text)
    before = contents(tmp_path)
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(target).name == "model" and not Path(source).name.endswith(".earlier"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no"):
        run(tmp_path / "model", text)
    assert contents(tmp_path) == before


def test_a_model_that_loads_differently_is_reported(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        @staticmethod
        def from_pretrained(folder: Path) -> torch.nn.Module:
            model = AutoModelForCausalLM.from_pretrained(folder)
            model.transformer.layers[0].dec_attn.r_net.weight.data[0, 0] += 1
            return model

    monkeypatch.setattr(demo, "AutoModelForCausalLM", Wrong)
    with pytest.raises(RuntimeError, match=r"layers\.0\.dec_attn\.r_net\.weight"):
        run(tmp_path / "model", text)
    assert list(tmp_path.iterdir()) == []


# --- text and tokenizer


def test_the_text_is_the_one_that_its_source_note_describes() -> None:
    text = demo_text()
    assert len(text) == 1_115_394
    assert len(set(text)) == 65
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    assert digest == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def test_every_text_of_known_characters_comes_back_exactly(tmp_path: Path, text: str) -> None:
    run(tmp_path / "model", text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == len(set(text)) + 1
    for piece in (text, "\n\n  a  ,b \n", " ", "\n", ""):
        ids = tokenizer(piece).input_ids
        assert len(ids) == len(piece)
        assert tokenizer.decode(ids) == piece
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


# --- the command


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The command with a run that takes no time: what it was called with, and what it shall measure."""
    called: dict[str, Any] = {"losses": (1.75, 1.5, 1.52)}

    def fake(output: Path, **arguments: Any) -> DemoResult:
        called.update(arguments, output=output)
        scores = {
            length: StreamScore(loss, 1000, 2.0) for length, loss in zip((0, 64, 256), called["losses"], strict=True)
        }
        return DemoResult(output, 64, scores, 1234567, 50_000, 10.0, "To be,\nor", " not\nto be")

    monkeypatch.setattr(demo, "run_demo", fake)
    yield called


def test_the_command_prints_the_table(results: dict[str, Any]) -> None:
    outcome = CliRunner().invoke(app, ["demo", "--output", "out", "--steps", "7", "--seed", "3", "--quick"])
    assert outcome.exit_code == 0, outcome.output
    assert (results["output"], results["steps"], results["seed"], results["quick"]) == (Path("out"), 7, 3, True)
    lines = [line.split() for line in outcome.output.splitlines()]
    # bits are nats / ln 2
    assert ["0", "1.7500", "2.5247"] in lines
    assert ["64", "1.5000", "2.1640"] in lines
    assert ["256", "1.5200", "2.1929"] in lines
    for part in ("helps: 0.2500 nats less", "0.0200 nats more", "1,234,567", "5,000 in training", "out", "| to be"):
        assert part in outcome.output


def test_the_command_fails_where_memory_does_not_help(results: dict[str, Any]) -> None:
    results["losses"] = (1.5, 1.5, 1.4)
    outcome = CliRunner().invoke(app, ["demo"])
    assert outcome.exit_code == 1
    assert "DID NOT HELP" in outcome.output
    assert results["output"] == Path("demo_model")


def test_the_command_names_the_folder_that_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "chapter1.txt").write_text("precious")
    outcome = CliRunner().invoke(app, ["demo", "--output", str(tmp_path), "--quick"])
    assert outcome.exit_code == 2
    assert "chapter1.txt" in outcome.output


def test_the_command_refuses_a_run_without_steps() -> None:
    assert CliRunner().invoke(app, ["demo", "--steps", "0"]).exit_code == 2

"""The command from without: what it says, what it writes, and what is left when it cannot."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from hf_txl.cli import app
from hf_txl.conversion.convert import convert
from tests.helpers import FIXTURES
from tests.parity.recorded_cases import pytorch_case

ORIGINAL = FIXTURES / "pytorch_original"
GOOD = ORIGINAL / "xl-enwik8"
NVIDIA = FIXTURES / "nvidia" / "nv-div4" / "checkpoint_last.pt"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def assert_one_message(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ") and result.stderr.count("Error: ") == 1
    return result.stderr


def settings_of(case: str = "xl-enwik8") -> dict[str, Any]:
    return {name: pytorch_case(case).fields[name] for name in ("mem_len", "clamp_len", "same_length", "pre_lnorm")}


def assignments(settings: dict[str, Any]) -> list[str]:
    return [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]


# ---- the command in the card -------------------------------------------------------------------------------------


def command_in(folder: Path) -> list[str]:
    card = (folder / "README.md").read_text(encoding="utf-8")
    [line] = [line.strip() for line in card.splitlines() if line.startswith("    hf-txl ")]
    return shlex.split(line)


@pytest.mark.parametrize("from_python", [True, False])
def test_the_command_in_the_card_converts_the_same_again(
    from_python: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files in the folder where it is given."""
    monkeypatch.chdir(tmp_path)
    for file in ("state_dict.pt", "expected.safetensors"):
        (tmp_path / file).write_bytes((GOOD / file).read_bytes())
    (tmp_path / "settings.json").write_text(json.dumps({"clamp_len": -1, "dropout": 0.25}), encoding="utf-8")
    symbols = [chr(ord("0") + number) for number in range(pytorch_case("xl-enwik8").fields["vocab_size"])]
    (tmp_path / "symbols.json").write_text(json.dumps(symbols), encoding="utf-8")
    settings = {**settings_of(), "dropout": 0.25}
    if from_python:
        convert(
            tmp_path / "state_dict.pt",
            tmp_path / "out",
            format="pytorch",
            settings=settings,
            vocabulary=tmp_path / "symbols.json",
            tokenizer_mode="pretokenized",
            dtype=torch.float64,
            license="mit",
            verify=True,
            recorded=tmp_path / "expected.safetensors",
            progress=False,
        )
    else:
        result = run(
            *("convert", tmp_path / "state_dict.pt", tmp_path / "out", "--format", "pytorch", "--verify"),
            *("--config", tmp_path / "settings.json", *assignments(settings), "--tokenizer-mode", "pretokenized"),
            *("--vocabulary", tmp_path / "symbols.json", "--dtype", "float64", "--license", "mit"),
            *("--recorded", tmp_path / "expected.safetensors"),
        )
        assert result.exit_code == 0, result.output
    command = command_in(tmp_path / "out")
    assert command[:4] == ["hf-txl", "convert", "state_dict.pt", "out"]
    assert not any("/" in part for part in command)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run(*command[1:], "--force").exit_code == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert b'"dropout": 0.25' in before["config.json"]
    assert b"license: mit" in before["README.md"]


def test_a_tokenizer_that_was_left_out_is_left_out_by_the_command_in_the_card(tmp_path: Path) -> None:
    convert(NVIDIA, tmp_path / "out", vocabulary=False, progress=False)
    assert command_in(tmp_path / "out") == ["hf-txl", "convert", "checkpoint_last.pt", "out", "--no-vocabulary"]


def test_the_code_of_the_model_can_be_left_out(tmp_path: Path) -> None:
    for option, has_code in (((), True), (("--no-remote-code",), False)):
        assert run("convert", NVIDIA, tmp_path / "out", *option, "--force").exit_code == 0
        assert bool(list((tmp_path / "out").glob("*.py"))) is has_code
        assert ("auto_map" in json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))) is has_code
    # the command in the card leaves it out as well
    assert command_in(tmp_path / "out")[4:] == ["--set", "save_code=false"]
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    # a vocabulary has none
    vocabulary = FIXTURES / "vocabularies" / "legacy-tokenizer" / "vocab.pkl"
    assert run("convert", vocabulary, tmp_path / "tokenizer", "--no-remote-code").exit_code == 0


@pytest.mark.skipif(os.name == "nt", reason="modes are those of Unix")
def test_whoever_may_read_one_file_may_read_all(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        convert(NVIDIA, tmp_path / "out", progress=False)
    finally:
        os.umask(umask)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes
    assert set(modes.values()) == {"0o644"}, modes


# ---- precision ---------------------------------------------------------------------------------------------------


def test_a_mixture_of_half_precisions_becomes_one_that_holds_both(tmp_path: Path) -> None:
    """float16 has no number above 65504, bfloat16 only 8 bits of each."""
    tensors = torch.load(GOOD / "state_dict.pt")
    names = sorted(tensors)
    mixed = {name: tensors[name].to([torch.float16, torch.bfloat16][names.index(name) % 2]) for name in names}
    # tied tensors are one
    mixed["crit.out_layers.0.weight"] = mixed["word_emb.emb_layers.0.weight"]
    torch.save(mixed, tmp_path / "mixed.pt")
    assert run("convert", tmp_path / "mixed.pt", tmp_path / "out", *assignments(settings_of())).exit_code == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    for name in ("layers.0.dec_attn.o_net.weight", "layers.1.pos_ff.CoreNet.0.bias", "r_w_bias"):
        assert torch.equal(weights[f"transformer.{name}"], mixed[name].float())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("case", ["xl-enwik8", "xl-wt103-large"])
def test_rounded_weights_agree_with_the_rounded_source(case: str, dtype: str, tmp_path: Path) -> None:
    """The conversion is compared, not the precision that was asked for."""
    result = run("convert", ORIGINAL / case / "model.pt", tmp_path / "out", "--dtype", dtype, "--verify")
    assert result.exit_code == 0, result.output
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {f"torch.{dtype}"}


def test_a_comparison_with_recorded_outputs_says_that_weights_were_rounded(tmp_path: Path) -> None:
    recorded = GOOD / "expected.safetensors"
    result = run("convert", GOOD / "model.pt", tmp_path / "out", "--dtype", "bfloat16", "--recorded", recorded)
    message = assert_one_message(result)
    assert "must agree" in message and "rounded to torch.bfloat16" in message


@pytest.mark.parametrize("name", ["float8_e4m3fn", "complex64", "int8", "no_grad", "Float32", ""])
def test_a_type_that_no_model_is_computed_in_is_refused(name: str, tmp_path: Path) -> None:
    message = assert_one_message(run("convert", GOOD / "model.pt", tmp_path / "out", "--dtype", name))
    assert "`dtype` must be one of float64, float32, float16, bfloat16" in message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_a_source_of_other_numbers_is_refused_from_python_too(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        convert(GOOD / "model.pt", tmp_path / "out", dtype=dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in torch.load(GOOD / "state_dict.pt").items()}
    if dtype != torch.float8_e4m3fn:
        torch.save(tensors, tmp_path / "model.pt")
        with pytest.raises(ValueError, match="must be floating-point numbers"):
            convert(tmp_path / "model.pt", tmp_path / "out", settings=settings_of())


# ---- recorded outputs --------------------------------------------------------------------------------------------

CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "no nll": ({"seg0.nll": None}, "must hold `seg0.nll`"),
    "no target": ({"seg1.target": None}, "must hold `seg1.target` with `seg1.nll`"),
    "no inputs of one": ({"seg1.input_ids": None}, "must hold `seg1.input_ids`"),
    "no inputs": ({"seg0.input_ids": None}, "must hold `seg0.input_ids`"),
    "float ids": ({"seg0.input_ids": lambda ids: ids.float()}, "`seg0.input_ids` of `recorded` must be whole numbers"),
    "float targets": ({"seg0.target": lambda ids: ids.float()}, "`seg0.target` of `recorded` must be whole numbers"),
    "one row of ids": ({"seg0.input_ids": lambda ids: ids[0]}, "must be whole numbers of shape"),
    "nothing": ({"seg0.input_ids": lambda ids: ids[:, :0]}, "must be whole numbers of shape"),
    "ids too large": ({"seg0.input_ids": lambda ids: ids + 1000}, "must be between 0 and"),
    "negative targets": ({"seg0.target": lambda ids: ids - 1000}, "must be between 0 and"),
    "fewer losses": ({"seg0.nll": lambda nll: nll[:, 1:]}, "`seg0.nll` of `recorded` must have the shape"),
    "another batch": ({"seg0.target": lambda ids: ids[:1]}, "`seg0.target` of `recorded` must have the shape"),
    "longer targets": (
        {"seg0.target": lambda ids: ids.repeat(1, 2), "seg0.nll": lambda nll: nll.repeat(1, 2)},
        "`seg0.target` of `recorded` must have the shape",
    ),
    "fewer words": ({"last.logprobs": lambda p: p[..., 1:]}, "`last.logprobs` of `recorded` must have the shape"),
    "one score": ({"last.logprobs": lambda p: p[0, 0, 0]}, "`last.logprobs` of `recorded` must have the shape"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_recorded_outputs_of_another_form_are_named(change: str, tmp_path: Path) -> None:
    outputs = load_file(GOOD / "expected.safetensors")
    changes, message = CHANGES[change]
    for name, function in changes.items():
        tensor = outputs.pop(name)
        if function is not None:
            outputs[name] = function(tensor).contiguous()
    save_file(outputs, tmp_path / "recorded.safetensors")
    result = run("convert", GOOD / "model.pt", tmp_path / "out", "--recorded", tmp_path / "recorded.safetensors")
    assert message in assert_one_message(result)
    assert not (tmp_path / "out").exists()


# ---- where it writes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["out", "new/out", "new/and/newer/out"])
@pytest.mark.parametrize(
    "options", [["--set", "n_head=2"], ["--dtype", "int8"], ["--vocabulary", str(GOOD / "case.json")]]
)
def test_a_run_that_fails_leaves_no_folder(options: list[str], output: str, tmp_path: Path) -> None:
    assert_one_message(run("convert", GOOD / "model.pt", tmp_path / output, *options))
    assert list(tmp_path.iterdir()) == []
    assert run("convert", GOOD / "model.pt", tmp_path / output).exit_code == 0
    assert (tmp_path / output / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["convert", "build-tokenizer"])
def test_the_folder_of_the_terminal_is_no_output(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "text.txt").write_text("a text", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "here")
    for output in (".", ".."):
        arguments = [GOOD / "model.pt", output] if command == "convert" else ["../text.txt", "--output", output]
        message = assert_one_message(run(command, *arguments, "--force"))
        assert "`output` must be a new folder" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "text.txt"]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of file sizes are those of Unix")
@pytest.mark.parametrize("limit", [100, 3000, 40000])
def test_a_full_disk_is_one_message_and_leaves_nothing(limit: int, tmp_path: Path) -> None:
    """In the configuration, in the tokenizer, in the weights. A limit does what a full disk does."""
    import resource

    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, earlier[1]))
    try:
        result = run("convert", NVIDIA, tmp_path / "new" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
        signal.signal(signal.SIGXFSZ, handler)
    assert "too large" in assert_one_message(result)
    assert list(tmp_path.iterdir()) == []


WAITING = """
import sys, time
from hf_txl.conversion import convert as module
from hf_txl.cli import app

def wait(*arguments):
    print("waiting", flush=True)
    time.sleep(600)

module._check = wait
app()
"""


@pytest.mark.full
@pytest.mark.skipif(os.name == "nt", reason="signals are those of Unix")
def test_a_run_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["convert", str(GOOD / "model.pt"), str(tmp_path / "new" / "out"), "--verify"]
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []

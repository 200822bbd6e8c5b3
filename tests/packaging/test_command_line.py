"""The `hf-txl` command as a whole: help without waiting, version, completion, what a folder holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_txl
from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLTokenizer
from hf_txl.cli import app
from hf_txl.model_info import describe_folder
from tests.helpers import FIXTURES

COMMANDS = ["demo", "convert", "info", "generate", "build-tokenizer", "publish"]
# as the installed script does
SCRIPT = """
import sys
sys.argv = ["hf-txl", *sys.argv[1:]]
from hf_txl.cli import app
try:
    app()
except SystemExit as end:
    assert not end.code, end.code
print("imported", sorted({"torch", "transformers"} & set(sys.modules)))
"""
NAMES = """
import sys
sys.argv = ["hf-txl"]
import hf_txl
assert "torch" not in sys.modules
assert hf_txl.TransfoXLConfig.model_type == "transfo-xl"
from transformers import AutoConfig
assert type(AutoConfig.for_model("transfo-xl")) is hf_txl.TransfoXLConfig
from hf_txl import TransfoXLMemory
try:
    from hf_txl import TransfoXLCorpus
except ImportError as error:
    assert "docs/migration.md" in str(error)
try:
    hf_txl.nothing
except AttributeError as error:
    assert "nothing" in str(error)
print("named")
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(hf_txl.__file__).parents[1],
        env={**os.environ, "COLUMNS": "200", **environment},
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]])
def test_help_and_version_do_not_wait_for_torch(arguments: list[str]) -> None:
    printed = run(SCRIPT, *arguments)
    assert "imported []" in printed
    if arguments == ["--help"]:
        assert all(name in printed for name in COMMANDS)
    elif arguments == ["--version"]:
        assert printed.splitlines()[0] == f"hf-txl {hf_txl.__version__}"


def test_the_process_of_the_command_has_all_names_of_the_package() -> None:
    assert "named" in run(NAMES)


def test_names_of_commands_complete() -> None:
    environment = {"_HF_TXL_COMPLETE": "complete_bash", "COMP_WORDS": "hf-txl ", "COMP_CWORD": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", "from hf_txl.cli import app; app(prog_name='hf-txl')"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(hf_txl.__file__).parents[1],
    )
    assert set(COMMANDS) <= set(completed.stdout.split())


# --- info

SIZES: dict[str, Any] = {
    **{"vocab_size": 40, "cutoffs": [10, 20], "div_val": 2, "d_model": 16, "n_head": 2, "n_layer": 2, "d_inner": 32},
    **{"mem_len": 6, "clamp_len": 5, "memory_init": "zeros", "same_length_includes_oldest": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saves_code", [True, False])
def test_info_tells_what_the_model_is(tmp_path: Path, saves_code: bool, dtype: torch.dtype) -> None:
    model = TransfoXLForCausalLM(TransfoXLConfig(**SIZES, save_code=saves_code)).to(dtype)
    # several files
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    words = ["<unk>", *(f"w{number}" for number in range(39))]
    TransfoXLTokenizer.from_vocabulary(words, "pretokenized").save_pretrained(tmp_path)
    facts = describe_folder(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parts = facts["parameters"]
    # shared weights count once, as in `parameters()`
    assert parts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert parts["layers"] == sum(parameter.numel() for parameter in model.transformer.layers.parameters())
    assert parts["total"] == parts["layers"] + parts["embeddings"] + parts["softmax"]
    assert parts["dtype"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    assert facts["memory"] == {"mem_len": 6, "clamp_len": 5, "same_length": True, "memory_init": "zeros"}
    assert facts["dialect"] == "original TensorFlow code"
    assert facts["tokenizer"] == {"class": "TransfoXLTokenizer", "mode": "pretokenized", "tokens": 40}
    assert facts["code"] == (f"hf_txl {hf_txl.__version__}" if saves_code else "none")
    assert facts["converted from"] == "not recorded"
    assert facts["files"]["config.json"] == (tmp_path / "config.json").stat().st_size


def test_info_prints_a_table_or_json_of_a_converted_model(tmp_path: Path) -> None:
    source = FIXTURES / "hf_legacy" / "legacy-wt103"
    converted = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "model")])
    assert converted.exit_code == 0, converted.output
    table = CliRunner().invoke(app, ["info", str(tmp_path / "model")])
    assert "transformers 2 to 4" in table.output and "pytorch_model.bin" in table.output
    printed = CliRunner().invoke(app, ["info", str(tmp_path / "model"), "--json"])
    facts = json.loads(printed.stdout)
    assert facts == describe_folder(tmp_path / "model")
    assert "pytorch_model.bin" in facts["converted from"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "must hold config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json must be JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object, but holds a list"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "gpt2"}'), "but has 'gpt2'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "must hold weights as safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 9), "must be a safetensors file"),
    ],
)
def test_info_names_a_damaged_file(tmp_path: Path, damage: Any, message: str) -> None:
    TransfoXLForCausalLM(TransfoXLConfig(**SIZES, save_code=False)).save_pretrained(tmp_path)
    damage(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split()) and len(result.output.splitlines()) <= 2

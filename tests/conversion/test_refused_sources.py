"""Hostile and damaged files given to the command and to the library's loaders: one message, nothing run or written."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_txl
from hf_txl.cli import app
from tests.helpers import FIXTURES

from .hostile import DAMAGED, PROGRAMS, WRAPPERS

LEGACY = FIXTURES / "hf_legacy" / "legacy-div1"
GOOD = FIXTURES / "pytorch_original" / "xl-enwik8" / "model.pt"
# every program once, in each kind of file in turn
PACKED = [(program, wrapper) for program, wrapper in zip(PROGRAMS, itertools.cycle(WRAPPERS), strict=False)]


def assert_refused(folder: Path, *arguments: object) -> str:
    """The one message of the command, after which `folder` is as it was."""
    before = sorted(folder.rglob("*"))
    result = CliRunner().invoke(app, ["convert", *map(str, arguments), str(folder / "out")])
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    messages = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(messages) == 1 and result.stderr.startswith("Error: ")
    assert sorted(folder.rglob("*")) == before
    return messages[0]


@pytest.mark.parametrize(("program", "wrapper"), PACKED)
def test_a_hostile_checkpoint_is_refused_by_the_command(program: str, wrapper: str, tmp_path: Path) -> None:
    """C90"""
    make, refused_name = PROGRAMS[program]
    sentinel = tmp_path / "sentinel"
    (tmp_path / "model.pt").write_bytes(WRAPPERS[wrapper](make(sentinel)))
    assert refused_name in assert_refused(tmp_path, tmp_path / "model.pt")
    assert not sentinel.exists()


@pytest.mark.parametrize("file", ["vocab.pkl", "vocab.bin", "cache.pt", "cache.pkl", "corpus.bin"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_hostile_vocabulary_is_refused_wherever_it_lies(file: str, wrapper: str, tmp_path: Path) -> None:
    """C90"""
    make, refused_name = PROGRAMS["os_system"]
    sentinel = tmp_path / "sentinel"
    content = WRAPPERS[wrapper](make(sentinel))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / file).write_bytes(content)
    message = assert_refused(tmp_path, GOOD, "--vocabulary", tmp_path / "elsewhere" / file)
    assert refused_name in message
    shutil.copytree(LEGACY, tmp_path / "beside")
    (tmp_path / "beside" / file).write_bytes(content)
    if file != "corpus.bin":  # which nobody looks for
        assert refused_name in assert_refused(tmp_path, tmp_path / "beside")
    assert not sentinel.exists()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_loader_runs_a_hostile_file(wrapper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C90: neither with the switch that older releases of transformers had."""
    monkeypatch.setenv("TRUST_REMOTE_CODE", "True")
    make, refused_name = PROGRAMS["os_system"]
    sentinel = tmp_path / "sentinel"
    content = WRAPPERS[wrapper](make(sentinel))
    folder = tmp_path / "model"
    shutil.copytree(LEGACY, folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    assert refused_name in assert_refused(tmp_path, folder)
    with pytest.raises(Exception, match=r"."):
        AutoModelForCausalLM.from_pretrained(folder)
    for file in ("vocab.pkl", "vocab.bin"):
        (folder / file).write_bytes(content)
    for load in (AutoTokenizer.from_pretrained, hf_txl.TransfoXLTokenizer.from_pretrained):
        with pytest.raises(Exception, match="hf-txl convert"):
            load(folder)
    assert not sentinel.exists()


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_refused_by_the_command(case: str, tmp_path: Path) -> None:
    make, _ = DAMAGED[case]
    (tmp_path / "model.pt").write_bytes(make())
    assert "model.pt" in assert_refused(tmp_path, tmp_path / "model.pt")


def test_damaged_files_of_transformers_are_refused(tmp_path: Path) -> None:
    hf_txl.TransfoXLForCausalLM.from_pretrained(LEGACY).save_pretrained(tmp_path / "good")
    weights = (tmp_path / "good" / "model.safetensors").read_bytes()
    config = (tmp_path / "good" / "config.json").read_bytes()
    whole = len(weights)
    # the header's length, low byte first, is at the beginning
    damaged = {
        "empty": b"",
        "truncated header": weights[:100],
        "truncated data": weights[: whole - 1],
        "another byte order": weights[:8][::-1] + weights[8:],
        "a header of another length": bytes([weights[0] ^ 1]) + weights[1:],
        "text": b"<html>not found</html>",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    }
    for name, content in damaged.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(content)
        assert "model.safetensors" in assert_refused(tmp_path, folder)
    pointer = assert_refused(tmp_path, tmp_path / "pointer")
    assert "is a pointer to a file in Git LFS" in pointer
    for name, content in {"no json": b"{", "a list": b"[]", "bytes": b"\xff\xfe", "empty config": b""}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(content)
        (folder / "model.safetensors").write_bytes(weights)
        assert "config.json" in assert_refused(tmp_path, folder)


@pytest.mark.parametrize("map_to", ["../good/model.safetensors", "/etc/passwd", "missing.safetensors", 7, None])
def test_an_index_of_shards_leads_nowhere_else(map_to: object, tmp_path: Path) -> None:
    hf_txl.TransfoXLForCausalLM.from_pretrained(LEGACY).save_pretrained(tmp_path / "good")
    folder = tmp_path / "shards"
    folder.mkdir()
    shutil.copy(tmp_path / "good" / "config.json", folder)
    index = {"weight_map": {"transformer.r_w_bias": map_to}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    message = assert_refused(tmp_path, folder)
    if map_to == "missing.safetensors":
        assert "names files that must lie beside it, but missing.safetensors does not" in message


@pytest.mark.parametrize("damage", ["empty index", "truncated index", "flipped index", "truncated data", "no data"])
def test_damaged_bundles_of_tensorflow_are_refused(damage: str, tmp_path: Path) -> None:
    for file in (FIXTURES / "tf_original" / "tf-enwik8").glob("model.ckpt.*"):
        shutil.copy(file, tmp_path)
    index, data = tmp_path / "model.ckpt.index", tmp_path / "model.ckpt.data-00000-of-00001"
    content = index.read_bytes()
    if damage == "no data":
        data.unlink()
    elif damage == "truncated data":
        data.write_bytes(data.read_bytes()[:1000])
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
        index.write_bytes({"empty index": b"", "truncated index": content[:-20], "flipped index": flipped}[damage])
    lengths = ("--set", "mem_len=4", "--set", "clamp_len=-1", "--set", "same_length=false")
    assert "model.ckpt" in assert_refused(tmp_path, tmp_path / "model.ckpt", *lengths)

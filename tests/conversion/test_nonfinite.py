"""R09: NaN and infinity in the tensors of a source: refused by name whatever the format, or kept on request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from hf_txl.cli import app
from hf_txl.conversion import checkpoint
from hf_txl.conversion.read_pytorch import read_file
from hf_txl.conversion.state_dict import is_finite, is_same
from tests.helpers import FIXTURES
from tests.parity.recorded_cases import pytorch_case, tensorflow_case

LEGACY = FIXTURES / "hf_legacy" / "legacy-div1"
NEEDED = ("mem_len", "clamp_len", "same_length")

Change = Callable[[dict[str, torch.Tensor]], None]


def run(source: Path, output: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["convert", str(source), str(output), *options])


def needed(fields: dict[str, object], *names: str) -> list[str]:
    return [f"--set={name}={json.dumps(fields[name])}" for name in (*NEEDED, *names)]


class Variables(dict):
    """What `read_checkpoint` gives."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.items()}


def original(folder: Path, change: Change) -> tuple[Path, list[str]]:
    case = pytorch_case("xl-enwik8")
    tensors = torch.load(case.folder / "state_dict.pt")
    change(tensors)
    torch.save(tensors, folder / "model.pt")
    return folder / "model.pt", needed(case.fields, "pre_lnorm")


def nvidia(folder: Path, change: Change) -> tuple[Path, list[str]]:
    content = read_file(FIXTURES / "nvidia" / "nv-div4" / "checkpoint_last.pt")
    state = {name: tensor.clone() for name, tensor in content["model_state"].items()}
    change(state)
    torch.save({"model_state": state, "model_config": content["model_config"]}, folder / "checkpoint_last.pt")
    return folder / "checkpoint_last.pt", []


def legacy(folder: Path, change: Change) -> tuple[Path, list[str]]:
    shutil.copyfile(LEGACY / "config.json", folder / "config.json")
    tensors = torch.load(LEGACY / "pytorch_model.bin")
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder, []


def tensorflow(folder: Path, change: Change) -> tuple[Path, list[str]]:
    """Recorded variables for `variables_of`: only TensorFlow itself can write a bundle."""
    case = tensorflow_case("tf-enwik8")
    tensors = load_file(case.folder / "variables.safetensors")
    change(tensors)
    save_file(tensors, folder / "variables.safetensors")
    (folder / "model.ckpt.index").write_bytes(b"")
    return folder / "model.ckpt", needed(case.fields)


def variables_of(prefix: Path) -> Variables:
    return Variables(load_file(prefix.parent / "variables.safetensors"))


FORMATS = {
    "pytorch": (original, "r_w_bias", "layers.1.dec_attn.r_net.weight"),
    "nvidia": (nvidia, "r_w_bias", "layers.1.dec_attn.r_net.weight"),
    "transformers": (legacy, "transformer.r_w_bias", "transformer.layers.1.dec_attn.r_net.weight"),
    "tensorflow": (tensorflow, "transformer/r_w_bias", "transformer/layer_1/rel_attn/r/kernel"),
}


@pytest.fixture(params=FORMATS)
def source(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str], list[str]]:
    """A checkpoint with NaN in one tensor and minus infinity in another, its settings and the names of the two."""
    make, *names = FORMATS[request.param]
    monkeypatch.setattr(checkpoint, "read_checkpoint", variables_of)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        there = [name if name in tensors else next(each for each in tensors if "r_w_bias" in each) for name in names]
        names[:] = there
        tensors[there[0]].view(-1)[-1] = float("nan")
        tensors[there[1]].view(-1)[2] = -float("inf")

    path, options = make(tmp_path, change)
    return path, options, names


def test_tensors_that_are_not_finite_are_refused_all_by_name(
    source: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    path, options, names = source
    result = run(path, tmp_path / "out", *options)
    assert result.exit_code == 2 and result.stderr.startswith("Error: ")
    assert all(f"`{name}`" in result.stderr for name in names) and "--allow-nonfinite" in result.stderr
    assert not (tmp_path / "out").exists()


def test_on_request_they_are_kept_and_named_in_card_and_output(
    source: tuple[Path, list[str], list[str]], tmp_path: Path
) -> None:
    path, options, names = source
    result = run(path, tmp_path / "out", *options, "--allow-nonfinite")
    assert result.exit_code == 0, result.output
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for name in names:
        assert f"`{name}`" in result.stdout and f"`{name}`" in card
    assert "--allow-nonfinite" in card
    weights = load_file(tmp_path / "out" / "model.safetensors")
    values = torch.cat([weight.view(-1) for weight in weights.values()])
    assert (int(values.isnan().sum()), int((values == -torch.inf).sum())) == (1, 1)


def test_what_holds_nan_cannot_be_verified(tmp_path: Path) -> None:
    path, options = original(tmp_path, lambda tensors: tensors["r_w_bias"][0].fill_(torch.nan))
    result = run(path, tmp_path / "out", *options, "--allow-nonfinite", "--verify")
    assert result.exit_code == 2 and "`verify` must be False" in result.stderr and "`r_w_bias`" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_precision_that_makes_infinity_of_a_number_is_refused(tmp_path: Path) -> None:
    path, options = original(tmp_path, lambda tensors: tensors["r_w_bias"][0].fill_(7e4))
    result = run(path, tmp_path / "out", *options, "--dtype", "float16")
    assert result.exit_code == 2 and "`dtype`" in result.stderr and "r_w_bias" in result.stderr
    assert not (tmp_path / "out").exists()
    assert run(path, tmp_path / "out", *options, "--dtype", "bfloat16").exit_code == 0
    result = run(path, tmp_path / "kept", *options, "--dtype", "float16", "--allow-nonfinite")
    assert result.exit_code == 0 and "r_w_bias as torch.float16" in result.stdout


def test_a_tied_tensor_may_hold_nan_under_both_names(tmp_path: Path) -> None:
    """NaN differs from itself, but two copies of it are one weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["word_emb.emb_layers.0.weight"][1, 1] = torch.nan
        tensors["crit.out_layers.0.weight"] = tensors["word_emb.emb_layers.0.weight"].clone()

    path, options = original(tmp_path, change)
    result = run(path, tmp_path / "out", *options, "--allow-nonfinite")
    assert result.exit_code == 0, result.output
    assert "crit.out_layers.0.weight" not in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_place_and_value_is_seen(dtype: torch.dtype) -> None:
    good = (torch.linspace(-1, 1, 7, dtype=torch.float64) * torch.finfo(dtype).max).to(dtype)
    assert is_finite(good) and is_finite(good[:0]) and is_finite(good.long())
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in range(7):
            bad = good.clone()
            bad[place] = value
            assert not is_finite(bad)
            assert is_same(bad, bad.clone()) and not is_same(bad, good)

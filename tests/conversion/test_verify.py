"""A comparison that cannot fail would show nothing: every kind of mistake is found, wherever it is."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory
from hf_txl.cli import app
from hf_txl.conversion import verify
from hf_txl.conversion.card import sha256
from hf_txl.conversion.verify import verify_recorded, verify_with_source
from tests.helpers import FIXTURES
from tests.parity.recorded_cases import Recorded, pytorch_case

CASE = "xl-wt103-large"
GOOD = FIXTURES / "pytorch_original" / CASE
LEGACY = FIXTURES / "hf_legacy" / "legacy-div1"


@pytest.fixture
def model() -> TransfoXLForCausalLM:
    recorded = pytorch_case(CASE)
    model = TransfoXLForCausalLM(TransfoXLConfig(**recorded.fields)).eval()
    model.load_state_dict(recorded.state)
    return model


def needed_by_a_state_dict(case: Recorded) -> list[str]:
    """The options for what it does not tell."""
    names = ("mem_len", "clamp_len", "same_length", "pre_lnorm")
    return [f"--set={name}={json.dumps(case.fields[name])}" for name in names]


def changed(outputs: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The same outputs with one number off by 0.01."""
    tensor = outputs[name].clone()
    tensor.view(-1)[-1] += 0.01
    return {**outputs, name: tensor}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("seg0.nll", "losses"), ("seg1.nll", "losses"), ("seg2.nll", "losses"), ("last.logprobs", "log-probabilities")],
)
def test_one_number_that_differs_is_found(model: TransfoXLForCausalLM, name: str, kind: str) -> None:
    outputs = load_file(GOOD / "expected.safetensors")
    assert max(verify_recorded(model, outputs)[""].values()) < 1e-5
    differences = verify_recorded(model, changed(outputs, name))[""]
    assert differences.pop(kind) == pytest.approx(0.01, abs=1e-4)
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_scores_of_every_segment_of_every_run_are_compared(segment: int) -> None:
    model = TransfoXLForCausalLM.from_pretrained(LEGACY).eval()
    outputs = load_file(LEGACY / "expected.safetensors")
    differences = verify_recorded(model, changed(outputs, f"zero.seg{segment}.prediction_scores"))
    assert differences["zero"]["log-probabilities"] == pytest.approx(0.01, abs=1e-4)


def test_a_file_without_recorded_segments_is_refused(model: TransfoXLForCausalLM) -> None:
    with pytest.raises(ValueError, match=r"`recorded` must hold `seg0.input_ids`"):
        verify_recorded(model, {"logits": torch.zeros(1)})


def test_a_model_of_the_source_weights_agrees_with_their_slow_reading(model: TransfoXLForCausalLM) -> None:
    differences = verify_with_source(model, pytorch_case(CASE).state, progress=False)
    assert set(differences) == {"hidden states", "log-probabilities"}
    assert max(differences.values()) < 1e-5


@pytest.mark.parametrize(
    "weight",
    [
        "transformer.word_emb.emb_layers.2.weight",
        "transformer.layers.2.dec_attn.r_net.weight",
        "transformer.layers.0.pos_ff.layer_norm.bias",
    ],
)
def test_a_weight_that_differs_shows_in_hidden_states_and_scores(model: TransfoXLForCausalLM, weight: str) -> None:
    with torch.no_grad():
        model.get_parameter(weight).mul_(1.05).add_(0.01)
    differences = verify_with_source(model, pytorch_case(CASE).state, progress=False)
    assert min(differences.values()) > 1e-4


@pytest.mark.parametrize("weight", ["crit.cluster_bias", "crit.out_layers.3.bias", "crit.out_projs.0"])
def test_a_weight_of_the_softmax_that_differs_shows_in_scores_alone(model: TransfoXLForCausalLM, weight: str) -> None:
    with torch.no_grad():
        parameter = model.get_parameter(weight)
        parameter[-1] += 0.1
    differences = verify_with_source(model, pytorch_case(CASE).state, progress=False)
    assert differences["log-probabilities"] > 1e-4
    assert differences["hidden states"] < 1e-5


def test_what_differs_with_a_memory_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of at most 6 tokens: only behind a memory are distances above 6 looked at."""
    state = pytorch_case(CASE).state
    reference = TransfoXLForCausalLM(TransfoXLConfig(**{**pytorch_case(CASE).fields, "clamp_len": -1})).eval()
    reference.load_state_dict(state)
    assert verify_with_source(reference, state, progress=False)["hidden states"] < 1e-5
    # the slow reading takes the length from the configuration; the memory of the model is given another one
    monkeypatch.setattr(verify, "TransfoXLMemory", functools.partial(TransfoXLMemory, clamp_len=6))
    alone = verify_with_source(reference, state, segments=(5,), progress=False)
    with_memory = verify_with_source(reference, state, segments=(5, 3, 6), progress=False)
    assert alone["hidden states"] < 1e-5
    assert with_memory["hidden states"] > 1e-4


@pytest.mark.parametrize(("difference", "is_accepted"), [(5e-5, True), (2e-4, False)])
def test_the_command_refuses_what_differs_by_more_than_1e_4(
    difference: float, is_accepted: bool, tmp_path: Path
) -> None:
    outputs = load_file(GOOD / "expected.safetensors")
    outputs["seg1.nll"] = outputs["seg1.nll"] + difference
    save_file(outputs, tmp_path / "recorded.safetensors")
    result = CliRunner().invoke(
        app,
        [
            "convert",
            str(GOOD / "model.pt"),
            str(tmp_path / "out"),
            "--recorded",
            str(tmp_path / "recorded.safetensors"),
        ],
    )
    assert (result.exit_code == 0) == is_accepted
    assert (tmp_path / "out").exists() == is_accepted


def test_of_several_precisions_the_widest_is_kept(tmp_path: Path) -> None:
    case = pytorch_case("xl-enwik8")
    tensors = {name: tensor.half() for name, tensor in torch.load(case.folder / "state_dict.pt").items()}
    wide = "layers.1.dec_attn.o_net.weight"
    tensors[wide] = torch.load(case.folder / "state_dict.pt")[wide]
    torch.save(tensors, tmp_path / "mixed.pt")
    result = CliRunner().invoke(
        app, ["convert", str(tmp_path / "mixed.pt"), str(tmp_path / "out"), *needed_by_a_state_dict(case)]
    )
    assert result.exit_code == 0, result.output
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert torch.equal(weights[f"transformer.{wide}"], tensors[wide])


def test_the_hash_is_that_of_the_whole_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_passes_no_comparison(value: float, tmp_path: Path) -> None:
    case = pytorch_case("xl-enwik8")
    tensors = torch.load(case.folder / "state_dict.pt")
    tensors["r_w_bias"][0, 0] = value
    torch.save(tensors, tmp_path / "model.pt")
    settings = [*needed_by_a_state_dict(case), "--allow-nonfinite"]
    for check, message in (
        (["--verify"], "`verify` must be False"),
        (["--recorded", str(case.folder / "expected.safetensors")], "must agree"),
    ):
        command = ["convert", str(tmp_path / "model.pt"), str(tmp_path / "out"), *settings, *check]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert message in result.output
        assert not (tmp_path / "out").exists()


def test_inputs_without_outputs_are_no_comparison(model: TransfoXLForCausalLM) -> None:
    with pytest.raises(ValueError, match="must hold outputs to compare"):
        verify_recorded(model, {"seg0.input_ids": torch.zeros(1, 3, dtype=torch.long)})

"""GTrXL's gates against recorded outputs of other implementations and a model of loops over the paper's equations."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLModel
from hf_txl.gating_transfo_xl import GATES, GRUGate
from hf_txl.reference.transformer_xl import SlowTransfoXL
from tests.helpers import FIXTURES, assert_close
from tests.model.tiny_models import random_ids, tiny_config, tiny_model

# names of a GRU gate's weights in ours, DI-engine 0.5.3 and ray 2.60.0 (there applied from the right)
NAMES = {
    "w_r": ("Wr", "_w_r"),
    "u_r": ("Ur", "_u_r"),
    "w_z": ("Wz", "_w_z"),
    "u_z": ("Uz", "_u_z"),
    "w_h": ("Wg", "_w_h"),
    "u_h": ("Ug", "_u_h"),
}
GATED = sorted(GATES)
# float64 models; the sinusoids are float32
NUMBERS = 1e-5


def gated(model_class: type = TransfoXLForCausalLM, **changes: Any) -> Any:
    large = {"init_std": 0.3, "proj_init_std": 0.3}
    return tiny_model(model_class, **{"pre_lnorm": True, **large, **changes}).double().eval()


@pytest.mark.parametrize("source", ["ding", "rllib"])
def test_the_gru_gate_is_that_of_others(source: str) -> None:
    """Outputs and gradients recorded from their own code, float64."""
    recorded = load_file(FIXTURES / "gates" / "gru.safetensors")
    width = recorded["x"].shape[-1]
    config = TransfoXLConfig(vocab_size=9, cutoffs=[], d_model=width, n_head=1, pre_lnorm=True, gating="gru")
    gate = GRUGate(config).double()

    def theirs(name: str, ending: str = "") -> torch.Tensor:
        if source == "ding":
            return recorded[f"ding.{NAMES[name][0]}.weight{ending}"]
        return recorded[f"rllib.{NAMES[name][1]}{ending}"].T

    bias = "ding.bg" if source == "ding" else "rllib._bias_z"
    with torch.no_grad():
        gate.gate_bias.copy_(recorded[bias])
        for name in NAMES:
            getattr(gate, name).weight.copy_(theirs(name))
    x, y = (recorded[name].clone().requires_grad_() for name in "xy")
    output = gate(x, y)
    output.square().sum().backward()
    assert_close("output", output, recorded[f"{source}.output"], 1e-10)
    assert_close("x", x.grad, recorded[f"{source}.x.grad"], 1e-9)
    assert_close("y", y.grad, recorded[f"{source}.y.grad"], 1e-9)
    assert_close("bias", gate.gate_bias.grad, recorded[f"{bias}.grad"], 1e-9)
    for name in NAMES:
        assert_close(name, getattr(gate, name).weight.grad, theirs(name, ".grad"), 1e-9)


@pytest.mark.parametrize("memory_init", ["empty", "zeros"])
@pytest.mark.parametrize("gating", GATED)
@torch.no_grad()
def test_a_gated_model_with_memory_equals_the_equations(gating: str, memory_init: str) -> None:
    """Figure 1 and section 3.2 of Parisotto et al. 2019, by loops; the memory holds what enters a layer."""
    model = gated(gating=gating, memory_init=memory_init, mem_len=5, same_length=False)
    slow = SlowTransfoXL(model.config, model.state_dict())
    ids, memory = random_ids(1, 11), model.init_memory(1)
    slow_memory = slow.new_memory(1)
    for piece in (slice(0, 4), slice(4, 5), slice(5, 11)):
        states = model.transformer(ids[:, piece], cache=memory).last_hidden_state
        expected = slow.read(ids[:, piece], slow_memory)[0].hidden_states[-1]
        assert_close("hidden states", states[0], expected, NUMBERS)


@pytest.mark.parametrize("gating", GATED)
def test_gradients_of_a_gated_model_are_those_of_the_equations(gating: str) -> None:
    model = gated(gating=gating, mem_len=4)
    ids = random_ids(1, 6)
    state = {name: weight.detach().clone().requires_grad_() for name, weight in model.state_dict().items()}
    slow = SlowTransfoXL(model.config, state)
    slow.read(ids, slow.new_memory(1))[0].hidden_states[-1].square().sum().backward()
    model.transformer(ids).last_hidden_state.square().sum().backward()
    names = [name for name, _ in model.named_parameters() if ".gate." in name or "dec_attn" in name]
    assert len(names) > 10
    found = dict(model.named_parameters())
    for name in names:
        assert_close(name, found[name].grad, state[name].grad, atol=1e-4, rtol=1e-4)


def test_without_gating_nothing_changes() -> None:
    """The same weights, in the same order of initialisation, and bit-equal outputs."""
    for pre_lnorm in (False, True):
        torch.manual_seed(0)
        before = TransfoXLForCausalLM(tiny_config(pre_lnorm=pre_lnorm))
        torch.manual_seed(0)
        after = TransfoXLForCausalLM(tiny_config(pre_lnorm=pre_lnorm, gating=None, gating_bias=7.0))
        assert before.state_dict().keys() == after.state_dict().keys()
        ids = random_ids(2, 7)
        assert torch.equal(before.eval()(ids).logits, after.eval()(ids).logits)
        assert not any("gate" in name for name in after.state_dict())


def test_a_large_bias_makes_a_new_gru_model_the_identity() -> None:
    """Section 3.2: with z = 0 the input passes all layers as it is."""
    torch.manual_seed(0)
    model = TransfoXLModel(tiny_config(pre_lnorm=True, gating="gru", gating_bias=200.0)).eval()
    ids = random_ids(2, 5)
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    assert_close("hidden states", output.last_hidden_state, output.hidden_states[0], 1e-6)


@pytest.mark.parametrize("gating", GATED)
def test_a_gated_model_is_saved_loaded_and_trained(gating: str, tmp_path: Any) -> None:
    model = tiny_model(pre_lnorm=True, gating=gating).train()
    ids = random_ids(2, 8)
    model(ids, labels=ids).loss.backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert not [name for name in missing if "gate" in name]
    model.eval().zero_grad()
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    assert (tmp_path / "gating_transfo_xl.py").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close("logits", loaded(ids).logits, expected, 1e-6)
    assert loaded.config.gating == gating


def test_gates_without_their_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="`pre_lnorm` must be True with `gating='gru'`, but is False"):
        TransfoXLConfig(gating="gru")
    with pytest.raises(ValueError, match="`gating` must be one of"):
        TransfoXLConfig(gating="lstm", pre_lnorm=True)

"""Quantised models: logits, losses, memory and generation belong together, and each layer is called as it is."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_txl import TransfoXLForCausalLM
from hf_txl.scoring import evaluate_stream, score_sequences
from tests.ecosystem.modules import MODES, assert_all_close, read, read_all, small_model, text
from tests.helpers import assert_close
from tests.model.tiny_models import random_ids

# the widths that kernels of packed weights ask for
SIZES: dict[str, Any] = {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "n_layer": 1, "mem_len": 12}
NAMES = ["plain", "one table", "clusters"]


def int8_weight_only(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def int8_dynamic(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


def torch_dynamic(model: nn.Module) -> nn.Module:
    with pytest.warns(DeprecationWarning):
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


# and how far a loss may be from that of the logits: inputs are rounded to 8 bits, by the range of a token or, in
# torch's own way, by the common range of a call, which depends on what else is in the call
WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], float]] = {
    "int8 weight-only": (int8_weight_only, 1e-4),
    "int8 dynamic": (int8_dynamic, 0.1),
    "torch dynamic": (torch_dynamic, 0.1),
}
ways = pytest.mark.parametrize("way", WAYS)
names = pytest.mark.parametrize("name", NAMES)


def quantised(way: str, name: str, **changes: Any) -> Any:
    if way != "torch dynamic":
        pytest.importorskip("torchao", reason="`pip install torchao`")
    return WAYS[way][0](small_model(TransfoXLForCausalLM, name, **{**SIZES, **changes}))


class Called(nn.Module):
    """A layer that can be called and nothing else."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.layer(states)


def called(model: Any) -> Any:
    """The same model, with all linear layers behind a call."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        # quantised layers of torch are no subclass
        if isinstance(module, nn.Linear) or type(module).__name__ == "Linear":
            model.set_submodule(name, Called(module))
    return model


@names
@ways
def test_losses_are_those_of_the_logits(way: str, name: str) -> None:
    model = quantised(way, name)
    ids = text(model)
    with torch.no_grad():
        output = model(ids, labels=ids)
        log_probabilities = output.logits.log_softmax(dim=-1)
    expected = -log_probabilities[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert_close("losses", output.losses[:, :-1], expected, atol=WAYS[way][1])
    assert_close("loss", output.loss, expected.mean(), atol=WAYS[way][1])


@names
@ways
def test_each_layer_is_called(way: str, name: str) -> None:
    """In every mode, with and without memory, and in generation: as a model whose layers have nothing but a call."""
    model = quantised(way, name)
    assert_all_close(read_all(model), read_all(called(model)))


@names
def test_weight_only_is_the_model_of_its_weights(name: str) -> None:
    """int8 weight-only: everything equals a model in float32 with the weights that the int8 ones stand for."""
    model = quantised("int8 weight-only", name)
    expected = small_model(TransfoXLForCausalLM, name, **{**SIZES, "tie_word_embeddings": False})
    with torch.no_grad():
        for key, module in expected.named_modules():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                value = getattr(model.get_submodule(key), parameter_name)
                is_packed = type(value) is not nn.Parameter
                parameter.copy_(value.dequantize() if is_packed else value)
    # scaled after the product, not before
    assert_all_close(read_all(model), read_all(expected), atol=3e-4)


@names
@pytest.mark.parametrize("way", ["int8 weight-only", "int8 dynamic"])
def test_segments_equal_one_pass(way: str, name: str) -> None:
    """A memory that holds the whole text, as hidden states and as keys and values.

    Not for torch's own way, where the range that inputs are quantised by changes with the segments.
    """
    model = quantised(way, name, memory_init="empty")
    ids = text(model)
    with torch.no_grad():
        expected = model(ids).logits
        for stores in ("hidden_states", "keys_values"):
            memory = model.init_memory(2, stores=stores)
            logits = torch.cat([model(ids[:, here], cache=memory).logits for here in (slice(6), slice(6, 11))], dim=1)
            # inputs of 8 bits, which another summation order may round to the next
            assert_close(f"logits behind {stores}", logits, expected, atol=1e-4 if "weight-only" in way else 0.3)


@names
@ways
def test_scores_of_texts_are_those_of_the_logits(way: str, name: str) -> None:
    model = quantised(way, name, memory_init="empty")
    ids = random_ids(11, vocab_size=model.config.vocab_size)
    with torch.no_grad():
        log_probabilities = model(ids[None]).logits.log_softmax(dim=-1)
    expected = log_probabilities[0, :-1].gather(-1, ids[1:, None]).double().sum()
    atol = 1e-3 if "weight-only" in way else 1.0
    (score,) = score_sequences(model, [ids])
    assert_close("score of a sequence", score, expected, atol=atol)
    stream = evaluate_stream(model, ids, segment_length=4, progress=False)
    assert_close("loss of a stream", torch.tensor(stream.loss), -expected / 10, atol=atol / 10)


@names
@pytest.mark.parametrize("way", ["int8 weight-only", "int8 dynamic"])
def test_generation_goes_by_the_logits(way: str, name: str) -> None:
    """Greedy decoding takes tokens that one forward over the text finds likeliest, or as likely within rounding."""
    model = quantised(way, name, memory_init="empty")
    ids = text(model)[:, :5]
    for memory in (None, model.init_memory(2)):
        new = model.generate(ids, cache=memory, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.no_grad():
            logits = model(new).logits[:, 4:-1]
        chosen = logits.gather(-1, new[:, 5:, None])[..., 0]
        assert_close("logits", chosen, logits.amax(dim=-1), atol=1e-4 if "weight-only" in way else 0.3)


@names
@pytest.mark.parametrize("config_name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_torchao_on_loading(config_name: str, name: str, tmp_path: Path) -> None:
    """`from_pretrained(quantization_config=…)`, saved and loaded again."""
    quantization = pytest.importorskip("torchao.quantization", reason="`pip install torchao`")
    from transformers import TorchAoConfig

    small_model(TransfoXLForCausalLM, name, **SIZES).save_pretrained(tmp_path / "float")
    config = TorchAoConfig(getattr(quantization, config_name)())
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    layer = model.transformer.layers[0]
    assert all(type(linear.weight) is not nn.Parameter for linear in (layer.dec_attn.qkv_net, layer.pos_ff.CoreNet[0]))
    reference = called(model)
    for mode in MODES:
        assert_all_close(read(model, mode), read(reference, mode), str(mode))
    model.save_pretrained(tmp_path / "int8")
    again = TransfoXLForCausalLM.from_pretrained(tmp_path / "int8")
    assert type(again.transformer.layers[0].dec_attn.qkv_net.weight) is type(layer.dec_attn.qkv_net.weight)
    assert_all_close(read_all(again), read_all(model))


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: `pip install bitsandbytes` (125 MB; it slows the import of peft down)",
)
@names
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits: int, name: str, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    small_model(TransfoXLForCausalLM, name, **SIZES).save_pretrained(tmp_path / "float")
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = TransfoXLForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    layer = model.transformer.layers[0].dec_attn.qkv_net
    assert type(layer).__module__.startswith("bitsandbytes")
    ids = text(model)
    model.eval()
    with torch.no_grad():
        output = model(ids, labels=ids)
        expected = -output.logits.log_softmax(dim=-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        assert_close("losses", output.losses[:, :-1], expected, atol=1e-4)
        of_segments = []
        for stores in ("hidden_states", "keys_values"):
            memory = model.init_memory(2, stores=stores)
            of_segments.append(torch.cat([model(part, cache=memory).logits for part in ids.split(6, dim=1)], dim=1))
        assert_close("logits behind hidden states", of_segments[0], of_segments[1], atol=0.05)
        new = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert new.shape == (2, 9)
        model.save_pretrained(tmp_path / "packed")
        again = TransfoXLForCausalLM.from_pretrained(tmp_path / "packed").eval()
        assert_close("logits, loaded again", again(ids).logits, model(ids).logits, atol=1e-5)


@names
@ways
def test_a_loss_without_tokens_of_a_cluster(way: str, name: str) -> None:
    """Texts of frequent words, of which no cluster gets any, in eval and train mode."""
    model = quantised(way, name)
    ids = text(model) % 10
    for training in (False, True):
        output = model.train(training)(ids, labels=ids, return_logits=True)
        expected = -output.logits.log_softmax(dim=-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        assert_close("losses", output.losses[:, :-1], expected, atol=WAYS[way][1])


@names
@ways
def test_resizing_is_refused(way: str, name: str) -> None:
    """Packed tables cannot grow; the model is as before."""
    model = quantised(way, name)
    expected = read(model, MODES[0])
    with pytest.raises(ValueError, match="The last table of `out_layers` must be a plain parameter to be resized"):
        model.resize_token_embeddings(45)
    assert model.config.vocab_size == 41
    assert_all_close(read(model, MODES[0]), expected)

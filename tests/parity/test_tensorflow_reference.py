"""Tiny checkpoints in the layout of the released TensorFlow models, with outputs of keras-transformer-xl."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hf_txl import TransfoXLConfig, TransfoXLForCausalLM, TransfoXLMemory
from tests.helpers import FIXTURES, assert_close
from tests.parity import original_keys
from tests.parity.package_runs import STORAGES, log_probabilities
from tests.parity.recorded_cases import HIDDEN_STATES, LOG_PROBABILITIES, case_names

CASES = ["div_1", "div_2", "div_2_cutoffs_3"]


def test_every_case_is_compared() -> None:
    assert case_names("txl_tf_reference") == CASES


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_probabilities_and_memory_equal_the_reference(name: str, storage: str) -> None:
    folder = FIXTURES / "txl_tf_reference" / name

    def array(file: str) -> torch.Tensor:
        # float64 there, though computed in float32
        return torch.from_numpy(np.load(folder / file)).float()

    fields = original_keys.keras_fields(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    with np.load(folder / "weights.npz") as file:
        variables = {key: torch.from_numpy(file[key]) for key in file.files}
    model = TransfoXLForCausalLM(TransfoXLConfig(**fields)).eval()
    model.load_state_dict(original_keys.tensorflow_state(variables, fields), strict=True)

    layers = range(model.config.n_layer)
    mems = [array(f"memory_{layer}.npy").transpose(0, 1) for layer in layers]
    # room for the given memory and the segment, so that the memory afterwards is what the reference returns
    memory = TransfoXLMemory.from_mems(model.config, mems, mem_len=20, memory_init="empty", stores=storage)
    output = model(array("tokens.npy").long(), cache=memory)
    expected = array("softmax.npy").log()
    assert_close(f"{name} log-probabilities", log_probabilities(output), expected, LOG_PROBABILITIES)
    if storage == "hidden_states":
        for layer, states in enumerate(memory.to_mems()):
            new_memory = array(f"new_memory_{layer}.npy").transpose(0, 1)
            assert_close(f"{name} memory {layer}", states, new_memory, **HIDDEN_STATES)

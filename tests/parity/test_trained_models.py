"""Two small trained models in the format of transformers 4, evaluated with every setting recorded for them."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_txl
from hf_txl import TransfoXLMemory
from tests.helpers import FIXTURES, assert_close, cut, read_in_segments
from tests.parity.package_runs import STORAGES, log_probabilities

# Mean loss over 58,000 or 111,000 predictions, summed in float64: rounding of single losses cancels.
NATS_PER_TOKEN = 1e-5
# Trained weights are larger than the random ones of the other cases, so more is lost to float32.
TRAINED_LOG_PROBABILITIES = 1e-4
TRAINED_HIDDEN_STATES = 1e-4

KINDS = ["word", "char"]
FOLDER = FIXTURES / "hf_transfo_xl_small"
# each setting reads 58,000 or 111,000 tokens; the other settings are in the full set
DEFAULT = {"word-b4-l64-m64-c-1-all-zeros", "word-b10-l32-m256-c100-window-empty"}


def evaluation_settings() -> list[Any]:
    """Every recorded setting of both models, under a readable name."""
    settings = []
    for kind in KINDS:
        for recorded in json.loads((FOLDER / kind / "expected_eval.json").read_text(encoding="utf-8")):
            name = "-".join(
                f"{short}{recorded[key]}"
                for short, key in (("b", "batch"), ("l", "tgt_len"), ("m", "mem_len"), ("c", "clamp_len"))
            )
            window = "window" if recorded["same_length"] else "all"
            label = f"{kind}-{name}-{window}-{recorded['memory_at_start']}"
            settings.append(pytest.param(kind, recorded, id=label, marks=[] if label in DEFAULT else pytest.mark.full))
    return settings


@functools.cache
def load(kind: str) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(FOLDER / kind, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[problem], f"{problem}: {report[problem]}"
    return model


@functools.cache
def evaluation_ids(kind: str) -> torch.Tensor:
    """The evaluation text as ids, (number of tokens,)."""
    if kind == "word":
        symbols = (FOLDER / "word" / "vocab.txt").read_text(encoding="utf-8").split("\n")
        index = {symbol: number for number, symbol in enumerate(symbols)}
        lines = (FOLDER / "word" / "eval.txt").read_text(encoding="utf-8").splitlines()
        return torch.tensor([index[word] for line in lines for word in [*line.split(), "<eos>"]])
    # the package's own text for its demo; the model was trained on the first nine tenths
    demo_text = Path(hf_txl.__file__).parent / "demo_text" / "tinyshakespeare.txt.xz"
    with lzma.open(demo_text, "rt", encoding="ascii", newline="") as file:
        text = file.read()[1_003_854:]
    return character_ids(text)


def characters() -> list[str]:
    return json.loads((FOLDER / "char" / "vocab.json").read_text(encoding="utf-8"))


def character_ids(text: str) -> torch.Tensor:
    index = {character: number for number, character in enumerate(characters())}
    return torch.tensor([index[character] for character in text])


@pytest.mark.parametrize(("kind", "length"), [("word", 58_362), ("char", 111_540)])
def test_evaluation_text_is_the_recorded_one(kind: str, length: int) -> None:
    ids = evaluation_ids(kind)
    assert len(ids) == length
    with np.load(FOLDER / kind / "expected_arrays.npz") as expected:
        first = torch.from_numpy(expected["input_ids"]).long()
    assert torch.equal(ids[: len(first)], first)


@pytest.mark.parametrize(("kind", "setting"), evaluation_settings())
@torch.no_grad()
def test_evaluation_equals_the_recorded_one(kind: str, setting: dict[str, Any]) -> None:
    model, ids = load(kind), evaluation_ids(kind)
    batch, tgt_len = setting["batch"], setting["tgt_len"]
    streams = ids[: len(ids) // batch * batch].view(batch, -1)
    memory = TransfoXLMemory(
        model.config,
        mem_len=setting["mem_len"],
        clamp_len=setting["clamp_len"],
        same_length=setting["same_length"],
        memory_init={"none": "empty", "empty": "empty", "zeros": "zeros"}[setting["memory_at_start"]],
    )
    total = torch.zeros((), dtype=torch.float64)
    predictions = 0
    inputs, targets = streams[:, :-1], streams[:, 1:]
    for segment in cut(inputs.shape[1], tgt_len):
        output = model(inputs[:, segment], cache=memory, shift_labels=targets[:, segment], return_logits=False)
        total += output.losses.double().sum()
        predictions += output.losses.numel()
    assert predictions == setting["predictions"]
    expected = torch.tensor(setting["nll_per_token"], dtype=torch.float64)
    assert_close(f"{kind} nats per token", total / predictions, expected, NATS_PER_TOKEN)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_stream_equals_the_recorded_arrays(kind: str, storage: str) -> None:
    model = load(kind)
    with np.load(FOLDER / kind / "expected_arrays.npz") as file:
        expected = {name: torch.from_numpy(file[name]) for name in file.files}
    ids = expected["input_ids"].long()
    length = model.config.mem_len
    memory = TransfoXLMemory(model.config, memory_init="empty", stores=storage)
    outputs = read_in_segments(
        model, ids[None, :-1], length, memory, shift_labels=ids[None, 1:], output_hidden_states=True
    )
    target_logprob = -torch.cat([output.losses[0] for output in outputs])
    hidden = torch.cat([output.hidden_states[-1][0] for output in outputs])
    last = log_probabilities(outputs[-1])[0, -1]
    tolerance = TRAINED_LOG_PROBABILITIES
    assert_close(f"{kind} log p of each token", target_logprob, expected["target_logprob"], tolerance)
    assert_close(f"{kind} log p of every token at the end", last, expected["full_logprob_last"], tolerance)
    assert_close(f"{kind} hidden states", hidden, expected["last_hidden"], TRAINED_HIDDEN_STATES)
    if storage == "hidden_states":
        # (mem_time, 1, d_model) -> (n_layer, mem_time, d_model)
        mems = torch.stack([states[:, 0] for states in memory.to_mems()])
        assert_close(f"{kind} memory", mems, expected["mems"], TRAINED_HIDDEN_STATES)


@pytest.mark.parametrize("storage", STORAGES)
def test_greedy_text_equals_the_recorded_one(storage: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "char")
    # character 0 is the line end, at which the recorded text does not stop
    model.generation_config.eos_token_id = None
    expected = (FOLDER / "char" / "expected_greedy.txt").read_bytes().decode("ascii")
    prompt = "ROMEO:\n"
    assert expected.startswith(prompt) and len(expected) == len(prompt) + 200
    memory = TransfoXLMemory(model.config, mem_len=128, memory_init="empty", stores=storage)
    ids = model.generate(
        character_ids(prompt)[None], cache=memory, do_sample=False, max_new_tokens=200, pad_token_id=0
    )
    symbols = characters()
    assert "".join(symbols[index] for index in ids[0].tolist()) == expected

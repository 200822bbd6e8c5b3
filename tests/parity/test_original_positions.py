"""Recorded outputs of the original PyTorch code with its other position encodings, attention types 1 to 3.

Type 1 (`learned_relative`) is reproduced throughout, and types 2 and 3 (absolute positions) without memory. With
memory the original adds positions to what it has stored, in place, and adds them again at every call, so an old state
carries the sum of all positions that it ever had. Here a state has one position, that of the call; hence the first
segment agrees with the recording, and the following ones agree with the slow float64 reference of that rule and differ
from the recording. Given a memory that makes up for the sum, they agree with the recording too: nothing else differs.
"""

from __future__ import annotations

import functools

import pytest
import torch

from hf_txl import TransfoXLForCausalLM, TransfoXLMemory
from hf_txl.reference.kinds import slow_model_of
from hf_txl.reference.transformer_xl import last_hidden
from tests.helpers import assert_close
from tests.parity.package_runs import (
    STORAGES,
    assert_tied_as_original,
    build_model,
    compare_memory,
    compare_segments,
    log_probabilities,
)
from tests.parity.recorded_cases import (
    HIDDEN_STATES,
    LOG_PROBABILITIES,
    LOSSES,
    Recorded,
    case_names,
    evaluation_lengths,
    pytorch_case,
)
from tests.parity.test_original_pytorch import CASES as TYPE_0
from tests.parity.test_original_pytorch import COMPARED_SEGMENT_BY_SEGMENT as TYPE_0_BY_SEGMENT

RELATIVE = ["shaw-basic", "shaw-clamp", "shaw-longer-than-table", "shaw-pre-lnorm-cutoffs"]
ABSOLUTE_WITHOUT_MEMORY = ["abs-learned-no-mem", "abs-sin-no-mem"]
ABSOLUTE_WITH_MEMORY = [
    "abs-learned-longer-than-table",
    "abs-learned-mem",
    "abs-sin-mem",
    "abs-sin-mem-pre-lnorm-clamp",
]
CASES = [*RELATIVE, *ABSOLUTE_WITHOUT_MEMORY, *ABSOLUTE_WITH_MEMORY]
BACKENDS = ["eager", "sdpa"]


def test_every_case_folder_is_compared() -> None:
    assert sorted([*TYPE_0, *TYPE_0_BY_SEGMENT, *CASES]) == case_names("pytorch_original")
    types = {name: pytorch_case(name).case["constructor"]["attn_type"] for name in case_names("pytorch_original")}
    assert {name for name, number in types.items() if number == 1} == set(RELATIVE)
    assert {name for name, number in types.items() if number in (2, 3)} == {
        *ABSOLUTE_WITHOUT_MEMORY,
        *ABSOLUTE_WITH_MEMORY,
    }


@functools.cache
def model_of(name: str) -> TransfoXLForCausalLM:
    return build_model(pytorch_case(name))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_shared_as_in_the_original(name: str) -> None:
    assert_tied_as_original(model_of(name), pytorch_case(name))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", RELATIVE)
@torch.no_grad()
def test_relative_segments_with_memory_equal_the_original(name: str, storage: str, backend: str) -> None:
    recorded, model = pytorch_case(name), model_of(name)
    model.set_attn_implementation(backend)
    # `shaw-longer-than-table`: a longer memory than in training, so than the table
    memory = TransfoXLMemory(model.config, stores=storage, **evaluation_lengths(recorded))
    compare_segments(model, recorded, memory)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ABSOLUTE_WITHOUT_MEMORY)
@torch.no_grad()
def test_absolute_segments_without_memory_equal_the_original(name: str, backend: str) -> None:
    recorded, model = pytorch_case(name), model_of(name)
    model.set_attn_implementation(backend)
    compare_segments(model, recorded, TransfoXLMemory(model.config))
    # a memory of length 0 is as none at all
    for index in range(recorded.num_segments()):
        segment = recorded.segment(index)
        losses = model(segment["input_ids"], shift_labels=segment["target"]).losses
        assert_close(f"{name} segment {index} losses without cache", losses, segment["nll"], LOSSES)


@functools.cache
def numbered_anew(name: str) -> list[dict[str, torch.Tensor]]:
    """What the float64 reference of our rule gives for each segment of a case."""
    recorded = pytorch_case(name)
    model = slow_model_of(recorded.namespace, recorded.state)
    memory = model.new_memory(recorded.case["batch"], **evaluation_lengths(recorded))
    outputs = []
    with torch.no_grad():
        for index in range(recorded.num_segments()):
            segment = recorded.segment(index)
            rows = model.read(segment["input_ids"], memory)
            outputs.append(
                {
                    "nll": model.losses(rows, segment["target"]),
                    "hidden": last_hidden(rows),
                    "logprobs": model.scores(rows, segment["input_ids"].shape[1]),
                }
            )
    return outputs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ABSOLUTE_WITH_MEMORY)
@torch.no_grad()
def test_absolute_segments_with_memory_equal_the_original_once_and_then_the_reference(name: str, backend: str) -> None:
    recorded, model = pytorch_case(name), model_of(name)
    model.set_attn_implementation(backend)
    memory = TransfoXLMemory(model.config, **evaluation_lengths(recorded))
    for index, expected in enumerate(numbered_anew(name)):
        segment = recorded.segment(index)
        case = f"{name} segment {index}"
        output = model(segment["input_ids"], cache=memory, shift_labels=segment["target"], output_hidden_states=True)
        if index == 0:
            assert_close(f"{case} losses", output.losses, segment["nll"], LOSSES)
            assert_close(f"{case} hidden states", output.hidden_states[-1], segment["hidden"], **HIDDEN_STATES)
        else:
            # the original's accumulation of positions: far beyond any rounding
            assert (output.losses - segment["nll"]).abs().max() > 0.1
            assert (output.hidden_states[-1] - segment["hidden"]).abs().max() > 0.1
        assert_close(f"{case} losses of the reference", output.losses, expected["nll"], LOSSES)
        hidden = output.hidden_states[-1]
        assert_close(f"{case} hidden states of the reference", hidden, expected["hidden"], **HIDDEN_STATES)
        scores = log_probabilities(output)
        assert_close(f"{case} log-probabilities", scores, expected["logprobs"], LOG_PROBABILITIES)


def positions(recorded: Recorded, layer: int, length: int, clamp_len: int) -> torch.Tensor:
    """What is added to the states before a layer that sees `length` of them, `(length, 1, d_model)` in float64."""
    slow = slow_model_of(recorded.namespace, recorded.state)
    rows = [slow.position(layer, number, clamp_len) for number in range(length - 1, -1, -1)]
    return torch.stack(rows)[:, None]


@pytest.mark.parametrize("name", ABSOLUTE_WITH_MEMORY)
@torch.no_grad()
def test_the_first_segment_leaves_what_the_original_leaves_without_its_positions(name: str) -> None:
    recorded, model = pytorch_case(name), model_of(name)
    lengths = evaluation_lengths(recorded)
    memory = TransfoXLMemory(model.config, **lengths)
    segment = recorded.segment(0)
    model(segment["input_ids"], cache=memory)
    length = segment["input_ids"].shape[1]
    without = {
        f"mems.{layer}": segment[f"mems.{layer}"] - positions(recorded, layer, length, lengths["clamp_len"])
        for layer in range(model.config.n_layer)
        if f"mems.{layer}" in segment
    }
    assert len(without) == 3
    compare_memory(f"{name} segment 0", memory, without, model.config.n_layer)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ABSOLUTE_WITH_MEMORY)
@torch.no_grad()
def test_absolute_segments_equal_the_original_given_the_memory_it_used(name: str, backend: str) -> None:
    """The memory as the original had changed it, less the positions that are added here."""
    recorded, model = pytorch_case(name), model_of(name)
    model.set_attn_implementation(backend)
    lengths = evaluation_lengths(recorded)
    for index in range(1, recorded.num_segments()):
        segment = recorded.segment(index)
        mems = []
        for layer in range(model.config.n_layer):
            used = segment[f"mems_in_after_call.{layer}"]
            seen = len(used) + segment["input_ids"].shape[1]
            mems.append((used - positions(recorded, layer, seen, lengths["clamp_len"])[: len(used)]).float())
        memory = TransfoXLMemory.from_mems(model.config, mems, **lengths)
        output = model(segment["input_ids"], cache=memory, shift_labels=segment["target"], output_hidden_states=True)
        case = f"{name} segment {index}"
        assert_close(f"{case} losses", output.losses, segment["nll"], LOSSES)
        assert_close(f"{case} hidden states", output.hidden_states[-1], segment["hidden"], **HIDDEN_STATES)
    assert_close(
        f"{name} log-probabilities", log_probabilities(output), recorded.expected["last.logprobs"], LOG_PROBABILITIES
    )

"""Recorded outputs and gradients of the original PyTorch code (`pytorch/mem_transformer.py`), attention type 0."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from hf_txl import TransfoXLMemory
from tests.helpers import assert_close
from tests.parity.original_keys import pytorch_state
from tests.parity.package_runs import (
    STORAGES,
    assert_tied_as_original,
    build_model,
    compare_segments,
    log_probabilities,
)
from tests.parity.recorded_cases import (
    GRADIENTS,
    HIDDEN_STATES,
    LOG_PROBABILITIES,
    LOSSES,
    case_names,
    evaluation_lengths,
    pytorch_case,
)

CASES = [
    "xl-clamp",
    "xl-div1-proj-nocutoff",
    "xl-div1-proj-tied",
    "xl-div1-proj-untied",
    "xl-div2-untied-projs",
    "xl-enwik8",
    "xl-eval-override",
    "xl-long-mem",
    "xl-no-mem",
    "xl-odd-sizes",
    "xl-pre-lnorm",
    "xl-same-length-clamp",
    "xl-same-length-growing",
    "xl-same-length-short-mem",
    "xl-short-mem",
    "xl-untied-div1",
    "xl-untied-div2",
    "xl-wt103-base",
    "xl-wt103-large",
]

# Each segment of these is compared given the memory that was recorded before it; how that memory came about is not.
COMPARED_SEGMENT_BY_SEGMENT = {
    "xl-ext-len": (
        "the original passes two lengths to `_update_mems` in the wrong order, so the first segment also remembers "
        "the tokens that the second one repeats; a model without `ext_len` has no such segment"
    ),
    "xl-ext-len-no-mem": "nothing is remembered: each segment is a plain forward over the repeated and the new tokens",
    "xl-ext-len-short-mem": (
        "with `ext_len` above `mem_len` the same mistake remembers the wrong positions in every segment"
    ),
}

CASES_WITH_GRADIENTS = ["xl-enwik8", "xl-pre-lnorm", "xl-wt103-large"]


def test_every_case_is_compared_or_listed_with_a_reason() -> None:
    # the other folders: test_original_positions.py
    assert sorted([*CASES, *COMPARED_SEGMENT_BY_SEGMENT]) == case_names("pytorch_original", "xl-*")
    assert all(name.startswith("xl-ext-len") for name in COMPARED_SEGMENT_BY_SEGMENT)
    recorded = {name for name in case_names("pytorch_original") if "grad.loss" in pytorch_case(name).expected}
    assert recorded == set(CASES_WITH_GRADIENTS)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_segments_with_memory_equal_the_original(name: str, storage: str) -> None:
    recorded = pytorch_case(name)
    model = build_model(recorded)
    # `xl-eval-override`: the lengths of evaluation belong to the memory, the model keeps those of training
    memory = TransfoXLMemory(model.config, stores=storage, **evaluation_lengths(recorded))
    compare_segments(model, recorded, memory)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_shared_as_in_the_original(name: str) -> None:
    recorded = pytorch_case(name)
    assert_tied_as_original(build_model(recorded), recorded)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", list(COMPARED_SEGMENT_BY_SEGMENT))
@torch.no_grad()
def test_segments_that_repeat_tokens_equal_the_original_given_its_memory(name: str, storage: str) -> None:
    recorded = pytorch_case(name)
    model = build_model(recorded)
    width = recorded.case["constructor"]["tgt_len"]
    for index in range(recorded.num_segments()):
        segment = recorded.segment(index)
        memory = TransfoXLMemory(model.config, stores=storage)
        if index > 0 and model.config.mem_len > 0:
            before = recorded.segment(index - 1)
            mems = [before[f"mems.{layer}"] for layer in range(model.config.n_layer)]
            memory = TransfoXLMemory.from_mems(model.config, mems, stores=storage)
        # the repeated tokens were scored in the segment before
        targets = torch.full_like(segment["input_ids"], -100)
        targets[:, -width:] = segment["target"]
        output = model(segment["input_ids"], cache=memory, shift_labels=targets, output_hidden_states=True)
        case = f"{name} segment {index}"
        assert_close(f"{case} hidden states", output.hidden_states[-1], segment["hidden"], **HIDDEN_STATES)
        assert_close(f"{case} losses", output.losses[:, -width:], segment["nll"], LOSSES)
        assert torch.equal(output.losses[:, :-width], torch.zeros_like(output.losses[:, :-width]))
    scores = log_probabilities(output)[:, -width:]
    assert_close(f"{name} log-probabilities", scores, recorded.expected["last.logprobs"], LOG_PROBABILITIES)


@pytest.mark.parametrize("warm_up", ["without gradients", "with gradients"])
@pytest.mark.parametrize("name", CASES_WITH_GRADIENTS)
def test_gradients_equal_the_original(name: str, warm_up: str) -> None:
    recorded = pytorch_case(name)
    model = build_model(recorded)
    memory = TransfoXLMemory(model.config, stores="hidden_states" if warm_up == "without gradients" else "auto")
    last = recorded.case["gradients"]["segment_index"]
    with torch.no_grad() if warm_up == "without gradients" else nullcontext():
        for index in range(last):
            model(recorded.segment(index)["input_ids"], cache=memory)
    segment = recorded.segment(last)
    loss = model(segment["input_ids"], cache=memory, shift_labels=segment["target"]).loss
    loss.backward()

    assert_close("loss", loss, recorded.expected["grad.loss"], LOSSES)
    expected = pytorch_state(
        {
            key.removeprefix("grad."): tensor
            for key, tensor in recorded.expected.items()
            if key.startswith("grad.") and key != "grad.loss"
        }
    )
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, gradient in expected.items():
        assert_close(f"{name} gradient of {key}", parameters[key].grad, gradient, **GRADIENTS)

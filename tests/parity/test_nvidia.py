"""Recorded outputs of NVIDIA's PyTorch code (DeepLearningExamples): one key more with `same_length`."""

from __future__ import annotations

import pytest
import torch

from hf_txl import TransfoXLMemory
from tests.parity.package_runs import STORAGES, assert_tied_as_original, build_model, compare_segments
from tests.parity.recorded_cases import case_names, nvidia_case

CASES = ["nv-div4", "nv-same-length"]


def test_every_case_is_compared() -> None:
    assert case_names("nvidia") == CASES


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_segments_with_memory_equal_nvidia(name: str, storage: str) -> None:
    recorded = nvidia_case(name)
    model = build_model(recorded)
    compare_segments(model, recorded, TransfoXLMemory(model.config, stores=storage))


@pytest.mark.parametrize("name", CASES)
def test_weights_are_shared_as_in_nvidia(name: str) -> None:
    recorded = nvidia_case(name)
    assert_tied_as_original(build_model(recorded), recorded)

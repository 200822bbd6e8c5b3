"""Recorded outputs of the original TensorFlow code (`tf/model.py`): zero memory, one key more, epsilon 1e-12."""

from __future__ import annotations

import pytest
import torch

from hf_txl import TransfoXLMemory
from tests.parity.package_runs import STORAGES, assert_tied_as_original, build_model, compare_segments
from tests.parity.recorded_cases import case_names, lengths, tensorflow_case

CASES = ["tf-enwik8", "tf-enwik8-untie-r", "tf-lm1b", "tf-wt103-base", "tf-wt103-large"]
RUNS = ["eval_like", "train_like"]


def test_every_case_and_run_is_compared() -> None:
    assert case_names("tf_original") == CASES
    for name in CASES:
        assert sorted(tensorflow_case(name).case["runs"]) == RUNS


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_segments_with_memory_equal_the_original(name: str, run: str, storage: str) -> None:
    recorded = tensorflow_case(name)
    model = build_model(recorded)
    # one checkpoint is evaluated with several lengths
    memory = TransfoXLMemory(model.config, stores=storage, **lengths(recorded.case["runs"][run]))
    compare_segments(model, recorded, memory, run)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_shared_as_in_the_original(name: str) -> None:
    recorded = tensorflow_case(name)
    assert_tied_as_original(build_model(recorded), recorded)

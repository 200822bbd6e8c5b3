"""What all tests share: the package is registered, seeds are fixed, GPU tests say why they are skipped,
and which tests wait for the full set."""

import os
from collections.abc import Iterator

import pytest
import torch
from transformers import set_seed

import hf_txl  # noqa: F401  registers the Auto classes
from tests.sizes import mark_rest_of_products


def pytest_report_header() -> str:
    """Which instructions the numbers come from, and what limits them."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    limits = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    return " ".join(["kernels:", torch.backends.cpu.get_cpu_capability(), *limits])


@pytest.hookimpl(tryfirst=True)  # before `-m` takes its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rest_of_products(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and torch finds none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Every test starts from the same random state, whatever ran before it."""
    set_seed(0)
    yield

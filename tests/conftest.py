"""What all tests share: the package is registered, seeds are fixed, GPU tests say why they are skipped."""

from collections.abc import Iterator

import pytest
import torch
from transformers import set_seed

import hf_txl  # noqa: F401  registers the Auto classes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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

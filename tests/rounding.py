"""A processor whose products round otherwise for every shape: `pytest -p tests.rounding` runs tests on it.

Real kernels do so as well, but which shapes they round alike depends on the processor. Here no two shapes are, so a
test that asks for equal bits from different products fails on any machine, and one that asks them from the same
program on the same shapes passes. `torch.compile` refuses to work under a mode like this one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# products and the reductions beside them; what works element by element rounds alike in any shape
ROUNDED = {
    "addmm",
    "addmv",
    "baddbmm",
    "bmm",
    "dot",
    "linear",
    "matmul",
    "mean",
    "mm",
    "mv",
    "native_layer_norm",
    "sum",
    "logsumexp",
    "_log_softmax",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_softmax",
}
SIGNS = torch.tensor([-1, 1, 0, 0, 0, 0, 0, 0])


class RoundsByShape(TorchDispatchMode):
    """While it is entered, results of these operations are off by -1, 0 or 1 unit in the last place, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # an operation in place has a trailing underscore
        if func.namespace == "aten" and (name in ROUNDED or name.removesuffix("_") in ROUNDED):
            result = output[0] if isinstance(output, tuple) else output
            if type(result) is torch.Tensor and result.is_floating_point() and result.device.type == "cpu":
                shapes = tuple(tuple(value.shape) for value in args if isinstance(value, torch.Tensor))
                with torch.no_grad():
                    result.mul_(self.factor(name.strip("_"), shapes, result))
        return output

    def factor(self, name: str, shapes: tuple, result: torch.Tensor) -> torch.Tensor:
        key = (name, shapes, tuple(result.shape), str(result.dtype))
        if key not in self.factors:
            generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
            # a quarter of the values differ: two kernels agree on most, and the tolerances of the recordings are those
            # of two correct programs, not of one that is wrong in the last place everywhere
            signs = SIGNS[torch.randint(0, len(SIGNS), result.shape, generator=generator)]
            self.factors[key] = (1 + signs.double() * torch.finfo(result.dtype).eps).to(result.dtype)
        return self.factors[key]


@pytest.fixture(autouse=True)
def rounding_by_shape() -> Iterator[None]:
    with RoundsByShape():
        yield

"""The processor of `tests/rounding.py`: equal bits for equal shapes alone."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import assert_close
from tests.rounding import RoundsByShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_products_round_alike_for_equal_shapes_alone(inference: bool, dtype: torch.dtype) -> None:
    states, weight = torch.randn(9, 16, dtype=dtype), torch.randn(17, 16, dtype=dtype)
    with torch.inference_mode(inference), RoundsByShape():
        whole, again, part = F.linear(states, weight), F.linear(states, weight), F.linear(states[:3], weight)
    assert torch.equal(whole, again)
    assert not torch.equal(whole[:3], part)
    eps = torch.finfo(dtype).eps
    assert_close("rows", whole, states.double() @ weight.double().t(), atol=20 * eps, rtol=2 * eps)


def test_gradients_are_rounded_and_no_argument_is_changed() -> None:
    states = torch.randn(9, 16)
    weight = torch.randn(17, 16, requires_grad=True)
    before = states.clone(), weight.detach().clone()
    with RoundsByShape():
        F.linear(states, weight).square().sum().backward()
    assert torch.equal(states, before[0]) and torch.equal(weight, before[1])
    gradient = weight.grad
    weight.grad = None
    F.linear(states, weight).square().sum().backward()
    assert_close("gradient", gradient, weight.grad, atol=1e-4, rtol=1e-5)
    assert not torch.equal(gradient, weight.grad)

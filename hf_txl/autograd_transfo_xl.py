"""Autograd functions whose backward pass recomputes intermediate results, so it cannot be differentiated again."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function: refuse second derivatives, which would be silently wrong.

    torch's `once_differentiable` alone notices only some of them: `torch.autograd.grad(…, create_graph=True)` treats
    a gradient that it returns as a constant.
    """
    first_order = once_differentiable(backward)

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # recorded in a backward pass with `create_graph=True` only
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "`create_graph` must be False: this backward pass recomputes intermediate results and has no "
                "derivative. For second derivatives compute a loss of your own from `logits`, in eval mode, with "
                "`output_attentions=True`."
            )
        return first_order(ctx, *gradients)

    return checked


__all__ = ["first_order_only"]

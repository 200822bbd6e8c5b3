"""What tests of every kind share: one comparison that says what differs, and one way to read a text in segments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

FIXTURES = Path(__file__).parent / "fixtures"


def assert_close(name: str, actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float = 0.0) -> None:
    """Compare two tensors in float64: every `|actual - expected|` may be `atol + rtol * |expected|`.

    A failure names the tensor and shows the largest difference, where it is and both values there. Shapes must be
    equal, and infinities and NaN must be in the same places.
    """
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if actual.numel() == 0:
        return
    ours, theirs = actual.detach().cpu().double(), expected.detach().cpu().double()
    # equal infinities differ by NaN, and a NaN is equal to a NaN
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(equal, torch.zeros_like(ours), (ours - theirs).abs()).nan_to_num(nan=torch.inf)
    too_large = difference > atol + rtol * theirs.abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = int(difference.argmax())
    record_difference(name, float(difference.flatten()[largest]))
    if not too_large.any():
        return
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(largest), difference.shape))
    raise AssertionError(
        f"{name}: {int(too_large.sum())} of {difference.numel()} values differ by more than {atol:g} + {rtol:g} * "
        f"|expected|; the largest difference is {float(difference.flatten()[largest]):.3e} at {index}: "
        f"{float(ours.flatten()[largest]):.8g}, expected {float(theirs.flatten()[largest]):.8g}"
    )


LARGEST_DIFFERENCES: dict[str, float] = {}


def record_difference(name: str, difference: float) -> None:
    """Keep the largest difference seen under each name, for reports (`pytest -s`, or a debugger)."""
    LARGEST_DIFFERENCES[name] = max(difference, LARGEST_DIFFERENCES.get(name, 0.0))


def cut(length: int, lengths: int | Iterable[int]) -> Iterator[slice]:
    """Slices of consecutive segments that cover `length` positions; the last one may be shorter.

    Args:
        length: positions to cover.
        lengths: the length of every segment, or one length per segment (they must add up to `length`).
    """
    if isinstance(lengths, int):
        lengths = [min(lengths, length - start) for start in range(0, length, lengths)]
    start = 0
    for segment_length in lengths:
        yield slice(start, start + segment_length)
        start += segment_length
    assert start == length, f"segments cover {start} of {length} positions"


def read_in_segments(
    model: Any, ids: torch.Tensor, lengths: int | Iterable[int], memory: Any = None, **kwargs: Any
) -> list[Any]:
    """Read a text segment by segment with one memory, and return every segment's output.

    Args:
        model: a model that takes `cache=`.
        ids: (batch, time).
        lengths: as in `cut`.
        memory: advances in place; a new one of the model's configuration by default.
        kwargs: passed on with every segment. Tensors with the time axis of `ids` (`attention_mask`, `labels`,
            `shift_labels`) are cut with it.
    """
    if memory is None:
        memory = model.init_memory(ids.shape[0])
    outputs = []
    for segment in cut(ids.shape[1], lengths):
        pieces = {
            name: value[:, segment] if torch.is_tensor(value) and value.shape[:2] == ids.shape[:2] else value
            for name, value in kwargs.items()
        }
        outputs.append(model(input_ids=ids[:, segment], cache=memory, **pieces))
    return outputs

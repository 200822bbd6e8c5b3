"""Which tests are the default ones (`make test`), and which wait for the full set (`make test-all`).

A test is in the full set when it is marked `full`: by hand, with `full(...)` for single parameters, or because it is
one of a product. Of a test with several parametrised arguments, as many cases run by default as it takes for every
value of every argument to occur; the other combinations are full.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings


def full(*values: Any, **options: Any) -> Any:
    """A parameter of the full set: `pytest.param` with that mark."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def first(values: Iterable[Any], num_default: int = 1) -> list[Any]:
    """Parameters of which the first are default ones and the rest full."""
    return [value if index < num_default else full(value) for index, value in enumerate(values)]


def parametrised_values(item: pytest.Item) -> set[tuple[str, ...]]:
    """One entry for each `parametrize` over a test: its arguments, and which of their values this case has."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return set()
    values = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if isinstance(mark.args[0], (list, tuple)) else mark.args[0].replace(",", " ").split()
        # a value is the same object in every combination; it need not be hashable
        values.add((*names, *(str(id(callspec.params[name])) for name in names)))
    return values


def mark_rest_of_products(items: list[pytest.Item]) -> None:
    """Mark the combinations of parameters that show no value which an earlier chosen one has not shown."""
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not {"full", "slow"} & {mark.name for mark in item.iter_markers()}]
        values = [parametrised_values(item) for item in cases]
        missing = set().union(*values)
        chosen: set[int] = set()
        times_shown: Counter[tuple[str, ...]] = Counter()
        while missing:
            # of those that show most, the first that repeats least
            best = max(
                range(len(cases)),
                key=lambda index: (len(values[index] & missing), -sum(times_shown[value] for value in values[index])),
            )
            missing -= values[best]
            times_shown.update(values[best])
            chosen.add(best)
        for index, item in enumerate(cases):
            if len(values[index]) > 1 and index not in chosen:
                item.add_marker(pytest.mark.full)


def examples(*strategies: Any, few: int, many: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis' `given(*strategies)`: a few random examples by default, many in the full set."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(test).parameters.values())
        # as in `given`: strategies fill the last arguments
        drawn = parameters[len(parameters) - len(strategies) :]
        arguments = dict(zip((parameter.name for parameter in drawn), strategies, strict=True))

        def run(num_examples: int, **parametrised: Any) -> None:
            size = settings(max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
            size(given(**arguments)(test))(**parametrised)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        number = inspect.Parameter("num_examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([number, *parameters[: -len(strategies)]])  # type: ignore[attr-defined]
        counts = [pytest.param(few, id=f"{few} examples"), full(many, id=f"{many} examples")]
        return pytest.mark.parametrize("num_examples", counts)(run)

    return decorate

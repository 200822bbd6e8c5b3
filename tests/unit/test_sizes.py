"""Which tests wait for the full set: of a product all but a few cases that show every value; more random examples."""

import inspect
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.sizes import examples, first, full, mark_rest_of_products


class Case:
    """As much of a collected test as the choice looks at."""

    def __init__(self, name: str, marks: list[Any], **params: Any) -> None:
        self.nodeid = f"{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = list(marks)

    def iter_markers(self, name: str | None = None) -> list[Any]:
        return [mark.mark for mark in self.marks if name in (None, mark.name)]

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)

    @property
    def is_full(self) -> bool:
        return any(mark.name == "full" for mark in self.marks)


def cases(name: str, *marks: Any, **values: list[Any]) -> list[Any]:
    each = [pytest.mark.parametrize(argument, values[argument]) for argument in values]
    return [Case(name, [*each, *marks], **dict(zip(values, row, strict=True))) for row in product(*values.values())]


def test_the_default_cases_of_a_product_show_every_value() -> None:
    # values that cannot be hashed, as many a parameter
    items = cases("test_a", window=["all", "some", "none"], options=[{}, {"n": 1}], seed=[1, 2])
    mark_rest_of_products(items)
    chosen = [item.callspec.params for item in items if not item.is_full]
    assert len(chosen) == 3
    assert {row["window"] for row in chosen} == {"all", "some", "none"}
    assert [{}, {"n": 1}] == sorted((row["options"] for row in chosen), key=len)[:: len(chosen) - 1]
    assert {row["seed"] for row in chosen} == {1, 2}


def test_a_short_list_beside_a_long_one_is_shown_evenly() -> None:
    items = cases("test_a", letter=list("abcdef"), storage=["states", "keys"])
    mark_rest_of_products(items)
    chosen = [item.callspec.params["storage"] for item in items if not item.is_full]
    assert sorted(chosen) == 3 * ["keys"] + 3 * ["states"]


def test_one_list_of_parameters_stays_whole() -> None:
    rows = [Case("test_b", [pytest.mark.parametrize(("a", "b"), [])], a=a, b=b) for a, b in product([1, 2], [3, 4])]
    items: list[Any] = [*cases("test_a", kind=[1, 2, 3, 4]), *rows]
    mark_rest_of_products(items)
    assert not any(item.is_full for item in items)


def test_what_is_marked_by_hand_is_no_default_case() -> None:
    by_hand = cases("test_a", pytest.mark.slow, window=[1, 2], start=[3])
    items = [*by_hand, *cases("test_a", window=[1, 2], start=[4])]
    mark_rest_of_products(items)
    # nor is it marked again
    assert [item.is_full for item in items] == [False] * 4


def test_parameters_are_marked() -> None:
    assert first(["a", "b"]) == ["a", full("b")]
    assert full(1, 2).values == (1, 2) and [mark.name for mark in full(1, 2).marks] == ["full"]


def test_a_property_is_tried_as_often_as_asked() -> None:
    tried = []

    @examples(st.integers(), st.booleans(), few=3, many=7)
    def run(kind: str, number: int, flag: bool) -> None:
        """What holds."""
        tried.append((kind, type(number), type(flag)))

    assert list(inspect.signature(run).parameters) == ["num_examples", "kind"]
    assert (run.__name__, run.__doc__) == ("run", "What holds.")
    (mark,) = run.pytestmark  # type: ignore[attr-defined]
    assert [parameter.values for parameter in mark.args[1]] == [(3,), (7,)]
    for number in (3, 7):
        tried.clear()
        run(num_examples=number, kind="shaw")
        assert tried == [("shaw", int, bool)] * number

"""Each measure of the style report finds what it is for, and lets pass what is at its bound."""

import pytest

from tests.packaging import style_report
from tests.packaging.style_report import Source, class_measures, function_measures, import_measure, prose_measure


def function(lines: int, parameters: int = 0, docstring: int = 0) -> str:
    """A method with that many parameters and lines, besides those of its docstring."""
    names = ", ".join(["self", *(f"p{index}" for index in range(parameters))])
    text = ['    """d', *["    d"] * (docstring - 2), '    """'] if docstring else []
    return "\n".join([f"def f({names}):", *text, *["    x = 1"] * (lines - 1)]) + "\n"


def holds(measures: list[style_report.Measure]) -> list[bool]:
    return [measure.holds for measure in measures]


def test_classes_are_measured_by_lines_and_methods() -> None:
    at_the_bound = "class A:\n" + "    def f(self): ...\n" * 20 + "    x = 1\n" * 279
    assert holds(list(class_measures([Source("a.py", at_the_bound)]))) == [True, True]
    assert holds(list(class_measures([Source("a.py", at_the_bound + "    x = 1\n")]))) == [False, True]
    assert holds(list(class_measures([Source("a.py", "class A:\n" + "    def f(self): ...\n" * 21)]))) == [True, False]


def test_functions_are_measured_without_docstring_and_self() -> None:
    short = function(2) * 3
    assert holds(list(function_measures([Source("a.py", short + function(60, 8, docstring=9))]))) == [True, True, True]
    assert holds(list(function_measures([Source("a.py", short + function(61))]))) == [False, True, True]
    assert holds(list(function_measures([Source("a.py", short + function(2, 9))]))) == [True, True, False]
    assert holds(list(function_measures([Source("a.py", function(11))]))) == [True, False, True]


def test_parameters_that_something_else_dictates_do_not_count() -> None:
    many = function(2, 9)
    assert holds(list(function_measures([Source("a.py", many.replace("def f", "def forward"))]))) == [True, True, True]
    option = '    p: Annotated[int, typer.Option("--p")],\n'
    command = "def f(\n" + option * 70 + ') -> None:\n    """d"""\n' + "    x = 1\n" * 59
    short = function(2) * 3
    assert holds(list(function_measures([Source("a.py", short + command)]))) == [True, True, True]
    assert holds(list(function_measures([Source("a.py", short + command + "    x = 1\n" * 2)]))) == [False, True, True]


def test_prose_is_what_people_read() -> None:
    long, longest = "w" * 121, "w" * 120
    code = f'"""{long}\n{longest}\n"""\nx = 1  # {long}\ny = "{long}"\n'
    page = f"{long}\n{longest}\n| {long} |\n```\n{long}\n```\n{long}\n"
    measure = prose_measure([Source("a.py", code)], [Source("a.md", page)])
    assert measure.offenders == ["a.py:1", "a.py:4", "a.md:1", "a.md:7"]
    assert not measure.holds


def test_an_import_that_goes_up_is_reported() -> None:
    assert import_measure([Source("hf_txl/data.py", "from .token_ids import COLUMN")]).holds
    assert not import_measure([Source("hf_txl/data.py", "from .training import TransfoXLTrainer")]).holds
    assert not import_measure([Source("hf_txl/nowhere.py", "")]).holds


def test_the_report_prints_every_measure(capsys: pytest.CaptureFixture[str]) -> None:
    status = style_report.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(lines) == 7
    assert status == any(line.startswith("FAIL") for line in lines)

"""`tests/cases.md` says what each id of a reported case is: one row for each id in the tests, and no other row."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
# a letter and two or three digits, as in the first column of the table
CASE = re.compile(r"\b[CR]\d{2,3}\b")


def ids_in_tests() -> set[str]:
    return {found for path in TESTS.rglob("*.py") for found in CASE.findall(path.read_text(encoding="utf-8"))}


def rows() -> list[tuple[str, str]]:
    """(id, sentence) of every row, in order."""
    text = (TESTS / "cases.md").read_text(encoding="utf-8")
    return re.findall(rf"^\| ({CASE.pattern}) \| (.+?) \| .+ \|$", text, re.MULTILINE)


def test_every_id_of_a_case_has_one_row_and_every_row_is_used() -> None:
    ids = [name for name, _ in rows()]
    assert ids == sorted(ids_in_tests(), key=lambda name: (name[0], int(name[1:])))


def test_every_case_is_told_in_one_sentence() -> None:
    for name, sentence in rows():
        assert re.fullmatch(r"[^.]*(?:\.\S[^.]*)*\.", sentence), f"{name}: {sentence}"

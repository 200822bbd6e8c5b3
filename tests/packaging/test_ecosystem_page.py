"""The table of docs/ecosystem.md claims nothing that no test shows."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ecosystem.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert header == ["tool", "what", "works / refused", "test"]
    return body


def test_every_row_says_works_or_refused_and_names_a_test() -> None:
    assert len(rows()) >= 18
    for tool, what, outcome, test in rows():
        assert tool and what and re.match("works|refused", outcome), (tool, what)
        named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
        assert named, f"{tool}, {what}: {test}"
        tree = ast.parse((ROOT / named[1]).read_text(encoding="utf-8"))
        assert named[2] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test

"""What the package promises to its users: names and signatures as recorded, and a docstring for each of them."""

import ast
import difflib
import importlib
import inspect
import re
import sys
from types import ModuleType

import pytest

from tests.packaging.public_api import (
    RECORD,
    ROOT,
    exported_names,
    module_files,
    public_api,
    public_definitions,
    public_methods,
)

# to be written; a name leaves this list with its docstring
UNDOCUMENTED: list[str] = []


def undocumented(module: ModuleType, source: str) -> list[str]:
    """A module, its public classes and functions, and their methods and properties, without a docstring.

    A method that overrides another one inherits its docstring, as `help` shows it.
    """
    found = {module.__name__: module.__doc__}
    for node in public_definitions(ast.parse(source)):
        owner = getattr(module, node.name)
        # not that of a base class, which describes another one
        found[f"{module.__name__}.{node.name}"] = owner.__doc__
        if isinstance(node, ast.ClassDef):
            for method in public_methods(node):
                found[f"{module.__name__}.{node.name}.{method.name}"] = inspect.getdoc(getattr(owner, method.name))
    return [name for name, text in found.items() if not text]


def test_the_public_api_is_the_recorded_one() -> None:
    recorded = RECORD.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(recorded, public_api(), "recorded", "now", lineterm="", n=0))
    assert not changes, "\n".join(
        [
            "The public names or signatures of hf_txl changed. If that is meant, say so in CHANGELOG.md and run",
            "    python tests/packaging/public_api.py --write",
            *changes,
        ]
    )


def sources() -> dict[str, str]:
    return {module: path.read_text(encoding="utf-8") for module, path in module_files().items()}


def test_every_public_name_is_there() -> None:
    for module, source in sources().items():
        found = importlib.import_module(module) if exported_names(ast.parse(source)) else None
        assert [name for name in sorted(exported_names(ast.parse(source))) if not hasattr(found, name)] == [], module


def test_names_that_the_documentation_imports_are_public() -> None:
    public = {module: exported_names(ast.parse(source)) for module, source in sources().items()}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    texts = {
        f"{page.name}, part {number}": text
        for page in pages
        for number, text in enumerate(
            re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
            if page.suffix == ".md"
            else [page.read_text(encoding="utf-8")]
        )
    }
    assert len(texts) > 10
    internal = {
        f"{where}: from {node.module} import {alias.name}"
        for where, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module in public
        for alias in node.names
        if alias.name not in public[node.module] and f"{node.module}.{alias.name}" not in public
    }
    assert internal == set()


def test_every_public_name_has_a_docstring() -> None:
    missing = [
        name
        for module, source in sources().items()
        if exported_names(ast.parse(source))
        for name in undocumented(importlib.import_module(module), source)
    ]
    assert missing == UNDOCUMENTED


def test_a_missing_docstring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
__all__ = ["A", "B", "f"]
class A:
    "a"
    def g(self): "g"
    def h(self): ...
    def _k(self): ...
class B(A):
    def g(self): ...
def f(): ...
def k(): ...
"""
    module = ModuleType("m", "about m")
    monkeypatch.setitem(sys.modules, "m", module)
    exec(source, module.__dict__)
    assert undocumented(module, source) == ["m.A.h", "m.B", "m.f"]

"""The public names of `hf_txl` with their signatures, one a line, read from the sources.

    python tests/packaging/public_api.py            # print them
    python tests/packaging/public_api.py --write    # write them to tests/packaging/public_api.txt

A module's public names are those of its `__all__`; a module without one is internal. A class is listed with its
public methods and properties and its `__init__`.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_suffix(".txt")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    folders = {"hf_txl": ROOT / "hf_txl", "hf_txl.conversion": ROOT / "conversion"}
    files = {}
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


def exported_names(tree: ast.Module) -> set[str]:
    """The names of `__all__`, none where a module has no such list."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return set(ast.literal_eval(node.value))
    return set()


def public_definitions(tree: ast.Module) -> Iterator[Function | ast.ClassDef]:
    """Functions and classes that a module defines and makes public."""
    exported = exported_names(tree)
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name in exported:
            yield node


def public_methods(node: ast.ClassDef) -> Iterator[Function]:
    """Methods and properties without a leading underscore."""
    for item in node.body:
        if isinstance(item, Function) and not item.name.startswith("_"):
            yield item


def signature(node: Function) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"({ast.unparse(node.args)}){returns}"


def class_lines(node: ast.ClassDef, name: str) -> Iterator[str]:
    bases = ", ".join(ast.unparse(item) for item in [*node.bases, *(keyword.value for keyword in node.keywords)])
    yield f"{name}({bases})"
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not getattr(item.target, "id", "_").startswith("_"):
            yield f"{name}.{ast.unparse(item)}"
        elif isinstance(item, Function) and (item.name == "__init__" or not item.name.startswith("_")):
            kinds = [ast.unparse(decorator) for decorator in item.decorator_list]
            kind = next((kind for kind in kinds if kind in ("property", "classmethod", "staticmethod")), "")
            yield f"{name}.{item.name}{signature(item)}{f'  [{kind}]' if kind else ''}"


def public_api() -> list[str]:
    """All lines of the record, sorted."""
    lines = []
    for module, path in module_files().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = set()
        for node in public_definitions(tree):
            name = f"{module}.{node.name}"
            defined.add(node.name)
            lines += class_lines(node, name) if isinstance(node, ast.ClassDef) else [f"{name}{signature(node)}"]
        # values, and what is defined elsewhere
        lines += [f"{module}.{name}" for name in exported_names(tree) - defined]
    return sorted(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="The public names of hf_txl with their signatures.")
    parser.add_argument("--write", action="store_true", help=f"Write them to {RECORD.name}.")
    text = "\n".join(public_api()) + "\n"
    if parser.parse_args().write:
        RECORD.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

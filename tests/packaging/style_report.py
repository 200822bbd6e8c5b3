"""Measures of style, printed with the offenders; the exit status is 1 where one of them does not hold.

    make style-report

Sources are `hf_txl` and `conversion`; prose is every Markdown page and every docstring and comment of the sources.
Code and tables in pages do not count: a row of a table cannot be broken.
"""

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    # as pytest finds it
    sys.path.insert(0, str(ROOT))

from tests.packaging.test_import_graph import CONVERSION, MAY_IMPORT, layer_complaints  # noqa: E402

CLASS_LINES, CLASS_METHODS = 300, 20
FUNCTION_LINES, MEDIAN_LINES, PARAMETERS = 60, 10, 8
PROSE_CHARACTERS = 120
Function = ast.FunctionDef | ast.AsyncFunctionDef
# what may have a docstring
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Measure(NamedTuple):
    """What was measured, the value and its bound, and who breaks it."""

    name: str
    value: str
    holds: bool
    offenders: list[str]


class Source(NamedTuple):
    """A file of the package."""

    name: str
    text: str

    def nodes(self, kind: type | tuple[type, ...]) -> Iterator[Any]:
        return (node for node in ast.walk(ast.parse(self.text)) if isinstance(node, kind))


def sources() -> list[Source]:
    paths = sorted(path for folder in ("hf_txl", "conversion") for path in (ROOT / folder).rglob("*.py"))
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def pages() -> list[Source]:
    listing = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    names = [name for name in listing if not name.startswith("tests/fixtures/") and (ROOT / name).is_file()]
    return [Source(name, (ROOT / name).read_text(encoding="utf-8")) for name in names]


def is_command(node: Function) -> bool:
    """Whether a function is a command of typer: each parameter declares an option, with its help."""
    notes = [ast.unparse(argument.annotation or node.args) for argument in [*node.args.args, *node.args.kwonlyargs]]
    return bool(notes) and all("typer.Option(" in note or "typer.Argument(" in note for note in notes)


def body_length(node: Function) -> int:
    """Lines of a function from its `def` to its end, without its docstring; of a command without its signature."""
    assert node.end_lineno is not None
    lines = node.end_lineno - (node.body[0].lineno - 1 if is_command(node) else node.lineno) + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def num_parameters(node: Function) -> int:
    """Parameters without `self` and `cls`, those behind a star included; 0 where something else dictates them.

    That is `forward`, whose parameters are the arguments of a model, a contract with the library, or the tensors of an
    autograd function, which are found only among its own arguments; `create_model_card`, which the library calls; and
    a command, whose parameters are its options.
    """
    if node.name in ("forward", "create_model_card") or is_command(node):
        return 0
    arguments = node.args
    named = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    count = len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)
    return count - (named[:1] in (["self"], ["cls"]))


def long_prose(source: Source) -> Iterator[int]:
    """Numbers of the docstring and comment lines that are too long."""
    lines = source.text.splitlines()
    prose = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in source.nodes(DOCUMENTED):
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            prose.update(range(docstring.lineno, docstring.end_lineno + 1))
    return (number for number in sorted(prose) if len(lines[number - 1]) > PROSE_CHARACTERS)


def long_page_lines(page: Source) -> Iterator[int]:
    """Numbers of the lines of a page that are too long, without code, tables and lines that are one link."""
    in_code = False
    for number, line in enumerate(page.text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and len(line) > PROSE_CHARACTERS and not re.match(r"\s*(?:\||\[[^]]*\]:|!\[)", line):
            yield number


def class_measures(files: list[Source]) -> Iterator[Measure]:
    long, many = [], []
    for file in files:
        for node in file.nodes(ast.ClassDef):
            where = f"{file.name}:{node.lineno} {node.name}"
            lines = node.end_lineno - node.lineno + 1
            methods = sum(isinstance(item, Function) for item in node.body)
            if lines > CLASS_LINES:
                long.append(f"{where}: {lines} lines")
            if methods > CLASS_METHODS:
                many.append(f"{where}: {methods} methods")
    yield Measure(f"classes over {CLASS_LINES} lines", str(len(long)), not long, long)
    yield Measure(f"classes over {CLASS_METHODS} methods", str(len(many)), not many, many)


def function_measures(files: list[Source]) -> Iterator[Measure]:
    lengths, long, many = [], [], []
    for file in files:
        for node in file.nodes((ast.FunctionDef, ast.AsyncFunctionDef)):
            where = f"{file.name}:{node.lineno} {node.name}"
            lengths.append(body_length(node))
            if lengths[-1] > FUNCTION_LINES:
                long.append(f"{where}: {lengths[-1]} lines")
            if (parameters := num_parameters(node)) > PARAMETERS:
                many.append(f"{where}: {parameters} parameters")
    median = statistics.median(lengths)
    yield Measure(f"functions over {FUNCTION_LINES} lines without their docstring", str(len(long)), not long, long)
    yield Measure(f"median function, at most {MEDIAN_LINES} lines", f"{median:g}", median <= MEDIAN_LINES, [])
    yield Measure(f"functions with more than {PARAMETERS} parameters", str(len(many)), not many, many)


def prose_measure(files: list[Source], texts: list[Source]) -> Measure:
    found = [f"{file.name}:{number}" for file in files for number in long_prose(file)]
    found += [f"{page.name}:{number}" for page in texts for number in long_page_lines(page)]
    return Measure(f"lines of prose over {PROSE_CHARACTERS} characters", str(len(found)), not found, found)


def import_measure(files: list[Source]) -> Measure:
    found = []
    for file in files:
        folder, _, rest = file.name.partition("/")
        importer = CONVERSION if folder == CONVERSION else rest.removesuffix(".py").partition("/")[0]
        if importer not in MAY_IMPORT:
            found.append(f"{file.name}: has no row in the import table")
        else:
            found += [f"{file.name}: {complaint}" for complaint in layer_complaints(importer, file.text)]
    return Measure("imports that go up the layers", str(len(found)), not found, found)


def measures() -> list[Measure]:
    files = sources()
    return [*class_measures(files), *function_measures(files), prose_measure(files, pages()), import_measure(files)]


def main() -> int:
    """Print each measure and its offenders; 1 if one does not hold."""
    found = measures()
    for measure in found:
        print(f"{'ok  ' if measure.holds else 'FAIL'}  {measure.name}: {measure.value}")
        for offender in measure.offenders:
            print(f"        {offender}")
    return int(not all(measure.holds for measure in found))


if __name__ == "__main__":
    sys.exit(main())

"""A Sphinx extension for docstrings in the style of transformers, which are Markdown in Google's sections.

`sphinx.ext.napoleon` reads the sections, but expects reStructuredText in them. This runs before it and rewrites the
Markdown that docstrings use: inline code, links, references such as [`TransfoXLMemory`], fenced code and tables.
"""

import re
import textwrap
from collections.abc import Iterator

from sphinx.application import Sphinx

# a fence or a table with its indentation; everything between is text
BLOCK = re.compile(
    r"^(?P<fence>(?P<indent> *)```(?P<language>\w*)\n(?P<code>(?:.*\n)*?) *```)$|^(?P<table>(?: *\|.*\n?){2,})",
    re.MULTILINE,
)
INLINE = re.compile(
    r"\[`(?P<reference>~?[\w.]+)`\]"
    r"|\[(?P<text>[^\]`]+)\]\((?P<address>\S+?://[^)]+)\)"
    r"|(?<!`)`(?P<code>[^`]+)`(?!`)"
)
# arguments that share a description, on more than one line
NAMES = re.compile(r"^( +(?:\w+, )+\w+,)\n +(?=(?:\w+, )*\w+(?: \(.*\))?:)", re.MULTILINE)

# an argument without a type, whose brackets napoleon puts into italics itself
OPTIONAL = re.compile(r"\(\*optional\*([^`()]*)\):")


def inline(match: re.Match[str]) -> str:
    if name := match["reference"]:
        shortened = "~" if name.startswith("~") else ""
        # the dot finds the name in whichever module it is
        return f":py:obj:`{shortened}.{name.lstrip('~')}`"
    if address := match["address"]:
        return f"`{match['text']} <{address}>`__"
    code = f"``{' '.join(match['code'].split())}``"
    # a plural's letter needs a separator
    return code + "\\ " * match.string[match.end() :][:1].isalnum()


def code_block(match: re.Match[str]) -> str:
    code = textwrap.dedent(match["code"])
    language = "pycon" if code.startswith(">>>") else match["language"] or "text"
    return textwrap.indent(f".. code-block:: {language}\n\n{textwrap.indent(code, '   ')}", match["indent"])


def table(rows: str) -> str:
    """A Markdown table as a list table, at the indentation of its first line."""
    lines = rows.rstrip().splitlines()
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines if "|---" not in line]
    listed = [f"{'*' if number == 0 else ' '} - {cell}" for row in cells for number, cell in enumerate(row)]
    text = "\n".join([".. list-table::", "   :header-rows: 1", "", *(f"   {line}" for line in listed)])
    return textwrap.indent(INLINE.sub(inline, text), indent) + "\n"


def parts(text: str) -> Iterator[str]:
    position = 0
    for match in BLOCK.finditer(text):
        yield INLINE.sub(inline, text[position : match.start()])
        yield code_block(match) if match["fence"] else table(match["table"])
        position = match.end()
    yield INLINE.sub(inline, text[position:])


def to_restructured_text(docstring: str) -> str:
    """The docstring with its Markdown rewritten; sections and indentation are as before."""
    return "".join(parts(OPTIONAL.sub(r"(optional\1):", NAMES.sub(r"\1 ", docstring))))


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = to_restructured_text("\n".join(lines)).splitlines()
    if what in ("property", "attribute"):
        # napoleon takes what precedes a colon in the first line for a type; an empty comment has none
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    # napoleon has the default priority of 500
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

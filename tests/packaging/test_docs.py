"""The documentation site: it builds without a warning, its notebooks run, and its reference is complete."""

import ast
import os
import subprocess
import sys
import textwrap
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.packaging.public_api import ROOT, exported_names, module_files

DOCS = ROOT / "docs"
# packages that make the names of their modules public
PLACES = ("hf_txl", "hf_txl.scoring")
NOTEBOOKS = sorted(path.stem for path in (DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as `make docs` builds them."""
    pytest.importorskip("myst_nb", reason='`pip install "hf_txl[docs]"`')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    completed = subprocess.run(
        [*command, "-b", "html", "-d", folder / "doctrees", DOCS, folder / "html"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-5000:]
    return folder / "html"


def inventory(site: Path) -> dict[str, str]:
    """Every Python name of the reference with the page that it is on, as other sites find them."""
    content = (site / "objects.inv").read_bytes()
    # four lines of text, then compressed lines: name, domain:role, priority, page, title
    entries = zlib.decompress(content.split(b"\n", 4)[4]).decode("utf-8").splitlines()
    fields = [entry.split(" ", 4) for entry in entries]
    return {name: page for name, role, _, page, _ in fields if role.startswith("py:")}


class Addresses(HTMLParser):
    """What a page links to, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.linked: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value and not value.startswith(("#", "data:")):
                (self.linked if tag == "a" else self.loaded).append(value)


@pytest.mark.full
@pytest.mark.xdist_group("docs")
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """And so the site builds: a warning, or a reference to a name that is not there, is an error."""
    shown = inventory(site)
    public = {
        f"{module}.{name}"
        for module, path in module_files().items()
        for name in exported_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    # values have no docstring, and the former name of a class is an assignment
    values = {name for name in public if name.rpartition(".")[2].isupper() or name.endswith("LMHeadModel")}
    assert len(public) > 50 and len(values) < len(public) / 5
    # shown under the package that they are imported from
    shown_there = {name for name in public if {f"{place}.{name.rpartition('.')[2]}" for place in PLACES} & set(shown)}
    missing = sorted(public - values - set(shown) - shown_there)
    assert missing == [], "a module of these names belongs in a page of docs/api"


@pytest.mark.full
@pytest.mark.xdist_group("docs")
def test_the_site_needs_no_connection(site: Path) -> None:
    """Styles, scripts and pictures are files of the site, and its links lead to pages that are there."""
    pages = [page for page in site.rglob("*.html") if "_static" not in page.parts]
    assert len(pages) > 20
    for page in pages:
        addresses = Addresses(page)
        assert len(addresses.loaded) > 3 and len(addresses.linked) > 20
        assert [address for address in addresses.loaded if "://" in address] == []
        for address in (*addresses.loaded, *addresses.linked):
            target = page.parent / address.partition("#")[0].partition("?")[0]
            assert "://" in address or target.exists(), f"{page.relative_to(site)} has {address}"


@pytest.mark.full
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_notebooks_are_shown_with_their_results(site: Path, notebook: str) -> None:
    text = (site / "notebooks" / f"{notebook}.html").read_text(encoding="utf-8")
    assert "cell_output" in text and "_images/" in text


def converted(docstring: str) -> str:
    pytest.importorskip("sphinx", reason='`pip install "hf_txl[docs]"`')
    sys.path.insert(0, str(DOCS))
    try:
        from markdown_docstrings import to_restructured_text
    finally:
        sys.path.remove(str(DOCS))
    return to_restructured_text(textwrap.dedent(docstring))


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("A `name` here.", "A ``name`` here."),
        ("Two `nn.Parameter`s.", "Two ``nn.Parameter``\\ s."),
        ("`a name\n    on two lines`", "``a name on two lines``"),
        ("See [`TransfoXLMemory`].", "See :py:obj:`.TransfoXLMemory`."),
        ("See [`~hf_txl.data.TokenStreams`].", "See :py:obj:`~.hf_txl.data.TokenStreams`."),
        ("[Dai et al.](https://arxiv.org/abs/1901.02860)", "`Dai et al. <https://arxiv.org/abs/1901.02860>`__"),
        ("``already``", "``already``"),
        ("    a (*optional*, a keyword): B", "a (optional, a keyword): B"),
        ("    a (`int`, *optional*): B", "a (``int``, *optional*): B"),
        ("Args:\n    a, b,\n    c: As above.", "Args:\n    a, b, c: As above."),
    ],
)
def test_markdown_of_docstrings_is_rewritten(markdown: str, expected: str) -> None:
    assert converted(markdown) == expected


def test_blocks_of_docstrings_are_rewritten() -> None:
    docstring = """\
        Example:

        ```python
        >>> f(`x`)
        ```

        | mode | a token is |
        |---|---|
        | `moses` | a word |
        """
    expected = """\
        Example:

        .. code-block:: pycon

           >>> f(`x`)


        .. list-table::
           :header-rows: 1

           * - mode
             - a token is
           * - ``moses``
             - a word
        """
    assert converted(docstring) == textwrap.dedent(expected)

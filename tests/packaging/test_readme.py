"""Every Python snippet of the README, the guides and the notebooks runs, in order, in one namespace per page."""

import json
import re
from pathlib import Path

import pytest

from tests.sizes import full

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run(snippets: list[str], page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what a snippet writes goes to an empty folder; what it reads is found as from the repository
    (folder / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(folder)
    namespace: dict[str, object] = {}
    for number, snippet in enumerate(snippets, start=1):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), namespace)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert snippets or page.name != "README.md" or page.parent != ROOT
    run(snippets, page, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "notebook", [full(path) if path.stem == "finetuning" else path for path in NOTEBOOKS], ids=name
)
def test_notebooks_run(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cells here; the site runs them in a kernel."""
    pytest.importorskip("matplotlib").use("Agg")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 3
    run(code, notebook, tmp_path, monkeypatch)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {heading.lower().replace(" ", "-") for heading in headings}

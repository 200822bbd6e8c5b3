"""`uv.lock` holds the tested versions, and is that of the present requirements (`make lock` writes it)."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def read(name: str) -> Any:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


def test_every_tested_version_is_locked() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }
    locked = {package["name"]: package.get("version") for package in read("uv.lock")["package"]}
    assert len(pins) > 100
    assert {name: locked.get(name) for name in pins} == pins


def test_the_lock_is_that_of_the_requirements() -> None:
    """As `uv lock --check` finds it, which needs a connection."""
    project = read("pyproject.toml")["project"]
    (locked,) = (package for package in read("uv.lock")["package"] if package["name"] == project["name"])
    extras = project["optional-dependencies"]
    declared = [(item, "") for item in project["dependencies"]]
    declared += [(item, extra) for extra, items in extras.items() for item in items]
    expected = {(canonicalize_name(Requirement(item).name), extra) for item, extra in declared}
    found = {
        (item["name"], extra[1] if (extra := re.search(r"extra == '(\w+)'", item.get("marker", ""))) else "")
        for item in locked["metadata"]["requires-dist"]
    }
    # a requirement on another extra of the project is written out
    assert {pair for pair in expected if pair[0] != project["name"]} <= found
    assert set(locked["metadata"]["provides-extras"]) == set(extras)


def test_packages_come_from_the_public_index() -> None:
    sources = {package["name"]: package["source"] for package in read("uv.lock")["package"]}
    registries = {source["registry"] for source in sources.values() if "registry" in source}
    assert len(registries) == 1 and not registries.pop().startswith(("file", "/"))
    assert [name for name, source in sources.items() if "registry" not in source] == ["hf-txl"]

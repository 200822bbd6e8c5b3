"""The project's own text: true on every machine, and nothing in it that only the machine of its author has."""

import lzma
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

# written so that no pattern matches its own text
MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:(?:root|work)\b|(?:home|opt|mnt|media|srv|Users)/[\w.-])"  # of one machine or person
    r"|\b[A-Za-z]:\\(?:Users|Documents)\b"
    r"|(?:\.\./)+shared\b"  # beside the repository, so absent from a clone
    r"|\bfile:/{2,3}\w"
)
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.(?:org|python\.org)|pythonh[o]sted\.org|download\.pytorch\.org|npmjs\.(?:org|com)|anaconda\.(?:org|com)"
    r"|crates\.io|proxy\.golang\.org|deb\.debian\.org|archive\.ubuntu\.com|registry\.\w+\.\w+)\b"
)


def project_files() -> list[Path]:
    """Files that git tracks, and new ones that it would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout, so there is no list of tracked files: {listing.stderr.decode().strip()}")
    names = sorted(set(listing.stdout.decode().split("\0")) - {""})
    return [path for name in names if (path := ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    """A file's text, unpacked if it is compressed text; None for binary content."""
    content = path.read_bytes()
    if path.suffix == ".xz":
        content = lzma.decompress(content)
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def matches(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in project_files():
        lines = enumerate((text_of(path) or "").splitlines(), start=1)
        name = path.relative_to(ROOT)
        found += [f"{name}:{number}: {match[0]}" for number, line in lines if (match := pattern.search(line))]
    return found


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def declared_requirements() -> list[Requirement]:
    """What pyproject.toml asks for, extras included; an extra that only names others of ours is left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(item) for items in lists for item in items]
    return [requirement for requirement in requirements if requirement.name != project["name"]]


def test_project_files_are_found() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in project_files()}
    assert {"pyproject.toml", "Makefile", "tests/packaging/test_project_text.py"} <= names


def test_no_file_names_a_path_of_one_machine() -> None:
    assert matches(MACHINE_PATH) == []


def test_no_file_names_a_package_registry() -> None:
    """But the lock file, which gives the public address of each package."""
    assert [match for match in matches(REGISTRY_HOST) if not match.startswith("uv.lock:")] == []


def test_no_file_holds_a_merge_marker() -> None:
    assert matches(re.compile(r"^(?:<{7}|>{7}|\|{7}) ")) == []


def test_constraints_are_exact_public_versions() -> None:
    """No address, no path, no local build: the file must mean the same on every machine."""
    lines = constraint_lines()
    assert lines
    version = r"[A-Za-z0-9][A-Za-z0-9._-]*==\d+(?:\.\d+)*(?:\.post\d+|b\d+)?"
    assert [line for line in lines if not re.fullmatch(version, line)] == []


def test_every_direct_requirement_has_a_tested_version() -> None:
    pins = dict(line.split("==") for line in constraint_lines())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in declared_requirements():
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no line in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the tested version {version}"


def test_requirements_have_floors_only() -> None:
    operators = {specifier.operator for requirement in declared_requirements() for specifier in requirement.specifier}
    assert operators == {">="}


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        (MACHINE_PATH, ("see ", "/", "home/ada/model")),
        (MACHINE_PATH, ('"', "/", "root/.cache")),
        (MACHINE_PATH, ("..", "/shared/data")),
        (MACHINE_PATH, ("file:", "///tmp/wheels")),
        (MACHINE_PATH, ("C:", "\\Users\\ada")),
        (REGISTRY_HOST, ("https://", "pypi", ".org/simple")),
        (REGISTRY_HOST, ("files.python", "hosted.org")),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern: re.Pattern[str], parts: tuple[str, ...]) -> None:
    assert pattern.search("".join(parts))


@pytest.mark.parametrize(
    "text", ["tests/home/x", "https://example.org/work/page", "models/opt/125m", "/".join(["a", "root", "b"])]
)
def test_the_patterns_leave_relative_paths_and_addresses_alone(text: str) -> None:
    assert not MACHINE_PATH.search(text)
    assert not REGISTRY_HOST.search(text)

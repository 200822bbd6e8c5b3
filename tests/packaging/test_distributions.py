"""The source distribution and the wheel: what is in them, and that the installed wheel works without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# folders of the repository and where the wheel puts them
PACKAGES = {"hf_txl": "hf_txl", "conversion": "hf_txl/conversion", "model_cards": "hf_txl/model_cards"}
DATA = ("hf_txl/py.typed", "hf_txl/demo_text/*", "model_cards/TEMPLATE.md")
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE")

# built once
pytestmark = pytest.mark.xdist_group("distributions")

# imports every module, then prints where each of them was found
IMPORT_ALL = """
import importlib, json, pkgutil
import hf_txl
names = [item.name for item in pkgutil.walk_packages(hf_txl.__path__, "hf_txl.")]
print(json.dumps({name: importlib.import_module(name).__file__ for name in ["hf_txl", *names]}))
"""


def source_files() -> list[str]:
    """Files of the packages, relative to the repository."""
    modules = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    data = [path for pattern in DATA for path in ROOT.glob(pattern)]
    return sorted(path.relative_to(ROOT).as_posix() for path in [*modules, *data])


def run(*command: object, folder: Path, **settings: Any) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        **settings,
    )
    assert completed.returncode == 0, f"{command}\n{completed.stdout[-2000:]}\n{completed.stderr[-4000:]}"
    return completed.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it, with the tested setuptools."""
    folder = tmp_path_factory.mktemp("build")
    for name in [*source_files(), *BUILD_FILES]:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    # what must stay out although it lies beside the packages
    shutil.copytree(ROOT / "tests" / "unit", folder / "source" / "tests" / "unit")
    (folder / "source" / "hf_txl" / "notes.txt").write_text("not part of the package")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source", folder=folder)
    return folder / "dist"


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = set()
    for name in source_files():
        folder, _, rest = name.partition("/")
        expected.add(f"{PACKAGES[folder]}/{rest}")
    assert names == expected
    assert {"hf_txl/py.typed", "hf_txl/demo_text/tinyshakespeare.txt.xz", "hf_txl/model_cards/TEMPLATE.md"} <= names
    assert "hf_txl/conversion/convert.py" in names


def test_the_source_distribution_holds_what_the_wheel_is_built_from(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert names - made == {*source_files(), *BUILD_FILES}


@pytest.mark.full
def test_the_installed_wheel_works_without_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=tmp_path).strip())
    # the tested dependencies come after it; path files among them, such as that of an editable install, are not read
    (own / "tested.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, folder=tmp_path)

    files = json.loads(run(python, "-c", IMPORT_ALL, folder=tmp_path).splitlines()[-1])
    modules = [name for name in source_files() if name.endswith(".py")]
    assert len(files) == len(modules)
    assert [file for file in files.values() if not Path(file).is_relative_to(own)] == []
    command = run(environment / "bin" / "hf-txl", "--help", folder=tmp_path)
    assert all(name in command for name in ("demo", "convert", "generate", "build-tokenizer"))

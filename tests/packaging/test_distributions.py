"""The source distribution and the wheel: what is in them, and that the installed wheel works without the checkout."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# folders of the repository and where the wheel puts them
PACKAGES = {"hf_txl": "hf_txl", "conversion": "hf_txl/conversion", "model_cards": "hf_txl/model_cards"}
DATA = (
    "hf_txl/py.typed",
    "hf_txl/demo_text/*",
    "hf_txl/example/*",
    "model_cards/TEMPLATE.md",
    "model_cards/TRAINED.md",
)
# modules that a user of models need not have
EXTRAS = {"accelerate", "datasets", "peft", "sklearn", "tensorflow"}
STRANGER = Path(__file__).with_name("without_package.py")
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
        env={**environment, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1"},
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


def new_environment(folder: Path) -> tuple[Path, Path]:
    """Python of an environment with nothing in it, and the folder of its packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder.parent)
    python = folder / "bin" / "python"
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return python, Path(run(python, "-c", find, folder=folder.parent).strip())


def with_dependencies(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions by name: those named, and what they depend on, directly or not."""
    found: dict[str, importlib.metadata.Distribution] = {}
    missing = [Requirement(name) for name in names]
    while missing:
        requirement = missing.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            missing += map(Requirement, found[requirement.name].requires or [])
    return found


def link(names: Iterable[str], packages: Path) -> None:
    """Put distributions and their dependencies into an environment, and nothing else."""
    for distribution in with_dependencies(names).values():
        for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            if not (packages / name).exists():
                (packages / name).symlink_to(distribution.locate_file(name))


def install(wheel: Path, python: Path, folder: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--quiet", wheel, folder=folder)


@pytest.mark.full
def test_the_installed_wheel_works_without_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    python, own = new_environment(tmp_path / "environment")
    # the tested dependencies come after it; path files among them, such as that of an editable install, are not read
    (own / "tested.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install(wheel, python, tmp_path)

    files = json.loads(run(python, "-c", IMPORT_ALL, folder=tmp_path).splitlines()[-1])
    modules = [name for name in source_files() if name.endswith(".py")]
    assert len(files) == len(modules)
    assert [file for file in files.values() if not Path(file).is_relative_to(own)] == []
    command = run(python.with_name("hf-txl"), "--help", folder=tmp_path)
    assert all(name in command for name in ("demo", "convert", "generate", "build-tokenizer"))


# imports the package, which must not change what the library offers, and saves what a stranger's test wants
SAVE = """
import sys
import transformers
before = set(dir(transformers))
classes = {name: getattr(transformers, name) for name in ("AutoModel", "PreTrainedModel")}
import hf_txl
assert all(type(getattr(transformers, name)) is type(sys) for name in set(dir(transformers)) - before)
assert all(getattr(transformers, name) is value for name, value in classes.items())

words = ["<eos>", "<unk>", "the", "cat", "sat", "on", "mat", "and"]
config = hf_txl.TransfoXLConfig(
    vocab_size=len(words), cutoffs=[4], div_val=2, d_model=16, n_head=2, n_layer=2, d_inner=32, mem_len=6,
    same_length=True, eos_token_id=0, pad_token_id=0,
)
hf_txl.TransfoXLForCausalLM(config).save_pretrained(sys.argv[1])
hf_txl.TransfoXLTokenizer.from_vocabulary(words, "pretokenized").save_pretrained(sys.argv[1])
"""


@pytest.mark.full
def test_without_extras_it_saves_what_loads_with_transformers_alone(built: Path, tmp_path: Path) -> None:
    """C91, C100: in two environments: with what the package declares, and with torch and transformers."""
    (wheel,) = built.glob("*.whl")
    python, packages = new_environment(tmp_path / "declared")
    link(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"], packages)
    install(wheel, python, tmp_path)
    assert not EXTRAS & {path.name for path in packages.iterdir()}
    run(python, "-c", SAVE, tmp_path / "model", folder=tmp_path)

    python, packages = new_environment(tmp_path / "others")
    link(["torch", "transformers"], packages)
    assert not (EXTRAS | {"hf_txl"}) & {path.name for path in packages.iterdir()}
    script = shutil.copy(STRANGER, tmp_path)
    printed = run(python, script, tmp_path / "model", tmp_path / "again", folder=tmp_path, stdin=subprocess.DEVNULL)
    assert json.loads(printed.rpartition("report ")[2])["saved again"] == 0

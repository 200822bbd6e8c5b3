"""The workflows of the public forge test what the project declares."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as true
    return {("on" if key is True else key): value for key, value in content.items()}


def project() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def shell(variable: str) -> str:
    """A value of `.ci/releases.sh`."""
    command = f"source .ci/releases.sh && printf %s ${variable}"
    return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_there_are_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "release", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_few_permissions_limits_and_pinned_actions(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), (name, step)
            assert "uses" not in step or re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", step["uses"]), (name, step)
        assert "timeout-minutes" in job or all("run" not in step for step in job["steps"]), name
        for other in [job["needs"]] if "needs" in job else []:
            assert other in workflow["jobs"]


def test_the_matrix_is_that_of_the_project_and_of_the_script() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["matrix"]["strategy"]["matrix"]
    pythons = re.findall(r"Programming Language :: Python :: (\d\.\d+)", project())
    assert matrix["python"] == pythons
    floors = {name: re.search(rf'"{name}>=([\d.]+)"', project())[1] for name in ("transformers", "torch")}
    last_old_name = shell("last_old_name")
    assert matrix["transformers"] == [floors["transformers"], last_old_name.removesuffix(".0"), "newest"]
    assert matrix["torch"] == [floors["torch"], "newest"]
    assert (shell("floor"), shell("torch_floor")) == (floors["transformers"], floors["torch"])
    script = (ROOT / ".ci" / "matrix").read_text(encoding="utf-8")
    assert f"pythons=({' '.join(pythons)})" in script


def test_commands_of_workflows_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    targets = {name for line in targets for name in line.split()}
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                    assert target in targets, target
                for script in re.findall(r"bash (\S+)", step.get("run", "")):
                    assert (ROOT / script).is_file(), script


def test_a_tag_publishes_by_trusted_publishing() -> None:
    release = read(ROOT / ".github" / "workflows" / "release.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    job = release["jobs"]["publish"]
    assert job["permissions"] == {"id-token": "write"} and job["needs"] == "build"
    assert any(step.get("uses") == "pypa/gh-action-pypi-publish@release/v1" for step in job["steps"])
    assert "password" not in str(release) and "secrets" not in str(release)


@pytest.mark.parametrize("script", ["run", "matrix", "releases.sh"])
def test_scripts_are_valid(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / script)], check=True)


def test_a_combination_that_cannot_run_is_named() -> None:
    """Never passed over: its own exit status, and the reason."""
    run = subprocess.run(["bash", ".ci/matrix", "2.0", "newest", "newest"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 75
    assert "not run: no Python 2.0" in run.stderr
    assert subprocess.run(["bash", ".ci/matrix", "3.11"], cwd=ROOT, capture_output=True).returncode == 2

"""Run the test-suite of the installed release of transformers on our classes and write `docs/conformance.md`.

    python tests/conformance/run.py            # or `make conformance`

The tests come from the release's source distribution, which pip fetches into a cache that git ignores. It lacks
`tests/generation`, `tests/exporters`, `tests/utils` and `tests/pipelines`; those come from a checkout of the release's
tag that `TRANSFORMERS_SOURCE` names, and without one the report says what is missing. Nothing of them is kept in this
repository. GPT-2 runs through the same harness as control.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

if __package__:
    from .reasons import ADAPTIONS, REASONS, Adaption, Reason
else:  # run as a script, beside `models.py`, for which `tests` is the release's package
    from reasons import ADAPTIONS, REASONS, Adaption, Reason

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".conformance"
REPORT = ROOT / "docs" / "conformance.md"

# folders of the release's tests/ that its source distribution lacks, and what stands in for them
PARTS = {
    "generation": {"generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n"},
    "exporters": {
        "exporters/test_export.py": "class ExportTesterMixin:\n    pass\nclass ExportGenerateTesterMixin:\n    pass\n"
    },
    "utils": {
        "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
        "utils/tiny_model_summary.json": "{}\n",
    },
    "pipelines": {},
    "fixtures": {"fixtures/sample_text.txt": "A text that stands in for a missing one.\n\nIt has a few lines.\n"},
}
# what the release's tests import, besides the packages of the extra `dev`
REQUIREMENTS = ("parameterized", "httpx")
# class in `models.py` -> column of the report
CONFIGURATIONS = {
    "TestPlain": "plain",
    "TestClusters": "clusters",
    "TestZeros": "zeros",
    "TestGPT2": "GPT-2",
    "TestTokenizer": "tokenizer",
    "TestGPT2Tokenizer": "GPT-2's tokenizer",
}
CONTROLS = {
    "plain": "GPT-2",
    "clusters": "GPT-2",
    "zeros": "GPT-2",
    "tokenizer": "GPT-2's tokenizer",
}
MARKERS = "markers =\n    flash_attn_test\n    flash_attn_3_test\n    flash_attn_4_test\n    all_flash_attn_test\n"
PYTEST_SETTINGS = "[pytest]\naddopts = --import-mode=importlib\nfilterwarnings = default\n"


class Sources(NamedTuple):
    """The unpacked tests: where they lie, of which release, and what there is no original of."""

    folder: Path
    release: str
    missing: tuple[str, ...]
    checkout_release: str | None


class Result(NamedTuple):
    """One test of one class; `message` is the reason of a skip or the last line of an error."""

    configuration: str
    test: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


class Verdict(NamedTuple):
    """Failures by what explains them, and what explains nothing."""

    explained: list[tuple[Result, Reason]]
    as_control: list[Result]
    unexplained: list[Result]
    unused: list[Reason]


# --- sources


def fetch_distribution(release: str, cache: Path) -> Path:
    """The source distribution of a release, downloaded by pip unless the cache has it."""
    archive = cache / f"transformers-{release}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "--dest", cache, f"transformers=={release}"], check=True)
    return archive


def checkout_version(source: Path) -> str:
    """The version that a checkout of transformers says it is."""
    text = (source / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"`TRANSFORMERS_SOURCE` must be a checkout of transformers, but {source} has no version.")
    return found[1]


def prepare_sources(cache: Path, source: Path | None, other_release: bool) -> Sources:
    """Unpack the release's tests as a package `tests`, with what the checkout adds and stubs for the rest.

    Raises:
        ValueError: if the checkout is not of the installed release, unless `other_release` is set.
    """
    import transformers

    release = version("transformers")
    archive = fetch_distribution(release, cache)
    folder = cache / f"transformers-{release}"
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(archive) as packed:
        inside = [member for member in packed.getmembers() if member.name.split("/")[1:2] == ["tests"]]
        packed.extractall(cache, members=inside, filter="data")
    tests = folder / "tests"
    checkout_release = None
    if source is not None:
        checkout_release = checkout_version(source)
        if checkout_release != release and not other_release:
            raise ValueError(
                f"`TRANSFORMERS_SOURCE` must be a checkout at the tag of the installed release, v{release}, but "
                f"{source} is {checkout_release}. `--other-release` runs it all the same, and the report says so."
            )
    missing = []
    for part, stubs in PARTS.items():
        if source is not None and (source / "tests" / part).is_dir():
            shutil.copytree(source / "tests" / part, tests / part, dirs_exist_ok=True)
            if part == "utils":  # the configuration tests import a module of the folder utils beside tests
                shutil.copytree(source / "utils" / "test_module", folder / "utils" / "test_module")
        else:
            missing.append(part)
        for name, text in stubs.items():
            if not (tests / name).exists():
                (tests / name).parent.mkdir(exist_ok=True)
                (tests / name).write_text(text, encoding="utf-8")
        if (tests / part).is_dir():
            (tests / part / "__init__.py").touch()
    (tests / "__init__.py").touch()
    # the pipeline mixin reads class names out of the package's own folder
    (folder / "src").mkdir()
    (folder / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    return Sources(folder, release, tuple(missing), checkout_release)


# --- running


class Recorder:
    """A plugin of pytest that keeps one result for each test; a test with a failed subtest has failed."""

    RANK = ("passed", "skipped", "failed")

    def __init__(self, log: Path) -> None:
        self.log = log
        self.log.write_text("", encoding="utf-8")
        self.results: dict[tuple[str, str], Result] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        names = report.nodeid.split("::")
        key = CONFIGURATIONS[names[1]], names[2]
        before = self.results.get(key, Result(*key, "passed"))
        outcome, message = report.outcome, ""
        is_subtest = type(report).__name__ == "SubtestReport"
        if outcome == "skipped":
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            message = message.removeprefix("Skipped: ")
            # a subtest that is skipped leaves the others
            outcome = "passed" if is_subtest else "skipped"
        elif outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            # that subtests failed says less than what failed in the first of them
            if before.outcome == "failed":
                message = before.message
        if self.RANK.index(outcome) < self.RANK.index(before.outcome):
            outcome, message = before.outcome, before.message
        seconds = before.seconds + report.duration
        self.results[key] = result = Result(*key, outcome, message or before.message, seconds)
        # a run that is stopped leaves what it found
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(result._asdict()) + "\n")


def run_tests(sources: Sources, cache: Path, options: argparse.Namespace) -> list[Result]:
    """Run `models.py` with the unpacked tests; the log of pytest is kept in the cache."""
    import pytest

    settings = sources.folder / "pytest.ini"
    settings.write_text(PYTEST_SETTINGS + MARKERS, encoding="utf-8")
    tiny_models = cache / "tiny_models"
    shutil.rmtree(tiny_models, ignore_errors=True)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(sources.folder), str(HERE)]),
        "CONFORMANCE_TINY_MODELS": str(tiny_models),
        "TRANSFORMERS_TINY_MODEL_PATH": str(tiny_models),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RUN_SLOW": str(int(options.slow)),
    }
    os.environ.update(environment)
    sys.path[:0] = [str(sources.folder), str(HERE)]
    from tiny import write_tiny_models

    write_tiny_models(tiny_models)
    recorder = Recorder(cache / "results.jsonl")
    arguments = [str(HERE / "models.py"), f"--rootdir={sources.folder}", "-c", str(settings), "--noconftest", "-q"]
    arguments += [
        "-p",
        "no:cacheprovider",
        "-n",
        str(options.processes),
        "--tb=short",
        "--disable-warnings",
        "--durations=25",
    ]
    if options.select:
        arguments += ["-k", options.select]
    pytest.main(arguments, plugins=[recorder])
    return sorted(recorder.results.values())


# --- judging


def judge(results: Sequence[Result], reasons: Sequence[Reason], missing: Sequence[str]) -> Verdict:
    """Match failures with the table. Where the control fails with the same kind of error, the reason is its own.

    A row for a part that is missing may match nothing.
    """
    failed = [result for result in results if result.outcome == "failed"]
    kinds = {(result.configuration, result.test): error_kind(result.message) for result in failed}
    explained, as_control, unexplained = [], [], []
    used = set()
    for result in failed:
        row = next((row for row in reasons if explains(row, result)), None)
        control = CONTROLS.get(result.configuration)
        if row is not None:
            used.add(row)
            explained.append((result, row))
        elif control is None or kinds.get((control, result.test)) == error_kind(result.message):
            as_control.append(result)
        else:
            unexplained.append(result)
    unused = [row for row in reasons if row not in used and row.part not in missing]
    return Verdict(explained, as_control, unexplained, unused)


def explains(row: Reason, result: Result) -> bool:
    """Whether a row of the table is about this failure."""
    return (
        fnmatch.fnmatchcase(result.configuration, row.configurations)
        and fnmatch.fnmatchcase(result.test, row.test)
        and row.message in result.message
    )


def error_kind(message: str) -> str:
    """The class of an error out of its message."""
    return message.split(":", 1)[0].strip()


# --- report


def cell(text: str, longest: int = 300) -> str:
    """A text as one cell of a Markdown table, without what differs from machine to machine."""
    text = re.sub(r"\S*/(?=[\w.-]+/)", "", " ".join(text.split()))
    text = re.sub(r"0x[0-9a-f]+", "0x…", text)
    return (text if len(text) <= longest else text[: longest - 1] + "…").replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def grouped(pairs: Sequence[tuple[Any, Result]]) -> list[tuple[Any, str, str]]:
    """Results by what they have in common: it, their tests and their configurations."""
    groups: dict[Any, list[Result]] = defaultdict(list)
    for key, result in pairs:
        groups[key].append(result)
    order = list(CONFIGURATIONS.values())
    lines = []
    for key, members in groups.items():
        tests = ", ".join(f"`{name}`" for name in sorted({member.test for member in members}))
        lines.append((key, tests, ", ".join(sorted({member.configuration for member in members}, key=order.index))))
    return sorted(lines, key=lambda line: line[1:])


def write_report(results: Sequence[Result], verdict: Verdict, sources: Sources, adaptions: Sequence[Adaption]) -> str:
    """The text of `docs/conformance.md`."""
    lines = [
        "# The library's own tests on our classes",
        "",
        f"`make conformance` runs the test mixins of the installed release of transformers ({sources.release}) on our "
        "model classes in three",
        'configurations (a plain softmax; clusters with `div_val=2`; `memory_init="zeros"` with `same_length=True`) '
        "and on our",
        "tokenizer, with GPT-2 through the same harness as control. It writes this page; what fails without a row in",
        "`tests/conformance/reasons.py`, and a row without a failure, make it end with an error.",
        "",
        "The tests are fetched from the release's source distribution; nothing of them is kept here.",
        "",
    ]
    if sources.missing:
        names = ", ".join(f"`tests/{part}`" for part in sources.missing)
        lines += [
            f"**Not run:** the source distribution lacks {names}. `TRANSFORMERS_SOURCE=FOLDER make conformance` takes "
            "them from a",
            "checkout of the release's tag.",
            "",
        ]
    if sources.checkout_release not in (None, sources.release):
        lines += [
            f"**Of another release:** what the source distribution lacks came from a checkout of "
            f"{sources.checkout_release}. Where those tests",
            "ask for something that the release does otherwise, GPT-2 fails them too.",
            "",
        ]
    lines += ["## Counts", ""]
    known = {(result.configuration, result.test) for result, _ in verdict.explained}
    as_control = {(result.configuration, result.test) for result in verdict.as_control}
    rows = []
    for configuration in CONFIGURATIONS.values():
        own = [result for result in results if result.configuration == configuration]
        failed = [(result.configuration, result.test) for result in own if result.outcome == "failed"]
        counts = [sum(result.outcome == outcome for result in own) for outcome in ("passed", "skipped")]
        control = sum(key in as_control for key in failed)
        with_reason = sum(key in known for key in failed)
        rows.append((configuration, *counts, with_reason, control, len(failed) - with_reason - control))
    lines += table(
        ("", "passed", "skipped by the suite", "failed, with a reason", "failed as the control", "failed"), rows
    )
    if verdict.unexplained:
        lines += ["## Failures without a reason", ""]
        pairs = [(cell(result.message), result) for result in verdict.unexplained]
        lines += table(("error", "tests", "configurations"), grouped(pairs))
    lines += ["## Failures and their reasons", ""]
    lines += table(
        ("reason", "tests", "configurations"), grouped([(row.reason, result) for result, row in verdict.explained])
    )
    lines += ["## Failures of the control too", "", "The reason is in the suite or on the machine that ran it.", ""]
    pairs = [(cell(result.message), result) for result in verdict.as_control]
    lines += table(("error", "tests", "configurations"), grouped(pairs))
    lines += ["## Adaptions", "", "What `tests/conformance/models.py` changes in the suite.", ""]
    lines += table(("of", "change", "reason"), [(f"`{row.name}`", row.change, row.reason) for row in adaptions])
    lines += ["## Skips", "", "The suite's own words for what it leaves out.", ""]
    pairs = [(cell(result.message), result) for result in results if result.outcome == "skipped"]
    lines += table(("reason", "tests", "configurations"), grouped(pairs))
    return "\n".join(lines)


def main() -> int:
    missing = [name for name in REQUIREMENTS if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} must be installed: `pip install '.[dev,conformance]'`.")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", help="expression of `pytest -k`; no report is written")
    parser.add_argument("--slow", action="store_true", help="with the tests that the release marks slow (exports)")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 4))
    parser.add_argument("--other-release", action="store_true", help="take a checkout of another release")
    options = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    source = os.environ.get("TRANSFORMERS_SOURCE")
    try:
        sources = prepare_sources(CACHE, Path(source).resolve() if source else None, options.other_release)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for part in sources.missing:
        print(f"Missing: tests/{part} of transformers {sources.release}; name a checkout as TRANSFORMERS_SOURCE.")
    start = time.monotonic()
    results = run_tests(sources, CACHE, options)
    verdict = judge(results, REASONS, sources.missing)
    print(f"{len(results)} tests in {time.monotonic() - start:.0f} s.")
    for result in verdict.unexplained:
        print(f"FAILED without a reason: {result.configuration}: {result.test}: {result.message[:300]}")
    if options.select:
        return int(bool(verdict.unexplained))
    for row in verdict.unused:
        print(f"ROW without a failure: {row.configurations}: {row.test}: {row.reason}")
    REPORT.write_text(write_report(results, verdict, sources, ADAPTIONS), encoding="utf-8")
    return int(bool(verdict.unexplained or verdict.unused or not results))


if __name__ == "__main__":
    sys.exit(main())

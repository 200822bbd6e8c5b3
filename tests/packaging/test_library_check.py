"""The self-check under a release of transformers that was not tested: each known silent failure becomes an error."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin

import hf_txl
from hf_txl import TransfoXLForCausalLM, library_check_transfo_xl
from hf_txl.library_check_transfo_xl import AT_IMPORT, BEFORE_LOADING, TESTED, check_library, is_tested
from hf_txl.modeling_transfo_xl import TransfoXLPreTrainedModel

ROOT = Path(hf_txl.__file__).parents[1]


@pytest.fixture(autouse=True)
def unknown_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_check_transfo_xl.transformers, "__version__", "7.1.0")
    monkeypatch.setattr(library_check_transfo_xl, "passed", set())


def test_the_tested_releases_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    floor = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    newest = re.search(r"^transformers==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert str(TESTED[0]) == floor
    assert newest.startswith(f"{TESTED[1]}.")
    for version in ("5.18.0", "5.20.1", newest, f"{TESTED[1]}.9", "5.24.0.dev0"):
        assert is_tested(version)
    for version in ("5.17.9", f"{TESTED[1].major}.{TESTED[1].minor + 1}.0", "6.0.0", "4.57.6", "5.25.0.dev0"):
        assert not is_tested(version)
    monkeypatch.undo()
    assert is_tested(transformers.__version__)


def test_nothing_is_reported_where_all_is_well() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_library(TransfoXLForCausalLM, AT_IMPORT)
        check_library(TransfoXLForCausalLM, BEFORE_LOADING)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    # the caller's random numbers are as before
    assert torch.equal(torch.rand(3), expected)


def drop_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 5.24 for a `forward` that knew `past_key_values` alone: the name under which the cache comes is another."""
    original = TransfoXLForCausalLM.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("cache", "past_key_values"):
            kwargs.pop(name, None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TransfoXLForCausalLM, "forward", forward)


def drop_cache_in_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GenerationMixin.prepare_inputs_for_generation

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = original(self, *args, **kwargs)
        return {name: value for name, value in inputs.items() if name not in ("cache", "past_key_values")}

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare)


def rename_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_check_transfo_xl, "CACHE_NAME", "state")


def drop_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    original = GenerationMixin.prepare_inputs_for_generation

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return {**original(self, *args, **kwargs), "attention_mask": None}

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare)


def initialise_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 5.0 for modules without the mark of the loader."""
    original = TransfoXLPreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        with torch.no_grad():
            model.transformer.layers[0].dec_attn.o_net.weight.normal_()
        return model

    monkeypatch.setattr(TransfoXLPreTrainedModel, "from_pretrained", classmethod(from_pretrained))


def leave_a_buffer_uninitialised(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransfoXLPreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        # what no checkpoint holds
        model.transformer.layers[0].dec_attn.scaling = 1e30
        return model

    monkeypatch.setattr(TransfoXLPreTrainedModel, "from_pretrained", classmethod(from_pretrained))


@pytest.mark.parametrize(
    ("failure", "checks", "message"),
    [
        (drop_cache, AT_IMPORT, "`generate` does not deliver the memory"),
        (drop_cache_in_generation, AT_IMPORT, "`generate` does not deliver the memory"),
        (rename_output, AT_IMPORT, "a model's output does not hold its cache"),
        (drop_mask, AT_IMPORT, "`generate` does not deliver `attention_mask`"),
        (initialise_again, BEFORE_LOADING, "`from_pretrained` changes the weights"),
        (leave_a_buffer_uninitialised, BEFORE_LOADING, "a loaded model gives other numbers"),
    ],
)
def test_a_silent_failure_becomes_one_error(
    failure: Any, checks: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C66, C96, C97"""
    failure(monkeypatch)
    for _ in range(2):
        # the second try raises as well
        with pytest.raises(ImportError, match=rf"\(5.18 to 5.24 are tested\), but is 7.1.0: .*{re.escape(message)}"):
            check_library(TransfoXLForCausalLM, checks)
    # a tested release is not looked at
    monkeypatch.setattr(library_check_transfo_xl.transformers, "__version__", "5.24.0")
    check_library(TransfoXLForCausalLM, checks)


IMPORT = """
import sys, time
import packaging.version

class Version(packaging.version.Version):
    # the installed release lies beyond the tested ones
    def __init__(self, version):
        super().__init__({"5.18": "1.0", "5.24": "1.1"}.get(version, version))

packaging.version.Version = Version
from hf_txl import library_check_transfo_xl as library_check
from hf_txl import TransfoXLForCausalLM
assert set(library_check.AT_IMPORT) == library_check.passed
library_check.passed.clear()
seconds = []
for _ in range(5):
    started = time.perf_counter()
    library_check.check_library(TransfoXLForCausalLM, library_check.AT_IMPORT)
    seconds.append(time.perf_counter() - started)
    library_check.passed.clear()
print("milliseconds", 1000 * min(seconds))
"""


def test_the_check_runs_at_import_in_less_than_50_milliseconds() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.rpartition("milliseconds ")[2]) < 50


def test_the_check_of_loading_runs_once_before_the_first_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(library_check_transfo_xl, "BEFORE_LOADING", (lambda model: calls.append(model),), raising=True)
    monkeypatch.setattr(
        "hf_txl.modeling_transfo_xl.BEFORE_LOADING", library_check_transfo_xl.BEFORE_LOADING, raising=True
    )
    with library_check_transfo_xl.small_model(TransfoXLForCausalLM) as model:
        model.save_pretrained(tmp_path)
    for _ in range(2):
        TransfoXLForCausalLM.from_pretrained(tmp_path)
    assert len(calls) == 1

"""Several processes train what one process trains; a run that is killed and resumed ends as if nothing had been."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl.scoring import evaluate_stream
from hf_txl.training import last_checkpoint
from tests.helpers import assert_close
from tests.model.tiny_models import tiny_model
from tests.sizes import full
from tests.training.jobs import Job, memory_of, random_seconds, run, weights_of

pytest.importorskip("accelerate")
pytest.importorskip("datasets")

# the figure, in single precision and for gradients that are added in another order
EQUAL = {"atol": 1e-6}

# trained once for all tests
pytestmark = pytest.mark.xdist_group("processes")


def variants(folder: Path, per_device: int) -> dict[str, Job]:
    """Parts per step x checkpointing; 307 tokens in 4 rows: the last segment of a pass holds 5 tokens, not 7."""
    jobs = {}
    for parts, checkpointing in product((1, 4), (False, True)):
        name = f"{parts} parts{', checkpointing' if checkpointing else ''}"
        settings: dict[str, Any] = {
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": parts,
            "gradient_checkpointing": checkpointing,
        }
        jobs[name] = Job(str(folder / name), settings)
    apart = {"per_device_train_batch_size": per_device, "layout": "documents", "max_steps": 30}
    jobs["documents"] = Job(str(folder / "documents"), apart, documents=True)
    # below the first cutoff: nothing of the tail takes part
    frequent = {"per_device_train_batch_size": per_device, "gradient_checkpointing": True, "max_steps": 3}
    jobs["frequent words only"] = Job(str(folder / "frequent"), frequent, vocab_size=11)
    return jobs


@pytest.fixture(scope="module")
def one_and_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Job], dict[str, Job]]:
    folder = tmp_path_factory.mktemp("processes")
    one, two = variants(folder / "one", 4), variants(folder / "two", 2)
    assert run(list(one.values()), 1)
    assert run(list(two.values()), 2)
    return one, two


@pytest.mark.full
@pytest.mark.parametrize("name", variants(Path(), 1))
def test_two_processes_equal_one(name: str, one_and_two: tuple[dict[str, Job], dict[str, Job]]) -> None:
    one, two = (jobs[name] for jobs in one_and_two)
    expected = weights_of(one)
    for key, weight in weights_of(two).items():
        assert_close(key, weight, expected[key], **EQUAL)


@pytest.mark.full
@pytest.mark.parametrize("name", variants(Path(), 1))
def test_each_process_remembers_its_own_rows(name: str, one_and_two: tuple[dict[str, Job], dict[str, Job]]) -> None:
    """A memory is never synchronised: together they are that of one process, row by row."""
    one, two = (jobs[name] for jobs in one_and_two)
    expected = memory_of(one, 0)
    parts = [memory_of(two, rank) for rank in range(2)]
    for key, tensor in expected.items():
        assert_close(key, torch.cat([part[key] for part in parts]).float(), tensor.float(), atol=1e-5)
    first, second = (part["layers.0.hidden_states"] for part in parts)
    assert not torch.equal(first, second)


@pytest.mark.full
def test_processes_that_share_the_weights_out_equal_one(
    one_and_two: tuple[dict[str, Job], dict[str, Job]], tmp_path: Path
) -> None:
    """FSDP2; evaluation too, which calls the model that is shared out."""
    expected = weights_of(one_and_two[0]["1 parts"])
    job = Job(str(tmp_path), {"per_device_train_batch_size": 2, "max_steps": 20}, sharded=True)
    assert run([job], 2)
    weights = weights_of(job)
    loss = weights.pop("loss").item()
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        assert_close(key, weight, expected[key], **EQUAL)
    model = tiny_model().eval()
    model.load_state_dict(weights, strict=False)
    assert evaluate_stream(model, job.text()[:100], segment_length=7, batch_size=2).loss == pytest.approx(
        loss, abs=1e-6
    )


def resumable(folder: Path, documents: bool, num_processes: int) -> Job:
    settings = {
        "per_device_train_batch_size": 4 // num_processes,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "layout": "documents" if documents else "stream",
    }
    return Job(str(folder), settings, model={"dropout": 0.2, "dropatt": 0.1}, documents=documents)


def assert_bit_equal(job: Job, expected: Job) -> None:
    theirs = weights_of(expected)
    for key, weight in weights_of(job).items():
        assert torch.equal(weight, theirs[key]), key


# before the first checkpoint, while files of a checkpoint are written, in the middle, at the last step
MOMENTS = [
    ("step", 0),
    ("step", 2),
    ("step", 7),
    ("write", 2),
    ("write", 5),
    ("write", 8),
    ("write", 11),
    ("step", 19),
]


@pytest.mark.parametrize(
    ("documents", "num_processes", "moments"),
    [
        pytest.param(False, 1, [("write", 8)], id="text-1-once"),
        full(False, 1, MOMENTS, id="text-1"),
        full(False, 2, MOMENTS, id="text-2"),
        full(True, 1, MOMENTS, id="streamed documents-1"),
        full(True, 2, MOMENTS, id="streamed documents-2"),
    ],
)
def test_a_run_that_is_killed_ends_with_the_same_weights(
    documents: bool, num_processes: int, moments: list[tuple[str, int]], tmp_path: Path
) -> None:
    """C111: bit-equal, dropout included, wherever it is killed; it goes on from the last whole checkpoint."""
    whole = resumable(tmp_path / "whole", documents, num_processes)
    assert run([whole], num_processes)
    job = resumable(tmp_path / "killed", documents, num_processes)
    for moment in moments:
        assert not run([replace(job, kill_at=moment)], num_processes)
    assert last_checkpoint(job.folder) is not None
    assert run([job], num_processes)
    assert_bit_equal(job, whole)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("documents", [False, True], ids=["text", "streamed documents"])
def test_a_run_that_is_killed_twenty_times_at_random(documents: bool, num_processes: int, tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole", documents, num_processes)
    started = time.monotonic()
    assert run([whole], num_processes)
    longest = time.monotonic() - started
    job = resumable(tmp_path / "killed", documents, num_processes)
    killed = seed = 0
    while killed < 20:
        seed += 1
        if run([job], num_processes, killed_after=random_seconds(longest, seed)):
            # it came to its end before: once more from the start
            assert_bit_equal(job, whole)
            job = replace(job, folder=str(tmp_path / f"killed-{seed}"))
        else:
            killed += 1
    assert run([job], num_processes)
    assert_bit_equal(job, whole)

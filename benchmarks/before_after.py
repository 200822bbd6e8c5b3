"""Speed of this checkout beside another one of the same project, such as the commit before a change.

Each checkout runs its own `contestants.py` and `training_contestants.py` in its own environment; the two answer in
turn, and every second round in the other order. Figures are the other checkout's seconds over this one's: above 1 this
one is faster. They are medians of the ratios of each round, with the quartiles beside them.

Run with `python benchmarks/before_after.py OTHER_CHECKOUT`, where OTHER_CHECKOUT has its environment in `.venv`: 15 to
20 minutes on two idle cores. Nothing is written; `--only NAME` selects by the beginning of a figure's name.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Contestant
from tqdm.auto import tqdm

HERE = Path(__file__).resolve().parent
ATTENTION = (
    "import json, run; print(json.dumps([case['milliseconds']['ours'] for case in run.measure_attention('cpu', 5)]))"
)
SEGMENTS = ["evaluate", "rescore", "first_token"]


class Checkouts:
    """The same contestant of both checkouts."""

    def __init__(self, other: Path, script: str, *arguments: str, threads: int):
        pythons = {HERE: sys.executable, other / "benchmarks": str(other / ".venv" / "bin" / "python")}
        self.members = [
            Contestant([python, str(folder / script), "ours", *arguments], OMP_NUM_THREADS=str(threads))
            for folder, python in pythons.items()
        ]

    def ask(self, task: str, **arguments: Any) -> None:
        for member in self.members:
            member.ask(task, **arguments)

    def ratios(self, task: str, rounds: int, seconds: Callable[[Any], float] = float, **arguments: Any) -> list[float]:
        """Seconds of the other checkout over those of this one, per round; a first round does not count."""
        ratios = []
        for number in tqdm(range(rounds + 1), desc=task, leave=False):
            order = self.members[:: -1 if number % 2 else 1]
            answers = {id(member): seconds(member.ask(task, **arguments)) for member in order}
            here, there = (answers[id(member)] for member in self.members)
            if number:
                ratios.append(there / here)
        return ratios

    def close(self) -> None:
        for member in self.members:
            member.close()


def models(other: Path, rounds: int, only: str) -> dict[str, list[float]]:
    """What `run.py` measures of models, on one thread."""
    report: dict[str, list[float]] = {}
    pair = Checkouts(other, "contestants.py", "cpu", "1", threads=1)
    for shape in ("wt103-base", "wt103-large"):
        if not shape.startswith(only):
            continue
        pair.ask("load", shape=shape)
        for batch_size in (1, 8):
            pair.ask("fill", batch_size=batch_size)
            report[f"{shape}, decode, batch {batch_size}"] = pair.ratios("decode", rounds, num_tokens=16)
        pair.ask("fill", batch_size=1)
        for task in SEGMENTS:
            report[f"{shape}, {task}"] = pair.ratios(task, rounds)
    if "long text".startswith(only):
        pair.ask("load", shape="small")
        pair.ask("fill", batch_size=1)
        pair.ask("go_on", num_tokens=5000)
        report["long text, decode"] = pair.ratios("decode", 2 * rounds, num_tokens=64)
    pair.close()
    return report


def training(other: Path, rounds: int) -> dict[str, list[float]]:
    """A training step of wt103-base, L = M = 150, batch 4, in float32."""
    threads = os.cpu_count() or 1
    pair = Checkouts(other, "training_contestants.py", str(threads), threads=threads)
    pair.ask("load", shape="wt103-base", batch_size=4)
    for _ in range(4):
        pair.ask("step")
    report = {"training, step": pair.ratios("step", rounds, lambda answer: answer["step"])}
    report["training, forward and backward"] = pair.ratios("step", rounds, lambda answer: answer["passes"])
    pair.close()
    return report


def attention(other: Path, rounds: int) -> dict[str, list[float]]:
    """Attention alone in the three shapes of `run.py`."""
    times: dict[Path, list[list[float]]] = {HERE: [], other / "benchmarks": []}
    pythons = {HERE: sys.executable, other / "benchmarks": str(other / ".venv" / "bin" / "python")}
    for number in tqdm(range(rounds), desc="attention", leave=False):
        for folder in list(times)[:: -1 if number % 2 else 1]:
            answer = subprocess.run(
                [pythons[folder], "-c", ATTENTION],
                cwd=folder, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            times[folder].append(json.loads(answer.stdout.splitlines()[-1]))
    here, there = times.values()
    return {
        f"attention alone, shape {index}": [old[index] / new[index] for old, new in zip(there, here, strict=True)]
        for index in range(len(here[0]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="checkout with an environment in .venv")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="", help="beginning of a figure's name")
    options = parser.parse_args()
    other = options.other.resolve()
    print(f"load average {os.getloadavg()[0]:.2f}", flush=True)
    report: dict[str, list[float]] = {}
    if "attention".startswith(options.only):
        report |= attention(other, options.rounds)
    report |= models(other, options.rounds, options.only)
    if "training".startswith(options.only):
        report |= training(other, options.rounds)
    for name, ratios in report.items():
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{name:36} {middle:.3f}  ({low:.3f} to {high:.3f})")
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()

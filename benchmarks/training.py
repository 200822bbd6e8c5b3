"""Speed and memory of a training step, beside the last release that had the model and beside the paper's own code.

Each model runs in a process of its own and does one thing at a time when asked (`training_contestants.py`), so that
all are measured in turn and what disturbs one disturbs all. Read the ratios: they are medians of the ratios of each
round.

- wt103-base, L = M = 150, batch 4: tokens per second of a whole step (forward, backward, clipping, Adam), in float32
  and under bfloat16 autocast, ours also compiled;
- enwik8-base, L = M = 512, batch 4: memory of forward and backward above weights, gradients and the memory;
- the loss alone, 600 tokens and 267,735 words: memory above weights and gradients.

Run with `python benchmarks/training.py --legacy-python .venv-legacy/bin/python` after `benchmarks/peers.sh`, and with
`--original FOLDER` where a checkout of github.com/kimiyoung/transformer-xl is at hand; 15 to 20 minutes on two cores.
It writes `training.json` and `training.md` to `docs/results`.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from harness import Contestant, write_results
from tqdm.auto import tqdm

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
SPEED, MEMORY = ("wt103-base", 4), ("enwik8-base", 4)
LOSS_TOKENS = 600
LEGACY = "legacy, float32"


def start(name: str, pythons: dict[str, str], threads: int, original: Path | None, **environment: str) -> Contestant:
    command = [pythons[name], str(HERE / "training_contestants.py"), name.split(",")[0], str(threads)]
    if name == "original":
        command.append(str(original))
    return Contestant(command, OMP_NUM_THREADS=str(threads), **environment)


def speeds(pythons: dict[str, str], threads: int, original: Path | None, rounds: int) -> dict[str, Any]:
    """Tokens per second of each way to train, and how many times that of legacy float32 in the same rounds it is."""
    exact = {f"{name}, float32": (name, {}) for name in pythons}
    exact["ours, float32, compiled"] = ("ours", {"compiled": True})
    half: dict[str, tuple[str, dict[str, Any]]] = {"ours, bfloat16": ("ours", {"bf16": True})}
    half["ours, bfloat16, compiled"] = ("ours", {"bf16": True, "compiled": True})
    if "legacy" in pythons:
        half = {LEGACY: ("legacy", {}), **half, "legacy, bfloat16": ("legacy", {"bf16": True})}
    # two groups, since each way holds a model of its own with its optimizer
    report = speeds_of(exact, pythons, threads, original, rounds)
    return report | {
        way: values for way, values in speeds_of(half, pythons, threads, original, rounds).items() if way != LEGACY
    }


def speeds_of(
    ways: dict[str, tuple[str, dict[str, Any]]],
    pythons: dict[str, str],
    threads: int,
    original: Path | None,
    rounds: int,
) -> dict[str, Any]:
    """The same of some ways, in turn."""
    shape, batch_size = SPEED
    members = {}
    for way, (name, options) in ways.items():
        members[way] = start(name, pythons, threads, original)
        members[way].ask("load", shape=shape, batch_size=batch_size, **options)
        # until the memory is full and every shape is compiled
        for _ in range(4):
            members[way].ask("step")
    seconds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in tqdm(range(rounds), desc="training steps"):
        for way, member in members.items():
            seconds[way].append(member.ask("step"))
    for member in members.values():
        member.close()
    tokens = batch_size * 150
    report: dict[str, Any] = {}
    for way, times in seconds.items():
        report[way] = {
            "tokens_per_second": tokens / statistics.median(time["step"] for time in times),
            "passes_tokens_per_second": tokens / statistics.median(time["passes"] for time in times),
        }
        if LEGACY in seconds:
            pairs = list(zip(seconds[LEGACY], times, strict=True))
            for key in ("step", "passes"):
                report[way][f"{key}, times {LEGACY}"] = statistics.median(
                    legacy[key] / ours[key] for legacy, ours in pairs
                )
    return report


def memories(pythons: dict[str, str], threads: int, original: Path | None) -> dict[str, Any]:
    """Bytes of a step and of the loss alone, each model by itself."""
    report: dict[str, Any] = {}
    for name in tqdm(pythons, desc="memory"):
        # what is freed goes back to the system at once, so that the peak is what is in use
        member = start(
            name, pythons, threads, original, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536"
        )
        member.ask("load", shape=MEMORY[0], batch_size=MEMORY[1])
        report[name] = {"step_bytes": member.ask("memory_of_step")}
        member.ask("load", shape="wt103-base", batch_size=1)
        report[name]["loss_bytes"] = member.ask("memory_of_loss", num_tokens=LOSS_TOKENS)
        member.close()
    if "legacy" in report:
        for values in report.values():
            for key in ("step", "loss"):
                values[f"{key}, times legacy"] = values[f"{key}_bytes"] / report["legacy"][f"{key}_bytes"]
    return report


def table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"Random weights, {machine['threads']} threads of {machine['processor']}, load average "
        f"{results['load'][0]:.1f} to {results['load'][1]:.1f};",
        f"torch {results['versions']['torch']}, transformers {results['versions']['transformers']}; legacy: "
        f"transformers 4.57.6; {results['date']}.",
        "",
        "wt103-base, L = M = 150, batch 4:",
        "",
        "| | tokens per second | times legacy float32 | forward and backward alone |",
        "|---|---|---|---|",
    ]
    for way, values in results["speed"].items():
        ratios = [values.get(f"{key}, times {LEGACY}") for key in ("step", "passes")]
        cells = ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        lines.append(f"| {way} | {values['tokens_per_second']:.0f} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        "Memory above weights and gradients: a training step of enwik8-base, L = M = 512, batch 4;",
        f"the loss of {LOSS_TOKENS} tokens over 267,735 words.",
        "",
        "| | step, MiB | times legacy | loss, MiB | times legacy |",
        "|---|---|---|---|---|",
    ]
    for name, values in results["memory"].items():
        cells = []
        for key in ("step", "loss"):
            ratio = values.get(f"{key}, times legacy")
            cells += [f"{values[f'{key}_bytes'] / 2**20:.0f}", "" if ratio is None else f"{ratio:.2f}x"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--legacy-python", type=Path, help="interpreter that has transformers 4.57.6")
    parser.add_argument("--original", type=Path, help="checkout of the paper's code")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pythons = {"ours": sys.executable}
    if options.legacy_python is not None:
        pythons["legacy"] = str(options.legacy_python)
    if options.original is not None:
        pythons["original"] = sys.executable
    load = os.getloadavg()[0]
    speed = speeds(pythons, options.threads, options.original, options.rounds)
    memory = memories(pythons, options.threads, options.original)
    results = {"load": [load, os.getloadavg()[0]], "speed": speed, "memory": memory}
    path = write_results(str(RESULTS / "training"), results)
    text = table(json.loads(path.read_text(encoding="utf-8")))
    path.with_suffix(".md").write_text(f"# A training step\n\n{text}", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

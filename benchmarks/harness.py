"""Side-by-side measurement: all contestants in one process, in turn, so that what disturbs one disturbs all.

Results are ratios of medians. They are written, with the machine and the versions, to a JSON file beside the script.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm


def measure(contestants: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each contestant over `rounds` rounds, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in tqdm(range(rounds + 1), desc=" / ".join(contestants), leave=False):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def write_results(script: str, results: dict[str, Any]) -> Path:
    """Write results beside the script, complete or not at all, and print them."""
    report = {
        "date": date.today().isoformat(),
        "machine": {"processor": processor_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **results,
    }
    path = Path(script).with_suffix(".json")
    beside = path.with_suffix(".json.tmp")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    print(json.dumps(report, indent=1))
    return path


def processor_name() -> str:
    """Model name of the processor where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())

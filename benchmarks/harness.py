"""Side-by-side measurement: all contestants in one process, in turn, so that what disturbs one disturbs all.

Results are ratios of medians. They are written, with the machine and the versions, to a JSON file beside the script.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm

# what a line that answers a task begins with; libraries print lines of their own
ANSWER = "answer "


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


def process_bytes(field: str) -> int:
    """A size that Linux tells of this process, such as `VmHWM` or `RssAnon`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_memory(restart: bool = False) -> int:
    """Largest resident memory of this process in bytes, since its start or since the last `restart` (Linux)."""
    if restart and os.path.exists("/proc/self/clear_refs"):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    # `ru_maxrss` outlives fork and exec, so that a child starts with its parent's; the status file does not
    if os.path.exists("/proc/self/status"):
        return process_bytes("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Contestant:
    """A process that does one thing at a time when asked, in its own environment, so that peers can be run in turn.

    The process reads one JSON object per line from its standard input and answers each with one on standard output
    (`serve`).

    Args:
        command (`list[str]`): Starts it.
    """

    def __init__(self, command: list[str], **environment: str):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def ask(self, task: str, **arguments: Any) -> Any:
        """Have a task done and return what it returns.

        Raises:
            RuntimeError: if the process has ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"`{task}` was not answered: the process ended with code {self.process.wait()}.")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(tasks: dict[str, Callable[..., Any]]) -> None:
    """The other end of a `Contestant`: do what is asked for until there is nothing more."""
    for line in sys.stdin:
        request = json.loads(line)
        answer = tasks[request.pop("task")](**request)
        print(ANSWER + json.dumps(answer), flush=True)


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

"""Runs of `score_file` that are killed, each in a fork: `python -m tests.scoring.score_jobs FOLDER MEMORY`.

Prints a line for each undisturbed or killed run, and fails if an output differs from that of the undisturbed one.
"""

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_txl.scoring import score_file, score_files

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def finishes(folder: Path, output: Path, memory: str, kill_at: int = 0) -> bool:
    """Score in a fork that kills itself at an event, counted from 1, of the output and its parts."""
    child = os.fork()
    if child == 0:
        kill_at_event(output.name, kill_at)
        # loaded here: a fork must not inherit threads
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        score_file(model, tokenizer, folder / "text.txt", output, memory=memory, batch_size=3)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"exit code {code}")
    return code == 0


def kill_at_event(name: str, number: int) -> None:
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike) and name in os.fspath(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main(folder: Path, memory: str) -> None:
    score_files.BLOCK_LINES, score_files.BLOCK_CHARACTERS = 3, 60
    assert finishes(folder, folder / "whole.tsv", memory)
    expected = (folder / "whole.tsv").read_bytes()

    def check(output: Path) -> None:
        assert output.read_bytes() == expected, output
        output.unlink()
        assert not list(folder.glob(f"{output.name}*"))

    moments = 0
    # once at every moment
    while not finishes(folder, folder / "once.tsv", memory, moments + 1):
        assert finishes(folder, folder / "once.tsv", memory)
        check(folder / "once.tsv")
        moments += 1
    check(folder / "once.tsv")
    # ten times in a row
    draw, killed = random.Random(7), 0
    while killed < 10 and not finishes(folder, folder / "often.tsv", memory, draw.randint(1, 9)):
        killed += 1
    if (folder / "often.tsv.parts").exists() or not (folder / "often.tsv").exists():
        assert finishes(folder, folder / "often.tsv", memory)
    check(folder / "often.tsv")
    print(f"{moments} moments, {killed} in a row")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

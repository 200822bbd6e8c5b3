"""The processes that `torchrun` or `accelerate launch` started, or the only one."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch

Made = TypeVar("Made")
# others may have work left for long
LONGEST_WAIT = timedelta(days=30)


@dataclass(frozen=True)
class Processes:
    """This process among `number`: its `index`, its device, and `wait`, which returns when all have called it."""

    index: int
    number: int
    device: torch.device
    wait: Callable[[], None]

    def first_alone(self, make: Callable[[], Made]) -> Made:
        """What `make` returns, called by the first process before the others."""
        made = make() if self.index == 0 else None
        self.wait()
        return make() if made is None else made


def started_processes() -> Processes:
    """Connects to the others, unless the caller already has. Several processes need accelerate.

    A process that raises ends without waiting; its launcher then ends the others.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), lambda: None)
    from accelerate import PartialState

    # without `cpu`, processes on a CPU would not know each other
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT)
    return Processes(state.process_index, state.num_processes, state.device, state.wait_for_everyone)


__all__ = ["Processes", "started_processes"]

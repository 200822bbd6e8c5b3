"""The processes that `torchrun` or `accelerate launch` started, or the only one."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
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

    def share(self, items: Sequence[Item], work: Callable[[Item], Made]) -> list[Made]:
        """What `work` makes of each item, in order, in every process; each works on its part of the items."""
        made = [work(item) for item in items[self.index :: self.number]]
        if self.number == 1:
            return made
        parts: list[Any] = [None] * self.number
        torch.distributed.all_gather_object(parts, made)
        return [parts[index % self.number][index // self.number] for index in range(len(items))]


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

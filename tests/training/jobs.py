"""Training jobs of several processes that can be killed, for the tests of this folder.

A server process imports the libraries once and each worker is forked from it, so a job starts in a fraction of a
second and shares no state with the tests or with an earlier job.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hf_txl.data import TokenStreams
from hf_txl.scoring import evaluate_stream
from hf_txl.training import TransfoXLTrainer, TransfoXLTrainingArguments, last_checkpoint
from tests.model.tiny_models import random_ids, tiny_model

# a job that takes longer hangs
LIMIT = 240.0


@dataclass(frozen=True)
class Job:
    """What each process trains.

    Args:
        folder (`str`): Output folder; the weights go to `weights.safetensors` in it, each process's memory beside.
        arguments (`dict`): Of the training.
        model (`dict`): Changes of the tiny model.
        num_tokens (`int`): Length of the text.
        vocab_size (`int`): Its ids are below.
        documents (`bool`): Whether it is a streamed data set of documents.
        kill_at (`tuple[str, int]`, *optional*):
            Process 0 kills itself at the begin of this step (`"step"`), or when it opens or moves this file to write
            (`"write"`), counted from 1 and without the code.
        sharded (`bool`): Whether a loop trains it whose processes share the weights out among them (FSDP2).
    """

    folder: str
    arguments: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    num_tokens: int = 307
    vocab_size: int = 41
    documents: bool = False
    kill_at: tuple[str, int] | None = None
    sharded: bool = False

    def text(self) -> torch.Tensor:
        return random_ids(1, self.num_tokens, vocab_size=self.vocab_size)[0]

    def dataset(self) -> Any:
        if not self.documents:
            return self.text()
        from datasets import Dataset

        lengths = [9, 2, 1, 40, 5, 16, 13, 4, 4, 27, 60, 33, 21, 72]
        rows = [row.tolist() for row in self.text().split(lengths)]
        return Dataset.from_dict({"input_ids": rows}).to_iterable_dataset()


def train(job: Job) -> None:
    """Train in this process, from the last whole checkpoint if there is one."""
    args = TransfoXLTrainingArguments(
        **{
            "output_dir": job.folder,
            "segment_length": 7,
            "learning_rate": 3e-3,
            "adam_epsilon": 1e-4,
            "max_steps": 20,
            "save_strategy": "no",
            "logging_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            **job.arguments,
        }
    )
    trainer = TransfoXLTrainer(tiny_model(**job.model), args, train_dataset=job.dataset())
    if job.kill_at is not None and args.process_index == 0:
        kill_at(trainer, *job.kill_at)
    trainer.train(resume_from_checkpoint=last_checkpoint(job.folder))
    folder = Path(job.folder)
    folder.mkdir(exist_ok=True)
    if args.process_index == 0:
        weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        save_file(weights, folder / "weights.safetensors")
    memory = {name: tensor for name, tensor in trainer.memory.state_dict().items() if torch.is_tensor(tensor)}
    save_file(memory, folder / f"memory-{args.process_index}.safetensors")


def train_sharded(job: Job) -> None:
    """The recipe of the trainer in a loop written out, with FSDP2: every layer is put together where it is needed."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import get_cosine_schedule_with_warmup

    dist.init_process_group("gloo")
    rank, num_rows = dist.get_rank(), job.arguments["per_device_train_batch_size"]
    own = slice(rank * num_rows, (rank + 1) * num_rows)
    model = tiny_model(**job.model).train()
    for layer in model.transformer.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, job.arguments["max_steps"])
    memory = model.init_memory(num_rows)
    streams = TokenStreams(job.text(), num_rows * dist.get_world_size(), 7, mark_starts=True)
    passes = chain.from_iterable(streams.segments() for _ in count())
    for segment in islice(passes, job.arguments["max_steps"]):
        if segment["reset_memory"].all():
            memory.reset()
        output = model(segment["input_ids"][own], shift_labels=segment["shift_labels"][own], cache=memory)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert all(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in model.parameters())
    score = evaluate_stream(model, job.text()[:100], segment_length=7, batch_size=2)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        folder = Path(job.folder)
        folder.mkdir(exist_ok=True)
        tensors = {name: whole[name].clone() for name, _ in model.named_parameters()}
        save_file({**tensors, "loss": torch.tensor(score.loss)}, folder / "weights.safetensors")


def kill_at(trainer: TransfoXLTrainer, event: str, number: int) -> None:
    """Let this process be killed there, as the system would."""
    from transformers import TrainerCallback

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    class Killer(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
            if state.global_step == number:
                die()

    if event == "step":
        trainer.add_callback(Killer())
        return
    opened = 0

    def hook(name: str, values: tuple) -> None:
        nonlocal opened
        if name not in ("open", "os.rename") or trainer.args.output_dir not in (path := str(values[0])):
            return
        reads = name == "open" and not (isinstance(values[1], str) and ("w" in values[1] or "a" in values[1]))
        # the model's code is the same in every checkpoint: its many files would crowd out the others
        if not reads and not path.endswith(".py"):
            opened += 1
            if opened == number:
                die()

    sys.addaudithook(hook)


def _work(rank: int, num_processes: int, port: int, jobs: list[Job]) -> None:
    torch.set_num_threads(1)
    if num_processes > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    for job in jobs:
        train_sharded(job) if job.sharded else train(job)
    if num_processes > 1:
        torch.distributed.destroy_process_group()


def run(jobs: list[Job], num_processes: int, killed_after: float | None = None) -> bool:
    """Train jobs one after the other in new processes.

    Args:
        jobs: The jobs.
        num_processes: Processes that train each of them together.
        killed_after: Seconds after which all processes are killed.

    Returns:
        Whether they came to their end. Once one process is killed, so are the others.

    Raises:
        AssertionError: if a process fails otherwise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "datasets", "accelerate", "transformers.trainer"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [context.Process(target=_work, args=(rank, num_processes, port, jobs)) for rank in range(num_processes)]
    for worker in workers:
        worker.start()
    end = time.monotonic() + (LIMIT if killed_after is None else killed_after)
    while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
        if any(worker.exitcode not in (None, 0) for worker in workers):
            break
        time.sleep(0.02)
    timed_out = killed_after is None and any(worker.is_alive() for worker in workers) and time.monotonic() >= end
    for worker in workers:
        worker.kill()
        worker.join()
    codes = [worker.exitcode for worker in workers]
    assert not timed_out, f"the jobs took longer than {LIMIT} s"
    # another process may fail because it lost the one that was killed
    assert -signal.SIGKILL in codes or not any(codes), f"exit codes {codes}"
    return not any(codes)


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    return load_file(Path(job.folder) / "weights.safetensors")


def memory_of(job: Job, rank: int) -> dict[str, torch.Tensor]:
    return load_file(Path(job.folder) / f"memory-{rank}.safetensors")


def random_seconds(longest: float, seed: int) -> float:
    return random.Random(seed).uniform(0.0, longest)

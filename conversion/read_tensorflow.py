"""Reads checkpoints of the original TensorFlow code (`model.ckpt.index`, `.data-00000-of-00001`).

No maintained library reads these files without TensorFlow: the only package on PyPI that claims to,
`tensorflow-checkpoint-reader`, is described there as in development and had its last release in February 2023. So
TensorFlow is used, as an optional extra: `pip install "hf_txl[tensorflow]"`. It compares checksums of the index and of
every variable, so flipped bits and truncation are errors. But an index that is malformed on purpose, with correct
checksums, makes TensorFlow abort. Therefore it runs in a process of its own, `tensorflow_process.py`, which also keeps
its memory (700 MB) out of this one.

Checkpoints of one file, as TensorFlow wrote before 0.12, are read too. Shapes are known at once; values are read when
they are asked for, one variable at a time.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from .restricted_pickle import printable

PROCESS = Path(__file__).with_name("tensorflow_process.py")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
}


def read_checkpoint(path: str | os.PathLike[str]) -> TensorFlowCheckpoint:
    """Open a TensorFlow checkpoint.

    Args:
        path: the name that all files of the checkpoint begin with (`model.ckpt`), one of the files, or a folder: then
            the checkpoint that its `checkpoint` file names, or the only one in it.

    Raises `ImportError` without TensorFlow, `FileNotFoundError` if there is no checkpoint, and `ValueError` if it is
    damaged or there are several.
    """
    prefix = find_prefix(Path(path)).absolute()
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"`{prefix}` is a TensorFlow checkpoint, and TensorFlow, which reads it, is not installed: "
            'pip install "hf_txl[tensorflow]"'
        )
    return TensorFlowCheckpoint(prefix, TensorFlowProcess.running())


class TensorFlowCheckpoint(Mapping[str, torch.Tensor]):
    """The variables of a checkpoint, including those of the optimizer (`<name>/Adam`, `beta1_power`, ...).

    Each access reads the variable again. Attributes: `shapes` (`dict[str, tuple[int, ...]]`) and `dtypes`
    (`dict[str, torch.dtype]`), known without reading. Variables that are not numeric are left out.
    """

    def __init__(self, prefix: Path, process: TensorFlowProcess):
        self.prefix = prefix
        self.process = process
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        shards = glob.glob(f"{glob.escape(str(prefix))}.data-*-of-*")
        stored = sum(os.path.getsize(shard) for shard in shards)
        for name, (dtype, shape) in sorted(self.ask({"open": str(prefix)})["variables"].items()):
            if dtype in ("string", "resource", "variant"):
                continue
            if dtype not in DTYPES:
                raise ValueError(
                    f"`{prefix}` has a variable `{printable(name)}` of the unknown type {printable(dtype)}."
                )
            size = prod(shape) * DTYPES[dtype].itemsize
            # checked before anything is allocated; not for the older format, which compresses values
            if min(shape, default=0) < 0 or (shards and size > stored):
                raise ValueError(
                    f"`{prefix}` is not a valid TensorFlow checkpoint: its variable `{printable(name)}` of shape "
                    f"{shape} needs {size} bytes, and its data have {stored}."
                )
            self.shapes[name] = tuple(shape)
            self.dtypes[name] = DTYPES[dtype]
        if not self.shapes:
            raise ValueError(f"`{prefix}` is not a valid TensorFlow checkpoint: it has no variables.")

    def ask(self, request: dict[str, str]) -> Any:
        try:
            return self.process.ask(request)
        except ValueError as error:
            raise ValueError(
                f"`{self.prefix}` is not a valid TensorFlow checkpoint: {printable(error, 300)}."
            ) from None

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, dtype = self.shapes[name], self.dtypes[name]
        if self.process.process.poll() is not None:  # another checkpoint stopped it
            self.process = TensorFlowProcess.running()
        if self.process.opened != str(self.prefix):
            self.ask({"open": str(self.prefix)})
        if self.ask({"read": name})["size"] != prod(shape) * dtype.itemsize:
            raise ValueError(f"`{self.prefix}` changed while it was read: `{printable(name)}` has another size.")
        values = torch.empty(shape, dtype=dtype)
        self.process.receive(values)
        return values

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class TensorFlowProcess:
    """A process that has imported TensorFlow, shared by open checkpoints; it ends with the last of them."""

    current: weakref.ReferenceType[TensorFlowProcess] | None = None

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # without -P the folder of this file would precede the libraries in the search path
            [sys.executable, "-P", str(PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        )
        self.opened = ""
        self.stop = weakref.finalize(self, end_process, self.process)
        if self.receive_line() is None:
            raise ImportError(f"TensorFlow is installed but cannot be imported ({self.describe_end()}).")

    @classmethod
    def running(cls) -> TensorFlowProcess:
        """The current process, or a new one if there is none."""
        process = cls.current() if cls.current is not None else None
        if process is None or process.process.poll() is not None:
            process = cls()
            cls.current = weakref.ref(process)
        return process

    def ask(self, request: dict[str, str]) -> dict[str, Any]:
        """The answer to a request; raises `ValueError` if it is an error or the process ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            answer = self.receive_line()
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise ValueError(f"TensorFlow stopped while reading it ({self.describe_end()})")
        if "error" in answer:
            raise ValueError(answer["error"])
        self.opened = request.get("open", self.opened)
        return answer

    def receive_line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def receive(self, values: torch.Tensor) -> None:
        """Fill `values` with the bytes that follow the answer."""
        buffer: Any = values.reshape(-1).view(torch.uint8).numpy()
        stdout: Any = self.process.stdout
        if stdout.readinto(buffer) != values.nbytes:
            raise ValueError(f"TensorFlow stopped while reading ({self.describe_end()}).")

    def describe_end(self) -> str:
        status = self.process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Close the input of the process and terminate it, even if it is busy."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.terminate()
    process.wait()


def find_prefix(path: Path) -> Path:
    """The prefix of the checkpoint that a path names."""
    if path.is_dir():
        path = find_in_folder(path)
    else:
        path = path.with_name(re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", path.name))
    if not index_of(path).is_file() and not path.is_file():
        raise FileNotFoundError(f"`{path}` must be a TensorFlow checkpoint, but there is no `{index_of(path).name}`.")
    return path


def find_in_folder(folder: Path) -> Path:
    state = folder / "checkpoint"
    if state.is_file():
        # the newest checkpoint is first; its path is of the machine that wrote it, so only its name is used
        match = re.search(rb'^model_checkpoint_path:\s*"((?:[^"\\\n]|\\.)*)"', state.read_bytes(), re.M)
        if match is None:
            raise ValueError(f"`{state}` must name a checkpoint as `model_checkpoint_path`, but does not.")
        return folder / re.split(r"[/\\]", unescape(match[1]))[-1]
    prefixes = sorted(name.with_suffix("") for name in folder.glob("*.index"))
    if len(prefixes) > 1:
        names = ", ".join(f"`{prefix.name}`" for prefix in prefixes)
        raise ValueError(
            f"`{folder}` must hold one checkpoint, or say which in a file `checkpoint`, but holds {names}."
        )
    if not prefixes:
        raise FileNotFoundError(f"`{folder}` must hold a TensorFlow checkpoint, but no file in it ends with `.index`.")
    return prefixes[0]


def unescape(quoted: bytes) -> str:
    """A string of the state file, in which quotes and bytes (three octal digits) are escaped by a backslash."""

    def replace(match: re.Match[bytes]) -> bytes:
        number, letter = match.groups()
        return bytes([int(number, 8) & 255]) if number else letter

    return re.sub(rb"\\(?:([0-7]{3})|(.))", replace, quoted).decode("utf-8", "replace")


def index_of(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")

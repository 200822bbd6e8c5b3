"""A memory in a safetensors file, from which its streams go on."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from .memory_transfo_xl import TransfoXLMemory


def write_memory(path: Path, memory: TransfoXLMemory, **metadata: Any) -> None:
    """Write a memory to a safetensors file, atomically; values of `metadata` are stored as JSON.

    Raises:
        OSError: if it cannot be written.
    """
    state = memory.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in state.items() if name not in tensors}
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(tensors, unfinished, {name: json.dumps(value) for name, value in {**others, **metadata}.items()})
        os.replace(unfinished, path)
    except SafetensorError as error:
        # such as a full disk
        raise OSError(f"{path} could not be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_memory(path: Path) -> dict[str, Any]:
    """State written by [`write_memory`], for `TransfoXLMemory.load_state_dict`, and its metadata.

    Tensors are on the CPU.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return {**load_file(path), **{name: json.loads(value) for name, value in metadata.items()}}


__all__ = ["read_memory", "write_memory"]

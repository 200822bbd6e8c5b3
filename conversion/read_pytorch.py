"""Reads files of `torch.save` and `pickle` from the PyTorch codes, without executing anything in them.

Old checkpoints are pickles of whole modules, and a pickle can name any function. A file that names something outside
the lists of `torch_objects.py` is refused before any object is built; no class or function that a file
names is ever imported or called.

Three kinds of file exist: the zip archive that torch writes since 1.6, the sequence of pickles and raw storages that
it wrote before (also every `vocab.bin` of transformers), and plain pickles. Their layout follows
`torch/serialization.py`. Tensors are views of the file, mapped privately: reading costs no memory beyond the pages
that are used, and writing to a tensor does not change the file. In the older formats a storage may begin at any byte;
if it is not aligned with its elements, it is read instead.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .restricted_pickle import PickleReader, StoredName, StoredObject, UnsafeFileError, printable
from .torch_objects import Storage, StorageRecord, build, survey

__all__ = ["StoredName", "StoredObject", "UnsafeFileError", "module_tensors", "read_file"]

# first value of every file of torch before 1.6, and the only version of that format
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_NUMBER = 1001
ZIP_START = b"PK\x03\x04"
# nesting depth and number of modules; real models stay below 10 and a few thousand
MAX_MODULE_DEPTH = 100
MAX_MODULES = 100_000

# other kinds of files, by their first bytes
OTHER_FILES = {
    b"version https://git-lfs": "is a pointer to a file in Git LFS, not the file: fetch that one",
    b"\x1f\x8b": "is compressed with gzip: unpack it first",
    b"\x89HDF": "is an HDF5 file, not a PyTorch one",
    b"<": "is a web page, not a file with weights",
    b"PK\x05\x06": "is an empty zip archive",
}


def other_file(beginning: bytes) -> str | None:
    """Description of a file that begins with these bytes, if it is of a kind often mistaken for weights."""
    return next((reason for start, reason in OTHER_FILES.items() if beginning.startswith(start)), None)


def read_file(path: str | os.PathLike[str]) -> Any:
    """The contents of a PyTorch file or a pickle.

    Args:
        path: a file that `torch.save` wrote (a zip archive, or as before 1.6), or a plain pickle of protocol 0 to 5.

    Returns:
        Dictionaries (also for `OrderedDict`, `Counter` and `defaultdict`), lists, tuples, sets, texts, numbers, bytes,
        None, `torch.Tensor` and `StoredObject`. Tensors are on the CPU whatever the file says, need no gradient, and
        share memory as they did when they were saved. A class that is stored itself is a `StoredName`.

    Raises `UnsafeFileError` (a `ValueError`) if the file names a class or function that is not listed, and
    `ValueError` if it is damaged or no such file. Damage of values is noticed in zip archives, which have checksums.
    """
    path = Path(path)
    with open(path, "rb") as file:
        try:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("is not a regular file")
            if status.st_size == 0:
                raise ValueError("is empty")
            # copy-on-write: changes of a tensor do not reach the file
            return read_mapping(file, mmap(file.fileno(), 0, access=ACCESS_COPY))
        except ValueError as error:
            kind = UnsafeFileError if isinstance(error, UnsafeFileError) else ValueError
            raise kind(f"`{path}` cannot be read: it {error}.") from None


def read_mapping(file: io.BufferedReader, mapping: mmap) -> Any:
    if mapping[:4] == ZIP_START:
        return read_archive(file, mapping)
    if reason := other_file(mapping[:32]):
        raise ValueError(reason)
    if mapping[257:262] == b"ustar":
        raise ValueError("is a tar archive, as torch wrote before release 0.1.10; save it again with torch 1.0")
    # within the first instructions in every protocol, which rules out most files without reading them
    if MAGIC_NUMBER.to_bytes(10, "little") in mapping[:32] and read_plain(mapping, 0)[0] == MAGIC_NUMBER:
        return read_sequence(file, mapping)
    surveyed = survey(mapping, 0)
    if surveyed.storages:
        raise ValueError("refers to storages, but is a plain pickle that cannot hold any")
    check_end(mapping, surveyed.end)
    return build(mapping, 0, surveyed, {})


def check_end(mapping: mmap, end: int) -> None:
    if end != len(mapping):
        raise ValueError(f"has {len(mapping) - end} bytes after its end")


def read_values(file: io.BufferedReader, mapping: mmap, start: int, record: StorageRecord, byte_order: str) -> Storage:
    """The values of a storage that begins at byte `start`, as a view of the mapping where that is possible."""
    if record.numel == 0:
        return Storage(torch.empty(0, dtype=record.dtype))
    if start % record.dtype.itemsize == 0:
        values = torch.frombuffer(mapping, dtype=record.dtype, count=record.numel, offset=start)
    else:  # a view would be misaligned, which not every processor can read
        raw = torch.empty(record.size, dtype=torch.uint8)
        buffer: Any = raw.numpy()
        file.seek(start)
        if file.readinto(buffer) != record.size:
            raise ValueError("became shorter while it was read")
        values = raw.view(record.dtype)
    if byte_order != sys.byteorder:
        # a complex number consists of two real ones
        width = record.dtype.itemsize // (2 if record.dtype.is_complex else 1)
        values = values.view(torch.uint8).view(-1, width).flip(1).reshape(-1).view(record.dtype)
    return Storage(values)


@dataclass(frozen=True)
class Entry:
    """Position of an archive's entry in the file, and its checksum (0: torch computed none)."""

    start: int
    size: int
    checksum: int


def read_archive(file: io.BufferedReader, mapping: mmap) -> Any:
    entries = find_entries(file, mapping)
    tops = [name.removesuffix("/data.pkl") for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(tops) != 1:
        raise ValueError("is a zip archive, but not one that torch wrote: it needs one `data.pkl`, in one folder")
    top = tops[0]
    if f"{top}/constants.pkl" in entries:
        raise ValueError("is a TorchScript program, which holds code; its state dict is needed")
    byte_order = "little"
    if (entry := entries.get(f"{top}/byteorder")) is not None:
        byte_order = read_entry(file, entry, "byteorder")[:16].decode("latin-1")
        if byte_order not in ("little", "big"):
            raise ValueError(f"has the byte order {printable(byte_order, 20)}; it must be little or big")
    program = read_entry(file, entries[f"{top}/data.pkl"], "data.pkl")
    surveyed = survey(program, 0)
    if surveyed.end != len(program):
        raise ValueError(f"has {len(program) - surveyed.end} bytes after the end of its `data.pkl`")
    storages = {}
    for key, record in surveyed.storages.items():
        name = f"{top}/data/{key}"
        entry = entries.get(name)
        if entry is None:
            raise ValueError(f"lacks the storage `{printable(name)}`")
        if entry.size != record.size:
            raise ValueError(f"has {entry.size} bytes in the storage `{printable(name)}` and needs {record.size}")
        check_entry(file, entry, name)
        storages[key] = read_values(file, mapping, entry.start, record, byte_order)
    return build(program, 0, surveyed, storages)


def find_entries(file: io.BufferedReader, mapping: mmap) -> dict[str, Entry]:
    """All entries of the archive, uncompressed and without overlap; nothing is extracted, so paths are harmless."""
    try:
        with zipfile.ZipFile(file) as archive:
            infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise ValueError(f"is a damaged zip archive ({printable(error)})") from None
    entries: dict[str, Entry] = {}
    end = 0
    for info in infos:
        name, quoted = info.filename, f"`{printable(info.filename)}`"
        if name in entries:
            raise ValueError(f"is a zip archive with two entries {quoted}")
        # torch compresses nothing
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise ValueError(
                f"is a zip archive whose entry {quoted} is compressed or encrypted; pack it again without either"
            )
        header = mapping[info.header_offset : info.header_offset + 30]
        if info.header_offset < end or len(header) < 30 or header[:4] != ZIP_START:
            raise ValueError(f"is a damaged zip archive (entry {quoted} is not where the directory says)")
        start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        end = start + info.file_size
        if end > len(mapping):
            raise ValueError(f"is a damaged zip archive (entry {quoted} ends after the file)")
        entries[name] = Entry(start, info.file_size, info.CRC)
    return entries


def check_entry(file: io.BufferedReader, entry: Entry, name: str) -> None:
    """Compare the checksum, reading from the file in small pieces instead of the mapping, to save memory."""
    if entry.checksum == 0:
        return
    checksum, left = 0, entry.size
    file.seek(entry.start)
    while left > 0 and (piece := file.read(min(left, 2**20))):
        checksum = zlib.crc32(piece, checksum)
        left -= len(piece)
    if left or checksum != entry.checksum:
        raise ValueError(f"is damaged: the checksum of `{printable(name)}` is wrong")


def read_entry(file: io.BufferedReader, entry: Entry, name: str) -> bytes:
    check_entry(file, entry, name)
    file.seek(entry.start)
    return file.read(entry.size)


def read_sequence(file: io.BufferedReader, mapping: mmap) -> Any:
    """Magic number, protocol, byte order, the object, the storages' keys, then length and values of each storage."""
    magic, position = read_plain(mapping, 0)
    protocol, position = read_plain(mapping, position)
    system, position = read_plain(mapping, position)
    if (magic, protocol) != (MAGIC_NUMBER, PROTOCOL_NUMBER):
        raise ValueError(f"has a layout other than {PROTOCOL_NUMBER}, the only one of torch before 1.6")
    little = system.get("little_endian") if type(system) is dict else None
    if type(little) is not bool:
        raise ValueError("does not state its byte order")
    start = position
    surveyed = survey(mapping, start)
    keys, position = read_plain(mapping, surveyed.end)
    keys_are_texts = type(keys) is list and all(type(key) is str for key in keys)
    if not keys_are_texts or sorted(keys) != sorted(surveyed.storages):
        raise ValueError("does not list the storages that it refers to")
    storages = {}
    for key in keys:
        record = surveyed.storages[key]
        numel = int.from_bytes(mapping[position : position + 8], "little" if little else "big", signed=True)
        if numel != record.numel:
            raise ValueError(f"has {numel} elements in storage {printable(key)} and needs {record.numel}")
        position += 8
        left = len(mapping) - position
        if record.size > left:
            raise ValueError(f"ends early: storage {printable(key)} needs {record.size} bytes, but {left} are left")
        storages[key] = read_values(file, mapping, position, record, "little" if little else "big")
        position += record.size
    check_end(mapping, position)
    return build(mapping, start, surveyed, storages)


def read_plain(mapping: mmap, position: int) -> tuple[Any, int]:
    """A pickle of containers, numbers and texts, and where it ends."""

    def find_nothing(*identifier: Any) -> Any:
        raise ValueError("names something where only numbers and texts belong")

    reader = PickleReader(mapping, position, find_nothing, find_nothing)
    try:
        return reader.read(), reader.position
    except ValueError as error:
        raise ValueError(f"holds no valid pickle ({error})") from None


def module_tensors(stored: StoredObject) -> dict[str, Tensor]:
    """Parameters and buffers of a pickled module under their names in `state_dict()`.

    Args:
        stored (`StoredObject`): a module, as `read_file` returns it. A wrapper is a module too: its `module.` stands
            in the names.

    Returns:
        `dict[str, torch.Tensor]`, in the order of `state_dict()`; shared tensors appear under each of their names.
    """
    tensors: dict[str, Tensor] = {}
    modules = 0

    def visit(module: Any, prefix: str, depth: int) -> None:
        nonlocal modules
        modules += 1
        if depth > MAX_MODULE_DEPTH or modules > MAX_MODULES:
            raise ValueError("`stored` must be a module, but holds itself or too many others.")
        if not is_module(module):
            kind = module.class_path if isinstance(module, StoredObject) else type(module).__name__
            at = f" at `{printable(prefix[:-1])}`" if prefix else ""
            raise ValueError(f"`stored` must be a pickled module, but is {printable(kind)}{at}.")
        unsaved = module.state.get("_non_persistent_buffers_set")  # since torch 1.4
        buffers = module.state["_buffers"]
        if isinstance(unsaved, set):
            buffers = {name: value for name, value in buffers.items() if name not in unsaved}
        for name, tensor in [*module.state["_parameters"].items(), *buffers.items()]:
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"`stored` must have tensors as parameters, but `{printable(prefix)}{name}` is not one."
                )
            tensors[f"{prefix}{name}"] = tensor
        for name, child in module.state["_modules"].items():
            if child is not None:
                visit(child, f"{prefix}{name}.", depth + 1)

    visit(stored, "", 0)
    return tensors


def is_module(value: Any) -> bool:
    """Whether `value` is a stored object with the three dictionaries that every module has."""
    if not isinstance(value, StoredObject):
        return False
    return all(type(value.state.get(name)) is dict for name in ("_parameters", "_buffers", "_modules"))

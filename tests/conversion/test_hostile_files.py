"""Files that would do harm are refused with one message, and nothing in them runs; see `hostile.py`.

Whether something runs is not guessed from its effects: Python's audit events (`sys.addaudithook`) tell of every
import, every opened file, started process and called `exec`, whoever causes them.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_txl.conversion import restricted_pickle
from hf_txl.conversion.read_pytorch import StoredObject, UnsafeFileError, module_tensors, read_file

from .hostile import (
    ARCHIVE_FILE,
    DAMAGED,
    PROGRAMS,
    SEQUENCE_FILE,
    WRAPPERS,
    good_sequence,
    name,
    pack_archive,
    tensor_archive,
    tensor_program,
)

# what reading a file may cause: its own opening and mapping, and questions that the interpreter asks itself
HARMLESS_EVENTS = {"mmap.__new__", "object.__getattr__", "sys._getframe"}
# a message of one line: the file, at most five names, and the reason
LONGEST_MESSAGE = 900

watched: list[tuple[str, tuple[Any, ...]]] | None = None


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is not None:
        watched.append((event, arguments))


@pytest.fixture(scope="module", autouse=True)
def audit_hook() -> None:
    """Install the hook, which cannot be removed again, and cause what Python imports at the first use only."""
    sys.addaudithook(watch)
    for encoding in ("cp437", "raw-unicode-escape"):
        codecs.lookup(encoding)
    for file in (ARCHIVE_FILE, SEQUENCE_FILE):
        read_file(file)


@contextmanager
def nothing_runs(path: Path) -> Iterator[None]:
    """Fail if anything happens inside but that `path` is opened for reading."""
    global watched
    watched = []
    try:
        yield
    finally:
        events, watched = watched, None
    unexpected = [
        (event, arguments)
        for event, arguments in events
        if event not in HARMLESS_EVENTS and not (event == "open" and arguments[:2] == (str(path), "r"))
    ]
    assert not unexpected


def message_of_refusal(path: Path, kind: type[ValueError]) -> str:
    """The message with which `path` is refused; it must be one, of one line, with the file's name."""
    modules = set(sys.modules)
    with nothing_runs(path), pytest.raises(ValueError) as caught:
        read_file(path)
    assert caught.type is kind
    assert set(sys.modules) == modules
    message = str(caught.value)
    assert message.startswith(f"`{path}` cannot be read: it ")
    assert message.isprintable() and len(message) < LONGEST_MESSAGE
    return message


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_that_names_something_else_is_refused_by_that_name(program: str, tmp_path: Path) -> None:
    make, refused_name = PROGRAMS[program]
    sentinel = tmp_path / "sentinel"
    for wrapper, wrap in WRAPPERS.items():
        path = tmp_path / f"{wrapper}.pt"
        path.write_bytes(wrap(make(sentinel)))
        assert refused_name in message_of_refusal(path, UnsafeFileError)
    assert not sentinel.exists()


def test_these_files_act_when_they_are_unpickled(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    acting = {
        # under a real unpickler these create the file that they are given, or the folder
        *("open", "io_open", "os_open", "os_mkdir", "os_system", "posix_system", "subprocess_run", "log_file"),
        *("eval", "exec", "run_code", "getattr_chain", "inst", "obj", "partial_with_state", "stack_global"),
    }
    for program in acting:
        make, _ = PROGRAMS[program]
        (tmp_path / f"{program}.pkl").write_bytes(WRAPPERS["pickle"](make(tmp_path / f"{program}.sentinel")))
    unpickle = (
        "import pathlib, pickle, sys\nfor path in sys.argv[1:]:\n    pickle.loads(pathlib.Path(path).read_bytes())"
    )
    files = [str(tmp_path / f"{program}.pkl") for program in sorted(acting)]
    subprocess.run([sys.executable, "-c", unpickle, *files], check=True)
    assert {path.stem for path in tmp_path.glob("*.sentinel")} == acting


def test_all_refused_names_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(
        b"\x80\x02" + name("os.system") + name("mem_transformer.MemTransformerLM") + name("my.Model") + b"00."
    )
    message = message_of_refusal(path, UnsafeFileError)
    assert "`os.system`, `my.Model`" in message and "MemTransformerLM" not in message


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_gives_one_message(case: str, tmp_path: Path) -> None:
    make, word = DAMAGED[case]
    path = tmp_path / "model.pt"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        message = message_of_refusal(path, ValueError)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert word in message.removeprefix(f"`{path}`")
    # what Python makes of the largest instruction, and a buffer
    assert peak < 250 * path.stat().st_size + 2**22


@pytest.mark.parametrize("instruction", [b"\x8f", b"]", b"}", b"\x85", b"\x94", b"("], ids=lambda code: code.hex())
def test_objects_are_counted(instruction: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction of one byte makes a container of two hundred, or an entry of the memo."""
    monkeypatch.setattr(restricted_pickle, "MAX_OBJECTS", 1000)
    path = tmp_path / "model.pkl"
    path.write_bytes(b"\x80\x04N" + instruction * 1001 + b".")
    assert "more than 1000" in message_of_refusal(path, ValueError)


def test_deep_nesting_needs_no_deep_stack(tmp_path: Path) -> None:
    depth = 10 * sys.getrecursionlimit()
    path = tmp_path / "model.pkl"
    path.write_bytes(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    with nothing_runs(path):
        outer = read_file(path)
    levels = 1
    while outer:
        (outer,) = outer
        levels += 1
    assert levels == depth


def test_one_tuple_many_times_stays_one_tuple(tmp_path: Path) -> None:
    """Forty levels with both members the same are forty tuples, and would be 2**40 if they were copied."""
    path = tmp_path / "model.pkl"
    path.write_bytes(b"\x80\x02]" + b"2\x86" * 40 + b".")
    with nothing_runs(path):
        outer = read_file(path)
    for _ in range(40):
        first, second = outer
        assert first is second
        outer = first


def test_a_module_inside_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    module = b"\x80\x02" + name("mem_transformer.MemTransformerLM") + b")\x81q\x00}(X\x0b\x00\x00\x00_parameters}"
    module += b"X\x08\x00\x00\x00_buffers}X\x08\x00\x00\x00_modules}X\x01\x00\x00\x00ah\x00sub."
    path.write_bytes(module)
    with nothing_runs(path):
        stored = read_file(path)
    with pytest.raises(ValueError, match="holds itself"):
        module_tensors(stored)


def test_what_cannot_be_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a pickled module, but is `?argparse.Namespace"):
        module_tensors(StoredObject("argparse.Namespace"))
    states: dict[str, Any] = {"_parameters": {}, "_buffers": {}, "_modules": {}}
    child = StoredObject("torch.nn.modules.linear.Linear", (), {"_parameters": {}})
    with pytest.raises(ValueError, match="Linear at `layers`"):
        module_tensors(StoredObject("x", (), states | {"_modules": {"layers": child}}))
    with pytest.raises(ValueError, match="`weight` is not one"):
        module_tensors(StoredObject("x", (), states | {"_parameters": {"weight": 1}}))


@pytest.mark.parametrize("file", [ARCHIVE_FILE, SEQUENCE_FILE], ids=["archive", "sequence"])
def test_a_truncated_file_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    path = tmp_path / "model.pt"
    lengths = {*range(40), *range(40, len(data), 4001), len(data) - 1}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        message_of_refusal(path, ValueError)


def outcome(path: Path) -> Any:
    """What reading `path` gives, or None where it is refused; nothing runs either way."""
    with nothing_runs(path):
        try:
            return read_file(path)
        except ValueError as error:
            assert str(error).startswith(f"`{path}` cannot be read: it ") and str(error).isprintable()
            return None


def test_a_flipped_bit_in_an_archive_is_noticed_or_means_nothing(tmp_path: Path) -> None:
    """Every entry has a checksum; what is left are dates and the like in the directory."""
    data = ARCHIVE_FILE.read_bytes()
    expected = read_file(ARCHIVE_FILE)
    random_number = random.Random(4)
    path = tmp_path / "model.pt"
    refusals = 0
    for _ in range(200):
        flipped = bytearray(data)
        flipped[random_number.randrange(len(data))] ^= 1 << random_number.randrange(8)
        path.write_bytes(flipped)
        actual = outcome(path)
        refusals += actual is None
        if actual is not None:
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert refusals > 150


def test_a_flipped_bit_before_the_values_of_an_old_file_is_refused_or_harmless(tmp_path: Path) -> None:
    """Files before 1.6 have no checksums, so another name or number may be read; nothing else may happen."""
    data = SEQUENCE_FILE.read_bytes()
    end = len(data) - len(good_sequence()[2])
    random_number = random.Random(5)
    path = tmp_path / "model.pt"
    refusals = 0
    for _ in range(150):
        flipped = bytearray(data)
        flipped[random_number.randrange(end)] ^= 1 << random_number.randrange(8)
        path.write_bytes(flipped)
        refusals += outcome(path) is None
    assert refusals > 30


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_mutated_pickle_is_refused_or_harmless(protocol: int, tmp_path: Path) -> None:
    vocabulary = {"idx2sym": ["<eos>", "the", "é"], "sym2idx": {"<eos>": 0}, "more": (1.5, -7, b"\x00", None, {2, 3})}
    data = pickle.dumps(vocabulary, protocol)
    random_number = random.Random(protocol)
    path = tmp_path / "vocab.pkl"
    for _ in range(200):
        mutated = bytearray(data)
        for _ in range(random_number.randint(1, 4)):
            mutated[random_number.randrange(len(mutated))] = random_number.randrange(256)
        path.write_bytes(mutated)
        outcome(path)


def test_an_archive_of_the_other_byte_order_is_turned_around(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for dtype, kind in ((torch.float32, "Float"), (torch.int64, "Long"), (torch.complex64, "ComplexFloat")):
        values = torch.tensor([1, -2, 3, 2**20], dtype=dtype)
        raw = values.numpy().byteswap().tobytes()
        program = tensor_program((4,), (1,), kind=f"torch.{kind}Storage")
        path.write_bytes(tensor_archive(program, raw, **{"m/byteorder": b"big"}))
        assert torch.equal(read_file(path), values)


def test_a_damaged_directory_is_refused_or_harmless(tmp_path: Path) -> None:
    """The list of entries stands at the end of the archive."""
    data = tensor_archive(tensor_program((4,), (1,)))
    start = data.index(b"PK\x01\x02")
    path = tmp_path / "model.pt"
    for position in range(start, len(data)):
        for replacement in (0, 1, 0x7F, 0xFF):
            mutated = bytearray(data)
            mutated[position] = replacement
            path.write_bytes(mutated)
            actual = outcome(path)
            assert actual is None or torch.equal(actual, torch.zeros(4))


def test_nothing_is_written_beside_the_file(tmp_path: Path) -> None:
    """Names of entries are only compared: no entry is ever unpacked to a path."""
    folder = tmp_path / "inside"
    folder.mkdir()
    path = folder / "model.pt"
    entries = {"../outside/data.pkl": b"N.", "m/data.pkl": b"N.", "/tmp/x": b"", "..\\y": b"", "m/data/../../z": b""}
    path.write_bytes(pack_archive(entries))
    with nothing_runs(path):
        assert read_file(path) is None
    assert list(tmp_path.rglob("*")) == [folder, path]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing.pt")
    with pytest.raises(OSError):
        read_file(tmp_path)
    if os.name == "posix":
        with pytest.raises(ValueError, match="not a regular file"):
            read_file("/dev/zero")


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    """As the cache of the Hub has them."""
    (tmp_path / "blob").write_bytes(ARCHIVE_FILE.read_bytes())
    (tmp_path / "pytorch_model.bin").symlink_to("blob")
    assert read_file(tmp_path / "pytorch_model.bin").keys() == read_file(ARCHIVE_FILE).keys()


def test_a_zip_bomb_of_entries_costs_what_the_file_has(tmp_path: Path) -> None:
    """Two thousand empty entries beside the pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", b"N.")
        for number in range(2000):
            archive.writestr(f"m/data/{number}", b"")
    path = tmp_path / "model.pt"
    path.write_bytes(buffer.getvalue())
    tracemalloc.start()
    try:
        assert read_file(path) is None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * path.stat().st_size

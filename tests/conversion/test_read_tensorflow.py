"""Reading TensorFlow checkpoints: recorded ones, every way to name one, and damaged ones."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_txl.conversion import read_tensorflow
from hf_txl.conversion.read_tensorflow import find_prefix, read_checkpoint
from tests.helpers import FIXTURES

ORIGINAL = sorted(path.parent for path in FIXTURES.glob("tf_original/*/case.json"))
REFERENCE = sorted(path.parent for path in FIXTURES.glob("txl_tf_reference/*/config.json"))
SMALL = FIXTURES / "txl_tf_reference" / "div_1"

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow, an optional extra"
)


@pytest.fixture(scope="module", autouse=True)
def open_checkpoint() -> Iterator[Any]:
    """Checkpoints in use share one process, so one that stays open saves every test the start of TensorFlow."""
    yield read_checkpoint(SMALL) if importlib.util.find_spec("tensorflow") else None


@needs_tensorflow
@pytest.mark.parametrize("case", ORIGINAL, ids=lambda case: case.name)
def test_variables_equal_the_recorded_ones(case: Path) -> None:
    """Names, shapes, types and values; the optimizer's variables come on top, under names that say so."""
    checkpoint = read_checkpoint(case)
    expected = load_file(case / "variables.safetensors")
    for name, values in expected.items():
        values = values.reshape(checkpoint.shapes[name])  # a lone number was recorded as a list of one
        assert checkpoint.dtypes[name] == values.dtype and torch.equal(checkpoint[name], values), name
    others = checkpoint.keys() - expected
    assert all(name.endswith(("/Adam", "/Adam_1")) or name in ("beta1_power", "beta2_power") for name in others)
    assert len(checkpoint) == len(list(checkpoint)) == len(expected) + len(others)


@needs_tensorflow
@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case.name)
def test_variables_equal_those_of_the_archive_beside_them(case: Path) -> None:
    checkpoint = read_checkpoint(case / "model.ckpt")
    expected = np.load(case / "weights.npz")
    assert checkpoint.keys() == set(expected)
    for name in expected:
        assert checkpoint.shapes[name] == expected[name].shape
        assert np.array_equal(checkpoint[name].numpy(), expected[name])


@needs_tensorflow
def test_two_open_checkpoints_do_not_mix() -> None:
    first, second = (read_checkpoint(case) for case in REFERENCE[:2])
    name = "transformer/layer_0/rel_attn/qkv/kernel"
    expected = [np.load(case / "weights.npz")[name] for case in REFERENCE[:2]]
    for _ in range(2):
        assert np.array_equal(first[name].numpy(), expected[0])
        assert np.array_equal(second[name].numpy(), expected[1])
    first[name].add_(1)
    assert np.array_equal(first[name].numpy(), expected[0])
    with pytest.raises(KeyError):
        first["transformer/no_such_variable"]


@needs_tensorflow
def test_this_process_does_not_import_tensorflow() -> None:
    assert len(read_checkpoint(SMALL)) and "tensorflow" not in sys.modules


def copy_of(case: Path, folder: Path, prefix: str = "model.ckpt") -> Path:
    """The checkpoint in another folder, under another name; its prefix."""
    folder.mkdir(exist_ok=True, parents=True)
    for ending in (".index", ".data-00000-of-00001"):
        shutil.copyfile(case / f"model.ckpt{ending}", folder / f"{prefix}{ending}")
    return folder / prefix


def test_every_name_of_a_checkpoint_finds_it(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path / "run", "model.ckpt-40")
    (tmp_path / "run" / "model.ckpt-40.meta").write_bytes(b"a graph, which is not needed")
    for ending in ("", ".index", ".meta", ".data-00000-of-00001"):
        assert find_prefix(prefix.with_name(f"model.ckpt-40{ending}")) == prefix
    assert find_prefix(tmp_path / "run") == prefix


@pytest.mark.parametrize(
    "state",
    [
        b'model_checkpoint_path: "model.ckpt-8"\nall_model_checkpoint_paths: "model.ckpt-4"\n',
        b'all_model_checkpoint_paths: "model.ckpt-4"\nmodel_checkpoint_path: "model.ckpt-8"\n',
        b'model_checkpoint_path: "/scratch/someone/elsewhere/model.ckpt-8"\n',
        b'model_checkpoint_path: "../../x/model.ckpt-8"',
        rb'model_checkpoint_path: "D:\\runs\\model.ckpt-8"',
        rb'model_checkpoint_path: "/data/\303\251tudes \"2\"/model.ckpt-8"',
        b'model_checkpoint_path:"model.ckpt-8"\r\nlast_preserved_timestamp: 1.5e9\r\n',
    ],
)
def test_the_state_file_of_a_folder_names_the_checkpoint(state: bytes, tmp_path: Path) -> None:
    """The one in this folder, whatever machine the file was written on."""
    for number in (4, 8):
        copy_of(SMALL, tmp_path, f"model.ckpt-{number}")
    (tmp_path / "checkpoint").write_bytes(state)
    assert find_prefix(tmp_path) == tmp_path / "model.ckpt-8"


def test_names_beyond_ascii_are_found(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path, "modèle")
    (tmp_path / "checkpoint").write_bytes(rb'model_checkpoint_path: "mod\303\250le"')
    assert find_prefix(tmp_path) == prefix


def test_an_unclear_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no `nothing.index`"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"no file in it ends with `.index`"):
        read_checkpoint(tmp_path)
    for number in (4, 8):
        copy_of(SMALL, tmp_path, f"model.ckpt-{number}")
    with pytest.raises(ValueError, match="holds `model.ckpt-4`, `model.ckpt-8`"):
        read_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text("model_checkpoint_path: model.ckpt-4")
    with pytest.raises(ValueError, match="must name a checkpoint as `model_checkpoint_path`"):
        read_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-2"')
    with pytest.raises(FileNotFoundError, match=r"no `model.ckpt-2.index`"):
        read_checkpoint(tmp_path)


def test_without_tensorflow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "hf_txl\[tensorflow\]"'):
        read_checkpoint(SMALL)


def test_a_broken_tensorflow_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "process.py"
    script.write_text("import no_such_library")
    monkeypatch.setattr(read_tensorflow, "PROCESS", script)
    with pytest.raises(ImportError, match=r"cannot be imported \(exit status 1\)"):
        read_tensorflow.TensorFlowProcess()


@needs_tensorflow
def test_brackets_in_a_path_are_no_pattern(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path / "run [1]*")
    assert len(read_checkpoint(prefix)) == len(read_checkpoint(SMALL))


@needs_tensorflow
@pytest.mark.parametrize("form", ["file", "empty", "text", "half of the index", "half of the data", "no data"])
def test_an_incomplete_checkpoint_is_refused(form: str, tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path)
    index, data = tmp_path / "model.ckpt.index", tmp_path / "model.ckpt.data-00000-of-00001"
    contents = {
        "empty": (b"", data.read_bytes()),
        "text": (b"not a table at all, but of sufficient length to have a footer\n", data.read_bytes()),
        "half of the index": (index.read_bytes()[:500], data.read_bytes()),
        "half of the data": (index.read_bytes(), data.read_bytes()[:40000]),
    }
    if form == "file":
        index.rename(prefix)  # as checkpoints of one file are named, but it is none
    elif form == "no data":
        data.unlink()
    else:
        index.write_bytes(contents[form][0])
        data.write_bytes(contents[form][1])
    assert "model.ckpt" in message_of_reading(prefix)


def message_of_reading(prefix: Path) -> str:
    """The message with which reading all of a checkpoint fails; one line, with its name."""
    with pytest.raises(ValueError) as caught:
        dict(read_checkpoint(prefix))
    message = str(caught.value)
    assert message.startswith(f"`{prefix}` is not a valid TensorFlow checkpoint: ") and message.isprintable()
    return message


@needs_tensorflow
def test_a_flipped_bit_in_the_index_is_noticed_or_means_nothing(tmp_path: Path) -> None:
    """Its blocks have checksums; only the empty space before its last bytes may change."""
    prefix = copy_of(SMALL, tmp_path)
    index = tmp_path / "model.ckpt.index"
    good, expected = index.read_bytes(), dict(read_checkpoint(SMALL))
    refused = 0
    for position in [*range(0, len(good) - 60, 13), *range(len(good) - 60, len(good))]:
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        index.write_bytes(flipped)
        try:
            actual = dict(read_checkpoint(prefix))
        except ValueError as error:
            assert str(error).startswith(f"`{prefix}` is not a valid TensorFlow checkpoint: ")
            refused += 1
        else:
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert refused > 85


@needs_tensorflow
def test_a_flipped_bit_in_the_data_is_noticed(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path)
    data = tmp_path / "model.ckpt.data-00000-of-00001"
    good = data.read_bytes()
    for position in range(5, len(good), 5003):
        flipped = bytearray(good)
        flipped[position] ^= 1 << position % 8
        data.write_bytes(flipped)
        assert "Checksum" in message_of_reading(prefix)


def checksum(data: bytes) -> int:
    """CRC-32C, rotated and shifted as the tables of TensorFlow store it."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    remainder ^= 0xFFFFFFFF
    return ((remainder >> 15 | remainder << 17) + 0xA282EAD8) & 0xFFFFFFFF


def forge_index(prefix: Path, old: bytes, new: bytes) -> None:
    """Replace bytes in the index and set the checksum right, as only someone does who means harm."""
    index = prefix.with_name("model.ckpt.index")
    data = bytearray(index.read_bytes())
    footer, position, numbers = len(data) - 48, len(data) - 48, []
    for _ in range(2):  # the second block's place, behind the only block of variables: numbers of seven bits a byte
        number = shift = 0
        while True:
            number |= (data[position] & 127) << shift
            shift += 7
            position += 1
            if data[position - 1] < 128:
                break
        numbers.append(number)
    end = numbers[0] - 4
    assert end < footer and data[end : end + 4] == struct.pack("<I", checksum(data[:end]))
    assert data.count(old) == 1 and len(old) == len(new)
    data = data.replace(old, new)
    data[end : end + 4] = struct.pack("<I", checksum(data[:end]))
    index.write_bytes(data)


# the entry of the embedding: its type, and its shape as two messages
TABLE = b"lookup_table\x08\x01\x12\x08\x12\x02\x08\x1e\x12\x02\x08\x20"


@needs_tensorflow
def test_a_variable_of_unknown_type_is_refused(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path)
    forge_index(prefix, TABLE, TABLE.replace(b"\x08\x01", b"\x08\x7f", 1))
    with pytest.raises(ValueError, match=r"lookup_table` of the unknown type \w+\."):
        read_checkpoint(prefix)


@needs_tensorflow
def test_a_shape_beyond_the_data_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    prefix = copy_of(SMALL, tmp_path)
    # (30, 32) becomes (30 << 28, 32) with the same number of bytes: the number's continuation takes the second axis
    forge_index(prefix, TABLE, TABLE[:-8] + b"\x12\x06\x08\x9e\x80\x80\x80\x7f")
    assert "and its data have 79992" in message_of_reading(prefix)


@needs_tensorflow
def test_an_index_that_stops_tensorflow_does_not_stop_us(tmp_path: Path, open_checkpoint: Any) -> None:
    """The last test, as starting TensorFlow again takes seconds."""
    before = dict(open_checkpoint)
    prefix = copy_of(SMALL, tmp_path)
    forge_index(prefix, TABLE, TABLE.replace(b"\x08\x01", b"\x00\x01", 1))  # a field of number 0
    assert "TensorFlow stopped while reading it (signal 6)" in message_of_reading(prefix)
    # another checkpoint that was open all the time
    assert all(torch.equal(open_checkpoint[name], values) for name, values in before.items())


@needs_tensorflow
@pytest.mark.slow
def test_the_process_ends_with_the_last_checkpoint() -> None:
    """In an interpreter of its own, since the tests here keep a checkpoint open."""
    script = (
        "import gc, sys\n"
        "from hf_txl.conversion.read_tensorflow import read_checkpoint\n"
        "first, second = read_checkpoint(sys.argv[1]), read_checkpoint(sys.argv[1])\n"
        "process = first.process.process\n"
        "assert second.process is first.process\n"
        "del first\n"
        "gc.collect()\n"
        "assert process.poll() is None\n"
        "del second\n"
        "gc.collect()\n"
        "assert process.poll() is not None\n"
    )
    subprocess.run([sys.executable, "-c", script, str(SMALL)], check=True)
    gc.collect()


@needs_tensorflow
@pytest.mark.slow
def test_checkpoints_of_one_file_are_read(tmp_path: Path) -> None:
    """As TensorFlow wrote before 0.12; its own writer makes one."""
    script = (
        "import sys\n"
        "import tensorflow.compat.v1 as tf\n"
        "with tf.Graph().as_default(), tf.Session() as session:\n"
        "    tf.get_variable('a', initializer=tf.reshape(tf.range(6.0), [2, 3]))\n"
        "    tf.get_variable('text', initializer=tf.constant('x'))\n"
        "    session.run(tf.global_variables_initializer())\n"
        "    tf.train.Saver(write_version=tf.train.SaverDef.V1).save(session, sys.argv[1], write_meta_graph=False)\n"
    )
    prefix = tmp_path / "model.ckpt"
    subprocess.run([sys.executable, "-c", script, str(prefix)], check=True, capture_output=True)
    for path in (prefix, tmp_path):
        checkpoint = read_checkpoint(path)
        assert list(checkpoint) == ["a"] and checkpoint["a"].tolist() == [[0, 1, 2], [3, 4, 5]]

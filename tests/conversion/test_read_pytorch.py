"""Reading PyTorch files without executing them: every recorded checkpoint, every kind of file and instruction."""

from __future__ import annotations

import argparse
import collections
import json
import pickle
import pickletools
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hf_txl.conversion import restricted_pickle
from hf_txl.conversion.read_pytorch import StoredObject, module_tensors, read_file
from tests.helpers import FIXTURES

from .hostile import MAGIC, name, pack_sequence, storage_id, tensor_archive, tensor_program, value

ORIGINAL = FIXTURES / "pytorch_original"
NVIDIA = FIXTURES / "nvidia"
CHECKPOINTS = sorted([*ORIGINAL.glob("*/*.pt"), *NVIDIA.glob("*/*.pt")])


def named(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint, whichever of the three forms it has."""
    stored = read_file(path)
    if isinstance(stored, StoredObject):
        return module_tensors(stored)
    return stored["model_state"] if "model_state" in stored else stored


@pytest.mark.parametrize("path", CHECKPOINTS, ids=named)
def test_weights_equal_those_that_torch_read(path: Path) -> None:
    """Names, types and values, and which names share one tensor."""
    tensors = {key.removeprefix("module."): tensor for key, tensor in tensors_of(path).items()}
    with safe_open(path.parent / "weights.safetensors", "pt") as weights:
        expected = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
        aliases = json.loads((weights.metadata() or {}).get("aliases", "{}"))
    assert tensors.keys() == {*expected, *aliases}
    for key, tensor in expected.items():
        assert tensors[key].dtype == tensor.dtype and torch.equal(tensors[key], tensor), key
        assert not tensors[key].requires_grad and tensors[key].device.type == "cpu"
    for alias, key in aliases.items():
        assert tensors[alias].data_ptr() == tensors[key].data_ptr(), alias
    assert len({tensors[key].data_ptr() for key in expected}) == len(expected)


def test_the_prefix_of_a_wrapper_stays_in_the_names() -> None:
    names = read_file(ORIGINAL / "xl-wt103-large" / "state_dict_module_prefix.pt")
    assert names and all(key.startswith("module.") for key in names)


@pytest.mark.parametrize("path", sorted((FIXTURES / "hf_legacy").glob("*/pytorch_model.bin")), ids=named)
def test_state_dicts_of_transformers_equal_torch_own_reading(path: Path) -> None:
    """These files hold nothing that torch's restricted reader refuses, so it is the reference."""
    expected = torch.load(path, map_location="cpu", weights_only=True)
    actual = read_file(path)
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor)
    shared = [[a for a in actual if actual[a].data_ptr() == actual[b].data_ptr()] for b in actual]
    assert shared == [[a for a in expected if expected[a].data_ptr() == expected[b].data_ptr()] for b in expected]


def test_settings_of_a_pickled_module_can_be_read() -> None:
    stored = read_file(ORIGINAL / "xl-odd-sizes" / "model.pt")
    assert stored.class_path == "mem_transformer.MemTransformerLM" and stored.arguments == ()
    constructor = json.loads((ORIGINAL / "xl-odd-sizes" / "case.json").read_text())["constructor"]
    for setting in ("n_token", "n_layer", "n_head", "d_model", "d_head", "attn_type", "clamp_len", "same_length"):
        assert stored.state[setting] == constructor[setting]
    assert stored.state["_modules"]["crit"].class_path == "proj_adaptive_softmax.ProjectedAdaptiveLogSoftmax"


def test_settings_of_an_nvidia_checkpoint_can_be_read() -> None:
    stored = read_file(NVIDIA / "nv-div4" / "checkpoint_last.pt")
    assert stored["args"].class_path == "argparse.Namespace" and stored["args"].state["n_token"] > 0
    assert stored["model_config"]["cutoffs"] == [20, 50, 80]
    assert stored["vocab"].class_path == "utils.vocabulary.Vocab"
    assert (
        stored["vocab"].state["idx2sym"][: len(stored["vocab"].state["special"])] == stored["vocab"].state["special"]
    )
    assert all(states.dtype == torch.uint8 for states in stored["rng_states"])


class Inner(nn.Module):
    __module__, __qualname__ = "mem_transformer", "AdaptiveEmbedding"  # what the file will say

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.register_parameter("nothing", None)
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("not_kept", torch.arange(4), persistent=False)
        self.register_buffer("no_buffer", None)
        self.untracked = torch.ones(2)


class Outer(nn.Module):
    __module__, __qualname__ = "mem_transformer", "MemTransformerLM"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.second.weight = self.first.weight
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(1))])
        self.none = None
        self.register_module("missing", None)
        self.head = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.LayerNorm(3))


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "sequence"])
def test_module_tensors_are_the_state_dict(zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent parameters and buffers, unsaved buffers, lists and a wrapper, in the order of `state_dict`."""
    module = nn.DataParallel(Outer())
    path = tmp_path / "model.pt"
    # a pickler looks its classes up
    stand_in = argparse.Namespace(AdaptiveEmbedding=Inner, MemTransformerLM=Outer)
    monkeypatch.setitem(sys.modules, "mem_transformer", stand_in)  # type: ignore[arg-type]
    torch.save(module, path, _use_new_zipfile_serialization=zipped)
    monkeypatch.delitem(sys.modules, "mem_transformer")
    actual, expected = module_tensors(read_file(path)), module.state_dict()
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert actual["module.first.weight"].data_ptr() == actual["module.second.weight"].data_ptr()


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def shared_tensors() -> dict[str, Tensor]:
    """Views of every form over one storage, an empty one, a number, and all types."""
    base = torch.arange(60).reshape(3, 4, 5).float()
    tensors = {str(dtype): torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in DTYPES}
    return tensors | {
        "base": base,
        "transposed": base.transpose(0, 2),
        "row": base[1, 2],
        "steps": base[::2, 1::2, ::3],
        "number": base[2, 3, 4],
        "expanded": base[:1, :1].expand(2, 3, 5),
        "empty": torch.empty(0, 7),
        "no_rows": base[:0],
        "parameter": nn.Parameter(base[0]),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "sequence"])
def test_every_form_of_tensor_is_read(zipped: bool, protocol: int, tmp_path: Path) -> None:
    expected = shared_tensors()
    path = tmp_path / "tensors.pt"
    torch.save(expected, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    actual = read_file(path)
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor), key
        assert actual[key].stride() == tensor.stride() and actual[key].storage_offset() == tensor.storage_offset()
        assert not actual[key].requires_grad
    for key in ("transposed", "row", "steps", "number", "expanded", "parameter"):
        assert actual[key].untyped_storage().data_ptr() == actual["base"].untyped_storage().data_ptr(), key


@pytest.mark.parametrize("zipped", [True, False], ids=["archive", "sequence"])
def test_writing_to_a_tensor_changes_no_file_and_no_second_reading(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "tensors.pt"
    torch.save({"a": torch.zeros(5000), "b": torch.zeros(3)}, path, _use_new_zipfile_serialization=zipped)
    before = path.read_bytes()
    path.chmod(0o444)
    first, second = read_file(path), read_file(path)
    first["a"].add_(1)
    assert first["a"].sum() == 5000 and second["a"].sum() == 0
    assert path.read_bytes() == before


def test_tensors_outlive_the_name_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "tensors.pt"
    torch.save(torch.arange(1000), path)
    tensor = read_file(path)
    path.unlink()
    assert torch.equal(tensor, torch.arange(1000))


def test_values_that_begin_between_two_elements_are_read(tmp_path: Path) -> None:
    """In files before 1.6 the storages stand wherever the pickles end."""
    expected = torch.arange(4).float()
    for filler in range(8):
        program = b"\x80\x02" + value("x" * filler) + b"0" + tensor_program((4,), (1,))[2:]
        path = tmp_path / f"{filler}.pt"
        path.write_bytes(pack_sequence(program, struct.pack("<q4f", 4, *range(4)), ["0"]))
        assert torch.equal(read_file(path), expected)


def test_archives_without_checksums_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.serialization.set_crc32_options(False)` writes 0 for each."""
    path = tmp_path / "tensors.pt"
    computed = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(7), path)
    finally:
        torch.serialization.set_crc32_options(computed)
    assert torch.equal(read_file(path), torch.arange(7))


def test_a_part_of_a_storage_is_that_part(tmp_path: Path) -> None:
    """The first releases stored a slice of a storage with its place in the whole."""
    whole = storage_id(name("torch.FloatStorage"), numel=4)
    part = whole.removesuffix(b"t") + value(("1", 1, 3)) + b"t"
    tail = value(1) + value((2,)) + value((1,)) + b"tR"
    rebuild = name("torch._utils._rebuild_tensor") + b"("
    program = b"\x80\x02" + rebuild + whole + b"Q" + tail + rebuild + part + b"Q" + tail + b"\x86."
    path = tmp_path / "model.pt"
    path.write_bytes(pack_sequence(program, struct.pack("<q4f", 4, *range(4)), ["0"]))
    first, second = read_file(path)
    assert first.tolist() == [1, 2] and second.tolist() == [2, 3]
    assert second.data_ptr() == first.data_ptr() + 4


def test_the_device_of_a_storage_does_not_matter(tmp_path: Path) -> None:
    program = tensor_program((4,), (1,)).replace(value("cpu"), value("cuda:7"))
    path = tmp_path / "model.pt"
    path.write_bytes(tensor_archive(program, struct.pack("<4f", 1, 2, 3, 4)))
    assert read_file(path).tolist() == [1, 2, 3, 4]


def test_any_folder_name_in_an_archive_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(tensor_archive(tensor_program((4,), (1,))).replace(b"m/data", "é/data".encode()[:1] + b"/data"))
    assert read_file(path).tolist() == [0, 0, 0, 0]


def plain_objects() -> dict[str, Any]:
    return {
        "numbers": [0, 1, -1, 255, 256, 65535, 65536, 2**31 - 1, -(2**31), 2**40, -(2**63), 2**80, 1.5, -0.0, 1e300],
        "special": [True, False, None, float("inf"), float("-inf")],
        "texts": ["", "a", "é", "日本", "🎈", "\\", "\n\t'\"", "x" * 70000, "\ud800"],
        "bytes": [b"", b"\x00\xff", b"y" * 300],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4, 5)],
        "sets": [set(), {1, "a", None}, frozenset(), frozenset({(1, 2), b"c"})],
        "nested": {"a": [{"b": ({},)}], (1, "k"): [], 7: {}, b"bytes": 0, None: 1},
        "many": list(range(2500)),
        "wide": {str(number): number for number in range(2500)},
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_objects_of_every_protocol_are_read(protocol: int, tmp_path: Path) -> None:
    expected = plain_objects()
    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps(expected, protocol))
    actual = read_file(path)
    assert actual == expected
    assert repr(actual["numbers"]) == repr(expected["numbers"])  # 1, 1.0 and True are equal
    assert [list(map(type, items)) for items in actual.values()] == [
        list(map(type, items)) for items in expected.values()
    ]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_python_writer_without_the_c_accelerator_is_read(protocol: int, tmp_path: Path) -> None:
    """It writes other instructions for the same objects."""
    path = tmp_path / "plain.pkl"
    with open(path, "wb") as file:
        pickle._Pickler(file, protocol).dump(plain_objects())  # type: ignore[attr-defined]
    assert read_file(path) == plain_objects()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_dictionaries_of_every_kind_become_plain_ones(protocol: int, tmp_path: Path) -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", 2)])
    counter = collections.Counter("abracadabra")
    default = collections.defaultdict(list, {"x": [1]})
    path = tmp_path / "dictionaries.pkl"
    path.write_bytes(pickle.dumps([ordered, counter, default], protocol))
    actual = read_file(path)
    assert actual == [dict(ordered), dict(counter), dict(default)]
    assert [type(items) for items in actual] == [dict] * 3
    assert list(actual[0]) == ["b", "a"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_object_of_a_listed_class_is_a_record(protocol: int, tmp_path: Path) -> None:
    namespace = argparse.Namespace(data="/data", cutoffs=[1, 2], pattern=re.compile("a+", re.IGNORECASE))
    namespace.itself = namespace
    path = tmp_path / "args.pkl"
    path.write_bytes(pickle.dumps([namespace, namespace], protocol))
    actual, again = read_file(path)
    assert actual is again and type(actual) is StoredObject
    assert actual.class_path == "argparse.Namespace" and actual.state["itself"] is actual
    assert actual.state["data"] == "/data" and actual.state["cutoffs"] == [1, 2]
    pattern = actual.state["pattern"]
    assert pattern.class_path == "re._compile" and pattern.arguments == ("a+", re.compile("a+", re.I).flags)
    assert repr(actual) == "StoredObject(class_path='argparse.Namespace')"


@pytest.mark.parametrize(
    "path",
    [
        *("mem_transformer.MemTransformerLM", "pytorch.mem_transformer.MemTransformerLM", "__main__.MemTransformerLM"),
        *("vocabulary.Vocab", "utils.vocabulary.Vocab", "transformer_xl.utils.vocabulary.Vocab"),
        *("data_utils.Corpus", "__main__.Corpus", "a.b.c.data_utils.Corpus"),
        *("utils.data_parallel.BalancedDataParallel", "torch.nn.parallel.data_parallel.DataParallel"),
        *(
            "torch.nn.parallel.distributed.DistributedDataParallel",
            "apex.parallel.distributed.DistributedDataParallel",
        ),
        *(
            "transformers.models.transfo_xl.tokenization_transfo_xl.TransfoXLTokenizer",
            "sacremoses.tokenize.MosesTokenizer",
        ),
    ],
)
def test_classes_are_listed_wherever_their_code_lay(path: str, tmp_path: Path) -> None:
    file = tmp_path / "object.pkl"
    file.write_bytes(b"\x80\x02" + name(path) + b")\x81" + value({"a": 1}) + b"b.")
    stored = read_file(file)
    assert stored.class_path == path and stored.state == {"a": 1}


def test_slots_are_attributes_too(tmp_path: Path) -> None:
    file = tmp_path / "object.pkl"
    file.write_bytes(b"\x80\x02" + name("argparse.Namespace") + b")\x81" + value(({"a": 1}, {"b": 2})) + b"b.")
    assert read_file(file).state == {"a": 1, "b": 2}


def test_texts_of_python_2_are_read(tmp_path: Path) -> None:
    """Byte strings, printed in quotes or with their length: UTF-8 where they are, else one character per byte."""
    path = tmp_path / "old.pkl"
    path.write_bytes(
        b"(d"
        + rb"S'caf\xc3\xa9'" + b"\nI0\ns"
        + rb"""S"it's" """.rstrip() + b"\nL1L\ns"
        + rb"S'latin'" + b"\n" + rb"S'\xe9\n\t\\'" + b"\ns"
        + b"U\x05shortU\x02\xc3\xa9s"
        + b"T\x04\x00\x00\x00longU\x01\xffs."
    )  # fmt: skip
    assert read_file(path) == {"café": 0, "it's": 1, "latin": "é\n\t\\", "short": "é", "long": "ÿ"}


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        (b"ccollections\nOrderedDict\np0\n((lp1\n(lp2\nS'b'\naI1\naa(lp3\nS'a'\naI2\naatRp4\n.", {"b": 1, "a": 2}),
        (b"ccollections\nCounter\n((dS'a'\nI2\nstR.", {"a": 2}),
        (b"c__builtin__\nset\n((lI1\naI2\natR.", {1, 2}),
    ],
    ids=["ordered", "counter", "set"],
)
def test_containers_of_python_2_are_read(instructions: bytes, expected: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.pkl"
    path.write_bytes(instructions)
    assert read_file(path) == expected


@pytest.mark.parametrize(
    "instructions",
    [
        b"(iutils.vocabulary\nVocab\n(dS'a'\nI1\nsb.",
        b"\x80\x02(cutils.vocabulary\nVocab\no}U\x01aK\x01sb.",
        b"ccopy_reg\n_reconstructor\n(cutils.vocabulary\nVocab\nc__builtin__\nobject\nNtR(dS'a'\nI1\nsb.",
    ],
    ids=["old class, protocol 0", "old class, protocol 2", "new class, protocol 0"],
)
def test_objects_of_python_2_are_read(instructions: bytes, tmp_path: Path) -> None:
    path = tmp_path / "old.pkl"
    path.write_bytes(instructions)
    stored = read_file(path)
    assert stored.class_path == "utils.vocabulary.Vocab" and stored.state == {"a": 1}


def test_every_instruction_of_the_language_is_known() -> None:
    """The standard library's list is the reference; what it has later must be looked at, not ignored."""
    known = {*restricted_pickle.VALUES, *restricted_pickle.ACTIONS, restricted_pickle.STOP}
    assert known == {ord(instruction.code) for instruction in pickletools.opcodes}


def test_a_pickle_that_holds_a_magic_number_is_no_torch_file(tmp_path: Path) -> None:
    path = tmp_path / "number.pkl"
    path.write_bytes(pickle.dumps([0x1950A86A20F9469CFC6C], 2))
    assert read_file(path) == [0x1950A86A20F9469CFC6C]
    assert pickle.loads(MAGIC) == 0x1950A86A20F9469CFC6C

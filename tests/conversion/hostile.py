"""Makes files that would do harm: pickles that call something, archives that unpack to much, numbers that do not fit.

`PROGRAMS` holds pickle programs, without the STOP at their end, each with a name that a refusal must give. Many of
them would create the file `sentinel` if a real unpickler ran them. `WRAPPERS` puts a program into each kind of file,
by itself and behind the contents of a real checkpoint. `DAMAGED` holds whole files that name nothing forbidden but are
not right. All of it is put together from bytes; nothing here runs any of it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tests.helpers import FIXTURES

Program = Callable[[Path], bytes]

SEQUENCE_FILE = FIXTURES / "hf_legacy" / "legacy-wt103" / "pytorch_model.bin"
ARCHIVE_FILE = FIXTURES / "hf_legacy" / "legacy-div1" / "pytorch_model.bin"
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def value(thing: Any) -> bytes:
    """Instructions that put a plain value on the stack and use no memo."""
    return pickletools.optimize(pickle.dumps(thing, 2))[2:-1]


def name(path: str, attribute: str | None = None) -> bytes:
    """`GLOBAL`: `module.name`, or a module and an attribute that may have dots."""
    module, _, last = path.rpartition(".")
    return f"c{module}\n{last}\n".encode() if attribute is None else f"c{path}\n{attribute}\n".encode()


def stacked_name(module: str, attribute: str) -> bytes:
    """The same as protocol 4 writes it."""
    return value(module) + value(attribute) + b"\x93"


def arguments(*pieces: bytes) -> bytes:
    return b"(" + b"".join(pieces) + b"t"


def call(path: str, *values: Any) -> bytes:
    return name(path) + arguments(*map(value, values)) + b"R"


def touch(sentinel: Path) -> str:
    return f"open({str(sentinel)!r}, 'w').close()"


def storage_id(kind: bytes, key: str = "0", numel: int = 1) -> bytes:
    return arguments(value("storage"), kind, value(key), value("cpu"), value(numel))


PROGRAMS: dict[str, tuple[Program, str]] = {
    # files, processes, sockets
    "open": (lambda s: call("builtins.open", str(s), "w"), "builtins.open"),
    "io_open": (lambda s: call("io.open", str(s), "w"), "io.open"),
    "os_open": (lambda s: call("os.open", str(s), 0o101), "os.open"),
    "os_mkdir": (lambda s: call("os.mkdir", str(s)), "os.mkdir"),
    "os_system": (lambda s: call("os.system", f"touch {s}"), "os.system"),
    "posix_system": (lambda s: call("posix.system", f"touch {s}"), "posix.system"),
    "windows_system": (lambda s: call("nt.system", f"type nul > {s}"), "nt.system"),
    "subprocess_run": (lambda s: call("subprocess.run", ["touch", str(s)]), "subprocess.run"),
    "subprocess_popen_as_class": (
        lambda s: name("subprocess.Popen") + arguments(value(["touch", str(s)])) + b"\x81",
        "subprocess.Popen",
    ),
    "pty_spawn": (lambda s: call("pty.spawn", ["touch", str(s)]), "pty.spawn"),
    "socket": (lambda s: call("socket.create_connection", ("127.0.0.1", 9)), "socket.create_connection"),
    "url": (lambda s: call("urllib.request.urlopen", "http://127.0.0.1:9/"), "urllib.request.urlopen"),
    "browser": (lambda s: call("webbrowser.open", "http://127.0.0.1:9/"), "webbrowser.open"),
    "log_file": (lambda s: call("logging.FileHandler", str(s)), "logging.FileHandler"),
    "remove_folder": (lambda s: call("shutil.rmtree", str(s.parent / "nothing")), "shutil.rmtree"),
    "path_method": (
        lambda s: name("pathlib", "Path.touch") + arguments(call("pathlib.PosixPath", str(s))) + b"R",
        "pathlib.Path.touch",
    ),
    "library": (lambda s: call("ctypes.CDLL", str(s)), "ctypes.CDLL"),
    # code
    "eval": (lambda s: call("builtins.eval", touch(s)), "builtins.eval"),
    "exec": (lambda s: call("builtins.exec", touch(s)), "builtins.exec"),
    "python2_eval": (lambda s: call("__builtin__.eval", touch(s)), "builtins.eval"),
    "compile": (lambda s: call("builtins.compile", touch(s), "x", "exec"), "builtins.compile"),
    "import": (lambda s: call("builtins.__import__", "antigravity"), "builtins.__import__"),
    "import_module": (lambda s: call("importlib.import_module", "this"), "importlib.import_module"),
    "import_by_name_alone": (lambda s: name("antigravity.fly") + b"0" + value(1), "antigravity.fly"),
    "run_path": (lambda s: call("runpy.run_path", str(s)), "runpy.run_path"),
    "run_code": (lambda s: call("runpy._run_code", touch(s), {}), "runpy._run_code"),
    "timeit": (lambda s: call("timeit.timeit", touch(s)), "timeit.timeit"),
    "profile": (lambda s: call("cProfile.run", touch(s)), "cProfile.run"),
    "debugger": (lambda s: call("pdb.run", touch(s)), "pdb.run"),
    "interpreter": (lambda s: call("code.interact"), "code.interact"),
    "marshal": (lambda s: call("marshal.loads", "c"), "marshal.loads"),
    "function": (lambda s: call("types.FunctionType", 0, {}), "types.FunctionType"),
    # ways to reach something else
    "getattr_chain": (
        lambda s: (
            name("builtins.getattr")
            + arguments(call("builtins.__import__", "os"), value("system"))
            + b"R"
            + arguments(value(f"touch {s}"))
            + b"R"
        ),
        "builtins.getattr",
    ),
    "attrgetter": (lambda s: call("operator.attrgetter", "system"), "operator.attrgetter"),
    "methodcaller": (lambda s: call("operator.methodcaller", "touch"), "operator.methodcaller"),
    "partial_with_state": (
        lambda s: (
            name("functools.partial")
            + arguments(name("os.system"))
            + b"R"
            + arguments(name("os.system"), arguments(value(f"touch {s}")), b"}", b"N")
            + b"b)R"
        ),
        "functools.partial",
    ),
    "reduce": (lambda s: name("functools.reduce") + arguments(name("os.system"), value([1, 2])) + b"R", "os.system"),
    "map": (
        lambda s: name("builtins.list") + arguments(name("builtins.map") + arguments(name("os.system")) + b"R") + b"R",
        "builtins.map",
    ),
    "nested_pickle": (lambda s: call("pickle.loads", "N."), "pickle.loads"),
    "c_pickle": (lambda s: call("_pickle.loads", "N."), "_pickle.loads"),
    "inst": (lambda s: b"(" + value(f"touch {s}") + b"ios\nsystem\n", "os.system"),
    "obj": (lambda s: b"(" + name("os.system") + value(f"touch {s}") + b"o", "os.system"),
    "newobj_ex": (lambda s: name("os.system") + arguments(value(f"touch {s}")) + b"}\x92", "os.system"),
    "stack_global": (
        lambda s: stacked_name("os", "system") + arguments(value(f"touch {s}")) + b"R",
        "os.system",
    ),
    "stack_global_from_memo": (
        lambda s: (
            value("system")
            + b"r\xff\xff\xff\x7f0"
            + value("os")
            + b"p99\n0"
            + value("collections")
            + b"0"
            # what lies in the memo last was neither pushed last nor in this order
            + b"g99\nj\xff\xff\xff\x7f\x93"
            + arguments(value(f"touch {s}"))
            + b"R"
        ),
        "os.system",
    ),
    "stack_global_among_others": (
        lambda s: value("os") + value("system") + value("Counter") + b"0" + b"\x93" + arguments(value("true")) + b"R",
        "os.system",
    ),
    "escaped_text": (lambda s: b"V\\u006fs\nVsyst\\u0065m\n\x93" + arguments(value("true")) + b"R", "os.system"),
    "python2_text": (lambda s: b"S'\\x6fs'\nU\x06system\x93" + arguments(value("true")) + b"R", "os.system"),
    "name_replaced_in_memo": (
        lambda s: name("collections.Counter") + b"q\x070" + name("os.system") + b"q\x070h\x07" + arguments() + b"R",
        "os.system",
    ),
    "extension_1": (lambda s: b"\x82\x07)R", "copyreg.extension 7"),
    "extension_2": (lambda s: b"\x83\x07\x01)R", "copyreg.extension 263"),
    "extension_4": (lambda s: b"\x84\x07\x00\x00\x01)R", "copyreg.extension 16777223"),
    "add_extension": (lambda s: call("copyreg.add_extension", "os", "system", 7), "copyreg.add_extension"),
    "copyreg_newobj": (
        lambda s: name("copyreg.__newobj__") + arguments(name("subprocess.Popen"), value("true")) + b"R",
        "copyreg.__newobj__",
    ),
    "old_object_of_a_real_class": (
        lambda s: (
            name("copy_reg._reconstructor")
            + arguments(name("subprocess.Popen"), name("__builtin__.object"), b"N")
            + b"R}b"
        ),
        "subprocess.Popen",
    ),
    "default_factory": (
        lambda s: name("collections.defaultdict") + arguments(name("os.getcwd")) + b"R",
        "os.getcwd",
    ),
    "state_of_a_real_class": (
        lambda s: name("zipfile.ZipFile") + b")\x81" + value({"fp": None}) + b"b",
        "zipfile.ZipFile",
    ),
    "slots": (lambda s: name("uuid.UUID") + b")\x81" + arguments(b"N", value({"int": 1})) + b"b", "uuid.UUID"),
    # torch and its neighbours
    "torch_load": (lambda s: call("torch.load", str(s)), "torch.load"),
    "torch_serialization": (lambda s: call("torch.serialization.load", str(s)), "torch.serialization.load"),
    "torch_storage": (lambda s: call("torch.storage._load_from_bytes", "N."), "torch.storage._load_from_bytes"),
    "torch_hub": (lambda s: call("torch.hub.load", "a/b", "c"), "torch.hub.load"),
    "torch_jit": (lambda s: call("torch.jit.load", str(s)), "torch.jit.load"),
    "torch_extension": (lambda s: call("torch.utils.cpp_extension.load", "x", []), "torch.utils.cpp_extension.load"),
    "torch_dotted_import": (lambda s: call("torch._utils._import_dotted_name", "os.system"), "_import_dotted_name"),
    "torch_subclass": (
        lambda s: name("torch._utils._rebuild_from_type_v2") + arguments(name("os.system")) + b"R",
        "torch._utils._rebuild_from_type_v2",
    ),
    "torch_os": (lambda s: stacked_name("torch", "os.system") + arguments(value("true")) + b"R", "torch.os.system"),
    "numpy_load": (lambda s: call("numpy.load", str(s)), "numpy.load"),
    "numpy_testing": (lambda s: call("numpy.testing._private.utils.runstring", touch(s), {}), "runstring"),
    "joblib": (lambda s: call("joblib.load", str(s)), "joblib.load"),
    "dill": (lambda s: call("dill._dill._create_function"), "dill._dill._create_function"),
    # names that resemble the listed ones
    "attribute_of_a_listed_file": (
        lambda s: name("mem_transformer", "os.system") + b"0N",
        "mem_transformer.os.system",
    ),
    "module_in_a_listed_file": (lambda s: name("mem_transformer.os", "system") + b"0N", "mem_transformer.os.system"),
    "package_before_another_class": (
        lambda s: name("vocabulary.mem_transformer.Vocab") + b"0N",
        "mem_transformer.Vocab",
    ),
    "special_package": (lambda s: name("torch.nn.modules.__init__.os") + b"0N", "torch.nn.modules.__init__.os"),
    "special_prefix": (
        lambda s: name("__builtins__.mem_transformer.MemTransformerLM") + b"0N",
        "__builtins__.mem_transformer",
    ),
    "globals_of_a_listed_class": (
        lambda s: stacked_name("torch.nn.modules.linear", "Linear.__init__.__globals__") + b"0N",
        "torch.nn.modules.linear.Linear.__init__.__globals__",
    ),
    "listed_class_with_a_dot": (lambda s: stacked_name("torch.nn.modules", "linear.Linear") + b"0N", "linear.Linear"),
    "method_of_a_listed_class": (
        lambda s: name("collections", "Counter.update") + b"0N",
        "collections.Counter.update",
    ),
    "main": (lambda s: name("__main__.main") + b")R", "__main__.main"),
    "unlisted_class_of_a_listed_file": (
        lambda s: name("data_utils.get_lm_corpus") + b"0N",
        "data_utils.get_lm_corpus",
    ),
    "storage_type": (lambda s: storage_id(name("os.system")) + b"Q", "os.system"),
    "module_source": (
        lambda s: arguments(value("module"), name("os.system"), value("x.py"), value("pass")) + b"Q",
        "os.system",
    ),
    "hook_of_a_parameter": (
        lambda s: (
            name("torch._utils._rebuild_parameter")
            + arguments(b"N", b"\x88", name("collections.OrderedDict") + b")R" + value(0) + name("os.system") + b"s")
            + b"R"
        ),
        "os.system",
    ),
    "name_with_control_codes": (lambda s: stacked_name("os\x1b[2J\n", "system\r" * 99) + b"0N", "os\\x1b[2J\\x0a.sys"),
}


def pack_archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return buffer.getvalue()


def pack_sequence(program: bytes, storages: bytes = b"", keys: Any = ()) -> bytes:
    """A file of torch before 1.6."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    plain = [pickle.dumps(part, 2) for part in (1001, system)]
    return b"".join([MAGIC, *plain, program, pickle.dumps(list(keys), 2), storages])


@cache
def good_archive() -> dict[str, bytes]:
    with zipfile.ZipFile(ARCHIVE_FILE) as archive:
        return {entry: archive.read(entry) for entry in archive.namelist()}


@cache
def good_sequence() -> tuple[bytes, bytes, bytes]:
    """What stands before the object's pickle in a real file, the pickle, and what stands behind it."""
    stream = io.BytesIO(SEQUENCE_FILE.read_bytes())
    ends = []
    for _ in range(4):
        for _ in pickletools.genops(stream):
            pass
        ends.append(stream.tell())
    data = stream.getvalue()
    return data[: ends[2]], data[ends[2] : ends[3]], data[ends[3] :]


def hide_in_archive(program: bytes) -> bytes:
    entries = dict(good_archive())
    pickled = next(entry for entry in entries if entry.endswith("/data.pkl"))
    entries[pickled] = entries[pickled][:-1] + program + b"0."
    return pack_archive(entries)


def hide_in_sequence(program: bytes) -> bytes:
    before, pickled, behind = good_sequence()
    return before + pickled[:-1] + program + b"0." + behind


# a program as a file of its own, and behind the contents of a real checkpoint
WRAPPERS: dict[str, Callable[[bytes], bytes]] = {
    "pickle": lambda program: b"\x80\x02" + program + b".",
    "archive": lambda program: pack_archive({"model/data.pkl": b"\x80\x02" + program + b".", "model/version": b"3\n"}),
    "sequence": lambda program: pack_sequence(b"\x80\x02" + program + b"."),
    "behind_a_vocabulary": lambda program: (
        b"\x80\x04" + value({"sym2idx": {"the": 0}, "idx2sym": ["the"]}) + program + b"0."
    ),
    "behind_an_archive": hide_in_archive,
    "behind_a_sequence": hide_in_sequence,
}


def tensor_program(
    sizes: Any, strides: Any, offset: Any = 0, numel: Any = 4, kind: str = "torch.FloatStorage", key: str = "0"
) -> bytes:
    """A pickle of one tensor."""
    pieces = (storage_id(name(kind), key, numel) + b"Q", value(offset), value(sizes), value(strides), b"\x89", b"}")
    return b"\x80\x02" + name("torch._utils._rebuild_tensor_v2") + arguments(*pieces) + b"R."


def tensor_archive(program: bytes, storage: bytes = bytes(16), **others: bytes) -> bytes:
    return pack_archive({"m/data.pkl": program, "m/data/0": storage, **others})


def packed_bomb() -> bytes:
    """Forty megabytes of zeros, packed into forty kilobytes."""
    numel = 10 * 2**20
    return pack_archive(
        {"m/data.pkl": tensor_program((numel,), (1,), numel=numel), "m/data/0": bytes(4 * numel)}, zipfile.ZIP_DEFLATED
    )


def change_directory(archive: bytes, offset: int, replacement: bytes) -> bytes:
    """The archive with bytes of its directory's last entry replaced."""
    start = archive.rindex(b"PK\x01\x02") + offset
    return archive[:start] + replacement + archive[start + len(replacement) :]


def two_entries_of_one_name() -> bytes:
    archive = pack_archive({"m/data.pkl": tensor_program((4,), (1,)), "m/data/0": bytes(16), "m/data/1": bytes(16)})
    return archive.replace(b"m/data/1", b"m/data/0")


def overlapping_entries() -> bytes:
    """Two names for the same bytes, as bombs do that do without compression."""
    archive = pack_archive({"m/data.pkl": b"N.", "m/data/0": bytes(16), "m/data/1": bytes(16)})
    first = archive.index(b"PK\x03\x04", 10)
    return change_directory(archive, 42, struct.pack("<I", first))


def nested(innermost: bytes, wrap: bytes, depth: int = 20_000) -> bytes:
    """A pickle of containers in containers, deeper than Python's own stack."""
    return b"\x80\x02" + innermost + wrap * depth + b"."


def nested_tuples_as_key() -> bytes:
    """The hash of a tuple visits its members: a hundred levels with both members the same take 2**100 steps."""
    return b"\x80\x02}(K\x01K\x02\x86" + b"2\x86" * 100 + b"K\x01u."


GOOD_TENSOR = tensor_program((4,), (1,))
EMPTY_LIST = pickle.dumps([], 2)

# file contents, and a word of the message that they must give
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"Not a pickle at all.\n", "no valid pickle"),
    "web_page": (lambda: b"<!DOCTYPE html><html></html>", "web page"),
    "lfs_pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "compressed": (lambda: b"\x1f\x8b\x08\x00aaaa", "gzip"),
    "hdf5": (lambda: b"\x89HDF\r\n\x1a\n", "HDF5"),
    "old_tar": (lambda: bytes(257) + b"ustar" + bytes(250), "tar archive"),
    "only_a_protocol": (lambda: b"\x80\x02", "ends early"),
    "future_protocol": (lambda: b"\x80\x09N.", "protocol 9"),
    "nothing_on_the_stack": (lambda: b"\x80\x02.", "an empty stack"),
    "too_much_on_the_stack": (lambda: b"\x80\x02NN.", "leaves"),
    "no_mark": (lambda: b"\x80\x02t.", "an empty stack"),
    "open_mark": (lambda: b"\x80\x02(N.", "leaves"),
    "second_pickle": (lambda: b"\x80\x02N." + call("os.system", "true") + b".", "after its end"),
    "unknown_memo": (lambda: b"\x80\x02j\xff\xff\xff\x7f.", "before there is one"),
    "long_text": (lambda: b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.", "ends early"),
    "long_bytes": (lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**63 + 1) + b"a.", "ends early"),
    "long_bytearray": (lambda: b"\x80\x05\x96" + struct.pack("<Q", 2**64 - 1) + b"a.", "ends early"),
    "long_text_of_protocol_1": (lambda: b"X\xff\xff\xff\x7fa.", "ends early"),
    "long_number": (lambda: b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b"1.", "ends early"),
    "number_of_a_megabyte": (lambda: b"\x80\x02\x8b" + struct.pack("<I", 2**20) + b"1" * 2**20 + b".", "number"),
    "decimals_without_end": (lambda: b"L" + b"9" * 2**20 + b"L\n.", "number"),
    "float_of_letters": (lambda: b"Fopen\n.", "number"),
    "string_without_quotes": (lambda: b"Sos\n.", "quotes"),
    "named_character": (lambda: b"S'\\N{BULLET}'\n.", "escape"),
    "long_frame": (lambda: b"\x80\x04\x95" + struct.pack("<Q", 2**62), "ends early"),
    "text_that_is_no_text": (lambda: b"\x80\x02X\x01\x00\x00\x00\xff.", "utf"),
    "deep_marks": (lambda: b"\x80\x02" + b"(" * 20_000 + b".", "an empty stack"),
    "key_that_is_a_list": (lambda: b"\x80\x02}]K\x01s.", "key"),
    "key_without_end": (nested_tuples_as_key, "key"),
    "member_without_end": (lambda: b"\x80\x04\x8f(K\x01K\x02\x86" + b"2\x86" * 100 + b"\x90.", "key"),
    "key_without_value": (lambda: b"\x80\x02}(K\x01u.", "keys"),
    "item_of_a_number": (lambda: b"\x80\x02K\x01K\x02a.", "appends"),
    "call_of_a_text": (lambda: b"\x80\x02X\x01\x00\x00\x00a)R.", "calls"),
    "call_of_a_base": (lambda: b"\x80\x02" + name("builtins.object") + b")R.", "calls"),
    "state_of_a_number": (lambda: b"\x80\x02K\x01}b.", "attributes"),
    "state_that_is_a_text": (lambda: b"\x80\x02" + name("argparse.Namespace") + b")\x81K\x01b.", "state"),
    "keywords": (lambda: b"\x80\x04" + name("argparse.Namespace") + b")" + value({"a": 1}) + b"\x92.", "keywords"),
    "too_many_arguments": (lambda: b"\x80\x02" + call("collections.OrderedDict", 1, 2, 3) + b".", "3 arguments"),
    "encoding_of_another_kind": (lambda: b"\x80\x02" + call("_codecs.encode", "a", "rot13") + b".", "encodes"),
    "reference_by_text": (lambda: b"Pstorage\n.", "line of text"),
    "data_elsewhere": (lambda: b"\x80\x05\x97.", "outside the file"),
    "storage_of_a_pickle": (lambda: GOOD_TENSOR, "plain pickle"),
    # tensors
    "end_beyond_the_storage": (lambda: tensor_archive(tensor_program((5,), (1,))), "over a storage of 4"),
    "offset_beyond_the_storage": (lambda: tensor_archive(tensor_program((4,), (1,), offset=1)), "over a storage of 4"),
    "stride_beyond_the_storage": (lambda: tensor_archive(tensor_program((2, 2), (3, 1))), "over a storage of 4"),
    "flipped_size": (lambda: tensor_archive(tensor_program((2**30 + 4,), (1,))), "over a storage of 4"),
    "size_of_64_bits": (lambda: tensor_archive(tensor_program((2**62,), (1,))), "not integers"),
    "size_beyond_64_bits": (lambda: tensor_archive(tensor_program((2**70,), (0,))), "not integers"),
    "negative_size": (lambda: tensor_archive(tensor_program((-1,), (1,))), "not integers"),
    "negative_stride": (lambda: tensor_archive(tensor_program((2,), (-1,))), "not integers"),
    "negative_offset": (lambda: tensor_archive(tensor_program((2,), (1,), offset=-2)), "not integers"),
    "repeated_element": (lambda: tensor_archive(tensor_program((10**9,), (0,))), "over a storage of 4"),
    "repeated_rows": (lambda: tensor_archive(tensor_program((0, 2**39, 2**39), (0, 0, 0))), "over a storage of 4"),
    "many_dimensions": (lambda: tensor_archive(tensor_program((1,) * 4096, (1,) * 4096)), "dimensions"),
    "strides_of_another_length": (lambda: tensor_archive(tensor_program((2, 2), (1,))), "sizes and strides"),
    "nested_sizes": (
        lambda: tensor_archive(
            name("torch._utils._rebuild_tensor_v2")
            + arguments(
                storage_id(name("torch.FloatStorage"), "0", 4) + b"Q",
                b"K\x00",
                nested(b")", b"\x85")[2:-1],
                value((1,)),
                b"\x89",
                b"}",
            )
            + b"R."
        ),
        "not integers",
    ),
    "nested_storage": (
        lambda: b"\x80\x02" + arguments(value("storage"), b"N", b"N", b"N", nested(b")", b"\x85")[2:-1]) + b"Q.",
        "unknown type",
    ),
    "metadata_that_is_a_tensor": (
        lambda: tensor_archive(GOOD_TENSOR.removesuffix(b"tR.") + GOOD_TENSOR[2:-1] + b"tR."),
        "conjugated",
    ),
    "size_that_is_a_text": (lambda: tensor_archive(tensor_program("ab", "cd")), "sizes and strides"),
    "tensor_over_a_number": (
        lambda: pack_archive(
            {"m/data.pkl": b"\x80\x02" + call("torch._utils._rebuild_tensor_v2", 1, 0, (1,), (1,)) + b"."}
        ),
        "over int",
    ),
    "storage_of_negative_length": (lambda: tensor_archive(tensor_program((1,), (1,), numel=-4)), "wrong numbers"),
    "storage_of_another_type": (lambda: tensor_archive(tensor_program((1,), (1,), kind="torch.Size")), "unknown type"),
    "storage_in_two_ways": (
        lambda: tensor_archive(
            b"\x80\x02" + b"".join(storage_id(name("torch.FloatStorage"), "0", n) + b"Q" for n in (4, 2)) + b"\x86."
        ),
        "two ways",
    ),
    # archives
    "storage_too_short": (lambda: tensor_archive(GOOD_TENSOR, bytes(15)), "needs 16"),
    "storage_too_long": (lambda: tensor_archive(GOOD_TENSOR, bytes(17)), "needs 16"),
    "storage_of_a_terabyte": (lambda: tensor_archive(tensor_program((4,), (1,), numel=2**38)), "16 bytes"),
    "storage_missing": (lambda: pack_archive({"m/data.pkl": GOOD_TENSOR}), "lacks"),
    "storage_by_a_path": (lambda: tensor_archive(tensor_program((4,), (1,), key="../../../etc/passwd")), "lacks"),
    "path_upwards": (lambda: pack_archive({"../data.pkl": tensor_program((4,), (1,), key="../x")}), "lacks"),
    "absolute_path": (lambda: pack_archive({"/data.pkl": b"\x80\x02(", "/data/0": b""}), "ends early"),
    "archive_of_an_archive": (
        lambda: pack_archive({"m/model.pt": tensor_archive(GOOD_TENSOR)}),
        "not one that torch wrote",
    ),
    "archive_as_a_pickle": (lambda: pack_archive({"m/data.pkl": tensor_archive(GOOD_TENSOR)}), "no valid pickle"),
    "two_pickles": (lambda: pack_archive({"a/data.pkl": b"N.", "b/data.pkl": b"N."}), "one `data.pkl`"),
    "bytes_behind_the_pickle": (lambda: pack_archive({"m/data.pkl": b"N.N."}), "after the end"),
    "script": (
        lambda: pack_archive({"m/data.pkl": b"N.", "m/constants.pkl": b").", "m/code/x.py": b""}),
        "TorchScript",
    ),
    "byte_order": (lambda: tensor_archive(GOOD_TENSOR, **{"m/byteorder": b"middle"}), "byte order"),
    "packed_bomb": (packed_bomb, "compressed"),
    "packed_pickle": (lambda: pack_archive({"m/data.pkl": b"]" * 10**6 + b"."}, zipfile.ZIP_DEFLATED), "compressed"),
    "encrypted": (lambda: change_directory(tensor_archive(GOOD_TENSOR), 8, b"\x01"), "compressed"),
    "size_that_lies": (
        lambda: change_directory(tensor_archive(GOOD_TENSOR), 20, struct.pack("<II", 2**31, 2**31)),
        "ends after the file",
    ),
    "entry_elsewhere": (
        lambda: change_directory(tensor_archive(GOOD_TENSOR), 42, struct.pack("<I", 2**31)),
        "not where",
    ),
    "two_entries_of_one_name": (two_entries_of_one_name, "two entries"),
    "overlapping_entries": (overlapping_entries, "not where"),
    "no_directory": (lambda: tensor_archive(GOOD_TENSOR)[:60], "damaged zip"),
    "empty_archive": (lambda: pack_archive({}), "empty zip"),
    # files of torch before 1.6
    "no_protocol": (lambda: MAGIC, "ends early"),
    "other_protocol": (lambda: MAGIC + pickle.dumps(1002, 2) + pickle.dumps({}, 2), "layout"),
    "nested_protocol": (lambda: MAGIC + nested(b")", b"\x85") + b"}.", "layout"),
    "no_byte_order": (lambda: MAGIC + pickle.dumps(1001, 2) + pickle.dumps({}, 2) + b"N.", "byte order"),
    "name_in_the_system": (lambda: MAGIC + b"cos\nsystem\n.", "only numbers and texts"),
    "name_in_the_keys": (
        lambda: pack_sequence(GOOD_TENSOR).removesuffix(EMPTY_LIST) + b"cos\nsystem\n.",
        "only numbers",
    ),
    "unlisted_storage": (lambda: pack_sequence(GOOD_TENSOR, keys=[]), "list"),
    "storage_that_is_not_needed": (lambda: pack_sequence(b"\x80\x02N.", bytes(8), ["0"]), "list"),
    "keys_that_are_numbers": (lambda: pack_sequence(GOOD_TENSOR, bytes(24), [0]), "list"),
    "other_length": (lambda: pack_sequence(GOOD_TENSOR, struct.pack("<q", 5) + bytes(20), ["0"]), "needs 4"),
    "length_of_the_other_order": (
        lambda: pack_sequence(GOOD_TENSOR, struct.pack(">q", 4) + bytes(16), ["0"]),
        "needs 4",
    ),
    "values_cut_off": (lambda: pack_sequence(GOOD_TENSOR, struct.pack("<q", 4) + bytes(15), ["0"]), "ends early"),
    "huge_storage": (
        lambda: pack_sequence(tensor_program((4,), (1,), numel=2**45), struct.pack("<q", 2**45) + bytes(16), ["0"]),
        "ends early",
    ),
    "values_behind": (lambda: pack_sequence(GOOD_TENSOR, struct.pack("<q", 4) + bytes(17), ["0"]), "after its end"),
}

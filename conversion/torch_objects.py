"""The names that pickles in PyTorch files may hold, and what they become: tensors, containers, stored objects.

The lists below hold all names that the Transformer-XL codes and transformers' old tokenizer wrote. A pickle is read
twice: `survey` refuses it if it names anything else and collects the storages that it needs; only then does `build`
make tensors. No name is ever imported: the functions of torch and Python that rebuild an object have stand-ins
here, and an object of a listed class becomes a `StoredObject`, so the code that wrote the file need not be there.

`restricted_pickle.py` interprets pickles without knowledge of tensors, and `read_pytorch.py` reads the file formats
that contain pickles and storages. The stand-ins follow `torch/_utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from .restricted_pickle import PickleReader, StoredName, StoredObject, UnsafeFileError, check_keys, printable

# torch supports more dimensions, but no checkpoint has them
MAX_DIMENSIONS = 32
# beyond the size of any storage; an axis of length 1 may have any stride, as it is never used
MAX_STRIDE = 2**40
# bound on the product of the nonzero sizes: torch multiplies them in 64 bits
MAX_ELEMENTS = 2**62

ELEMENT_TYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}
STORAGE_TYPES = {
    f"{module}.{name}Storage": dtype for module in ("torch", "torch.cuda") for name, dtype in ELEMENT_TYPES.items()
}
# torch names a type as an attribute of itself
DTYPES = {str(dtype): dtype for dtype in ELEMENT_TYPES.values()}

# Classes of the original code, of NVIDIA's and of the wrappers that both used, by the file that defines them. People
# ran these codes from other folders, so any package may stand before the file's name, or `__main__` instead of it.
PROJECT_CLASSES = {
    name: file
    for file, names in {
        "mem_transformer": (
            "MemTransformerLM AdaptiveEmbedding PositionalEmbedding PositionwiseFF DecoderLayer MultiHeadAttn "
            "RelMultiHeadAttn RelPartialLearnableMultiHeadAttn RelPartialLearnableDecoderLayer "
            "RelLearnableMultiHeadAttn RelLearnableDecoderLayer"
        ),
        "proj_adaptive_softmax": "ProjectedAdaptiveLogSoftmax OptionalParameterList",
        "adaptive_softmax": "AdaptiveLogSoftmax",
        "log_uniform_sampler": "LogUniformSampler",
        "data_parallel": "BalancedDataParallel DataParallel",
        "distributed": "DistributedDataParallel",
        "fp16_opt": "FP16_Module",
        "data_utils": "Corpus",
        "vocabulary": "Vocab",
        "tokenization_transfo_xl": "TransfoXLTokenizer TransfoXLCorpus",
    }.items()
    for name in names.split()
}

# classes of libraries, and two functions, that become a `StoredObject`
LIBRARY_NAMES = {
    f"{module}.{name}"
    for module, names in {
        "torch": "device",
        "torch.nn.modules.activation": "ReLU GELU Tanh Sigmoid Softmax LogSoftmax LeakyReLU",
        "torch.nn.modules.container": "Sequential ModuleList ModuleDict ParameterList ParameterDict",
        "torch.nn.modules.dropout": "Dropout",
        "torch.nn.modules.linear": "Linear Identity",
        "torch.nn.modules.loss": "CrossEntropyLoss NLLLoss",
        "torch.nn.modules.normalization": "LayerNorm",
        "torch.nn.modules.sparse": "Embedding",
        "torch.nn.backends.thnn": "_get_thnn_function_backend",
        "apex.normalization.fused_layer_norm": "FusedLayerNorm",
        "argparse": "Namespace",
        "numpy": "ndarray dtype",
        # arrays of ids beside the vocabulary of a TensorFlow corpus, before and since NumPy 2
        "numpy.core.multiarray": "_reconstruct scalar",
        "numpy._core.multiarray": "_reconstruct scalar",
        "numpy.core.numeric": "_frombuffer",
        "numpy._core.numeric": "_frombuffer",
        "pathlib": "PosixPath PurePosixPath WindowsPath PureWindowsPath",
        "re": "_compile",
        "sacremoses.normalize": "MosesPunctNormalizer",
        "sacremoses.tokenize": "MosesTokenizer MosesDetokenizer",
        "tokenizers": "AddedToken",
        "transformers.tokenization_utils": "Trie",
        "transformers.tokenization_utils_base": "AddedToken",
    }.items()
    for name in names.split()
}

PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True, eq=False)
class Storage:
    """A storage of the file, or a part of it: its elements in one row, in memory that all its tensors share."""

    values: Tensor = field(repr=False)


def make_dict(pairs: Any = ()) -> dict[Any, Any]:
    """An `OrderedDict` or a `Counter` as an ordinary dictionary, from another one or from pairs."""
    if type(pairs) is dict:
        return pairs.copy()
    if type(pairs) not in (list, tuple) or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("makes a dictionary of something other than pairs")
    check_keys(key for key, _ in pairs)
    return dict(pairs)


def make_defaultdict(default: Any = None, pairs: Any = ()) -> dict[Any, Any]:
    """The items of a `defaultdict`, without its default."""
    return make_dict(pairs)


def make_set(items: Any = (), kind: type = set) -> Any:
    if type(items) not in (list, tuple, set, frozenset):
        raise ValueError("makes a set of something other than a list")
    check_keys(items)
    return kind(items)


def make_bytes(text: Any, encoding: Any) -> bytes:
    """Bytes in protocols 0 to 2, which Python 3 writes as a string to encode."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("encodes something other than bytes")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError("encodes a text that does not represent bytes") from None


def make_no_bytes() -> bytes:
    """Empty bytes in protocols 0 to 2."""
    return b""


def make_size(sizes: Any = ()) -> tuple[Any, ...]:
    if type(sizes) not in (list, tuple):
        raise ValueError("has a size that is not a sequence")
    return tuple(sizes)


def make_old_object(name: Any, base: Any, value: Any) -> Any:
    """An object as protocols 0 and 1 write it: its class, the class `object`, and None."""
    if not (isinstance(name, StoredName) and isinstance(base, StoredName) and base.class_path == "builtins.object"):
        raise ValueError("makes an object of something other than a class")
    return name.build() if value is None else name.build(value)


CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": make_dict,
    "collections.Counter": make_dict,
    "collections.defaultdict": make_defaultdict,
    "builtins.set": make_set,
    "builtins.frozenset": partial(make_set, kind=frozenset),
    "builtins.bytes": make_no_bytes,
    "_codecs.encode": make_bytes,
    "copyreg._reconstructor": make_old_object,
    "torch.Size": make_size,
}
# the base of an old object, factories of a `defaultdict`, and storages: may be named, but not called
ONLY_NAMED = {"builtins.object", "builtins.list", "builtins.dict", "builtins.int", *STORAGE_TYPES}


def make_tensor(
    storage: Any,
    offset: Any,
    sizes: Any,
    strides: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    """`torch._utils._rebuild_tensor_v2`, and `_rebuild_tensor` before it.

    Offset, sizes and strides count elements of `storage`. `requires_grad` and hooks are not kept.
    """
    if not isinstance(storage, Storage):
        raise ValueError(f"makes a tensor over {type(storage).__name__}")
    if type(metadata) not in (type(None), dict) or metadata:
        raise ValueError("has a tensor whose values are stored conjugated or negated")
    if type(sizes) is not tuple or type(strides) is not tuple or len(sizes) != len(strides):
        raise ValueError("has a tensor without sizes and strides")
    if len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"has a tensor of {len(sizes)} dimensions; the maximum is {MAX_DIMENSIONS}")
    if not all(type(number) is int and 0 <= number < MAX_STRIDE for number in (offset, *sizes, *strides)):
        raise ValueError(f"has a tensor whose sizes, strides or offset are not integers from 0 to {MAX_STRIDE}")
    end = offset if 0 in sizes else offset + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    available = storage.values.numel()
    # the number of elements is bounded too, since strides of 0 would make any number out of one
    if end > available or prod(sizes) > available or prod(max(size, 1) for size in sizes) >= MAX_ELEMENTS:
        raise ValueError(
            f"has a tensor of sizes {sizes}, strides {strides} and offset {offset} "
            f"over a storage of {available} elements"
        )
    return storage.values.as_strided(sizes, strides, storage.values.storage_offset() + offset)


def make_parameter(tensor: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None) -> Tensor:
    """The tensor of a parameter."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"makes a parameter of {type(tensor).__name__}")
    return tensor


TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": make_tensor,
    "torch._utils._rebuild_tensor_v2": make_tensor,
    "torch._utils._rebuild_parameter": make_parameter,
    "torch._utils._rebuild_parameter_with_state": make_parameter,
    "torch.nn.parameter.Parameter": make_parameter,
}


def make_object(path: str, *arguments: Any) -> StoredObject:
    return StoredObject(path, arguments)


def refuse_call(path: str, *arguments: Any) -> Any:
    raise ValueError(f"calls `{path}`")


def make_name(path: str, makers: Mapping[str, Callable[..., Any]]) -> Any:
    """The value that a name puts on the stack: a dtype, or a stand-in with the function to call."""
    if path in DTYPES:
        return DTYPES[path]
    if path in makers:
        return StoredName(path, makers[path])
    return StoredName(path, partial(refuse_call if path in ONLY_NAMED else make_object, path))


def is_listed(module: str, name: str) -> bool:
    """Whether a file may name `module.name`."""
    path = f"{module}.{name}"
    if any(path in names for names in (CONTAINERS, TENSORS, DTYPES, ONLY_NAMED, LIBRARY_NAMES)):
        # the same path with a dot in the name would be an attribute of an attribute, which no pickler writes for these
        return "." not in name
    packages = module.split(".")
    if not all(package.isidentifier() and not package.startswith("__") for package in packages):
        return module == "__main__" and name in PROJECT_CLASSES
    return PROJECT_CLASSES.get(name) == packages[-1]


@dataclass(frozen=True)
class StorageRecord:
    """Description of a storage in a pickle: the type of its elements and their number."""

    dtype: torch.dtype
    numel: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.numel * self.dtype.itemsize


def parse_storage(identifier: Any) -> tuple[str, StorageRecord, slice]:
    """Key and record of a storage, and the part of it that is referred to.

    An identifier is `("storage", type, key, device, numel)`; the device is ignored. Files of the first
    releases may add `(key, offset, numel)` of a part.
    """
    if type(identifier) is not tuple or len(identifier) not in (5, 6) or identifier[0] != "storage":
        raise ValueError("refers to something outside it that is not a storage")
    _, kind, key, _, numel, *part = identifier
    if not isinstance(kind, StoredName) or kind.class_path not in STORAGE_TYPES or type(key) is not str:
        raise ValueError("refers to a storage of unknown type")
    offset, count = 0, numel
    if part not in ([], [None]):
        if type(part[0]) is not tuple or len(part[0]) != 3:
            raise ValueError("refers to a part of a storage in an unknown way")
        _, offset, count = part[0]
    if not all(type(number) is int and number >= 0 for number in (numel, offset, count)) or offset + count > numel:
        raise ValueError("refers to a storage or a part of one with wrong numbers of elements")
    return key, StorageRecord(STORAGE_TYPES[kind.class_path], numel), slice(offset, offset + count)


def parse_module_class(identifier: Any) -> StoredName | None:
    """The class, if `identifier` is how files before 1.6 name a module's class: together with its source text."""
    if type(identifier) is tuple and len(identifier) == 4 and identifier[0] == "module":
        return identifier[1] if isinstance(identifier[1], StoredName) else None
    return None


@dataclass(frozen=True, eq=False)
class Survey:
    """The result of the first pass over a pickle.

    Args:
        end: where in the data it ends.
        storages: what it needs, by key.
        has_tensors: if not, `value` is already what it holds.
        value: what it holds, with a `StoredObject` for every tensor.
    """

    end: int
    storages: dict[str, StorageRecord]
    has_tensors: bool
    value: Any


def survey(data: bytes | mmap, start: int) -> Survey:
    """Read the pickle at byte `start` of `data` without building tensors.

    Raises `UnsafeFileError` with the names that are not listed, and `ValueError` if it is not a valid pickle.
    """
    refused: list[str] = []
    storages: dict[str, StorageRecord] = {}
    has_tensors = False

    def find_name(module: str, name: str) -> Any:
        nonlocal has_tensors
        module = PYTHON2_MODULES.get(module, module)
        path = f"{module}.{name}"
        if not is_listed(module, name):
            refused.append(path)
        has_tensors = has_tensors or path in TENSORS
        return make_name(path, CONTAINERS)

    def find_storage(identifier: Any) -> Any:
        name = parse_module_class(identifier)
        if name is None:
            key, record, _ = parse_storage(identifier)
            if storages.setdefault(key, record) != record:
                raise ValueError(f"describes storage {printable(key)} in two ways")
        return name

    reader = PickleReader(data, start, find_name, find_storage)
    value = None
    try:
        value = reader.read()
    except ValueError as error:
        if not refused:  # else that is the error to report
            raise ValueError(f"holds no valid pickle ({error})") from None
    if refused:
        names = ", ".join(f"`{printable(path)}`" for path in list(dict.fromkeys(refused))[:5])
        raise UnsafeFileError(f"names {names}, which no Transformer-XL file holds; refused, and nothing was executed")
    return Survey(reader.position, storages, has_tensors or bool(storages), value)


def build(data: bytes | mmap, start: int, surveyed: Survey, storages: Mapping[str, Storage]) -> Any:
    """What the surveyed pickle holds, with its tensors over `storages`."""
    if not surveyed.has_tensors:
        return surveyed.value

    def find_name(module: str, name: str) -> Any:
        return make_name(f"{PYTHON2_MODULES.get(module, module)}.{name}", CONTAINERS | TENSORS)

    def find_storage(identifier: Any) -> Any:
        name = parse_module_class(identifier)
        if name is not None:
            return name
        key, _, part = parse_storage(identifier)
        return Storage(storages[key].values[part])

    return PickleReader(data, start, find_name, find_storage).read()

"""Detects the format of a source and opens it: one `Checkpoint` for all formats.

Nothing in a source is executed; see `read_pytorch.py`. Nothing is downloaded unless the source is a Hub id.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from hf_txl import TransfoXLConfig

from .key_rules import FORMATS
from .read_pytorch import StoredObject, module_tensors, other_file, read_file
from .read_tensorflow import find_prefix, index_of, read_checkpoint
from .state_dict import Shapes
from .text_files import read_json_object
from .vocabulary import file_in, is_vocabulary, is_word_list

# file names that the codes use; a TensorFlow bundle is recognised by its .index
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "checkpoint_best.pt",
    "checkpoint_last.pt",
)
# those that only transformers writes
TRANSFORMERS_FILES = WEIGHT_FILES[:4]
# prefixes of names that identify a code
MARKS = {"transformer.": "transformers", "crit.out_layers_biases.": "nvidia"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class VocabularyError(ValueError):
    """The source is a vocabulary, but a model is needed."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} must hold a model, a state dict or a checkpoint of NVIDIA's code, but holds only a vocabulary. "
            "Given that file, `convert_vocabulary` and `hf-txl convert` write its tokenizer; `vocabulary` "
            "(`--vocabulary`) adds it to a model."
        )


@dataclass
class Checkpoint:
    """An opened checkpoint."""

    format: str
    """A key of `key_rules.FORMATS`."""
    found: str
    """Description of the source."""
    files: list[Path]
    """The files that hold its weights."""
    tensors: Mapping[str, torch.Tensor]
    shapes: Shapes
    stored: dict[str, Any] = field(default_factory=dict)
    """Settings stored with the weights, under the names of the format."""
    stored_in: str = "the checkpoint"
    vocabulary: Any = None
    """The vocabulary: a path, an object of the file, or None."""
    name: str = ""
    """Name of the source independent of this machine: of a file or folder, or a Hub id."""


def open_checkpoint(source: str | Path, format: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format.

    Args:
        source (`str` or `Path`):
            A file, a TensorFlow prefix, a folder as the training script left it, or a Hub id.
        format (`str`, *optional*): A key of `key_rules.FORMATS`; detected if not given.

    Raises:
        FileNotFoundError: if there is nothing at `source`.
        VocabularyError: if it is a vocabulary without a model.
        ValueError: if it is not a checkpoint of a known format, or not of the given one.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"`format` must be one of {list(FORMATS)}, but is {format!r}.")
    path, name = _local(source)
    if is_word_list(path):
        raise VocabularyError(path)
    if path.is_dir():
        path = _checkpoint_in(path)
    # a single-file checkpoint, as TensorFlow wrote before 0.12, is recognised by `format` only
    if format == "tensorflow" or _is_tensorflow(path):
        checkpoint = _open_tensorflow(find_prefix(path))
    else:
        checkpoint = _open_pytorch(path, format)
    if format is not None and checkpoint.format != format:
        raise ValueError(f"`format` must be {checkpoint.format!r} for {checkpoint.found}, but is {format!r}.")
    if checkpoint.vocabulary is None:
        checkpoint.vocabulary = vocabulary_in(path if path.is_dir() else path.parent)
    checkpoint.name = name
    return checkpoint


def _local(source: str | Path) -> tuple[Path, str]:
    """Local path of a source, and its name independent of this machine."""
    path = Path(source).expanduser()
    if path.exists() or index_of(path).is_file():
        return path, path.resolve().name
    # if the folder exists, the name is misspelt
    if not HUB_ID.fullmatch(str(source)) or path.parent.is_dir():
        raise FileNotFoundError(f"`source` must be a file, a folder or a Hub id, but {source} does not exist.")
    try:
        return Path(snapshot_download(str(source))), str(source)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"`source` must be a file, a folder or a Hub id, but {source} is not a local path and could not be "
            f"downloaded from the Hub: {error}"
        ) from error


def _checkpoint_in(folder: Path) -> Path:
    """The only checkpoint in a folder; the folder itself for one or more TensorFlow bundles."""
    found = [folder / name for name in WEIGHT_FILES if (folder / name).is_file()]
    # transformers writes both of its formats side by side, NVIDIA's code the best and the last state
    for preferred, other in (("model.safetensors", "pytorch_model.bin"), ("checkpoint_best.pt", "checkpoint_last.pt")):
        if found == [folder / preferred, folder / other]:
            found = found[:1]
    bundles = sorted(path.with_suffix("") for path in folder.glob("*.index"))
    if len(found) == 1 and not bundles:
        return found[0]
    if bundles and not found:
        return folder
    found += bundles
    what = f"holds several: {', '.join(path.name for path in found)}" if found else "holds none"
    if not found and (vocabulary := file_in(folder)) is not None:
        what += f", only a vocabulary ({vocabulary.name}; name that file for its tokenizer)"
    raise ValueError(
        f"`source` must be a folder with one checkpoint ({', '.join(WEIGHT_FILES)} or a TensorFlow *.index), but "
        f"{folder} {what}. Name the file."
    )


def _is_tensorflow(path: Path) -> bool:
    """Whether a path is a file of a bundle, the prefix of one, or a folder of bundles."""
    return path.is_dir() or path.suffix in (".index", ".meta") or index_of(path).is_file() or ".data-" in path.name


# --- formats


def _open_tensorflow(prefix: Path) -> Checkpoint:
    tensors = read_checkpoint(prefix)
    checkpoint = Checkpoint(
        "tensorflow",
        f"a TensorFlow checkpoint with {len(tensors)} variables",
        sorted(prefix.parent.glob(f"{prefix.name}.*")),
        tensors,
        dict(tensors.shapes),
    )
    settings = prefix.parent / "config.json"
    if settings.is_file():
        checkpoint.stored = read_json_object(settings)
        checkpoint.stored_in = settings.name
    return checkpoint


def _open_pytorch(path: Path, format: str | None) -> Checkpoint:
    """A file, or a sharded model, of one of the PyTorch codes, identified by its contents or by `format`."""
    files, content = _read(path)
    if isinstance(content, dict):
        # common wrappers around a state dict
        for name in ("state_dict", "model_state_dict", "model"):
            if name in content and (_is_state_dict(content[name]) or isinstance(content[name], StoredObject)):
                content = content[name]
                break
    if isinstance(content, dict) and {"model_state", "model_config"} <= content.keys():
        return _nvidia(path, content)
    if is_vocabulary(content):
        raise VocabularyError(path)
    if isinstance(content, StoredObject):
        return _module(path, content)
    if not _is_state_dict(content):
        raise ValueError(
            f"{path} must hold a model, a state dict or a checkpoint of NVIDIA's code, but holds {_kind(content)}."
        )
    tensors = _unwrapped(content)
    format = format or _format_of(tensors, path)
    if format == "transformers":
        return _transformers(files, tensors)
    checkpoint = Checkpoint(format, f"a state dict with {len(tensors)} tensors", files, tensors, _shapes(tensors))
    log = path.parent / "log.txt"
    if log.is_file():
        checkpoint.stored = _arguments_in(log)
        checkpoint.stored_in = log.name
    return checkpoint


def _read(path: Path) -> tuple[list[Path], Any]:
    """The files of a checkpoint, several if `path` is the index of a sharded one, and their contents."""
    if path.name.endswith(".index.json"):
        weight_map = read_json_object(path).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError(f"`weight_map` in {path} must map every tensor to a file beside it, but does not.")
        files = [path.parent / name for name in sorted(set(names))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{path} names files that must lie beside it, but {', '.join(missing)} does not.")
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            shard = _read_file(file)
            if not _is_state_dict(shard):
                raise ValueError(f"{file} must hold a state dict, but holds {_kind(shard)}.")
            tensors |= shard
        return files, tensors
    return [path], _read_file(path)


def _read_file(file: Path) -> Any:
    if file.suffix != ".safetensors":
        return read_file(file)
    try:
        # memory-mapped, as all other formats
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        with open(file, "rb") as opened:
            what = other_file(opened.read(32)) or f"cannot be read: {error}"
        raise ValueError(f"{file} must be a safetensors file, but {what}") from error


def _unwrapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the prefixes `module.` of DataParallel and FP16_Module, which may be nested."""
    while tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def _format_of(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    for beginning, code in MARKS.items():
        if any(name.startswith(beginning) for name in tensors):
            return code
    # the names of a model without a head do not tell it from the original code's
    settings = path.parent / "config.json"
    if settings.is_file() and (
        path.name in TRANSFORMERS_FILES or read_json_object(settings).get("model_type") == TransfoXLConfig.model_type
    ):
        return "transformers"
    return "pytorch"


def _transformers(files: list[Path], tensors: dict[str, torch.Tensor]) -> Checkpoint:
    settings = files[0].parent / "config.json"
    if not settings.is_file():
        raise ValueError(f"`source` must have its config.json beside it, but {settings.parent} has none.")
    if not any(name.startswith("transformer.") for name in tensors):
        tensors = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    return Checkpoint(
        "transformers",
        f"a model of transformers ({', '.join(file.name for file in files)})",
        files,
        tensors,
        _shapes(tensors),
        read_json_object(settings),
        settings.name,
    )


def _nvidia(path: Path, content: dict[str, Any]) -> Checkpoint:
    tensors = content["model_state"]
    if not _is_state_dict(tensors) or not isinstance(content["model_config"], dict):
        raise ValueError(f"`model_state` and `model_config` of {path} must be dictionaries, but are not.")
    arguments = content.get("args")
    stored = arguments.state if isinstance(arguments, StoredObject) else {}
    tensors = _unwrapped(tensors)
    return Checkpoint(
        "nvidia",
        "a checkpoint of NVIDIA's DeepLearningExamples",
        [path],
        tensors,
        _shapes(tensors),
        # the constructor's arguments take precedence: only they have the lists
        {**stored, **content["model_config"]},
        vocabulary=content.get("vocab"),
    )


def _module(path: Path, module: StoredObject) -> Checkpoint:
    """A pickled model; its constructor arguments are attributes of the module or its sub-modules."""
    tensors = _unwrapped(module_tensors(module))
    # DataParallel and similar wrappers
    while isinstance(inner := module.state["_modules"].get("module"), StoredObject):
        module = inner
    if not module.class_path.endswith("MemTransformerLM"):
        raise ValueError(f"{path} must hold a MemTransformerLM, but holds a {module.class_path}.")
    return Checkpoint(
        "pytorch",
        "a model pickled by the original PyTorch code",
        [path],
        tensors,
        _shapes(tensors),
        _constructor_arguments(module),
    )


def _constructor_arguments(module: StoredObject) -> dict[str, Any]:
    names = (
        "n_token n_layer n_head d_model d_embed d_head mem_len ext_len tgt_len max_klen attn_type same_length "
        "clamp_len sample_softmax"
    ).split()
    stored = {name: module.state[name] for name in names if name in module.state}

    def part(*path: str) -> dict[str, Any]:
        """The state of a sub-module, empty if it is not there."""
        found = module
        for name in path:
            found = found.state.get("_modules", {}).get(name)
            if not isinstance(found, StoredObject):
                return {}
        return found.state

    embedding, attention = part("word_emb"), part("layers", "0", "dec_attn")
    for name, values, key in (
        ("div_val", embedding, "div_val"),
        ("pre_lnorm", attention, "pre_lnorm"),
        ("dropout", part("drop"), "p"),
        ("dropatt", part("layers", "0", "dec_attn", "dropatt"), "p"),
        ("layer_norm_epsilon", part("layers", "0", "dec_attn", "layer_norm"), "eps"),
    ):
        if key in values:
            stored[name] = values[key]
    if isinstance(cutoffs := embedding.get("cutoffs"), list | tuple):
        # the last one is the vocabulary size
        stored["cutoffs"] = list(cutoffs)[:-1]
    return stored


# --- what lies beside


def _arguments_in(log: Path) -> dict[str, Any]:
    """The arguments that `train.py` writes at the top of its log, one line `    - name : value` each."""
    arguments: dict[str, Any] = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := re.fullmatch(r"    - (\w+) : (.*)\n?", line):
                try:
                    arguments[match[1]] = ast.literal_eval(match[2])
                except (ValueError, SyntaxError):
                    # strings are written without quotes
                    arguments[match[1]] = match[2]
            elif arguments:
                break
    return arguments


def vocabulary_in(folder: Path) -> Path | None:
    """A vocabulary file in a folder; a `tokenizer.json`, which needs no conversion, is preferred."""
    tokenizer = folder / "tokenizer.json"
    return tokenizer if tokenizer.is_file() else file_in(folder)


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items())
    )


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _kind(value: Any) -> str:
    return value.class_path if isinstance(value, StoredObject) else type(value).__name__

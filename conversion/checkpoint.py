"""Finds out what a source is and opens it: one `Checkpoint` whatever the format.

Nothing of a source is executed; see `read_pytorch.py`. Nothing is downloaded unless the source is a Hub id.
"""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from .key_rules import FORMATS
from .read_pytorch import StoredObject, module_tensors, read_file
from .read_tensorflow import find_prefix, index_of, read_checkpoint
from .state_dict import Shapes
from .vocabulary import file_in

# what the codes call their files; a TensorFlow bundle is known by its .index
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "checkpoint_best.pt",
    "checkpoint_last.pt",
)
# how names begin that only one of the codes has
MARKS = {"transformer.": "transformers", "crit.out_layers_biases.": "nvidia"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Checkpoint:
    """A checkpoint as it was found."""

    format: str
    """A key of `key_rules.FORMATS`."""
    found: str
    """What it is, in words."""
    files: list[Path]
    """The files that hold its weights."""
    tensors: Mapping[str, torch.Tensor]
    shapes: Shapes
    stored: dict[str, Any] = field(default_factory=dict)
    """Settings stored with the weights, under the names that the format gives them."""
    stored_in: str = "the checkpoint"
    vocabulary: Any = None
    """Where a vocabulary is: a path, an object of the file, or nothing."""


def open_checkpoint(source: str | Path, format: str | None = None) -> Checkpoint:
    """Open a checkpoint of any format.

    Args:
        source (`str` or `Path`):
            A file, a TensorFlow prefix, a folder as the training script left it, or a Hub id.
        format (`str`, *optional*): A key of `key_rules.FORMATS`; found out if not given.

    Raises:
        FileNotFoundError: if there is nothing at `source`.
        ValueError: if it is not a checkpoint of a known format, or not of the given one.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"`format` must be one of {list(FORMATS)}, but is {format!r}.")
    path = _local(source)
    if path.is_dir():
        path = _checkpoint_in(path)
    # a bundle of one file, as TensorFlow wrote before 0.12, is known by `format` only
    if format == "tensorflow" or _is_tensorflow(path):
        checkpoint = _open_tensorflow(find_prefix(path))
    elif path.name.endswith((".safetensors", ".index.json")):
        checkpoint = _open_transformers(path)
    else:
        checkpoint = _open_pytorch_file(path, format)
    if format is not None and checkpoint.format != format:
        raise ValueError(f"`format` must be {checkpoint.format!r} for {checkpoint.found}, but is {format!r}.")
    if checkpoint.vocabulary is None:
        checkpoint.vocabulary = vocabulary_beside(path)
    return checkpoint


def _local(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.exists() or index_of(path).is_file():
        return path
    if not HUB_ID.fullmatch(str(source)):
        raise FileNotFoundError(f"`source` must be a file, a folder or a Hub id, but {source} does not exist.")
    try:
        return Path(snapshot_download(str(source)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"`source` must be a file, a folder or a Hub id, but {source} does not exist here and the Hub did not "
            f"give it: {error}"
        ) from error


def _checkpoint_in(folder: Path) -> Path:
    """The one checkpoint in a folder; the folder itself stands for TensorFlow bundles, maybe several."""
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
    raise ValueError(
        f"`source` must be a folder with one checkpoint ({', '.join(WEIGHT_FILES)} or a TensorFlow *.index), but "
        f"{folder} {what}. Name the file."
    )


def _is_tensorflow(path: Path) -> bool:
    """Whether a path is a file of a bundle, or what the names of its files begin with, or a folder of bundles."""
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
        checkpoint.stored = read_json(settings)
        checkpoint.stored_in = settings.name
    return checkpoint


def _open_transformers(path: Path) -> Checkpoint:
    """A folder of transformers, by any of its weight files."""
    folder = path.parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"`source` must have its config.json beside it, but {folder} has none.")
    names = [path.name]
    if path.name.endswith(".index.json"):
        weight_map = read_json(path).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
            raise ValueError(f"`weight_map` in {path} must map every tensor to a file beside it, but does not.")
        names = sorted(set(files))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= _read_weights(folder / name)
    return Checkpoint(
        "transformers",
        f"a model of transformers ({', '.join(names)})",
        [folder / name for name in names],
        tensors,
        _shapes(tensors),
        read_json(folder / "config.json"),
        "config.json",
    )


def _read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        try:
            # memory-mapped, like everything else here
            with safe_open(file, framework="pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} must be a safetensors file, but cannot be read: {error}") from error
    tensors = read_file(file)
    if not _is_state_dict(tensors):
        raise ValueError(f"{file} must hold a state dict, but holds {_kind(tensors)}.")
    return tensors


def _open_pytorch_file(path: Path, format: str | None) -> Checkpoint:
    """A file of one of the PyTorch codes; what is in it decides which, for a bare state dict its names or `format`."""
    content = read_file(path)
    if isinstance(content, dict):
        # frequent wrappers around a state dict
        for name in ("state_dict", "model_state_dict", "model"):
            if name in content and (_is_state_dict(content[name]) or isinstance(content[name], StoredObject)):
                content = content[name]
                break
    if isinstance(content, dict) and {"model_state", "model_config"} <= content.keys():
        return _nvidia(path, content)
    if isinstance(content, StoredObject):
        return _module(path, content)
    if not _is_state_dict(content):
        raise ValueError(
            f"{path} must hold a model, a state dict or a checkpoint of NVIDIA's code, but holds {_kind(content)}."
        )
    tensors = {name.removeprefix("module."): tensor for name, tensor in content.items()}
    if format is None:
        format = next(
            (code for beginning, code in MARKS.items() if any(n.startswith(beginning) for n in tensors)), None
        )
    if format == "transformers":
        return _open_transformers(path)
    checkpoint = Checkpoint(
        format or "pytorch", f"a state dict with {len(tensors)} tensors", [path], tensors, _shapes(tensors)
    )
    log = path.parent / "log.txt"
    if log.is_file():
        checkpoint.stored = _arguments_in(log)
        checkpoint.stored_in = log.name
    return checkpoint


def _nvidia(path: Path, content: dict[str, Any]) -> Checkpoint:
    tensors = content["model_state"]
    if not _is_state_dict(tensors) or not isinstance(content["model_config"], dict):
        raise ValueError(f"`model_state` and `model_config` of {path} must be dictionaries, but are not.")
    arguments = content.get("args")
    stored = arguments.state if isinstance(arguments, StoredObject) else {}
    return Checkpoint(
        "nvidia",
        "a checkpoint of NVIDIA's DeepLearningExamples",
        [path],
        tensors,
        _shapes(tensors),
        # the constructor's arguments win: only they have the lists
        {**stored, **content["model_config"]},
        vocabulary=content.get("vocab"),
    )


def _module(path: Path, module: StoredObject) -> Checkpoint:
    """A pickled model: constructor arguments are attributes of it or of its parts."""
    tensors = {name.removeprefix("module."): tensor for name, tensor in module_tensors(module).items()}
    while "module" in module.state.get("_modules", {}):
        # DataParallel and its kin
        module = module.state["_modules"]["module"]
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
    if "cutoffs" in embedding:
        # the vocabulary size ends them
        stored["cutoffs"] = list(embedding["cutoffs"])[:-1]
    return stored


# --- small files


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: if the file holds anything else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} must be a JSON file, but cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, but holds {_kind(value)}.")
    return value


def _arguments_in(log: Path) -> dict[str, Any]:
    """The arguments that `train.py` writes at the top of its log, a line `    - name : value` each."""
    arguments: dict[str, Any] = {}
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if match := re.fullmatch(r"    - (\w+) : (.*)\n?", line):
                try:
                    arguments[match[1]] = ast.literal_eval(match[2])
                except (ValueError, SyntaxError):
                    # text is written without quotes
                    arguments[match[1]] = match[2]
            elif arguments:
                break
    return arguments


def vocabulary_beside(path: Path) -> Path | None:
    """A vocabulary file in the folder of a checkpoint."""
    folder = path if path.is_dir() else path.parent
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

"""Facts about a saved model, read from its configuration, its card and the headers of its weights."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .configuration_transfo_xl import TransfoXLConfig
from .remote_code_transfo_xl import VERSION_KEY

# beginnings of weight names, without `transformer.`
PARTS = {"word_emb": "embeddings", "layers": "layers", "crit": "softmax", "score": "classifier"}
# `memory_init` and `same_length_includes_oldest` -> implementation, see docs/dialects.md
DIALECTS = {
    ("empty", False): "original PyTorch code",
    ("empty", True): "NVIDIA",
    ("zeros", False): "transformers 2 to 4",
    ("zeros", True): "original TensorFlow code",
}
CARD_SENTENCE = re.compile(r"^A Transformer-XL \(.*\) converted from (.+)\.$", re.MULTILINE)


def describe_folder(folder: str | Path) -> dict[str, Any]:
    """Facts about the model in a folder, by name; groups are dictionaries.

    Raises:
        FileNotFoundError: if the folder holds no configuration or no weights as safetensors.
        ValueError: if a file is damaged; the message names it.
    """
    folder = Path(folder)
    raw = _read_json(folder / "config.json")
    if raw.get("model_type") != TransfoXLConfig.model_type:
        raise ValueError(
            f"{folder / 'config.json'} must have the model type 'transfo-xl', but has {raw.get('model_type')!r}."
        )
    config = TransfoXLConfig.from_dict(raw)
    return {
        "class": ", ".join(config.architectures or []) or "not recorded",
        "parameters": _parameters(folder),
        "size": f"{config.n_layer} layers, d_model {config.d_model}, {config.n_head} heads of {config.d_head}",
        "attention": config.attention_kind,
        "dialect": DIALECTS[config.memory_init, config.same_length_includes_oldest],
        "memory": {
            "mem_len": config.mem_len,
            "clamp_len": config.clamp_len,
            "same_length": config.same_length,
            "memory_init": config.memory_init,
        },
        "vocabulary": {"tokens": config.vocab_size, "cutoffs": str(config.cutoffs), "div_val": config.div_val},
        "tokenizer": _tokenizer(folder),
        "converted from": _origin(folder),
        "code": f"hf_txl {raw.get(VERSION_KEY, 'of an unknown version')}" if "auto_map" in raw else "none",
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.suffix != ".py"},
    }


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} must hold {file.name}, but does not.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, but is not: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, but holds a {type(content).__name__}.")
    return content


def _parameters(folder: Path) -> dict[str, Any]:
    """Numbers of stored parameters: weights that are shared are stored once."""
    # beside weights, a checkpoint of a training holds memories
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("memory-"))
    if not files:
        raise FileNotFoundError(f"{folder} must hold weights as safetensors, but holds no such file.")
    parts: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(file, framework="numpy") as weights:
                for name in weights.keys():
                    header = weights.get_slice(name)
                    size = 1
                    for length in header.get_shape():
                        size *= length
                    parts[PARTS.get(name.removeprefix("transformer.").partition(".")[0], "other")] += size
                    dtypes[header.get_dtype()] += size
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} must be a safetensors file, but is not: {error}") from error
    return {"total": parts.total(), **parts, "dtype": ", ".join(dtypes)}


def _tokenizer(folder: Path) -> dict[str, Any] | str:
    if not (folder / "tokenizer_config.json").is_file():
        return "none"
    settings = _read_json(folder / "tokenizer_config.json")
    facts = {"class": settings.get("tokenizer_class", "not recorded"), "mode": settings.get("mode", "not recorded")}
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
        tokens = set(tokenizer.get("model", {}).get("vocab", ()))
        facts["tokens"] = len(tokens | {token["content"] for token in tokenizer.get("added_tokens", ())})
    return facts


def _origin(folder: Path) -> str:
    """What the model card of a converted model says."""
    card = folder / "README.md"
    found = CARD_SENTENCE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return found[1] if found else "not recorded"


__all__ = ["describe_folder"]

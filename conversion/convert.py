"""Turns a checkpoint of any format into a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""

import datetime
import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GenerationConfig

import hf_txl
from hf_txl import (
    TransfoXLConfig,
    TransfoXLForCausalLM,
    TransfoXLForSequenceClassification,
    TransfoXLModel,
    TransfoXLPreTrainedModel,
)
from hf_txl.staging import check_writable, new_or_forced, written_beside

from .card import Card
from .checkpoint import Checkpoint, open_checkpoint, read_json
from .key_rules import FORMATS
from .settings import Settings
from .state_dict import Account, Fitting, Shapes, State
from .verify import TOLERANCE, Differences, verify_recorded, verify_with_source
from .vocabulary import read_vocabulary

# files of a tokenizer that transformers 5 reads as they are
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

AUTO_CLASSES = {
    TransfoXLForCausalLM: ("AutoModelForCausalLM", "text-generation"),
    TransfoXLForSequenceClassification: ("AutoModelForSequenceClassification", "text-classification"),
    TransfoXLModel: ("AutoModel", "feature-extraction"),
}


@dataclass
class Conversion:
    """What `convert` did.

    Args:
        output (`Path`): The folder.
        found (`str`): What the source is.
        config (`TransfoXLConfig`): The model's configuration.
        origins (`dict[str, str]`): Where its fields come from.
        account (`Account`): What became of every tensor.
        tokenizer (`str`): What became of the vocabulary.
        checked (`dict[str, dict[str, float]]`): Largest differences, by what was compared.
    """

    output: Path
    found: str
    config: TransfoXLConfig
    origins: dict[str, str]
    account: Account
    tokenizer: str
    checked: dict[str, Differences]

    def __str__(self) -> str:
        lines = [
            f"Found:      {self.found}",
            f"Weights:    {self.account}",
            "Settings:   " + ", ".join(f"{name}={value!r}" for name, value, _ in self.settings()),
            f"Tokenizer:  {self.tokenizer}",
        ]
        lines += [f"Checked:    {line}" for line in self.checks()]
        return "\n".join([*lines, f"Written to  {self.output}"])

    def settings(self) -> list[tuple[str, Any, str]]:
        """Name, value and origin of every setting that came from somewhere."""
        return [(name, getattr(self.config, name, None), origin) for name, origin in self.origins.items()]

    def checks(self) -> list[str]:
        """A line for each comparison."""
        return [
            f"{what}: largest difference {', '.join(f'{value:.1e} ({name})' for name, value in differences.items())}"
            for what, differences in self.checked.items()
        ]


def convert(
    source: str | Path,
    output: str | Path,
    *,
    format: str | None = None,
    settings: Mapping[str, Any] | None = None,
    vocabulary: str | Path | Literal[False] | None = None,
    tokenizer_mode: str | None = None,
    dtype: torch.dtype | None = None,
    license: str = "other",
    verify: bool = False,
    recorded: str | Path | None = None,
    force: bool = False,
    protected: Iterable[str | Path] = (),
    command: str | None = None,
    progress: bool = True,
) -> Conversion:
    """Convert a checkpoint. Nothing of it is executed or changed, and `output` appears only when all is done.

    Args:
        source (`str` or `Path`): A file, a TensorFlow prefix, a folder as the training script left it, or a Hub id.
        output (`str` or `Path`): The folder to write.
        format (`str`, *optional*): A key of `key_rules.FORMATS`; found out if not given.
        settings (`Mapping[str, Any]`, *optional*):
            Fields of [`TransfoXLConfig`], or arguments of the original codes, that the source does not tell.
        vocabulary (`str`, `Path` or `False`, *optional*):
            File of the vocabulary; by default the one inside the checkpoint or beside it. `False` for no tokenizer.
            See `read_vocabulary`.
        tokenizer_mode (`str`, *optional*):
            How the tokenizer treats text, if not as the code of the vocabulary did. See [`TransfoXLTokenizer`].
        dtype (`torch.dtype`, *optional*): Of the weights; by default that of the source.
        license (`str`, defaults to `"other"`): For the card, an identifier of the Hub.
        verify (`bool`, defaults to `False`):
            Load the result and compare it with a slow float64 reading of the source's weights. Needs their size twice
            more in memory.
        recorded (`str` or `Path`, *optional*):
            A safetensors file with recorded outputs to compare the result with; see `verify_recorded`.
        force (`bool`, defaults to `False`): Whether to replace an existing `output`.
        protected (`Iterable[str | Path]`): Further files that `force` must not delete with an existing `output`.
        command (`str`, *optional*): For the card; by default the command that does the same.
        progress (`bool`, defaults to `True`): Whether to show progress.

    Returns:
        [`Conversion`]

    Raises:
        FileExistsError, PermissionError: if `output` exists without `force` or cannot be written.
        FileNotFoundError: if there is nothing at `source`.
        ValueError: if the source cannot be read, or does not make a model; the message names all reasons.
        RuntimeError: if a comparison finds more than `verify.TOLERANCE`; nothing is written then.
    """
    output = Path(output).expanduser()
    inputs = [source, vocabulary or None, recorded, *protected]
    check = new_or_forced(force, [each for each in inputs if each is not None])
    check_writable(output, check)

    checkpoint = open_checkpoint(source, format)
    found = Settings(checkpoint, settings or {})
    config = found.config
    model_class = _model_class(checkpoint.shapes)
    fitting = Fitting(FORMATS[checkpoint.format], config, checkpoint.shapes, wanted_shapes(model_class, config))
    weights = fitting.read(checkpoint.tensors)
    dtype = dtype or _common_dtype(weights)
    write_tokenizer, tokenizer = _tokenizer(checkpoint, config, vocabulary, tokenizer_mode)
    result = Conversion(output, checkpoint.found, config, found.origins, fitting.account, tokenizer, {})

    with written_beside(output, check) as staging:
        write_tokenizer(staging)
        _write_model(staging, model_class, config, weights, dtype, checkpoint)
        if verify or recorded is not None:
            result.checked = _check(staging, model_class, weights if verify else None, recorded, progress)
        auto_class, pipeline_tag = AUTO_CLASSES[model_class]
        card = Card(
            name=output.resolve().name,
            found=checkpoint.found,
            files=checkpoint.files,
            command=command or f"hf-txl convert {shlex.quote(Path(source).name)} {shlex.quote(output.name)}",
            version=hf_txl.__version__,
            date=datetime.date.today().isoformat(),
            account=str(fitting.account),
            parameters=sum(weight.numel() for weight in weights.values()),
            dtype=str(dtype).removeprefix("torch."),
            settings=result.settings(),
            tokenizer=tokenizer,
            auto_class=auto_class,
            pipeline_tag=pipeline_tag,
            license=license,
            checked=result.checks(),
        )
        (staging / "README.md").write_text(card.text(), encoding="utf-8")
    return result


def parse_settings(config: Path | None, assignments: list[str]) -> dict[str, Any]:
    """Settings from a JSON file and from `name=value` texts, whose values are JSON or else plain text."""
    settings = read_json(config) if config is not None else {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"A setting must be written as name=value, but is {assignment!r}.")
        try:
            settings[name] = json.loads(text)
        except ValueError:
            settings[name] = {"True": True, "False": False}.get(text, text)
    return settings


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A floating-point type of torch by its name."""
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be float32, float16 or bfloat16, but is {name!r}.")
    return dtype


# --- model


def _model_class(shapes: Shapes) -> type[TransfoXLPreTrainedModel]:
    if "score.weight" in shapes:
        return TransfoXLForSequenceClassification
    bare = all(not name.startswith(("crit.", "transformer/adaptive_softmax/")) for name in shapes)
    return TransfoXLModel if bare else TransfoXLForCausalLM


def wanted_shapes(model_class: type[TransfoXLPreTrainedModel], config: TransfoXLConfig) -> Shapes:
    """Name and shape of every weight of a model, tied ones once, under the names of a model with a head."""
    with torch.device("meta"):
        model = model_class(config)
    prefix = "transformer." if model_class is TransfoXLModel else ""
    return {prefix + name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _common_dtype(weights: State) -> torch.dtype:
    dtypes = {weight.dtype for weight in weights.values()}
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise ValueError(f"All weights must be floating-point numbers, but are {sorted(map(str, dtypes))}.")
    # of a mixture, the widest
    return max(dtypes, key=lambda dtype: (torch.finfo(dtype).bits, torch.finfo(dtype).max))


def _write_model(
    folder: Path,
    model_class: type[TransfoXLPreTrainedModel],
    config: TransfoXLConfig,
    weights: State,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
) -> None:
    config.architectures = [model_class.__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if model_class is TransfoXLForCausalLM:
        generation = checkpoint.files[0].parent / "generation_config.json"
        if checkpoint.format == "transformers" and generation.is_file():
            GenerationConfig.from_pretrained(generation.parent).save_pretrained(folder)
        else:
            GenerationConfig.from_model_config(config).save_pretrained(folder)
    save_torch_state_dict(
        {name: weight.to(dtype).contiguous() for name, weight in weights.items()}, folder, metadata={"format": "pt"}
    )


def _check(
    folder: Path,
    model_class: type[TransfoXLPreTrainedModel],
    weights: State | None,
    recorded: str | Path | None,
    progress: bool,
) -> dict[str, Differences]:
    """Load what was written and compare it; a difference above the tolerance raises."""
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    checked: dict[str, Differences] = {}
    if weights is not None:
        reading = model.transformer if isinstance(model, TransfoXLForSequenceClassification) else model
        checked["the source's weights in a slow float64 reading"] = verify_with_source(
            reading, weights, progress=progress
        )
    if recorded is not None:
        if not isinstance(model, TransfoXLForCausalLM):
            raise ValueError(f"`recorded` must be for a causal language model, but this is a {model_class.__name__}.")
        try:
            outputs = load_file(recorded)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"`recorded` must be a safetensors file, but {recorded} cannot be read: {error}"
            ) from error
        for run, differences in verify_recorded(model, outputs).items():
            checked[f"{Path(recorded).name}{f', {run}' if run else ''}"] = differences
    if too_large := [line for line in checked.items() if not max(line[1].values()) <= TOLERANCE]:
        raise RuntimeError(f"The converted model must agree to {TOLERANCE}, but differs: {dict(too_large)}.")
    return checked


# --- tokenizer


def _tokenizer(
    checkpoint: Checkpoint, config: TransfoXLConfig, given: str | Path | Literal[False] | None, mode: str | None
) -> tuple[Callable[[Path], None], str]:
    """What writes the tokenizer into a folder, and a sentence about it; the configuration learns its end token."""
    source = given if given is not None else checkpoint.vocabulary
    if source is None or source is False:
        why = "there was no vocabulary in the source (`vocabulary` names one)" if source is None else "as asked"
        return lambda folder: None, f"none, {why}"
    if isinstance(source, str | Path) and Path(source).name == "tokenizer.json":
        folder = Path(source).parent
        return lambda target: _copy(folder, target), "that of the source, as it is"
    vocabulary = read_vocabulary(source)
    if len(vocabulary) != config.vocab_size:
        where = source if isinstance(source, str | Path) else "that of the checkpoint"
        raise ValueError(
            f"The vocabulary must have as many symbols as the model has ids ({config.vocab_size}), but {where} has "
            f"{len(vocabulary)}. Name another (`--vocabulary`), or convert without (`--no-vocabulary`)."
        )
    tokenizer = vocabulary.tokenizer(mode)
    config.eos_token_id = tokenizer.eos_token_id

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder)

    sentence = f"{len(vocabulary)} symbols, mode `{tokenizer.mode}`"
    if mode is None and vocabulary.raw_mode != vocabulary.mode:
        sentence += f" for text prepared as the original's was (`{vocabulary.raw_mode}` takes raw text)"
    return write, sentence


def _copy(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)

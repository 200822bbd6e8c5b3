"""Converts a checkpoint of any format into a folder that `AutoModelForCausalLM` and `AutoTokenizer` load."""

import datetime
import functools
import json
import shlex
import shutil
import warnings
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
    TransfoXLTokenizer,
)
from hf_txl.options import read_options
from hf_txl.staging import check_writable, new_or_forced, written_beside

from .card import Card
from .checkpoint import Checkpoint, open_checkpoint, vocabulary_in
from .key_rules import FORMATS
from .settings import Settings
from .state_dict import Account, Fitting, Shapes, State, is_finite
from .text_files import read_json, read_json_object
from .verify import TOLERANCE, Differences, verify_recorded, verify_with_source
from .vocabulary import describe, read_vocabulary

GENERATION_FILE = "generation_config.json"
# files of a tokenizer that transformers 5 reads as they are
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# supported precisions of a model
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

AUTO_CLASSES = {
    TransfoXLForCausalLM: ("AutoModelForCausalLM", "text-generation"),
    TransfoXLForSequenceClassification: ("AutoModelForSequenceClassification", "text-classification"),
    TransfoXLModel: ("AutoModel", "feature-extraction"),
}


@dataclass
class Tokens:
    """The tokenizer if there is a vocabulary, a function that writes it into a folder, and a description."""

    tokenizer: TransfoXLTokenizer | None
    write: Callable[[Path], Any]
    sentence: str


@dataclass
class Conversion:
    """Result of [`convert`].

    Args:
        output (`Path`): The folder.
        found (`str`): Description of the source.
        config (`TransfoXLConfig`): The model's configuration.
        origins (`dict[str, str]`): Where its fields come from.
        account (`Account`): What became of every tensor.
        auto_class (`str`): Auto class that loads the folder.
        tokenizer (`str`): Description of the tokenizer.
        checked (`dict[str, dict[str, float]]`): Largest differences, by what was compared.
    """

    output: Path
    found: str
    config: TransfoXLConfig
    origins: dict[str, str]
    account: Account
    auto_class: str
    tokenizer: str
    checked: dict[str, Differences]

    def __str__(self) -> str:
        lines = [
            f"Found:      {self.found}",
            f"Weights:    {self.account}",
            f"Model:      {', '.join(self.config.architectures or [])}, for {self.auto_class}",
            "Settings:   " + ", ".join(f"{name}={value!r}" for name, value, _ in self.settings()),
            f"Tokenizer:  {self.tokenizer}",
        ]
        lines += [f"Checked:    {line}" for line in self.checks()]
        return "\n".join([*lines, f"Written to  {self.output}"])

    def settings(self) -> list[tuple[str, Any, str]]:
        """Name, value and origin of every setting with a known origin."""
        return [(name, getattr(self.config, name, None), origin) for name, origin in self.origins.items()]

    def checks(self) -> list[str]:
        """One line for each comparison."""
        return [
            f"{what}: largest difference {', '.join(f'{value:.1e} ({name})' for name, value in differences.items())}"
            for what, differences in self.checked.items()
        ]


@dataclass(frozen=True)
class ConversionOptions:
    """Options of [`convert`].

    Args:
        format (`str`, *optional*): A key of `key_rules.FORMATS`; detected if not given.
        settings (`Mapping[str, Any]`, *optional*):
            Fields of [`TransfoXLConfig`], or arguments of the original codes, that the source does not state.
        vocabulary (`str`, `Path` or `False`, *optional*):
            File of the vocabulary; by default the one inside the checkpoint or beside it. `False` for no tokenizer.
            See `read_vocabulary`.
        tokenizer_mode (`str`, *optional*):
            How the tokenizer splits text, if not as the code of the vocabulary did. See [`TransfoXLTokenizer`].
        dtype (`torch.dtype`, *optional*): Precision of the weights; by default that of the source.
        license (`str`, defaults to `"other"`): License on the model card, an identifier of the Hub.
        verify (`bool`, defaults to `False`):
            Load the result and compare it with the slow float64 reference on the source's weights. Needs memory for
            two more copies of the weights.
        recorded (`str` or `Path`, *optional*):
            A safetensors file with recorded outputs to compare the result with; see `verify_recorded`.
        allow_nonfinite (`bool`, defaults to `False`):
            Convert tensors with NaN or infinity as they are, including large numbers that become infinite in a
            narrower `dtype`. Result and card name them.
        force (`bool`, defaults to `False`): Whether to replace an existing `output`.
        protected (`Iterable[str | Path]`): Further files that `force` must not delete with an existing `output`.
        progress (`bool`, defaults to `True`): Whether to show progress.
    """

    format: str | None = None
    settings: Mapping[str, Any] | None = None
    vocabulary: str | Path | Literal[False] | None = None
    tokenizer_mode: str | None = None
    dtype: torch.dtype | None = None
    license: str = "other"
    verify: bool = False
    recorded: str | Path | None = None
    allow_nonfinite: bool = False
    force: bool = False
    protected: Iterable[str | Path] = ()
    progress: bool = True


@dataclass
class SourceModel:
    """The model of a checkpoint, in memory.

    Args:
        model_class (`type`): Class of the model.
        config (`TransfoXLConfig`): Its configuration.
        origins (`dict[str, str]`): Where the fields of the configuration come from.
        weights (`dict[str, torch.Tensor]`): Weights under their published names, in the precision of the source.
        dtype (`torch.dtype`): Precision to write them in.
        account (`Account`): What became of every tensor of the source.
    """

    model_class: type[TransfoXLPreTrainedModel]
    config: TransfoXLConfig
    origins: dict[str, str]
    weights: State
    dtype: torch.dtype
    account: Account


def convert(source: str | Path, output: str | Path, **options: Any) -> Conversion:
    """Convert a checkpoint. Nothing in it is executed or changed, and `output` appears only when all is done.

    Args:
        source (`str` or `Path`): A file, a TensorFlow prefix, a folder as the training script left it, or a Hub id.
        output (`str` or `Path`): The folder to write.
        options: Fields of [`ConversionOptions`]: `format`, `settings`, `vocabulary`, `tokenizer_mode`, `dtype`,
            `license`, `verify`, `recorded`, `allow_nonfinite`, `force`, `protected`, `progress`.

    Returns:
        [`Conversion`]

    Raises:
        FileExistsError, PermissionError: if `output` exists without `force` or cannot be written.
        FileNotFoundError: if there is nothing at `source`.
        VocabularyError: if the source is a vocabulary without a model; `convert_vocabulary` converts it.
        ValueError: if the source cannot be read, or is not a complete model; the message names all reasons.
        RuntimeError: if a comparison exceeds `verify.TOLERANCE`; nothing is written then.
        TypeError: if an option is unknown.
    """
    chosen = read_options(ConversionOptions, options, "convert")
    output = Path(output).expanduser()
    inputs = [source, chosen.vocabulary or None, chosen.recorded, *chosen.protected]
    check = new_or_forced(chosen.force, [each for each in inputs if each is not None])
    check_writable(output, check)

    checkpoint = open_checkpoint(source, chosen.format)
    model = _read_model(checkpoint, chosen)
    tokens = _tokenizer(checkpoint, model.config.vocab_size, chosen.vocabulary, chosen.tokenizer_mode)
    generation = _generation(checkpoint, model.config) if model.model_class is TransfoXLForCausalLM else None
    _set_end_token(model, tokens, generation)
    auto_class, _ = AUTO_CLASSES[model.model_class]
    result = Conversion(
        output, checkpoint.found, model.config, model.origins, model.account, auto_class, tokens.sentence, {}
    )
    with written_beside(output, check) as staging:
        tokens.write(staging)
        _write_model(staging, model, generation)
        result.checked = _check(staging, model, chosen)
        card = _card(checkpoint, model, result, chosen)
        (staging / "README.md").write_text(card.text(), encoding="utf-8")
    return result


def _read_model(checkpoint: Checkpoint, options: ConversionOptions) -> SourceModel:
    """Read settings and weights, and refuse numbers that the model could not hold or that could not be verified."""
    found = Settings(checkpoint, options.settings or {})
    model_class = _model_class(checkpoint.shapes)
    shapes = wanted_shapes(model_class, found.config)
    fitting = Fitting(FORMATS[checkpoint.format], found.config, checkpoint.shapes, shapes)
    weights = fitting.read(checkpoint.tensors, options.allow_nonfinite)
    dtype = _common_dtype(weights) if options.dtype is None else options.dtype
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(map(str, DTYPES))}, but is {dtype}.")
    too_large = _too_large(weights, dtype)
    if too_large and not options.allow_nonfinite:
        raise ValueError(
            f"`dtype` must hold the numbers of all weights, but {dtype} ends at {torch.finfo(dtype).max:g}, and these "
            f"would become infinite: {', '.join(f'`{name}`' for name in too_large)}. bfloat16 has float32's range."
        )
    if options.verify and (fitting.account.nonfinite or too_large):
        raise ValueError(
            "`verify` must be False where weights hold NaN or infinity "
            f"({', '.join(f'`{name}`' for name in [*fitting.account.nonfinite, *too_large])}): outputs computed from "
            "them cannot be compared."
        )
    fitting.account.nonfinite += [f"{name} as {dtype}" for name in too_large]
    return SourceModel(model_class, found.config, found.origins, weights, dtype, fitting.account)


def _card(checkpoint: Checkpoint, model: SourceModel, result: Conversion, options: ConversionOptions) -> Card:
    dtype = str(model.dtype).removeprefix("torch.")
    name = result.output.resolve().name
    command = _command(
        checkpoint.name,
        name,
        format=options.format,
        set=options.settings,
        vocabulary=options.vocabulary,
        tokenizer_mode=options.tokenizer_mode,
        dtype=None if model.dtype == _common_dtype(model.weights) else dtype,
        license=None if options.license == "other" else options.license,
        verify=options.verify,
        recorded=options.recorded,
        allow_nonfinite=options.allow_nonfinite,
    )
    auto_class, pipeline_tag = AUTO_CLASSES[model.model_class]
    return Card(
        name=name,
        found=checkpoint.found,
        files=checkpoint.files,
        command=shlex.join(command),
        version=hf_txl.__version__,
        date=datetime.date.today().isoformat(),
        account=str(model.account),
        parameters=sum(weight.numel() for weight in model.weights.values()),
        dtype=dtype,
        settings=result.settings(),
        tokenizer=result.tokenizer,
        auto_class=auto_class,
        pipeline_tag=pipeline_tag,
        license=options.license,
        holds_code=model.config.save_code,
        checked=result.checks(),
    )


def parse_settings(config: Path | None, assignments: list[str]) -> dict[str, Any]:
    """Settings from a JSON file and from `name=value` strings, whose values are JSON or else plain strings."""
    settings = read_json_object(config) if config is not None else {}
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
    """A floating-point dtype of torch by its name."""
    if name is None:
        return None
    names = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
    if name not in names:
        raise ValueError(f"`dtype` must be one of {', '.join(names)}, but is {name!r}.")
    return names[name]


def _command(source: str, output: str, **options: Any) -> list[str]:
    """The command that repeats the conversion, with file names instead of paths, which depend on the machine."""
    command = ["hf-txl", "convert", source, output]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "set":
            command += [part for key, each in (value or {}).items() for part in (option, f"{key}={json.dumps(each)}")]
        elif name == "vocabulary" and value is False:
            command.append("--no-vocabulary")
        elif value is True:
            command.append(option)
        elif value not in (None, False):
            command += [option, Path(value).name if name in ("vocabulary", "recorded") else value]
    return command


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
    # a common type that holds the numbers of all
    return functools.reduce(torch.promote_types, dtypes)


def _too_large(weights: State, dtype: torch.dtype) -> list[str]:
    """Names of the weights that are finite but would not be in another precision."""
    largest = torch.finfo(dtype).max
    wider = [name for name, weight in weights.items() if torch.finfo(weight.dtype).max > largest]
    return [name for name in wider if is_finite(weights[name]) and not is_finite(weights[name].to(dtype))]


def _generation(checkpoint: Checkpoint, config: TransfoXLConfig) -> GenerationConfig:
    """The generation configuration of the source, or that of the model's configuration."""
    file = checkpoint.files[0].parent / GENERATION_FILE
    if checkpoint.format != "transformers" or not file.is_file():
        return GenerationConfig.from_model_config(config)
    try:
        generation = GenerationConfig.from_dict(read_json_object(file))
        generation.validate()
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} must be a generation configuration, but is not: {error}") from error
    return generation


def _set_end_token(model: SourceModel, tokens: Tokens, generation: GenerationConfig | None) -> None:
    """One end token in both configurations: the caller's, the tokenizer's, or that of either file of the source."""
    config, origins = model.config, model.origins
    if not origins.get("eos_token_id", "").startswith("given"):
        if tokens.tokenizer is not None:
            config.eos_token_id = tokens.tokenizer.eos_token_id
            origins["eos_token_id"] = "tokenizer"
        elif config.eos_token_id is None and generation is not None and generation.eos_token_id is not None:
            config.eos_token_id = generation.eos_token_id
            origins["eos_token_id"] = GENERATION_FILE
    if generation is not None:
        generation.eos_token_id = config.eos_token_id


def _write_model(folder: Path, model: SourceModel, generation: GenerationConfig | None) -> None:
    model.config.architectures = [model.model_class.__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    if generation is not None:
        # `save_pretrained` refuses settings without effect, which transformers 4 wrote
        generation.to_json_file(folder / GENERATION_FILE)
    try:
        save_torch_state_dict(_apart(model.weights, model.dtype), folder, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"The weights cannot be written to {folder}: {error}") from error
    # they are written readable by the owner only; the other files follow the umask
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)


def _apart(weights: State, dtype: torch.dtype) -> State:
    """Each weight in a storage of its own, as safetensors requires; views of one storage are copied."""
    apart: State = {}
    taken: set[int] = set()
    for name, weight in weights.items():
        weight = weight.to(dtype).contiguous()
        if weight.untyped_storage().nbytes() != weight.nbytes or weight.data_ptr() in taken:
            weight = weight.clone()
        taken.add(weight.data_ptr())
        apart[name] = weight
    return apart


def _check(folder: Path, source: SourceModel, options: ConversionOptions) -> dict[str, Differences]:
    """Load what was written and make the comparisons asked for; a difference above the tolerance raises."""
    checked: dict[str, Differences] = {}
    if not options.verify and options.recorded is None:
        return checked
    model = source.model_class.from_pretrained(folder, dtype=torch.float32).eval()
    if options.verify:
        weights = {name: weight.to(source.dtype) for name, weight in source.weights.items()}
        reading = model.transformer if isinstance(model, TransfoXLForSequenceClassification) else model
        checked["the source's weights in the slow float64 reference"] = verify_with_source(
            reading, weights, progress=options.progress
        )
    if (recorded := options.recorded) is not None:
        if not isinstance(model, TransfoXLForCausalLM):
            raise ValueError(
                f"`recorded` must be for a causal language model, but this is a {source.model_class.__name__}."
            )
        try:
            outputs = load_file(recorded)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"`recorded` must be a safetensors file, but {recorded} cannot be read: {error}"
            ) from error
        for run, differences in verify_recorded(model, outputs).items():
            checked[f"{Path(recorded).name}{f', {run}' if run else ''}"] = differences
    if too_large := [line for line in checked.items() if not max(line[1].values()) <= TOLERANCE]:
        narrow = f" The weights were rounded to {source.dtype}." if torch.finfo(source.dtype).bits < 32 else ""
        raise RuntimeError(f"The converted model must agree to {TOLERANCE}, but differs: {dict(too_large)}.{narrow}")
    return checked


# --- tokenizer


def _tokenizer(
    checkpoint: Checkpoint, vocab_size: int, given: str | Path | Literal[False] | None, mode: str | None
) -> Tokens:
    source = given if given is not None else checkpoint.vocabulary
    if source is None or source is False:
        if mode is not None:
            raise ValueError(f"`tokenizer_mode` must come with a vocabulary, but there is none, and it is {mode!r}.")
        why = "there was no vocabulary in the source (`--vocabulary` names one)" if source is None else "as asked"
        return Tokens(None, lambda folder: None, f"none, {why}")
    where = source if isinstance(source, str | Path) else "that of the checkpoint"
    if isinstance(source, str | Path) and Path(source).is_dir():
        source = vocabulary_in(Path(source)) or source
    if isinstance(source, str | Path) and Path(source).name == "tokenizer.json":
        tokenizer, tokens = _fast_tokenizer(Path(source), mode)
    else:
        vocabulary = read_vocabulary(source).of_size(vocab_size)
        tokenizer = vocabulary.tokenizer(mode)
        tokens = Tokens(tokenizer, tokenizer.save_pretrained, describe(vocabulary, tokenizer, mode))
    if len(tokenizer) != vocab_size:
        raise ValueError(
            f"The vocabulary must have as many symbols as the model has ids ({vocab_size}), but {where} has "
            f"{len(tokenizer)}. Name another (`--vocabulary`), or convert without (`--no-vocabulary`)."
        )
    return tokens


def _fast_tokenizer(file: Path, mode: str | None) -> tuple[TransfoXLTokenizer, Tokens]:
    """A `tokenizer.json`, which needs no conversion; only one of this package can change its mode."""
    read_json(file)
    try:
        with warnings.catch_warnings():
            # its size is compared with that of the converted model
            warnings.simplefilter("ignore", UserWarning)
            tokenizer = TransfoXLTokenizer.from_pretrained(file.parent)
    # the library raises errors without a class of their own
    except Exception as error:
        raise ValueError(f"{file} must be a tokenizer, but cannot be loaded: {error}") from error
    if mode is None:
        return tokenizer, Tokens(tokenizer, functools.partial(_copy, file.parent), "that of the source, as it is")
    if "mode" not in tokenizer.init_kwargs:
        raise ValueError(f"`tokenizer_mode` must be left out, since {file} is not of this package, but is {mode!r}.")
    tokenizer = tokenizer.in_mode(mode)
    return tokenizer, Tokens(tokenizer, tokenizer.save_pretrained, f"that of the source, in mode `{mode}`")


def _copy(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


__all__ = ["Conversion", "ConversionOptions", "convert"]

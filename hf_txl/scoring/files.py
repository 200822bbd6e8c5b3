"""Perplexity of text files as the paper measures it, in every unit that people compare.

`PRESETS` holds the lengths and data rules of the evaluation scripts of [Dai et al.,
2019](https://arxiv.org/abs/1901.02860), and [`evaluate_files`] applies them: files are one stream of tokens, read in
segments with a memory by [`~hf_txl.scoring.evaluate_stream`].
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..processes import Processes
from ..tokenization_transfo_xl import AUTO, decoding_utf8, encode_file
from .streams import evaluate_stream


@dataclass(frozen=True)
class Preset:
    """How the original evaluates on a data set.

    Args:
        source (`str`): The original script with these numbers.
        segment_length, mem_len, clamp_len (`int`): `--tgt_len`, `--mem_len` and `--clamp_len` of its evaluation.
        reported (`str`): The paper's figure: `"perplexity"` or `"bits_per_token"`, which there are characters.
        line_start, line_end (`str`, *optional*):
            Tokens around each line: `add_eos` and `add_double_eos` in the original's `data_utils.py`.
    """

    source: str
    segment_length: int
    mem_len: int
    clamp_len: int
    reported: str
    line_start: str | None = None
    line_end: str | None = None
    same_length: bool = True

    def settings(self) -> dict[str, Any]:
        """Segment length and memory arguments."""
        names = ("segment_length", "mem_len", "clamp_len", "same_length")
        return {name: getattr(self, name) for name in names}


PRESETS = {
    "wt103": Preset("tf/sota/wt103.sh", 128, 1600, 1000, "perplexity", line_end="<eos>"),
    "wt103-base": Preset("pytorch/run_wt103_base.sh", 64, 640, 400, "perplexity", line_end="<eos>"),
    "enwik8": Preset("tf/sota/enwik8.sh", 128, 3800, 1000, "bits_per_token"),
    "enwik8-base": Preset("pytorch/run_enwik8_base.sh", 80, 2100, 820, "bits_per_token"),
    "text8": Preset("tf/sota/text8.sh", 128, 3800, 1000, "bits_per_token"),
    "text8-base": Preset("tf/scripts/text8_base_gpu.sh", 80, 2100, 820, "bits_per_token"),
    "lm1b": Preset("tf/sota/lm1b.sh", 32, 128, -1, "perplexity", line_start="<S>", line_end="<S>"),
}


@dataclass(frozen=True)
class TextSize:
    """Size of the files: tokens, words between white space, characters and bytes without a byte-order mark.

    Line breaks count as characters and bytes if the vocabulary has them or the tokenizer joins words, not if it drops
    them, as that of enwik8 does.
    """

    tokens: int
    words: int
    characters: int
    bytes: int


@dataclass(frozen=True)
class Evaluation:
    """Loss of text files with certain lengths.

    Args:
        settings (`dict`): `segment_length`, `mem_len`, `clamp_len`, `same_length`, `batch_size`.
        loss (`float`): Nats per scored token.
        predictions (`int`): Scored tokens.
        seconds (`float`): Duration.
        size ([`TextSize`]): What the files hold.
    """

    settings: dict[str, Any]
    loss: float
    predictions: int
    seconds: float
    size: TextSize

    def nats_per(self, unit: str) -> float:
        """Nats per `token`, `word`, `character` or `byte`: the mean loss times the tokens of such a unit."""
        count = self.size.tokens if unit == "token" else getattr(self.size, f"{unit}s" if unit != "byte" else "bytes")
        return self.loss * self.size.tokens / count if count else math.nan

    def figures(self) -> dict[str, float]:
        """Nats, perplexity and bits in all units."""
        figures = {"nats_per_token": self.loss, "nats": self.loss * self.predictions}
        for unit in ("token", "word"):
            nats = self.nats_per(unit)
            figures["perplexity" if unit == "token" else "word_perplexity"] = (
                math.exp(nats) if nats < 709 else math.inf
            )
        bits = {
            f"bits_per_{unit}": self.nats_per(unit) / math.log(2) for unit in ("token", "word", "character", "byte")
        }
        return {**figures, **bits}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        counts = {"predictions": self.predictions, **asdict(self.size)}
        return {**self.settings, **self.figures(), "counts": counts, "seconds": round(self.seconds, 3)}


def check_scorer(model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer of another vocabulary than the model's, and weights that are not finite.

    Raises:
        ValueError: for either.
    """
    if len(tokenizer) != model.config.vocab_size:
        raise ValueError(
            f"`tokenizer` must have as many tokens as the model ({model.config.vocab_size}), but has {len(tokenizer)}."
        )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(f"`model` must have finite weights, but `{name}` has NaN or infinity.")


def read_files(
    tokenizer: Any, files: Sequence[str | Path], line_start: str | None = AUTO, line_end: str | None = AUTO
) -> tuple[np.ndarray, TextSize]:
    """Token ids of files, one after the other, and their size.

    Raises:
        ValueError: for no file, an empty one, one that is not UTF-8, and a text without any token of the vocabulary.
    """
    if not files:
        raise ValueError("`files` must be text files, but is empty.")
    streams, words, characters, num_bytes = [], 0, 0, 0
    drops_line_breaks = tokenizer.init_kwargs.get("mode") in ("characters", "bytes") and not _has_line_break(tokenizer)
    for file in map(Path, files):
        if file.stat().st_size == 0:
            raise ValueError(f"`files` must hold text, but {file} is empty.")
        streams.append(encode_file(tokenizer, file, line_start=line_start, line_end=line_end))
        text = _text_of(tokenizer, file)
        words += len(text.split())
        text = text.replace("\n", "") if drops_line_breaks else text
        characters += len(text)
        num_bytes += len(text.encode("utf-8", "surrogateescape"))
    ids = np.concatenate(streams)
    special = set(tokenizer.convert_tokens_to_ids([t for t in (line_start, line_end) if t not in (None, AUTO)]))
    unknown = {tokenizer.unk_token_id, tokenizer.eos_token_id, *special}
    if not (~np.isin(ids, [token for token in unknown if token is not None])).any():
        raise ValueError(f"`files` must hold a token of the vocabulary, but {', '.join(map(str, files))} has none.")
    return ids, TextSize(len(ids), words, characters, num_bytes)


def _has_line_break(tokenizer: Any) -> bool:
    ids = tokenizer("\n", add_special_tokens=False)["input_ids"]
    return bool(ids) and ids != [tokenizer.unk_token_id]


def _text_of(tokenizer: Any, file: Path) -> str:
    if tokenizer.init_kwargs.get("mode") == "bytes":
        return file.read_bytes().decode("utf-8", "surrogateescape")
    with decoding_utf8(file):
        return file.read_text(encoding="utf-8-sig")


def evaluate_files(
    model: TransfoXLForCausalLM,
    tokenizer: Any,
    files: Sequence[str | Path],
    *,
    preset: str | None = None,
    batch_size: int = 1,
    progress: bool = True,
    processes: Processes | None = None,
    **lengths: Any,
) -> list[Evaluation]:
    """Evaluate a model on text files, read one after the other as one stream of tokens.

    Args:
        model ([`TransfoXLForCausalLM`]): The model.
        tokenizer: Its tokenizer.
        files (`list` of paths): Text files in UTF-8; any files for a tokenizer of bytes.
        preset (`str`, *optional*): A name in `PRESETS`: the original's lengths and rules for lines.
        batch_size (`int`, defaults to 1): Rows read in parallel, as for [`evaluate_stream`]; 1 is exact.
        progress (`bool`, defaults to `True`): Whether to show progress bars.
        processes ([`~hf_txl.processes.Processes`], *optional*):
            Processes that share the combinations of lengths and all call this function. Default: this one alone.
        lengths (*optional*):
            `segment_length`, `mem_len`, `clamp_len`, `same_length`, `memory_init`, each a value or a list of values,
            instead of the preset's. All combinations are evaluated. Defaults: segments of 128, otherwise the model's
            configuration.

    Returns:
        `list[Evaluation]`: one for each combination, the last length varying fastest.

    Raises:
        ValueError: for unfit files, tokenizers, weights and lengths; the message names them.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"`preset` must be one of {list(PRESETS)}, but is {preset!r}.")
    rules = None if preset is None else PRESETS[preset]
    config = model.config
    settings = {
        "segment_length": 128,
        **{name: getattr(config, name) for name in ("mem_len", "clamp_len", "same_length", "memory_init")},
    }
    if unknown := lengths.keys() - settings.keys():
        raise TypeError(f"`evaluate_files` has no arguments {sorted(unknown)}.")
    settings |= {} if rules is None else rules.settings()
    settings |= {name: value for name, value in lengths.items() if value is not None}
    check_scorer(model, tokenizer)
    lines = {} if rules is None else {"line_start": rules.line_start, "line_end": rules.line_end}
    ids, size = read_files(tokenizer, files, **lines)
    choices = [value if isinstance(value, list | tuple) else [value] for value in settings.values()]
    chosen = [dict(zip(settings, values, strict=True)) for values in product(*choices)]

    def evaluate(lengths: dict[str, Any]) -> Evaluation:
        score = evaluate_stream(model, ids, batch_size=batch_size, progress=progress, **lengths)
        shown = {"preset": preset, **lengths, "batch_size": batch_size}
        return Evaluation(shown, score.loss, score.predictions, score.seconds, size)

    return [evaluate(each) for each in chosen] if processes is None else processes.share(chosen, evaluate)


def plot_evaluations(evaluations: Sequence[Evaluation], file: str | Path) -> None:
    """Plot bits per token by the length that varies; needs matplotlib.

    Raises:
        ValueError: if no length or more than two vary.
    """
    from matplotlib.figure import Figure

    rows = [evaluation.settings for evaluation in evaluations]
    varying = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
    if not 1 <= len(varying) <= 2:
        raise ValueError(f"A plot shows one length or two that vary, but {varying or 'none'} of them do.")
    along, *others = sorted(varying, key=lambda name: -len({row[name] for row in rows}))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for value in sorted({row[others[0]] for row in rows}) if others else [None]:
        line = [each for each in evaluations if not others or each.settings[others[0]] == value]
        line.sort(key=lambda each: each.settings[along])
        label = f"{others[0]} {value}" if others else None
        axes.plot([each.settings[along] for each in line], [each.nats_per("token") / math.log(2) for each in line],
                  marker="o", label=label)  # fmt: skip
    axes.set(xlabel=along.replace("_", " "), ylabel="bits per token")
    if others:
        axes.legend()
    figure.savefig(file, dpi=150)


__all__ = ["PRESETS", "Evaluation", "TextSize", "evaluate_files"]

"""`hf-txl evaluate`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .running import errors_as_messages, loading

if TYPE_CHECKING:
    from ..scoring.files import Evaluation


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")],
    files: Annotated[list[Path], typer.Argument(help="Text files, read as one stream.", exists=True, dir_okay=False)],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Lengths and data rules of the paper: wt103, enwik8, text8, lm1b, or …-base of the first three."
        ),
    ] = None,
    segment_length: Annotated[
        str | None, typer.Option(help="Tokens of a segment; several with commas.", show_default="128")
    ] = None,
    mem_len: Annotated[
        str | None, typer.Option(help="Memory length; several with commas.", show_default="the model's")
    ] = None,
    clamp_len: Annotated[
        str | None,
        typer.Option(help="Largest distance, below 1: none; several with commas.", show_default="the model's"),
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option(help="The same number of keys for every query.", show_default="the model's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows read in parallel; 1 is exact.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Plot the lengths that vary to this image file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Measure perplexity and bits per token, word, character and byte of text files, with a memory.

    Under `torchrun` or `accelerate launch`, processes share the combinations of lengths.
    """
    from transformers import AutoTokenizer

    from ..modeling_transfo_xl import TransfoXLForCausalLM
    from ..processes import started_processes
    from ..scoring.files import evaluate_files, plot_evaluations

    with errors_as_messages():
        lengths: dict[str, Any] = {
            "segment_length": numbers("--segment-length", segment_length),
            "mem_len": numbers("--mem-len", mem_len),
            "clamp_len": numbers("--clamp-len", clamp_len),
            "same_length": same_length,
        }
        with loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = TransfoXLForCausalLM.from_pretrained(model).eval()
        processes = started_processes()
        shown: dict[str, Any] = {"preset": preset, "batch_size": batch_size, "progress": processes.index == 0}
        loaded = loaded.to(processes.device)
        evaluations = evaluate_files(loaded, tokenizer, files, processes=processes, **shown, **lengths)
        if processes.index > 0:
            return
        if plot is not None:
            plot_evaluations(evaluations, plot)
    if json_:
        typer.echo(json.dumps([each.as_dict() for each in evaluations], indent=1))
    else:
        typer.echo(table(evaluations))


def numbers(option: str, value: str | None) -> list[int] | None:
    """Numbers separated by commas."""
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"`{option}` must be integers separated by commas, but is {value!r}.") from None


COLUMNS = {
    "segment_length": "segment",
    "mem_len": "memory",
    "clamp_len": "clamp",
    "same_length": "same length",
    "nats_per_token": "nats/token",
    "perplexity": "perplexity",
    "word_perplexity": "per word",
    "bits_per_token": "bits/token",
    "bits_per_word": "bits/word",
    "bits_per_character": "bits/char",
    "bits_per_byte": "bits/byte",
}


def table(evaluations: "list[Evaluation]") -> str:
    """A row for each evaluation, below the size of the text."""
    size, predictions = evaluations[0].size, evaluations[0].predictions
    head = f"{size.tokens:,} tokens ({predictions:,} scored), {size.words:,} words, {size.characters:,} characters, "
    rows = [list(COLUMNS.values())]
    for each in evaluations:
        values = {**each.settings, **each.figures()}
        rows.append(
            [f"{values[name]:.4f}" if isinstance(values[name], float) else str(values[name]) for name in COLUMNS]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"{head}{size.bytes:,} bytes", *lines])

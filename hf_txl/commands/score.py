"""`hf-txl score`."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .running import errors_as_messages, loading


class Level(StrEnum):
    """What a row is."""

    word = "word"
    token = "token"


class Memory(StrEnum):
    """When a text begins with a fresh memory."""

    fresh = "fresh"
    running = "running"


class Unit(StrEnum):
    """Unit of surprisal."""

    bits = "bits"
    nats = "nats"


class Words(StrEnum):
    """What a word is."""

    whitespace = "whitespace"
    punctuation = "punctuation"


class Format(StrEnum):
    """Format of the output."""

    tsv = "tsv"
    jsonl = "jsonl"
    parquet = "parquet"


def score(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")],
    file: Annotated[
        Path, typer.Argument(help="Text file in UTF-8; each line is a text.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="New file for the scores.")],
    level: Annotated[Level, typer.Option(help="A row for each word or token.")] = Level.word,
    memory: Annotated[
        Memory, typer.Option(help="fresh: for each line; running: the file is one text, read with a memory.")
    ] = Memory.fresh,
    first_token_after: Annotated[
        str | None,
        typer.Option(
            help="Token before a text, such as <eos>, so that its first token has a surprisal.", show_default="none"
        ),
    ] = None,
    unit: Annotated[Unit, typer.Option(help="Unit of surprisal.")] = Unit.bits,
    words: Annotated[Words, typer.Option(help="Words between white space, or punctuation apart.")] = Words.whitespace,
    format_: Annotated[
        Format | None,
        typer.Option("--format", help="tsv, jsonl or parquet.", show_default="by the name of the output"),
    ] = None,
    segment_length: Annotated[int, typer.Option(min=1, help="Tokens of a segment.")] = 512,
    mem_len: Annotated[int | None, typer.Option(min=0, help="Memory length.", show_default="the model's")] = None,
    clamp_len: Annotated[
        int | None, typer.Option(help="Largest distance, below 1: none.", show_default="the model's")
    ] = None,
    same_length: Annotated[
        bool | None, typer.Option(help="The same number of keys for every query.", show_default="the model's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Lines read together with a fresh memory.")] = 16,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each process on a CPU.")] = 1,
) -> None:
    """Write the surprisal of each word or token of a text file, with its characters in the line.

    A run that was killed goes on if it is started again. Under `torchrun` or `accelerate launch` processes share the
    lines.
    """
    from transformers import AutoTokenizer

    from ..modeling_transfo_xl import TransfoXLForCausalLM
    from ..scoring import score_file

    with errors_as_messages():
        with loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = TransfoXLForCausalLM.from_pretrained(model)
        num_lines = score_file(
            loaded,
            tokenizer,
            file,
            output,
            level=level.value,
            kind=None if format_ is None else format_.value,
            threads=threads,
            memory=memory.value,
            first_token_after=first_token_after,
            unit=unit.value,
            words=words.value,
            batch_size=batch_size,
            segment_length=segment_length,
            mem_len=mem_len,
            clamp_len=clamp_len,
            same_length=same_length,
        )
    # once, also under a launcher
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"{output}: {num_lines:,} lines")

"""`hf-txl score`."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .running import errors_as_messages, loading

if TYPE_CHECKING:
    from ..scoring import TextScore

# texts that are scored together, and kept together after a kill
BLOCK = 64
# digits after the point: float32 rounds beyond them
DIGITS = 4
COLUMNS = {
    "word": ("text", "word_index", "word", "start", "end", "surprisal", "tokens", "unknown"),
    "token": ("text", "word_index", "token", "start", "end", "surprisal", "unknown"),
}


class Memory(StrEnum):
    """When a text begins with a fresh memory."""

    fresh = "fresh"
    running = "running"


class Level(StrEnum):
    """What a row is."""

    word = "word"
    token = "token"


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
    mem_len: Annotated[int | None, typer.Option(min=0, help="Memory length.", show_default="the model's")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Lines read together with a fresh memory.")] = 16,
) -> None:
    """Write the surprisal of each word or token of a text file, with its characters in the line.

    A run that was killed goes on if it is started again. Under `torchrun` or `accelerate launch` processes share the
    lines; give each as many threads as a single process would have (OMP_NUM_THREADS) for the same digits.
    """
    import torch
    from accelerate import PartialState
    from transformers import AutoTokenizer

    from ..modeling_transfo_xl import TransfoXLForCausalLM
    from ..shards import Shards, content_hash

    with errors_as_messages():
        kind = format_ or format_of(output)
        lines = read_lines(file)
        settings: dict[str, Any] = {
            "memory": memory.value,
            "first_token_after": first_token_after,
            "unit": unit.value,
            "words": words.value,
            "batch_size": batch_size,
            **({} if mem_len is None else {"mem_len": mem_len}),
        }
        with loading(model):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = TransfoXLForCausalLM.from_pretrained(model).eval()
        if not any(tokenizer.unk_token_id != id_ for line in lines for id_ in tokenizer(line).input_ids):
            raise ValueError(f"`file` must hold a word of the vocabulary, but {file} has none.")
        # without `cpu`, processes on a CPU would not know each other
        state = PartialState(cpu=not torch.cuda.is_available())
        # a stream is one block: each line follows those before it
        blocks = [lines] if memory is Memory.running else [lines[i : i + BLOCK] for i in range(0, len(lines), BLOCK)]
        facts = {**settings, "level": level.value, "format": kind.value, "model": model, "text": content_hash(*lines)}
        if state.is_main_process:
            shards = Shards(output, len(blocks), facts)
        state.wait_for_everyone()
        if not state.is_main_process:
            shards = Shards(output, len(blocks), facts)
        score_blocks(shards, blocks, loaded, tokenizer, settings, (level.value, kind.value))
        state.wait_for_everyone()
        if state.is_main_process:
            head = "\t".join(COLUMNS[level.value]) + "\n" if kind is Format.tsv else ""
            shards.join(to_parquet if kind is Format.parquet else None, head.encode())
            typer.echo(f"{output}: {len(lines):,} lines")


def read_lines(file: Path) -> list[str]:
    """Lines of a text file without their breaks."""
    from ..tokenization_transfo_xl import decoding_utf8

    if file.stat().st_size == 0:
        raise ValueError(f"`file` must hold text, but {file} is empty.")
    with decoding_utf8(file):
        return file.read_text(encoding="utf-8-sig").splitlines()


def format_of(output: Path) -> Format:
    """The format by the ending of the name."""
    try:
        return Format(output.suffix.lower().lstrip("."))
    except ValueError:
        names = ", ".join(f".{each.value}" for each in Format)
        raise ValueError(f"`--output` must end with {names} without `--format`, but is {output}.") from None


def score_blocks(
    shards: Any, blocks: list[list[str]], model: Any, tokenizer: Any, settings: dict[str, Any], form: tuple[str, str]
) -> None:
    """Score the blocks of this process that are missing."""
    from accelerate import PartialState
    from tqdm.auto import tqdm

    from ..scoring import score_texts

    state = PartialState()
    missing = list(shards.missing(state.process_index, state.num_processes))
    for block in tqdm(missing, unit="block", desc="scoring", disable=not state.is_main_process):
        scores = score_texts(model, tokenizer, blocks[block], **settings)
        first = sum(map(len, blocks[:block]))
        shards.write(block, "".join(rows(scores, first, *form)).encode())


def rows(scores: "list[TextScore]", first: int, level: str, form: str) -> Iterator[str]:
    """Lines of the output for these texts, the first of which has the number `first`."""
    for number, text in enumerate(scores, start=first):
        for row in text_rows(text, number, level):
            if form == "tsv":
                yield "\t".join(cell(value) for value in row) + "\n"
            else:
                yield json.dumps(dict(zip(COLUMNS[level], row, strict=True)), ensure_ascii=False) + "\n"


def text_rows(text: "TextScore", number: int, level: str) -> Iterator[tuple[Any, ...]]:
    """Rows in the order of `COLUMNS`."""
    if level == "token":
        for each in text.tokens:
            yield number, each.word, each.token, each.start, each.end, digits(each.surprisal), each.is_unknown
        return
    for index, word in enumerate(text.words):
        counted = word.num_tokens, word.has_unknown
        yield number, index, word.word, word.start, word.end, digits(word.surprisal), *counted


def digits(surprisal: float | None) -> float | None:
    return None if surprisal is None else round(surprisal, DIGITS)


def cell(value: Any) -> str:
    """A value as a cell: nothing for None, 0 or 1 for a flag."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).replace("\t", "\\t").replace("\n", "\\n")


def to_parquet(lines: Path, output: Path) -> None:
    """JSON lines as a Parquet file, which `datasets` loads."""
    import pyarrow.json
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.json.read_json(lines), output)

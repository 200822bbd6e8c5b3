"""Surprisals of a text file as a table, block by block: a killed run goes on, and processes share the lines."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from ..data import check_sizes
from ..memory_files import read_memory, write_memory
from ..modeling_transfo_xl import TransfoXLForCausalLM
from ..processes import Processes, started_processes
from ..shards import Shards
from ..tokenization_transfo_xl import decoding_utf8
from .surprisal import TextScorer
from .tables import COLUMNS, FORMATS, head_line, table_lines, write_parquet

# lines of a block, unless that makes more than so many blocks
BLOCK_LINES, MOST_BLOCKS = 64, 10_000
# of a stream, whose blocks end at line ends: at most some minutes of work
BLOCK_CHARACTERS = 2**16


class Block(NamedTuple):
    """Lines that are scored together, of which the first has the number `first`."""

    first: int
    lines: list[str]


def score_file(
    model: TransfoXLForCausalLM,
    tokenizer: Any,
    file: str | Path,
    output: str | Path,
    *,
    level: str = "word",
    kind: str | None = None,
    threads: int = 1,
    **options: Any,
) -> int:
    """Write the surprisals of a text file as a table; each line is a text.

    Lines are scored in blocks, each of which is written when it is complete, to the folder `OUTPUT.parts`. A run that
    was killed and is started again goes on there; the parts become the output when all are there. Processes that
    `torchrun` or `accelerate launch` started share the blocks; the output does not depend on their number.

    With `memory="running"` the file is one stream, read by one process, whose memory is written with each block.
    Blocks end at line ends, so there results differ from those of [`score_texts`] unless `same_length=True`.

    Args:
        model ([`TransfoXLForCausalLM`]): The model; it is moved to the device of the process.
        tokenizer: Its tokenizer, a fast one.
        file (`str` or `Path`): Text in UTF-8. A line includes its line break; a byte-order mark is skipped.
        output (`str` or `Path`):
            New file with a row for each word or token. Columns: `text`, the number of the line from 0; `word_index` in
            the line; `word` or `token`; `start` and `end`, its characters in the line; `surprisal`, rounded to 4
            digits, none for a first token; for a word the number of its `tokens`; whether it has the `unknown` token.
        level (`str`, defaults to `"word"`): `"word"` or `"token"`.
        kind (`str`, *optional*): `"tsv"`, `"jsonl"` or `"parquet"`. Default: the ending of the output's name.
        threads (`int`, defaults to 1):
            Threads of this process on a CPU. Last digits depend on it, so it is not that of the machine or launcher;
            processes use several cores better than threads do.
        options: Arguments of [`score_texts`].

    Returns:
        `int`: the number of lines.

    Raises:
        ValueError: for unfit files, tokenizers, weights and arguments; the message names them.
        FileExistsError: if `output` exists, or parts of another text or model or of other arguments.
    """
    file, output = Path(file), Path(output)
    check_sizes(threads=threads)
    kind = _checked_form(output, level, kind)
    lines = read_lines(file, tokenizer)
    processes = started_processes()
    with number_of_threads(threads):
        model.to(processes.device)  # type: ignore[arg-type]
        scorer = TextScorer(model, tokenizer, **options)
        blocks = list(stream_blocks(lines) if scorer.is_stream else equal_blocks(lines, scorer.options.batch_size))
        facts = {
            **asdict(scorer.options),
            **scorer.settings,
            "level": level,
            "kind": kind,
            "threads": threads,
            "device": processes.device.type,
            "text": _hash_of(line.encode() for line in lines),
            "model": _model_hash(model, tokenizer),
        }
        shards = processes.first_alone(lambda: Shards(output, len(blocks), facts))
        with shards.discarded_if_empty():
            own = _own_blocks(processes, shards, scorer)
            for block in tqdm(own, "scoring", unit="block", disable=processes.index > 0):
                scores = scorer(blocks[block].lines)
                _save_stream(scorer, shards, block)
                shards.write(block, table_lines(scores, blocks[block].first, level, kind))
            processes.wait()
            if processes.index == 0:
                shards.join(head_line(level, kind), partial(write_parquet, level=level) if kind == "parquet" else None)
    return len(lines)


@contextmanager
def number_of_threads(threads: int) -> Iterator[None]:
    """Threads of PyTorch within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_lines(file: Path, tokenizer: Any) -> list[str]:
    """Lines of a text file with their breaks.

    Raises:
        ValueError: for a file that is empty, not UTF-8, or without any token of the vocabulary.
    """
    if file.stat().st_size == 0:
        raise ValueError(f"`file` must hold text, but {file} is empty.")
    with decoding_utf8(file), file.open(encoding="utf-8-sig", newline="") as opened:
        lines = list(opened)
    encoded = (tokenizer(line, add_special_tokens=False)["input_ids"] for line in lines)
    if not any(id_ != tokenizer.unk_token_id for ids in encoded for id_ in ids):
        raise ValueError(f"`file` must hold a token of the vocabulary, but {file} has none.")
    return lines


def equal_blocks(lines: list[str], batch_size: int) -> Iterator[Block]:
    """Blocks of a fixed number of lines."""
    size = max(BLOCK_LINES, batch_size, -(-len(lines) // MOST_BLOCKS))
    for first in range(0, len(lines), size):
        yield Block(first, lines[first : first + size])


def stream_blocks(lines: list[str]) -> Iterator[Block]:
    """Blocks of about the same number of characters."""
    first, characters = 0, 0
    for number, line in enumerate(lines, start=1):
        characters += len(line)
        if characters >= BLOCK_CHARACTERS or number == len(lines):
            yield Block(first, lines[first:number])
            first, characters = number, 0


def _checked_form(output: Path, level: str, kind: str | None) -> str:
    """The kind of the table."""
    if level not in COLUMNS:
        raise ValueError(f"`level` must be one of {list(COLUMNS)}, but is {level!r}.")
    kind = output.suffix.lower().lstrip(".") if kind is None else kind
    if kind not in FORMATS:
        raise ValueError(f"`kind` must be one of {list(FORMATS)}, or `output` end with one, but {output} does not.")
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise ImportError("`kind='parquet'` needs pyarrow, which comes with `pip install \"hf_txl[train]\"`.")
    return kind


def _own_blocks(processes: Processes, shards: Shards, scorer: TextScorer) -> list[int]:
    """The missing blocks of this process. A stream has one reader, which goes on from its last written memory."""
    missing = shards.missing()
    # nothing is written until all have looked
    processes.wait()
    if not scorer.is_stream:
        return missing[processes.index :: processes.number]
    if processes.index > 0:
        return []
    if missing and missing[0] > 0:
        state = read_memory(_memory_file(shards, missing[0] - 1))
        scorer.stream.load_state_dict(state)
        scorer.stream.to(processes.device)
        scorer.last_ids = state["last_ids"]
    return missing


def _save_stream(scorer: TextScorer, shards: Shards, block: int) -> None:
    """Write the memory before the part of a block. Until that part is there, the memory before it is needed too."""
    if scorer.is_stream:
        write_memory(_memory_file(shards, block), scorer.stream, last_ids=scorer.last_ids)
        _memory_file(shards, block - 2).unlink(missing_ok=True)


def _memory_file(shards: Shards, block: int) -> Path:
    return shards.folder / f"memory-{block}.safetensors"


def _hash_of(parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


def _model_hash(model: TransfoXLForCausalLM, tokenizer: Any) -> str:
    """Hash of weights, configuration and vocabulary, wherever they come from."""
    config = {name: value for name, value in model.config.to_dict().items() if name[0] != "_"}
    texts = [json.dumps(each, sort_keys=True, default=str) for each in (config, tokenizer.get_vocab())]
    weights = (weight.detach().cpu().reshape(-1).view(torch.uint8).numpy() for weight in model.state_dict().values())
    return _hash_of(chain((text.encode("utf-8", "surrogatepass") for text in texts), weights))


__all__ = ["score_file"]

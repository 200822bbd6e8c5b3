"""Surprisals as rows of a table: TSV, JSON lines and Parquet."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .surprisal import TextScore

# digits after the point: float32 rounds beyond them
DIGITS = 4
COLUMNS = {
    "word": {
        "text": "int64",
        "word_index": "int64",
        "word": "string",
        "start": "int64",
        "end": "int64",
        "surprisal": "float64",
        "tokens": "int64",
        "unknown": "bool",
    },
    "token": {
        "text": "int64",
        "word_index": "int64",
        "token": "string",
        "start": "int64",
        "end": "int64",
        "surprisal": "float64",
        "unknown": "bool",
    },
}
FORMATS = ("tsv", "jsonl", "parquet")
ROWS_TOGETHER = 2**16


def table_lines(scores: Sequence[TextScore], first: int, level: str, kind: str) -> str:
    """Lines of a table for these texts, the first of which has the number `first`.

    In TSV, None is an empty cell and a flag 0 or 1; cells with tabs, quotes or line breaks are quoted. For Parquet,
    the lines are JSON, which [`write_parquet`] reads.
    """
    rows = (row for number, score in enumerate(scores, start=first) for row in text_rows(score, number, level))
    lines = io.StringIO()
    if kind == "tsv":
        writer = csv.writer(lines, "excel-tab", lineterminator="\n")
        writer.writerows([int(value) if isinstance(value, bool) else value for value in row] for row in rows)
    else:
        for row in rows:
            lines.write(json.dumps(dict(zip(COLUMNS[level], row, strict=True)), ensure_ascii=False) + "\n")
    return lines.getvalue()


def text_rows(score: TextScore, number: int, level: str) -> Iterator[tuple[Any, ...]]:
    """A row for each word or token, in the order of [`COLUMNS`]."""
    if level == "token":
        for token in score.tokens:
            place = number, token.word, token.token, token.start, token.end
            yield *place, _rounded(token.surprisal), token.is_unknown
        return
    for index, word in enumerate(score.words):
        place = number, index, word.word, word.start, word.end
        yield *place, _rounded(word.surprisal), word.num_tokens, word.has_unknown


def head_line(level: str, kind: str) -> str:
    """What stands before all rows."""
    return "\t".join(COLUMNS[level]) + "\n" if kind == "tsv" else ""


def write_parquet(lines: Path, output: Path, level: str) -> None:
    """JSON lines as a Parquet file. Needs pyarrow, which comes with `datasets`."""
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in COLUMNS[level].items()])
    with lines.open(encoding="utf-8") as file, pyarrow.parquet.ParquetWriter(output, schema) as writer:
        while rows := [json.loads(line) for line in islice(file, ROWS_TOGETHER)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def _rounded(surprisal: float | None) -> float | None:
    return None if surprisal is None else round(surprisal, DIGITS)

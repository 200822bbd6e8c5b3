"""Memory of a process that reads a corpus larger than it may hold, from disk and while it is tokenised.

A text of 2 GB (the text in the package over and over, in numbered paragraphs) is tokenised into an Arrow file, read as
streams, and then read again while it is tokenised (`streaming=True`). In each case the anonymous memory of the process
(RssAnon: what no file backs) is noted twenty times on the way.

Run with `python benchmarks/streaming.py`; an hour on two cores, and 5 GB of disk (`--ways streamed`: half of both). It
writes `streaming.json`.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import process_bytes, write_results
from tqdm.auto import tqdm

from hf_txl import TransfoXLTokenizer
from hf_txl.corpus import tokenize_corpus
from hf_txl.data import DocumentStreams, TokenStreams
from hf_txl.demo import demo_text
from hf_txl.tokenization_transfo_xl import build_vocabulary

ROWS, SEGMENT = 16, 512
NOTES = 20


def write_text(path: Path, size: int) -> tuple[int, int]:
    """Bytes and words written: the text, a paragraph a line with a running number, until there are enough."""
    lines = demo_text().splitlines()
    paragraphs = [" ".join(lines[start : start + 40]) for start in range(0, len(lines), 40)]
    words = [len(paragraph.split()) + 1 for paragraph in paragraphs]
    written = number = num_words = 0
    with open(path, "w", encoding="utf-8") as file, tqdm(total=size, unit="B", unit_scale=True, desc="writing") as bar:
        while written < size:
            for paragraph in paragraphs:
                number += 1
                written += file.write(f"{number} {paragraph}\n")
            num_words += sum(words)
            bar.update(written - bar.n)
    return written, num_words


def read(segments: Iterator[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Read all segments; tokens per second, and anonymous memory at the start, on the way and at most."""
    started, start = time.perf_counter(), process_bytes("RssAnon")
    read_tokens, notes, most = 0, [], start
    with tqdm(total=num_tokens, unit="tok", unit_scale=True, desc="reading") as bar:
        for segment in segments:
            count = int((segment["shift_labels"] != -100).sum())
            read_tokens += count
            bar.update(count)
            if read_tokens >= num_tokens * (len(notes) + 1) / NOTES:
                notes.append(process_bytes("RssAnon"))
                most = max(most, notes[-1])
    return {
        "tokens": read_tokens,
        "tokens_per_second": read_tokens / (time.perf_counter() - started),
        "anonymous_bytes_at_start": start,
        "anonymous_bytes_on_the_way": notes,
        "anonymous_bytes_above_start": most - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2 * 10**9, help="bytes of text")
    parser.add_argument("--num-proc", type=int, default=2, help="processes that tokenise")
    parser.add_argument("--ways", nargs="+", default=["stored", "streamed"], choices=["stored", "streamed"])
    options = parser.parse_args()
    tokenizer = TransfoXLTokenizer.from_vocabulary(build_vocabulary([demo_text()], "pretokenized"), "pretokenized")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        size, num_words = write_text(path, options.size)
        results: dict[str, Any] = {"text_bytes": size}
        if "stored" in options.ways:
            started = time.perf_counter()
            corpus = tokenize_corpus(path, tokenizer, num_proc=options.num_proc, cache_dir=folder)
            results["tokenizing_bytes_per_second"] = size / (time.perf_counter() - started)
            results["stored"] = read(TokenStreams(corpus, ROWS, SEGMENT).segments(), num_words)
        if "streamed" in options.ways:
            streamed = tokenize_corpus(path, tokenizer, streaming=True)
            results["streamed"] = read(DocumentStreams(streamed, ROWS, SEGMENT, separate=False).segments(), num_words)
        results["largest_megabytes"] = math.ceil(
            max(results[way]["anonymous_bytes_above_start"] for way in options.ways) / 1e6
        )
    write_results(__file__, results)


if __name__ == "__main__":
    main()

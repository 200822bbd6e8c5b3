"""Train the small model in the package, `hf_txl.example_model()`, on four novels.

    python examples/example_model.py --books war_and_peace.txt middlemarch.txt moby_dick.txt great_expectations.txt \\
        --output_dir runs/example

The books are Project Gutenberg's electronic texts 2600, 145, 2701 and 1400, in the public domain, without the
distributor's header and footer. Each paragraph becomes a line. The last 20,000 words of the second book are held out.
Settings are in `recipes/example_model.json`; further options go to `train.py`. About 20 minutes on one core.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import train

RECIPE = Path(__file__).parent / "recipes" / "example_model.json"
HELD_OUT = 20_000
VOCABULARY = ["--max_size", "8000"]
MEMORY = ["--mem_lens", "0", "16", "32", "64", "128", "256"]


def paragraphs(book: str) -> list[str]:
    """The paragraphs of a book, each as one line, with plain quotation marks and without the marks of italics."""
    for pattern, plain in (("[“”]", '"'), ("[‘’]", "'"), ("_", ""), ("--|—", " - ")):
        book = re.sub(pattern, plain, book)
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", book) if paragraph.strip()]


def split(lines: list[str], num_words: int) -> tuple[list[str], list[str]]:
    """The lines, and the last of them that make up `num_words` words."""
    words = 0
    for index in range(len(lines), 0, -1):
        words += len(lines[index - 1].split())
        if words >= num_words:
            return lines[: index - 1], lines[index - 1 :]
    raise ValueError(f"The book must have more than {num_words} words, but has {words}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--books", nargs=4, required=True, type=Path)
    options, others = parser.parse_known_args()
    books = [paragraphs(book.read_text(encoding="utf-8")) for book in options.books]
    books[1], held_out = split(books[1], HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        texts = {"train.txt": [line for book in books for line in book], "valid.txt": held_out}
        for name, lines in texts.items():
            (Path(folder) / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        files = ["--train_file", f"{folder}/train.txt", "--validation_file", f"{folder}/valid.txt"]
        sys.argv = [sys.argv[0], *files, "--recipe", str(RECIPE), *VOCABULARY, *MEMORY, *others]
        train.main()


if __name__ == "__main__":
    main()

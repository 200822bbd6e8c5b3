"""`hf-txl build-tokenizer`."""

from pathlib import Path
from typing import Annotated

import typer

from .running import errors_as_messages


def build_tokenizer(
    texts: Annotated[list[Path], typer.Argument(help="Text files, UTF-8.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    mode: Annotated[
        str, typer.Option(help="How text is split: moses (raw text), pretokenized (white space), characters or bytes.")
    ] = "moses",
    min_freq: Annotated[int, typer.Option(min=0, help="Leave out symbols that occur less often than this.")] = 0,
    max_size: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of symbols besides the special ones.")
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="A special token; may be repeated.", show_default="<eos>, <unk>")
    ] = None,
    lower_case: Annotated[bool, typer.Option("--lower-case", help="Lower-case text first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUTPUT if it exists.")] = False,
) -> None:
    """Build a vocabulary from texts and write a tokenizer that AutoTokenizer loads."""
    from ..staging import check_writable, new_or_forced, written_beside
    from ..tokenization_transfo_xl import AUTO, UNKNOWN_TOKENS, TransfoXLTokenizer, build_vocabulary

    with errors_as_messages():
        check = new_or_forced(force, texts)
        check_writable(output, check)
        symbols = build_vocabulary(
            texts,
            mode,
            min_freq=min_freq,
            max_size=max_size,
            special=special or ("<eos>", "<unk>"),
            lower_case=lower_case,
        )
        unknown = AUTO if set(symbols) & set(UNKNOWN_TOKENS) else None
        tokenizer = TransfoXLTokenizer.from_vocabulary(
            symbols, mode, unk_token=unknown, extra_special_tokens=special or (), lower_case=lower_case
        )
        with written_beside(output, check) as staging:
            tokenizer.save_pretrained(staging)
    typer.echo(f"{len(tokenizer)} symbols written to {output}")
    if tokenizer.unk_token is None:
        typer.echo("There is no token for unknown symbols: text that contains one raises an error.")

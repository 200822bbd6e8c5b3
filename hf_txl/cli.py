"""The `hf-txl` command: its subcommands and their common options."""

from typing import Annotated

import typer

from .commands.build_tokenizer import build_tokenizer
from .commands.convert import convert
from .commands.demo import demo
from .commands.evaluate import evaluate
from .commands.generate import generate
from .commands.info import info
from .commands.publish import publish
from .commands.rescore import rescore
from .commands.score import score

app = typer.Typer(no_args_is_help=True, pretty_exceptions_show_locals=False)
for command in (demo, convert, info, generate, evaluate, score, rescore, build_tokenizer, publish):
    app.command()(command)


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        from . import __version__

        typer.echo(f"hf-txl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    """Transformer-XL for transformers."""


if __name__ == "__main__":
    app()

"""The `hf-txl` command."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def main() -> None:
    """Transformer-XL for transformers."""


@app.command()
def demo(
    output: Annotated[
        Path, typer.Option(help="Folder to save the model in; one that an earlier demo wrote is replaced.")
    ] = Path("demo_model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="minutes on two cores")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and sample.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model for seconds instead of minutes.")] = False,
) -> None:
    """Train a small character model on the text in the package, show what its memory is worth, save it and sample."""
    # torch takes seconds to import, which `--help` need not wait for
    from transformers.utils import logging

    from .demo import run_demo

    # ours say more than those for reading and writing a few files
    logging.disable_progress_bar()
    try:
        result = run_demo(output, steps=steps, seed=seed, quick=quick)
    except (FileExistsError, PermissionError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo("\n" + result.report())
    if not result.memory_helps:
        typer.echo("Error: memory did not help on the held-out text; train longer (--steps).", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    app()

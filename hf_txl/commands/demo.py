"""`hf-txl demo`."""

from pathlib import Path
from typing import Annotated

import typer

from .running import errors_as_messages


def demo(
    output: Annotated[
        Path, typer.Option(help="Folder to save the model in; one written by an earlier demo is replaced.")
    ] = Path("demo_model"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps.", show_default="minutes on two cores")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed of weights and sample.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Train a tiny model, in seconds instead of minutes.")] = False,
) -> None:
    """Train a small character model on a text in the package, report its loss with and without memory, and sample."""
    from transformers.utils import logging

    from ..demo import run_demo

    # hides bars for reading and writing a few files; ours remain
    logging.disable_progress_bar()
    with errors_as_messages():
        result = run_demo(output, steps=steps, seed=seed, quick=quick)
    typer.echo("\n" + result.report())
    if not result.memory_helps:
        typer.echo("Error: memory did not help on the held-out text; train longer (--steps).", err=True)
        raise typer.Exit(1)

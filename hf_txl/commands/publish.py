"""`hf-txl publish`."""

from pathlib import Path
from typing import Annotated

import typer

from .running import errors_as_messages


def publish(
    folder: Annotated[Path, typer.Argument(help="Folder of a model.", exists=True, file_okay=False)],
    repo: Annotated[str, typer.Argument(help="Repository on the Hub: OWNER/NAME, or NAME in your namespace.")],
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    branch: Annotated[str, typer.Option(help="Branch to commit to; created if it does not exist.")] = "main",
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload model",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the folder and list the files only.")] = False,
) -> None:
    """Check a model folder and upload it to the Hub. An interrupted upload continues when the command is repeated."""
    from ..publishing import publish

    with errors_as_messages():
        publication = publish(
            folder, repo, private=not public, branch=branch, message=message, dry_run=dry_run, write=typer.echo
        )
    typer.echo(publication.outcome())

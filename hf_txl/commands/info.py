"""`hf-txl info`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .running import errors_as_messages


def info(
    model: Annotated[Path, typer.Argument(help="Folder of a model.", exists=True, file_okay=False)],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show what a folder holds: parameters, dialect, memory, tokenizer, origin. Weights are not loaded."""
    from ..model_info import describe_folder

    with errors_as_messages():
        facts = describe_folder(model)
    if json_:
        typer.echo(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    rows = list(_rows(facts))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:{width}}  {value}")


def _rows(facts: dict[str, Any], before: str = "") -> Any:
    """Name and value of each fact, those of a group after its name."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{before}{name}, ")
        else:
            yield before + name, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value

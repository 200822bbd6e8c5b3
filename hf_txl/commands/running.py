"""What every command does: report expected errors as messages, and clean up on SIGTERM."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Registers the classes, reports expected errors with exit code 2, and cleans up on SIGTERM."""
    # `hf_txl` leaves that out in the process of the command
    from .. import auto_classes  # noqa: F401

    with _ending_in_order():
        try:
            yield
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turns the errors that damaged files raise, which may be of any kind, into one that names the model."""
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise FileNotFoundError(f"{name} must hold config.json, but does not: is a model saved there?")
    if name.startswith((".", "/", "~")) and not Path(name).exists():
        raise FileNotFoundError(f"{name} must be a folder, but does not exist.")
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError):
        raise
    except Exception as error:
        raise ValueError(f"{name} could not be loaded: {type(error).__name__}: {error}") from error


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Raises on SIGTERM, so that unfinished folders are removed. Only the main thread can install a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)

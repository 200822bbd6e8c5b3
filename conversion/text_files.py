"""Reads the small text files that lie beside weights and vocabularies; what cannot be read is named with its file."""

import json
from pathlib import Path
from typing import Any


def read_text(file: Path) -> str:
    """A text in UTF-8, without the mark that some editors put before it.

    Raises:
        ValueError: if it is another encoding or cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be a text in UTF-8, but cannot be read: {error}") from error


def read_json(file: Path) -> Any:
    """What a JSON file holds.

    Raises:
        ValueError: if it is none.
    """
    try:
        return json.loads(read_text(file))
    # objects in objects in … end in the second
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} must be a JSON file, but cannot be read: {error}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: if the file holds anything else.
    """
    value = read_json(file)
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, but holds a {type(value).__name__}.")
    return value

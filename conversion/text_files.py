"""Reads the small text files beside weights and vocabularies; errors name the file."""

import json
from pathlib import Path
from typing import Any


def read_text(file: Path) -> str:
    """A text in UTF-8, without a byte-order mark.

    Raises:
        ValueError: if the encoding differs or the file cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be a text in UTF-8, but cannot be read: {error}") from error


def read_json(file: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: if it is not JSON.
    """
    try:
        return json.loads(read_text(file))
    # deeply nested objects raise the second
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

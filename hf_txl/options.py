"""Options of a function as one dataclass: `**options` checked against its fields."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

Options = TypeVar("Options")


def read_options(kind: type[Options], options: Mapping[str, Any], function: str) -> Options:
    """The dataclass that holds the `**options` of a function.

    Args:
        kind (`type`): A dataclass whose fields are the options, with their defaults.
        options (`Mapping[str, Any]`): What the caller gave.
        function (`str`): Name of the function, for messages.

    Raises:
        TypeError: if an option is unknown; the message names it and those that exist.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if unknown := [name for name in options if name not in names]:
        raise TypeError(
            f"`{function}` takes no option {', '.join(f'`{name}`' for name in unknown)}; its options are "
            f"{', '.join(f'`{name}`' for name in names)}."
        )
    return kind(**options)


__all__ = ["read_options"]

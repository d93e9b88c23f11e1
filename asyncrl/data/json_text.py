"""JSON texts, with limits and with errors of one line."""

from typing import Any

import orjson

from asyncrl.errors import DataError

MAX_DEPTH = 100
"""Levels of nested lists and objects.  Other code recurses over labels and metadata, some of it at most 250 levels."""


def loads(text: bytes | str) -> Any:
    """Parse a JSON text.  Of a repeated key the last value counts.

    Raises DataError with the column, or if lists and objects are nested more than MAX_DEPTH levels deep.
    """
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"not JSON: {error.msg}, column {error.colno}") from None
    opening: tuple[Any, Any] = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > MAX_DEPTH and _depth(found) > MAX_DEPTH:
        raise DataError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")
    return found


def kind(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth

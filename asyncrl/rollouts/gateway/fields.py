"""Typed reading of JSON bodies: a wrong field is one line that names it, its value and what it must be."""

from collections.abc import Mapping
from typing import Any

import orjson

from asyncrl.rollouts.gateway.refusals import bad
from asyncrl.rollouts.record import TokenIds, ids_of

type Body = dict[str, Any]
"""A JSON object as a client sent it."""
_MOST_SHOWN = 60
"""Characters of a wrong value that an error quotes."""
_MOST_LEVELS = 250
"""Levels of nesting that each value of a request may have.  orjson 3.13 reads 1,024 levels and writes 254."""


def body_of(payload: bytes) -> Body:
    """Parse the body of a request.  Raises RequestRefused."""
    try:
        found = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad("the body must be a JSON object")
    return found


def shown(value: object) -> str:
    """Return the value for an error message."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def dumped(value: object, name: str) -> bytes:
    """Return ``value`` within lists, as JSON with sorted keys.  Raises RequestRefused if it is nested too deeply.

    The lists stand for the levels around it in the requests to engines and parsers.
    """
    try:
        return orjson.dumps([[[[value]]]], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError as error:
        raise bad(f"{name} must be nested at most {_MOST_LEVELS} levels deep: {error}") from error


def number(body: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number; ``default`` if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(f"{name} must be a number, got {shown(value)}")
    return value


def integer(body: Mapping[str, Any], name: str, default: int, least: int) -> int:
    """Return an integer of at least ``least``; ``default`` if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad(f"{name} must be an integer of at least {least}, got {shown(value)}")
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean; ``default`` if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false, got {shown(value)}")
    return value


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str | None:
    """Return a text; ``default`` if it is absent or null."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise bad(f"{name} must be a text, got {shown(value)}")
    return value


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple; empty if it is absent or null."""
    value = body.get(name)
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise bad(f"{name} must be a text or a list of texts, got {shown(value)}")
    return tuple(each for each in found if each)


def token_ids(body: Mapping[str, Any], name: str) -> TokenIds:
    """Return a list of token ids as an array, which checks types in C; empty if it is absent or null."""
    value = body.get(name)
    found = [] if value is None else value
    if not isinstance(found, list):
        raise bad(f"{name} must be a list of token ids, got {shown(value)}")
    try:
        return ids_of(found)
    except (TypeError, OverflowError) as error:
        raise bad(f"{name} must be a list of token ids: {error}") from error


def mapping(body: Mapping[str, Any], name: str) -> Body:
    """Return an object; empty if it is absent or null."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad(f"{name} must be an object, got {shown(value)}")
    return value


def objects(body: Mapping[str, Any], name: str) -> list[Body]:
    """Return a list of objects; empty if it is absent or null."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise bad(f"{name} must be a list of objects, got {shown(value)}")
    return value

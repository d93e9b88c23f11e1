"""JSON that keeps what orjson would change or refuse: NaN and infinities, half characters, and huge integers.

orjson writes all usual values, in a tenth of the time of ``json``.  Only the others are written by ``json``, in ASCII.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import orjson

UNSTORABLE = (TypeError, ValueError, RecursionError)
"""Errors of a value that JSON does not have; orjson's are TypeErrors."""

ODD = b" "
"""Begins the texts that ``json`` must read: orjson would make floats of huge integers without an error."""


def dumps(value: Any, *, has_floats: bool = True) -> bytes:
    """Return ``value`` as JSON; tuples and arrays become lists, dataclasses objects.  Raises an error of UNSTORABLE.

    Without ``has_floats`` there is no float in it, so none is looked for.
    """
    try:
        text = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return ODD + json.dumps(_plain(value)).encode()
    if has_floats and b"null" in text and _has_odd_number(value):  # orjson writes NaN as null
        return ODD + json.dumps(_plain(value)).encode()
    return text


def loads(text: bytes) -> Any:
    """Return the value that ``dumps`` wrote.  Raises ValueError."""
    return json.loads(text) if text.startswith(ODD) else orjson.loads(text)


def is_storable(value: Any) -> bool:
    """Return whether ``dumps`` accepts ``value``."""
    try:
        dumps(value)
    except UNSTORABLE:
        return False
    return True


def storable(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that JSON has, and the names of the others."""
    kept = {key: value for key, value in values.items() if isinstance(key, str) and is_storable({key: value})}
    return kept, [str(key) for key in values if key not in kept]


def _has_odd_number(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is int or value is None or kind is bool:
        return False
    if kind is list or kind is tuple:
        return any(map(_has_odd_number, value))
    if isinstance(value, Mapping):
        return any(map(_has_odd_number, value.values()))
    if isinstance(value, float | np.floating):
        return not math.isfinite(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and not bool(np.isfinite(value).all())
    return is_dataclass(value) and any(_has_odd_number(getattr(value, each.name)) for each in fields(value))


def _plain(value: Any) -> Any:
    """Return ``value`` without numpy.  Raises TypeError if a key is no text: ``json`` would make one of it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(_plain_items(value))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(each) for each in value]
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value


def _plain_items(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r:.100} is no text")
        yield key, _plain(value)

"""The values that leave a process of user code, in msgpack: reading them executes nothing.

None, bool, int, float, str, bytes          as they are
list, tuple, set, array                     a list; numbers in bulk travel as an array
dict with keys of the first line            a dict
enum, path                                  its value, its text
numpy and torch                             numbers and lists of them, by ``tolist``
anything else                               left out and named
"""

import enum
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
from msgpack.fallback import Unpacker as InterruptibleUnpacker

_LONG = 64
"""Numbers in a list from which it travels as an array: ten times as fast to read as a list of objects."""
_DEEPEST = 64
"""Levels of nested values; deeper ones, such as a list that holds itself, are left out."""
_INTS, _FLOATS = 1, 2
_IS_64_BIT = range(-(2**63), 2**63)
_LEFT_OUT = object()


def plain(value: Any, left_out: list[str], name: str = "") -> Any:
    """Return ``value`` in plain types, None for a value that has none.  Appends the names of what is left out."""
    found = _plain(value, left_out, name, 0)
    return None if found is _LEFT_OUT else found


def packed(message: Any) -> bytes:
    """Return the bytes of a message in plain types."""
    packed: bytes = msgpack.packb(message, unicode_errors="replace")
    return packed


def unpacked(message: bytes) -> Any:
    """Return the message of some bytes.  Raises ValueError."""
    return msgpack.unpackb(message, ext_hook=_number_array, strict_map_key=False)


def unpacked_slowly(pieces: Sequence[bytes]) -> Any:
    """Return the message of many bytes, in a thread: other threads run meanwhile.  Raises ValueError.

    The unpacker in C holds the interpreter until it is done, for a second at 100 MB.  This one is written in Python.
    """
    unpacker = InterruptibleUnpacker(
        ext_hook=_number_array, strict_map_key=False, max_buffer_size=sum(map(len, pieces))
    )
    for piece in pieces:
        unpacker.feed(piece)
    return unpacker.unpack()


def _plain(value: Any, left_out: list[str], name: str, depth: int) -> Any:
    if value is None or value is True or value is False or type(value) in (str, float, bytes):
        return value
    if depth > _DEEPEST:
        return _leave_out(f"{name} (nested too deeply)", left_out)
    convert = next((each for kinds, each in _BY_TYPE if isinstance(value, kinds)), _other)
    return convert(value, left_out, name, depth)


def _mapping(value: Mapping[Any, Any], left_out: list[str], name: str, depth: int) -> Any:
    found = {}
    for key, entry in value.items():
        inside = f"{name}.{key}" if name else str(key)
        if not isinstance(key, str | int | float | bool | None):
            _leave_out(f"{inside} (the key is a {type(key).__name__})", left_out)
            continue
        converted = _plain(entry, left_out, inside, depth + 1)
        if converted is not _LEFT_OUT:
            found[str(key) if isinstance(key, str) else key] = converted
    return found


def _sequence(value: Any, left_out: list[str], name: str, depth: int) -> Any:
    items = value.tolist() if isinstance(value, array) else list(value)
    if len(items) >= _LONG and (bulk := _bulk(items)) is not None:
        return bulk
    converted = (_plain(each, left_out, f"{name}[{place}]", depth + 1) for place, each in enumerate(items))
    return [None if each is _LEFT_OUT else each for each in converted]


def _bulk(items: list[Any]) -> msgpack.ExtType | None:
    """Return a list of numbers of one type as an array; None if it is none."""
    kinds = set(map(type, items))
    if kinds == {int}:
        try:
            return msgpack.ExtType(_INTS, array("q", items).tobytes())
        except OverflowError:
            return None
    return msgpack.ExtType(_FLOATS, array("d", items).tobytes()) if kinds == {float} else None


def _number_array(code: int, data: bytes) -> list[Any]:
    found: array[Any] = array("q" if code == _INTS else "d")
    found.frombytes(data)
    return found.tolist()


def _int(value: int, left_out: list[str], name: str, depth: int) -> Any:
    value = int(value)
    return value if value in _IS_64_BIT else _leave_out(f"{name} (more than 64 bits)", left_out)


def _text(value: Any, left_out: list[str], name: str, depth: int) -> Any:
    return str(value)


def _float(value: float, left_out: list[str], name: str, depth: int) -> Any:
    return float(value)


def _bytes(value: Any, left_out: list[str], name: str, depth: int) -> Any:
    return bytes(value)


def _enum(value: enum.Enum, left_out: list[str], name: str, depth: int) -> Any:
    return _plain(value.value, left_out, name, depth + 1)


def _other(value: Any, left_out: list[str], name: str, depth: int) -> Any:
    """Convert what has ``tolist``, as numbers of numpy and torch do; leave out the rest."""
    if hasattr(value, "tolist"):
        try:
            return _plain(value.tolist(), left_out, name, depth + 1)
        except Exception as error:  # noqa: BLE001 (of any class of the user)
            return _leave_out(f"{name} ({type(value).__name__}: {error})", left_out)
    return _leave_out(f"{name} ({type(value).__name__})", left_out)


def _leave_out(name: str, left_out: list[str]) -> Any:
    left_out.append(name.strip())
    return _LEFT_OUT


_BY_TYPE: tuple[tuple[type | tuple[type, ...], Callable[[Any, list[str], str, int], Any]], ...] = (
    (enum.Enum, _enum),
    (str, _text),
    (int, _int),
    (float, _float),
    ((bytes, bytearray, memoryview), _bytes),
    (Mapping, _mapping),
    ((list, tuple, set, frozenset, array), _sequence),
    (os.PathLike, _text),
)
"""The conversion of each type, the first that fits.  ``np.float64`` is a float, and ``np.str_`` a text."""

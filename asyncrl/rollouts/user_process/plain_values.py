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
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgpack

from asyncrl.rollouts.user_process.wire import PIECE_BYTES

_LONG = 64
"""Numbers in a list from which it travels as an array: ten times as fast to read as a list of objects."""
_DEEPEST = 64
"""Levels of nested values; deeper ones, such as a list that holds itself, are left out."""
_INTS, _FLOATS = 1, 2
_VALUE, _TOGETHER, _ENTRY, _ITEM = b"v", b"+", b":", b","
"""The first byte of a piece: a value, or how the next two values are joined."""
_IS_64_BIT = range(-(2**63), 2**63)
_LEFT_OUT = object()


def plain(value: Any, left_out: list[str], name: str = "") -> Any:
    """Return ``value`` in plain types, None for a value that has none.  Appends the names of what is left out."""
    found = _plain(value, left_out, name, 0)
    return None if found is _LEFT_OUT else found


def packed(message: Any) -> list[bytes]:
    """Return a message in plain types as pieces of PIECE_BYTES, at most.

    A piece is a value in msgpack, or says that the value is joined from the two values that follow.  So no piece
    takes its reader longer than a millisecond.
    """
    pieces: list[bytes] = []
    left = [message]
    while left:
        value = left.pop()
        data = msgpack.packb(value, unicode_errors="replace")
        if len(data) < PIECE_BYTES:
            pieces.append(_VALUE + data)
            continue
        mark, first, second = _halves(value)
        pieces.append(mark)
        left += (second, first)
    return pieces


class Unpacking:
    """Puts the pieces of a message together."""

    def __init__(self) -> None:
        self._open: list[tuple[bytes, list[Any]]] = []
        """Values that are not complete: how to join their parts, and the parts so far."""

    def add(self, piece: bytes) -> Any:
        """Return the value that the piece completes; only the last piece completes the message.  Raises ValueError."""
        mark = piece[:1]
        if mark != _VALUE:
            self._open.append((mark, []))
            return None
        value = msgpack.unpackb(memoryview(piece)[1:], ext_hook=_number_array, strict_map_key=False)
        while self._open:
            mark, parts = self._open[-1]
            parts.append(value)
            if len(parts) < 2:
                return None
            self._open.pop()
            value = _joined(mark, *parts)
        return value


def unpacked(pieces: Iterable[bytes]) -> Any:
    """Return the message of its pieces, at once.  Raises ValueError."""
    unpacking, value = Unpacking(), None
    for piece in pieces:
        value = unpacking.add(piece)
    return value


def _halves(value: Any) -> tuple[bytes, Any, Any]:
    """Return how two smaller values make a large one, and the two.

    A list or dict with one entry is joined from an empty one and the entry, because the entry itself is large.
    """
    if isinstance(value, msgpack.ExtType):
        middle = len(value.data) // 16 * 8
        return (
            _TOGETHER,
            msgpack.ExtType(value.code, value.data[:middle]),
            msgpack.ExtType(value.code, value.data[middle:]),
        )
    if isinstance(value, dict):
        items = list(value.items())
        if len(items) == 1:
            return _ENTRY, *items[0]
        return _TOGETHER, dict(items[: len(items) // 2]), dict(items[len(items) // 2 :])
    if isinstance(value, list) and len(value) == 1:
        return _ITEM, None, value[0]
    return _TOGETHER, value[: len(value) // 2], value[len(value) // 2 :]


def _joined(mark: bytes, first: Any, second: Any) -> Any:
    if mark == _ENTRY:
        return {first: second}
    if mark == _ITEM:
        return [second]
    if mark != _TOGETHER or type(first) is not type(second):
        raise ValueError("a piece that is none of ours")
    if isinstance(first, list):
        first.extend(second)
        return first
    return first | second if isinstance(first, dict) else first + second


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

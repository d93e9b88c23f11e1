"""The file of a timeline in blocks of whole lines, which can be read again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

BLOCK_BYTES = 256 * 1024
"""Size of a block: reading one again, for the names of a few samples, takes some milliseconds."""
_AROUND = b"[],\r\n "
"""Characters around and between the events of a file."""
_NUMBERS = (int, float)
_MOST_TRACKS = 2**31
"""Largest number of a track: arrays hold the number of the slot, one less, in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of a file that holds whole events."""

    path: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """Return the bytes.  Raises OSError, for example if this part of the timeline was removed."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


def new_blocks(path: Path, offset: int) -> Iterator[tuple[Block, bytes]]:
    """Yield what ``path`` has from ``offset`` on.  Raises OSError.

    The last line of a file is complete if it is JSON: the comma and the line break come with the next event.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while data := file.read(BLOCK_BYTES):
            whole = data[: data.rfind(b"\n") + 1]
            if len(data) < BLOCK_BYTES and is_event(data[len(whole) :]):
                whole = data
            if not whole:
                return
            yield Block(path=path, offset=offset, size=len(whole)), whole
            offset += len(whole)
            file.seek(offset)


def is_event(line: bytes) -> bool:
    """Return whether a line is a whole event."""
    return bool(_events_of_line(line))


def spans_in(data: bytes) -> list[dict[str, Any]]:
    """Return the spans in a block, in its order; lines that are no events, or lack a part of a span, are left out."""
    try:
        events = orjson.loads(b"[" + data.strip(_AROUND) + b"]")
    except orjson.JSONDecodeError:
        events = [event for line in data.split(b"\n") for event in _events_of_line(line)]
    return [event for event in events if _is_span(event)]


def _is_span(event: Any) -> bool:
    """Return whether an event has all that a run writes of a span; a disk that lost bytes may leave others."""
    try:
        return (
            event["ph"] == "X"
            and type(event["name"]) is str  # types of JSON have no subclasses, and ``isinstance`` takes twice as long
            and type(event["ts"]) in _NUMBERS
            and type(event["dur"]) in _NUMBERS
            and type(event["pid"]) is int
            and type(event["tid"]) is int
            and 0 <= event["tid"] <= _MOST_TRACKS
            and type(event["args"]) is dict
        )
    except (KeyError, TypeError):  # also of what is no mapping
        return False


def _events_of_line(line: bytes) -> list[dict[str, Any]]:
    """Return the event of a line, in a list that is empty if there is none."""
    try:
        event = orjson.loads(line.strip(_AROUND))
    except orjson.JSONDecodeError:
        return []
    return [event] if isinstance(event, dict) else []

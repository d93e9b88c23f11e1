"""One HTTP/1.1 response, cut out of the bytes of a connection.  Opens nothing and waits for nothing."""

import functools
from dataclasses import dataclass

_LONGEST_HEAD = 65536
"""Of the status line and all headers; also of one line between two chunks.  Servers write some hundred bytes."""
_NO_BODY = frozenset({204, 304})


class BrokenResponse(ConnectionError):
    """What came is no HTTP/1.1 response, or not all of one."""


class Response:
    """What has arrived of a response: its status once the head is there, and whether that was all of it."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.is_complete = False
        self.keeps_alive = True
        """Whether the server takes another request on this connection."""
        self._head = b""
        self._line = b""  # the beginning of a line between two chunks
        self._is_chunked = self._is_in_trailer = False
        self._left: int | None = None  # of the body or of this chunk with its line end; None: until the server hangs up

    def feed(self, data: bytes) -> list[bytes]:
        """The pieces of the body that ``data`` brings, in order.  Raises BrokenResponse."""
        if not self.status:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = _short(head)
                return []
            self._read_head(head)
        if self.is_complete or not data:
            return []
        return self._chunks(data) if self._is_chunked else self._plain(data)

    def end(self) -> None:
        """The server hung up.  Raises BrokenResponse unless this is how the response ends."""
        if not self.is_complete and (not self.status or self._is_chunked or self._left is not None):
            raise BrokenResponse("the server hung up in the middle of its answer")
        self.is_complete, self.keeps_alive = True, False

    def _read_head(self, head: bytes) -> None:
        known = _known(head)
        self.status, self.keeps_alive = known.status, known.keeps_alive
        self._is_chunked = known.is_chunked
        if self._is_chunked:
            self._left = 0
        elif self.status in _NO_BODY:
            self.is_complete = True
        elif known.length is not None:
            self._left = known.length
            self.is_complete = self._left == 0

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.is_complete = self._left == 0
        return [data]

    def _chunks(self, data: bytes) -> list[bytes]:
        pieces: list[bytes] = []
        if self._line:
            data, self._line = self._line + data, b""
        start = 0
        while start < len(data) and not self.is_complete:
            if self._left:
                stop = min(start + self._left, len(data))
                self._left -= stop - start
                pieces.append(data[start : max(start, stop - max(0, 2 - self._left))])
                start = stop
            elif (end := data.find(b"\r\n", start)) < 0:
                self._line = _short(data[start:])
                break
            else:
                self._read_line(data[start:end])
                start = end + 2
        return pieces

    def _read_line(self, line: bytes) -> None:
        """How long the next chunk is, or a line of what follows the last one."""
        if self._is_in_trailer:
            self.is_complete = not line
            return
        size = _number(line.partition(b";")[0], base=16)
        self._is_in_trailer = size == 0
        self._left = size + 2 if size else 0  # with its line end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What a status line and headers say about the body."""

    status: int
    keeps_alive: bool
    is_chunked: bool
    length: int | None


@functools.lru_cache(maxsize=64)  # those of all answers are alike but for the second of their date
def _known(head: bytes) -> _Head:
    first, *lines = head.split(b"\r\n")
    version, _, status = first.partition(b" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
        raise BrokenResponse(f"not HTTP/1.1: {first[:100]!r}")
    said, length = headers.get(b"connection", b"").lower(), headers.get(b"content-length")
    is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
    return _Head(
        status=int(status[:3]),
        keeps_alive=said != b"close" and (version == b"HTTP/1.1" or said == b"keep-alive"),
        is_chunked=is_chunked,
        length=None if is_chunked or length is None or int(status[:3]) in _NO_BODY else _number(length, base=10),
    )


def _number(text: bytes, base: int) -> int:
    try:
        number = int(text, base)
    except ValueError:
        number = -1
    if number < 0:
        raise BrokenResponse(f"not a length: {text[:100]!r}")
    return number


def _short(line: bytes) -> bytes:
    if len(line) > _LONGEST_HEAD:
        raise BrokenResponse(f"a line or head of more than {_LONGEST_HEAD} bytes: {line[:100]!r}")
    return line

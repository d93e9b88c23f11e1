"""The wire between the controller and a process of user code: one local socket that carries messages in pieces.

    message ──▶ piece, piece, ... ──▶ socket        a piece: its length, whether another follows, its bytes

Pieces keep large messages from holding an event loop for long.  Nothing here knows what a message says.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence

PIECE_BYTES = 64 * 1024
"""Bytes of one piece, at most: a millisecond for their reader at worst, which is 65,536 numbers below 128."""
MOST_BYTES = 256 * 1024 * 1024
"""Bytes of one message, at most."""
CLOSED = "the socket was closed"
"""The text of the error if the other side is gone."""
_HEADER = struct.Struct(">I?")


class WireBroken(ConnectionError):
    """The other side is gone, or sent bytes that are no message."""


class Wire:
    """One end of the socket on an event loop.  Used on that loop alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        self._later: deque[bytes] = deque()
        """Messages of ``post`` during a ``send``, whose pieces must stay together."""

    @classmethod
    async def over(cls, end: socket.socket) -> "Wire":
        """Take over one end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=8 * PIECE_BYTES))

    async def receive(self) -> tuple[bytes, ...]:
        """Return the pieces of the next message.  Raises WireBroken."""
        pieces, num_bytes, is_more = [], 0, True
        try:
            while is_more:
                size, is_more = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                num_bytes += _checked(size, num_bytes)
                pieces.append(await self._reader.readexactly(size))
                if is_more:  # a buffered piece does not wait, and other tasks must run
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WireBroken(CLOSED) from error
        return tuple(pieces)

    async def send(self, pieces: Sequence[bytes]) -> None:
        """Send a message and wait while the other side does not read.  Raises ValueError if it is too long.

        A side that is gone shows in ``receive``, not here.  A cancelled send does not wait, but sends all the same.
        """
        check_size(pieces)
        async with self._sending:
            rest = framed(pieces)
            try:
                for piece in rest:
                    self._write(piece)
                    await self._writer.drain()
            except OSError:
                return
            finally:
                # Invariant: no message is cut, or the other side would join the next one to its beginning.
                for piece in rest:
                    self._write(piece)
                while self._later:
                    self._write(self._later.popleft())

    def post(self, pieces: Sequence[bytes]) -> None:
        """Send a message of one piece without waiting."""
        (piece,) = framed(pieces)
        if self._sending.locked():
            self._later.append(piece)
        else:
            self._write(piece)

    def _write(self, piece: bytes) -> None:
        if not self._writer.is_closing():  # uvloop raises RuntimeError otherwise
            self._writer.write(piece)

    def close(self) -> None:
        """Close the socket; what was not sent yet is lost."""
        self._writer.transport.abort()


def send_now(end: socket.socket, pieces: Sequence[bytes]) -> None:
    """Send a message on a blocking socket.  Raises WireBroken."""
    try:
        for piece in framed(pieces):
            end.sendall(piece)
    except OSError as error:
        raise WireBroken(str(error)) from error


def receive_now(end: socket.socket) -> tuple[bytes, ...]:
    """Wait for the next message on a blocking socket.  Raises WireBroken, and TimeoutError as the socket is set."""
    pieces, num_bytes, is_more = [], 0, True
    while is_more:
        size, is_more = _HEADER.unpack(_exactly(end, _HEADER.size))
        num_bytes += _checked(size, num_bytes)
        pieces.append(_exactly(end, size))
    return tuple(pieces)


def check_size(pieces: Sequence[bytes]) -> None:
    """Raise ValueError if a message is too long to be sent."""
    num_bytes = sum(map(len, pieces))
    if num_bytes > MOST_BYTES:
        raise ValueError(f"{num_bytes:,} bytes are too many for one message, the limit is {MOST_BYTES:,}")


def cut(message: bytes) -> list[bytes]:
    """Return the pieces of a message that are put together by joining them."""
    return [message[start : start + PIECE_BYTES] for start in range(0, len(message), PIECE_BYTES)]


def framed(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the pieces of a message as they are sent."""
    last = len(pieces) - 1
    for place, piece in enumerate(pieces):
        yield _HEADER.pack(len(piece), place < last) + piece


def _checked(size: int, before: int) -> int:
    if size > PIECE_BYTES or before + size > MOST_BYTES + PIECE_BYTES:
        raise WireBroken(f"a piece of {size} bytes, which is none of ours")
    return size


def _exactly(end: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = end.recv(size - len(parts))
        except TimeoutError:
            raise
        except OSError as error:
            raise WireBroken(str(error)) from error
        if not part:
            raise WireBroken(CLOSED)
        parts += part
    return bytes(parts)

"""Streamed answers over HTTP/1.1, passed on by the callback that reads them from the socket.

No task wakes between two pieces of an answer.  With a thousand answers in flight, each event would otherwise wake a
chain of coroutines, a queue and a timer, which is most of the cost of an event.
"""

import asyncio
import functools
import socket
import ssl
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import SplitResult, urlsplit

from asyncrl.engines.sglang.client.machine_probes import probe_machine
from asyncrl.engines.sglang.client.response import BrokenResponse, ResponseReader
from asyncrl.event_loop import Deadline, PeerTimer

Take = Callable[[int, bytes], None]
"""A callback for the status of a response and the next piece of its body."""
_PORTS = {"http": 80, "https": 443}
_secure = functools.cache(ssl.create_default_context)
"""Returns the TLS context; created once, because it reads all certificates of the system."""


class Silent(TimeoutError):
    """The server sent nothing for too long."""


class Streams:
    """A pool of connections to any number of servers.  ``close`` closes the unused ones."""

    def __init__(self, connect_s: float, keep_alive_s: float, headers: Mapping[str, str] | None = None) -> None:
        """Set the deadline of a connection (``connect_s``) and the lifetime of an unused one (``keep_alive_s``).

        ``headers`` are further headers of every request.
        """
        # Invariant: only the event loop's thread uses the pool and its connections: no lock is needed.  A connection is
        # either in ``_unused`` or in one ``exchange``; if it were in both, two answers would mix.
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._unused: defaultdict[str, deque[_Connection]] = defaultdict(deque)
        self._servers: dict[str, tuple[SplitResult, bytes]] = {}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())

    async def post(self, url: str, body: bytes, idle_s: float, take: Take, header: bytes = b"") -> int:
        """POST JSON and return the status once the whole answer has gone through ``take``.

        ``header`` is a further header of this request, as a line with its line end.
        The event loop calls ``take``, and its exceptions propagate.  It is never called after this method has ended, be
        it by return, exception or cancellation.  Raises Silent if nothing came for ``idle_s`` seconds, and OSError.
        """
        server, head = self._servers.get(url) or self._server(url)
        connection = self._kept(server.netloc) or await self._connect(server)
        try:
            return await connection.exchange(b"%b%d\r\n%b\r\n%b" % (head, len(body), header, body), idle_s, take)
        finally:
            self._keep(server.netloc, connection)

    def close(self) -> None:
        """Close the connections that have no request in flight."""
        for unused in self._unused.values():
            while unused:
                unused.pop().close()

    def _server(self, url: str) -> tuple[SplitResult, bytes]:
        """Parse ``url`` once and remember it with the head of every request to it."""
        parts = urlsplit(url)
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\n"
            f"{self._headers}Content-Type: application/json\r\nContent-Length: "
        )
        self._servers[url] = parts, head.encode()
        return self._servers[url]

    def _kept(self, netloc: str) -> "_Connection | None":
        """Take the unused connection that was used last, so that surplus ones expire; None if there is none."""
        unused, oldest = self._unused[netloc], asyncio.get_running_loop().time() - self._keep_alive_s
        while unused:
            connection = unused.pop()
            if connection.is_open and connection.used_at >= oldest:
                return connection
            connection.close()
        return None

    def _keep(self, netloc: str, connection: "_Connection") -> None:
        if not connection.is_open:
            return
        unused = self._unused[netloc]
        unused.append(connection)
        while unused[0].used_at < connection.used_at - self._keep_alive_s:
            unused.popleft().close()

    async def _connect(self, server: SplitResult) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with Deadline(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop),
                    server.hostname or "",
                    server.port or _PORTS[server.scheme],
                    ssl=_secure() if server.scheme == "https" else None,
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {self._connect_s:g} s") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; it carries one request and its answer at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._response = ResponseReader()
        self._is_asked = False
        """Whether ``exchange`` is running; only then do ``_take``, ``_ended`` and ``_idle_s`` belong to a request."""
        self.used_at = 0.0
        """The loop's time of the last request or received bytes."""

    @property
    def is_open(self) -> bool:
        """Whether the connection accepts another request."""
        return not self._transport.is_closing()

    async def exchange(self, request: bytes, idle_s: float, take: Take) -> int:
        """See ``Streams.post``.  Closes the connection unless the whole answer has arrived."""
        # Invariant: the loop's callbacks call ``_take`` only while ``_ended`` is pending.  Completing or cancelling the
        # future is thus what guarantees that ``take`` is never called after this method.
        self._response.begin()
        self._is_asked, self._take, self._idle_s = True, take, idle_s
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.used_at = self._loop.time()
        self._look = PeerTimer(idle_s, self._look_for_silence)
        try:
            self._transport.write(request)
            return await self._ended
        finally:
            if not (self._response.is_complete and self._response.keeps_alive and self._ended.done()):
                self.close()  # the rest of the answer would arrive as the next request's
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # marks it retrieved, also if a cancellation came first: asyncio logs nothing
            self._look.cancel()  # before ``_ended`` is deleted, which the timer reads
            self._is_asked = False
            del self._take, self._ended

    def close(self) -> None:
        """Close the connection at once, without sending buffered bytes."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)
        if (there := transport.get_extra_info("socket")) is not None:
            with socket.fromfd(there.fileno(), there.family, there.type) as same:  # uvloop's object sets no option
                probe_machine(same)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self.used_at = self._loop.time()
        response = self._response
        if not self._is_asked:  # bytes between two answers belong to no request
            self.close()
        elif not self._ended.done():
            try:
                for piece in response.feed(data):
                    self._take(response.status, piece)
            except Exception as error:  # noqa: BLE001 -- raised in ``exchange``
                self._ended.set_exception(error)
                return
            if response.is_complete:
                self._ended.set_result(response.status)

    def connection_lost(self, error: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        if not self._is_asked or self._ended.done():
            return
        try:
            self._response.end()
        except BrokenResponse as broken:
            self._ended.set_exception(error or broken)
        else:
            self._ended.set_result(self._response.status)

    def _look_for_silence(self) -> None:
        """Fail a silent exchange.  One timer serves the whole answer; it is postponed if something has come since."""
        left_s = self.used_at + self._idle_s - self._loop.time()
        if left_s > 0:
            self._look = PeerTimer(left_s, self._look_for_silence)
        elif not self._ended.done():
            self._ended.set_exception(Silent(f"silent for {self._idle_s:g} s"))

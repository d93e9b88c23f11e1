"""Streamed answers over HTTP/1.1, handed on where they are read.

No task wakes between two pieces of an answer: a thousand answers in flight, each with an event now and then, would
otherwise wake a chain of coroutines, a queue and a timer for every one of them, which is most of what an event costs.
"""

import asyncio
import functools
import ssl
from collections import defaultdict, deque
from collections.abc import Callable
from typing import cast
from urllib.parse import SplitResult, urlsplit

from asyncrl.engines.sglang.client.response import BrokenResponse, ResponseReader

Take = Callable[[int, bytes], None]
"""Takes the status of a response and the next piece of its body."""
_PORTS = {"http": 80, "https": 443}
_secure = functools.cache(ssl.create_default_context)
"""Made once: it reads all certificates of the system."""


class Silent(TimeoutError):
    """A server said nothing for too long."""


class Streams:
    """Connections to any number of servers, kept for the next request.  ``close`` ends them all."""

    def __init__(self, connect_s: float, keep_alive_s: float) -> None:
        """``connect_s`` is the longest wait for a connection, ``keep_alive_s`` how long an unused one is kept."""
        self._connect_s = connect_s
        self._keep_alive_s = keep_alive_s
        self._unused: defaultdict[str, deque[_Connection]] = defaultdict(deque)
        self._servers: dict[str, tuple[SplitResult, bytes]] = {}

    async def post(self, url: str, body: bytes, idle_s: float, take: Take) -> int:
        """POST JSON and return the status once all of the answer has gone through ``take``.

        ``take`` is called by the event loop; what it raises, this raises.  After this has ended, however it did, it is
        not called any more.  Raises Silent when nothing came for ``idle_s``, and OSError.
        """
        server, head = self._servers.get(url) or self._server(url)
        connection = self._kept(server.netloc) or await self._connect(server)
        try:
            return await connection.exchange(b"%b%d\r\n\r\n%b" % (head, len(body), body), idle_s, take)
        finally:
            self._keep(server.netloc, connection)

    def close(self) -> None:
        """Hang up where nothing is in flight."""
        for unused in self._unused.values():
            while unused:
                unused.pop().close()

    def _server(self, url: str) -> tuple[SplitResult, bytes]:
        """Where ``url`` is, and the head of every request to it."""
        parts = urlsplit(url)
        head = (
            f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: */*\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )
        self._servers[url] = parts, head.encode()
        return self._servers[url]

    def _kept(self, netloc: str) -> "_Connection | None":
        """The one used last: the others may then grow old."""
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
            async with asyncio.timeout(self._connect_s):
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
    """One request and its answer after the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._response = ResponseReader()
        self._is_asked = False
        self.used_at = 0.0
        """When something last came, on the loop's clock."""

    @property
    def is_open(self) -> bool:
        """Whether it can take another request."""
        return not self._transport.is_closing()

    async def exchange(self, request: bytes, idle_s: float, take: Take) -> int:
        """See ``Streams.post``.  The connection is closed unless all of the answer came."""
        self._response.begin()
        self._is_asked, self._take, self._idle_s = True, take, idle_s
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self.used_at = self._loop.time()
        self._look = self._loop.call_later(idle_s, self._look_for_silence)
        try:
            self._transport.write(request)
            return await self._ended
        finally:
            if not (self._response.is_complete and self._response.keeps_alive and self._ended.done()):
                self.close()
            if self._ended.done() and not self._ended.cancelled():
                self._ended.exception()  # seen, also when a cancellation came first
            self._look.cancel()
            self._is_asked = False
            del self._take, self._ended

    def close(self) -> None:
        """Hang up at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        self.used_at = self._loop.time()
        response = self._response
        if not self._is_asked:
            self.close()
        elif not self._ended.done():
            try:
                for piece in response.feed(data):
                    self._take(response.status, piece)
            except Exception as error:  # noqa: BLE001 -- raised where the answer is waited for
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
        """One timer per answer, not one per piece: it is late by what came since."""
        silent_until = self.used_at + self._idle_s
        if silent_until > self._loop.time():
            self._look = self._loop.call_at(silent_until, self._look_for_silence)
        elif not self._ended.done():
            self._ended.set_exception(Silent(f"silent for {self._idle_s:g} s"))

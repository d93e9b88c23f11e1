"""The network of a life: connections and HTTP exchanges in memory, with every fault of a path.

    driver ──Connection (bytes of one streamed answer)──▶ Host.stream
           ──Session (aiohttp's shape, whole answers)────▶ Host.command

A path is named by the address of its server.  A partition holds everything back until it ends, as TCP does.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from asyncrl.engines.sglang.client.machine_probes import GONE_AFTER_S
from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.plan import Weather

LATENCY_S = 0.002
"""Seconds for which a message is on its way."""
NO_ROUTE_S = 3.0
"""Seconds after which the driver's kernel finds no way to a machine that has vanished."""
Reply = Callable[[int, object], None]
"""Answers a command with a status and a JSON value."""
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_REPEATABLE = ("/abort_request", "/pause_generation", "/continue_generation", "/generate", "/server_info")
"""Commands that a proxy may deliver twice without a change of their meaning; no member joins a group twice."""
_WORDS = {400: "Bad Request", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}


class Host(Protocol):
    """A server of the life."""

    is_up: bool
    """Whether anything listens at its address."""

    def stream(self, connection: "Connection", body: dict[str, Any]) -> None:
        """Begin to answer a request for a streamed answer."""

    def command(self, method: str, path: str, body: dict[str, Any], reply: Reply) -> None:
        """Answer a command, now or later, or never."""

    def closed(self, connection: "Connection") -> None:
        """Note that the client has closed the connection."""


class Network:
    """All paths from the driver."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.hosts: dict[str, Host] = {}
        self.connections = list["Connection"]()
        """Connections that are open."""
        self.exchanges = dict[asyncio.Future[tuple[int, bytes]], str]()
        """Commands without an answer so far, with the address of their server."""
        self.vanished = set[str]()
        """Addresses on machines that have vanished."""

    async def connect(self, make: Callable[[], asyncio.Protocol], netloc: str) -> tuple[Any, asyncio.Protocol]:
        """Connect to the server at ``netloc``.  Raises OSError; waits during a partition."""
        await asyncio.sleep(self.weather.delay_s(netloc) + LATENCY_S)
        if netloc in self.vanished:
            await asyncio.sleep(NO_ROUTE_S)
            raise _no_route()
        host = self.hosts.get(netloc)
        if host is None or not host.is_up:
            raise ConnectionRefusedError(f"nothing listens at {netloc}")
        protocol = make()
        connection = Connection(self, host, netloc, protocol)
        self.connections.append(connection)
        protocol.connection_made(connection)
        return connection, protocol

    def reset(self, netloc: str) -> None:
        """Break every connection to a server that has died."""
        for connection in [each for each in self.connections if each.netloc == netloc]:
            connection.lose(ConnectionResetError("the peer has died"))
        for exchange in [each for each, where in self.exchanges.items() if where == netloc]:
            asyncio.get_running_loop().call_later(LATENCY_S, _fail, exchange, ConnectionResetError("the peer has died"))

    def vanish(self, netloc: str) -> None:
        """Lose a server with its machine, which closes no connection: the driver's kernel does so later."""
        self.vanished.add(netloc)
        later, gone = asyncio.get_running_loop().call_later, TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        for connection in [each for each in self.connections if each.netloc == netloc]:
            later(GONE_AFTER_S, connection.lose, gone)
        for exchange in [each for each, where in self.exchanges.items() if where == netloc]:
            later(GONE_AFTER_S, _fail, exchange, gone)

    def session(self, headers: Mapping[str, str]) -> Any:
        """Return a client session in the shape of aiohttp's."""
        return Session(self)


def _fail(exchange: asyncio.Future[tuple[int, bytes]], error: Exception) -> None:
    if not exchange.done():
        exchange.set_exception(error)


def _no_route() -> OSError:
    return OSError(errno.EHOSTUNREACH, "No route to host")


class Connection(asyncio.Transport):
    """One connection, which carries streamed answers one after the other."""

    def __init__(self, network: Network, host: Host, netloc: str, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._network = network
        self._host = host
        self.netloc = netloc
        self._protocol = protocol
        self._is_closed = False
        self._is_lost = False
        """Whether the server's side is broken, which the driver may not know yet."""
        self._arrived_at = 0.0
        self._is_answering = False

    # ---- the driver's side

    def write(self, data: Any) -> None:
        """Send a request to the server."""
        weather = self._network.weather
        if weather.take("drop", self.netloc):
            return
        asyncio.get_running_loop().call_later(
            weather.delay_s(self.netloc) + LATENCY_S, self._asked, bytes(data).partition(b"\r\n\r\n")[2]
        )

    def abort(self) -> None:
        """Close the connection at once."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            asyncio.get_running_loop().call_later(LATENCY_S, self._host.closed, self)

    def close(self) -> None:
        """Close the connection at once."""
        self.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed on either side."""
        return self._is_closed

    # ---- the server's side

    def _asked(self, body: bytes) -> None:
        if self._is_closed or self._is_lost:
            return
        status = self._network.weather.refusal(self.netloc)
        if status is None:
            self._host.stream(self, orjson.loads(body))
        else:
            self.refuse(status)

    def refuse(self, status: int) -> None:
        """Answer with an error page."""
        page = b'{"error": {"message": "simulated"}}'
        head = f"HTTP/1.1 {status} {_WORDS[status]}\r\nContent-Length: {len(page)}\r\n\r\n"
        self._deliver(head.encode() + page)

    def send(self, payload: bytes, *, is_last: bool = False) -> None:
        """Send one event of the answer, and its end with the last one."""
        event = b"data: %b\n\n" % payload
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if is_last:
            data += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        if not self._is_answering:
            data = _HEAD + data
        self._is_answering = not is_last
        if self._network.weather.take("cut", self.netloc):
            self._cut(data, ConnectionResetError("cut"))
        elif self._network.weather.take("cut_by_fin", self.netloc):
            self._cut(data, None)
        else:
            self._deliver(data)
            if is_last and self._network.weather.take("duplicate_bytes", self.netloc):
                self._deliver(data)

    def _cut(self, data: bytes, error: Exception | None) -> None:
        """Break the connection within ``data``, on both sides."""
        self._deliver(data[: len(data) // 2])
        self.lose(error)
        asyncio.get_running_loop().call_later(LATENCY_S, self._host.closed, self)

    def lose(self, error: Exception | None) -> None:
        """Break the connection after what was sent."""
        self._is_lost = True
        self._forget()
        asyncio.get_running_loop().call_at(self._arrival(), self._lost, error)

    def _deliver(self, data: bytes) -> None:
        asyncio.get_running_loop().call_at(self._arrival(), self._arrive, data)

    def _arrival(self) -> float:
        """Return the time at which the next bytes arrive: never before earlier ones."""
        now = loop_time()
        self._arrived_at = max(self._arrived_at, now + self._network.weather.delay_s(self.netloc) + LATENCY_S)
        return self._arrived_at

    def _arrive(self, data: bytes) -> None:
        if not self._is_closed:
            self._protocol.data_received(data)

    def _lost(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._protocol.connection_lost(error)

    def _forget(self) -> None:
        if self in self._network.connections:
            self._network.connections.remove(self)


class Session:
    """The part of ``aiohttp.ClientSession`` that our client uses."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def request(self, method: str, url: str, *, data: bytes | None = None) -> "_Exchange":
        """Return the context of one exchange."""
        return _Exchange(self._network, method, url, data)

    async def close(self) -> None:
        """Close the session."""


class _Exchange:
    """One command on its way: the request, and the whole answer."""

    def __init__(self, network: Network, method: str, url: str, data: bytes | None) -> None:
        parts = urlsplit(url)
        self._network = network
        self._netloc = parts.netloc
        self._method = method
        self._path = parts.path
        self._body: dict[str, Any] = orjson.loads(data) if data else {}
        self.status = 0
        self._text = b""

    async def __aenter__(self) -> "_Exchange":
        network, weather = self._network, self._network.weather
        self._answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        network.exchanges[self._answer] = self._netloc
        try:
            if not weather.take("drop_command", self._netloc):
                self._later(self._ask)
            if self._path in _REPEATABLE and weather.take("duplicate_command", self._netloc):
                self._later(self._ask)
            self.status, self._text = await self._answer
        finally:
            del network.exchanges[self._answer]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def read(self) -> bytes:
        """Return the body."""
        return self._text

    def _later(self, act: Callable[..., None], *args: object) -> None:
        delay_s = self._network.weather.delay_s(self._netloc) + LATENCY_S
        asyncio.get_running_loop().call_later(delay_s, act, *args)

    def _ask(self) -> None:
        host = self._network.hosts.get(self._netloc)
        if self._netloc in self._network.vanished:
            asyncio.get_running_loop().call_later(NO_ROUTE_S, _fail, self._answer, _no_route())
        elif host is None or not host.is_up:
            if not self._answer.done():
                self._answer.set_exception(ConnectionRefusedError(f"nothing listens at {self._netloc}"))
        elif self._network.weather.take("reset_command", self._netloc):
            host.command(self._method, self._path, self._body, lambda status, answer: None)
            _fail(self._answer, ConnectionResetError("the peer has died"))
        else:
            host.command(self._method, self._path, self._body, self._reply)

    def _reply(self, status: int, answer: object) -> None:
        self._later(self._arrive, status, b"" if answer is None else orjson.dumps(answer))

    def _arrive(self, status: int, text: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result((status, text))

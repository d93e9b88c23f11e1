"""A simulated router in front of the engines, which notices deaths late, and dies itself."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.router import StartedRouter
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.launch import Command, RouterLaunch
from asyncrl.errors import EngineError, ServerFailed
from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.network import Connection, Host, Network, Reply

PROBE_EVERY_S = 10.0
"""Seconds between two looks of the router at an engine; the real one takes a minute."""
HOST, PORT = "10.0.9.1", 8000


class SimRouter:
    """One router process after the other."""

    def __init__(self, network: Network) -> None:
        self.is_up = False
        self.on_death: Callable[[], None] = lambda: None
        self.netloc = f"{HOST}:{PORT}"
        self._network = network
        self._workers = dict[str, str]()
        """Addresses of the engines by id."""
        self._seen = dict[str, tuple[float, bool]]()
        """The time of the last look at an engine, and whether it was up."""
        self._turn = 0
        self._upstreams = dict[Connection, _Upstream]()

    def start(self, urls: Sequence[str]) -> None:
        """Start a process with these engines."""
        self.is_up = True
        self._workers = {url: urlsplit(url).netloc for url in urls}
        self._seen.clear()
        self._network.hosts[self.netloc] = self

    def die(self) -> None:
        """End the process."""
        if self.is_up:
            self.is_up = False
            for connection in [*self._upstreams]:
                self.closed(connection)
            self._network.reset(self.netloc)
            self.on_death()

    # ---- Host

    def stream(self, connection: Connection, body: dict[str, Any]) -> None:
        """See ``Host.stream``."""
        netloc = self._chosen()
        host = None if netloc is None else self._network.hosts.get(netloc)
        if netloc is None or host is None or not host.is_up:
            connection.refuse(503)
            return
        if (status := self._network.weather.refusal(netloc)) is not None:
            connection.refuse(status)
            return
        upstream = self._upstreams[connection] = _Upstream(connection, host, netloc, self._forget)
        host.stream(cast(Connection, upstream), body)

    def command(self, method: str, path: str, body: dict[str, Any], reply: Reply) -> None:
        """See ``Host.command``."""
        if path == "/generate":
            self._forward(method, path, body, reply)
            return
        if method == "POST":
            self._workers[body["url"]] = urlsplit(body["url"]).netloc
        elif method == "DELETE":
            self._workers = {url: each for url, each in self._workers.items() if each != path.rpartition("/")[2]}
        workers = [
            {"url": url, "id": netloc, "is_healthy": self._is_healthy(netloc)} for url, netloc in self._workers.items()
        ]
        reply(200, {"workers": workers})

    def closed(self, connection: Connection) -> None:
        """See ``Host.closed``."""
        if (upstream := self._upstreams.pop(connection, None)) is not None:
            upstream.is_closed = True
            upstream.host.closed(cast(Connection, upstream))

    def _forward(self, method: str, path: str, body: dict[str, Any], reply: Reply) -> None:
        netloc = self._chosen()
        host = None if netloc is None else self._network.hosts.get(netloc)
        if host is None or not host.is_up:
            reply(503, {"error": "no engine"})
        else:
            host.command(method, path, body, reply)

    def _forget(self, connection: Connection) -> None:
        self._upstreams.pop(connection, None)

    def _chosen(self) -> str | None:
        """Return the next engine in turn that was up at the last look."""
        healthy = [netloc for netloc in self._workers.values() if self._is_healthy(netloc)]
        self._turn += 1
        return healthy[self._turn % len(healthy)] if healthy else None

    def _is_healthy(self, netloc: str) -> bool:
        now, (seen_at, was_up) = loop_time(), self._seen.get(netloc, (float("-inf"), False))
        if now - seen_at >= PROBE_EVERY_S:
            host = self._network.hosts.get(netloc)
            was_up = host is not None and host.is_up
            self._seen[netloc] = now, was_up
        return was_up


class _Upstream:
    """The router's connection to an engine, which passes everything on."""

    def __init__(self, client: Connection, host: Host, netloc: str, forget: Callable[[Connection], None]) -> None:
        self.host = host
        self.netloc = netloc
        self.is_closed = False
        self._client = client
        self._forget = forget

    def is_closing(self) -> bool:
        """See ``Connection.is_closing``."""
        return self.is_closed or self._client.is_closing()

    def send(self, payload: bytes, *, is_last: bool = False) -> None:
        """See ``Connection.send``."""
        if not self.is_closed:
            self._client.send(payload, is_last=is_last)
            if is_last:
                self._forget(self._client)

    def lose(self, error: Exception | None) -> None:
        """Break the client's connection, because the engine has died."""
        self.is_closed = True
        self._forget(self._client)
        self._client.lose(error)


class RouterProcess:
    """The supervisor's view of the router's process, in the place of an actor's ``Server``."""

    actor = None

    def __init__(self, router: SimRouter) -> None:
        self.name = "router"
        self.router = router
        self._died = asyncio.Event()
        router.on_death = self._died.set

    async def watch(self) -> None:
        """Run until cancelled.  Raises ServerFailed once the process has ended."""
        await self._died.wait()
        await asyncio.sleep(0.3)
        raise ServerFailed("the router ended")

    async def renew(self) -> None:
        """End the process."""
        self.router.die()
        await asyncio.sleep(0.1)

    async def run(self, server: Server, command: Command, wait: Callable[[], Awaitable[None]]) -> None:
        """Start a process with the arguments of ``command``, and wait.  Raises ServerFailed."""
        words = list(command.arguments)
        urls = words[words.index("--worker-urls") + 1 :]
        await asyncio.sleep(1.0)
        self._died.clear()
        self.router.start([word for word in urls if word.startswith("http://10.0.0.")])
        try:
            await wait()
        except EngineError as error:
            raise ServerFailed(f"the router: {error}") from error


class _Addresses:
    """The part of ``Addresses`` that the router needs."""

    async def router(self, actor: Any) -> tuple[str, int, int]:
        """Return host and ports."""
        return HOST, PORT, PORT + 1


def started_router(process: RouterProcess, http: HttpClient, urls: tuple[str, ...]) -> StartedRouter:
    """Return the real view of a router that runs in ``process``."""
    launch = RouterLaunch(worker_urls=urls, port=PORT, key="", prometheus_port=PORT + 1, host=HOST)
    return StartedRouter(cast(Server, process), cast(Addresses, _Addresses()), http, process.run, launch)

"""HTTP requests to SGLang and its router.  The one place where HTTP, socket and deadline errors become EngineErrors."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson

from asyncrl.engines.sglang.client.events import EventReader
from asyncrl.engines.sglang.client.machine_probes import probing_socket
from asyncrl.engines.sglang.client.payload import UNREADABLE, read_event
from asyncrl.engines.sglang.client.streams import Silent, Streams
from asyncrl.errors import EngineError, EngineLost, EngineRejected, EngineTimeout, ForeignServer
from asyncrl.event_loop import Deadline

_CONNECT_S = 10.0
"""Deadline in seconds of a TCP connection; a live server accepts at once, also when busy."""
_KEEP_ALIVE_S = 2.0
"""Seconds for which an unused connection is kept.

Below the 5 s after which SGLang's uvicorn closes it, so that no request is sent on a closing connection.
"""
_SAID = 2000
"""Bytes of an error page that an error message quotes at most."""
_ROUTING_KEY = b"X-SMG-Routing-Key"
"""Header of sglang-router 0.3.2; SGLang and the router's other policies ignore it."""
_UNAUTHORIZED = 401
_MEND = "end the other program, or start again: ports are chosen at random"
_FAILURES = (aiohttp.ClientError, OSError)
"""Exceptions of a failed connection; a TimeoutError is an OSError."""
_TRY_LATER = frozenset({408, 425, 429})
"""Client-error statuses that do not mean that the request is wrong."""


class HttpClient:
    """Three connection pools without a limit: streamed answers, whole answers, and control commands.

    Control has a pool to itself so that generation cannot starve it.  ``async with`` opens and closes all three.
    Every method raises EngineTimeout, EngineLost or EngineRejected.
    """

    def __init__(
        self, key: str | None = None, open_session: Callable[[Mapping[str, str]], aiohttp.ClientSession] | None = None
    ) -> None:
        """Send ``key`` with every request as ``Authorization: Bearer``; None for servers that want none.

        ``open_session`` opens the session of a pool, with headers for every request; a simulation replaces it.
        """
        self._key = key
        self._open_session = open_session or _session

    async def __aenter__(self) -> Self:
        authorization = {} if self._key is None else _authorization(self._key)
        self._streams = Streams(_CONNECT_S, _KEEP_ALIVE_S, authorization)
        self._data = self._open_session(authorization)
        self._control = self._open_session(authorization)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.close()
        await self._data.close()
        await self._control.close()

    @property
    def key_of_worker(self) -> dict[str, str]:
        """The key in the words of the router, which sends it to ask an engine for its model."""
        return {} if self._key is None else {"api_key": self._key}

    async def stream(
        self,
        url: str,
        body: dict[str, Any],
        idle_s: float,
        on_event: Callable[[dict[str, Any]], None],
        routing_key: str | None = None,
    ) -> None:
        """POST, and pass each event of the streamed answer to ``on_event``; ``idle_s`` is the longest silence.

        The router's policy ``manual`` sends requests of one ``routing_key`` to one engine.
        Exceptions of ``on_event`` propagate.  It is never called after this method has ended.
        """
        reader, said = EventReader(), bytearray()

        def take(status: int, piece: bytes) -> None:
            if status != 200:
                said.extend(piece[: _SAID - len(said)])
                return
            for payload in reader.feed(piece):
                if payload != b"[DONE]":
                    on_event(_event(payload, url))

        try:
            header = b"" if routing_key is None else b"%b: %b\r\n" % (_ROUTING_KEY, quote(routing_key).encode())
            status = await self._streams.post(url, orjson.dumps(body), idle_s, take, header)
        except EngineError:  # already one of our errors
            raise
        except _FAILURES as error:
            raise _named(error, url, idle_s) from error
        if status != 200:
            raise _refusal(url, status, said.decode(errors="replace"))

    async def ask(self, url: str, body: dict[str, Any], timeout_s: float) -> Any:
        """POST on the data connections and return the answer."""
        return await _exchange(self._data, "POST", url, body, timeout_s)

    async def command(self, url: str, body: dict[str, Any], timeout_s: float) -> Any:
        """POST on the control connections and return the answer."""
        return await _exchange(self._control, "POST", url, body, timeout_s)

    async def tell(self, url: str, timeout_s: float) -> None:
        """POST on the control connections and ignore the body of the answer."""
        await _exchange(self._control, "POST", url, None, timeout_s, is_read=False)

    async def look(self, url: str, timeout_s: float) -> Any:
        """GET on the control connections and return the answer."""
        return await _exchange(self._control, "GET", url, None, timeout_s)

    async def delete(self, url: str, timeout_s: float) -> None:
        """DELETE on the control connections and ignore the body of the answer."""
        await _exchange(self._control, "DELETE", url, None, timeout_s, is_read=False)

    async def check_key(self, url: str, timeout_s: float) -> None:
        """GET ``url`` with another key and then with ours.  Raises ForeignServer unless only ours is accepted.

        Without a key every server is accepted.  The other key comes first, so that a server which accepts any never
        sees ours.
        """
        if self._key is None:
            return
        said = await self._status(url, secrets.token_urlsafe(), timeout_s)
        if said != _UNAUTHORIZED:
            raise ForeignServer(f"{url} answers {said} to a wrong key, so it is no server of this run; {_MEND}")
        if await self._status(url, self._key, timeout_s) == _UNAUTHORIZED:
            raise ForeignServer(f"{url} refuses this run's key, so it is no server of this run; {_MEND}")

    async def _status(self, url: str, key: str, timeout_s: float) -> int:
        with _named_errors(url, timeout_s):
            async with (
                Deadline(timeout_s),
                self._control.get(url, headers=_authorization(key), allow_redirects=False) as response,
            ):
                return response.status


def _authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class _Connector(aiohttp.TCPConnector):
    """Opens connections within _CONNECT_S.  aiohttp's limit would count the time for which our loop is blocked."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Any],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp's parameter)
    ) -> aiohttp.connector.Connection:
        """See aiohttp, which turns a TimeoutError into its ConnectionTimeoutError."""
        async with Deadline(_CONNECT_S):
            return await super().connect(req, traces, timeout)


def _session(authorization: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=probing_socket),
        cookie_jar=aiohttp.DummyCookieJar(),  # a cookie lookup at each request costs time
        timeout=aiohttp.ClientTimeout(total=None),  # ``Deadline`` limits every wait
        headers={"Content-Type": "application/json", **authorization},
    )


async def _exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: dict[str, Any] | None,
    timeout_s: float,
    *,
    is_read: bool = True,
) -> Any:
    with _named_errors(url, timeout_s):
        async with (
            Deadline(timeout_s),
            session.request(method, url, data=None if body is None else orjson.dumps(body)) as response,
        ):
            await _raise_for_status(response, url, timeout_s)
            text = await response.read()
    return _parsed(text, url) if text and is_read else None


async def _raise_for_status(response: aiohttp.ClientResponse, url: str, timeout_s: float) -> None:
    if response.status < 400:
        return
    with _named_errors(url, timeout_s):
        async with Deadline(timeout_s):
            said = (await response.read())[:_SAID].decode(errors="replace")
    raise _refusal(url, response.status, said)


def _refusal(url: str, status: int, said: str) -> EngineError:
    refused = 400 <= status < 500 and status not in _TRY_LATER
    return (EngineRejected if refused else EngineLost)(f"{url} answered {status}: {said}")


def _event(payload: bytes, url: str) -> dict[str, Any]:
    try:
        return read_event(payload)
    except UNREADABLE as error:
        raise EngineLost(f"{url} sent an event that SGLang never sends: {payload[:200]!r}") from error


def _parsed(text: bytes, url: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise EngineLost(f"{url} answered with invalid JSON: {text[:200]!r}") from error


@contextmanager
def _named_errors(url: str, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except EngineError:  # already one of our errors
        raise
    except _FAILURES as error:
        raise _named(error, url, timeout_s) from error


def _named(error: Exception, url: str, timeout_s: float) -> EngineError:
    if isinstance(error, Silent):
        return EngineTimeout(f"{url} was silent for {timeout_s:g} s")
    if isinstance(error, aiohttp.ServerTimeoutError):
        return EngineLost(f"{url}: no connection within {_CONNECT_S:g} s")
    if isinstance(error, TimeoutError) and error.errno is None:  # with a number it is the kernel's: no machine is there
        return EngineTimeout(f"{url} did not answer within {timeout_s:g} s")
    return EngineLost(f"{url}: {type(error).__name__}: {error}")

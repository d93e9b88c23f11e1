"""JSON over HTTP, with slime's names and retries.

One client serves each event loop, because a connection belongs to the loop that opened it.  ``_http_client`` is the
client of the loop on which functions run; user files read it.
"""

import asyncio
import json
import logging
import os
import socket
import time
import weakref
from typing import Any

import httpx

logger = logging.getLogger(__name__)

__all__ = ["client", "get", "get_host_info", "get_rollout_num_engines", "init_http_client", "is_port_available", "post"]

RETRY_AFTER_S = 1.0
"""Seconds between two attempts, as in slime."""
RETRIES_END_S = 120.0
"""Seconds after the first failure at which no further attempt begins."""

_MOST_KEPT = 20
"""Connections that stay open without a request.

httpcore 1.0.9 looks at all connections for each idle one, at the start and end of each request.  With 512 requests at
a time and no limit, a request took 13 to 18 ms of CPU time, and 2 ms with this limit.
"""
_http_client: httpx.AsyncClient | None = None
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


async def post(url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """Post JSON and return the answer: JSON, or text if it is none.

    Failures are tried again after a second, at most ``max_retries`` attempts in all and for RETRIES_END_S.  An answer
    with a status of 400 to 499 is raised at once, because the same request would get it again.  Raises the last
    httpx.HTTPError.
    """
    ends_s = None
    address, auth = _split(url)
    for attempt in range(1, max(1, max_retries) + 1):
        try:
            return _content(await client().post(address, json=payload or {}, headers=headers, auth=auth))
        except httpx.HTTPError as error:
            ends_s = time.monotonic() + RETRIES_END_S if ends_s is None else ends_s
            if attempt >= max_retries or time.monotonic() >= ends_s or _is_refused(error):
                raise
            logger.info("%s: %s; attempt %d of %d", address, _described(error), attempt, max_retries)
        await asyncio.sleep(RETRY_AFTER_S)
    raise AssertionError("unreachable")


async def get(url: str) -> Any:
    """Return the JSON at ``url``.  Raises httpx.HTTPError."""
    address, auth = _split(url)
    response = await client().get(address, auth=auth)
    response.raise_for_status()
    return json.loads(response.content)


def init_http_client(args: Any) -> None:
    """Make the client of the running loop."""
    global _http_client
    _http_client = client()


def get_rollout_num_engines(args: Any) -> int:
    """Return the number of rollout engines."""
    found = getattr(args, "rollout_num_engines", None)
    if found is not None:
        return int(found)
    gpus = getattr(args, "rollout_num_gpus", None) or 0
    return max(1, gpus // (getattr(args, "rollout_num_gpus_per_engine", None) or 1)) if gpus > 0 else 0


def get_host_info() -> tuple[str, str]:
    """Return the name and an address of this machine; ``SLIME_HOST_IP`` sets the address."""
    name = socket.gethostname()
    if given := os.getenv("SLIME_HOST_IP"):
        return name, given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # sends nothing: it chooses the interface of the default route
            return name, str(probe.getsockname()[0])
        except OSError:
            return name, "127.0.0.1"


def is_port_available(port: int) -> bool:
    """Return whether a server could listen on ``port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def client() -> httpx.AsyncClient:
    """Return the client of the running loop, which its first call makes."""
    loop = asyncio.get_running_loop()
    found = _clients.get(loop)
    if found is None or found.is_closed:
        # No limit of time, as in slime: an answer may take an hour.  The episode's own limit ends it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_KEPT)
        found = _clients[loop] = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
    return found


def _content(response: httpx.Response) -> Any:
    response.raise_for_status()
    try:
        return json.loads(response.content)
    except ValueError:
        return response.text


def _is_refused(error: httpx.HTTPError) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and 400 <= error.response.status_code < 500


def _described(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"status {error.response.status_code}: {error.response.text[:200]}"
    return str(error) or type(error).__name__


def _split(url: str) -> tuple[httpx.URL, httpx.Auth]:
    """Return the address without user and password, which are the key of an episode: errors and logs show it."""
    found = httpx.URL(url)
    if not found.userinfo:
        return found, httpx.Auth()  # none
    return found.copy_with(userinfo=b""), httpx.BasicAuth(found.username, found.password)

"""The page of runs, served by a thread of the test."""

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from threading import Event, Thread

from asyncrl.page.runs.run_files import open_runs
from asyncrl.page.server import PageServer


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of the page of these runs."""
    urls: list[str] = []
    is_ready, is_over = Event(), Event()

    async def serve() -> None:
        server = PageServer(open_runs(list(folders)))
        async with server.open(socket.create_server(("127.0.0.1", 0))):
            urls.append(server.url)
            is_ready.set()
            await asyncio.to_thread(is_over.wait)

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_ready.wait(30)
        yield urls[0]
    finally:
        is_over.set()
        thread.join(30)


def opened(url: str) -> str:
    """The page at ``url``, as a browser opens it."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with opener.open(url, timeout=90) as answer:
        return str(answer.read().decode())

"""The loop of the program ``asyncrl page``.  Importing it takes longer than everything before."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

from asyncrl.daemon_threads import off_loop
from asyncrl.page.child import NICENESS
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.server import PageServer


def serve(runs: Sequence[RunFiles], listener: socket.socket, key: str | None) -> None:
    """Serve the page on ``listener`` until it is ended; without a key, as the child of a run that sends one."""
    asyncio.run(_serve(runs, listener, key) if key is not None else _serve_run(runs, listener))


async def _serve(runs: Sequence[RunFiles], listener: socket.socket, key: str) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with PageServer(runs, key=key).open(listener):
        await ended.wait()


async def _serve_run(runs: Sequence[RunFiles], listener: socket.socket) -> None:
    """Serve the page of the parent's run until the parent closes the standard input, or dies."""
    os.nice(NICENESS)
    ended = asyncio.Event()
    key = (await off_loop(sys.stdin.readline, "page-key")).strip()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    async with PageServer(runs, key=key).open(listener):
        await ended.wait()

"""The command ``asyncrl page``: show runs in the browser."""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import AsyncRLError
from asyncrl.page.address import LOOPBACK
from asyncrl.page.child import NICENESS
from asyncrl.page.runs.run_files import RunFiles, open_runs
from asyncrl.page.server import PageServer


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    flags = argparse.ArgumentParser(description="Show runs in the browser, from the files in their run directories.")
    flags.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="Run directory, such as runs/NAME.")
    flags.add_argument("--port", type=int, default=0, help="Port on this machine; 0 chooses a free one (default: 0).")
    flags.add_argument("--listener", type=int, help=argparse.SUPPRESS)  # a socket that the parent opened
    return flags


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C or SIGTERM and return the exit code."""
    options = parser().parse_args(argv)
    try:
        runs = open_runs(options.run_dirs)
        asyncio.run(_serve(runs, options.port) if options.listener is None else _serve_run(runs, options.listener))
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"error: --port {options.port}: {getattr(error, 'strerror', None) or error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(runs: Sequence[RunFiles], port: int) -> None:
    server, ended = PageServer(runs), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with server.open(socket.create_server((LOOPBACK, port))):
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await ended.wait()


async def _serve_run(runs: Sequence[RunFiles], listener: int) -> None:
    """Serve the page of the parent's run until the parent closes the standard input, or dies."""
    os.nice(NICENESS)
    ended = asyncio.Event()
    key = (await off_loop(sys.stdin.readline, "page-key")).strip()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    async with PageServer(runs, key=key).open(socket.socket(fileno=listener)):
        await ended.wait()

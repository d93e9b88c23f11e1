"""The command ``asyncrl page``: show runs in the browser."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.errors import AsyncRLError
from asyncrl.page.run_files import RunFiles, open_runs
from asyncrl.page.server import PageServer

KEY_VARIABLE = "ASYNCRL_PAGE_KEY"
"""The variable with the page's key, so that it need not be on a command line."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's flags."""
    flags = argparse.ArgumentParser(description="Show runs in the browser, from the files in their run directories.")
    flags.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="Run directory, such as runs/NAME.")
    flags.add_argument("--port", type=int, default=0, help="Port on this machine; 0 chooses a free one (default: 0).")
    flags.add_argument(
        "--host", default="127.0.0.1", help="Address to listen on; by default only this machine reaches the page."
    )
    return flags


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C and return the exit code."""
    options = parser().parse_args(argv)
    try:
        runs = open_runs(options.run_dirs)
        asyncio.run(_serve(runs, options.host, options.port))
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {options.host}:{options.port}: {error.strerror or error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(runs: Sequence[RunFiles], host: str, port: int) -> None:
    server, ended = PageServer(runs, key=os.environ.pop(KEY_VARIABLE, None), host=host), asyncio.Event()
    with suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with server.open(port):
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        await ended.wait()

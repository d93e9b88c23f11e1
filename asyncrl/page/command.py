"""The command ``asyncrl page``: show runs in the browser."""

import argparse
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from asyncrl.errors import AsyncRLError
from asyncrl.page.address import LOOPBACK, url_of
from asyncrl.page.runs.run_files import open_runs


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
        if options.listener is not None:
            listener, key = socket.socket(fileno=options.listener), None
        else:
            listener, key = socket.create_server((LOOPBACK, options.port)), secrets.token_urlsafe(24)
            _tell(url_of(listener.getsockname()[1], key))
        from asyncrl.page.serving import serve  # takes 0.3 s, in which the browser starts

        serve(runs, listener, key)
    except AsyncRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (OSError, OverflowError) as error:
        sys.stderr.write(f"error: --port {options.port}: {getattr(error, 'strerror', None) or error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(url: str) -> None:
    """Print the address of a page that can be opened at once: the kernel keeps connections until they are accepted."""
    signal.signal(signal.SIGTERM, _end)  # until the loop has its own handler
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(0)

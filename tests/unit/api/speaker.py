"""A program in place of a run's: it sends messages as ``asyncrl.api.reports`` does, and ends as the test asks.

The command is ``python -m tests.unit.api.speaker DESCRIPTOR [action ...]``; ``main`` has the actions.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from asyncrl.api.reports import Reports

UNTIL_S = 20.0
"""Limit for the wait for a file."""


def main() -> int:
    reports = Reports(socket.socket(fileno=int(sys.argv[1])))
    folders = [action.removeprefix("in:") for action in sys.argv[2:] if action.startswith("in:")]
    reports.begin(Path(*folders or ("runs", "here")))
    code = 0
    for action in sys.argv[2:]:
        name, _, value = action.partition(":")
        if name == "row":
            reports.write({"step": int(value), "reward/mean": float("nan")})
        elif name == "fail":
            reports.fail(value, "the cause")
        elif name == "code":
            code = int(value)
        elif name == "end-on-sigterm":
            signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
        elif name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
        elif name == "sleep":
            sleep(float(value))
        elif name == "until":
            sleep(UNTIL_S, Path(value))
        elif name == "say":
            sys.stderr.write(f"error: {value}\n")
    reports.finish()
    return code


def sleep(seconds: float, until: Path | None = None) -> None:
    """Sleep, at most until a file is there, in pieces: a signal that comes as a sleep begins is handled after it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (until is not None and until.exists()):
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())

"""The child process of a tracker:  python -m asyncrl.metrics.trackers.program

It reads one JSON object per line from its standard input, and answers each with ``{"done": ...}`` or
``{"error": "..."}`` on its standard output: first ``{"backend": "module:Class", "options": {...}}``, then ``{"row":
{...}}`` any number of times, then ``{"finish": true}``.  At the end of its input it finishes as well, because the
driver is gone.
"""

import json
import os
import signal
import sys
from importlib import import_module
from threading import Timer
from typing import Any, BinaryIO, Protocol

LAST_S = 60.0
"""Seconds to finish after the driver has gone."""


class Backend(Protocol):
    """A tracker's library."""

    def open(self) -> str:
        """Connect, and return where the run can be seen."""

    def log(self, row: dict[str, float], /) -> None:
        """Send one row."""

    def finish(self) -> None:
        """Send what is still held back, and disconnect."""


def main() -> None:
    """Serve one tracker until it is finished."""
    # The driver decides when this process ends: a signal to all processes of a job must not cost the last rows.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print: file descriptor 1 becomes the log file, and answers use a copy that children do not inherit.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


def serve(messages: BinaryIO, answers: BinaryIO) -> None:
    """Answer every message; return after the last."""
    backend: Backend | None = None
    for line in messages:
        message = json.loads(line)
        try:
            if "backend" in message:
                backend = _made(message["backend"], message["options"])
            done = _handled(backend, message)
        except BaseException as error:  # noqa: BLE001 (every failure goes to the driver, which decides)
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 (the log file)
            answers.write(_line({"error": _shown(error)}))
        else:
            answers.write(_line({"done": done}))
            if "finish" in message:
                return
    if backend is not None:
        deadline = Timer(LAST_S, os._exit, (1,))
        deadline.daemon = True
        deadline.start()
        backend.finish()


def _made(path: str, options: dict[str, Any]) -> Backend:
    module, _, name = path.partition(":")
    backend: Backend = getattr(import_module(module), name)(**options)
    return backend


def _handled(backend: Backend | None, message: dict[str, Any]) -> str | None:
    if backend is None:
        raise RuntimeError("the first message names no backend")
    if "backend" in message:
        return backend.open()
    if "row" in message:
        backend.log(message["row"])
    else:
        backend.finish()
    return None


def _shown(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


if __name__ == "__main__":
    main()

"""The run's side of the socket to the program that started it."""

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import orjson

from asyncrl.plain_text import encodable
from asyncrl.rollout_log.files import times_of

FLUSH_S = 60.0
"""Seconds at the end of the run for messages that were not taken yet.  The other side takes them in milliseconds."""


class Reports:
    """Sends the run directory, every row and the error of a run.  No method blocks or raises, ``finish`` apart."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = SimpleQueue[bytes | None]()
        self._sender = Thread(target=self._send, name="reports", daemon=True)
        self._sender.start()
        Thread(target=self._end_with_starter, name="starter-watch", daemon=True).start()

    def begin(self, run_dir: Path) -> None:
        """Tell the run directory, and which files of samples an earlier run, which this one resumes, left in it."""
        self._put({"run_dir": str(run_dir), "former_files": times_of(run_dir)})

    def write(self, row: Mapping[str, float | int], /) -> None:
        """Send the numbers of a step."""
        self._put({"row": row})

    def close(self) -> None:
        """Do nothing: an error may follow the last row."""

    def fail(self, name: str, text: str) -> None:
        """Send the error that ends the run."""
        self._put({"error": {"name": name, "text": encodable(text)}})

    def finish(self) -> None:
        """Return once everything is sent, or after FLUSH_S."""
        self._lines.put(None)
        self._sender.join(FLUSH_S)

    def _put(self, message: Mapping[str, Any]) -> None:
        self._lines.put(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    def _send(self) -> None:
        with suppress(OSError):  # the other side is gone
            while (line := self._lines.get()) is not None:
                self._connection.sendall(line)

    def _end_with_starter(self) -> None:
        """Wait for the end of the program that started the run, and then end the run as a scheduler would."""
        with suppress(OSError):
            self._connection.recv(1)
        os.kill(os.getpid(), signal.SIGTERM)

"""Backends for the tracker's process: each does one thing wrong, or nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SLEEP = "import time; time.sleep(600)"


class FileBackend:
    """Append rows to a file.  ``fault`` names a call, and ``how`` what it does: ``hang``, ``spawn``, ``raise`` or
    ``die``.
    """

    def __init__(self, path: str, fault: str = "", how: str = "", key: str = "") -> None:
        self._path, self._fault, self._how = Path(path), fault, how

    def open(self) -> str:
        print("a library that prints")  # noqa: T201 (must not be taken for an answer)
        self._do("open")
        return f"rows in {self._path}"

    def log(self, row: dict[str, float], /) -> None:
        self._do("log")
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self) -> None:
        self._do("finish")
        with self._path.open("a") as file:
            file.write('"finished"\n')

    def _do(self, call: str) -> None:
        if call != self._fault:
            return
        if self._how == "hang":
            # As W&B's service: in a session of itself, so that no signal to a process group reaches it.
            subprocess.Popen([sys.executable, "-c", SLEEP, str(self._path)], start_new_session=True)
            time.sleep(600)
        while self._how == "spawn":  # a library that restarts its service as often as it ends
            subprocess.Popen(["sleep", "600"], start_new_session=True, env={"ROWS": str(self._path)})
            time.sleep(0.01)
        if self._how == "die":
            os._exit(3)
        raise OSError("no route to host\nsecond line")

"""One attempt of a life: the product as a user starts it, observed through its files and processes."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.chaos.accounts import ERROR, Attempt
from benchmarks.chaos.processes import MARK, Family, command
from benchmarks.chaos.user_code import WITNESS
from benchmarks.common.circumstances import ROOT

LOOK_EVERY_S = 0.05
LEFT_S = 15.0
"""Seconds after the end of the program in which all its processes must have ended."""
REMEMBER_EVERY_S = 1.0
"""Seconds between two looks at all processes of the machine."""


class Run:
    """A running attempt."""

    def __init__(
        self, folder: Path, mark: str, flags: Sequence[str], environment: Mapping[str, str], notes: Path
    ) -> None:
        """Start the program with the run directory ``folder``.  ``environment`` is added to this process's.

        Output and witness are files of the folder ``notes``, because the disk of the run directory may be full.
        """
        self.folder = folder
        self.family = Family(mark)
        self._output = notes / f"{folder.name}.output"
        self._witness = notes / f"{folder.name}.witness"
        self._looked_at = 0.0
        variables = {**psutil.Process().environ(), **environment, MARK: mark, WITNESS: str(self._witness)}
        command = [sys.executable, "train_async.py", *flags, "--run-dir", str(folder), "--progress", "lines"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code; None while the program runs."""
        return self.process.poll()

    def num_steps(self) -> int:
        """Return the number of steps reported so far."""
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``is_so``; False if the program ended or the time is over before."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if self.code is not None or time.monotonic() > deadline:
                return False
            if time.monotonic() - self._looked_at > REMEMBER_EVERY_S:
                self.family.look(psutil.Process(self.process.pid) if self.code is None else None)
                self._looked_at = time.monotonic()
            time.sleep(LOOK_EVERY_S)
        return True

    def victims(self, text: str) -> list[psutil.Process]:
        """Return the processes with ``text`` in their command lines; the program itself alone, if it has it."""
        if text in command(psutil.Process(self.process.pid)):
            return [psutil.Process(self.process.pid)]
        return self.family.find(text)

    def ended(self, fault_at: float | None, *, is_signalled: bool) -> Attempt:
        """Wait for the processes that are left, end them, and return what the attempt left behind.

        ``fault_at`` is the time of the fault, in seconds since 1970.
        """
        is_stuck = self.code is None
        if is_stuck:
            self.family.kill()
        left_s, left = self.family.wait(LEFT_S)
        self.family.kill()
        self.process.wait()
        output = self._output.read_text(errors="replace")
        return Attempt(
            code=None if is_stuck else self.process.returncode,
            said=_said(output, self.folder / "run.log", fault_at),
            has_traceback="Traceback" in output,
            rows=tuple(_lines(self.folder / "metrics.jsonl")),
            trained={
                int(line["step"]): tuple((epoch, row) for epoch, row in line["trained"])
                for line in _lines(self._witness)
            },
            left=left,
            left_s=left_s,
            is_signalled=is_signalled,
        )


def _said(output: str, log: Path, fault_at: float | None) -> str:
    """Return the last error line, or else the first warning after the fault."""
    errors = [line for line in output.splitlines() if line.startswith(ERROR)]
    if errors:
        return errors[-1]
    if fault_at is None or not log.exists():
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fault_at))
    warnings = [line for line in log.read_text(errors="replace").splitlines() if " WARNING " in line and line >= since]
    return warnings[0].partition(" WARNING ")[2].strip() if warnings else ""


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, without a line that a killed process left incomplete."""
    found = []
    if file.exists():
        for line in file.read_bytes().splitlines():
            try:
                found.append(orjson.loads(line))
            except orjson.JSONDecodeError:
                continue
    return found

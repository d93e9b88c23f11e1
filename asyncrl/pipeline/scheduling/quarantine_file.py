"""The file of rows that failed: one JSON line per change, of which the last one of a row is valid."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import orjson

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import ConfigError
from asyncrl.event_loop import Deadline
from asyncrl.pipeline.scheduling.quarantine import FailedRow, Quarantine

logger = logging.getLogger(__name__)

QUARANTINE_FILE = "quarantine.jsonl"
"""File in the folder of ``--save``, or without it in the run directory."""
LAST_FLUSH_S = 5.0
"""Seconds for the last rows.  On a file server that is away, they would keep the run."""


class QuarantineFile:
    """Appends the rows that change.  Keep ``run`` running; it writes within a moment, in a thread.

    A line that cannot be written costs a warning, once, because the run has the row in memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[bytes] = deque()  # thread-safe
        self._has_lines = asyncio.Event()
        self._writing = Lock()
        self._is_broken = False

    def write(self, row: FailedRow) -> None:
        """Append one row soon.  Never waits."""
        self._lines.append(orjson.dumps(asdict(row)) + b"\n")
        self._has_lines.set()

    async def run(self) -> NoReturn:
        """Write rows until cancelled; the last ones are written then, within LAST_FLUSH_S."""
        try:
            while True:
                await self._has_lines.wait()
                self._has_lines.clear()
                await self.flush()
        finally:
            try:
                async with Deadline(LAST_FLUSH_S):
                    await self.flush()
            except TimeoutError:
                logger.warning("%s: rows that failed last were not written within %g s", self._path, LAST_FLUSH_S)

    async def flush(self) -> None:
        """Write the rows that are not in the file yet, also those of a write that a cancellation left alone."""
        try:
            await off_loop(self._append, "quarantine")
        except OSError as error:
            if not self._is_broken:
                logger.warning("%s: rows that fail are no longer written: %s", self._path, error)
            self._is_broken = True

    def _append(self) -> None:
        """Append all lines.  A thread that was left alone takes its lines here too, so that they stay in order."""
        with self._writing:
            lines = bytearray()
            while self._lines:
                lines += self._lines.popleft()
            if lines:
                _append(self._path, lines)


def open_quarantine(
    most_failures: int, folder: Path, earlier: Path | None, *, by_content: bool = False
) -> tuple[Quarantine, QuarantineFile]:
    """Return the quarantine that is kept in a file in ``folder``, with the rows of earlier runs, and the file.

    The rows in the folder ``earlier`` come first.  ``by_content``: see ``Quarantine``.  Raises ConfigError if a file
    cannot be read.
    """
    folders = [folder] if earlier is None else [earlier, folder]
    rows = read_rows(each / QUARANTINE_FILE for each in folders) if most_failures else ()
    path = folder / QUARANTINE_FILE
    file = QuarantineFile(path)
    quarantine = Quarantine(most_failures, rows, file.write, by_content=by_content)
    if quarantine.num_left_out:
        logger.warning("%d rows are left out, because they failed in earlier runs: %s", quarantine.num_left_out, path)
    return quarantine, file


def read_rows(paths: Iterable[Path]) -> list[FailedRow]:
    """Read the rows of all files that exist; a row in a later line replaces an earlier one.  Raises ConfigError."""
    found: dict[tuple[int, str], FailedRow] = {}
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        for row in filter(None, map(_row, lines)):
            found[row.row, row.digest] = row
    return list(found.values())


def _row(line: bytes) -> FailedRow | None:
    """Return the row of a line; None for a line that a full disk has cut."""
    names = {each.name for each in fields(FailedRow)}
    try:
        values: dict[str, Any] = orjson.loads(line)
        return FailedRow(**{name: value for name, value in values.items() if name in names})
    except (orjson.JSONDecodeError, TypeError, AttributeError):
        return None


def _append(path: Path, lines: bytearray) -> None:
    """Append lines, on a new line if a full disk has cut the last one."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else bytearray(b"\n") + lines
        file.write(lines)

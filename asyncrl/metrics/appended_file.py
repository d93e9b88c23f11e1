"""A file of whole records that outlives a full disk."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 1024 * 1024
"""Bytes of records that wait in memory while the disk refuses them; some 600 rows of metrics."""


class AppendedFile:
    """A file to which records are appended, each as a whole or not at all.  No method raises OSError.

    A record is on the disk when ``write`` returns.  If the disk refuses it, the torn part is cut off and the record
    waits in memory.  Each later ``write`` tries again, so that the file continues once the disk has space.  Records
    that do not fit into ``most_waiting`` bytes are lost.  One warning reports the first failure, and one the recovery.
    """

    def __init__(self, path: Path, *, most_waiting: int = MOST_WAITING_BYTES) -> None:
        """The file is opened by the first ``write``; existing records stay."""
        self.path = path
        self.num_lost = 0
        """Records that the file will never have."""
        self._most_waiting = most_waiting
        self._file: BinaryIO | None = None
        # Invariant: the whole records in the file end at this offset.  None until the file is first opened.
        self._size: int | None = None
        self._waiting: list[bytes] = []
        self._num_bytes = 0
        self._is_failing = False
        self._is_closed = False

    @property
    def size(self) -> int:
        """Bytes of the records in the file and of the waiting ones."""
        return (self._size or 0) + self._num_bytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def write(self, record: bytes | bytearray, /) -> None:
        """Append ``record``, behind the records that wait."""
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._num_bytes -= len(self._waiting.pop(0))
            self._append(record)
        except OSError as error:
            self._keep(bytes(record))
            self._note_failure(error)
            return
        if self._is_failing:
            self._is_failing = False
            lost = f"; {self.num_lost} records are missing" if self.num_lost else ""
            logger.warning("%s: written again%s", self.path, lost)

    def flush(self) -> None:
        """Do nothing: ``write`` has written."""

    def close(self) -> None:
        """Try once more to write records that wait, and close the file.  May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            while self._waiting:
                self._append(self._waiting[0])
                del self._waiting[0]
        except OSError:
            self._cut()
        if lost := self.num_lost + len(self._waiting):
            logger.warning("%s: %d records were not written", self.path, lost)
        self._release()

    def _keep(self, record: bytes) -> None:
        if self._num_bytes + len(record) > self._most_waiting:
            self.num_lost += 1
        else:
            self._waiting.append(record)
            self._num_bytes += len(record)

    def _append(self, record: bytes | bytearray) -> None:
        """Write one record.  Raises OSError; a part of the record may then be at the end of the file."""
        file = self._file = self._file or self._opened()
        written = 0
        while written < len(record):  # a disk that fills up takes a part first
            written += file.write(memoryview(record)[written:])
        self._size = (self._size or 0) + len(record)

    def _opened(self) -> BinaryIO:
        """Open the file, without a part of a record that an earlier failure left at its end."""
        file = self.path.open("ab", buffering=0)
        try:
            end = os.fstat(file.fileno()).st_size
            if self._size is not None and end > self._size:
                file.truncate(self._size)
                end = self._size
        except OSError:
            file.close()
            raise
        self._size = end
        return file

    def _note_failure(self, error: OSError) -> None:
        self._cut()
        if not self._is_failing:
            self._is_failing = True  # first: a log handler that uses this class comes here again with the warning
            text = "%s: not written: %s; the run continues, and each further record tries again"
            logger.warning(text, self.path, error.strerror or error)

    def _cut(self) -> None:
        """Cut off a torn record and close the file; the next attempt opens it, and repeats a cut that failed."""
        with suppress(OSError):
            if self._file is not None and self._size is not None:
                self._file.truncate(self._size)
        self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

"""The progress of a long conversion: a bar on a terminal, a line for each file elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

GIB = 1024**3


class Watch(Protocol):
    """The receiver of progress reports."""

    def moved(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more of the weights as converted."""

    def wrote(self, path: Path, num_bytes: int) -> None:
        """Report a complete file of ``num_bytes``."""


@contextmanager
def watched(what: str, total_bytes: int, *, is_first: bool, stream: TextIO | None = None) -> Iterator[Watch]:
    """Show the progress of ``what``, ``total_bytes`` in this process, on ``stream`` (default: stderr).

    If several processes share a terminal, only the first one draws a bar.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _Lines(what, total_bytes, stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    bar = Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(file=stream))
    bar.disable = not is_first
    with bar:
        yield _Bar(what, total_bytes, bar)


class _Lines:
    def __init__(self, what: str, total_bytes: int, stream: TextIO) -> None:
        self._what, self._total, self._done, self._stream = what, total_bytes, 0, stream

    def moved(self, num_bytes: int) -> None:
        self._done += num_bytes

    def wrote(self, path: Path, num_bytes: int) -> None:
        share = self._done / max(self._total, 1)
        size, total = num_bytes / GIB, self._total / GIB
        self._stream.write(f"{self._what}: {path.name}, {size:.2f} GiB; {share:.0%} of {total:.2f} GiB\n")
        self._stream.flush()


class _Bar:
    def __init__(self, what: str, total_bytes: int, bar: Progress) -> None:
        self._bar, self._task = bar, bar.add_task(what, total=total_bytes)

    def moved(self, num_bytes: int) -> None:
        self._bar.advance(self._task, num_bytes)

    def wrote(self, path: Path, num_bytes: int) -> None:
        """Do nothing: ``moved`` has advanced the bar already."""

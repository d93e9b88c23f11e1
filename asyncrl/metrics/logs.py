"""Log handlers that do not disturb the live panel, outlive a full disk, and stay below a size."""

import logging
from contextlib import ExitStack, suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from asyncrl.metrics.appended_file import AppendedFile
from asyncrl.plain_text import indented

LOG_FILE = "run.log"
LOG_BYTES = 64 * 1024 * 1024
"""Size at which ``run.log`` becomes ``run.log.1``; a month of steps takes 20 MB."""
MOST_OLD_LOGS = 3


def open_logging(run_dir: Path, console: Console) -> ExitStack:
    """Send every record to ``run_dir/run.log``, and warnings and errors to ``console`` too.

    asyncrl's records are kept from DEBUG on, those of other packages from INFO on.  Python warnings are only written to
    the file.  Existing handlers are removed, since they would write into the live panel.  Closing the returned stack
    restores everything.
    """
    root, own = logging.getLogger(), logging.getLogger("asyncrl")
    to_file, to_console = LogFile(run_dir / LOG_FILE), _console_handler(console)
    to_file.setFormatter(PlainFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    undo = ExitStack()
    undo.callback(to_file.close)
    undo.callback(_restore, root, root.level, root.handlers)
    undo.callback(own.setLevel, own.level)
    undo.callback(logging.captureWarnings, False)
    # Assigned at once: a thread that logs meanwhile finds the old handlers or the new ones, never none.
    root.handlers = [to_file, to_console]
    root.setLevel(logging.INFO)
    own.setLevel(logging.DEBUG)
    logging.captureWarnings(True)
    return undo


class PlainFormatter(logging.Formatter):
    """A formatter whose records begin with a line of ``fmt``; further lines are indented.

    So a text of a user or a model can neither forge a record nor control a terminal that shows the file.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text without control characters."""
        return indented(super().format(record))


class LogFile(logging.Handler):
    """A log file with MOST_OLD_LOGS older ones of ``most_bytes`` each.  A full disk raises nothing (AppendedFile)."""

    def __init__(self, path: Path, *, most_bytes: int = LOG_BYTES) -> None:
        super().__init__()
        self._path = path
        self._most_bytes = most_bytes
        self._file = AppendedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record."""
        # Invariant: the handler's lock is held and reentrant: a failing file logs a warning, which arrives here.
        try:
            line = self.format(record).encode() + b"\n"
        except Exception:  # noqa: BLE001 (a record's own arguments may raise anything)
            self.handleError(record)
            return
        if self._file.size >= self._most_bytes:
            self._rotate()
        self._file.write(line)

    def close(self) -> None:
        """Close the file.  May be called again."""
        self.acquire()
        try:
            self._file.close()
        finally:
            self.release()
        super().close()

    def _rotate(self) -> None:
        self._file.close()
        names = [self._path.with_name(f"{self._path.name}.{number}") for number in range(1, MOST_OLD_LOGS + 1)]
        with suppress(OSError):
            for older, newer in zip(reversed(names), [*reversed(names[:-1]), self._path], strict=True):
                if newer.exists():
                    newer.replace(older)
        self._file = AppendedFile(self._path)


def _console_handler(console: Console) -> logging.Handler:
    handler = RichHandler(logging.WARNING, console, show_path=False, log_time_format="%H:%M:%S")
    handler.setFormatter(PlainFormatter("%(message)s"))
    handler.addFilter(lambda record: record.name != "py.warnings")
    return handler


def _restore(logger: logging.Logger, level: int, handlers: list[logging.Handler]) -> None:
    logger.setLevel(level)
    logger.handlers = handlers

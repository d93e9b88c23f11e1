"""Log handlers that do not disturb the live panel."""

import logging
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

LOG_FILE = "run.log"


def open_logging(run_dir: Path, console: Console) -> ExitStack:
    """Send every record to ``run_dir/run.log``, and warnings and errors to ``console`` too.

    asyncrl's records are kept from DEBUG on, those of other packages from INFO on.  Python warnings are only written to
    the file.  Existing handlers are removed, since they would write into the live panel.  Closing the returned stack
    restores everything.
    """
    root, own = logging.getLogger(), logging.getLogger("asyncrl")
    to_file, to_console = _file_handler(run_dir / LOG_FILE), _console_handler(console)
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


def _file_handler(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    return handler


def _console_handler(console: Console) -> logging.Handler:
    handler = RichHandler(logging.WARNING, console, show_path=False, log_time_format="%H:%M:%S")
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(lambda record: record.name != "py.warnings")
    return handler


def _restore(logger: logging.Logger, level: int, handlers: list[logging.Handler]) -> None:
    logger.setLevel(level)
    logger.handlers = handlers

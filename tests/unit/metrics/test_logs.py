import io
import logging
import warnings
from pathlib import Path

from rich.console import Console

from asyncrl.metrics.logs import open_logging


def test_the_file_gets_every_record_and_the_console_only_warnings_and_errors(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    with open_logging(tmp_path, console):
        logging.getLogger("asyncrl.pipeline").debug("group %d admitted", 3)
        logging.getLogger("asyncrl.pipeline").warning("group %d dropped: [too long]", 3)
        logging.getLogger("elsewhere").debug("chatter")
        logging.getLogger("elsewhere").error("broken")
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn("old-fashioned", FutureWarning, stacklevel=1)
    assert isinstance(console.file, io.StringIO)
    shown, kept = console.file.getvalue(), (tmp_path / "run.log").read_text()
    assert [text in shown for text in ("admitted", "dropped: [too long]", "broken", "old-fashioned")] == [0, 1, 1, 0]
    assert [text in kept for text in ("group 3 admitted", "dropped", "broken", "old-fashioned")] == [1, 1, 1, 1]
    assert "chatter" not in kept


def test_closing_puts_the_old_handlers_back(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("asyncrl").level)
    open_logging(tmp_path, Console(file=io.StringIO())).close()
    assert (root.level, list(root.handlers), logging.getLogger("asyncrl").level) == before

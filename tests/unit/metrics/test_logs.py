import io
import logging
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from asyncrl.metrics.logs import LogFile, open_logging
from tests.full_disks import file_size_limit, on_full_disk


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


def test_text_of_users_forges_no_line_and_controls_no_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    controls = "\x1b]0;pwned\x07\x1b[2J\r\x9b1m\u202e[/x]"
    forged = f"bad\n2026-11-23 03:00:00,000 INFO    asyncrl.pipeline.run: step 99: done {controls}"
    with open_logging(tmp_path, console):
        logging.getLogger("asyncrl").warning("a reward said: %s", forged)
        logging.getLogger("asyncrl").error("a user's function failed \ud800", exc_info=ValueError(forged))
    assert isinstance(console.file, io.StringIO)
    kept, shown = (tmp_path / "run.log").read_text(), console.file.getvalue()
    assert [line for line in kept.splitlines() if line.startswith("2026-11-23 03:00")] == []
    assert "\n    2026-11-23 03:00:00,000 INFO" in kept
    assert r"done \x1b]0;pwned\x07\x1b[2J\r\x9b1m\u202e[/x]" in kept
    assert r"failed \ud800" in kept
    for character in ("\x1b", "\x07", "\r", "\x9b", "\u202e"):
        assert character not in kept + shown
    assert "[/x]" in shown


def test_a_full_disk_under_the_log_is_said_once_and_costs_no_record(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    with open_logging(tmp_path, console):
        with file_size_limit(500):
            for number in range(50):
                logging.getLogger("asyncrl").info("record %d", number)
        logging.getLogger("asyncrl").info("record 50")
    assert isinstance(console.file, io.StringIO)
    kept = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split(": ")[1] for line in kept if ": record " in line] == [f"record {number}" for number in range(51)]
    assert console.file.getvalue().count("not written: File too large") == 1
    assert console.file.getvalue().count("written again") == 1


def test_a_log_on_a_device_without_space_raises_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_full_disk(tmp_path / "run.log")
    console = Console(file=io.StringIO(), width=200)
    with open_logging(tmp_path, console):
        for number in range(50):
            logging.getLogger("asyncrl").info("record %d", number)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("No space left on device") == 1
    assert "Logging error" not in capsys.readouterr().err


def test_the_log_stays_below_a_size(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "run.log", most_bytes=1000)
    for number in range(500):
        log.emit(logging.makeLogRecord({"msg": f"record {number}"}))
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["run.log", "run.log.1", "run.log.2", "run.log.3"]
    assert all(file.stat().st_size < 1020 for file in files)
    assert files[0].read_text().endswith("record 499\n")
    last = [int(line.split()[1]) for file in reversed(files) for line in file.read_text().splitlines()]
    assert last == list(range(last[0], 500))

"""A tracker in a separate process: its answers, its failures and its end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.metrics.trackers.process import PROGRAM, Deadlines, TrackerFailed, TrackerProcess
from tests.unit.metrics.trackers.backends import SLEEP

FILE = "tests.unit.metrics.trackers.backends:FileBackend"
SHORT = Deadlines(open_s=60.0, log_s=60.0, finish_s=60.0)


def process(folder: Path, deadlines: Deadlines = SHORT, **options: Any) -> TrackerProcess:
    return TrackerProcess(FILE, {"path": str(folder / "rows"), **options}, folder / "fake.log", deadlines)


def command_lines() -> list[list[str]]:
    return [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]


def written(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "rows").read_text().splitlines()]


def test_rows_pass_through_the_process_and_its_prints_go_to_the_log(tmp_path: Path) -> None:
    tracker = process(tmp_path)
    assert tracker.open() == f"rows in {tmp_path / 'rows'}"
    pid = tracker.pid
    assert pid is not None
    tracker.log({"step": 0, "train/loss": float("inf")})
    tracker.log({"step": 1, "train/loss": 0.5})
    tracker.finish()
    assert written(tmp_path) == [{"step": 0, "train/loss": float("inf")}, {"step": 1, "train/loss": 0.5}, "finished"]
    assert (tmp_path / "fake.log").read_text() == "a library that prints\n"
    assert tracker.pid is None
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("call", ["open", "log", "finish"])
@pytest.mark.parametrize(
    ("how", "text"), [("raise", r"OSError: no route to host; its output is in .*fake\.log"), ("die", "process ended")]
)
def test_a_failure_names_its_call_and_its_reason(call: str, how: str, text: str, tmp_path: Path) -> None:
    tracker = process(tmp_path, fault=call, how=how)
    with pytest.raises(TrackerFailed, match=f"^{'start' if call == 'open' else call}: .*{text}"):
        used(tracker)
    tracker.abandon()
    assert tracker.pid is None


@pytest.mark.parametrize("call", ["open", "log", "finish"])
def test_a_call_that_hangs_ends_at_its_deadline_with_all_processes(call: str, tmp_path: Path) -> None:
    deadlines = {f"{each}_s": 3.0 if each == call else 60.0 for each in ("open", "log", "finish")}
    tracker = process(tmp_path, Deadlines(**deadlines), fault=call, how="hang")
    with pytest.raises(TrackerFailed, match="no answer within 3 s"):
        used(tracker)
    assert [command for command in command_lines() if SLEEP in command and str(tmp_path / "rows") in command] == []


def test_a_child_that_starts_processes_until_it_is_ended_leaves_none_behind(tmp_path: Path) -> None:
    tracker = process(tmp_path, Deadlines(log_s=2.0), fault="log", how="spawn")
    with pytest.raises(TrackerFailed, match="no answer within 2 s"):
        used(tracker)
    assert [each.pid for each in psutil.process_iter() if rows_of(each) == str(tmp_path / "rows")] == []


def rows_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("ROWS")
    except psutil.Error:  # it has ended, or is not ours
        return None


def test_options_are_in_no_command_line_and_no_environment(tmp_path: Path) -> None:
    tracker = process(tmp_path, key="s3cr3t")
    tracker.open()
    child = psutil.Process(tracker.pid)
    assert "s3cr3t" not in " ".join(child.cmdline()) + str(child.environ())
    tracker.finish()
    assert "s3cr3t" not in (tmp_path / "fake.log").read_text()


def test_a_tracker_can_be_opened_again(tmp_path: Path) -> None:
    tracker = process(tmp_path)
    for step in (0, 1):
        tracker.open()
        tracker.log({"step": step})
        tracker.abandon()
    assert written(tmp_path) == [{"step": 0}, {"step": 1}]


def test_the_program_finishes_when_the_driver_is_gone_and_ignores_its_signals(tmp_path: Path) -> None:
    hello = {"backend": FILE, "options": {"path": str(tmp_path / "rows")}}
    child = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(hello).encode() + b"\n")
    child.stdin.flush()
    assert b"done" in child.stdout.readline()
    os.kill(child.pid, signal.SIGTERM)
    os.kill(child.pid, signal.SIGINT)
    child.communicate(b'{"row": {"step": 7}}\n', timeout=150)
    assert child.returncode == 0
    assert written(tmp_path) == [{"step": 7}, "finished"]


def used(tracker: TrackerProcess) -> None:
    tracker.open()
    tracker.log({"step": 0})
    tracker.finish()

import os
import socket
from pathlib import Path

import orjson
import psutil
import pytest

from asyncrl.page.runs.run_status import State, StatusFile, read_status, state_of
from tests.unit.page.made_runs import write_status


def state(folder: Path) -> State:
    return state_of(read_status(folder))


def test_a_run_is_running_until_it_ends(tmp_path: Path) -> None:
    status = StatusFile(tmp_path)
    assert state(tmp_path) is State.RUNNING
    status.end(0, "")
    assert state(tmp_path) is State.FINISHED


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, State.FINISHED), (1, State.FAILED), (2, State.FAILED), (130, State.STOPPED), (143, State.STOPPED)],
)
def test_the_exit_code_names_the_end(tmp_path: Path, code: int, expected: State) -> None:
    StatusFile(tmp_path).end(code, "why")
    assert state(tmp_path) is expected
    found = read_status(tmp_path)
    assert found is not None
    assert found.reason == "why"


def test_a_process_that_is_gone_was_killed(tmp_path: Path) -> None:
    write_status(tmp_path, host=socket.gethostname(), pid=2**22 + 1)
    assert state(tmp_path) is State.KILLED


def test_another_process_with_the_same_id_is_not_the_run(tmp_path: Path) -> None:
    began = psutil.Process().create_time()
    write_status(tmp_path, host=socket.gethostname(), pid=os.getpid(), process_began=began - 3600)
    assert state(tmp_path) is State.KILLED


def test_a_clock_that_was_set_leaves_a_run_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusFile(tmp_path)
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 5.0)
    assert state(tmp_path) is State.RUNNING


@pytest.mark.parametrize("field", ["machine", "process"])
def test_a_later_process_with_the_same_id_or_after_a_reboot_is_not_the_run(tmp_path: Path, field: str) -> None:
    StatusFile(tmp_path)
    path = tmp_path / "status.json"
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), field: "1"}))
    assert state(tmp_path) is State.KILLED


def test_the_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    began = psutil.Process().create_time()
    write_status(tmp_path, host=socket.gethostname(), pid=os.getpid(), process_began=began)
    assert state(tmp_path) is State.RUNNING


def test_a_system_without_proc_compares_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.page.runs.run_status.machine_id", lambda: None)
    StatusFile(tmp_path)
    assert state(tmp_path) is State.RUNNING


def test_a_run_of_another_machine_is_unknown(tmp_path: Path) -> None:
    write_status(tmp_path)
    assert state(tmp_path) is State.UNKNOWN


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "a"}'])
def test_a_file_that_cannot_be_read_is_unknown(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    assert state(tmp_path) is State.UNKNOWN


def test_a_folder_that_is_gone_raises_nothing(tmp_path: Path) -> None:
    StatusFile(tmp_path / "none").end(0, "")
    assert state(tmp_path / "none") is State.UNKNOWN


def test_a_reason_that_quotes_half_a_surrogate_pair_is_written(tmp_path: Path) -> None:
    StatusFile(tmp_path).end(1, f"RewardFailed: no file {os.fsdecode(b'caf' + bytes([0xE9]))}")
    status = read_status(tmp_path)
    assert status is not None
    assert status.reason == "RewardFailed: no file caf\\udce9"

"""A server process ends with all its children, and its error quotes the cause from its log."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from asyncrl.engines.log_limit import LOG_BYTES
from asyncrl.engines.server_process import ServerProcess
from asyncrl.errors import ServerFailed

DEAD_IN_S = 5.0
"""Limit for ``stop``, which sends SIGKILL; an SGLang that gets SIGTERM takes longer."""
WITH_CHILD = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"


def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10.0
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def session_of(pid: int) -> list[int]:
    members = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) == pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            continue
    return members


def start(code: str, folder: Path) -> ServerProcess:
    return ServerProcess("server", [sys.executable, "-c", code], {"GREETING": "hello"}, folder / "logs" / "server.log")


def test_stopping_a_server_ends_its_whole_process_tree(tmp_path: Path) -> None:
    server = start(WITH_CHILD, tmp_path)
    until(lambda: "up" in server.tail())
    assert len(session_of(server.pid)) == 2
    assert server.is_alive()
    began = time.monotonic()
    server.stop()
    server.stop()
    assert time.monotonic() - began < DEAD_IN_S
    assert not server.is_alive()
    assert not session_of(server.pid)


def test_stopping_a_server_that_has_died_ends_its_children(tmp_path: Path) -> None:
    server = start(f"print('ImportError: of no importance'); {WITH_CHILD}", tmp_path)
    until(lambda: "up" in server.tail())
    os.kill(server.pid, 9)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed, match=r"server was ended by signal 9, Killed \(log: "):
        server.raise_if_dead()
    server.stop()
    assert not session_of(server.pid)


def test_a_server_ends_when_its_parent_ends(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from asyncrl.engines.server_process import ServerProcess;"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        f"s = ServerProcess('s', sleep, {{}}, Path({str(tmp_path / 'log')!r}));"
        "print(s.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    until(lambda: not session_of(int(done.stdout)))


def test_the_error_of_a_dead_server_quotes_the_exception_in_its_log(tmp_path: Path) -> None:
    server = start("import os; print(os.environ['GREETING']); raise RuntimeError('no memory')", tmp_path)
    until(lambda: not server.is_alive())
    assert "hello" in server.tail()
    with pytest.raises(ServerFailed, match="server ended with code 1: RuntimeError: no memory"):
        server.raise_if_dead()


ENDS_ITSELF = "import os; print({!r}, flush=True); os.kill(os.getpid(), 9)"
RAN_OUT = "torch.OutOfMemoryError: CUDA out of memory."
SIGQUIT = "[10:00] Received sigquit from a child process. It usually means the child failed."
DISABLED = "[09:00] OpenAI Responses API disabled (ModuleNotFoundError: No module named 'openai_harmony')"
WHAT = "what():  NCCL error: remote process exited"
ABORTED = "[10:00] Subprocess scheduler_0 (pid=3420) crashed with exit code -6. Triggering SIGQUIT for cleanup..."
CRASHED = "[10:00] Subprocess scheduler_0 (pid=3420) crashed with exit code -9. Triggering SIGQUIT for cleanup..."


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (f"{RAN_OUT}\n{SIGQUIT}", RAN_OUT),
        (f"{DISABLED}\n{CRASHED}\nNo live scheduler", CRASHED),
        (f"terminate called\n{WHAT}\nFatal Python error: Aborted\n{ABORTED}", WHAT),
        (f"{DISABLED}\n{ABORTED}\nNo live scheduler", ABORTED),
        (f"{RAN_OUT}\n{CRASHED}", CRASHED),
        (f"{DISABLED}\n[10:00] error: --tp-size 3\n{SIGQUIT}", "[10:00] error: --tp-size 3"),
        (f"{DISABLED}\n{SIGQUIT}", SIGQUIT),
        (f"Exception: {'x' * 1000}\n{SIGQUIT}", f"Exception: {'x' * 289}..."),
    ],
    ids=[
        "an exception",
        "a child was killed",
        "a child aborted",
        "a child aborted without a word",
        "a child was killed after an exception that it survived",
        "an error",
        "no more than a mention",
        "a long line",
    ],
)
def test_the_error_of_a_server_that_killed_itself_quotes_the_cause_in_its_log(
    tmp_path: Path, written: str, said: str
) -> None:
    """SGLang kills itself with SIGKILL when one of its children has failed."""
    server = start(ENDS_ITSELF.format(written), tmp_path)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed) as error:
        server.raise_if_dead()
    assert str(error.value).startswith(f"server was ended by signal 9, Killed: {said} (log: ")


def test_mentions_of_signals_in_a_log_are_not_a_cause_of_death(tmp_path: Path) -> None:
    server = start(ENDS_ITSELF.format("server_args=ServerArgs(custom_sigquit_handler=None)"), tmp_path)
    until(lambda: not server.is_alive())
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        server.raise_if_dead()


def test_a_deleted_log_does_not_hide_the_signal(tmp_path: Path) -> None:
    server = start(ENDS_ITSELF.format("up"), tmp_path)
    until(lambda: not server.is_alive())
    server.log_path.unlink()
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        server.raise_if_dead()


def test_the_log_of_an_earlier_server_is_not_a_cause_of_death(tmp_path: Path) -> None:
    first = start(ENDS_ITSELF.format(f"{RAN_OUT}\n{SIGQUIT}"), tmp_path)
    until(lambda: not first.is_alive())
    second = start(ENDS_ITSELF.format("up"), tmp_path)
    until(lambda: not second.is_alive())
    with pytest.raises(ServerFailed, match=r"Killed \(log: "):
        second.raise_if_dead()


def test_a_missing_program_raises_server_failed(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="server did not start"):
        ServerProcess("server", ["/no/such/program"], {}, tmp_path / "log")


def test_the_log_of_a_running_server_is_moved_aside_when_it_is_large(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    log.parent.mkdir()
    with log.open("wb") as file:
        file.truncate(LOG_BYTES - 10)  # takes no space on the disk
    server = start("import time\nfor n in range(1000): print('line', n, flush=True); time.sleep(0.01)", tmp_path)
    try:
        until(lambda: "line 5" in server.tail())
        server.raise_if_dead()
        before = log.with_name("server.log.1").read_bytes()
        assert len(before) >= LOG_BYTES
        assert before.lstrip(b"\0").startswith(b"line 0\nline 1\n")
        until(lambda: server.tail(1).startswith("line "))
        written = log.read_bytes()
        assert 0 < len(written) < 20_000
        assert b"\0" not in written
    finally:
        server.stop()

"""Programs that would not end: with hung threads, in a hung clean-up, and on a second Ctrl-C.  Real processes."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

BEGINNING = """
import asyncio, concurrent.futures, os, signal, subprocess, sys, threading, time
from asyncrl.app.ending import leaving
from asyncrl.app.ending.leaving import EndTimer, leave
from asyncrl.app.signals import Signals
from asyncrl.errors import TrainerFailed
never = threading.Event()
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(child.pid, int(child.stdout.readline()), flush=True)
"""
CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
"""A process with a child process, in a session apart: a server."""
STOPPED = "os.killpg(child.pid, 9); child.wait()"
"""Kills the child process and its child."""


def started(program: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", BEGINNING.replace("{child!r}", repr(CHILD)) + program]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(running: subprocess.Popen[str], printed: str = "") -> tuple[int, str]:
    """Return exit code and error output of a program, none of whose processes may be left."""
    with running:
        try:
            output, errors = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            output, errors = running.communicate()
    pids = [int(pid) for pid in (printed + output).split()[:2]]
    for _ in range(50):
        if left := [pid for pid in pids if is_running(pid)]:
            time.sleep(0.1)  # on a busy machine a killed process is there for a moment
    for pid in left:
        psutil.Process(pid).kill()
    assert len(pids) == 2, errors
    assert left == []
    return running.returncode, errors


@pytest.mark.parametrize(
    "hung",
    [
        "concurrent.futures.ThreadPoolExecutor(1, 'mine').submit(never.wait)",
        "threading.Thread(target=never.wait, name='mine_0').start()",
    ],
)
@pytest.mark.parametrize("code", [0, 1])
def test_threads_of_user_code_are_not_joined(hung: str, code: int) -> None:
    assert ended(started(f"{hung}\nleave({code})")) == (
        code,
        "warning: the program ends without threads of user code that still run: mine_0\n",
    )


def test_an_exit_that_hangs_has_a_time_limit() -> None:
    program = "import atexit; atexit.register(never.wait); leaving.LEAVE_S = 0.5; leave(1)"
    code, errors = ended(started(program))
    assert (code, errors) == (1, "warning: the interpreter did not exit within 0.5 s; the program ends at once\n")


def test_a_program_without_hung_threads_exits_as_usual() -> None:
    program = f"import atexit; atexit.register(print, 'as usual', file=sys.stderr); {STOPPED}; leave(3)"
    assert ended(started(program)) == (3, "as usual\n")


@pytest.mark.parametrize(
    ("failure", "signal_code", "code", "said"),
    [
        ("pass", "None", 0, ""),
        ("raise TrainerFailed('rank 0: out of memory')", "None", 1, "error: TrainerFailed: rank 0: out of memory\n"),
        ("raise KeyError('x')", "None", 1, "error: KeyError: 'x' (a bug in asyncrl)\n"),
        ("raise asyncio.CancelledError", "143", 143, ""),
        ("pass", "143", 143, ""),  # an early end: the run has saved, and raises nothing
    ],
)
def test_a_clean_up_that_hangs_ends_with_the_code_and_the_line_of_the_run(
    failure: str, signal_code: str, code: int, said: str
) -> None:
    program = f"""
try:
    with EndTimer(lambda: {signal_code}, 0.5):
        {failure}
finally:
    def clean_up(): never.wait()
    clean_up()
"""
    found, errors = ended(started(program))
    assert found == code
    assert errors.startswith(said + "warning: the program did not end within 0.5 s of its run; it ends at once, in ")
    assert "wait" in errors.splitlines()[-1]  # the place where it hung


def test_a_clean_up_in_time_is_not_disturbed() -> None:
    program = """
timer = EndTimer(lambda: None, 0.3)
with timer:
    pass
timer.cancel()
time.sleep(0.8)
leaving.end_now(5, "later")
"""
    assert ended(started(program)) == (5, "later\n")


SIGNALLED = """
async def run():
    with signals.cancelling():
        try:
            {body}
        finally:
            {clean_up}
with Signals.caught() as signals:
    signals.remember()
    print("ready", flush=True)
    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        pass
    leave(signals.exit_code)
"""


def signalled(body: str, clean_up: str, *numbers: signal.Signals, pause_s: float = 3.0) -> tuple[int, str]:
    """Start the program, send it signals, and return its exit code and error output."""
    running = started(SIGNALLED.replace("{body}", body).replace("{clean_up}", clean_up))
    assert running.stdout is not None
    pids = running.stdout.readline()
    assert running.stdout.readline() == "ready\n"
    time.sleep(0.2)
    for number in numbers:
        running.send_signal(number)
        time.sleep(pause_s)
    return ended(running, pids)


AT_ONCE = "warning: SIGINT again: the program ends at once, without its orderly end, and kills its processes\n"
HANGS = "await asyncio.sleep(1000)"
BLOCKS = "[time.sleep(0.01) for _ in range(100_000)]"


@pytest.mark.parametrize(("body", "clean_up"), [(HANGS, HANGS), (BLOCKS, "pass"), (HANGS, BLOCKS)])
def test_a_second_ctrl_c_ends_at_once_also_in_a_blocked_loop(body: str, clean_up: str) -> None:
    began = time.monotonic()
    assert signalled(body, clean_up, signal.SIGINT, signal.SIGINT) == (130, AT_ONCE)
    assert time.monotonic() - began < 30


def test_ctrl_c_after_sigterm_ends_at_once_with_the_code_of_sigterm() -> None:
    assert signalled(HANGS, HANGS, signal.SIGTERM, signal.SIGINT) == (143, AT_ONCE)


@pytest.mark.parametrize(
    ("numbers", "pause_s", "code"),
    [
        ((signal.SIGINT, signal.SIGINT, signal.SIGINT), 0.05, 130),  # one Ctrl-C, sent by terminal and script
        ((signal.SIGTERM, signal.SIGTERM), 1.3, 143),
    ],
)
def test_other_signals_leave_the_orderly_end_its_time(
    numbers: tuple[signal.Signals, ...], pause_s: float, code: int
) -> None:
    orderly = f"await asyncio.sleep(2); {STOPPED}"
    assert signalled(HANGS, orderly, *numbers, pause_s=pause_s) == (code, "")

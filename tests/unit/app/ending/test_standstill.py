"""A loop that a user function stops for good ends the program, which names the function."""

import re
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, logging, sys, time, uvloop
from asyncrl.app.ending import standstill
from asyncrl.app.ending.leaving import leave
from asyncrl.app.signals import Signals
from asyncrl.blocking_calls import UserCalls
logging.basicConfig(format="%(levelname)s %(message)s")
standstill.TICK_S, standstill.WARN_S, standstill.ENDING_S = 0.1, 0.3, 0.5
def mine(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
async def run():
    with standstill.standstill_watch({limit}, signals.code_if_received), signals.cancelling():
        print("ready", flush=True)
        await asyncio.sleep(0.2)
        print("mine", flush=True)
        UserCalls("--buffer-filter-path 'mine.py:mine'").of(mine)({seconds})
        await asyncio.sleep({then})
with Signals.caught() as signals:
    signals.remember()
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())
leave(0)
"""


def run(
    *, limit: float, seconds: float, then: float = 0.3, signals: tuple[signal.Signals, ...] = ()
) -> tuple[int, str]:
    program = PROGRAM.replace("{limit}", str(limit)).replace("{seconds}", str(seconds)).replace("{then}", str(then))
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert [running.stdout.readline() for _ in range(2)] == ["ready\n", "mine\n"]
        for number in signals:
            running.send_signal(number)
            time.sleep(1.0)
        try:
            _, errors = running.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            running.kill()
            _, errors = running.communicate()
    return running.returncode, errors


WHERE = r"--buffer-filter-path 'mine.py:mine' \(<string>:\d+, mine\)\n"


def test_a_function_that_never_returns_is_named_and_ends_the_program() -> None:
    code, errors = run(limit=1.0, seconds=1000)
    warned, ended = errors.splitlines(keepends=True)[0], errors.splitlines(keepends=True)[-1]
    assert code == 1
    assert re.fullmatch(r"WARNING the event loop has stood still for 0\.[34]\d* s, in " + WHERE, warned)
    assert re.fullmatch(
        r"error: Stalled: the event loop stood still for 1(\.\d*)? s \(watchdog-timeout-s\), in " + WHERE, ended
    )


def test_after_sigterm_the_limit_is_shorter() -> None:
    code, errors = run(limit=1000, seconds=1000, signals=(signal.SIGTERM,))
    assert code == 143
    assert re.search(r"warning: the event loop stood still for [\d.]+ s, in " + WHERE, errors)


def test_a_loop_that_moves_again_goes_unharmed() -> None:
    code, errors = run(limit=5.0, seconds=3.0, then=4.0)
    assert code == 0
    assert errors.count("has stood still") == 1
    assert "--buffer-filter-path 'mine.py:mine' blocked the event loop for " in errors


@pytest.mark.parametrize("pause_s", [1.5])
def test_a_program_that_is_suspended_has_not_stood_still(pause_s: float) -> None:
    program = PROGRAM.replace("{limit}", "0.5").replace("{seconds}", "0").replace("{then}", "2")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(signal.SIGSTOP)
        time.sleep(pause_s)
        running.send_signal(signal.SIGCONT)
        _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (0, b"")

"""The first signal of a run."""

import asyncio
import os
import pty
import signal
import sys
import time
from contextlib import suppress

import pytest

from asyncrl.app.signals import Signals


async def _signalled(signals: Signals, *, seconds: float, grace_s: float) -> str:
    """Get SIGTERM in a block that lasts some seconds longer, and clean up for longer than its grace."""
    with signals.cancelling(lambda: True, grace_s=grace_s):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(seconds)
    await asyncio.sleep(grace_s + 0.2)
    return "ended by itself"


def test_a_run_that_ended_within_its_grace_is_not_cancelled_afterwards() -> None:
    with Signals.caught() as signals:
        signals.remember()
        assert asyncio.run(_signalled(signals, seconds=0.02, grace_s=1.0)) == "ended by itself"


def test_a_run_that_takes_longer_than_its_grace_is_cancelled() -> None:
    with Signals.caught() as signals, pytest.raises(asyncio.CancelledError):
        signals.remember()
        asyncio.run(_signalled(signals, seconds=5.0, grace_s=0.1))


PROGRAM = """
import subprocess, sys
from asyncrl.app.signals import Signals
with Signals.caught() as signals:
    signals.remember()
    child = subprocess.Popen(["sleep", "100"])
    print(child.pid, flush=True)
    sys.exit(child.wait())
"""


def test_a_terminal_that_is_gone_ends_neither_the_run_nor_its_processes() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    said = b""
    while not said.endswith(b"\n"):  # a line may come in parts
        said += os.read(terminal, 100)
    child = int(said)
    os.close(terminal)  # the kernel sends SIGHUP to the session's leader and its process group
    try:
        time.sleep(0.5)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run has ended"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 256 - signal.SIGTERM, "its child lived until then"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_lost_terminal_ends_a_program_that_has_started_nothing_and_one_whose_run_is_over() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Signals.caught() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
            signals.remember()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)

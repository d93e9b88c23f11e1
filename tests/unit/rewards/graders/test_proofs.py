"""Proofs of equality in threads: right, limited in time, and without a process that stays."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.errors import RewardFailed
from asyncrl.rewards.graders import proofs
from asyncrl.rewards.graders.math import is_equal

EQUAL = (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}")
UNEQUAL = (r"\frac{\sqrt{8}}{2}", r"\sqrt{3}")
FACTORIAL = r"\binom{40000000}{20000000}"
"""A computation of minutes in a C loop of large integers, which no handler of a signal interrupts."""


@pytest.fixture(autouse=True)
def _no_helper() -> Iterator[None]:
    yield
    proofs.HELPER.end()


def in_thread[T](call: Callable[[], T]) -> T:
    return in_daemon_thread(call, "test").result(timeout=90)


def helpers(process: psutil.Process | None = None) -> list[psutil.Process]:
    children = (process or psutil.Process()).children()
    return [child for child in children if any("proofs import serve" in part for part in child.cmdline())]


def test_a_thread_proves_what_the_main_thread_proves() -> None:
    for pair, expected in ((EQUAL, True), (UNEQUAL, False), (EQUAL, True)):
        assert is_equal(*pair) == expected
        assert in_thread(lambda pair=pair: is_equal(*pair)) == expected  # type: ignore[misc]
    assert len(helpers()) == 1


def test_the_main_thread_needs_no_helper() -> None:
    assert is_equal(*EQUAL)
    assert not helpers()


@pytest.mark.timeout(120)
def test_threads_get_the_reply_to_their_own_pair() -> None:
    pairs = [EQUAL, UNEQUAL] * 20
    waiting = [in_daemon_thread(lambda pair=pair: is_equal(*pair), "test") for pair in pairs]  # type: ignore[misc]
    assert [each.result(timeout=90) for each in waiting] == [True, False] * 20
    assert len(helpers()) == 1


@pytest.mark.timeout(120)
def test_a_proof_in_a_c_loop_ends_and_is_false(monkeypatch: pytest.MonkeyPatch) -> None:
    in_thread(lambda: proofs.is_proven(*EQUAL))
    monkeypatch.setattr(proofs, "MOST_S", 1)
    start = time.monotonic()
    assert not in_thread(lambda: proofs.is_proven(FACTORIAL, "1"))
    assert time.monotonic() - start < proofs.LIMIT_S
    assert in_thread(lambda: proofs.is_proven(*EQUAL))


def test_a_helper_that_was_killed_while_idle_is_replaced() -> None:
    assert in_thread(lambda: is_equal(*EQUAL))
    (helper,) = helpers()
    helper.kill()
    while helper.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert in_thread(lambda: is_equal(*EQUAL))
    assert helpers() != [helper]


@pytest.mark.timeout(120)
def test_a_helper_that_dies_in_a_proof_fails_the_answer() -> None:
    assert in_thread(lambda: is_equal(*EQUAL))
    waiting = in_daemon_thread(lambda: proofs.is_proven(FACTORIAL, "1"), "test")
    (helper,) = helpers()
    while helper.cpu_times().user < 2.0:
        time.sleep(0.05)
    helper.kill()
    with pytest.raises(RewardFailed, match=r"died \(exit code -9\)"):
        waiting.result(timeout=30)


def test_a_helper_that_cannot_start_fails_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with pytest.raises(RewardFailed, match="cannot start"):
        in_thread(lambda: is_equal(*EQUAL))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RewardFailed, match=r"did not start within 60 s \(exit code 1\)"):
        in_thread(lambda: is_equal(*EQUAL))


def _proves_in_a_thread(replies: Any) -> None:
    replies.send((in_thread(lambda: is_equal(*EQUAL)), helpers()[0].pid))


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_a_helper_of_its_own() -> None:
    assert in_thread(lambda: is_equal(*EQUAL))
    (mine,) = helpers()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with proofs.HELPER._lock:  # noqa: SLF001 (as if another thread were in a proof)
        child = context.Process(target=_proves_in_a_thread, args=(sender,), daemon=True)
        child.start()
    is_right, others = receiver.recv()
    child.join()
    assert is_right
    assert others != mine.pid
    assert in_thread(lambda: is_equal(*EQUAL))
    assert helpers() == [mine]
    assert not psutil.pid_exists(others) or not psutil.wait_procs([psutil.Process(others)], timeout=30)[1]


DRIVER = """
import sys, threading, time, psutil
from asyncrl.rewards.graders import proofs
def proves(*pair):
    thread = threading.Thread(target=proofs.is_proven, args=pair, daemon=True)
    thread.start()
    return thread
proves("1+1", "2").join()
(helper,) = psutil.Process().children()
if sys.argv[1] == "proving":
    proves(sys.argv[2], "1")
    while helper.cpu_times().user < 2.0:
        time.sleep(0.05)
print(helper.pid, flush=True)
if sys.argv[1] != "ends":
    time.sleep(3600)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("state", ["ends", "idle", "proving"])
def test_no_helper_outlives_its_process(state: str) -> None:
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", DRIVER, state, FACTORIAL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        helper = psutil.Process(pid) if psutil.pid_exists(pid) else None
        if state != "ends":
            driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert helper is None or not psutil.wait_procs([helper], timeout=100)[1]

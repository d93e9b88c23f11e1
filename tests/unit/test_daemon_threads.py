"""Threads that no end of a program waits for."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncrl.daemon_threads import DaemonThreads, in_daemon_thread, off_loop

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_whose_user_threads_hang_closes_at_once(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    never = threading.Event()

    async def run() -> str:
        asyncio.get_running_loop().set_default_executor(DaemonThreads(2, "user"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), asyncio.TaskGroup() as calls:
                for _ in range(6):  # two hang, four wait for a thread
                    calls.create_task(asyncio.to_thread(never.wait))
        return await off_loop(lambda: "ours", "ours")

    began = time.monotonic()
    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(run()) == "ours"
    assert time.monotonic() - began < 5
    never.set()


PROGRAM = """
import asyncio, threading, uvloop
from asyncrl.daemon_threads import DaemonThreads, off_loop
async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads(4, "user"))
    for hung in (asyncio.to_thread(threading.Event().wait), off_loop(threading.Event().wait, "ours")):
        try:
            async with asyncio.timeout(0.05):
                await hung
        except TimeoutError:
            print("late", flush=True)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_a_program_with_hung_threads_exits() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "late\nlate\n", "")


def test_a_pool_uses_no_more_threads_than_it_may_and_reuses_them() -> None:
    pool, names = DaemonThreads(2, "mine"), set[str]()

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        return number

    assert list(pool.map(work, range(50))) == list(range(50))
    assert names <= {"mine-1", "mine-2"}
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(work, 1)


def test_calls_that_wait_are_cancelled_by_the_shutdown_and_a_running_one_ends() -> None:
    pool, begun, end = DaemonThreads(1, "mine"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return end.wait(60)

    running, waiting = pool.submit(work), pool.submit(work)
    assert begun.wait(60)  # otherwise it waits, too
    pool.shutdown(wait=True)
    assert waiting.cancelled()
    assert not running.done()
    end.set()
    assert running.result(10)


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration(), CancelledError()])
@pytest.mark.parametrize("start", [lambda work: in_daemon_thread(work, "mine"), DaemonThreads(1, "mine").submit])
def test_an_exception_that_would_end_or_hang_the_loop_is_named(
    raised: BaseException, start: Callable[[Any], Future[Any]]
) -> None:
    def work() -> None:
        raise raised

    with pytest.raises(RuntimeError, match=f"raised {type(raised).__name__}"):
        start(work).result(10)


def test_the_default_executor_is_for_code_of_users_alone() -> None:
    root = Path(__file__).parents[2]
    used = {
        str(path.relative_to(root))
        for path in (root / "asyncrl").rglob("*.py")
        if "await asyncio.to_thread(" in (text := path.read_text()) or "run_in_executor(None" in text
    }
    of_users = {"asyncrl/rollouts/native.py", "asyncrl/rollouts/tools/search.py"}  # tools, in the process of user code
    another_program = {"asyncrl/rollouts/tools/search_server.py"}
    assert used == of_users | another_program

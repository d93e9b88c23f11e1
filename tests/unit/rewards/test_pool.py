"""Worker processes: a call that hangs, crashes or eats memory costs its answer, and nothing else."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.errors import RewardFailed
from asyncrl.rewards import pool
from asyncrl.rewards.built_in import BuiltIn
from asyncrl.rewards.pool import RemoteTraceback, WorkerPool
from asyncrl.rewards.resources import RewardResources
from tests.unit.rewards import misbehaving
from tests.unit.rewards.grading import in_a_run, prompt, sample, settings
from tests.unit.rewards.misbehaving import resolver

SOON_S = 4.0
"""Deadline of calls that never end."""


def closed(changes: dict[str, Any], *calls: str) -> list[Any]:
    """Run calls one after another in one pool of one worker; return results and the texts of failures."""

    async def run(resources: RewardResources) -> list[Any]:
        await resources.pool.load(resolver("echo"), 120.0)
        got: list[Any] = []
        for name in calls:
            try:
                got.append(await resources.pool.run(resolver(name), "x"))
            except RewardFailed as error:
                got.append(re.sub(r":\d+, in ", ":LINE, in ", str(error)))
        return got

    return in_a_run(run, **changes)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("in_a_c_loop", "no reward within 4 s; its worker was killed"),
        ("asleep", "no reward within 4 s; its worker was killed"),
        ("gluttonous", "MemoryError:  (misbehaving.py:LINE, in gluttonous)"),
        ("leaves", "its worker died (exit code 3)"),
        ("leaves_as_if_well", "its worker died (exit code 0)"),
        (
            "unreadable",
            "the result of a worker cannot be read: ModuleNotFoundError: No module named 'asyncrl_plugin_mine'",
        ),
        ("segfaults", "its worker died (signal 11)"),
        ("raises", "KeyError: 'no x' (misbehaving.py:LINE, in raises)"),
        ("raises_oddly", "Odd: 1 and 2 (misbehaving.py:LINE, in raises_oddly)"),
        ("not_picklable", "AttributeError: Can't pickle local object 'not_picklable.<locals>.<lambda>'"),
    ],
)
def test_a_call_that_fails_costs_its_answer_alone(name: str, failure: str) -> None:
    assert closed({"timeout_s": SOON_S}, "echo", name, "echo") == ["x", failure, "x"]


def test_an_exit_is_a_failure() -> None:
    assert closed({}, "exits", "echo") == ["SystemExit: 5 (misbehaving.py:LINE, in exits)", "x"]


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("value", "failure"),
    [
        (misbehaving.Unreadable(os.getpid()), "ModuleNotFoundError: No module named 'asyncrl_plugin_mine'"),
        (deep(3000), "the arguments cannot be sent to a worker: RecursionError: maximum recursion depth exceeded"),
        (lambda: 1, "the arguments cannot be sent to a worker: "),
    ],
)
def test_arguments_that_do_not_travel_cost_their_answer_alone(value: Any, failure: str) -> None:
    """Another call runs meanwhile: without one, pebble gives up the pool, and so ends the call."""

    async def run(resources: RewardResources) -> tuple[str, Any]:
        await resources.pool.warm(120.0)
        async with asyncio.TaskGroup() as calls:
            running = calls.create_task(resources.pool.run(resolver("asleep"), 0))
            await resources.pool.run(resolver("echo"), 0)
            with pytest.raises(RewardFailed) as error:
                await resources.pool.run(resolver("echo"), value)
            running.cancel()
        return str(error.value), await resources.pool.run(resolver("echo"), 1)

    text, after = in_a_run(run, num_workers=2)
    assert failure in text
    assert after == 1


def test_a_call_that_no_worker_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(resources: RewardResources) -> None:
        stopped = await resources.pool.run(resolver("who"), 0)
        monkeypatch.setattr(pool, "LOST_S", 1.0)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RewardFailed, match="no worker took the call within 1 s"):
            await resources.pool.run(resolver("echo"), 0)

    in_a_run(run)


def test_a_call_may_take_longer_than_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that runs, and the calls that wait behind it, are not lost."""

    async def run(resources: RewardResources) -> list[Any]:
        await resources.pool.warm(120.0)
        monkeypatch.setattr(pool, "LOST_S", 0.5)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(resources.pool.run(resolver("slow"), number)) for number in (1, 2)]
        return [task.result() for task in tasks]

    assert in_a_run(run) == [1, 2]


@pytest.mark.parametrize(
    ("name", "failure"),
    [("has_child", "no reward within 4 s; its worker was killed"), ("leaves_a_child", "its worker died (exit code 3)")],
)
def test_no_child_outlives_its_worker(name: str, failure: str, tmp_path: Path) -> None:
    async def run(resources: RewardResources) -> str:
        with pytest.raises(RewardFailed) as error:
            await resources.pool.run(resolver(name), str(tmp_path / "pid"))
        return str(error.value)

    assert in_a_run(run, timeout_s=SOON_S) == failure
    child = int((tmp_path / "pid").read_text())
    gone = not psutil.pid_exists(child) or not psutil.wait_procs([psutil.Process(child)], timeout=30)[1]
    assert gone


def test_other_calls_proceed_while_one_hangs() -> None:
    async def run(resources: RewardResources) -> float:
        await resources.pool.warm(120.0)
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as calls:
            hanging = calls.create_task(resources.pool.run(resolver("asleep"), 0))
            start = loop.time()
            assert [await resources.pool.run(resolver("echo"), number) for number in range(20)] == list(range(20))
            took = loop.time() - start
            hanging.cancel()
        return took

    assert in_a_run(run, num_workers=2, timeout_s=60.0) < 30.0


def test_a_cancelled_call_frees_its_worker() -> None:
    async def run(resources: RewardResources) -> Any:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await resources.pool.run(resolver("asleep"), 0)
        return await resources.pool.run(resolver("echo"), 1)

    assert in_a_run(run, timeout_s=60.0) == 1


def test_no_worker_takes_a_call_that_was_cancelled_while_it_waited(tmp_path: Path) -> None:
    """A worker that takes a cancelled call is killed and replaced.  Many such calls would delay the next reward."""
    taken = tmp_path / "taken"
    num_running, num_waiting = 2, 20

    async def run(resources: RewardResources) -> Any:
        await resources.pool.warm(120.0)
        async with asyncio.TaskGroup() as group:
            call = resolver("noted_and_asleep")
            calls = [group.create_task(resources.pool.run(call, str(taken))) for _ in range(num_running + num_waiting)]
            while not taken.exists() or taken.read_text().count("taken") < num_running:  # noqa: ASYNC110 (a file)
                await asyncio.sleep(0.01)
            for each in calls:
                each.cancel()
        return await resources.pool.run(resolver("echo"), 1)

    assert in_a_run(run, num_workers=num_running, timeout_s=60.0) == 1
    assert taken.read_text().count("taken") <= num_running + 1


def test_the_traceback_of_a_worker_is_the_cause() -> None:
    async def run(resources: RewardResources) -> BaseException | None:
        with pytest.raises(RewardFailed) as error:
            await resources.pool.run(resolver("raises"), 1)
        return error.value.__cause__

    cause = in_a_run(run)
    assert isinstance(cause, RemoteTraceback)
    assert "misbehaving.py" in str(cause)
    assert "KeyError: 'no 1'" in str(cause)


def test_a_worker_that_is_killed_while_idle_is_replaced() -> None:
    async def run(resources: RewardResources) -> tuple[int, int]:
        first = await resources.pool.run(resolver("who"), 0)
        process = psutil.Process(first)
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(psutil.wait_procs, [process], 10)
        for _ in range(20):
            try:
                return first, await resources.pool.run(resolver("who"), 0)
            except RewardFailed:
                continue
        raise AssertionError("no worker came back")

    first, second = in_a_run(run)
    assert first != second


def test_no_worker_outlives_the_run() -> None:
    async def run(resources: RewardResources) -> list[int]:
        await resources.pool.warm(120.0)
        pids = [await resources.pool.run(resolver("who"), 0) for _ in range(8)]
        with pytest.raises(ZeroDivisionError):
            async with RewardResources(settings()) as other:
                pids.append(await other.pool.run(resolver("who"), 0))
                _ = 1 / 0
        return pids

    pids = in_a_run(run, num_workers=2)
    assert len(set(pids)) >= 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_closed_pool_refuses_calls() -> None:
    async def run() -> None:
        closed = WorkerPool(1, timeout_s=1.0, memory_gb=None)
        async with closed:
            pass
        with pytest.raises(RewardFailed, match="have ended"):
            await closed.run(resolver("echo"), 0)

    asyncio.run(run())


ORPHANS = """
import asyncio, os, sys
from asyncrl.rewards.pool import WorkerPool
from tests.unit.rewards.misbehaving import resolver

async def main():
    async with WorkerPool(1, timeout_s=3600.0, memory_gb=4.0) as pool:
        print(await pool.run(resolver("who"), 0), flush=True)
        await pool.run(resolver("in_a_c_loop"), 0)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.timeout(360)
def test_no_worker_outlives_a_killed_driver(tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(ORPHANS)
    root = Path(__file__).parents[3]
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    gone, alive = psutil.wait_procs([worker], timeout=180)
    assert (gone, alive) == ([worker], [])


@pytest.mark.parametrize("rm_type", ["math", "deepscaler"])
@pytest.mark.timeout(360)
def test_ten_thousand_digits_do_not_stop_the_loop(rm_type: str) -> None:
    digits = "</think> \\boxed{" + "7" * 10_000 + "}"
    tower = "</think> \\boxed{" + "9^{" * 20 + "9" + "}" * 20 + "}"

    async def run(resources: RewardResources) -> list[float]:
        reward = BuiltIn(rm_type, key=None, url=None)
        await resources.warm([reward])
        values: list[float] = []
        for text in (digits, tower, "</think> \\boxed{\\frac{14}{2}}", "</think> \\boxed{7}"):
            values.append((await reward(prompt(), sample(text))).value)
        return values

    assert in_a_run(run, preload=("math_verify",)) == [0.0, 0.0, 0.0, 1.0]

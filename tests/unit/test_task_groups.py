"""The TaskGroup that loses no cancellation."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl.engines.gather import gather
from asyncrl.errors import EngineError, EngineLost, WeightUpdateFailed, plainly
from asyncrl.task_groups import TaskGroup
from tests.virtual_time import run_virtually


async def fails(error: Exception) -> None:
    await asyncio.sleep(1.0)
    raise error


async def tidies_up() -> None:
    """A member that takes a moment to end, as one that aborts its request."""
    try:
        await asyncio.sleep(100.0)
    finally:
        await asyncio.sleep(1.0)


async def in_group(error: Exception) -> None:
    with plainly():
        async with TaskGroup() as tasks:
            tasks.create_task(fails(error))
            tasks.create_task(tidies_up())


async def in_block(error: Exception) -> None:
    """The same with a block that still runs, which the group cancels itself."""
    with plainly():
        async with TaskGroup() as tasks:
            tasks.create_task(fails(error))
            await tidies_up()


async def gathered(error: Exception) -> None:
    await gather("asking", {"a": fails(error), "b": tidies_up()}, 50.0)


WORK = pytest.mark.parametrize("work", [in_group, in_block, gathered])


async def cancelled_while_it_fails(work: object, error: Exception) -> asyncio.Task[None]:
    assert callable(work)

    async def repeats() -> None:
        while True:
            with suppress(EngineError, WeightUpdateFailed, ConnectionError):
                await work(error)

    task = asyncio.get_running_loop().create_task(repeats())
    await asyncio.sleep(1.5)  # the group has failed, and waits for its other member
    task.cancel()
    await asyncio.wait([task], timeout=1.0)
    is_done = task.done()
    task.cancel()
    await asyncio.wait([task])
    assert is_done, "the cancellation is lost"
    return task


@WORK
@pytest.mark.parametrize("error", [EngineLost("gone"), ConnectionResetError("gone")], ids=["asyncrl", "os"])
def test_a_cancellation_is_not_lost_to_a_named_error(work: object, error: Exception) -> None:
    task, _ = run_virtually(cancelled_while_it_fails(work, error))
    assert task.cancelled()


@WORK
def test_a_bug_is_raised_all_the_same(work: object) -> None:
    task, _ = run_virtually(cancelled_while_it_fails(work, KeyError("bug")))
    assert not task.cancelled()
    assert isinstance(task.exception(), KeyError)


@WORK
def test_without_a_cancellation_the_error_is_raised_and_none_is_left(work: object) -> None:
    assert callable(work)

    async def main() -> int:
        with pytest.raises((EngineLost, WeightUpdateFailed)):
            await work(EngineLost("gone"))
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run_virtually(main())[0] == 0


def test_a_deadline_that_ends_meanwhile_is_a_timeout() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await in_group(EngineLost("gone"))
        await asyncio.sleep(1.0)

    assert run_virtually(main())[1] == 3.0


OTHERS = {"task_groups.py": "the base class", "verifiers_worker.py": "an interpreter without asyncrl"}
"""Modules that use asyncio's, besides slime's shim: what a user's slime code sees is asyncio's."""


def test_every_group_of_the_package_is_this_one() -> None:
    package = Path(__file__).parents[2] / "asyncrl"
    using = (path for path in package.rglob("*.py") if "asyncio.TaskGroup" in path.read_text())
    assert {path.name for path in using if "slime_shim" not in path.parts} == set(OTHERS)

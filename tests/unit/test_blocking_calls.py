"""User code that blocks an event loop is named, once, and is otherwise undisturbed."""

import asyncio
import logging
import time

import pytest
import uvloop

from asyncrl.blocking_calls import UserCalls


def slow(group: object) -> str:
    time.sleep(0.06)
    return f"kept {group}"


def test_a_filter_that_blocks_is_named_once_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    keep = UserCalls("--dynamic-sampling-filter-path 'mine.py:slow'").of(slow)
    with caplog.at_level(logging.WARNING):
        assert [keep("a"), keep("b")] == ["kept a", "kept b"]
    (line,) = caplog.messages
    name, _, rest = line.partition(" blocked the event loop for ")
    assert name == "--dynamic-sampling-filter-path 'mine.py:slow'"
    assert 60 <= float(rest.partition(" ms")[0]) < 10_000
    assert keep.__name__ == "slow"


def test_a_call_that_raises_late_is_named_too() -> None:
    told: list[tuple[str, float]] = []

    def raises() -> None:
        time.sleep(0.06)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        UserCalls("mine", lambda name, seconds: told.append((name, seconds))).of(raises)()
    assert [name for name, _ in told] == ["mine"]


def test_only_the_steps_that_block_count_in_a_coroutine() -> None:
    told: list[str] = []

    async def waits(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def blocks() -> None:
        await asyncio.sleep(0)
        time.sleep(0.06)  # noqa: ASYNC251

    async def run() -> str:
        timed = UserCalls("waits", lambda name, _: told.append(name)).of_async(waits)
        found = await timed(0.1)
        await UserCalls("blocks", lambda name, _: told.append(name)).of_async(blocks)()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == "done"
    assert told == ["blocks"]


def test_a_timed_coroutine_sees_its_timeouts_its_cancellation_and_its_tasks() -> None:
    seen: list[str] = []

    async def mine() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(asyncio.sleep(0, 3))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append(f"cleaned up after {task.result()}")
        return 1

    async def run() -> bool:
        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(UserCalls("mine").of_async(mine)())
            await asyncio.sleep(0.1)
            calling.cancel()
        return calling.cancelled()

    assert asyncio.run(run())
    assert seen == ["cancelled", "cleaned up after 3"]

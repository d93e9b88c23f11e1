"""A deadline ends its block as ``asyncio.timeout`` does."""

import asyncio
import contextlib

import pytest

from asyncrl.deadline import Deadline
from asyncrl.sim.clock import run_virtually


def test_a_block_that_ends_in_time_is_left_alone() -> None:
    async def main() -> None:
        with Deadline(5.0) as deadline:
            await asyncio.sleep(4.0)
        await asyncio.sleep(10.0)
        assert not deadline.is_over

    run_virtually(main())


def test_a_late_block_ends_at_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = Deadline(5.0)
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(60.0)
        assert deadline.is_over
        assert loop.time() - began == pytest.approx(5.0)
        assert _cancelling() == 0
        await asyncio.sleep(1.0)  # nothing is left of the cancellation

    run_virtually(main())


def test_a_block_can_be_ended_from_outside() -> None:
    async def main() -> None:
        deadline = Deadline(None)
        asyncio.get_running_loop().call_later(2.0, deadline.end)
        asyncio.get_running_loop().call_later(2.0, deadline.end)
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(60.0)
        assert _cancelling() == 0

    run_virtually(main())


def test_what_the_block_raises_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(KeyError), Deadline(5.0):
            raise KeyError

    run_virtually(main())


def test_a_block_that_takes_no_notice_ends_by_itself() -> None:
    async def main() -> None:
        with Deadline(5.0) as deadline, contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60.0)
        assert deadline.is_over
        assert _cancelling() == 0

    run_virtually(main())


@pytest.mark.parametrize("at_s", [1.0, 5.0])
def test_who_is_cancelled_by_somebody_else_is_cancelled(at_s: float) -> None:
    """Also in the very moment in which the time is up."""

    async def waiting() -> None:
        with Deadline(5.0):
            await asyncio.sleep(60.0)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(waiting())
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_later(at_s, task.cancel)
        assert task.cancelled()

    run_virtually(main())


def _cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()

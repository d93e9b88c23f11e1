"""A user's coroutine runs as if it was awaited, and is left alone once it is given up."""

import asyncio

import pytest

from asyncrl.pipeline.sampling.user_coroutine import abandonable
from tests.virtual_time import run_virtually


def test_values_timeouts_and_task_groups_of_a_coroutine_work() -> None:
    async def child() -> int:
        await asyncio.sleep(1.0)
        return 3

    async def user() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await asyncio.sleep(5.0)
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(child()) for _ in range(2)]
        return sum(task.result() for task in both)

    async def main() -> int:
        return await abandonable(user(), lambda: False)

    assert run_virtually(main()) == (6, 3.0)


def test_exceptions_pass() -> None:
    async def user() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("mine")

    async def main() -> None:
        await abandonable(user(), lambda: False)

    with pytest.raises(KeyError, match="mine"):
        run_virtually(main())


def test_a_coroutine_that_refuses_to_end_is_left_once_it_is_given_up() -> None:
    caught, is_given_up = 0, False

    async def deaf() -> None:
        nonlocal caught
        while True:
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                caught += 1

    async def main() -> None:
        nonlocal is_given_up
        async with asyncio.TaskGroup() as tasks:

            async def run() -> None:
                await abandonable(deaf(), lambda: is_given_up)

            task = tasks.create_task(run())
            for _ in range(3):
                await asyncio.sleep(1.0)
                task.cancel()
            await asyncio.sleep(1.0)
            assert not task.done()
            is_given_up = True
            task.cancel()

    assert run_virtually(main())[1] == 4.0
    assert caught == 3

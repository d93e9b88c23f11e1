"""The event loop of a process of a life, at its end."""

import asyncio

from asyncrl.sim.faults.loop import LifeLoop, run_life


def test_tasks_of_a_killed_process_end_in_the_order_in_which_they_began() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append(number)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(30):
            await loop.create_task(asyncio.sleep(0))  # numbers 1 to 30: in a set of few tasks, 32 comes before 31
        waiting.extend(loop.create_task(wait(number)) for number in range(4))
        await asyncio.sleep(0)

    waiting: list[asyncio.Task[None]] = []
    loop = LifeLoop()
    run_life(loop, main())
    loop.drop()
    assert ended == list(range(4))

import asyncio

import pytest

from asyncrl.sim.clock import Deadlock, run_virtually


def test_a_wait_advances_the_clock_by_exactly_its_time() -> None:
    async def main() -> list[float]:
        times, clock = [], asyncio.get_running_loop().time
        for seconds in (3600.0, 0.0, 0.25):
            await asyncio.sleep(seconds)
            times.append(clock())
        return times

    assert run_virtually(main()) == ([3600.0, 3600.0, 3600.25], 3600.25)


def test_timers_fire_by_time_and_those_of_one_moment_in_the_order_they_were_set() -> None:
    fired: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for name, when in (("c", 2.0), ("d", 2.0), ("a", 1.0), ("never", 1.5), ("b", 1.0), ("e", 2.0)):
            timer = loop.call_at(when, fired.append, name)
            if name == "never":
                timer.cancel()
        loop.call_soon(fired.append, "soon")
        await asyncio.sleep(3.0)

    run_virtually(main())
    assert fired == ["soon", *"abcde"]


def test_timeouts_that_do_not_fire_cost_no_virtual_time() -> None:
    async def main() -> None:
        for _ in range(500):
            async with asyncio.timeout(60.0):
                await asyncio.sleep(0.125)

    assert run_virtually(main())[1] == 62.5


def test_waiting_for_ever_raises_a_deadlock_and_cancels_every_task() -> None:
    ended: list[str] = []

    async def wait(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wait("one", 5.0))
            tasks.create_task(wait("other", float("inf")))

    with pytest.raises(Deadlock, match="at 5 s"):
        run_virtually(main())
    assert sorted(ended) == ["one", "other"]


def test_an_error_of_the_coroutine_is_raised() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        run_virtually(main())

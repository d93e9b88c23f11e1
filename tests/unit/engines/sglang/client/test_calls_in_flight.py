"""A call of ``generate`` can be given up, and a cancellation by others stays a cancellation."""

import asyncio

import pytest

from asyncrl.engines.sglang.client.calls_in_flight import Flight, Flights
from asyncrl.errors import EngineLost, EngineTimeout
from asyncrl.sim.clock import run_virtually


async def waiting(flight: Flight) -> None:
    async with flight:
        await asyncio.sleep(60.0)


def test_a_call_that_is_given_up_is_lost_at_once_also_when_given_up_twice() -> None:
    async def main() -> None:
        loop, flights = asyncio.get_running_loop(), Flights()
        flight = flights.begin("one")
        loop.call_later(2.0, flights.give_up)
        loop.call_later(2.0, flights.give_up)
        with pytest.raises(EngineLost, match="one was not aborted in time"):
            await waiting(flight)
        assert loop.time() == pytest.approx(2.0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(1.0)  # nothing is left of the cancellation

    run_virtually(main())


def test_a_call_that_has_ended_cannot_be_given_up() -> None:
    async def main() -> None:
        flight = Flight("one")
        flight.give_up()
        async with flight:
            await asyncio.sleep(1.0)
        flight.give_up()
        await asyncio.sleep(1.0)

    run_virtually(main())


def test_a_call_that_ends_as_it_is_given_up_has_ended() -> None:
    async def main() -> None:
        flight = Flight("one")
        async with flight:
            flight.give_up()
        await asyncio.sleep(1.0)

    run_virtually(main())


def test_what_the_call_raises_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(EngineTimeout):
            async with Flight("one"):
                raise EngineTimeout

    run_virtually(main())


@pytest.mark.parametrize("at_s", [1.0, 2.0])
def test_a_call_that_somebody_else_cancels_is_cancelled(at_s: float) -> None:
    """Also in the very moment in which it is given up."""

    async def main() -> None:
        loop, flight = asyncio.get_running_loop(), Flight("one")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(waiting(flight))
            await asyncio.sleep(0)
            loop.call_later(at_s, task.cancel)
            loop.call_later(2.0, flight.give_up)
        assert task.cancelled()

    run_virtually(main())

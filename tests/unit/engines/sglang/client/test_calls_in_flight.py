"""A call of ``generate`` can be given up; a cancellation from elsewhere stays a cancellation."""

import asyncio

import pytest

from asyncrl.engines.sglang.client.calls_in_flight import CallInFlight, CallsInFlight
from asyncrl.errors import EngineLost, EngineTimeout
from asyncrl.sim.clock import run_virtually


async def waiting(call: CallInFlight) -> None:
    async with call:
        await asyncio.sleep(60.0)


def assert_not_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_a_call_that_is_given_up_is_lost_at_once_also_when_given_up_twice() -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), CallsInFlight()
        call = calls.begin("one")
        loop.call_later(2.0, calls.fail_all)
        loop.call_later(2.0, calls.fail_all)
        with pytest.raises(EngineLost, match="one was not aborted in time"):
            await waiting(call)
        assert loop.time() == pytest.approx(2.0)
        assert_not_cancelled()
        await asyncio.sleep(1.0)  # nothing is left of the cancellation

    run_virtually(main())


def test_a_call_that_has_ended_cannot_be_given_up() -> None:
    async def main() -> None:
        loop, call = asyncio.get_running_loop(), CallInFlight("one")
        call.fail()
        async with call:
            await asyncio.sleep(1.0)
        call.fail()
        await asyncio.sleep(1.0)
        assert loop.time() == pytest.approx(2.0)  # neither sleep was cut short
        assert_not_cancelled()

    run_virtually(main())


def test_a_call_that_ends_as_it_is_given_up_has_ended() -> None:
    async def main() -> None:
        loop, call = asyncio.get_running_loop(), CallInFlight("one")
        async with call:
            call.fail()
        await asyncio.sleep(1.0)
        assert loop.time() == pytest.approx(1.0)
        assert_not_cancelled()

    run_virtually(main())


def test_an_error_of_the_call_is_raised() -> None:
    async def main() -> None:
        with pytest.raises(EngineTimeout):
            async with CallInFlight("one"):
                raise EngineTimeout

    run_virtually(main())


@pytest.mark.parametrize("at_s", [1.0, 2.0])
def test_a_call_that_is_cancelled_from_elsewhere_is_cancelled(at_s: float) -> None:
    """The promise also holds at the moment in which the call is given up."""

    async def main() -> None:
        loop, call = asyncio.get_running_loop(), CallInFlight("one")
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(waiting(call))
            await asyncio.sleep(0)
            loop.call_later(at_s, task.cancel)
            loop.call_later(2.0, call.fail)
        assert task.cancelled()

    run_virtually(main())

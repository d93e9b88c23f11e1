"""The queue of prompts, over a source that is slow."""

import asyncio

import pytest

from asyncrl.engines.fake import FakePrompts
from asyncrl.pipeline.scheduling.prompt_queue import PromptQueue
from tests.virtual_time import run_virtually


def test_a_returned_prompt_comes_first_and_is_ready_at_once() -> None:
    source = FakePrompts(seconds=5.0)
    queue = PromptQueue(source, [source.at(0, 7)])

    async def main() -> list[int]:
        assert await queue.ready()
        rows = [queue.take().row]
        assert await queue.ready()
        return [*rows, queue.take().row]

    rows, seconds = run_virtually(main())
    assert rows == [7, 0]
    assert seconds == 5.0
    assert (queue.num_taken, queue.last_taken) == (1, (0, 0))


def test_a_wait_for_the_source_ends_when_a_prompt_is_returned() -> None:
    source = FakePrompts(seconds=5.0)
    queue = PromptQueue(source)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(queue.ready())
            await asyncio.sleep(2.0)
            assert queue.seconds_waited == 2.0
            queue.return_prompt(source.at(0, 7))
            assert await waiting
        assert queue.seconds_waited is None
        assert queue.take().row == 7
        assert await queue.ready()

    _, seconds = run_virtually(main())
    assert seconds == 5.0  # the source continued, although the wait for it had ended


def test_woken_without_a_prompt_it_is_not_ready() -> None:
    queue = PromptQueue(FakePrompts(seconds=5.0))
    queue.wake()  # no wait to end

    async def main() -> bool:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(queue.ready())
            await asyncio.sleep(2.0)
            queue.wake()
            queue.wake()
        return waiting.result()

    assert run_virtually(main()) == (False, 2.0)


def test_cancellation_passes_and_no_prompt_is_lost() -> None:
    queue = PromptQueue(FakePrompts(seconds=5.0))

    async def main() -> None:
        with pytest.raises(TimeoutError):  # of the caller, not of the queue
            async with asyncio.timeout(2.0):
                await queue.ready()
        assert await queue.ready()
        assert queue.take().row == 0

    run_virtually(main())


def test_an_error_of_the_source_is_the_caller_s() -> None:
    class Slow(FakePrompts):
        async def ready(self) -> None:
            raise TimeoutError("the source")

    with pytest.raises(TimeoutError, match="the source"):
        run_virtually(PromptQueue(Slow()).ready())

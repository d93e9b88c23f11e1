"""The thread of user functions: order, named errors, and calls that hang."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncrl.errors import ConfigError, HookFailed
from asyncrl.hooks.worker import HookLate, Worker


def called(function: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    return asyncio.run(Worker("test").call(function, "--flag mine", timeout_s))


def test_all_calls_run_in_one_thread_in_order() -> None:
    worker, seen = Worker("test"), list[tuple[int, int]]()

    async def several() -> None:
        async with asyncio.TaskGroup() as calls:
            for number in range(20):
                look = partial(lambda number: seen.append((number, threading.get_ident())), number)
                calls.create_task(worker.call(look, "mine", 60.0))

    asyncio.run(several())
    assert [number for number, _ in seen] == list(range(20))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no"), "--flag mine: ValueError: no"),
        (HookFailed("no"), "--flag mine: no"),
        (TimeoutError("theirs"), "--flag mine: TimeoutError: theirs"),
        (SystemExit(3), "--flag mine: RuntimeError: raised SystemExit: 3"),
        (KeyboardInterrupt(), "--flag mine: RuntimeError: raised KeyboardInterrupt: "),
        (asyncio.CancelledError(), "--flag mine: RuntimeError: raised CancelledError: "),
        (concurrent.futures.CancelledError(), "--flag mine: RuntimeError: raised CancelledError: "),
        (StopIteration(), "--flag mine: RuntimeError: raised StopIteration: "),
    ],
)
def test_every_exception_becomes_one_named_error(error: BaseException, line: str) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(HookFailed) as found:
        called(raises)
    assert str(found.value) == line
    assert not isinstance(found.value, HookLate)
    with pytest.raises(HookFailed) as now:
        Worker("test").call_now(raises, "--flag mine", 60.0)
    assert str(now.value) == line


def test_a_call_that_hangs_is_late() -> None:
    end = threading.Event()
    with pytest.raises(HookLate, match=r"^--flag mine: no result within 0\.05 s$"):
        called(end.wait, 0.05)
    with pytest.raises(HookLate, match=r"^--flag mine: no result within 0\.05 s$"):
        Worker("test").call_now(end.wait, "--flag mine", 0.05)
    end.set()


def test_a_mistake_before_the_run_keeps_its_line() -> None:
    def raises() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match=r"^wrong$"):
        Worker("test").call_now(raises, "--flag mine", 60.0)


def test_a_call_whose_caller_gave_up_before_its_turn_is_skipped() -> None:
    worker, begun, end, ran = Worker("test"), threading.Event(), threading.Event(), list[int]()

    def holds() -> None:
        begun.set()
        end.wait(60)

    async def main() -> None:
        async with asyncio.TaskGroup() as calls:
            calls.create_task(worker.call(holds, "first", 60.0))
            await asyncio.to_thread(begun.wait)
            second = calls.create_task(worker.call(lambda: ran.append(1), "second", 60.0))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            end.set()
        await worker.call(lambda: ran.append(2), "third", 60.0)

    asyncio.run(main())
    assert ran == [2]

"""The wire between the controller and a process of user code."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from asyncrl.rollouts.user_process.wire import PIECE_BYTES, Wire
from asyncrl.task_groups import TaskGroup

LARGE = [bytes([place]) * PIECE_BYTES for place in range(200)]
"""More pieces than the socket and its writer keep while the other side does not read."""


def received_after(sending: Callable[[Wire, TaskGroup], Awaitable[None]], num_messages: int) -> list[list[bytes]]:
    """Return the messages that arrive at a side which reads only once all is sent."""

    async def main() -> list[list[bytes]]:
        near, far = socket.socketpair()
        here = await Wire.over(near)
        async with TaskGroup() as tasks:
            await sending(here, tasks)
        there = await Wire.over(far)
        try:
            async with asyncio.timeout(30.0):
                return [list(await there.receive()) for _ in range(num_messages)]
        finally:
            here.close()
            there.close()

    return asyncio.run(main())


async def cancel(task: asyncio.Task[None]) -> None:
    await asyncio.sleep(0.2)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def test_a_send_that_is_cancelled_cuts_no_message() -> None:
    async def sending(wire: Wire, tasks: TaskGroup) -> None:
        task = tasks.create_task(wire.send(LARGE))
        await asyncio.sleep(0.1)
        wire.post([b"posted meanwhile"])
        await cancel(task)
        wire.post([b"posted later"])

    assert received_after(sending, 3) == [LARGE, [b"posted meanwhile"], [b"posted later"]]


def test_a_send_that_is_cancelled_before_its_turn_sends_nothing() -> None:
    async def sending(wire: Wire, tasks: TaskGroup) -> None:
        first, second = tasks.create_task(wire.send(LARGE)), tasks.create_task(wire.send([b"second"]))
        await cancel(second)
        await cancel(first)
        wire.post([b"last"])

    assert received_after(sending, 2) == [LARGE, [b"last"]]

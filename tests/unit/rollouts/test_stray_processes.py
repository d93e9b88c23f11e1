"""Strays: agents that end together share scans of the machine's processes."""

import asyncio
import threading
from collections.abc import Set

import pytest

from asyncrl.rollouts.stray_processes import StrayScans


def test_agents_that_end_during_a_scan_share_the_next_one() -> None:
    scans: list[tuple[set[int], set[bytes]]] = []
    may_end = threading.Event()

    def scan(sessions: Set[int], marks: Set[bytes]) -> None:
        scans.append((set(sessions), set(marks)))
        assert may_end.wait(20)
        if 7 in sessions:
            raise RuntimeError("no /proc")

    async def scenario() -> None:
        strays = StrayScans(scan)
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(strays.kill(0, b"0"))
            while not scans:  # noqa: ASYNC110 (another thread appends them)
                await asyncio.sleep(0.001)
            others = [tasks.create_task(strays.kill(number, b"%d" % number)) for number in range(1, 6)]
            await asyncio.sleep(0)
            others[2].cancel()  # its strays are killed all the same
            assert not first.done()
            may_end.set()
        assert scans == [({0}, {b"0"}), ({1, 2, 3, 4, 5}, {b"1", b"2", b"3", b"4", b"5"})]
        with pytest.raises(RuntimeError, match="no /proc"):
            await strays.kill(7, b"7")
        await strays.kill(8, b"8")
        assert len(scans) == 4

    asyncio.run(scenario())

"""Data workers that do not end as they should."""

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from asyncrl.data.streaming import workers

CHILD_S = 60
"""Seconds for which the processes would sleep."""


@asynccontextmanager
async def shell(script: str) -> AsyncIterator[Process]:
    """Start a process; kill it and its children at the end."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", script, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def within_seconds[T](script: str, use: Callable[[Process], Awaitable[T]]) -> T:
    async def main() -> T:
        async with shell(script) as process, asyncio.timeout(CHILD_S / 2):
            return await use(process)

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "END_S", 0.5)


def test_a_worker_whose_child_keeps_its_output_open_does_not_delay_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def end(process: Process) -> tuple[int | None, str]:
        assert process.stdout is not None
        await process.stdout.readline()
        await workers._end(process)  # noqa: SLF001
        return process.returncode, await workers._last_line(process)  # noqa: SLF001

    assert within_seconds(f"sleep {CHILD_S} & echo started; wait", end) == (-signal.SIGKILL, "")
    assert not caplog.messages


def test_a_worker_that_cannot_be_killed_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Process, "kill", lambda process: None)  # as one that waits for a network file system
    within_seconds(f"exec sleep {CHILD_S}", workers._end)  # noqa: SLF001
    assert len(caplog.messages) == 1
    assert "did not end within 0.5 s after SIGKILL: left" in caplog.messages[0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"exec 1>&-; exec sleep {CHILD_S}", r"^closed its output and did not end within 0.5 s$"),
        ("exit 3", "^ended with code 3$"),
        ("kill -9 $$", "^ended by signal 9$"),
        (f"sleep {CHILD_S} 1>&- & exit 3", "^ended with code 3$"),
    ],
)
def test_a_worker_that_closes_its_output_died(script: str, message: str) -> None:
    async def ask(process: Process) -> None:
        with pytest.raises(workers._Died, match=message):  # noqa: SLF001
            await workers._asked(process, (0, 0))  # noqa: SLF001

    within_seconds(script, ask)

"""Steps of fakes: do nothing special, fail, or never return."""

import asyncio
from collections.abc import Awaitable, Callable

Step = Callable[[str], Awaitable[None]]


async def nothing(step: str) -> None:
    """Do nothing."""


def failing(at: str, error: Exception) -> Step:
    """A step that raises ``error`` at ``at``."""

    async def step(name: str) -> None:
        if name == at:
            raise error

    return step


def hanging(at: str) -> Step:
    """A step that never returns at ``at``."""

    async def step(name: str) -> None:
        if name == at:
            await asyncio.Event().wait()

    return step

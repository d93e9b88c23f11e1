"""What fakes do at each step that they are asked for: nothing special, fail, or never answer."""

import asyncio
from collections.abc import Awaitable, Callable

Step = Callable[[str], Awaitable[None]]


async def nothing(step: str) -> None:
    """All is well."""


def failing(at: str, error: Exception) -> Step:
    """Raises at the step ``at``."""

    async def step(name: str) -> None:
        if name == at:
            raise error

    return step


def hanging(at: str) -> Step:
    """Never comes back from the step ``at``."""

    async def step(name: str) -> None:
        if name == at:
            await asyncio.Event().wait()

    return step

"""A stand-in for the thread of user functions, for tests on a virtual clock."""

import asyncio
from collections.abc import Callable

from asyncrl.errors import HookFailed


class InlineCaller:
    """Runs each call at once; the caller gets the result ``seconds`` later on the loop's clock."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.names: list[str] = []

    async def call[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """See ``Caller.call``."""
        self.names.append(name)
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return self.call_now(function, name, timeout_s)

    def call_now[T](self, function: Callable[[], T], name: str, timeout_s: float) -> T:
        """See ``Caller.call_now``."""
        try:
            return function()
        except Exception as error:
            raise HookFailed(f"{name}: {type(error).__name__}: {error}") from error

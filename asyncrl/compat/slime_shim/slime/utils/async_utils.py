"""Coroutines that are run from code without a loop."""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

__all__ = ["get_async_loop", "run"]


class AsyncLoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="slime-loop").start()

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, block until it is done, and return its result."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop).result()


@cache
def get_async_loop() -> AsyncLoopThread:
    """Return the loop of the process."""
    return AsyncLoopThread()


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in the background loop, block until it is done, and return its result."""
    return get_async_loop().run(coro)

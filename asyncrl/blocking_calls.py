"""Calls of user code on an event loop: the first one that blocks it for long is named.

While a user function computes or waits without ``await``, nothing else of its process runs: no token is read, no group
starts.  The metric ``time/loop_lag_ms`` shows that the loop stood still; this module says because of which function.
"""

import functools
import logging
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

logger = logging.getLogger(__name__)

BLOCKED_S = 0.05
"""Seconds from which a call is named."""


def warn(name: str, seconds: float) -> None:
    """Log that a function blocked the event loop."""
    logger.warning(
        "%s blocked the event loop for %.0f ms: no token is read meanwhile, and no group starts; make it faster, or "
        "await its slow part (said once; time/loop_lag_ms has the longest delay of every step)",
        name,
        1000 * seconds,
    )


class UserCalls:
    """Times the calls of one user function, and tells of the first that blocks the loop for BLOCKED_S."""

    def __init__(self, name: str, tell: Callable[[str, float], None] = warn) -> None:
        """``name`` is the flag and the path; ``tell`` gets it with the seconds, once."""
        self.name = name
        self._tell = tell
        self._has_told = False

    def of[**P, T](self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a plain function that is timed."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            return self.call(function, *args, **kwargs)

        vars(timed)["user_label"] = self.name  # for errors
        return timed

    def of_async[**P, T](self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return an ``async`` function of which each step between two waits is timed."""

        async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
            return await function(*args, **kwargs)

        @functools.wraps(function)
        async def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            return await self.steps(awaited(*args, **kwargs))

        return timed

    def call[**P, T](self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on the event loop's thread.

        A program whose loop stands still finds the name in the frame of this method (``self``).
        """
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds = time.perf_counter() - began
            if seconds >= BLOCKED_S and not self._has_told:
                self._has_told = True
                self._tell(self.name, seconds)

    @types.coroutine
    def steps[T](self, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run ``coroutine`` to its end within the task that awaits this, and time its steps."""
        # Invariant: values and exceptions pass unchanged in both directions, as in ``yield from``.
        try:
            waits_for = self.call(coroutine.send, None)
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # noqa: BLE001 (passed on to the coroutine)
                    waits_for = self.call(coroutine.throw, error)
                else:
                    waits_for = self.call(coroutine.send, value)
        except StopIteration as end:
            result: T = end.value
            return result

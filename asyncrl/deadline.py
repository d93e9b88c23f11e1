"""``asyncio.timeout`` for what every sample does: 2 microseconds instead of 7."""

import asyncio
from typing import Self


class Deadline:
    """``with``: ends the block after some seconds, or when asked to, with TimeoutError, by cancelling its task.

    A cancellation by somebody else is not swallowed, also when both come at once.
    """

    __slots__ = ("_cancelling", "_seconds", "_task", "_timer", "is_over")

    def __init__(self, seconds: float | None) -> None:
        """None: only when asked to."""
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False
        """Whether the block was ended by this."""

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline is for the block of a task")
        self._task, self._cancelling = task, task.cancelling()
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.is_over and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from error

    def end(self) -> None:
        """End the block now; not to be called after it."""
        if not self.is_over:
            self.is_over = True
            self._task.cancel()

"""The TaskGroup of this package, which loses no cancellation."""

import asyncio
from types import TracebackType

from asyncrl.errors import AsyncRLError
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="asyncio.TaskGroup",
        attributes=("_parent_cancel_requested", "uncancel", "BaseExceptionGroup"),
        used_in=__name__,
    ),
)
"""Names that may change with the library: see docs/internals.md."""


class TaskGroup(asyncio.TaskGroup):
    """A TaskGroup that raises CancelledError if its task was cancelled while a member failed with a named error.

    Python 3.12 drops that cancellation, and raises the error alone.  A loop that catches the error and repeats would
    then never end, and the run would wait for it.  Named errors are asyncrl's, and OSError, of which ConnectionError
    and TimeoutError are kinds.  Another error is a bug, and is raised all the same.
    """

    async def __aenter__(self) -> "TaskGroup":
        """See ``asyncio.TaskGroup``."""
        await super().__aenter__()
        self._owner = asyncio.current_task()
        self._cancellations = self._count()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See ``asyncio.TaskGroup``."""
        # Invariant: TaskGroup cancels its task once if a member fails.  It takes that back only if the block was still
        # running; what is left of the count is then a cancellation from outside.
        was_requested = self._is_requested
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            if self._owner is not None and self._is_requested and not was_requested:
                self._owner.uncancel()
            _, bugs = errors.split((AsyncRLError, OSError))
            if bugs is None and self._count() > self._cancellations:
                raise asyncio.CancelledError from errors
            raise

    @property
    def _is_requested(self) -> bool:
        """Whether the group itself has cancelled its task."""
        found: bool = self._parent_cancel_requested  # type: ignore[attr-defined]
        return found

    def _count(self) -> int:
        return 0 if self._owner is None else self._owner.cancelling()

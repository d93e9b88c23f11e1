"""Awaiting calls of actors: each has a deadline, and every failure becomes one of our errors."""

from collections.abc import Awaitable, Sequence
from typing import Any

from asyncrl.errors import AsyncRLError, TrainerFailed, first_line, plainly
from asyncrl.event_loop import Deadline
from asyncrl.internals import Internal
from asyncrl.task_groups import TaskGroup

INTERNALS = (Internal(name="ray.exceptions.RayTaskError", attributes=("cause",), used_in=__name__),)
"""Names that may change with the library: see docs/internals.md."""


async def answered(call: Any, what: str, timeout_s: float, kind: type[AsyncRLError] = TrainerFailed) -> Any:
    """Return the answer of an actor.  Our own errors propagate unchanged; every other failure becomes a ``kind``.

    ``what`` names the actor and the call in error messages.
    """
    import ray

    try:
        async with Deadline(timeout_s):
            return await call
    except ray.exceptions.RayTaskError as error:  # first: it is also a TimeoutError when its cause is one
        if isinstance(error.cause, AsyncRLError):
            raise error.cause from error
        raise kind(f"{what}: {type(error.cause).__name__}: {first_line(error.cause)}") from error
    except TimeoutError as error:
        raise kind(f"{what}: no answer within {timeout_s:g} s") from error
    except ray.exceptions.RayError as error:
        raise kind(f"{what}: {first_line(error)}") from error


def is_silent(error: AsyncRLError) -> bool:
    """Whether an error of ``answered`` says that the actor died or did not answer, not that its code raised."""
    import ray

    cause = error.__cause__
    if isinstance(cause, ray.exceptions.RayTaskError):  # first: it is also a TimeoutError when its cause is one
        return False
    return isinstance(cause, TimeoutError | ray.exceptions.RayError)


async def together(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """Return all answers, or raise the first error without waiting for calls that would never answer."""
    with plainly():
        async with TaskGroup() as asking:
            tasks = [asking.create_task(_await(call)) for call in calls]
    return [task.result() for task in tasks]


async def _await(call: Awaitable[Any]) -> Any:
    return await call

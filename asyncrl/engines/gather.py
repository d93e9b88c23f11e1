"""Concurrent requests to trainer and engines, with one deadline and one error that names the member that failed."""

from collections.abc import Coroutine, Mapping
from typing import Any

from asyncrl.errors import AsyncRLError, WeightUpdateFailed
from asyncrl.event_loop import Deadline
from asyncrl.task_groups import TaskGroup

GRACE_S = 2.0
"""Seconds by which the deadline of all members is later than that of each.

A member that misses a deadline reports it: only then is a silent trainer rank known to be silent.
"""


async def ask_one[T](
    doing: str,
    who: str,
    work: Coroutine[Any, Any, T],
    timeout_s: float,
    kind: type[AsyncRLError] = WeightUpdateFailed,
) -> T:
    """Run ``work`` of the single member ``who`` as ``gather`` does; return its answer."""
    answers: list[T] = []

    async def answer() -> None:
        answers.append(await work)

    await gather(doing, {who: answer()}, timeout_s, kind)
    return answers[0]


async def gather(
    doing: str,
    work: Mapping[str, Coroutine[Any, Any, None]],
    timeout_s: float,
    kind: type[AsyncRLError] = WeightUpdateFailed,
) -> None:
    """Run all of ``work``, by member, within ``timeout_s`` seconds.

    Raises one ``kind`` that names ``doing`` and the member that failed first, or the members that did not answer in
    time, ``GRACE_S`` seconds later.  The others are cancelled.
    """
    waiting = set(work)
    failed: dict[str, AsyncRLError] = {}

    async def one(who: str, task: Coroutine[Any, Any, None]) -> None:
        try:
            await task
        except AsyncRLError as error:
            failed.setdefault(who, error)
            raise
        waiting.discard(who)

    try:
        async with Deadline(timeout_s + GRACE_S), TaskGroup() as tasks:
            for who, task in work.items():
                tasks.create_task(one(who, task), name=f"{doing}: {who}")
    except TimeoutError as error:
        missing = ", ".join(sorted(waiting))
        raise kind(f"{doing}: no answer from {missing} within {timeout_s:g} s") from error
    except ExceptionGroup as errors:
        _, bugs = errors.split(AsyncRLError)
        if bugs is not None:
            raise bugs.exceptions[0] from errors
        who, cause = next(iter(failed.items()))
        raise kind(f"{doing}: {who}: {cause}") from cause

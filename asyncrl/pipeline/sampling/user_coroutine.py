"""A coroutine of a user that may refuse to end.

A task group waits for its tasks for ever, and so does the event loop when it closes.  A user's function that catches
CancelledError and continues would hang the run.  ``abandonable`` runs it within the task of its caller, and leaves it
at its next step once it is given up.
"""

import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any


@types.coroutine
def abandonable[T](coroutine: Coroutine[Any, Any, T], is_given_up: Callable[[], bool]) -> Generator[Any, Any, T]:
    """Run ``coroutine`` to its end, or until an exception arrives while ``is_given_up`` is true, and raise it then.

    A given up coroutine is closed, and ignored if it resists that as well.
    """
    # Invariant: values and exceptions pass unchanged in both directions, as in ``yield from``.  The task sees the
    # futures that the coroutine waits for, so timeouts and task groups of the coroutine work.
    try:
        waits_for = coroutine.send(None)
        while True:
            try:
                value = yield waits_for
            except BaseException as error:
                if is_given_up():
                    _close(coroutine)
                    raise
                waits_for = coroutine.throw(error)
            else:
                waits_for = coroutine.send(value)
    except StopIteration as end:
        result: T = end.value
        return result


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    with suppress(BaseException):  # it ignored GeneratorExit, or its clean-up failed: nothing waits for it
        coroutine.close()

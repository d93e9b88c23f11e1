"""Groups of exceptions stay in the room that made them (a TaskGroup's ExceptionGroup matches no outer ``except``)."""

from collections.abc import Iterator
from contextlib import contextmanager

from asyncrl.errors import AsyncRLError


@contextmanager
def plainly() -> Iterator[None]:
    """Hand on one plain error of a TaskGroup; a bug goes before an expected failure."""
    try:
        yield
    except BaseExceptionGroup as errors:
        _, bugs = errors.split(AsyncRLError)
        raise _first(bugs or errors) from errors


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""A user's data source in its native shape: an object with ``take``, or an iterator."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from asyncrl.errors import HookFailed
from asyncrl.hooks.prompt_source import new_prompts
from asyncrl.types import NewPrompt, Prompt, ScoredGroup

METHODS = ("take", "__iter__", "__next__", "__aiter__")
"""A native source has one of these."""


class NativeSource:
    """A ``UserSource`` of an object with ``take``, or of a synchronous or asynchronous iterator.

    ``finished``, ``state`` and ``load`` of the object are used if it has them.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = self._one_by_one()

    @property
    def wants_finished(self) -> bool:
        """Whether the object has ``finished``."""
        return hasattr(self._source, "finished")

    @property
    def wants_returned(self) -> bool:
        """Return False: stale prompts start again by themselves."""
        return False

    @property
    def fetches_singly(self) -> bool:
        """Return True: the time limit is that of one prompt, and a slow source's first prompt is used at once."""
        return True

    def fetch(self, count: int, first: int, /) -> list[NewPrompt]:
        """Take up to ``count`` prompts; fewer once the source ends."""
        taken: list[NewPrompt] = []
        while len(taken) < count:
            try:
                taken += new_prompts([self._next()])
            except (StopIteration, StopAsyncIteration):
                break
        return taken

    def finished(self, group: ScoredGroup, /) -> None:
        """Show a scored group to the object."""
        self._source.finished(group)

    def give_back(self, prompt: Prompt, group: ScoredGroup | None, origin: Any, /) -> bool:
        """Refuse."""
        return False

    def state(self, step: int, /) -> Any:
        """Return a copy of the object's state, None if it has no ``state``.  Raises HookFailed if it is not JSON.

        The copy is made in the source's thread, which alone changes the object: the object may return the very list
        that it changes at the next call, and a checkpoint is written later.
        """
        if not hasattr(self._source, "state"):
            return None
        state = self._source.state()
        try:
            return orjson.loads(orjson.dumps(state))
        except TypeError as error:
            raise HookFailed(
                f"state() must return JSON values, which checkpoints store, got a {type(state).__name__}: {error}"
            ) from error

    def load(self, step: int, state: Any, /) -> None:
        """Give the object its state back."""
        if hasattr(self._source, "load"):
            self._source.load(state)
        elif state is not None:
            raise HookFailed("has state() but no load(state), so the checkpoint's state cannot be restored")

    def _one_by_one(self) -> Callable[[], Any]:
        if hasattr(self._source, "take"):
            take = self._source.take
            return (lambda: self._awaited(take())) if inspect.iscoroutinefunction(take) else take
        if hasattr(self._source, "__aiter__"):
            prompts = aiter(self._source)
            return lambda: self._awaited(anext(prompts))
        rest: Iterator[Any] = iter(self._source)
        return lambda: next(rest)

    def _awaited(self, waiting: Any) -> Any:
        # The source's thread has a loop for asynchronous sources; it runs only during a call.
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(waiting)

"""The event loop of one process of a life: virtual time, simulated connections, and an end at any callback."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Protocol

from asyncrl.internals import Internal
from asyncrl.sim.clock import VirtualLoop

INTERNALS = (
    Internal(name="asyncio.BaseEventLoop._asyncgen_finalizer_hook", parameters=("self", "agen"), used_in=__name__),
)
"""Library names that may change without notice; see docs/internals.md."""

SIMULATED = "sim:"
"""Prefix of the names of tasks that stand for the outside world."""


class Killed(KeyboardInterrupt):
    """The simulated end of the process.  asyncio passes a KeyboardInterrupt through tasks and callbacks."""


class Connects(Protocol):
    """The network behind the loop."""

    async def connect(self, make: Callable[[], asyncio.Protocol], netloc: str) -> tuple[Any, asyncio.Protocol]:
        """Return a transport and its protocol.  Raises OSError, or never returns."""


class _Task(asyncio.Task[Any]):
    """A task whose place in a set depends on its number, not on its address: a life is the same in every process."""

    __slots__ = ("_number",)
    _numbers = itertools.count()

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._number = next(self._numbers)
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    @classmethod
    def count_anew(cls) -> None:
        """Give the next task the number 0."""
        cls._numbers = itertools.count()


def _made(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    return _Task(coro, loop=loop, **options)


class LifeLoop(VirtualLoop):
    """A virtual loop that ends with Killed after ``kill_after`` further callbacks."""

    def __init__(self) -> None:
        super().__init__()
        _Task.count_anew()
        self.set_debug(False)
        self.set_task_factory(_made)
        self.set_exception_handler(self._complain)
        self.network: Connects | None = None
        self.complaints: list[str] = []
        """Errors that no task or callback handled."""
        self._left: int | None = None
        self.turn_s = 0.0
        """Seconds that one iteration takes.  Timers and messages that are due then come between the steps of tasks."""

    def kill_after(self, num_callbacks: int) -> None:
        """End the process after so many further callbacks."""
        self._left = num_callbacks

    def jump(self, seconds: float) -> None:
        """Move the clock now, as a callback that blocks does."""
        self._now += seconds

    def call_soon_threadsafe[*Ts](
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run ``callback`` in the next iteration of the loop: a life has no other thread."""
        return self.call_soon(callback, *args, context=context)

    def _run_once(self) -> None:
        if self.turn_s and self._soon:
            self._now += self.turn_s
            while self._later and self._later[0][0] <= self._now:
                self._soon.append(heapq.heappop(self._later)[-1])
        if self._left is None:
            super()._run_once()
            return
        if not self._soon:
            self._jump()
        for _ in range(len(self._soon)):
            if self._left <= 0:
                raise Killed
            self._left -= 1
            handle = self._soon.popleft()
            if not handle.cancelled():
                handle._run()  # noqa: SLF001 (this is the loop)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect through the simulated network."""
        if self.network is None:
            raise AssertionError("the loop has no network")
        return await self.network.connect(protocol_factory, f"{host}:{port}")

    def _complain(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.complaints.append(f"{context.get('message')}: {error!r}")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """Forget a generator that a dropped task has left: nothing runs its end."""
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]

    def drop(self) -> None:
        """Forget everything that is left, as the end of a process does: no task runs any further."""
        self._soon.clear()
        self._later.clear()
        self._left, self.turn_s = None, 0.0
        self.set_exception_handler(lambda *_: None)
        self.call_soon(self._close_tasks)  # within the loop: a ``finally`` that shields would make another one
        self.call_soon(self.stop)
        self.run_forever()
        self._soon.clear()
        self._later.clear()
        self.close()

    def _close_tasks(self) -> None:
        for task in sorted(asyncio.all_tasks(self), key=hash):  # the order of a set depends on earlier lives
            coroutine = task.get_coro()
            with contextlib.suppress(BaseException):  # a ``finally`` that awaits
                if isinstance(coroutine, Coroutine | Generator):
                    coroutine.close()


def run_life[T](loop: LifeLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on ``loop`` to its end.  Raises its error, Deadlock, or Killed; the caller calls ``drop``."""
    task = loop.create_task(main, name=f"{SIMULATED}main", context=Context())
    return loop.run_until_complete(task)

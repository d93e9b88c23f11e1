"""Worker processes for graders and user functions, with a deadline per call.

consumes      calls of plain functions
produces      their results
waits for     a free worker; a call's deadline counts from the moment a worker takes it.  pebble gets one call more than
              there are workers, and the other calls wait here
on failure    a call that is late, crashes its worker or exhausts its memory raises RewardFailed; a new worker starts;
              a call that no worker takes raises RewardFailed after LOST_S without any other call
on cancel     the worker of a cancelled call is killed and replaced; cancelling a call that waits here costs nothing
on exit       every worker is killed, also when the driver dies
"""

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from asyncrl.daemon_threads import off_loop
from asyncrl.errors import RewardFailed, RewardUnavailable, place_in
from asyncrl.event_loop import Deadline
from asyncrl.internals import Internal
from asyncrl.rewards import worker
from asyncrl.rewards.worker import Raised

INTERNALS = (
    Internal(
        name="multiprocessing.forkserver._forkserver", attributes=("_forkserver_alive_fd",), used_in=worker.__name__
    ),
)
"""Library names that may change without notice; see docs/internals.md."""

logger = logging.getLogger(__name__)

GB = 1_000_000_000
LOST_S = 60.0
"""Seconds without any call in a worker after which a call that pebble has is lost: pebble forgets a call whose worker
dies before it has acknowledged the call."""
NUM_AHEAD = 1
"""Calls that pebble has beyond one per worker, so that no worker waits for the event loop between two calls.

pebble writes every call to the workers' pipe at once and never takes one back.  A worker therefore takes a cancelled
call too, and is then killed and replaced, which takes 0.2 s.
"""


class RemoteTraceback(Exception):
    """The traceback of an exception in a worker, as the cause of the error in the driver."""


class PoolBroken(RewardFailed):
    """The worker processes ended before the call; ``start`` makes new ones."""


class WorkerPool:
    """A pool of processes, started on first use or by ``warm``.  Use it as an async context manager."""

    def __init__(
        self, num_workers: int, *, timeout_s: float, memory_gb: float | None, preload: Sequence[str] = ()
    ) -> None:
        """``preload``: modules that are imported once, before the workers fork from that process."""
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._memory = None if memory_gb is None else int(memory_gb * GB)
        self._preload = tuple(preload)
        self._pool: ProcessPool | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(num_workers + NUM_AHEAD)
        self._is_closed = False
        self._calls: set[Future[Any]] = set()
        self._num_ended = 0
        self.num_starts = 0
        """The number of starts of the processes; objects that a call made are lost with each start."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill every worker."""
        self._is_closed = True
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await off_loop(lambda: _end(pool), "end-reward-workers")

    async def warm(self, timeout_s: float) -> None:
        """Start every worker and import ``preload`` in it.  Raises RewardFailed if they are not ready in time."""
        await self.start()
        calls = [self._schedule(worker.warm, (self._preload,), timeout_s) for _ in range(self._num_workers)]
        for each in calls:
            await self._ended(each)
            outcome(each, timeout_s)

    async def run(self, resolver: bytes, *arguments: Any) -> Any:
        """Call the resolver's function in a worker and return its result.  Raises RewardFailed."""
        return await self._called(worker.call, (resolver, _packed(arguments)), self._timeout_s)

    async def load(self, resolver: bytes, timeout_s: float) -> None:
        """Make the resolver's function in a worker.  Raises RewardFailed."""
        await self._called(worker.load, (resolver,), timeout_s)

    def submit(self, resolver: bytes, *arguments: Any, timeout_s: float) -> "Future[Any]":
        """Begin a call of the resolver's function; ``outcome`` reads the future.  The pool must have started.

        Raises PoolBroken if the processes ended since, and RewardFailed.
        """
        return self._schedule(worker.call, (resolver, _packed(arguments)), timeout_s)

    async def start(self) -> None:
        """Start the processes if they do not run, and count it.  Raises RewardFailed after the pool was closed."""
        async with self._starting:
            if self._is_closed:
                raise RewardFailed("the run's worker processes have ended")
            if self._pool is not None and not self._pool.active:  # pebble gives up if an idle worker is killed
                logger.warning("the reward's worker processes ended and are restarted")
                broken, self._pool = self._pool, None
                await off_loop(lambda: _end(broken), "end-reward-workers")
            if self._pool is None:
                self._pool = await off_loop(self._new, "start-reward-workers")
                self.num_starts += 1

    async def _called(self, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float) -> Any:
        """Return the result of a call, once pebble had a place for it.  Raises RewardFailed."""
        async with self._places:
            await self.start()  # here, because the processes may have ended while the call waited
            future = self._schedule(function, arguments, limit)
            await self._ended(future)
        return outcome(future, limit)

    def _schedule(self, function: Callable[..., Any], arguments: tuple[Any, ...], limit: float) -> "Future[Any]":
        if self._pool is None:
            raise PoolBroken("the worker processes have ended")
        try:
            future: Future[Any] = self._pool.schedule(function, args=arguments, timeout=limit)
        except RuntimeError as error:
            raise PoolBroken(f"the worker processes broke: {error}") from error
        self._calls.add(future)
        future.add_done_callback(self._forget)
        return future

    async def _ended(self, future: "Future[Any]") -> None:
        """Wait until a call has ended.  Cancelling this kills its worker.

        Raises RewardFailed if the call waits while no call runs or ends for LOST_S.
        """
        waiting = asyncio.wrap_future(future)
        try:
            while not waiting.done():
                num_ended = self._num_ended
                with suppress(TimeoutError):
                    async with Deadline(LOST_S):
                        await asyncio.wait([waiting])
                is_idle = num_ended == self._num_ended and not any(call.running() for call in tuple(self._calls))
                if is_idle and not future.done():
                    raise RewardFailed(f"no worker took the call within {LOST_S:g} s")
        finally:
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # marks it as retrieved: ``outcome`` reads the result

    def _forget(self, call: "Future[Any]") -> None:
        """Count a call that has ended.  Runs in pebble's thread or, for a cancelled call, on the event loop."""
        self._calls.discard(call)
        self._num_ended += 1

    def _new(self) -> ProcessPool:
        """Start the pool.  It blocks until the processes are forked."""
        context = worker.Context()
        context.set_forkserver_preload([worker.__name__, *self._preload])
        pool = ProcessPool(self._num_workers, initializer=worker.start, initargs=(self._memory,), context=context)
        pool.schedule(worker.warm, args=((),))
        return pool


def _packed(arguments: tuple[Any, ...]) -> bytes:
    """Pickle the arguments of a call.  Raises RewardFailed.

    Invariant: only bytes travel through pebble.  An argument that fails to pickle ends pebble's thread, and one that
    fails to unpickle ends a worker that has not yet acknowledged its call.  The call would then wait forever.
    """
    try:
        return pickle.dumps(arguments)
    except Exception as error:  # a value of the data, or RecursionError
        raise RewardFailed(f"the arguments cannot be sent to a worker: {type(error).__name__}: {error}") from error


def outcome(future: "Future[Any]", limit: float) -> Any:
    """Return the result of a call that has ended.  Raises RewardFailed."""
    try:
        value = future.result()
    except TimeoutError:
        raise RewardUnavailable(f"no reward within {limit:g} s; its worker was killed", True, True) from None
    except CancelledError:  # by the caller, for a call that pebble lost
        raise RewardFailed("no worker took the call in time") from None
    except ProcessExpired as error:
        raise RewardFailed(f"its worker died ({_exit(error.exitcode)})") from None
    except Exception as error:  # what pebble cannot send between processes, and broken pools
        raise RewardFailed(f"the worker processes failed: {type(error).__name__}: {error}") from error
    if isinstance(value, Raised):
        is_named = value.type == RewardFailed.__name__
        place = place_in(value.traceback) if value.reached is None else ""
        text = value.message if is_named else f"{value.type}: {value.message}{place}"
        failed = RewardFailed(text) if value.reached is None else RewardUnavailable(text, value.reached)
        raise failed from RemoteTraceback(value.traceback)
    return _unpacked(value) if isinstance(value, bytes) else value


def _unpacked(result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:  # an object of a module that only the worker can import
        raise RewardFailed(f"the result of a worker cannot be read: {type(error).__name__}: {error}") from error


def _end(pool: ProcessPool) -> None:
    """Kill every worker and wait for their ends."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def _exit(code: int) -> str:
    if code == worker.EXIT_0:
        return "exit code 0"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

"""Restarts engines that end, and keeps the membership and the request pool up to date.

    ends, hangs or is slow ─▶ gets no more requests ─▶ restarted ─▶ takes part in an update ─▶ gets requests directly
                                                                                             ─▶ through the router

Samples that were on the engine keep the tokens that had arrived.  They resume on another engine, or on this one once it
is back.  A slow engine (``engines/slow_engines``) is drained first: its requests are aborted, which delivers all their
tokens.  An engine whose restarts of the last hour are used up is left out until one of them is an hour old; meanwhile
the run continues with the others.
"""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

from asyncrl.engines.cluster.calls import together
from asyncrl.engines.cluster.server import Server
from asyncrl.engines.slow_engines import MIN_ENGINES, OBSERVE_EVERY_S, DecodingSpeed, SlowEngines
from asyncrl.engines.weight_sync.membership import EngineMembership, Member
from asyncrl.errors import EngineError, EngineSlow, EngineTimeout, ServerFailed, is_out_of_reach, plainly
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)

AGAIN_S = 10.0
"""Seconds by which the wait before each further start attempt grows; the obstacle may be gone by then."""
ASK_EVERY_S = 10.0
"""Seconds between two liveness probes of a running engine."""
MOST_UNREACHED = 3
"""Liveness probes in a row without a connection after which an engine is lost.

The actor of an engine that has died reports it much earlier.  A machine that has vanished reports nothing.
"""
SPEED_S = 5.0
"""Deadline in seconds of one question for the speed of an engine; a later answer is out of date."""
WINDOW_S = 3600.0
"""Seconds for which a restart counts."""


class Pool(Protocol):
    """The engines that get requests."""

    def leave(self, url: str) -> None:
        """Send no more requests to this engine."""

    async def drain(self, url: str) -> None:
        """Interrupt the requests on this engine, which gets no more; they keep their tokens.  Raises nothing."""

    def join(self, url: str) -> None:
        """Send requests to this engine again."""

    def move(self, url: str, new_url: str) -> None:
        """Expect this engine, which gets no requests, back at ``new_url``."""

    async def route(self, url: str) -> None:
        """Return once the router may send requests to this engine again."""

    async def forget(self, url: str) -> None:
        """Return once the router sends no requests to this engine, which has left for long."""


class Control(Member, Protocol):
    """The supervisor's way to an engine."""

    async def probe(self, timeout_s: float) -> None:
        """Return once the process that uses the GPU answers.  Raises EngineTimeout or another EngineError."""

    async def decoding_speed(self, timeout_s: float) -> DecodingSpeed | None:
        """Return the engine's speed; None if it does not measure it.  Raises EngineError."""


@dataclass(slots=True, kw_only=True)
class StartedEngine:
    """An engine, with a function to start it."""

    control: Control
    """Has the engine's URL, and changes with it."""
    server: Server
    start: Callable[[], Awaitable[Control]]
    """Starts the engine and returns once it is ready; at another URL if its actor was replaced.

    Raises ServerFailed.
    """
    probe_timeout_s: float
    """Deadline in seconds of a liveness probe."""

    @property
    def url(self) -> str:
        """The engine's present URL."""
        return self.control.url


class RestartBudget:
    """The restarts of one engine: at most ``most`` within ``WINDOW_S`` seconds, on the event loop's clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._spent = deque[float]()
        """The times of the restarts that count."""

    @property
    def num_spent(self) -> int:
        """The number of restarts that counted at the last call of ``spend`` or ``wait_s``."""
        return len(self._spent)

    def spend(self) -> bool:
        """Count one more restart; return False, and count nothing, if none is left."""
        if self.wait_s() > 0:
            return False
        self._spent.append(asyncio.get_running_loop().time())
        return True

    def wait_s(self) -> float:
        """Return the seconds until a restart is left: 0 if there is one, and infinity if there never is."""
        now = asyncio.get_running_loop().time()
        while self._spent and now - self._spent[0] >= WINDOW_S:
            self._spent.popleft()
        if len(self._spent) < self._most:
            return 0.0
        return self._spent[0] + WINDOW_S - now if self._spent else math.inf


class EngineSupervisor:
    """Restarts the engines of a run when they end or stop answering."""

    def __init__(
        self,
        engines: Sequence[StartedEngine],
        membership: EngineMembership[Any],
        pool: Pool,
        *,
        max_restarts: int,
        min_engines: int = 1,
        slow_share: float = 0.0,
    ) -> None:
        """Allow ``max_restarts`` restarts of each engine within ``WINDOW_S``; a failed start counts.

        The run ends once fewer than ``min_engines`` engines may run or start.  An engine below ``slow_share`` of the
        median speed is slow; with 0 none is.
        """
        self.engines = tuple(engines)
        self._membership = membership
        self._pool = pool
        self._max_restarts = max_restarts
        self._min_engines = min_engines
        self._left_out = 0
        """The number of engines whose restarts are used up."""
        self._lost = set[str]()
        self._slow = SlowEngines(slow_share, len(self.engines))
        self._looks_for_slow = slow_share > 0 and len(self.engines) >= MIN_ENGINES

    @property
    def num_slow(self) -> int:
        """The number of times that an engine was slow."""
        return self._slow.num_found

    @property
    def watched(self) -> tuple[Server, ...]:
        """The servers of the engines that are not known to be lost."""
        return tuple(engine.server for engine in self.engines if engine.server.name not in self._lost)

    async def keep(self) -> None:
        """Run until cancelled.  Raises ServerFailed when too few engines have a restart left."""
        observing = [self._observe()] if self._looks_for_slow else []
        await together([*observing, *(self._keep(engine) for engine in self.engines)])

    async def _observe(self) -> NoReturn:
        """Compare the speeds of the serving engines until cancelled."""
        while True:
            await asyncio.sleep(OBSERVE_EVERY_S)
            serving = [engine for engine in self.engines if engine.server.name not in self._lost]
            speeds = await together([_speed(engine) for engine in serving])
            self._slow.observe({engine.url: speed for engine, speed in zip(serving, speeds, strict=True)})

    async def _keep(self, engine: StartedEngine) -> None:
        watch: Callable[[], Awaitable[None]] = partial(self._watch, engine)
        budget = RestartBudget(self._max_restarts)
        while True:
            try:
                await watch()
            except ServerFailed as error:
                why = error
            self._lost.add(engine.server.name)
            self._pool.leave(engine.url)
            if isinstance(why, EngineSlow):
                await self._pool.drain(engine.url)
            await self._bring_back(engine, budget, why)
            self._pool.join(engine.url)
            self._lost.discard(engine.server.name)
            logger.info("%s is back, with the present weights", engine.server.name)
            watch = partial(self._watch_and_route, engine)

    async def _watch(self, engine: StartedEngine) -> None:
        """Run until cancelled.  Raises ServerFailed when the engine ends, is unresponsive or slow."""
        with plainly():
            async with TaskGroup() as tasks:
                tasks.create_task(engine.server.watch(), name=f"watch-{engine.server.name}")
                tasks.create_task(_ask(engine), name=f"ask-{engine.server.name}")
                tasks.create_task(self._look_if_slow(engine), name=f"speed-{engine.server.name}")
                why = await self._membership.wait_until_unresponsive(engine.url)
                raise ServerFailed(f"{engine.server.name} {why}")

    async def _look_if_slow(self, engine: StartedEngine) -> NoReturn:
        why = await self._slow.wait_until_slow(engine.url)
        raise EngineSlow(f"{engine.server.name} {why}")

    async def _watch_and_route(self, engine: StartedEngine) -> None:
        """Watch the engine, and have the router send requests to it once it can.  Raises ServerFailed as ``_watch``."""
        with plainly():
            async with TaskGroup() as tasks:
                tasks.create_task(self._pool.route(engine.url), name=f"route-{engine.server.name}")
                await self._watch(engine)

    async def _bring_back(self, engine: StartedEngine, budget: RestartBudget, why: ServerFailed) -> None:
        """Restart the engine, which ended because of ``why``, until it has the current weights.

        Each failed start, and each end before it has them, counts as a restart.
        """
        for attempt in itertools.count():
            self._membership.mark_lost(engine.url)
            is_allowed = budget.spend()
            if is_allowed:
                spent = f"restart {budget.num_spent} of at most {self._max_restarts} an hour"
                logger.warning("%s; restarting it (%s)", why, spent)
            else:
                self._leave_out(why, budget.wait_s())
            await engine.server.renew()
            if not is_allowed:
                await self._restart_left(engine, budget)
                logger.warning("%s: a restart is left again, and it is started", engine.server.name)
            await asyncio.sleep(attempt * AGAIN_S)
            try:
                await self._start(engine)
                self._membership.mark_restarted(engine.url)
                await self._served(engine)
            except ServerFailed as error:
                why = error
            else:
                return

    def _leave_out(self, why: ServerFailed, wait_s: float) -> None:
        """Warn that the run continues without one more engine.  Raises ServerFailed if too few are left."""
        self._left_out += 1
        left = len(self.engines) - self._left_out
        spent = f"{why}; its restarts are used up (at most {self._max_restarts} an hour: max-engine-restarts)"
        if left < self._min_engines:
            raise ServerFailed(f"{spent}; engines left: {left}, needed: {self._min_engines}") from why
        again = "not started again" if math.isinf(wait_s) else f"started again in {wait_s:.0f} s"
        logger.warning("%s; the run continues with %d of %d engines; it is %s", spent, left, len(self.engines), again)

    async def _restart_left(self, engine: StartedEngine, budget: RestartBudget) -> None:
        """Return once the engine has a restart left, which this spends."""
        with plainly():
            async with TaskGroup() as tasks:
                forgetting = tasks.create_task(self._pool.forget(engine.url), name=f"forget-{engine.server.name}")
                while not budget.spend():
                    wait_s = budget.wait_s()
                    if math.isinf(wait_s):
                        await asyncio.get_running_loop().create_future()
                    await asyncio.sleep(wait_s)
                forgetting.cancel()
        self._left_out -= 1

    async def _start(self, engine: StartedEngine) -> None:
        """Start the engine, and let everyone know if it has another URL.  Raises ServerFailed."""
        before, control = engine.url, await engine.start()
        if control.url != before:
            logger.info("%s has moved from %s to %s", engine.server.name, before, control.url)
            engine.control = control
            self._membership.move(before, control)
            self._pool.move(before, control.url)

    async def _served(self, engine: StartedEngine) -> None:
        with plainly():
            async with TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(engine), name=f"keep-{engine.server.name}")
                await self._membership.wait_until_synced(engine.url)
                watching.cancel()


async def _ask(engine: StartedEngine) -> None:
    """Probe the engine until cancelled.  Raises ServerFailed if it does not answer, or cannot be reached."""
    num_unreached = 0
    while True:
        await asyncio.sleep(ASK_EVERY_S)
        try:
            await engine.control.probe(engine.probe_timeout_s)
        except EngineTimeout as error:
            raise ServerFailed(f"{engine.server.name} lives and does not answer: {error}") from error
        except EngineError as error:  # it has died, which ``watch`` notices, or it is an SGLang without this command
            num_unreached = num_unreached + 1 if is_out_of_reach(error) else 0
            if num_unreached == MOST_UNREACHED:
                raise ServerFailed(f"{engine.server.name} cannot be reached: {error}") from error
        else:
            num_unreached = 0


async def _speed(engine: StartedEngine) -> DecodingSpeed | None:
    try:
        return await engine.control.decoding_speed(SPEED_S)
    except EngineError:  # ``watch`` and the liveness probe notice what is wrong
        return None

"""Has the engines serve the trainer's weights, beside training.

    begin ──▶ take, the trainer waits ────┬──▶ push, the trainer goes on ──▶ pushed
    welcome ──▶ take again, it goes on ───┘      │
                        ▲─── an engine is lost ◀─┘      without a copy to take again: take

consumes      the trainer's weights, or those taken last; engines that come in between
produces      weight versions that engines serve
waits for     the trainer, while it is copied, and while it trains where it keeps no copy; the update before; engines
on cancel     an update that is under way leaves the engines unusable
"""

import asyncio
import logging
from collections.abc import Callable

from asyncrl.errors import UpdateInterrupted
from asyncrl.event_loop import loop_time
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.retry import RetryingEngine
from asyncrl.pipeline.sampler import Served
from asyncrl.protocols import Turns, WeightUpdater
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)


class WeightUpdates:
    """Of one run; lives as long as its task group."""

    def __init__(
        self,
        *,
        updater: WeightUpdater,
        engine: RetryingEngine,
        served: Served,
        turns: Turns | None,
        timeline: Timeline,
        trained: int,
        aborts: bool,
        look_again: Callable[[], None],
    ) -> None:
        """``aborts``: every request is ended before an update, and continued after it.

        ``look_again`` is called when the engines serve newer weights.
        """
        self._updater = updater
        self._engine = engine
        self._served = served
        self._turns = turns
        self._timeline = timeline
        self._aborts = aborts
        self._look_again = look_again
        self._version = served.now.version
        self._taken = trained
        """Steps that the weights had seen which were taken last."""
        self.trained = trained
        """Steps that the trainer's weights have seen; who trains, counts."""
        self.trainer = asyncio.Lock()
        """Held while it trains, and while its weights are taken or a checkpoint is copied, or is waited for: all its
        ranks together."""
        self._one_at_a_time = asyncio.Lock()
        self._pushing: asyncio.Task[UpdateReport] | None = None

    async def begin(self, stages: asyncio.TaskGroup, step: int) -> float:
        """Begin an update in ``stages``; seconds until the trainer may go on."""
        start, is_free = loop_time(), asyncio.Event()
        self._pushing = stages.create_task(self._update(is_free), name=f"push-{step}")
        await is_free.wait()
        self._timeline.span("trainer", "weights taken", start, loop_time())
        return loop_time() - start

    def skip(self) -> None:
        """The last step begins none."""
        self._pushing = None

    async def pushed(self) -> UpdateReport | None:
        """What the update of the last step was, when it is over; None if it began none."""
        return None if self._pushing is None else await self._pushing

    async def welcome(self) -> None:
        """Push for engines that come in between, until cancelled."""
        while True:
            await self._updater.newcomers()
            await self._update(asyncio.Event(), again=True)

    async def _update(self, is_free: asyncio.Event, *, again: bool = False) -> UpdateReport:
        """Have all engines serve the trainer's weights; ``is_free`` is set once the trainer may go on with others.

        ``again``, and when an engine is lost meanwhile: those that were taken last, while the trainer trains, if there
        is a copy of them.
        """
        async with self._one_at_a_time:
            while True:
                try:
                    if again and await self._updater.take_again():
                        is_free.set()
                        return await self._push(self._taken)
                    return await self._take_and_push(is_free)
                except UpdateInterrupted as error:
                    logger.warning("the weight update begins anew: %s", error)
                    again = True

    async def _take_and_push(self, is_free: asyncio.Event) -> UpdateReport:
        async with self.trainer:
            goes_beside = await self._updater.take()
            self._taken = self.trained
            if not goes_beside:
                report = await self._push(self._taken)
                is_free.set()
                return report
            is_free.set()
        return await self._push(self._taken)

    async def _push(self, step: int) -> UpdateReport:
        """Push what was taken at once, as a new version; samples in flight go on under it."""
        start = loop_time()
        self._version += 1
        weights = Weights(version=self._version, step=step)
        if self._aborts:
            await self._engine.interrupt()
        if self._turns is not None:
            await self._turns.to_update()
        self._served.expect(weights)
        update = await self._updater.push(weights)
        if self._turns is not None:
            await self._turns.to_engines()
        self._served.set(weights)
        self._engine.go_on()
        self._look_again()
        name = f"update to version {weights.version}"
        self._timeline.span("engines", name, start, loop_time(), bytes=update.num_bytes)
        logger.info("version %d pushed in %.3f s", weights.version, update.total_s)
        return update

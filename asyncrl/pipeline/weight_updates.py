"""Weight updates, which run in parallel with training.

    begin_to_publish ──▶ snapshot, the trainer waits ────┬──▶ publish, the trainer continues ──▶ published
    welcome_rejoined ──▶ resnapshot, it continues ───────┘      │
                            ▲─────── an engine is lost ◀────────┘      if the snapshot is gone: snapshot

consumes      the trainer's weights, or the last snapshot; engines that rejoin
produces      weight versions that engines serve
waits for     the trainer during a snapshot, and during its step if it keeps no copy; the previous update; engines
on cancel     an update in progress leaves the engines unusable
"""

import asyncio
import logging
from collections.abc import Callable

from asyncrl.errors import UpdateInterrupted
from asyncrl.event_loop import loop_time
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import ServingWeights
from asyncrl.protocols import GpuSharing, WeightUpdater
from asyncrl.task_groups import TaskGroup
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)


class WeightUpdates:
    """The weight updates of one run.  Lives as long as its task group."""

    def __init__(
        self,
        *,
        updater: WeightUpdater,
        engine: RetryingEngine,
        serving: ServingWeights,
        gpu_sharing: GpuSharing | None,
        timeline: Timeline,
        trained: int,
        aborts: bool,
        on_published: Callable[[], None],
    ) -> None:
        """Prepare the updates of a run whose trainer has done ``trained`` steps.

        ``aborts``: abort every request before an update and send it again afterwards.  ``on_published`` is
        called whenever the engines serve newer weights.
        """
        self._updater = updater
        self._engine = engine
        self._serving = serving
        self._gpu_sharing = gpu_sharing
        self._timeline = timeline
        self._aborts = aborts
        self._on_published = on_published
        self._version = serving.now.version
        self._snapshot_step = trained
        """Training step of the last snapshot."""
        self.trained_step = trained
        """Training step of the live weights.  Incremented by the caller of ``train``."""
        self.trainer_lock = asyncio.Lock()
        """Lock on the trainer's ranks, held during a step, a snapshot, and a checkpoint's copying or waiting."""
        self._one_at_a_time = asyncio.Lock()
        self._publishing: asyncio.Task[UpdateReport] | None = None

    async def begin_to_publish(self, stages: TaskGroup, step: int) -> float:
        """Start a task in ``stages`` that publishes the weights; return the seconds that the trainer waited."""
        start, is_free = loop_time(), asyncio.Event()
        self._publishing = stages.create_task(self._snapshot_and_publish(is_free), name=f"publish-{step}")
        await is_free.wait()
        self._timeline.span("trainer", "weights taken", start, loop_time())
        return loop_time() - start

    def skip(self) -> None:
        """Record that the last step's weights are not published."""
        self._publishing = None

    async def published(self) -> UpdateReport | None:
        """Wait until the last step's weights are published; return None if they are skipped."""
        return None if self._publishing is None else await self._publishing

    async def welcome_rejoined(self) -> None:
        """Publish the last snapshot whenever a restarted engine needs weights, until cancelled."""
        while True:
            await self._updater.wait_for_rejoined()
            await self._snapshot_and_publish(asyncio.Event(), again=True)

    async def _snapshot_and_publish(self, is_free: asyncio.Event, *, again: bool = False) -> UpdateReport:
        """Publish the trainer's weights to all engines; set ``is_free`` once the trainer may continue.

        With ``again``, and after the loss of an engine, publish the last snapshot while the trainer trains.  If that
        snapshot is gone, take a new one.
        """
        async with self._one_at_a_time:
            while True:
                try:
                    if again and await self._updater.resnapshot():
                        is_free.set()
                        return await self._publish()
                    return await self._publish_anew(is_free)
                except UpdateInterrupted as error:
                    logger.warning("the weight update starts again: %s", error)
                    again = True

    async def _publish_anew(self, is_free: asyncio.Event) -> UpdateReport:
        async with self.trainer_lock:
            is_copied = await self._updater.snapshot()
            self._snapshot_step = self.trained_step
            if not is_copied:
                report = await self._publish()
                is_free.set()
                return report
            is_free.set()
        return await self._publish()

    async def _publish(self) -> UpdateReport:
        """Publish the last snapshot as a new version; samples in flight continue under the new weights."""
        start = loop_time()
        self._version += 1
        weights = Weights(version=self._version, step=self._snapshot_step)
        if self._aborts:
            await self._engine.interrupt()
        if self._gpu_sharing is not None:
            await self._gpu_sharing.acquire_for_update()
        self._serving.expect(weights)
        update = await self._updater.publish(weights)
        if self._gpu_sharing is not None:
            await self._gpu_sharing.acquire_for_generation()
        self._serving.set(weights)
        self._engine.continue_generation()
        self._on_published()
        name = f"update to version {weights.version}"
        self._timeline.span("engines", name, start, loop_time(), bytes=update.num_bytes)
        logger.info("version %d published in %.3f s", weights.version, update.total_s)
        return update

"""The modelled trainer and weight updates."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.event_loop import loop_time
from asyncrl.sim.model.costs import Costs, UpdateCosts
from asyncrl.sim.model.fleet import Fleet
from asyncrl.types import Batch, TrainReport, UpdateReport, Weights


class ModelledTrainer:
    """A ``Trainer`` that only waits.  Where it shares processors with the engines, each slows the other down."""

    def __init__(self, costs: Costs, gpus: int, grain: int, fleet: Fleet) -> None:
        self.busy_s = 0.0
        self._costs = costs
        self._gpus = gpus
        self._grain = grain
        self._fleet = fleet
        self._busy_changed = asyncio.Event()
        fleet.notify(self._busy_changed.set)

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        await asyncio.sleep(self._costs.step_overhead_s)
        start = loop_time()
        units = sum(group.num_tokens + len(group.prompt.token_ids) * len(group.samples) for group in batch.groups)
        await self._work(self._costs.trainer.step_s(units * self._grain, self._gpus))
        self.busy_s += loop_time() - start
        return TrainReport(
            loss=0.0,
            grad_norm=0.0,
            clip_fraction=0.0,
            entropy=0.0,
            learning_rate=0.0,
            seconds=loop_time() - start,
            logprobs=tuple(scored.sample.logprobs for group in batch.groups for scored in group.samples),
        )

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``; nothing is written."""

    async def _work(self, left_s: float) -> None:
        sharing = self._costs.sharing
        if sharing.engine == 1 and sharing.trainer == 1:
            await asyncio.sleep(left_s)
            return
        self._fleet.slow_down(sharing.engine)
        while left_s > 1e-9:  # a nanosecond: the remainder is rounding
            self._busy_changed.clear()
            start, factor = loop_time(), sharing.trainer if self._fleet.is_busy else 1.0
            try:
                async with asyncio.timeout(left_s * factor):
                    await self._busy_changed.wait()
            except TimeoutError:
                pass
            left_s -= (loop_time() - start) / factor
        self._fleet.slow_down(1.0)


class ModelledUpdater:
    """A ``WeightUpdater`` that pauses generation for ``UpdateCosts.pause_s`` seconds.

    ``recompute`` prefills the KV cache again, as with ``--weight-update-mode retract``.  ``before`` is awaited before
    each snapshot; a policy may wait in it.
    """

    def __init__(
        self,
        fleet: Fleet,
        costs: UpdateCosts,
        *,
        recompute: bool,
        before: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._fleet = fleet
        self._costs = costs
        self._recompute = recompute
        self._before = before

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        if self._before is not None:
            await self._before()
        if self._costs.take_s > 0:
            await asyncio.sleep(self._costs.take_s)
        return not self._costs.holds_trainer

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``; modelled updates never lose an engine."""
        return False

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``; the modelled trainer never dies."""

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``; never returns, for a restarted engine has the present weights."""
        await asyncio.Event().wait()

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        start = loop_time()
        self._fleet.pause()
        await asyncio.sleep(self._costs.pause_s)
        self._fleet.continue_generation(weights, recompute=self._recompute)
        return UpdateReport(pause_s=loop_time() - start, total_s=loop_time() - start, num_bytes=0)

"""One start of real engines and a real trainer, and one run of the product's loop for each arrangement.

deployed ──▶ publish ──▶ (fresh scheduler, sampler, slots ──▶ warm-up steps ──▶ measured steps ──▶ cancelled) per run

Versions count on from run to run, so that no cached prefix or late chunk of one run is mistaken for another's.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncrl.engines.cluster.deployment import Running
from asyncrl.errors import plainly
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.run import train
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.protocols import Tokenizer
from asyncrl.types import SamplingParams, Weights
from benchmarks.sync_vs_async.arrangements import Arrangement, Length, Seen, first_row, line, run_of
from benchmarks.sync_vs_async.figures import ArrangementRun, Setup
from benchmarks.sync_vs_async.full import full_rate
from benchmarks.sync_vs_async.watch import WatchedEngine, WatchedTrainer, WatchedUpdater
from benchmarks.sync_vs_async.workload import ForcedLengths, ForcedWorkload, Prompts, keep_all

TEMPERATURE = 1.0
"""The temperature of training; at 1 the engines also score some answers to compare log-probs, as in the product."""
NEVER = 1_000_000_000
"""More steps than any run has: ``Enough`` ends it, so that admission does not drop towards its end."""
RETRIES = 2
"""Retries of a sample; none is expected, and each is counted."""
WATCHDOG_S = 300.0
"""Seconds without a token.  A chunk of 512 tokens takes 100 s at the slowest rate worth measuring."""
EMPTY_S = 60.0
"""Seconds for the engines to be empty after a run, whose requests have been aborted."""
LOOK_EVERY_S = 0.1
_PLAN = RunPlan(
    num_steps=NEVER,
    update_weights_interval=1,
    eval_interval=None,
    eval_before_train=False,
    temperature=TEMPERATURE,
    save_to=Path("unused"),
)


class Enough(Exception):
    """Raised by ``report`` when a run was measured for long enough; requests in flight are then aborted."""


class Stage:
    """Engines, trainer and prompts that are started once and used by one run after the other."""

    def __init__(
        self,
        running: Running,
        setup: Setup,
        tokenizer: Tokenizer,
        timeline: Timeline,
        say: Callable[[str], None],
    ) -> None:
        self.loop_lag = LoopLag()
        self._running = running
        self._setup = setup
        self._tokenizer = tokenizer
        self._timeline = timeline
        self._say = say
        self._num_engines = setup.engine_gpus if running.gpu_sharing is None else setup.gpus
        self._version = 0

    async def full_rate(self, workload: ForcedWorkload, seconds: float) -> float:
        """Tokens per second of all engines with every slot taken."""
        weights = await self._fresh_weights()
        slots, size = self._setup.slots * self._num_engines, self._setup.group_size
        with plainly():
            found = await full_rate(self._running.engine, workload, slots, size, weights, seconds)
        await self._until_empty()
        return found

    async def run(
        self, arrangement: Arrangement, length: Length, workload: ForcedWorkload, keep: Callable[[ArrangementRun], None]
    ) -> None:
        """Measure one arrangement.  ``keep`` gets the measured steps, also if this is cancelled or raises."""
        serving = ServingWeights(await self._fresh_weights())
        engine = WatchedEngine(ForcedLengths(self._running.engine, workload))
        trainer = WatchedTrainer(self._running.trainer)
        parts, updater = self._parts(arrangement, workload, serving, engine, trainer)
        clock = asyncio.get_running_loop().time
        seen, is_complete = Seen(round_steps=arrangement.round_steps, start_s=clock()), False

        def report(facts: StepFacts) -> None:
            seen.add(facts, clock(), engine.aborted + facts.scheduler.aborts)
            self._say(line(arrangement, seen, facts))
            if length.is_over(seen):
                raise Enough

        try:
            with suppress(Enough):
                await train(parts, _PLAN, report)
            is_complete = True
        finally:
            self._version = serving.now.version + 1
            if seen.steps:
                keep(
                    run_of(arrangement, self._num_engines, workload.seed, is_complete, seen, (engine, trainer, updater))
                )
        await self._until_empty()

    def _parts(
        self,
        arrangement: Arrangement,
        workload: ForcedWorkload,
        serving: ServingWeights,
        engine: WatchedEngine,
        trainer: WatchedTrainer,
    ) -> tuple[Parts, WatchedUpdater]:
        slots = Slots(self._setup.slots * self._num_engines)
        retrying = RetryingEngine(engine, RETRIES, lambda: serving.now)
        sampler = Sampler(
            engine=retrying,
            reward=workload.reward,
            reward_timeout_s=WATCHDOG_S,
            tokenizer=self._tokenizer,
            sampling=SamplingParams(temperature=TEMPERATURE, top_p=1.0, top_k=-1, max_new_tokens=workload.longest),
            slots=slots,
            serving=serving,
            timeline=self._timeline,
            seed=workload.seed,
            is_training=True,
            replays_routes=arrangement.replays_routes and self._setup.is_mixture,
        )
        prompts = Prompts(workload, first_row(arrangement, self._setup.groups))
        scheduler = self._scheduler(arrangement, prompts, sampler, slots, serving)
        before = scheduler.batch_ready if arrangement.collects_before_publish else None
        updater = WatchedUpdater(self._running.updater, before)
        parts = Parts(
            scheduler=scheduler,
            evaluator=None,
            engine=retrying,
            trainer=trainer,
            updater=updater,
            slots=slots,
            serving=serving,
            timeline=self._timeline,
            loop_lag=self.loop_lag,
            gpu_sharing=self._running.gpu_sharing,
        )
        return parts, updater

    def _scheduler(
        self, arrangement: Arrangement, prompts: Prompts, sampler: Sampler, slots: Slots, serving: ServingWeights
    ) -> Scheduler:
        return Scheduler(
            prompts=prompts,
            sampler=sampler,
            keep=keep_all,
            limits=Limits(
                groups_per_step=self._setup.groups,
                group_size=self._setup.group_size,
                max_staleness=arrangement.staleness,
                num_steps=NEVER,
            ),
            budgets=Budgets(max_failed_groups=1, max_filtered_groups=1, watchdog_timeout_s=WATCHDOG_S),
            slots=slots,
            serving=serving,
            timeline=self._timeline,
        )

    async def _fresh_weights(self) -> Weights:
        """Publish the trainer's weights under a new version, as those of step 0."""
        weights = Weights(version=self._version, step=0)
        self._version += 1
        await self._running.serve(weights)
        return weights

    async def _until_empty(self) -> None:
        """Wait until the engines are empty, at most ``EMPTY_S``: the next run must not share them with this one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EMPTY_S):
                while True:
                    loads = await self._running.load_probe.loads()
                    if not any(load.running or load.waiting for load in loads):
                        return
                    await asyncio.sleep(LOOK_EVERY_S)
        self._say(f"warning: the engines still have requests {EMPTY_S:g} s after these were aborted")

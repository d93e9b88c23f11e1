"""The run: the trainer is the clock, everything else keeps it supplied.

scheduler ──batch──▶ train ──▶ snapshot of the weights                 one turn of ``_Run.step``, on this task
    ▲                              └──▶ publish ──▶ report              beside the next turn, in the same task group
    └─────────────────────────────────────────┴──▶ evaluation

consumes      batches, evaluation reports
produces      one StepFacts per step; checkpoints; the saved model
waits for     a batch; the trainer; once trained the weight update before, and engines' log-probs for two seconds
              after that at most; the first evaluation, before the first step;
              where trainer and engines take turns on the same GPUs, every evaluation, and those turns
unblocked by  the scheduler, the trainer, the engines; each wait has a deadline of its own
on cancel     the scheduler's and the evaluation's requests are aborted
on crash      the training since the last checkpoint is lost

With turns nothing goes on beside training:

    batch, evaluation done ──▶ engines end every request ──▶ trainer's turn: train, checkpoint
        ▲                                                                    └──▶ update's turn: publish ──┐
        └─────────────────────── engines' turn: requests go on ◀───────────────────────────────────────────┘
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.errors import CheckpointFailed, plainly
from asyncrl.event_loop import loop_time
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.length_bias import LengthStats
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.evaluation import Evaluator
from asyncrl.pipeline.logprob_check import engine_logprobs, mean_difference
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.pipeline.weight_updates import WeightUpdates
from asyncrl.protocols import Checkpointer, GpuSharing, Trainer, WeightUpdater
from asyncrl.types import Batch, EvalReport, TrainReport

logger = logging.getLogger(__name__)

SCORING_S = 2.0
"""So long the engines may take to score, since they have the weights, even if training ends before: a measurement must
not hold up the update that follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How long the run is, and what happens when."""

    num_steps: int
    update_weights_interval: int
    eval_interval: int | None
    eval_before_train: bool
    temperature: float
    save_to: Path
    abort_for_updates: bool = False
    """End every request before an update and continue it behind the tokens that are there, instead of pausing it."""
    first_step: int = 0
    """Steps that the run which this one goes on from has done."""
    save_interval: int | None = None
    """A checkpoint after every so many steps; after the last one in any case."""
    save_beside: bool = True
    """Go on training while a checkpoint is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the run is made of.  ``scheduler`` and ``evaluator`` share ``slots`` and ``serving``."""

    scheduler: Scheduler
    evaluator: Evaluator | None
    engine: RetryingEngine
    trainer: Trainer
    updater: WeightUpdater
    slots: Slots
    serving: ServingWeights
    timeline: Timeline
    loop_lag: LoopLag
    checkpointer: Checkpointer | None = None
    """Without it there are no checkpoints."""
    gpu_sharing: GpuSharing | None = None
    """Without it trainer and engines have GPUs of their own.  It is the engines' turn when the run begins."""


async def train(parts: Parts, plan: RunPlan, report: Callable[[StepFacts], None]) -> None:
    """Train to the last step, handing each step's facts to ``report``, and save.

    When this returns, nothing is in flight.  Raises the named error that ended the run.
    """
    with plainly():
        async with asyncio.TaskGroup() as stages:
            run = _Run(parts, plan, stages, report)
            scheduling = stages.create_task(parts.scheduler.run(), name="scheduler")
            welcoming = stages.create_task(run.welcome_rejoined(), name="rejoined")
            for step in range(plan.first_step, plan.num_steps):
                await run.step(step)
            await run.reported()
            scheduling.cancel()
            welcoming.cancel()
            await run.save()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """What training on one batch was, and when by the event loop's clock."""

    report: TrainReport
    start_s: float
    stop_s: float
    logprob_diff: float | None = None
    """See StepFacts."""


class _Run:
    """The trainer's side of a run; lives as long as its task group."""

    def __init__(
        self, parts: Parts, plan: RunPlan, stages: asyncio.TaskGroup, report: Callable[[StepFacts], None]
    ) -> None:
        self._parts = parts
        self._plan = plan
        self._stages = stages
        self._report = report
        self._updates = WeightUpdates(
            updater=parts.updater,
            engine=parts.engine,
            serving=parts.serving,
            gpu_sharing=parts.gpu_sharing,
            timeline=parts.timeline,
            trained=plan.first_step,
            aborts=plan.abort_for_updates,
            look_again=parts.scheduler.look_again,
        )
        self._reporting: asyncio.Task[None] | None = None
        """Of the last step, which waits for its weight update."""
        self._evaluation: asyncio.Task[EvalReport] | None = None
        self._is_alarmed = False
        self._scores_are_late = False
        has_one_report = plan.num_steps - plan.first_step == 1 and plan.eval_interval is not None
        if self._first_evaluation_is_due() and not has_one_report:  # that of the pass after the single step
            self._evaluate()

    async def step(self, step: int) -> None:
        """Wait for a batch, train on it, have the weights published, evaluated and reported as planned.

        When this returns, the weights may still be on their way to the engines.
        """
        parts, start = self._parts, loop_time()
        logger.info("step %d: waiting for a batch", step)
        batch = await parts.scheduler.next_batch()
        waited = loop_time() - start
        parts.timeline.span("trainer", "wait for a batch", start, start + waited)
        if self._evaluation is not None and (step == 0 or parts.gpu_sharing is not None):
            await self._evaluation  # before the weights change for the first time, or before the engines' turn ends
            parts.timeline.span("trainer", "wait for the evaluation", start + waited, loop_time())
        await self._to_trainer()
        trained = await self._train(batch)
        await self.reported()
        late_update_s = loop_time() - trained.stop_s
        if late_update_s > 0:
            parts.timeline.span("trainer", "wait for the update before, or log-probs", trained.stop_s, loop_time())
        parts.scheduler.close_step()
        state = parts.scheduler.state() if self._save_is_due(step) else None
        saves_first = parts.gpu_sharing is not None  # later the optimizer is away
        checkpoint_s = await self._checkpoint(state) if state and saves_first else None
        update_wait_s = await self._begin_to_publish(step)
        if state and not saves_first:
            checkpoint_s = await self._checkpoint(state)
        evaluation = await self._evaluations(step)
        scheduler = parts.scheduler.stats()
        self._warn(scheduler.lengths)
        facts = StepFacts(
            batch=batch,
            report=trained.report,
            update=None,
            evaluation=evaluation,
            scheduler=scheduler,
            trainer_waited_s=waited,
            engines_idle_s=parts.slots.take_idle_s(),
            train_s=trained.stop_s - trained.start_s,
            late_update_s=late_update_s,
            step_s=loop_time() - start,
            loop_lag_ms=parts.loop_lag.take_max_ms(),
            logprob_diff=trained.logprob_diff,
            update_wait_s=update_wait_s,
            checkpoint_s=checkpoint_s,
        )
        self._reporting = self._stages.create_task(self._tell(facts), name=f"report-{step}")

    async def welcome_rejoined(self) -> None:
        """Have engines that were started again serve the trainer's weights, until cancelled."""
        await self._updates.welcome_rejoined()

    async def reported(self) -> None:
        """Return once everything of the steps so far is published and reported."""
        if self._reporting is not None:
            await self._reporting

    async def _tell(self, facts: StepFacts) -> None:
        """Report a step, when its weights have reached the engines."""
        update = await self._updates.published()
        scheduler = replace(facts.scheduler, weights=self._parts.serving.now)
        self._report(replace(facts, update=update, scheduler=scheduler))

    async def save(self) -> None:
        """Write the final weights, and see the last checkpoint written."""
        await self._to_trainer()
        start = loop_time()
        await self._parts.trainer.save(self._plan.save_to)
        if self._parts.checkpointer is not None:
            await self._parts.checkpointer.finish()
        self._parts.timeline.span("trainer", "save", start, loop_time())

    async def _to_trainer(self) -> None:
        """Where there are turns: it is the trainer's.  Requests in flight wait until the engines' next one."""
        if self._parts.gpu_sharing is None:
            return
        start = loop_time()
        await self._parts.engine.interrupt()
        await self._parts.gpu_sharing.acquire_for_training()
        self._parts.timeline.span("trainer", "take the GPUs", start, loop_time())

    # ---- checkpoints

    def _save_is_due(self, step: int) -> bool:
        if self._parts.checkpointer is None:
            return False
        interval = self._plan.save_interval
        return step == self._plan.num_steps - 1 or (interval is not None and (step + 1) % interval == 0)

    async def _checkpoint(self, state: RunState) -> float:
        """Seconds until training may go on; engines go on meanwhile, and the writing after it."""
        if self._parts.checkpointer is None:
            raise AssertionError("there is nobody to write checkpoints")
        start = loop_time()
        try:
            async with self._updates.trainer:
                await self._parts.checkpointer.begin(state.step, state.as_json())
                if not self._plan.save_beside:
                    await self._parts.checkpointer.finish()
        except CheckpointFailed:
            if state.step == self._plan.num_steps:  # nothing else would be left of the whole run
                await self._parts.trainer.save(self._plan.save_to)
            raise
        self._parts.timeline.span("trainer", f"checkpoint {state.step}", start, loop_time())
        logger.info("checkpoint of step %d: training waited %.3f s", state.step, loop_time() - start)
        return loop_time() - start

    def _warn(self, lengths: LengthStats) -> None:
        """Say once that long answers are lost more often than short ones."""
        if lengths.alarm and not self._is_alarmed:
            logger.warning(lengths.alarm)
        self._is_alarmed = lengths.alarm is not None

    # ---- training, and the same log-probs from the engine

    async def _train(self, batch: Batch) -> _Trained:
        """Train, while the engines score a few of the same tokens if they serve the weights that the trainer holds."""
        training = self._stages.create_task(self._train_alone(batch), name=f"train-{batch.step}")
        await self._updates.published()
        deadline = loop_time() + SCORING_S
        scoring = self._stages.create_task(self._engine_logprobs(batch), name=f"logprobs-{batch.step}")
        trained = await training
        await asyncio.wait([scoring], timeout=max(0.0, deadline - loop_time()))
        was_late, self._scores_are_late = self._scores_are_late, not scoring.done()
        if scoring.done():
            return replace(trained, logprob_diff=mean_difference(scoring.result(), trained.report.logprobs))
        scoring.cancel()  # its requests are aborted beside what comes next: an engine may be slow to hear of it
        if not was_late:
            logger.warning("step %d: no log-probs to compare with until the engines are faster again", batch.step)
        return trained

    async def _train_alone(self, batch: Batch) -> _Trained:
        async with self._updates.trainer:
            start = loop_time()
            report = await self._parts.trainer.train(batch)
            stop = loop_time()
            self._updates.trained = batch.step + 1
        num_tokens = sum(group.num_tokens for group in batch.groups)
        self._parts.timeline.span("trainer", f"step {batch.step}", start, stop, tokens=num_tokens)
        logger.info("step %d: trained on %d tokens, loss %.4g", batch.step, num_tokens, report.loss)
        return _Trained(report=report, start_s=start, stop_s=stop)

    async def _engine_logprobs(self, batch: Batch) -> dict[int, Sequence[float]]:
        """Nothing when the engines serve other weights than the trainer holds."""
        parts, serving = self._parts, self._parts.serving.now
        if serving.step != batch.step:
            return {}
        can_score = self._plan.temperature == 1.0 and parts.gpu_sharing is None
        scored = await engine_logprobs(batch, serving, parts.engine if can_score else None)
        return scored if parts.serving.now.step == batch.step else {}  # an engine that came may have brought newer ones

    # ---- weights

    def _publish_is_due(self, step: int) -> bool:
        last = step == self._plan.num_steps - 1
        wanted = self._plan.eval_interval is not None and self._parts.evaluator is not None
        return (step + 1) % self._plan.update_weights_interval == 0 or (last and wanted)

    async def _begin_to_publish(self, step: int) -> float | None:
        """Begin to publish the weights if that is due; return after the seconds that the trainer waited."""
        if self._publish_is_due(step):
            return await self._updates.begin_to_publish(self._stages, step)
        self._updates.skip()
        return None

    # ---- evaluation

    def _first_evaluation_is_due(self) -> bool:
        first = self._plan.first_step
        return self._eval_is_due(first - 1) if first else self._plan.eval_before_train

    def _eval_is_due(self, step: int) -> bool:
        return self._plan.eval_interval is not None and (step + 1) % self._plan.eval_interval == 0

    def _evaluate(self) -> None:
        if self._parts.evaluator is not None:
            self._evaluation = self._stages.create_task(self._parts.evaluator.run(), name="evaluation")

    async def _evaluations(self, step: int) -> EvalReport | None:
        """The report of a pass that is over; start a new pass if one is due.

        Training waits for a pass only at the end: the last step reports the final weights, so the step before it
        collects what is still running and starts nothing more.
        """
        steps_left = self._plan.num_steps - 1 - step
        if self._evaluation is not None and steps_left <= 1:
            await self._evaluation
        report = self._collect()
        if self._plan.eval_interval is None or steps_left == 1:
            return report
        if steps_left == 0 or self._eval_is_due(step):
            await self._updates.published()
        if steps_left == 0:
            self._evaluate()
            return await self._evaluation if self._evaluation is not None else report
        if self._eval_is_due(step):
            if self._evaluation is None:
                self._evaluate()
            else:
                logger.warning("step %d: the evaluation is skipped, the one before still runs", step)
        return report

    def _collect(self) -> EvalReport | None:
        if self._evaluation is None or not self._evaluation.done():
            return None
        report, self._evaluation = self._evaluation.result(), None
        logger.info("version %d on held-out prompts: %s", report.weights.version, dict(report.accuracy))
        return report

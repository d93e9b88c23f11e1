"""The run: the trainer sets the pace, and everything else keeps it supplied with batches.

scheduler ──batch──▶ train ──▶ snapshot of the weights                 one call of ``_Run.step``, on this task
    ▲                              └──▶ publish ──▶ report              during the next call, in the same task group
    └─────────────────────────────────────────┴──▶ evaluation

consumes      batches, evaluation reports
produces      one StepFacts per step; checkpoints; the saved model
waits for     a batch; the trainer; after training, the previous weight update, and the engines' log-probs for at most
              two seconds after that update; the first evaluation, before the first step trains;
              with time-shared GPUs, every evaluation and each change of the GPUs' holder
unblocked by  the scheduler, the trainer, the engines; each wait has its own deadline
on cancel     the scheduler's and the evaluation's requests are aborted
asked to end  a checkpoint of the steps so far is written instead of waiting for the next batch
on crash      the training since the last checkpoint is repeated, with the same batches if there is a journal
trainer lost  it starts again within the run (``pipeline/trainer_restarts``)

With time-shared GPUs nothing else runs during training:

    batch, evaluation done ──▶ engines end every request ──▶ GPUs to the trainer: train, checkpoint
        ▲                                                       └──▶ GPUs to the update: publish ──┐
        └──────────────── GPUs to the engines: requests resume ◀───────────────────────────────────┘
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.errors import (
    AsyncRLError,
    CheckpointFailed,
    DataError,
    LeaseLost,
    NonFiniteLoss,
    RewardOutage,
    SourceFailed,
    plainly,
)
from asyncrl.event_loop import Deadline, loop_time
from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.length_bias import LengthStats
from asyncrl.metrics.mismatch import mismatch_of
from asyncrl.pipeline.checkpoints import Checkpoints
from asyncrl.pipeline.logprob_check import (
    EngineProbes,
    Probed,
    differences_by_engine,
    engine_logprobs,
    mean_difference,
)
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.restartable import restartable
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.pipeline.weight_updates import WeightUpdates
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Batch, EvalReport, TrainReport

logger = logging.getLogger(__name__)

SCORING_S = 2.0
"""Upper bound on the engines' scoring time, counted from when they receive the weights.

The step waits for scores at most this long, even if training ends earlier, so that a measurement delays no update.
"""

EARLY_SAVE_S = 3600.0
"""Upper bound on the time for a checkpoint before an error ends the run: the trainer may be what hangs."""


async def train(
    parts: Parts, plan: RunPlan, report: Callable[[StepFacts], None], on_last_save: Callable[[], None] = lambda: None
) -> None:
    """Train to the last step, pass each step's facts to ``report``, and save the final weights.

    A run that is asked to end early writes a checkpoint instead.  ``on_last_save`` is called when all steps are trained
    and reported, before the final weights are saved.  Nothing is in flight when this returns.  Raises the
    named error that ended the run.
    """
    with plainly():
        async with TaskGroup() as stages:
            run = _Run(parts, plan, stages, report)
            scheduling = stages.create_task(parts.scheduler.run(), name="scheduler")
            welcoming = stages.create_task(run.welcome_rejoined(), name="rejoined")
            watching = stages.create_task(run.watch_trainer(), name="trainer")
            is_over = False
            for step in range(plan.first_step, plan.num_steps):
                if is_over := not await run.step(step):
                    break
            if is_over:
                await run.save_early()
            await run.reported()
            scheduling.cancel()
            welcoming.cancel()
            if not is_over:
                on_last_save()
                await run.save()
            watching.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The training of one batch, with start and end on the event loop's clock."""

    report: TrainReport
    start_s: float
    stop_s: float
    logprob_diff: float | None = None
    engine_logprob_diffs: Mapping[int, float] = field(default_factory=dict)
    surprise_ratio: float | None = None
    """See StepFacts for all three."""


def skipped(seconds: float) -> TrainReport:
    """Return the report of a batch that changed no weights."""
    return TrainReport(
        loss=math.nan,
        grad_norm=math.nan,
        clip_fraction=0.0,
        entropy=math.nan,
        learning_rate=0.0,
        seconds=seconds,
        logprobs=(),
        is_skipped=True,
    )


class _Run:
    """The steps of one run.  Lives as long as its task group."""

    def __init__(self, parts: Parts, plan: RunPlan, stages: TaskGroup, report: Callable[[StepFacts], None]) -> None:
        self._restarts, parts = restartable(parts, plan)
        self._parts = parts
        self._plan = plan
        self._stages = stages
        self._report = report
        self._weight_updates = WeightUpdates(
            updater=parts.updater,
            engine=parts.engine,
            serving=parts.serving,
            gpu_sharing=parts.gpu_sharing,
            timeline=parts.timeline,
            trained=plan.first_step,
            aborts=plan.abort_for_updates,
            on_published=parts.scheduler.note_weights,
        )
        self._checkpoints = (
            None
            if parts.checkpointer is None
            else Checkpoints(
                parts.checkpointer, plan.max_failed_saves, plan.first_step, on_complete=parts.scheduler.checkpointed
            )
        )
        self._reporting: asyncio.Task[None] | None = None
        """The task that reports the last step once its weight update has ended."""
        self._evaluation: asyncio.Task[EvalReport] | None = None
        self._is_alarmed = False
        self._skipped_in_a_row = 0
        self._scores_are_late = False
        self._probes = EngineProbes(parts.scorers, plan.vocab_size)
        self._trained = plan.first_step
        """Steps done."""
        self._saved_s = loop_time()
        parts.early_end.is_possible = parts.checkpointer is not None
        has_one_report = plan.num_steps - plan.first_step == 1 and plan.eval_interval is not None
        if self._first_evaluation_is_due() and not has_one_report:  # that report is of the pass after the only step
            self._evaluate()

    async def step(self, step: int) -> bool:
        """Wait for a batch, train on it, and start publishing, evaluation and reporting as planned.

        The weight update may still be in progress when this returns.  Returns False, with nothing done, if the run
        must end early.
        """
        parts, start = self._parts, loop_time()
        logger.info("step %d: waiting for a batch", step)
        if (batch := await self._next_batch(step)) is None:
            return False
        waited = loop_time() - start
        parts.timeline.span("trainer", "wait for a batch", start, start + waited)
        batch, hooks_s = await self._prepared(batch)
        if self._evaluation is not None and (step == 0 or parts.gpu_sharing is not None):
            await self._evaluated()  # the first weight change, or the loss of the GPUs, must not come before it ends
            parts.timeline.span("trainer", "wait for the evaluation", start + waited, loop_time())
        await self._to_trainer()
        trained = await self._train(batch)
        await self.reported()
        late_update_s = loop_time() - trained.stop_s
        if late_update_s > 0:
            parts.timeline.span("trainer", "wait for the update before, or log-probs", trained.stop_s, loop_time())
        parts.scheduler.close_step(is_skipped=trained.report.is_skipped)
        self._trained = step + 1
        state = await self._state(step) if self._save_is_due(step) else None
        saves_first = parts.gpu_sharing is not None  # the update offloads the optimizer
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
            num_engines=None if parts.num_serving is None else parts.num_serving(),
            num_slow_engines=None if parts.num_slow is None else parts.num_slow(),
            logprob_diff=trained.logprob_diff,
            engine_logprob_diffs=trained.engine_logprob_diffs,
            surprise_ratio=trained.surprise_ratio,
            update_wait_s=update_wait_s,
            hooks_s=hooks_s,
            checkpoint_s=checkpoint_s,
            num_trainer_restarts=None if self._restarts is None else self._restarts.num_restarts,
            without_trainer_s=None if self._restarts is None else self._restarts.away_s,
        )
        self._reporting = self._stages.create_task(self._tell(facts), name=f"report-{step}")
        return True

    async def _next_batch(self, step: int) -> Batch | None:
        """Wait for the batch of ``step``; None if the run must end early.

        Raises the error after which no further batch can come, once the steps so far are saved and reported.
        """
        try:
            return await self._parts.early_end.unless_asked(self._parts.scheduler.next_batch())
        except AsyncRLError as error:  # the trainer should be well
            await self._save_before(error)
            if isinstance(error, DataError) and step > self._plan.first_step:  # a second start may help: no ConfigError
                raise SourceFailed(str(error)) from error
            raise

    async def _prepared(self, batch: Batch) -> tuple[Batch, float | None]:
        """Return the batch as the user's hooks change it, and the seconds that they took; the accounts follow."""
        if self._parts.hooks is None:
            return batch, None
        start = loop_time()
        batch = await self._parts.hooks.prepared(batch)
        self._parts.scheduler.replace_batch(batch)
        self._parts.timeline.span("trainer", "hooks", start, loop_time())
        return batch, loop_time() - start

    async def welcome_rejoined(self) -> None:
        """Publish the trainer's weights to restarted engines, until cancelled."""
        await self._weight_updates.welcome_rejoined()

    async def watch_trainer(self) -> None:
        """Restart the trainer when it dies, until cancelled; return at once if the run ends with it."""
        if self._restarts is not None:
            await self._restarts.watch()

    async def reported(self) -> None:
        """Wait until all steps so far are published and reported."""
        if self._reporting is not None:
            await self._reporting

    async def _tell(self, facts: StepFacts) -> None:
        """Report a step after its weight update."""
        update = await self._weight_updates.published()
        mismatch = await mismatch_of(facts.batch, facts.report)
        scheduler = replace(facts.scheduler, weights=self._parts.serving.now)
        self._report(replace(facts, update=update, scheduler=scheduler, mismatch=mismatch))

    async def save(self) -> None:
        """Write the final weights and wait for the last checkpoint."""
        await self._to_trainer()
        start = loop_time()
        await self._parts.trainer.save(self._plan.save_to)
        if self._checkpoints is not None:
            await self._checkpoints.finish(must_succeed=True)
        self._parts.timeline.span("trainer", "save", start, loop_time())

    async def save_early(self) -> None:
        """Write a checkpoint of the steps so far, unless there is one, and wait until it is written."""
        if self._collect() is None and self._evaluation is not None:
            self._evaluation.cancel()
        if self._checkpoints is None:
            return
        await self._checkpoints.finish()
        if self._checkpoints.saved_step < self._trained:
            if self._parts.gpu_sharing is not None:
                await self.reported()  # the update must not lose the GPUs
            state = await self._state(self._trained - 1)
            await self._to_trainer()
            await self._checkpoint(state, must_succeed=True)
            await self._checkpoints.finish(must_succeed=True)
        if self._checkpoints.saved_step > self._plan.first_step:
            self._parts.early_end.saved_step = self._checkpoints.saved_step

    async def _save_before(self, end: AsyncRLError) -> None:
        """Write a checkpoint and report all steps before ``end`` ends the run; what fails or takes too long is not."""
        try:
            async with Deadline(EARLY_SAVE_S):
                await self.save_early()
        except (AsyncRLError, TimeoutError) as error:
            why = str(error) or f"it took more than {EARLY_SAVE_S:g} s"
            logger.warning("%s: the steps since the last checkpoint may be lost: %s", type(end).__name__, why)
        try:
            async with Deadline(EARLY_SAVE_S):
                await self.reported()
        except (AsyncRLError, TimeoutError) as error:
            logger.warning("%s: the last step is not reported: %s", type(end).__name__, error)

    async def _to_trainer(self) -> None:
        """Give time-shared GPUs to the trainer.  Interrupted requests resume when the engines hold the GPUs again."""
        if self._parts.gpu_sharing is None:
            return
        start = loop_time()
        await self._parts.engine.interrupt()
        await self._parts.gpu_sharing.acquire_for_training()
        self._parts.timeline.span("trainer", "take the GPUs", start, loop_time())

    # ---- checkpoints

    def _save_is_due(self, step: int) -> bool:
        if self._checkpoints is None:
            return False
        interval, interval_s = self._plan.save_interval, self._plan.save_interval_s
        return (
            step == self._plan.num_steps - 1
            or (interval is not None and (step + 1) % interval == 0)
            or (interval_s is not None and loop_time() - self._saved_s >= interval_s)
            or self._parts.early_end.is_asked
        )

    async def _state(self, step: int) -> RunState:
        """Return the state of the run after ``step``, with that of a user's data source at the same moment."""
        if self._parts.source is None:
            return self._parts.scheduler.begin_checkpoint()
        async with self._parts.source.saved(step + 1) as source:
            return self._parts.scheduler.begin_checkpoint(source)

    async def _checkpoint(self, state: RunState, *, must_succeed: bool = False) -> float:
        """Start a checkpoint and return the seconds that training waited.  Engines keep generating.

        With ``save_during_training``, the files are written after this returns.
        """
        if self._checkpoints is None:
            raise AssertionError("there is no checkpointer")
        start, is_last = loop_time(), state.step == self._plan.num_steps
        must_succeed, self._saved_s = must_succeed or is_last, start
        await self._parts.scheduler.recorded()  # a checkpoint without its place in the journal would lose groups
        try:
            async with self._weight_updates.trainer_lock:
                await self._checkpoints.begin(state, must_succeed=must_succeed)
                if not self._plan.save_during_training:
                    await self._checkpoints.finish(must_succeed=must_succeed)
        except (CheckpointFailed, LeaseLost):
            if is_last:  # without it, the whole run would be lost
                await self._parts.trainer.save(self._plan.save_to)
            raise
        self._parts.timeline.span("trainer", f"checkpoint {state.step}", start, loop_time())
        logger.info("checkpoint of step %d: training waited %.3f s", state.step, loop_time() - start)
        return loop_time() - start

    def _warn(self, lengths: LengthStats) -> None:
        """Log once, when it becomes true, that long answers are lost more often than short ones."""
        if lengths.alarm and not self._is_alarmed:
            logger.warning(lengths.alarm)
        self._is_alarmed = lengths.alarm is not None

    # ---- training and the log-prob check

    async def _train(self, batch: Batch) -> _Trained:
        """Train on ``batch`` while the engines score some of its tokens, if they serve the trainer's weights."""
        training = self._stages.create_task(self._train_alone(batch), name=f"train-{batch.step}")
        await self._weight_updates.published()
        deadline = loop_time() + SCORING_S
        scoring = self._stages.create_task(self._engine_logprobs(batch), name=f"logprobs-{batch.step}")
        probing = self._stages.create_task(self._probed(batch), name=f"probes-{batch.step}")
        trained = await training
        await asyncio.wait([scoring, probing], timeout=max(0.0, deadline - loop_time()))
        was_late, self._scores_are_late = self._scores_are_late, not scoring.done()
        if trained.report.is_skipped or not trained.report.has_trainer:
            scoring.cancel()
            probing.cancel()
            return trained
        if probing.done():
            apart = differences_by_engine(batch, probing.result().engines, trained.report.logprobs)
            trained = replace(trained, engine_logprob_diffs=apart, surprise_ratio=probing.result().prompts)
        probing.cancel()  # no effect on a task that is done
        if scoring.done():
            return replace(trained, logprob_diff=mean_difference(batch, scoring.result(), trained.report.logprobs))
        scoring.cancel()  # not awaited: its requests are aborted in the background, and an engine may be slow to answer
        if not was_late:
            logger.warning("step %d: no log-probs to compare with until the engines are faster again", batch.step)
        return trained

    async def _train_alone(self, batch: Batch) -> _Trained:
        async with self._weight_updates.trainer_lock:
            if self._checkpoints is not None:
                await self._checkpoints.check()
            start = loop_time()
            report = await self._trained_or_skipped(batch)
            stop = loop_time()
            self._weight_updates.trained_step = batch.step + 1
        num_tokens = sum(group.num_tokens for group in batch.groups)
        self._parts.timeline.span("trainer", f"step {batch.step}", start, stop, tokens=num_tokens)
        if repeated := int(report.metrics.get("train/repeated_passes", 0)):
            text = "step %d: %d passes ran out of memory and were repeated in smaller parts; lower max-tokens-per-gpu"
            logger.warning(text, batch.step, repeated)
        if not report.has_trainer:
            logger.info("step %d: %d tokens are generated", batch.step, num_tokens)
        elif not report.is_skipped:
            logger.info("step %d: trained on %d tokens, loss %.4g", batch.step, num_tokens, report.loss)
        return _Trained(report=report, start_s=start, stop_s=stop)

    async def _trained_or_skipped(self, batch: Batch) -> TrainReport:
        """Train on ``batch``.  A loss that is not finite skips it, within limits; the weights are then unchanged.

        The first step of a run is never skipped: a loss that is not finite there is no accident of a batch.
        """
        start = loop_time()
        try:
            report = await self._parts.trainer.train(batch)
        except NonFiniteLoss as error:
            if self._skipped_in_a_row >= self._plan.skip_nonfinite_steps or batch.step == 0:
                raise
            self._skipped_in_a_row += 1
            logger.warning(
                "step %d is skipped, its %d groups count as failed: %s (skip-nonfinite-steps: %d of %d in a row)",
                batch.step,
                len(batch.groups),
                error,
                self._skipped_in_a_row,
                self._plan.skip_nonfinite_steps,
            )
            return skipped(loop_time() - start)
        self._skipped_in_a_row = 0
        return report

    async def _engine_logprobs(self, batch: Batch) -> dict[int, Sequence[float]]:
        """Return the engines' log-probs; empty if they serve other weights than the trainer holds."""
        parts, serving = self._parts, self._parts.serving.now
        if serving.step != batch.step:
            return {}
        scored = await engine_logprobs(batch, serving, parts.engine if self._can_score() else None)
        return scored if parts.serving.now.step == batch.step else {}  # a restarted engine may have led to newer ones

    async def _probed(self, batch: Batch) -> Probed:
        """Return the scores of a probe; empty if engines serve other weights than the trainer holds."""
        serving = self._parts.serving
        if serving.now.step != batch.step or not self._can_score():
            return Probed()
        probed = await self._probes.score(batch)
        return probed if serving.now.step == batch.step else Probed()

    def _can_score(self) -> bool:
        """Whether engines can score during training, as the trainer does: at temperature 1, on GPUs of their own."""
        return self._plan.temperature == 1.0 and self._parts.gpu_sharing is None

    # ---- weights

    def _publish_is_due(self, step: int) -> bool:
        interval, is_last = self._plan.update_weights_interval, step == self._plan.num_steps - 1
        if interval is None:
            return False
        if is_last and self._plan.eval_interval is not None and self._parts.evaluator is not None:
            return True
        return (step + 1) % interval == 0 or (not is_last and self._parts.scheduler.needs_newer_weights)

    async def _begin_to_publish(self, step: int) -> float | None:
        """Start to publish the weights if that is due; return the seconds that the trainer waited, or None."""
        if self._publish_is_due(step):
            return await self._weight_updates.begin_to_publish(self._stages, step)
        self._weight_updates.skip()
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
        """Return the report of a finished pass, if any, and start a new pass if one is due.

        Training waits for a pass only at the end.  The last step reports the final weights, so the step before it waits
        for a running pass and starts none.
        """
        steps_left = self._plan.num_steps - 1 - step
        if steps_left <= 1:
            await self._evaluated()
        report = self._collect()
        if self._plan.eval_interval is None or steps_left == 1:
            return report
        if steps_left == 0 or self._eval_is_due(step):
            await self._weight_updates.published()
        if steps_left == 0:
            self._evaluate()
            await self._evaluated()
            return self._collect() or report
        if self._eval_is_due(step):
            if self._evaluation is None:
                self._evaluate()
            else:
                logger.warning("step %d: the evaluation is skipped, because the previous one still runs", step)
        return report

    async def _evaluated(self) -> None:
        """Wait for the running evaluation.  An early end of the run, or a long outage of its rewards, cancels it."""
        if (evaluation := self._evaluation) is None:
            return
        over = asyncio.Event()
        evaluation.add_done_callback(lambda _: over.set())
        try:
            await self._parts.early_end.unless_asked(self._parts.scheduler.outlast(over))
        except RewardOutage as error:
            logger.warning("the evaluation is given up: %s", error)
        if not over.is_set():
            evaluation.cancel()
            self._evaluation = None

    def _collect(self) -> EvalReport | None:
        if self._evaluation is None or not self._evaluation.done():
            return None
        report, self._evaluation = self._evaluation.result(), None
        self._parts.scheduler.note_evaluation(report.weights)
        logger.info("version %d on held-out prompts: %s", report.weights.version, dict(report.accuracy))
        return report

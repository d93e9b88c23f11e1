"""The real pipeline around modelled engines, on the virtual clock."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.metrics.facts import StepFacts
from asyncrl.metrics.loop_lag import LoopLag
from asyncrl.metrics.timeline import NoTimeline, Timeline
from asyncrl.pipeline.parts import Parts, RunPlan
from asyncrl.pipeline.run import train
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Budgets
from asyncrl.pipeline.scheduling.group_buffer import StalenessPolicy
from asyncrl.pipeline.scheduling.scheduler import Scheduler
from asyncrl.sim.clock import run_virtually
from asyncrl.sim.model.costs import Costs
from asyncrl.sim.model.fleet import Fleet
from asyncrl.sim.model.modelled_trainer import ModelledTrainer, ModelledUpdater
from asyncrl.sim.model.result import Mark, SimulationResult, outcome
from asyncrl.sim.model.workload import NoText, NumberedPrompts, Workload, no_reward
from asyncrl.types import SamplingParams, Weights

_NEVER = 10**9
"""A budget, or a deadline in seconds, that is never reached: the model neither stalls nor gives up."""
_RETRIES = 20
"""Attempts after the first; a modelled engine comes back after ``Failures.restart_s``."""
_NOT_PROBED = 0.5
"""A temperature other than 1, at which the pipeline does not ask engines to score answers."""


class Enough(Exception):
    """Raised by ``report`` to end a simulation.  The result then covers the steps until there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of generation, training and updates: flags of a run, and two schedules of others for comparison."""

    staleness: int
    interval: int
    stale: Literal["wait", "mask", "drop"] = "wait"
    update_mode: Literal["in_place", "retract", "abort"] = "in_place"
    collects_before_publish: bool = False
    """Publish only once the next batch is complete: slime's train_async keeps updates out of generation in this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One simulated run."""

    schedule: Schedule
    costs: Costs
    workload: Workload
    gpus: int
    rollout_gpus: int
    gpus_per_engine: int
    slots_per_engine: int
    groups_per_step: int
    group_size: int
    steps: int
    """Steps measured."""
    warm_up: int
    """Steps before the measured ones."""
    over_sampling: int | None = None
    buffer_size: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rollout_gpus < self.gpus:
            raise ValueError(f"rollout_gpus must be 1 to {self.gpus - 1}, got {self.rollout_gpus}")
        if self.rollout_gpus % self.gpus_per_engine:
            raise ValueError(
                f"rollout_gpus must be a multiple of gpus_per_engine={self.gpus_per_engine}, got {self.rollout_gpus}"
            )
        needed = self.workload.prompt_tokens + self.workload.lengths.cut
        if needed > self.costs.engine.kv_tokens:
            raise ValueError(
                f"an answer may need {needed} tokens of KV cache, an engine has {self.costs.engine.kv_tokens}"
            )

    @property
    def num_engines(self) -> int:
        """Number of rollout engines."""
        return self.rollout_gpus // self.gpus_per_engine

    @property
    def num_steps(self) -> int:
        """Warm-up and measured steps, plus ``staleness + 1``: near the end of a run admission is held back."""
        return self.warm_up + self.steps + self.schedule.staleness + 1


def simulate(
    setting: Setting, timeline: Timeline | None = None, report: Callable[[StepFacts], None] | None = None
) -> SimulationResult:
    """Run the setting to its end.  Deterministic: the same setting gives the same result.

    ``timeline`` and ``report`` receive the same calls as in a real run, on the virtual clock and with units for tokens.
    ``report`` may raise Enough.
    """
    marks, _ = run_virtually(_run(setting, timeline or NoTimeline(), report or _unreported))
    return outcome(
        marks[setting.warm_up : setting.warm_up + setting.steps + 1],
        grain=setting.workload.grain,
        num_engines=setting.num_engines,
        batch=min(setting.slots_per_engine, setting.costs.engine.max_running),
    )


async def _run(setting: Setting, timeline: Timeline, report: Callable[[StepFacts], None]) -> list[Mark]:
    """Run the pipeline; returns a mark at the start and one after each step."""
    serving = ServingWeights(Weights(version=0, step=0))
    fleet = Fleet(setting.costs, setting.workload, setting.num_engines, serving.now)
    trainer = ModelledTrainer(setting.costs, setting.gpus - setting.rollout_gpus, setting.workload.grain, fleet)
    clock = asyncio.get_running_loop().time
    marks = [Mark()]

    def note(facts: StepFacts) -> None:
        marks.append(Mark.at(clock(), facts, fleet.work(), trainer.busy_s))
        report(facts)

    fleet.start_failing(setting.workload.seed)
    with contextlib.suppress(Enough):
        await train(_parts(setting, fleet, trainer, serving, timeline), _plan(setting), note)
    return marks


def _unreported(facts: StepFacts) -> None:
    pass


def _parts(
    setting: Setting, fleet: Fleet, trainer: ModelledTrainer, serving: ServingWeights, timeline: Timeline
) -> Parts:
    slots = Slots(setting.num_engines * setting.slots_per_engine)
    engine = RetryingEngine(fleet, _RETRIES, lambda: serving.now)
    sampler = Sampler(
        engine=engine,
        reward=no_reward,
        reward_timeout_s=_NEVER,
        tokenizer=NoText(),
        sampling=_sampling(setting.workload),
        slots=slots,
        serving=serving,
        timeline=timeline,
        seed=setting.workload.seed,
    )
    scheduler = _scheduler(setting, sampler, slots, serving, timeline)
    before = _before_publish(setting, scheduler)
    recompute = setting.schedule.update_mode == "retract"
    return Parts(
        scheduler=scheduler,
        evaluator=None,
        engine=engine,
        trainer=trainer,
        updater=ModelledUpdater(fleet, setting.costs.update, recompute=recompute, before=before),
        slots=slots,
        serving=serving,
        timeline=timeline,
        loop_lag=LoopLag(),
    )


def _scheduler(
    setting: Setting, sampler: Sampler, slots: Slots, serving: ServingWeights, timeline: Timeline
) -> Scheduler:
    return Scheduler(
        prompts=NumberedPrompts(setting.workload.prompt_units),
        sampler=sampler,
        keep=setting.workload.keep,
        limits=Limits(
            groups_per_step=setting.groups_per_step,
            group_size=setting.group_size,
            max_staleness=setting.schedule.staleness,
            num_steps=setting.num_steps,
            over_sampling=setting.over_sampling,
            buffer_size=setting.buffer_size,
        ),
        policy=StalenessPolicy(stale=setting.schedule.stale),
        budgets=Budgets(max_failed_groups=_NEVER, max_filtered_groups=_NEVER, watchdog_timeout_s=_NEVER),
        slots=slots,
        serving=serving,
        timeline=timeline,
    )


def _before_publish(setting: Setting, scheduler: Scheduler) -> Callable[[], Awaitable[object]] | None:
    """The wait of ``collects_before_publish`` before a snapshot.  The last step has no next batch and does not wait."""
    updates_left = setting.num_steps // setting.schedule.interval

    async def next_batch_is_there() -> None:
        nonlocal updates_left
        updates_left -= 1
        if updates_left:
            await scheduler.batch_ready()

    return next_batch_is_there if setting.schedule.collects_before_publish else None


def _sampling(workload: Workload) -> SamplingParams:
    return SamplingParams(temperature=_NOT_PROBED, top_p=1.0, top_k=-1, max_new_tokens=workload.cut_units)


def _plan(setting: Setting) -> RunPlan:
    return RunPlan(
        num_steps=setting.num_steps,
        update_weights_interval=setting.schedule.interval,
        eval_interval=None,
        eval_before_train=False,
        temperature=_NOT_PROBED,
        save_to=Path("unused"),
        abort_for_updates=setting.schedule.update_mode == "abort",
    )

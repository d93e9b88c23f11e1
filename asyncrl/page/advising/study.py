"""The study of a run: calibrate the simulator on it, replay it, and search for better settings."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.errors import DataError
from asyncrl.page.advising.advice import Advice, Replay, Simulated
from asyncrl.page.advising.job import DEADLINE_S
from asyncrl.page.advising.stretch import acceptance_of, lengths_of, prompt_tokens_of, stretch_of
from asyncrl.sim.calibration.calibrate import fit
from asyncrl.sim.calibration.fleet import fit_fleet
from asyncrl.sim.calibration.measured import MeasuredRun
from asyncrl.sim.calibration.replay import Comparison, replay_run
from asyncrl.sim.model.costs import Costs
from asyncrl.sim.model.lengths import Drawn, Observed
from asyncrl.sim.model.result import SimulationResult
from asyncrl.sim.model.workload import Workload
from asyncrl.sim.model.world import Setting, simulate
from asyncrl.sim.search.advice import advice
from asyncrl.sim.search.options import costs_of
from asyncrl.sim.search.policies import SchedulingPolicy, policies
from asyncrl.sim.search.search import Choice, Grid, SearchResult, search

_MOST_SPLITS = 9
_UNLIMITED = 10**9
_LENGTHS = 4096
"""Quantiles that stand for the lengths of the answers."""
_RUNS_PER_POLICY = 8
"""Short runs that the search of a policy takes, about."""
_FINALISTS = 3
_SAFE = 0.6
"""Share of the deadline that a plan may need by its estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a search."""

    short_steps: int
    steps: int
    seeds: int
    stalenesses: tuple[int, ...]

    def in_cycles(self, interval: int) -> "Plan":
        """The same with whole cycles of ``interval`` steps: a part of a cycle would be too fast or too slow."""
        whole = [-(-steps // interval) * interval for steps in (self.short_steps, self.steps)]
        return replace(self, short_steps=whole[0], steps=whole[1])

    def samples(self, per_step: int) -> int:
        """Estimate the samples to simulate."""
        total = 0
        for staleness in self.stalenesses:
            more = 6 + 3 * staleness + 1  # warm-up and end
            total += _RUNS_PER_POLICY * (self.short_steps + more) + _FINALISTS * self.seeds * (self.steps + more)
        return total * per_step


PLANS = (
    Plan(short_steps=12, steps=32, seeds=2, stalenesses=(0, 1, 2, 4, 8)),
    Plan(short_steps=8, steps=16, seeds=1, stalenesses=(0, 1, 2, 4, 8)),
    Plan(short_steps=4, steps=8, seeds=1, stalenesses=(0, 1, 2, 4)),
)
_INTERVALS = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A calibration and how well it replays the run."""

    costs: Costs
    seen: Comparison
    sample_error: float
    step_error: float
    seconds: float
    """Seconds of processor time that the replay took: those of the clock would count other programs."""


def study(
    timeline: Path,
    settings: Mapping[str, Any],
    pool: Executor,
    num_processes: int,
    tell: Callable[[str], None],
    plans: Sequence[Plan] = PLANS,
) -> Advice:
    """Return the advice; ``tell`` gets the progress in words.  Raises DataError."""
    began = time.time()
    tell("Reading the newest steps of the run.")
    run = stretch_of(timeline, settings)
    prompt_tokens, is_measured = prompt_tokens_of(timeline.parent)
    tell(f"Fitting the simulator to {len(run.samples):,} samples of {len(run.steps)} steps, and replaying these.")
    model = best_model(run, prompt_tokens)
    _check_engines(run, model.seen.setting)
    base = _base(run, model)
    plan = _plan(base, model, num_processes, plans)
    found = _search(run, base, plan, pool, tell)
    now = pool.submit(simulate, replace(base, steps=plan.steps)).result()
    return Advice(
        replay=_replayed(model, run, prompt_tokens, is_measured),
        now=_row("this run's setting", base, now, now),
        rows=[_row(name, each.setting, each.outcome, now) for name, each in found.items()],
        lines=[*_against_now(base, now, found), *advice(found)],
        split=_about_splits(base),
        computed=time.time(),
        seconds=time.time() - began,
    )


def best_model(run: MeasuredRun, prompt_tokens: int) -> Model:
    """Return the calibration that replays the run best.  Raises DataError."""
    config = run.config
    trainer_gpus = config["actor-num-nodes"] * config["actor-num-gpus-per-node"]
    num_engines = config.get("rollout-num-gpus", 1) // config["rollout-num-gpus-per-engine"]
    fitted: list[tuple[Costs, float, float]] = []
    if num_engines == trainer_gpus == 1:
        shared = fit(run, prompt_tokens)
        fitted.append((costs_of(shared.tables()), shared.sample_error, shared.step_error))
    try:
        fleet = fit_fleet(run, prompt_tokens, num_engines=num_engines, trainer_gpus=trainer_gpus)
        fitted.append((fleet.costs, fleet.sample_error, fleet.step_error))
    except DataError:
        if not fitted:
            raise
    return min((_model(run, prompt_tokens, *each) for each in fitted), key=lambda model: abs(model.seen.error))


def _model(run: MeasuredRun, prompt_tokens: int, costs: Costs, sample_error: float, step_error: float) -> Model:
    began = time.process_time()
    seen = replay_run(run, costs, prompt_tokens)
    seconds = time.process_time() - began
    return Model(costs=costs, seen=seen, sample_error=sample_error, step_error=step_error, seconds=seconds)


def _check_engines(run: MeasuredRun, setting: Setting) -> None:
    """Raise DataError if an engine was away."""
    serving = min((row.get("engines/serving", setting.num_engines) for row in run.rows), default=0)
    if serving < setting.num_engines:
        text = f"only {serving:.0f} of {setting.num_engines} engines served in some of the newest steps"
        raise DataError(f"{text}: a run that is disturbed tells too little about others")


def _base(run: MeasuredRun, model: Model) -> Setting:
    """Return the run's setting with lengths drawn from its answers, so that seeds differ."""
    setting, lengths = model.seen.setting, lengths_of(run)
    quantiles = [lengths[place * len(lengths) // _LENGTHS] for place in range(_LENGTHS)]
    mean = sum(lengths) / len(lengths)
    workload = Workload(
        lengths=Drawn(shape=Observed(sorted_tokens=tuple(quantiles)), cut=setting.workload.lengths.cut),
        prompt_tokens=setting.workload.prompt_tokens,
        grain=max(1, round(mean / 100)),
        rejected=1 - acceptance_of(run),
    )
    engine = replace(model.costs.engine, max_running=_UNLIMITED)
    return replace(setting, workload=workload, costs=replace(model.costs, engine=engine), warm_up=6)


def _plan(base: Setting, model: Model, num_processes: int, plans: Sequence[Plan]) -> Plan:
    """Return the largest search that ends in time.  Raises DataError if none does."""
    per_step = base.groups_per_step * base.group_size
    replayed = model.seen.setting.num_steps * per_step
    plans = [plan.in_cycles(math.lcm(base.schedule.interval, *_INTERVALS)) for plan in plans]
    needed = [model.seconds / replayed * plan.samples(per_step) / num_processes for plan in plans]
    for plan, seconds in zip(plans, needed, strict=True):
        if seconds <= _SAFE * DEADLINE_S:
            return plan
    raise DataError(
        f"a step has {per_step:,} samples, so the search would take about {needed[-1] / 60:.0f} minutes here; "
        "run `asyncrl simulate --lengths RUN_DIR` on a machine with more cores"
    )


def _search(
    run: MeasuredRun, base: Setting, plan: Plan, pool: Executor, tell: Callable[[str], None]
) -> Mapping[str, SearchResult]:
    grid = Grid(rollout_gpus=_splits(base, run.config), slots_per_engine=_slots(base))
    start = Choice(grid.rollout_gpus.index(base.rollout_gpus), grid.slots_per_engine.index(base.slots_per_engine), 0)
    num_done = 0

    def tick(name: str, left: int) -> None:
        nonlocal num_done
        num_done += 1
        tell(f"Simulating other settings: {num_done} runs done, at least {left} to go; the last one was {name}.")

    return search(
        _wanted(base, plan).values(),
        grid,
        start,
        replace(base, steps=plan.steps),
        short_steps=plan.short_steps,
        seeds=range(plan.seeds),
        pool=pool,
        tick=tick,
    )


def _wanted(base: Setting, plan: Plan) -> Mapping[str, SchedulingPolicy]:
    """Return the policies to compare.  Flags can select them, and the run's own staleness is among them."""
    own = base.schedule
    stalenesses = sorted({*plan.stalenesses, own.staleness} - {0})
    masked = [own.staleness] if own.stale == "mask" and own.staleness else []
    intervals = sorted({*_INTERVALS, own.interval})
    return {name: each for name, each in policies(stalenesses, masked, intervals).items() if each.is_ours}


def _splits(base: Setting, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return numbers of GPUs for rollout: whole engines, and whole copies of the model for the trainer."""
    sizes = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    copy = 1
    for name in sizes:
        copy *= int(config.get(name, 1))
    possible = [
        gpus
        for gpus in range(base.gpus_per_engine, base.gpus, base.gpus_per_engine)
        if gpus == base.rollout_gpus or (base.gpus - gpus) % copy == 0
    ]
    every = -(-len(possible) // _MOST_SPLITS)
    own = possible.index(base.rollout_gpus)
    return tuple(gpus for place, gpus in enumerate(possible) if (place - own) % every == 0)


def _slots(base: Setting) -> tuple[int, ...]:
    own = base.slots_per_engine
    return tuple(sorted({max(1, own // 2), own, 2 * own}))


def _replayed(model: Model, run: MeasuredRun, prompt_tokens: int, is_measured: bool) -> Replay:
    seen = model.seen
    return Replay(
        error=seen.error,
        num_steps=seen.num_steps,
        stretch=len(run.steps),
        measured_s=seen.measured_s,
        simulated_s=seen.simulated_s,
        measured_median_s=seen.measured_median_s,
        simulated_median_s=seen.simulated_median_s,
        sample_error=model.sample_error,
        step_error=model.step_error,
        prompt_tokens=prompt_tokens,
        is_prompt_measured=is_measured,
    )


def _row(name: str, setting: Setting, result: SimulationResult, now: SimulationResult) -> Simulated:
    return Simulated(
        name=name,
        staleness=setting.schedule.staleness,
        interval=setting.schedule.interval,
        slots=setting.slots_per_engine,
        rollout_gpus=setting.rollout_gpus,
        trainer_gpus=setting.gpus - setting.rollout_gpus,
        trained_per_s=result.trained_per_s,
        times_now=result.trained_per_s / now.trained_per_s,
        step_s=result.step_s,
        trainer_idle=result.trainer_idle,
        slots_filled=result.slots_filled,
        lag_mean=result.lag_mean,
        lag_max=result.lag_max,
        masked=result.masked,
    )


def _against_now(base: Setting, now: SimulationResult, found: Mapping[str, SearchResult]) -> Iterator[str]:
    """Yield a sentence that compares the run's own setting with the best one."""
    best = max(found.values(), key=lambda each: each.outcome.trained_per_s)
    gain = best.outcome.trained_per_s / now.trained_per_s - 1
    own = f"S={base.schedule.staleness}, k={base.schedule.interval}, N={base.slots_per_engine}"
    yield (
        f"With this run's setting ({own}), the model trains {now.trained_per_s:,.0f} tokens per second; "
        f"the fastest setting of the table trains {best.outcome.trained_per_s:,.0f} ({gain:+.0%})"
    )


def _about_splits(base: Setting) -> str:
    if base.gpus == 2:
        return "There are two devices, one for the trainer and one for an engine, so no other split exists."
    return "The model assumes that the trainer becomes faster in proportion to its GPUs."

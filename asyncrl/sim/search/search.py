"""Each policy at its own best: which split of the GPUs, how many slots, which update interval.

A short run for each candidate, neighbours of the best one next, until none is better; then long runs, with other
seeds, of the best few.  Best is who puts most tokens into batches; only under ``mask`` are some of them left out of the
loss.  Runs are independent and go to as many processes as there are cores.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass, field, replace

from asyncrl.sim.model.result import SimulationResult, mean
from asyncrl.sim.model.world import Setting, simulate
from asyncrl.sim.search.policies import SchedulingPolicy

_FINALISTS = 3
"""Candidates of each policy that get long runs: short ones are right to some 3 %, and the best lie closer together."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Places in a ``Grid``: what a search turns."""

    split: int
    slots: int
    schedule: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What may be chosen, in order."""

    rollout_gpus: tuple[int, ...]
    slots_per_engine: tuple[int, ...]

    def neighbours(self, choice: Choice, schedules: int) -> Iterable[Choice]:
        """One step in one direction."""
        for split, slots, schedule in ((-1, 0, 0), (1, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, -1), (0, 0, 1)):
            near = Choice(choice.split + split, choice.slots + slots, choice.schedule + schedule)
            sizes = (len(self.rollout_gpus), len(self.slots_per_engine), schedules)
            if all(
                0 <= place < size for place, size in zip((near.split, near.slots, near.schedule), sizes, strict=True)
            ):
                yield near

    def apply(self, choice: Choice, policy: SchedulingPolicy, to: Setting) -> Setting:
        """``to`` with the choice made."""
        return replace(
            to,
            schedule=policy.schedules[choice.schedule],
            rollout_gpus=self.rollout_gpus[choice.split],
            slots_per_engine=self.slots_per_engine[choice.slots],
        )


@dataclass(slots=True, kw_only=True)
class _Climb:
    """One policy on its way up."""

    policy: SchedulingPolicy
    best: Choice
    seen: dict[Choice, SimulationResult] = field(default_factory=dict)

    def next(self, grid: Grid) -> list[Choice]:
        """What to look at before the best can be believed."""
        around = (self.best, *grid.neighbours(self.best, len(self.policy.schedules)))
        return [choice for choice in around if choice not in self.seen]

    def note(self, choice: Choice, result: SimulationResult) -> None:
        """A run is done."""
        self.seen[choice] = result
        self.best = self.finalists()[0]

    def finalists(self) -> list[Choice]:
        """The best so far, best first."""
        return sorted(self.seen, key=lambda seen: -self.seen[seen].in_batches_per_s)[:_FINALISTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best of a policy."""

    policy: SchedulingPolicy
    setting: Setting
    outcome: SimulationResult
    """Mean over the seeds."""
    trained_per_s: tuple[float, ...]
    """Of each seed."""
    tried: tuple[tuple[Setting, SimulationResult], ...]
    """All short runs."""

    @property
    def spread(self) -> float:
        """Largest minus smallest rate over the seeds, as a share of the mean."""
        return (max(self.trained_per_s) - min(self.trained_per_s)) / self.outcome.trained_per_s


def search(
    policies: Iterable[SchedulingPolicy],
    grid: Grid,
    start: Choice,
    base: Setting,
    *,
    short_steps: int,
    seeds: Sequence[int],
    pool: Executor,
    tick: Callable[[str, int], None],
) -> Mapping[str, SearchResult]:
    """The best of each policy.  ``base`` gives everything else, and the length of the final runs.

    ``tick`` hears what was run and how many runs are known to remain.
    """
    climbs = [_Climb(policy=policy, best=replace(start, schedule=0)) for policy in policies]
    short = replace(base, steps=short_steps)
    while wanted := [(climb, choice) for climb in climbs for choice in climb.next(grid)]:
        settings = [_settled(grid.apply(choice, climb.policy, short)) for climb, choice in wanted]
        names = [
            f"{climb.policy.name}: {describe(setting)}" for (climb, _), setting in zip(wanted, settings, strict=True)
        ]
        for (climb, choice), result in zip(wanted, _all(settings, names, pool, tick), strict=True):
            climb.note(choice, result)
    finals = [(climb, choice, seed) for climb in climbs for choice in climb.finalists() for seed in seeds]
    settings = [_seeded(_settled(grid.apply(choice, climb.policy, base)), seed) for climb, choice, seed in finals]
    names = [
        f"{climb.policy.name}: {describe(setting)}" for (climb, _, _), setting in zip(finals, settings, strict=True)
    ]
    runs: dict[tuple[str, Choice], list[tuple[Setting, SimulationResult]]] = {}
    for (climb, choice, _), setting, result in zip(finals, settings, _all(settings, names, pool, tick), strict=True):
        runs.setdefault((climb.policy.name, choice), []).append((setting, result))
    return {climb.policy.name: _found(climb, grid, runs, short) for climb in climbs}


def describe(setting: Setting) -> str:
    """What was chosen, in a few words."""
    training = setting.gpus - setting.rollout_gpus
    return f"{setting.rollout_gpus}+{training} GPUs, N={setting.slots_per_engine}, k={setting.schedule.interval}"


def _found(
    climb: _Climb, grid: Grid, runs: Mapping[tuple[str, Choice], list[tuple[Setting, SimulationResult]]], short: Setting
) -> SearchResult:
    """The finalist with the best mean."""
    candidates = [runs[climb.policy.name, choice] for choice in climb.finalists()]
    best = max(candidates, key=lambda tried: mean([result for _, result in tried]).in_batches_per_s)
    return SearchResult(
        policy=climb.policy,
        setting=best[0][0],
        outcome=mean([result for _, result in best]),
        trained_per_s=tuple(result.trained_per_s for _, result in best),
        tried=tuple((grid.apply(choice, climb.policy, short), result) for choice, result in climb.seen.items()),
    )


def _settled(setting: Setting) -> Setting:
    """Warm-up until the oldest group in flight started in the steady state: the bound's worth of steps, twice."""
    return replace(setting, warm_up=setting.warm_up + 2 * setting.schedule.staleness)


def _seeded(setting: Setting, seed: int) -> Setting:
    return replace(setting, workload=setting.workload.with_seed(seed))


def _all(
    settings: Sequence[Setting], names: Sequence[str], pool: Executor, tick: Callable[[str, int], None]
) -> list[SimulationResult]:
    running = {pool.submit(simulate, setting): name for setting, name in zip(settings, names, strict=True)}
    for left, done in enumerate(as_completed(running)):
        tick(running[done], len(running) - left - 1)
    return [future.result() for future in running]

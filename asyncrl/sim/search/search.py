"""A search for each policy's best setting: split of the GPUs, number of slots, update interval.

Each candidate gets a short run, then the neighbours of the best one, until none is better.  The best few then get long
runs with other seeds.  The best setting puts the most tokens per second into batches; only ``mask`` leaves some of
them out of the loss.  Runs are independent and are spread over as many processes as there are cores.
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
    """Indices into a ``Grid`` and into a policy's schedules."""

    split: int
    slots: int
    schedule: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values to choose from, in order."""

    rollout_gpus: tuple[int, ...]
    slots_per_engine: tuple[int, ...]

    def neighbours(self, choice: Choice, schedules: int) -> Iterable[Choice]:
        """Choices one step away from ``choice`` in one direction, among ``schedules`` schedules."""
        for split, slots, schedule in ((-1, 0, 0), (1, 0, 0), (0, -1, 0), (0, 1, 0), (0, 0, -1), (0, 0, 1)):
            near = Choice(choice.split + split, choice.slots + slots, choice.schedule + schedule)
            sizes = (len(self.rollout_gpus), len(self.slots_per_engine), schedules)
            if all(
                0 <= place < size for place, size in zip((near.split, near.slots, near.schedule), sizes, strict=True)
            ):
                yield near

    def apply(self, choice: Choice, policy: SchedulingPolicy, to: Setting) -> Setting:
        """``to`` with the values of the choice."""
        return replace(
            to,
            schedule=policy.schedules[choice.schedule],
            rollout_gpus=self.rollout_gpus[choice.split],
            slots_per_engine=self.slots_per_engine[choice.slots],
        )


@dataclass(slots=True, kw_only=True)
class _Climb:
    """The hill climbing of one policy."""

    policy: SchedulingPolicy
    best: Choice
    seen: dict[Choice, SimulationResult] = field(default_factory=dict)

    def next(self, grid: Grid) -> list[Choice]:
        """Choices still to run before the best one is known to be a local maximum."""
        around = (self.best, *grid.neighbours(self.best, len(self.policy.schedules)))
        return [choice for choice in around if choice not in self.seen]

    def note(self, choice: Choice, result: SimulationResult) -> None:
        """Record the result of a run."""
        self.seen[choice] = result
        self.best = self.finalists()[0]

    def finalists(self) -> list[Choice]:
        """The best choices so far, best first."""
        return sorted(self.seen, key=lambda seen: -self.seen[seen].in_batches_per_s)[:_FINALISTS]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best setting of a policy."""

    policy: SchedulingPolicy
    setting: Setting
    outcome: SimulationResult
    """Mean over the seeds."""
    trained_per_s: tuple[float, ...]
    """Tokens per second that reached a loss, for each seed."""
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
    """Find the best setting of each policy.  ``base`` gives all other values and the length of the final runs.

    ``tick`` is called after each run with its name and the number of runs known to remain.
    """
    climbs = [_Climb(policy=policy, best=replace(start, schedule=0)) for policy in policies]
    short = replace(base, steps=short_steps)
    while wanted := [(climb, choice) for climb in climbs for choice in climb.next(grid)]:
        settings = [_warmed_up(grid.apply(choice, climb.policy, short)) for climb, choice in wanted]
        names = [
            f"{climb.policy.name}: {describe(setting)}" for (climb, _), setting in zip(wanted, settings, strict=True)
        ]
        for (climb, choice), result in zip(wanted, _all(settings, names, pool, tick), strict=True):
            climb.note(choice, result)
    finals = [(climb, choice, seed) for climb in climbs for choice in climb.finalists() for seed in seeds]
    settings = [_seeded(_warmed_up(grid.apply(choice, climb.policy, base)), seed) for climb, choice, seed in finals]
    names = [
        f"{climb.policy.name}: {describe(setting)}" for (climb, _, _), setting in zip(finals, settings, strict=True)
    ]
    runs: dict[tuple[str, Choice], list[tuple[Setting, SimulationResult]]] = {}
    for (climb, choice, _), setting, result in zip(finals, settings, _all(settings, names, pool, tick), strict=True):
        runs.setdefault((climb.policy.name, choice), []).append((setting, result))
    return {climb.policy.name: _found(climb, grid, runs, short) for climb in climbs}


def describe(setting: Setting) -> str:
    """The chosen values of a setting, as short text."""
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


def _warmed_up(setting: Setting) -> Setting:
    """``setting`` with a longer warm-up of 2 · staleness steps: the oldest group then started in the steady state."""
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

"""The compared arrangements, and the record of a run of one."""

from dataclasses import dataclass, field, replace

from asyncrl.metrics.facts import StepFacts, TokenCounts
from asyncrl.metrics.intervals import seconds, union, without
from asyncrl.metrics.reporter import row, trained_lags
from benchmarks.sync_vs_async.figures import ArrangementRun, StepFigures
from benchmarks.sync_vs_async.watch import WatchedEngine, WatchedTrainer, WatchedUpdater

MAX_STALENESS = 64
"""Largest S in steps; see ``first_row``."""
NO_REPLAY = "-no-replay"
"""The end of the name of an arrangement whose trainer chooses the experts itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A schedule of generation, training and updates."""

    name: str
    staleness: int
    colocates: bool = False
    """Whether all GPUs both train and generate, alternately; this needs another deployment."""
    collects_before_publish: bool = False
    """Whether to publish only once the next batch is complete, as slime's train_async does."""
    replays_routes: bool = True
    """Whether the trainer of a mixture replays the engines' choice of experts."""

    @property
    def round_steps(self) -> int:
        """Steps until prompts that were admitted together have all been trained on.

        Long answers of a round end in its last step, so rates rise and fall with the rounds.  Over whole rounds they
        equal those of a long run (simulated: 0.94 to 1.12 after one round and over one, 0.97 to 1.05 over two).
        """
        return self.staleness + 1


def arrangement(name: str) -> Arrangement:
    """The arrangement called ``name``: sync, sync-colocate, one-step or S=N.  Raises ValueError.

    With ``NO_REPLAY`` at its end, it is the same without routing replay.
    """
    if name.endswith(NO_REPLAY):
        replaying = arrangement(name.removesuffix(NO_REPLAY))
        return replace(replaying, name=replaying.name + NO_REPLAY, replays_routes=False)
    if name in ("sync", "sync-colocate"):
        return Arrangement(name=name, staleness=0, colocates=name == "sync-colocate")
    if name == "one-step":
        return Arrangement(name=name, staleness=1, collects_before_publish=True)
    letter, _, number = name.partition("=")
    if letter != "S" or not number.isdecimal() or not 1 <= int(number) <= MAX_STALENESS:
        raise ValueError(f"unknown arrangement {name!r}; use sync, sync-colocate, one-step or S=1 to S={MAX_STALENESS}")
    return Arrangement(name=f"S={int(number)}", staleness=int(number))


def first_row(arrangement: Arrangement, groups: int) -> int:
    """The first prompt's row, such that all arrangements measure the same prompts, however long their warm-ups."""
    return groups * (MAX_STALENESS - arrangement.staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a run after one warm-up round.  The round in which either limit is reached is the last."""

    steps: int
    seconds: float

    def is_over(self, seen: "Seen") -> bool:
        """Whether the run is over, after a step.  ``seen`` may have only steps of the warm-up."""
        num_steps = len(seen.steps)
        if len(seen.rows) < seen.round_steps or num_steps % seen.round_steps:
            return False
        return num_steps >= self.steps or (num_steps > 0 and seen.stop_s - seen.start_s >= self.seconds)


@dataclass(slots=True, kw_only=True)
class Seen:
    """The record of one run, built by ``report``."""

    round_steps: int
    """Number of warm-up steps, which are not measured; see ``Arrangement``."""
    start_s: float
    """Start of the measurement: the end of the last warm-up step, or the start of the run before that."""
    rows: list[dict[str, float | int]] = field(default_factory=list)
    steps: list[StepFigures] = field(default_factory=list)
    before: TokenCounts = field(default_factory=TokenCounts)
    after: TokenCounts = field(default_factory=TokenCounts)
    stop_s: float = 0.0
    aborted_before: int = 0
    aborted: int = 0

    def add(self, facts: StepFacts, now_s: float, aborted: int) -> None:
        """Record a finished step."""
        self.rows.append(row(facts, self.after))
        self.after = facts.scheduler.tokens
        if len(self.rows) <= self.round_steps:
            self.before, self.start_s, self.aborted_before = self.after, now_s, aborted
        else:
            self.steps.append(_step(facts))
        self.stop_s, self.aborted = now_s, aborted


def run_of(
    arrangement: Arrangement,
    num_engines: int,
    seed: int,
    is_complete: bool,
    seen: Seen,
    watched: tuple[WatchedEngine, WatchedTrainer, WatchedUpdater],
) -> ArrangementRun:
    """The measured run; ``seed`` is the workload's."""
    engine, trainer, updater = watched
    window = seen.start_s, seen.stop_s
    requests = engine.busy.within(*window)
    return ArrangementRun(
        arrangement=arrangement.name,
        staleness=arrangement.staleness,
        seed=seed,
        is_complete=is_complete,
        steps=tuple(seen.steps),
        before=seen.before,
        after=seen.after,
        seconds=seen.stop_s - seen.start_s,
        trainer_busy_s=seconds(union(trainer.busy.within(*window))),
        engines_busy_s=seconds(without(requests, updater.pauses.within(*window))),
        request_s=seconds(requests),
        aborted=seen.aborted - seen.aborted_before,
        num_engines=num_engines,
        rows=tuple(seen.rows),
    )


def _step(facts: StepFacts) -> StepFigures:
    lags = list(trained_lags(facts.batch))
    return StepFigures(
        step_s=facts.step_s,
        train_s=facts.train_s,
        trained=sum(tokens for _, tokens in lags),
        lag_max=max((lag for lag, _ in lags), default=0),
        lag_tokens=sum(lag * tokens for lag, tokens in lags),
        pause_s=facts.update.pause_s if facts.update else 0.0,
        update_s=facts.update.total_s if facts.update else 0.0,
        logprob_diff=facts.logprob_diff,
    )


def line(arrangement: Arrangement, seen: Seen, facts: StepFacts) -> str:
    """A log line about one step."""
    number = len(seen.rows)
    kind = "warm-up" if number <= seen.round_steps else "measured"
    tokens = sum(group.num_tokens for group in facts.batch.groups)
    pause_ms = 1000 * facts.update.pause_s if facts.update else 0.0
    return (
        f"{arrangement.name:13} {kind:8} step {number:2}: {facts.step_s:7.2f} s, of that waited "
        f"{facts.trainer_waited_s:6.2f}, trained {facts.train_s:6.2f}; {tokens:,} tokens, pause {pause_ms:.0f} ms"
    )

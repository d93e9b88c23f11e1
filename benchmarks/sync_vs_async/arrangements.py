"""The arrangements that are compared, and what is seen of one while it runs."""

from dataclasses import dataclass, field

from asyncrl.metrics.facts import StepFacts, TokenCounts
from asyncrl.metrics.intervals import seconds, union, without
from asyncrl.metrics.reporter import row, trained_lags
from benchmarks.sync_vs_async.figures import ArrangementRun, StepFigures
from benchmarks.sync_vs_async.watch import WatchedEngine, WatchedTrainer, WatchedUpdater

MAX_STALENESS = 64
"""Steps; see ``first_row``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """When work moves."""

    name: str
    staleness: int
    colocates: bool = False
    """All GPUs train and all GPUs generate, in turns: a deployment of its own."""
    collects_before_push: bool = False
    """Publish only once the next batch is complete, as slime's train_async does."""

    @property
    def round_steps(self) -> int:
        """Steps until prompts that were admitted together have all been trained on.

        Long answers of one round end in its last step, so that rates go up and down with rounds; within whole ones
        they are those of a long run (simulated: 0.94 to 1.12 after one round and over one, 0.97 to 1.05 over two).
        """
        return self.staleness + 1


def arrangement(name: str) -> Arrangement:
    """By its name: sync, sync-colocate, one-step or S=N.  Raises ValueError."""
    if name in ("sync", "sync-colocate"):
        return Arrangement(name=name, staleness=0, colocates=name == "sync-colocate")
    if name == "one-step":
        return Arrangement(name=name, staleness=1, collects_before_push=True)
    letter, _, number = name.partition("=")
    if letter != "S" or not number.isdecimal() or not 1 <= int(number) <= MAX_STALENESS:
        raise ValueError(
            f"no arrangement {name!r}; there are sync, sync-colocate, one-step and S=1 to S={MAX_STALENESS}"
        )
    return Arrangement(name=f"S={int(number)}", staleness=int(number))


def first_row(arrangement: Arrangement, groups: int) -> int:
    """Where its prompts begin, so that all arrangements measure the same ones, however long their warm-ups."""
    return groups * (MAX_STALENESS - arrangement.staleness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a run is, after one round that warms up; the round in which either is reached is the last."""

    steps: int
    seconds: float

    def is_over(self, seen: "Seen") -> bool:
        """After a step.  ``seen`` may have steps of the warm-up only."""
        num_steps = len(seen.steps)
        if len(seen.rows) < seen.round_steps or num_steps % seen.round_steps:
            return False
        return num_steps >= self.steps or (num_steps > 0 and seen.stop_s - seen.start_s >= self.seconds)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What ``report`` has seen of one run."""

    round_steps: int
    """The first so many are not measured; see ``Arrangement``."""
    start_s: float
    """Of what is measured: the end of the last warm-up step, or of nothing if there is none."""
    rows: list[dict[str, float | int]] = field(default_factory=list)
    steps: list[StepFigures] = field(default_factory=list)
    before: TokenCounts = field(default_factory=TokenCounts)
    after: TokenCounts = field(default_factory=TokenCounts)
    stop_s: float = 0.0
    aborted_before: int = 0
    aborted: int = 0

    def add(self, facts: StepFacts, now_s: float, aborted: int) -> None:
        """One more step has ended."""
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
    """What was measured; ``seed`` is that of the workload."""
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
    """One step in words."""
    number = len(seen.rows)
    kind = "warm-up" if number <= seen.round_steps else "measured"
    tokens = sum(group.num_tokens for group in facts.batch.groups)
    pause_ms = 1000 * facts.update.pause_s if facts.update else 0.0
    return (
        f"{arrangement.name:13} {kind:8} step {number:2}: {facts.step_s:7.2f} s, of that waited "
        f"{facts.trainer_waited_s:6.2f}, trained {facts.train_s:6.2f}; {tokens:,} tokens, pause {pause_ms:.0f} ms"
    )

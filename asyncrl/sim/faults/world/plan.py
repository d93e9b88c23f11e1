"""The plan of a life, drawn from its seed: the settings of the run, and the faults with their times.

A fault of a *moment* is armed at its time and happens at the next opportunity, such as the next command to its engine.
A fault of a *period* begins at its time.  A fault is counted once it has had an effect.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["in_place", "retract", "abort"]

FAULTS_S = 40.0
"""Seconds of a life in which faults begin."""
CALM_S = 60.0
"""Seconds of a life after which no fault is left: the longest period is over, and armed faults are given up."""
LONGEST_S = 25.0
"""Longest period of a fault in seconds: beyond every deadline of the run, far below the watchdog's."""

PATH_MOMENTS = ("drop", "drop_command", "duplicate_command", "duplicate_bytes", "reset_command", "cut", "cut_by_fin")
PATH_PERIODS = ("delay", "partition")
ENGINE_MOMENTS = ("refuse_4xx", "refuse_5xx", "unknown_version")
ENGINE_PERIODS = ("hang", "slow", "trainer_partition")
USER_MOMENTS = ("reward_raises", "reward_hangs", "filter_raises")
USER_PERIODS = ("reward_outage",)
TRAINER_MOMENTS = ("step_fails", "step_not_finite", "disk_full", "torn_file", "checkpoint_fails")
JOURNAL_MOMENTS = ("journal_full", "journal_fails", "journal_stalls")
PROCESS = ("kill", "kill_on_disk", "sigterm", "clock_jump", "blocked_loop")
DEATH_OF_TRAINER, SHORTAGE, DEATH_OF_SCHEDULER = "trainer_dies", "memory_runs_out", "scheduler_dies"
LOSS_OF_MACHINE = "machine_vanishes"
_ANYWHERE = (
    *PATH_MOMENTS,
    *PATH_PERIODS,
    *ENGINE_MOMENTS,
    *ENGINE_PERIODS,
    "die",
    "router_dies",
    *USER_MOMENTS,
    *USER_PERIODS,
    *TRAINER_MOMENTS,
    *PROCESS,
)
"""Kinds that happen with and without a journal."""
KINDS = (*_ANYWHERE, DEATH_OF_TRAINER, SHORTAGE, DEATH_OF_SCHEDULER, LOSS_OF_MACHINE, *JOURNAL_MOMENTS)
PERIODS = frozenset((*PATH_PERIODS, *ENGINE_PERIODS, *USER_PERIODS))
_EVERYWHERE = ("clock_jump", "blocked_loop")
_LIKE_DEATH = frozenset((*PATH_MOMENTS, *PATH_PERIODS, *ENGINE_MOMENTS, *ENGINE_PERIODS, *_EVERYWHERE))
"""Faults after which an engine that lives may be ended: it is silent, its path is cut, or all seem to be."""
_SURVIVED = frozenset(
    (
        *("die", DEATH_OF_SCHEDULER, LOSS_OF_MACHINE, "router_dies", "kill", "kill_on_disk", "sigterm"),
        *("delay", "duplicate_command", "duplicate_bytes", *JOURNAL_MOMENTS),
    )
)
"""Faults that end no run with an error once it trains, in any number."""
_OFTEN = ("kill", "kill", "die", "die", "cut", "reset_command")
"""Kinds that are drawn more often, because they lead to the most code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of the run of one life."""

    num_engines: int
    num_slots: int
    groups_per_step: int
    group_size: int
    staleness: int
    interval: int
    """Steps between weight updates; at most ``staleness + 1``."""
    num_steps: int
    stale: Literal["wait", "mask", "drop"]
    partial: bool
    mask_resumed: bool
    rejected: int
    """Per cent of the prompts whose groups the filter drops."""
    mode: Mode
    has_stamps: bool
    """Whether engines stamp each token with its version, as with the plug-in."""
    has_direct: bool
    """Whether engines receive all buckets in one request from the second update on."""
    is_copied: bool
    """Whether the trainer sends a copy of its weights while it trains."""
    has_router: bool
    by_disk: bool
    """Whether weights go through a folder instead of a group."""
    num_buckets: int
    save_interval: int
    saves_in_background: bool
    writing_s: float
    train_s: float
    token_s: float
    chunk: int
    longest: int
    """Tokens of the longest answer."""
    max_new_tokens: int
    rows: int
    max_row_failures: int
    over_sampling: int | None
    temperature: float
    retries: int
    """Attempts of a sample after failures."""
    aborts_on_disconnect: bool
    turn_s: float
    """Seconds that one iteration of the event loop takes."""
    has_journal: bool
    sync_s: float
    """Longest wait of the journal for its disk in seconds, without a fault."""
    disk_seed: int
    """Seed of these waits, and of the bytes that a kill tears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a life."""

    number: int
    kind: str
    at: float
    """Seconds since the life began, over all its processes."""
    where: int
    """Number of an engine, taken modulo the number of engines."""
    amount: float
    """Between 0 and 1: how long a period lasts, which status is sent, and the like."""

    @property
    def seconds(self) -> float:
        """Length of a period."""
        return 0.2 + self.amount**2 * (LONGEST_S - 0.2)

    def __str__(self) -> str:
        return f"{self.at:7.3f} s  {self.kind} (engine {self.where}, amount {self.amount:.3f})"


def drawn(seed: int) -> tuple[Setting, tuple[Fault, ...]]:
    """Return the settings and the faults of the life with this seed."""
    rng, of_journal = random.Random(seed), random.Random(f"journal of {seed}")
    setting, faults = _setting(rng, of_journal), _faults(rng)
    if setting.has_journal:
        faults = (*faults, *_faults_of_journal(of_journal, len(faults)))
    faults = (*faults, *_deaths_of_trainer(random.Random(f"trainer of {seed}"), len(faults)))
    faults = (*faults, *_shortages(random.Random(f"memory of {seed}"), len(faults)))
    faults = (*faults, *_deaths_of_schedulers(random.Random(f"schedulers of {seed}"), len(faults)))
    return setting, (*faults, *_losses_of_machines(random.Random(f"machines of {seed}"), len(faults)))


def _setting(rng: random.Random, of_journal: random.Random) -> Setting:
    pick: Callable[[Sequence[Any]], Any] = rng.choice
    staleness, groups = pick((0, 1, 1, 2, 3)), pick((1, 1, 2))
    rows, max_row_failures = pick((3, 7, 1000, 1000)), pick((0, 0, 2))
    if max_row_failures:
        rows = 1000  # faults of rewards may put all of a few rows in quarantine, which ends every further process
    return Setting(
        num_engines=pick((1, 1, 2, 2, 3, 4)),
        num_slots=pick((1, 2, 4, 6)),
        groups_per_step=groups,
        group_size=pick((1, 1, 2, 3)),
        staleness=staleness,
        interval=rng.randint(1, min(staleness + 1, 3)),
        num_steps=pick((1, 1, 2)) + min(staleness, 2) + 1,
        stale=pick(("wait", "wait", "mask", "drop")),
        partial=pick((False, True)),
        mask_resumed=pick((False, False, True)),
        rejected=pick((0, 0, 30)),
        mode=pick(("in_place", "retract", "abort")),
        has_stamps=pick((True, True, False)),
        has_direct=pick((True, False)),
        is_copied=pick((True, True, False)),
        has_router=pick((False, True)),
        by_disk=pick((False, False, False, True)),
        num_buckets=pick((1, 2)),
        save_interval=pick((1, 1, 2, 3)),
        saves_in_background=pick((True, True, False)),
        writing_s=pick((0.01, 0.3, 2.0)),
        train_s=pick((0.05, 0.5, 2.0)),
        token_s=pick((0.02, 0.1, 0.3)),
        chunk=pick((1, 2, 4)),
        longest=pick((2, 6, 12)),
        max_new_tokens=pick((5, 12)),
        rows=rows,
        max_row_failures=max_row_failures,
        over_sampling=pick((None, None, 2 * groups)),
        temperature=pick((0.9, 0.9, 1.0)),
        retries=pick((2, 5)),
        # The first pick was a setting once.  It is still drawn, so that seeds keep their lives.
        aborts_on_disconnect=(pick((False, True)), pick((False, True)))[1],
        turn_s=pick((0.0, 0.0002, 0.0002, 0.001)),
        has_journal=of_journal.random() < 0.8,
        sync_s=of_journal.choice((0.0, 0.005, 0.05, 0.2)),
        disk_seed=of_journal.randrange(2**32),
    )


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    """Draw faults of a few kinds in most lives: they meet each other more often than if each life had all kinds."""
    window = rng.choice((1.0, 4.0, 10.0, FAULTS_S))
    kinds: Sequence[str] = (*_ANYWHERE, *_OFTEN)
    kinds = rng.sample(kinds, rng.choice((2, 3, 5, len(kinds))))
    return tuple(
        Fault(
            number=number,
            kind=rng.choice(kinds),
            at=round(rng.random() * window, 3),
            where=rng.randrange(4),
            amount=round(rng.random(), 3),
        )
        for number in range(rng.choice((0, 1, 2, 3, 4, 6, 9)))
    )


def _faults_of_journal(rng: random.Random, first: int) -> tuple[Fault, ...]:
    """Draw faults of the journal's disk, and more kills, because a recovery follows each."""
    window = rng.choice((1.0, 4.0, 10.0))
    kinds = ["kill"] * rng.choice((0, 0, 1, 2, 3)) + rng.choices(JOURNAL_MOMENTS, k=rng.choice((0, 0, 0, 1, 2)))
    return tuple(
        Fault(
            number=number,
            kind=kind,
            at=round(rng.random() * window, 3),
            where=rng.randrange(4),
            amount=round(rng.random(), 3),
        )
        for number, kind in enumerate(kinds, first)
    )


def _deaths_of_trainer(rng: random.Random, first: int) -> tuple[Fault, ...]:
    """Draw deaths of the trainer for every third life."""
    window = rng.choice((1.0, 4.0, 10.0))
    return tuple(
        Fault(number=number, kind=DEATH_OF_TRAINER, at=round(rng.random() * window, 3), where=0, amount=0.0)
        for number in range(first, first + rng.choice((0, 0, 0, 0, 1, 2)))
    )


def _shortages(rng: random.Random, first: int) -> tuple[Fault, ...]:
    """Draw shortages of the trainer's memory for every fifth life."""
    window = rng.choice((1.0, 4.0, 10.0))
    return tuple(
        Fault(number=number, kind=SHORTAGE, at=round(rng.random() * window, 3), where=0, amount=0.0)
        for number in range(first, first + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 3)))
    )


def _deaths_of_schedulers(rng: random.Random, first: int) -> tuple[Fault, ...]:
    """Draw deaths of engines' schedulers for three of seven lives, most of them soon after each other."""
    begin, window = rng.random() * 10.0, rng.choice((1.0, 6.0, 15.0))
    numbers = range(first, first + rng.choice((0, 0, 0, 0, 1, 2, 3)))
    return _at_engines(rng, DEATH_OF_SCHEDULER, numbers, begin, window)


def _losses_of_machines(rng: random.Random, first: int) -> tuple[Fault, ...]:
    """Draw the loss of an engine's machine for every fifth life."""
    window = rng.choice((1.0, 6.0, 20.0))
    numbers = range(first, first + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2)))
    return _at_engines(rng, LOSS_OF_MACHINE, numbers, 0.0, window)


def _at_engines(rng: random.Random, kind: str, numbers: range, begin: float, window: float) -> tuple[Fault, ...]:
    """Draw a fault for each number, at an engine and within ``window`` seconds after ``begin``."""
    return tuple(
        Fault(number=number, kind=kind, at=round(begin + rng.random() * window, 3), where=rng.randrange(4), amount=0.0)
        for number in numbers
    )


def is_survived(setting: Setting, kinds: Set[str]) -> bool:
    """Return whether faults of only these kinds end no run with an error once it trains.

    With a good journal, the trainer starts again more often than it dies in a life.
    """
    has_good_journal = setting.has_journal and kinds.isdisjoint(JOURNAL_MOMENTS)
    return kinds <= (_SURVIVED | {DEATH_OF_TRAINER} if has_good_journal else _SURVIVED)


class Weather:
    """The faults that are armed or last at present, and the counts of faults that happened."""

    def __init__(self, num_engines: int, now: Callable[[], float], note: Callable[[str], None]) -> None:
        """``now`` returns the seconds of the life so far.  ``note`` gets a line for each fault that happens."""
        self._num_engines = num_engines
        self._now = now
        self._note = note
        self._armed = list[Fault]()
        self._lasting = list[tuple[float, Fault]]()
        self.happened = Counter[str]()
        self._suspected = set[int]()
        """Engines that a fault may have made to look dead; -1 stands for all."""
        self._counted = set[int]()
        self.numbers = dict[str, int]()
        """The number of the engine at each address."""

    def begin(self, fault: Fault) -> None:
        """Arm a fault of a moment, or begin a period."""
        if fault.kind in PERIODS:
            self._lasting.append((fault.at + fault.seconds, fault))
        else:
            self._armed.append(fault)

    def clear(self) -> None:
        """Give up everything that is armed or lasts."""
        self._armed.clear()
        self._lasting.clear()

    def take(self, kind: str, netloc: str | None = None) -> Fault | None:
        """Return an armed fault, which happens now; None if there is none at this place."""
        if not self._armed:
            return None
        for fault in self._armed:
            if fault.kind == kind and (netloc is None or self._is_at(fault, netloc)):
                self._armed.remove(fault)
                self.count(fault)
                return fault
        return None

    def lasting(self, kind: str, netloc: str | None = None) -> float:
        """Return the seconds for which a period still lasts at this place; 0 if there is none."""
        if not self._lasting:
            return 0.0
        now = self._now()
        left_s = 0.0
        for until, fault in self._lasting:
            if fault.kind == kind and until > now and (netloc is None or self._is_at(fault, netloc)):
                self.count(fault)
                left_s = max(left_s, until - now)
        return left_s

    def delay_s(self, netloc: str) -> float:
        """Return the seconds by which a message on this path is late."""
        if not self._lasting:
            return 0.0
        slow_s = 0.3 if self.lasting("delay", netloc) else 0.0
        return max(slow_s, self.lasting("partition", netloc))

    def refusal(self, netloc: str) -> int | None:
        """Return the status with which the next request is refused."""
        if not self._armed:
            return None
        if self.take("refuse_4xx", netloc):
            return 400
        if fault := self.take("refuse_5xx", netloc):
            return (429, 500, 503)[int(fault.amount * 2.999)]
        return None

    def count(self, fault: Fault) -> None:
        """Count a fault that has an effect."""
        if fault.number not in self._counted:
            self._counted.add(fault.number)
            self.happened[fault.kind] += 1
            if fault.kind in _LIKE_DEATH:
                self._suspected.add(-1 if fault.kind in _EVERYWHERE else fault.where % self._num_engines)
            self._note(f"FAULT {fault}")

    def may_seem_dead(self, number: int) -> bool:
        """Return whether a fault of this life may have made an engine look dead."""
        return not self._suspected.isdisjoint((number, -1))

    def _is_at(self, fault: Fault, netloc: str) -> bool:
        number = self.numbers.get(netloc)
        return number is not None and number == fault.where % self._num_engines

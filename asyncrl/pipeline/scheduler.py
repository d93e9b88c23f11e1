"""The scheduler keeps samples in flight, and hands over batches that are never too old.

consumes      prompts
produces      batches of scored groups, oldest dispatched first
waits for     admission (a batch taken, newer weights) and a free slot; a batch waits for its groups
unblocked by  a sample or group that ends, next_batch(), look_again()
on cancel     every request in flight is aborted on its server
on crash      groups in flight are lost
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from asyncrl.buffer import Due, choose
from asyncrl.errors import (
    AsyncRLError,
    EngineRejected,
    FailureBudgetSpent,
    FilterBudgetSpent,
    FilterFailed,
    RewardFailed,
    SampleFailed,
    Stalled,
    plainly,
)
from asyncrl.metrics.facts import SchedulerStats
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.admission import Limits, Standing, may_start
from asyncrl.pipeline.draft import Draft
from asyncrl.pipeline.ledger import Ledger, Outcome, check_balance
from asyncrl.pipeline.sampler import Sampler, Served
from asyncrl.pipeline.scoring import verdict
from asyncrl.pipeline.slots import Slots
from asyncrl.protocols import KeepFn, PromptSource
from asyncrl.types import Batch, GroupId, Prompt, ScoredGroup, ScoredSample, Weights

logger = logging.getLogger(__name__)

GROUP_FAILURES = (SampleFailed, EngineRejected, RewardFailed, FilterFailed)
"""What costs one group and is counted against the budget.  Anything else ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """How much may go wrong, or nothing happen, before the run ends."""

    max_failed_groups: int
    """In a row."""
    max_filtered_groups: int
    """In a row."""
    watchdog_timeout_s: float
    """Without any token or group while a batch is waited for."""


@dataclass(slots=True)
class _Flight:
    """A group in flight."""

    group_id: GroupId
    prompt: Prompt
    dispatched: Weights
    drafts: list[Draft]
    since: float
    claims: int
    """Samples not generated yet."""

    @property
    def num_tokens(self) -> int:
        return sum(len(draft.token_ids) for draft in self.drafts)


@dataclass(slots=True)
class _Streaks:
    """Groups in a row that came to nothing."""

    failed: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    """By the filter's reason."""


class Scheduler:
    """Owns admission, the groups in flight, the buffer and the ledger.  One per run; not thread-safe."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        sampler: Sampler,
        keep: KeepFn,
        limits: Limits,
        budgets: Budgets,
        slots: Slots,
        served: Served,
        timeline: Timeline,
    ) -> None:
        """``sampler`` must use the same ``slots`` and ``served``."""
        self._served = served
        self._prompts = prompts
        self._sampler = sampler
        self._keep = keep
        self._limits = limits
        self._budgets = budgets
        self._slots = slots
        self._timeline = timeline
        self._ledger = Ledger()
        self._flights: dict[GroupId, _Flight] = {}
        self._buffered: dict[GroupId, ScoredGroup] = {}
        self._training: Batch | None = None
        self._batches_taken = 0
        self._next_id = 0
        self._streaks = _Streaks()
        self._reasons: Counter[str] = Counter()
        self._moved = asyncio.Event()
        self._finished = asyncio.Event()
        self._last_move = 0.0
        slots.notify(self.look_again)

    async def run(self) -> None:
        """Start groups as admission allows, until cancelled.  Raises a budget error, or the bug that ended a group."""
        with plainly():
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._admission()
                    flight = self._admit()
                    groups.create_task(self._fly(flight), name=f"group-{flight.group_id}")

    async def next_batch(self) -> Batch:
        """Wait for the next step's groups and take them.  Raises Stalled when nothing moves for too long."""
        step = self._batches_taken
        while (chosen := self._choose(step)) is None:
            self._finished.clear()
            await self._progress(self._finished)
        for group_id in chosen:
            self._ledger.take(group_id)
        self._training = Batch(step=step, groups=tuple(self._buffered.pop(group_id) for group_id in chosen))
        self._batches_taken += 1
        self._moved.set()
        return self._training

    def settle(self) -> None:
        """The batch taken last was trained."""
        if self._training is None:
            raise AssertionError("no batch is in training")
        for group in self._training.groups:
            self._ledger.train(group)
        self._training = None

    def look_again(self) -> None:
        """Something that admission depends on changed: newer weights are served, or a slot is free."""
        self._moved.set()

    def stats(self) -> SchedulerStats:
        """What is held now.  Raises AssertionError when an account does not balance."""
        scored = (*self._buffered.values(), *(self._training.groups if self._training else ()))
        held = sum(flight.num_tokens for flight in self._flights.values()) + sum(group.num_tokens for group in scored)
        tokens = self._ledger.tokens(held)
        groups = self._ledger.groups()
        check_balance(tokens, groups)
        return SchedulerStats(
            tokens=tokens,
            groups=groups,
            filter_reasons=dict(self._reasons),
            retries=self._sampler.retries,
            samples_in_flight=self._slots.in_use,
            slots=self._slots.size,
            weights=self._served.now,
        )

    # ---- admission

    async def _admission(self) -> None:
        while not may_start(self._standing(), self._limits):
            self._moved.clear()
            await self._moved.wait()

    def _standing(self) -> Standing:
        return Standing(
            batches_taken=self._batches_taken,
            outstanding=self._ledger.outstanding,
            engine_step=self._served.now.step,
            free_slots=self._slots.free,
        )

    def _admit(self) -> _Flight:
        group_id = GroupId(self._next_id)
        self._next_id += 1
        flight = _Flight(
            group_id=group_id,
            prompt=self._prompts.take(),
            dispatched=self._served.now,
            drafts=[self._sampler.draft(index) for index in range(self._limits.group_size)],
            since=_now(),
            claims=self._limits.group_size,
        )
        self._slots.claim(flight.claims)
        self._ledger.admit(group_id)
        self._flights[group_id] = flight
        return flight

    # ---- one group

    async def _fly(self, flight: _Flight) -> None:
        try:
            group = await self._score(flight)
            reason = verdict(self._keep, group)
        except GROUP_FAILURES as error:
            self._fail(flight, error)
        else:
            self._land(flight, group, reason)
        self._last_move = _now()
        self._moved.set()
        self._finished.set()

    async def _score(self, flight: _Flight) -> ScoredGroup:
        with plainly():
            async with asyncio.TaskGroup() as samples:
                tasks = [
                    samples.create_task(self._one(flight, draft), name=f"sample-{flight.group_id}.{draft.index}")
                    for draft in flight.drafts
                ]
        return ScoredGroup(
            group_id=flight.group_id,
            prompt=flight.prompt,
            dispatched=flight.dispatched,
            samples=tuple(task.result() for task in tasks),
        )

    async def _one(self, flight: _Flight, draft: Draft) -> ScoredSample:
        def count(num_tokens: int) -> None:
            self._ledger.generate(num_tokens)
            self._last_move = _now()

        name = f"g{flight.group_id}"
        sample = await self._sampler.generate(name, flight.group_id, flight.prompt, draft, count)
        flight.claims -= 1
        self._slots.unclaim(1)
        return await self._sampler.score(flight.prompt, sample)

    def _land(self, flight: _Flight, group: ScoredGroup, reason: str | None) -> None:
        del self._flights[flight.group_id]
        self._streaks.failed = 0
        if reason is None:
            self._streaks.filtered.clear()
            self._ledger.buffer(flight.group_id)
            self._buffered[flight.group_id] = group
            self._timeline.counter("groups buffered", _now(), len(self._buffered))
            return
        self._ledger.drop(flight.group_id, Outcome.FILTERED, group.num_tokens)
        self._reasons[reason] += 1
        self._streaks.filtered[reason] += 1
        in_a_row = self._streaks.filtered.total()
        if in_a_row >= self._budgets.max_filtered_groups:
            why, count = self._streaks.filtered.most_common(1)[0]
            raise FilterBudgetSpent(
                f"the filter rejected {in_a_row} groups in a row (max-filtered-groups), {count} of them for {why!r}"
            )

    def _fail(self, flight: _Flight, error: AsyncRLError) -> None:
        del self._flights[flight.group_id]
        self._slots.unclaim(flight.claims)
        self._ledger.drop(flight.group_id, Outcome.FAILED, flight.num_tokens)
        self._streaks.failed += 1
        logger.warning("group %d failed: %s", flight.group_id, error)
        if self._streaks.failed >= self._budgets.max_failed_groups:
            raise FailureBudgetSpent(
                f"{self._streaks.failed} groups failed in a row (max-failed-groups); the last: {error}"
            ) from error

    # ---- batches

    def _choose(self, step: int) -> tuple[GroupId, ...] | None:
        finished = [self._due(group_id, group.dispatched) for group_id, group in self._buffered.items()]
        unfinished = [self._due(group_id, flight.dispatched) for group_id, flight in self._flights.items()]
        chosen = choose(finished, unfinished, step=step, size=self._limits.groups_per_step)
        for group_id in chosen or ():
            self._check_age(self._buffered[group_id], step)
        return chosen

    def _due(self, group_id: GroupId, dispatched: Weights) -> Due:
        return Due(group_id=group_id, deadline=dispatched.step + self._limits.max_staleness)

    def _check_age(self, group: ScoredGroup, step: int) -> None:
        lag = step - group.dispatched.step
        if lag > self._limits.max_staleness:
            raise AssertionError(
                f"group {group.group_id} would be trained {lag} steps late, the bound is {self._limits.max_staleness}"
            )

    # ---- the watchdog

    async def _progress(self, event: asyncio.Event) -> None:
        """Wait for ``event``.  Raises Stalled once there was neither a token nor a group for too long."""
        waiting_since = _now()
        while not event.is_set():
            deadline = max(waiting_since, self._last_move) + self._budgets.watchdog_timeout_s
            if _now() >= deadline:
                raise Stalled(self._who_waits_for_whom())
            try:
                async with asyncio.timeout_at(deadline):
                    await event.wait()
            except TimeoutError:
                continue

    def _who_waits_for_whom(self) -> str:
        ready, size = len(self._buffered), self._limits.groups_per_step
        oldest = sorted(self._flights.values(), key=lambda flight: flight.group_id)[:3]
        held = "; ".join(
            f"group {flight.group_id} (row {flight.prompt.row}) for {_now() - flight.since:.0f} s with "
            f"{flight.num_tokens} tokens"
            for flight in oldest
        )
        return (
            f"no token and no group for {self._budgets.watchdog_timeout_s:g} s (watchdog-timeout-s): step "
            f"{self._batches_taken} has {ready} of {size} groups; {len(self._flights)} groups in flight, "
            f"{self._slots.in_use} of {self._slots.size} slots in use; waiting for {held or 'a group to be admitted'}"
        )


def _now() -> float:
    return asyncio.get_running_loop().time()

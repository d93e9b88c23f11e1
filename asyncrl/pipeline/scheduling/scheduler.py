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
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.buffer import Due, NotYet, Outstanding, masked_before
from asyncrl.errors import (
    AsyncRLError,
    EngineRejected,
    FilterFailed,
    RewardFailed,
    SampleFailed,
    plainly,
)
from asyncrl.event_loop import loop_time
from asyncrl.metrics.facts import Gauges, SchedulerStats
from asyncrl.metrics.timeline import Timeline
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.scoring import verdict
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.acceptance import Acceptance
from asyncrl.pipeline.scheduling.accounts import Accounts
from asyncrl.pipeline.scheduling.admission import AdmissionState, Limits, assumed_acceptance, may_start
from asyncrl.pipeline.scheduling.budgets import Budgets, Streaks
from asyncrl.pipeline.scheduling.groups_in_flight import GroupInFlight, GroupsInFlight, complete
from asyncrl.pipeline.scheduling.ledger import GroupOutcome
from asyncrl.pipeline.scheduling.prompt_queue import PromptQueue
from asyncrl.pipeline.scheduling.run_state import RunState, without_unfinished
from asyncrl.pipeline.scheduling.watchdog import Watchdog
from asyncrl.protocols import KeepFn, PickFn, PromptSource
from asyncrl.types import Batch, GroupId, Prompt, Sample, ScoredGroup

logger = logging.getLogger(__name__)

GROUP_FAILURES = (SampleFailed, EngineRejected, RewardFailed, FilterFailed)
"""What costs one group and is counted against the budget.  Anything else ends the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """What becomes of groups that grow old."""

    stale: Literal["wait", "mask", "drop"] = "wait"
    """A group due now is unfinished: wait for it, mask its over-age tokens when it comes, or drop it."""
    partial: bool = False
    """What cannot be trained in time any more keeps its tokens and goes on under newer weights."""
    mask_resumed: bool = False
    """Of what went on, train only on what was written since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A scored group that was kept."""

    due: Due
    group: ScoredGroup


class Scheduler:
    """Owns admission, the groups in flight, the buffer and the accounts.  One per run; not thread-safe."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        sampler: Sampler,
        keep: KeepFn,
        limits: Limits,
        budgets: Budgets,
        slots: Slots,
        serving: ServingWeights,
        timeline: Timeline,
        policy: StalenessPolicy | None = None,
        pick: PickFn | None = None,
        before: RunState | None = None,
        again: Sequence[Prompt] = (),
    ) -> None:
        """``sampler`` must use the same ``slots`` and ``serving``; without ``pick`` the oldest groups go first.

        ``before`` is where the run that this one goes on from stood, ``again`` are its outstanding prompts.
        """
        self._serving = serving
        self._prompt_queue = PromptQueue(prompts, again, before.prompts_taken if before else 0)
        self._sampler = sampler
        self._keep = keep
        self._limits = limits
        self._slots = slots
        self._timeline = timeline
        self._policy = policy or StalenessPolicy()
        self._pick = pick
        self._accounts = Accounts(limits.group_size, before)
        self._acceptance = Acceptance(before.verdicts if before else ())
        self._outstanding = Outstanding()
        self._in_flight = GroupsInFlight()
        self._parked: deque[GroupInFlight] = deque()
        self._buffered: dict[GroupId, _Waiting] = {}
        self._training: Batch | None = None
        self._batches_taken = before.step if before else 0
        self._next_id = before.next_id if before else 0
        self._next_order = 0
        self._streaks = Streaks(budgets)
        self._ready: tuple[GroupId, ...] = ()
        self._wakes = NotYet(deadline=float("inf"), missing=1)
        self._missing = 1
        self._passed_over = 0
        self._pick_drops = 0
        self._moved = asyncio.Event()
        self._finished = asyncio.Event()
        self._watchdog = Watchdog(budgets.watchdog_timeout_s)
        slots.notify(self.look_again)

    async def run(self) -> None:
        """Start groups as admission allows, until cancelled.  Raises a budget error, or the bug that ended a group."""
        with plainly():
            async with asyncio.TaskGroup() as groups:
                while True:
                    await self._admission()
                    rollout = self._admit()
                    rollout.task = groups.create_task(self._generate_group(rollout), name=f"group-{rollout.group_id}")

    async def next_batch(self) -> Batch:
        """Wait for the next step's groups and take them.  Raises Stalled when nothing moves for too long.

        Groups that can never be trained in time from then on are cancelled here, before weights are updated.
        """
        chosen, self._ready = self._ready or await self._chosen(), ()
        for group_id in chosen:
            self._accounts.take(group_id)
        batch = Batch(step=self._batches_taken, groups=tuple(self._unbuffer(group_id) for group_id in chosen))
        self._training = batch
        self._batches_taken += 1
        self._passed_over = self._pick_drops = 0
        self._let_go_of_the_doomed()
        self._moved.set()
        return batch

    async def batch_ready(self) -> None:
        """Wait until ``next_batch`` would not."""
        chosen = await self._chosen()
        if self._pick is not None:
            self._ready = chosen  # a user's function is not asked twice for one batch

    def close_step(self) -> None:
        """The batch taken last was trained."""
        if self._training is None:
            raise AssertionError("no batch is in training")
        self._accounts.train(self._training)
        self._training = None

    def look_again(self) -> None:
        """Something that admission depends on changed: newer weights are served, or a slot is free."""
        self._moved.set()

    def gauges(self) -> Gauges:
        """What is held now.  Raises AssertionError when an account does not balance."""
        scored = (*(each.group for each in self._buffered.values()), *(self._training.groups if self._training else ()))
        held = sum(rollout.num_tokens for rollout in (*self._in_flight, *self._parked))
        tokens, groups = self._accounts.balance(held + sum(group.num_tokens for group in scored))
        return Gauges(
            tokens=tokens,
            groups=groups,
            filter_reasons=self._accounts.reasons,
            samples_in_flight=self._slots.in_use,
            slots=self._slots.size,
        )

    def stats(self) -> SchedulerStats:
        """What is held after a step; once in each, for the lengths of what is in flight are looked at."""
        held = self.gauges()
        return SchedulerStats(
            tokens=held.tokens,
            groups=held.groups,
            filter_reasons=held.filter_reasons,
            samples_in_flight=held.samples_in_flight,
            slots=held.slots,
            acceptance=self._acceptance.rate,
            returned=len(self._prompt_queue.returned),
            retries=self._sampler.retries,
            aborts=self._sampler.aborts,
            slot_limit=self._slots.limit,
            weights=self._serving.now,
            lengths=self._accounts.lengths(
                length for rollout in (*self._in_flight, *self._parked) for length in rollout.cut_lengths()
            ),
        )

    def state(self) -> RunState:
        """The state of the run, between ``close_step`` and ``next_batch``.

        Prompts of groups that are held are outstanding, and come again.
        """
        stats = self.stats()
        tokens, groups = without_unfinished(stats.tokens, stats.groups)
        held: dict[GroupId, Prompt] = {
            rollout.group_id: rollout.prompt for rollout in (*self._in_flight, *self._parked)
        }
        held |= {group_id: waiting.group.prompt for group_id, waiting in self._buffered.items()}
        prompts = (*(held[group_id] for group_id in sorted(held)), *self._prompt_queue.returned)
        return RunState(
            step=self._batches_taken,
            version=stats.weights.version,
            next_id=self._next_id,
            prompts_taken=self._prompt_queue.num_taken,
            outstanding=tuple((prompt.epoch, prompt.row) for prompt in prompts),
            tokens=tokens,
            groups=groups,
            reasons=stats.filter_reasons,
            verdicts=self._acceptance.verdicts,
            retries=stats.retries,
            aborts=stats.aborts,
        )

    # ---- admission

    async def _admission(self) -> None:
        while not self._slots.free or not may_start(self._admission_state(), self._limits):  # the cheap look first
            self._moved.clear()
            await self._moved.wait()

    def _admission_state(self) -> AdmissionState:
        return AdmissionState(
            batches_taken=self._batches_taken,
            buffered=len(self._buffered) - self._passed_over,
            in_flight=self._outstanding.num_unfinished(self._batches_taken),
            engine_step=self._serving.now.step,
            free_slots=self._slots.free,
            acceptance=assumed_acceptance(self._acceptance.upper, self._limits, drops=self._policy.stale == "drop"),
        )

    def _admit(self) -> GroupInFlight:
        """Interrupted groups first, then new ones."""
        now, weights = loop_time(), self._serving.now
        if self._parked:
            parked = self._parked.popleft()
            rollout = replace(parked, due=self._due(parked.group_id), dispatched=weights, since=now)
            self._accounts.resume(rollout.group_id)
        else:
            rollout = GroupInFlight(
                due=self._due(GroupId(self._next_id)),
                prompt=self._prompt_queue.take(),
                dispatched=weights,
                partials=[self._sampler.partial(index) for index in range(self._limits.group_size)],
                since=now,
            )
            self._next_id += 1
            self._accounts.admit(rollout.group_id)
        self._slots.claim(rollout.claims)
        self._in_flight.add(rollout)
        self._outstanding.start(rollout.due)
        return rollout

    def _due(self, group_id: GroupId) -> Due:
        self._next_order += 1
        last = min(self._serving.now.step + self._limits.max_staleness, self._limits.num_steps - 1)
        return Due(order=self._next_order, deadline=last, group_id=group_id)

    # ---- one group

    async def _generate_group(self, rollout: GroupInFlight) -> None:
        try:
            group = await complete(
                rollout,
                self._sampler,
                on_tokens=lambda num_tokens: self._count(rollout, num_tokens),
                on_sample=lambda sample: self._generated(rollout, sample),
                mask_resumed=self._policy.mask_resumed,
            )
            if not rollout.is_gone:
                self._finish_group(rollout, group, verdict(self._keep, group))
        except GROUP_FAILURES as error:
            if not rollout.is_gone:
                self._fail(rollout, error)
        self._watchdog.moved()
        self._moved.set()
        if rollout.due.deadline <= self._wakes.deadline:
            self._missing -= 1
            if self._missing <= 0:
                self._finished.set()

    def _count(self, rollout: GroupInFlight, num_tokens: int) -> None:
        self._accounts.deliver(rollout, num_tokens)
        self._watchdog.moved()

    def _generated(self, rollout: GroupInFlight, sample: Sample) -> None:
        if not rollout.is_gone:
            self._accounts.finish(sample)
            self._slots.unclaim(1)

    def _finish_group(self, rollout: GroupInFlight, group: ScoredGroup, reason: str | None) -> None:
        self._in_flight.remove(rollout)
        self._acceptance.note(reason is None)
        if reason is None:
            self._streaks.kept()
            self._accounts.buffer(group.group_id)
            self._outstanding.finish(rollout.due)
            self._buffered[group.group_id] = _Waiting(due=rollout.due, group=group)
            self._timeline.counter("groups buffered", loop_time(), len(self._buffered))
        else:
            self._outstanding.remove(rollout.due)
            self._accounts.reject(group, reason)
            self._streaks.filtered(reason)

    def _fail(self, rollout: GroupInFlight, error: AsyncRLError) -> None:
        self._leave(rollout, GroupOutcome.FAILED)
        logger.warning("group %d failed: %s", rollout.group_id, error)
        logger.debug("where group %d failed", rollout.group_id, exc_info=error)
        self._streaks.failed(error)

    def _leave(self, rollout: GroupInFlight, outcome: GroupOutcome) -> None:
        """A group in flight will not be trained."""
        self._end_rollout(rollout)
        self._accounts.leave(rollout, outcome)

    def _end_rollout(self, rollout: GroupInFlight) -> None:
        """It flies no more, and asks for no more slots."""
        self._slots.unclaim(rollout.claims)
        self._in_flight.remove(rollout)
        self._outstanding.remove(rollout.due)

    # ---- batches

    async def _chosen(self) -> tuple[GroupId, ...]:
        while isinstance(chosen := self._choose(self._batches_taken), NotYet):
            self._wakes, self._missing = chosen, chosen.missing
            self._finished.clear()
            await self._watchdog.wait(self._finished, self._who_waits_for_whom)
        return chosen

    def _choose(self, step: int) -> tuple[GroupId, ...] | NotYet:
        """The groups of the step's batch, with nothing too old left in their loss."""
        while not isinstance(dues := self._due_now(step), NotYet):
            chosen = self._picked(step) if self._pick else tuple(due.group_id for due in dues)
            if len(chosen) < self._limits.groups_per_step:
                self._passed_over = len(self._buffered)  # they take nobody's place until it is asked again
                self._moved.set()
                return NotYet(deadline=float("inf"), missing=1)
            if not (worthless := [group_id for group_id in chosen if not self._mask(group_id, step)]):
                return chosen
            for group_id in worthless:
                self._give_up(group_id)
        return dues

    def _due_now(self, step: int) -> tuple[Due, ...] | NotYet:
        size = self._limits.groups_per_step
        if self._policy.stale == "wait":
            return self._outstanding.oldest_in_time(step=step, size=size)
        return self._outstanding.oldest(size=size)

    def _picked(self, step: int) -> tuple[GroupId, ...]:
        """What the user's function takes from the buffer."""
        if self._pick is None:
            raise AssertionError("there is no function to pick groups")
        groups = [self._buffered[due.group_id].group for due in self._outstanding.finished()]
        picked = self._pick(step, groups, self._limits.groups_per_step)
        for group_id, reason in picked.drop.items():
            self._accounts.unpick(self._unbuffer(group_id), reason)
            self._pick_drops += 1
        self._moved.set()
        if len(picked.train) < self._limits.groups_per_step:
            self._streaks.unpicked(self._pick_drops, len(self._buffered))
        return picked.train

    def _mask(self, group_id: GroupId, step: int) -> bool:
        """Take what is too old at ``step`` out of the group's loss; whether anything is left."""
        waiting, first = self._buffered[group_id], step - self._limits.max_staleness
        group = masked_before(waiting.group, first)
        trained_from = group.oldest_trained_step
        if trained_from is not None and trained_from < first:
            raise AssertionError(f"group {group_id}: tokens of step {trained_from} in the loss, {first} is the oldest")
        self._buffered[group_id] = replace(waiting, group=group)
        return trained_from is not None or group.num_tokens == 0

    # ---- groups that came too late

    def _let_go_of_the_doomed(self) -> None:
        """Cancel or interrupt what no step can train in time any more."""
        is_over = self._batches_taken == self._limits.num_steps
        if self._policy.stale == "mask" and not is_over:
            return
        step, size = self._batches_taken, self._limits.groups_per_step
        if self._pick is None:
            late = self._outstanding.doomed(step=step, size=size)
        else:  # nobody knows whom it will take: only the deadline counts
            late = self._outstanding.overdue(step=step)
        for due in late:
            rollout = self._in_flight.by_id(due.group_id)
            if rollout is None:
                self._give_up(due.group_id)
            else:
                self._stop(rollout)
        while is_over and self._parked:
            parked = self._parked.popleft()
            self._accounts.leave(parked, GroupOutcome.STALE)
            self._prompt_queue.give_back(parked.prompt)

    def _give_up(self, group_id: GroupId) -> None:
        """A scored group is too old; its prompt comes again."""
        group = self._unbuffer(group_id)
        self._accounts.expire(group)
        self._prompt_queue.give_back(group.prompt)
        self._moved.set()

    def _unbuffer(self, group_id: GroupId) -> ScoredGroup:
        """It waits no more."""
        waiting = self._buffered.pop(group_id)
        self._outstanding.remove(waiting.due)
        return waiting.group

    def _stop(self, rollout: GroupInFlight) -> None:
        """A group in flight is too old.  It goes on later with what it has, or its prompt comes again."""
        if rollout.task is None:
            raise AssertionError(f"group {rollout.group_id} has no task")
        rollout.task.cancel()
        if self._policy.partial and self._batches_taken < self._limits.num_steps:
            self._end_rollout(rollout)
            self._accounts.interrupt(rollout.group_id)
            self._parked.append(rollout.resumed())  # a copy: what still arrives for this one is wasted
        else:
            self._leave(rollout, GroupOutcome.STALE)
            self._prompt_queue.give_back(rollout.prompt)

    def _who_waits_for_whom(self) -> str:
        ready, size = len(self._buffered), self._limits.groups_per_step
        first = sorted(self._in_flight, key=lambda rollout: rollout.due.order)[:3]
        held = "; ".join(
            f"group {rollout.group_id} (row {rollout.prompt.row}) for {loop_time() - rollout.since:.0f} s with "
            f"{rollout.num_tokens} tokens"
            for rollout in first
        )
        return (
            f"step {self._batches_taken} has {ready} of {size} groups; {len(self._in_flight)} groups in flight, "
            f"{self._slots.in_use} of {self._slots.limit} slots in use; waiting for {held or 'a group to be admitted'}"
        )

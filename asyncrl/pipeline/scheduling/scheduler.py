"""The scheduler: keeps samples in flight and hands over batches within the staleness bound.

consumes      prompts
produces      batches of scored groups, oldest dispatched first
waits for     a prompt, admission (a batch taken, newer weights) and a free slot; a batch waits for its groups
unblocked by  the source of prompts, a sample or group that ends, next_batch(), look_again()
on cancel     every request in flight is aborted on its server
on crash      groups in flight are lost; with a journal, scored groups are not
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from uuid import uuid4

from asyncrl.buffer import Dispatch, Outstanding, masked_before
from asyncrl.buffer.journal import Journal, RecordedSteps
from asyncrl.errors import AsyncRLError, plainly
from asyncrl.event_loop import loop_time
from asyncrl.metrics.facts import Gauges, SchedulerStats
from asyncrl.metrics.timeline import Timeline
from asyncrl.outages import Holds
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.retry import UndeliveredTokens
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.scoring import verdict
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.pipeline.scheduling.acceptance import Acceptance
from asyncrl.pipeline.scheduling.accounts import Accounts
from asyncrl.pipeline.scheduling.admission import AdmissionState, Limits, assumed_acceptance, may_start
from asyncrl.pipeline.scheduling.budgets import Budgets, Streaks
from asyncrl.pipeline.scheduling.group_buffer import GroupBuffer, StalenessPolicy
from asyncrl.pipeline.scheduling.group_generation import GROUP_FAILURES, GroupGeneration
from asyncrl.pipeline.scheduling.groups_in_flight import GroupInFlight, GroupsInFlight, oldest_in_words
from asyncrl.pipeline.scheduling.ledger import GroupOutcome, State
from asyncrl.pipeline.scheduling.prompt_queue import PromptQueue
from asyncrl.pipeline.scheduling.quarantine import Quarantine
from asyncrl.pipeline.scheduling.recorder import Held, Recorder
from asyncrl.pipeline.scheduling.run_state import Restored, RestoredInFlight, RunState, without_unfinished
from asyncrl.pipeline.scheduling.watchdog import Watchdog
from asyncrl.protocols import AdmissionHold, GroupObserver, KeepFn, PickFn, PromptSource
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Batch, GroupId, Prompt, Sample, ScoredGroup, SourceState, Weights

logger = logging.getLogger(__name__)


class Scheduler:
    """The owner of admission, the groups in flight, the buffer and the accounts.  One per run; not thread-safe."""

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
        hold: AdmissionHold | None = None,
        before: RunState | None = None,
        again: Sequence[Prompt] = (),
        restored: Restored | None = None,
        observers: Sequence[GroupObserver] = (),
        quarantine: Quarantine | None = None,
    ) -> None:
        """Prepare a run; ``sampler`` must use the same ``slots`` and ``serving``.

        Without ``pick`` the oldest groups are trained first.  While ``hold`` has a reason, or the reward function of
        ``sampler`` does not reach its service, no new group starts.
        ``before`` is the state of the run that this one resumes, ``again`` are its outstanding prompts, and
        ``restored`` its groups, if it had a journal.  ``observers`` see the groups that leave.  Rows in ``quarantine``
        start no group.
        """
        restored = restored or Restored()
        self._serving = serving
        self._prompt_queue = PromptQueue(prompts, again, before)
        self._sampler = sampler
        self._keep = keep
        self._limits = limits
        self._slots = slots
        self._timeline = timeline
        self._policy = policy or StalenessPolicy()
        self._picks = pick is not None
        self._hold = Holds([sampler.outage] if hold is None else [sampler.outage, hold])
        self._observers = tuple(observers)
        self._quarantine = quarantine or Quarantine()
        self._recorder = Recorder(self._needs_at_once)
        self._accounts = Accounts(limits.group_size, before, self._recorder)
        self._acceptance = Acceptance(before.verdicts if before else ())
        self._outstanding = Outstanding()
        self._in_flight = GroupsInFlight()
        self._parked: deque[GroupInFlight] = deque()
        self._restarting = deque(restored.in_flight)
        self._to_train_again = deque(restored.batches)
        self._starts_from = restored.newest_step
        self._mark = before.mark if before else ""
        self._training: Batch | None = None
        self._batches_taken = before.step if before else 0
        self._next_id = before.next_id if before else 0
        self._next_order = 0
        self._streaks = Streaks(budgets)
        self._watchdog = Watchdog(budgets, self._hold, self._who_waits_for_whom)
        self._buffer = GroupBuffer(
            outstanding=self._outstanding,
            limits=limits,
            policy=self._policy,
            pick=pick,
            accounts=self._accounts,
            streaks=self._streaks,
            watchdog=self._watchdog,
            on_change=self.look_again,
            on_wait=self._recorder.hurry_if_needed,
            give_back=self._return,
        )
        self._ready: tuple[GroupId, ...] = ()
        self._moved = asyncio.Event()
        self._generation = GroupGeneration(
            sampler,
            timeline,
            group_size=limits.group_size,
            mask_resumed=self._policy.mask_resumed,
            on_move=self._note_move,
        )
        self._restore(restored)
        sampler.undelivered = UndeliveredTokens(arrived=self._watchdog.moved, dropped=self._accounts.waste)
        slots.notify(self.look_again)
        self._hold.notify(self.look_again)

    def _restore(self, restored: Restored) -> None:
        """Take over the groups that a journal kept.  Deadlines follow from the weights of their dispatch."""
        for batch in restored.batches:
            for group in batch.groups:
                self._accounts.restore(group.group_id, State.BUFFERED)
        for group in restored.buffered:
            dispatch = self._dispatch(group.group_id, group.dispatched.step)
            self._outstanding.start(dispatch)
            self._accounts.restore(group.group_id, State.IN_FLIGHT)
            self._buffer.add(dispatch, group)
        for each in restored.in_flight:
            self._accounts.restore(each.group_id, State.PARTIAL)

    async def begin_journal(
        self, journal: Journal, about: Mapping[str, Any], *, has_groups: bool, source: SourceState | None = None
    ) -> None:
        """Record the state with which the run begins, and wait until it is on the disk; record every later event.

        ``has_groups`` tells whether the journal continues that of the resumed run, and thus has its groups already.  A
        recovery checks ``about``, notes as JSON values.  With the state of a user's ``source``, which cannot find
        prompts again, the journal stores them whole.
        """
        self._recorder.write_to(journal, about, keeps_prompts=source is not None)
        if not has_groups:
            for batch in self._to_train_again:
                unused = (Dispatch(order=0, deadline=batch.step, group_id=group.group_id) for group in batch.groups)
                await self._recorder.finished_before(zip(unused, batch.groups, strict=True))
            for each in self._restarting:
                self._recorder.grown_before(each.grown)
            await self._recorder.finished_before(self._buffer.waiting())
        state = self._record(replace(self.state(source), mark=self._mark))
        await self._recorder.written()
        self.checkpointed(state.step)

    async def run(self) -> None:
        """Start groups as admission allows, until cancelled, or until a named error ends the groups.

        ``next_batch`` then raises that error once no batch is left, so that a step in training can be saved: it is
        FailureBudgetSpent, FilterBudgetSpent, or the source's DataError or HookFailed.  Raises the bug that ended a
        group.
        """
        try:
            with plainly():
                await self._start_groups()
        except AsyncRLError as error:
            logger.warning("no further group starts: %s", error)
            self._watchdog.end(error)

    async def _start_groups(self) -> None:
        async with self._generation.running(), TaskGroup() as groups:
            while True:
                await self._admission()
                if (group := self._admit()) is None:
                    continue
                group.task = groups.create_task(self._generate_group(group), name=f"group-{group.group_id}")

    async def next_batch(self) -> Batch:
        """Wait for the groups of the next step and take them.

        Groups that no later step can train in time are cancelled here, before the next weight update.  Raises Stalled
        if neither a token nor a group arrives for ``watchdog_timeout_s``, RewardOutage, or the error that ended
        ``run``.  The batches of a killed run come first.
        """
        if self._to_train_again:
            return self._batch_to_train_again()
        chosen, self._ready = self._ready or await self._buffer.chosen(self._batches_taken), ()
        batch = Batch(step=self._batches_taken, groups=self._buffer.take(chosen))
        self._recorder.taken(batch)
        self._training = batch
        self._batches_taken += 1
        self._let_go_of_the_doomed()
        self._moved.set()
        return batch

    def _batch_to_train_again(self) -> Batch:
        batch = self.masked(self._to_train_again.popleft())
        for group in batch.groups:
            self._accounts.take(group.group_id)
        logger.info("step %d: trains the batch of the journal, %d more follow", batch.step, len(self._to_train_again))
        self._training = batch
        self._batches_taken += 1
        if not self._to_train_again:  # they may have been the last steps of the run
            self._let_go_of_the_doomed()
        self._moved.set()
        return batch

    def masked(self, batch: Batch) -> Batch:
        """Return a batch of the journal with the masks for old tokens that it had when it was taken."""
        first = batch.step - self._limits.max_staleness
        return replace(batch, groups=tuple(masked_before(group, first) for group in batch.groups))

    async def steps_since(self, step: int) -> RecordedSteps | None:
        """Read the batches taken since ``step``, of which there was a checkpoint; None without such a journal.

        Raises JournalDamaged, or OSError.
        """
        return await self._recorder.steps_since(step)

    def silence_allowed(self) -> AbstractContextManager[None]:
        """Return a block in which no token and no group need arrive, because the trainer is away."""
        return self._watchdog.paused()

    async def batch_ready(self) -> None:
        """Wait until ``next_batch`` would return at once."""
        if self._to_train_again:
            return
        chosen = await self._buffer.chosen(self._batches_taken)
        if self._picks:
            self._ready = chosen  # a user function must not be called twice for one batch

    async def outlast(self, event: asyncio.Event) -> None:
        """Wait for ``event``, which needs rewards.  Raises RewardOutage; silence is allowed."""
        await self._watchdog.wait(event, allows_silence=True)

    def replace_batch(self, batch: Batch) -> None:
        """Record the batch taken last as hooks changed it: same groups, other loss masks or rewards."""
        self._training = batch

    def close_step(self, *, is_skipped: bool = False) -> None:
        """Record that the batch taken last was trained, or that it changed no weights."""
        assert self._training is not None, "no batch is in training"
        self._accounts.train(self._training, is_skipped=is_skipped)
        self._training = None

    def note_weights(self) -> None:
        """Record that the engines serve newer weights, and check admission again."""
        self._recorder.published(self._serving.now)
        self.look_again()

    def note_evaluation(self, weights: Weights) -> None:
        """Record that an evaluation of ``weights`` has ended."""
        self._recorder.evaluated(weights)

    @property
    def needs_newer_weights(self) -> bool:
        """Whether no group may start, because a killed run started one under newer weights than the engines serve.

        The deadline of a new group would precede that of the older one.
        """
        return not self._to_train_again and self._serving.now.step < self._starts_from

    def look_again(self) -> None:
        """Check admission again after a change outside the scheduler: newer weights, or a free slot."""
        self._moved.set()

    def gauges(self) -> Gauges:
        """Return the counts of groups, tokens and slots.  Raises AssertionError if an account does not balance."""
        batches = (*([self._training] if self._training else ()), *self._to_train_again)
        scored = (*self._buffer.groups().values(), *(group for batch in batches for group in batch.groups))
        held = sum(group.num_tokens for group in (*self._in_flight, *self._parked, *self._restarting))
        tokens, groups = self._accounts.balance(held + sum(group.num_tokens for group in scored))
        return Gauges(
            tokens=tokens,
            groups=groups,
            filter_reasons=self._accounts.reasons,
            samples_in_flight=self._slots.in_use,
            slots=self._slots.size,
            episodes_open=self._generation.num_open,
            waits_for=self._hold.reason,
            outage_s=self._hold.outage_s,
        )

    def stats(self) -> SchedulerStats:
        """Return the counts and lengths after a step.  Called once per step: it visits every sample in flight."""
        held = self.gauges()
        unfinished = (length for group in (*self._in_flight, *self._parked) for length in group.cut_lengths())
        return SchedulerStats(
            tokens=held.tokens,
            groups=held.groups,
            filter_reasons=held.filter_reasons,
            samples_in_flight=held.samples_in_flight,
            slots=held.slots,
            episodes_open=held.episodes_open,
            waits_for=held.waits_for,
            outage_s=held.outage_s,
            acceptance=self._acceptance.rate,
            returned=len(self._prompt_queue.returned),
            retries=self._sampler.retries,
            aborts=self._sampler.aborts,
            slot_limit=self._slots.limit,
            weights=self._serving.now,
            lengths=self._accounts.lengths(unfinished),
            episodes=self._generation.take_stats(),
        )

    def state(self, source: SourceState | None = None) -> RunState:
        """Return the state of the run; allowed only between ``close_step`` and ``next_batch``.

        The prompts of held groups are outstanding in it.  With the state of a user's ``source``, which cannot find
        prompts again, they are stored whole, and the prompts that it fetched ahead follow.
        """
        gauges = self.gauges()
        tokens, groups = without_unfinished(gauges.tokens, gauges.groups)
        prompts = (*(prompt for _, prompt, _ in self._held()), *self._prompt_queue.returned)
        return RunState(
            step=self._batches_taken,
            version=self._serving.now.version,
            next_id=self._next_id,
            prompts_taken=self._prompt_queue.num_taken,
            last_taken=self._prompt_queue.last_taken,
            outstanding=() if source else tuple((prompt.epoch, prompt.row) for prompt in prompts),
            prompts=(*prompts, *source.ahead) if source else (),
            source={"fetched": source.fetched, "state": source.state} if source else None,
            given=source.given if source else (),
            tokens=tokens,
            groups=groups,
            reasons=gauges.filter_reasons,
            verdicts=self._acceptance.verdicts,
            retries=self._sampler.retries,
            aborts=self._sampler.aborts,
        )

    def begin_checkpoint(self, source: SourceState | None = None) -> RunState:
        """Return ``state``, and record it: a recovery from a checkpoint with this state needs the records after it."""
        return self._record(replace(self.state(source), mark=uuid4().hex))

    def _record(self, state: RunState) -> RunState:
        held = self.gauges()
        self._recorder.snapshot(state, (held.tokens, held.groups), self._held(), self._to_train_again)
        return state

    async def recorded(self) -> None:
        """Wait until the state of the last ``begin_checkpoint`` is on the disk."""
        await self._recorder.written()

    def checkpointed(self, step: int) -> None:
        """Record that the checkpoint of ``step`` is complete."""
        self._recorder.checkpointed(step)

    @property
    def num_delivered(self) -> int:
        """Tokens that engines have delivered over the whole run."""
        return self._accounts.num_delivered

    def _held(self) -> list[Held]:
        """Return the groups that are neither trained nor dropped, without a batch in training, in order of their id."""
        waits = self._recorder.waiting  # the record comes before that of this state, so a recovery has the group
        found = [(group.group_id, group.prompt, group.group_id in waits) for group in (*self._in_flight, *self._parked)]
        found += [(each.group_id, each.prompt, False) for each in self._restarting]
        waiting = (group for batch in self._to_train_again for group in batch.groups)
        found += [(group.group_id, group.prompt, True) for group in (*self._buffer.groups().values(), *waiting)]
        return sorted(found, key=lambda each: each[0])

    # ---- admission

    async def _admission(self) -> None:
        """Wait until a group has its prompt and may start.  No task but this one takes prompts or resumes groups."""
        while True:
            while not self._may_start():
                self._moved.clear()
                await self._moved.wait()
            # The source is asked only now: one that ends with the last group of the run must not end the run.
            has_prompt = bool(self._parked or self._restarting) or await self._prompt_queue.ready()
            if has_prompt and self._may_start():  # it may have changed during the wait
                return

    def _may_start(self) -> bool:
        if self._to_train_again or self.needs_newer_weights:
            return False
        has_room = self._slots.free > 0 and (bool(self._parked) or self._generation.has_room)
        return has_room and not self._is_held() and may_start(self._admission_state(), self._limits)

    def _is_held(self) -> bool:
        """Return whether a new group must not start; an interrupted one may resume, because it was admitted."""
        return self._hold.since is not None and not self._parked

    def _admission_state(self) -> AdmissionState:
        return AdmissionState(
            batches_taken=self._batches_taken,
            buffered=self._buffer.num_in_demand,
            in_flight=self._outstanding.num_unfinished(self._batches_taken),
            engine_step=self._serving.now.step,
            free_slots=self._slots.free,
            acceptance=assumed_acceptance(self._acceptance.upper, self._limits, drops=self._policy.stale == "drop"),
        )

    def _admit(self) -> GroupInFlight | None:
        """Resume an interrupted group, or start a new one if there is none.

        Returns None for a prompt in quarantine, which is then done with.  Raises FailureBudgetSpent if all are.
        """
        now, weights = loop_time(), self._serving.now
        if self._parked:
            parked = self._parked.popleft()
            group = replace(parked, dispatch=self._dispatch(parked.group_id), dispatched=weights, since=now)
            self._accounts.resume(group.group_id)
        elif self._restarting:
            group = self._restarted(self._restarting.popleft(), weights, now)
            self._accounts.resume(group.group_id)
        else:
            prompt = self._prompt_queue.take()
            if self._quarantine.leaves_out(prompt):
                self._accounts.leave_out()
                self._recorder.left_out(prompt, self._prompt_queue)
                self._give_back_failed(prompt)
                return None
            dispatch = self._dispatch(GroupId(self._next_id))
            group = self._generation.begin(dispatch, prompt, weights, now)
            self._next_id += 1
            self._accounts.admit(group.group_id)
            self._recorder.admitted(group.group_id, prompt, self._prompt_queue)
        self._slots.claim(group.claims)
        self._in_flight.add(group)
        self._outstanding.start(group.dispatch)
        return group

    def _restarted(self, before: RestoredInFlight, weights: Weights, now: float) -> GroupInFlight:
        """Return a group of a killed run with the tokens that the journal has."""
        group = self._generation.begin(self._dispatch(before.group_id), before.prompt, weights, now)
        for grown in before.grown:
            partial = group.partials[grown.index]
            partial.extend(grown.chunk, grown.weights)
            partial.ended = grown.finish
        return group.resumed() if before.grown else group

    def _dispatch(self, group_id: GroupId, step: int | None = None) -> Dispatch:
        """Return the next dispatch, under the weights of ``step``; None: the weights that engines serve."""
        self._next_order += 1
        step = self._serving.now.step if step is None else step
        last = min(step + self._limits.max_staleness, self._limits.num_steps - 1)
        return Dispatch(order=self._next_order, deadline=last, group_id=group_id)

    # ---- one group

    async def _generate_group(self, group: GroupInFlight) -> None:
        try:
            scored_group = await self._generation.complete(
                group,
                lambda partial, num_tokens: self._count(group, partial, num_tokens),
                lambda samples: self._generated(group, samples),
            )
            if group.is_gone:
                reason = None
            elif (reason := verdict(self._keep, scored_group)) is None:
                await self._recorder.finished(group.dispatch, scored_group)
            if not group.is_gone:
                self._finish_group(group, scored_group, reason)
        except GROUP_FAILURES as error:
            if not group.is_gone:
                self._fail(group, error)
        self._note_move()
        self._buffer.look_again(group.dispatch)

    def _needs_at_once(self, num_groups: int) -> bool:
        """Return whether finished groups must not wait for others to share a commit: so many may complete a batch.

        One that is complete before the trainer asks for it is then on the disk when it does, unless an older group came
        last.  Where due groups are dropped, one that waits for the disk would be dropped with them.
        """
        if self._policy.stale == "drop":
            return True
        return self._buffer.is_short_of(num_groups) or self._buffer.fills_a_batch(num_groups)

    def _note_move(self) -> None:
        """Note that a group ended, or that an episode asks an engine: its measured share of slots has changed."""
        self._watchdog.moved()
        self._moved.set()

    def _count(self, group: GroupInFlight, partial: PartialSample | None, num_tokens: int) -> bool:
        """Count delivered tokens, and record them if they are kept; return whether their group is still in flight."""
        self._watchdog.moved()
        is_kept = self._accounts.deliver(group, num_tokens)
        if is_kept and partial is not None and self._policy.partial:
            self._recorder.grown(group.group_id, partial)
        return is_kept

    def _generated(self, group: GroupInFlight, samples: Sequence[Sample]) -> None:
        """Record the samples of a place that has ended."""
        if not group.is_gone:
            for sample in samples:
                self._accounts.finish(sample)
                if self._policy.partial and group.partials:  # an episode has none
                    self._recorder.ended(group.group_id, group.partials[sample.index], sample.finish)
            self._slots.unclaim(1)

    def _finish_group(self, group: GroupInFlight, scored_group: ScoredGroup, reason: str | None) -> None:
        self._in_flight.remove(group)
        self._acceptance.note(reason is None)
        self._quarantine.succeeded(group.prompt)
        for observer in self._observers:
            observer.finished(scored_group, reason)
        if reason is None:
            self._streaks.kept()
            self._buffer.add(group.dispatch, scored_group)
            self._timeline.counter("groups buffered", loop_time(), len(self._buffer))
        else:
            self._outstanding.remove(group.dispatch)
            self._accounts.reject(scored_group, reason)
            self._streaks.filtered(reason)

    def _fail(self, group: GroupInFlight, error: AsyncRLError) -> None:
        self._leave(group, GroupOutcome.FAILED)
        logger.warning("group %d failed: %s", group.group_id, error)
        logger.debug("where group %d failed", group.group_id, exc_info=error)
        was_known = self._quarantine.failed(group.prompt, error)
        self._give_back_failed(group.prompt)
        if not was_known:  # a row that fails again does not count again
            self._streaks.failed(error)

    def _give_back_failed(self, prompt: Prompt) -> None:
        """Return the prompt of a failed group to the observers; it is not started again, as it may fail again."""
        if not self._quarantine.withholds(prompt):
            self._is_taken_back(prompt, None, GroupOutcome.FAILED)

    def _leave(self, group: GroupInFlight, outcome: GroupOutcome) -> None:
        """Drop a group in flight."""
        self._end_group(group)
        group.close()
        self._accounts.leave(group, outcome)

    def _end_group(self, group: GroupInFlight) -> None:
        """Remove a group from those in flight, and give up its claims on slots."""
        self._slots.unclaim(group.claims)
        self._in_flight.remove(group)
        self._outstanding.remove(group.dispatch)

    # ---- stale groups

    def _let_go_of_the_doomed(self) -> None:
        """Interrupt or drop the groups that no step can train in time."""
        is_over = self._batches_taken == self._limits.num_steps
        if self._policy.stale == "mask" and not is_over:
            return
        step, size = self._batches_taken, self._limits.groups_per_step
        if not self._picks:
            late = self._outstanding.doomed(step=step, size=size)
        else:  # the buffer filter may pick any group: only the deadline counts
            late = self._outstanding.overdue(step=step)
        for dispatch in late:
            group = self._in_flight.by_id(dispatch.group_id)
            if group is None:
                self._buffer.expire(dispatch.group_id)
            else:
                self._stop(group)
        while is_over and self._restarting:
            before = self._restarting.popleft()
            self._accounts.give_up(before.group_id, before.num_tokens)
            self._return(before.prompt)
        while is_over and self._parked:
            parked = self._parked.popleft()
            parked.close()
            self._accounts.leave(parked, GroupOutcome.STALE)
            self._return(parked.prompt)

    def _stop(self, group: GroupInFlight) -> None:
        """Stop a group in flight that is too old: interrupt it, or drop it and return its prompt."""
        assert group.task is not None, f"group {group.group_id} has no task"
        group.task.cancel()
        if self._policy.partial and self._batches_taken < self._limits.num_steps:
            self._end_group(group)
            self._accounts.interrupt(group.group_id)
            group.interrupt()
            self._parked.append(group.resumed())  # a copy: tokens that still arrive for this one are stale
            self._prompt_queue.wake()
        else:
            self._leave(group, GroupOutcome.STALE)
            self._return(group.prompt)

    def _return(self, prompt: Prompt, group: ScoredGroup | None = None) -> None:
        """Return the prompt of a stale group to the observer that wants it, or else to the queue."""
        if not self._is_taken_back(prompt, group, GroupOutcome.STALE):
            self._prompt_queue.return_prompt(prompt)

    def _is_taken_back(self, prompt: Prompt, group: ScoredGroup | None, outcome: GroupOutcome) -> bool:
        return any(observer.returned(prompt, group, outcome.value) for observer in self._observers)

    def _who_waits_for_whom(self) -> str:
        starved = self._prompt_queue.seconds_waited
        source = "" if starved is None else f"the data source for {starved:.0f} s without a prompt"
        waits = "; ".join(filter(None, (source, oldest_in_words(self._in_flight, loop_time()))))
        return (
            f"step {self._batches_taken} has {len(self._buffer)} of {self._limits.groups_per_step} groups; "
            f"{len(self._in_flight)} groups in flight, {self._slots.in_use} of {self._slots.limit} slots in use; "
            f"waiting for {waits or 'a group to be admitted'}"
        )

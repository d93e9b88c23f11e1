"""The buffer of scored groups, and the choice of the groups of the next batch."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.buffer import Dispatch, NotYet, Outstanding, masked_before
from asyncrl.pipeline.scheduling.accounts import Accounts
from asyncrl.pipeline.scheduling.admission import Limits
from asyncrl.pipeline.scheduling.budgets import Streaks
from asyncrl.pipeline.scheduling.watchdog import Watchdog
from asyncrl.protocols import PickFn
from asyncrl.types import GroupId, Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """The treatment of groups that approach the staleness bound."""

    stale: Literal["wait", "mask", "drop"] = "wait"
    """If a due group is unfinished: wait for it, mask its too old tokens once it is finished, or drop it."""
    partial: bool = False
    """Interrupt groups that would exceed the staleness bound, and resume them under newer weights."""
    mask_resumed: bool = False
    """Mask the tokens that a resumed group generated before its last resumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A scored group in the buffer."""

    dispatch: Dispatch
    group: ScoredGroup


class GroupBuffer:
    """The groups that were scored and kept, and wait for a batch."""

    def __init__(
        self,
        *,
        outstanding: Outstanding,
        limits: Limits,
        policy: StalenessPolicy,
        pick: PickFn | None,
        accounts: Accounts,
        streaks: Streaks,
        watchdog: Watchdog,
        on_change: Callable[[], None],
        on_wait: Callable[[], None],
        give_back: Callable[[Prompt, ScoredGroup], None],
    ) -> None:
        """``on_change`` is called when admission may have changed, ``on_wait`` when a batch begins to lack groups.

        ``give_back`` is called with each prompt of a stale group.
        """
        self._outstanding = outstanding
        self._limits = limits
        self._policy = policy
        self._pick = pick
        self._accounts = accounts
        self._streaks = streaks
        self._watchdog = watchdog
        self._on_change = on_change
        self._on_wait = on_wait
        self._give_back = give_back
        self._waiting: dict[GroupId, _Waiting] = {}
        self._passed_over = 0
        self._pick_drops = 0
        self._waits_for = NotYet(deadline=float("inf"), missing=1)
        self._missing = 1
        self._is_short = False
        self._is_worth_a_look = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_in_demand(self) -> int:
        """Number of groups that the buffer filter has not yet left waiting since the last batch."""
        return len(self._waiting) - self._passed_over

    def groups(self) -> dict[GroupId, ScoredGroup]:
        """Return the groups by id."""
        return {group_id: waiting.group for group_id, waiting in self._waiting.items()}

    def waiting(self) -> list[tuple[Dispatch, ScoredGroup]]:
        """Return the groups with their dispatches."""
        return [(waiting.dispatch, waiting.group) for waiting in self._waiting.values()]

    def add(self, dispatch: Dispatch, group: ScoredGroup) -> None:
        """Add a group that was scored and kept."""
        self._accounts.buffer(group.group_id)
        self._outstanding.finish(dispatch)
        self._waiting[group.group_id] = _Waiting(dispatch=dispatch, group=group)

    def take(self, chosen: tuple[GroupId, ...]) -> tuple[ScoredGroup, ...]:
        """Remove the groups of a batch and return them."""
        for group_id in chosen:
            self._accounts.take(group_id)
        self._passed_over = self._pick_drops = 0
        return tuple(self._remove(group_id) for group_id in chosen)

    def expire(self, group_id: GroupId) -> None:
        """Drop a group as stale and give its prompt back."""
        group = self._remove(group_id)
        self._accounts.expire(group)
        self._give_back(group.prompt, group)
        self._on_change()

    async def chosen(self, step: int) -> tuple[GroupId, ...]:
        """Wait until there is a batch for ``step``, and return its groups; they stay until ``take``.

        Raises Stalled if neither a token nor a group arrives for the watchdog's time.
        """
        while isinstance(chosen := self.choose(step), NotYet):
            self._waits_for, self._missing = chosen, chosen.missing
            self._is_worth_a_look.clear()
            self._is_short = True
            try:
                self._on_wait()
                await self._watchdog.wait(self._is_worth_a_look)
            finally:
                self._is_short = False
        return chosen

    def is_short_of(self, num_groups: int) -> bool:
        """Return whether ``chosen`` waits, and so many more groups may be enough."""
        return self._is_short and num_groups >= self._missing

    def fills_a_batch(self, num_groups: int) -> bool:
        """Return whether the last of so many more groups fills a batch, which may still wait for an older group."""
        return (len(self) + num_groups) % self._limits.groups_per_step == 0

    def look_again(self, ended: Dispatch) -> None:
        """Let ``chosen`` look again if enough groups have ended, of which ``ended`` is one."""
        if ended.deadline <= self._waits_for.deadline:
            self._missing -= 1
            if self._missing <= 0:
                self._is_worth_a_look.set()

    def choose(self, step: int) -> tuple[GroupId, ...] | NotYet:
        """Return the groups of the step's batch with all too old tokens masked, or what to wait for.

        The order is that of ids, or of the buffer filter.  Dispatches have another order after a kill, because groups
        in flight start again behind the finished ones, and the trainer's sums depend on the order in their last bits.
        """
        while not isinstance(dispatches := self._due_now(step), NotYet):
            oldest = tuple(sorted(dispatch.group_id for dispatch in dispatches))
            chosen = self._picked(step) if self._pick else oldest
            if len(chosen) < self._limits.groups_per_step:
                self._passed_over = len(self._waiting)  # not counted in admission until the filter is called again
                self._on_change()
                return NotYet(deadline=float("inf"), missing=1)
            if not (worthless := [group_id for group_id in chosen if not self._mask(group_id, step)]):
                return chosen
            for group_id in worthless:
                self.expire(group_id)
        return dispatches

    def _due_now(self, step: int) -> tuple[Dispatch, ...] | NotYet:
        size = self._limits.groups_per_step
        if self._policy.stale == "wait":
            return self._outstanding.oldest_in_time(step=step, size=size)
        return self._outstanding.oldest(size=size)

    def _picked(self, step: int) -> tuple[GroupId, ...]:
        """Return the groups that the buffer filter picks, and drop the groups that it rejects."""
        if self._pick is None:
            raise AssertionError("there is no function to pick groups")
        groups = [self._waiting[dispatch.group_id].group for dispatch in self._outstanding.finished()]
        picked = self._pick(step, groups, self._limits.groups_per_step)
        for group_id, reason in picked.drop.items():
            self._accounts.unpick(self._remove(group_id), reason)
            self._pick_drops += 1
        self._on_change()
        if len(picked.train) < self._limits.groups_per_step:
            self._streaks.unpicked(self._pick_drops, len(self._waiting))
        return picked.train

    def _mask(self, group_id: GroupId, step: int) -> bool:
        """Mask the group's tokens that are too old at ``step``; return whether it can still be trained.

        A group can be trained if a token is left in its loss, or if none was in it because it has no tokens, or because
        its episodes left them out.  Its prompt would only give such a group again, without end.
        """
        waiting, first = self._waiting[group_id], step - self._limits.max_staleness
        group = masked_before(waiting.group, first)
        trained_from = group.oldest_trained_step
        if trained_from is not None and trained_from < first:
            raise AssertionError(f"group {group_id}: tokens of step {trained_from} in the loss, {first} is the oldest")
        self._waiting[group_id] = replace(waiting, group=group)
        if trained_from is not None:
            return True
        return waiting.group.oldest_trained_step is None and not self._may_be_masked_by_resumption(group)

    def _may_be_masked_by_resumption(self, group: ScoredGroup) -> bool:
        spans = (span for scored in group.samples for span in scored.sample.spans)
        return self._policy.mask_resumed and any(span.weights.version < group.dispatched.version for span in spans)

    def _remove(self, group_id: GroupId) -> ScoredGroup:
        waiting = self._waiting.pop(group_id)
        self._outstanding.remove(waiting.dispatch)
        return waiting.group

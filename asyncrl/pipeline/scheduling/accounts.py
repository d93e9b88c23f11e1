"""The accounts of a run: groups and tokens, answers by length, and the filters' reasons.

The scheduler reports every event; nothing here makes a decision.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.metrics.length_bias import LengthBias, LengthStats
from asyncrl.pipeline.scheduling.groups_in_flight import GroupInFlight
from asyncrl.pipeline.scheduling.ledger import GroupOutcome, Ledger, State, check_balance
from asyncrl.pipeline.scheduling.recorder import Recorder
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.plain_text import one_line
from asyncrl.types import Batch, GroupId, Sample, ScoredGroup

logger = logging.getLogger(__name__)

MOST_REASONS = 64
"""Reasons of filters that are counted apart; each is a metric of every further step."""
OTHER_REASONS = "other"
"""The reason under which all further ones are counted."""
_LONGEST_REASON = 100
"""Characters of a reason that are kept."""


class Accounts:
    """The ledger, the answer lengths and the filters' reasons of one run."""

    def __init__(self, group_size: int, before: RunState | None = None, recorder: Recorder | None = None) -> None:
        """Continue the accounts of ``before``, the state of the resumed run; lengths start from zero.

        ``recorder`` gets the groups that leave untrained.
        """
        self._recorder = recorder or Recorder()
        self._ledger = Ledger(before.tokens, before.groups) if before else Ledger()
        self._lengths = LengthBias(group_size)
        self._reasons: Counter[str] = Counter()
        for reason, groups in Counter(before.reasons if before else {}).most_common():
            self._count(reason, groups)

    # ---- on the way to a score

    def admit(self, group_id: GroupId) -> None:
        """Record an admitted group."""
        self._ledger.admit(group_id)

    def leave_out(self) -> None:
        """Record a prompt in quarantine, which starts no group."""
        self._ledger.leave_out()

    def restore(self, group_id: GroupId, state: State) -> None:
        """Record a group of the resumed run, which ``before`` counts as admitted."""
        self._ledger.restore(group_id, state)

    def interrupt(self, group_id: GroupId) -> None:
        """Record an interrupted group, which keeps its tokens."""
        self._ledger.interrupt(group_id)

    def resume(self, group_id: GroupId) -> None:
        """Record a resumed group."""
        self._ledger.resume(group_id)

    def deliver(self, group: GroupInFlight, num_tokens: int) -> bool:
        """Count delivered tokens; tokens of a group that is gone count as stale.  Returns whether it is there."""
        if group.is_gone:
            self.waste(num_tokens)
        else:
            self._ledger.generate(num_tokens)
        return not group.is_gone

    def waste(self, num_tokens: int) -> None:
        """Count tokens that no group has.  They count as stale."""
        self._ledger.waste(num_tokens)
        self._recorder.wasted(num_tokens)

    def finish(self, sample: Sample) -> None:
        """Record an answer that was generated to its end."""
        self._lengths.finished(sample.num_generated)

    def leave(self, group: GroupInFlight, outcome: GroupOutcome) -> None:
        """Record an unscored group that will not be trained."""
        self._ledger.drop(group.group_id, outcome, group.num_tokens)
        self._recorder.left(group.group_id, outcome, group.num_tokens)
        for length in group.cut_lengths():
            self._lengths.cut(length)
        for sample in group.samples.values():
            self._lengths.dropped(sample.num_generated)

    def give_up(self, group_id: GroupId, num_tokens: int) -> None:
        """Record a group of a killed run, with ``num_tokens`` tokens, that no step is left to train."""
        self._ledger.drop(group_id, GroupOutcome.STALE, num_tokens)
        self._recorder.left(group_id, GroupOutcome.STALE, num_tokens)

    # ---- scored groups

    def buffer(self, group_id: GroupId) -> None:
        """Record a group that was scored and kept."""
        self._ledger.buffer(group_id)

    def reject(self, group: ScoredGroup, reason: str) -> None:
        """Record a group that the filter dropped."""
        self._recorder.filtered(group, reason)
        self._count(reason)
        self._drop(group, GroupOutcome.FILTERED, self._lengths.filtered)

    def unpick(self, group: ScoredGroup, reason: str) -> None:
        """Record a group that the buffer filter dropped.

        The filter had kept it, so its answers count as dropped, not as filtered.
        """
        self._recorder.filtered(group, reason)
        self._count(reason)
        self._drop(group, GroupOutcome.FILTERED, self._lengths.dropped)

    def expire(self, group: ScoredGroup) -> None:
        """Record a scored group that is too old to be trained."""
        self._recorder.left(group.group_id, GroupOutcome.STALE, group.num_tokens)
        self._drop(group, GroupOutcome.STALE, self._lengths.dropped)

    def take(self, group_id: GroupId) -> None:
        """Record a group in the batch that the trainer took."""
        self._ledger.take(group_id)

    def train(self, batch: Batch, *, is_skipped: bool) -> None:
        """Record a batch, which ends a step.  The groups of one that was skipped have failed."""
        self._recorder.trained(batch.step, is_skipped=is_skipped)
        for group in batch.groups:
            if is_skipped:
                self._drop(group, GroupOutcome.FAILED, self._lengths.dropped)
                continue
            self._ledger.train(group)
            for scored in group.samples:
                note = self._lengths.trained if any(scored.loss_mask) else self._lengths.dropped
                note(scored.sample.num_generated)
        self._lengths.close_step()

    # ---- reading

    @property
    def reasons(self) -> Mapping[str, int]:
        """Number of groups that filters dropped, by reason; at most MOST_REASONS and OTHER_REASONS."""
        return dict(self._reasons)

    @property
    def num_delivered(self) -> int:
        """Tokens that engines have delivered."""
        return self._ledger.num_generated

    def balance(self, held: int) -> tuple[TokenCounts, GroupCounts]:
        """Return the token and group counts; ``held`` is the number of tokens held now.

        Raises AssertionError if an account does not balance.
        """
        tokens, groups = self._ledger.tokens(held), self._ledger.groups()
        check_balance(tokens, groups)
        return tokens, groups

    def lengths(self, in_flight: Iterable[int]) -> LengthStats:
        """Return statistics of answer lengths; ``in_flight`` has the present length of each unfinished answer."""
        return self._lengths.stats(in_flight)

    def _count(self, reason: str, groups: int = 1) -> None:
        """Count groups under ``reason``, or under OTHER_REASONS if there are MOST_REASONS others already."""
        reason = one_line(reason[:_LONGEST_REASON])
        num_apart = len(self._reasons.keys() - {OTHER_REASONS})
        if reason not in self._reasons and num_apart >= MOST_REASONS:
            if OTHER_REASONS not in self._reasons:
                text = "filters have given %d reasons; further ones count as %r, the next is: %s"
                logger.warning(text, num_apart, OTHER_REASONS, reason)
            reason = OTHER_REASONS
        self._reasons[reason] += groups

    def _drop(self, group: ScoredGroup, outcome: GroupOutcome, note: Callable[[int], None]) -> None:
        self._ledger.drop(group.group_id, outcome, group.num_tokens)
        self._ledger.observe(group.num_observed)
        for scored in group.samples:
            note(scored.sample.num_generated)

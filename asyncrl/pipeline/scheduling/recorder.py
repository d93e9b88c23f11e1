"""The scheduler's events as records of the journal.

Every event is one record, in the order in which the accounts see them, so that the records restore the accounts.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from asyncrl.buffer import Dispatch
from asyncrl.buffer.journal import (
    Admitted,
    Evaluated,
    Filtered,
    Finished,
    Grown,
    HeldGroup,
    Journal,
    Left,
    LeftOut,
    PromptPlace,
    Published,
    RecordedSteps,
    Snapshot,
    Taken,
    Trained,
    Wasted,
)
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.scheduling.ledger import GroupOutcome
from asyncrl.pipeline.scheduling.prompt_queue import PromptQueue
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import Batch, Chunk, FinishReason, GroupId, Prompt, ScoredGroup, Weights

type Held = tuple[GroupId, Prompt, bool]
"""A held group: its id, its prompt, and whether it was scored and kept."""


class Recorder:
    """Writes the events of a run to its journal; before it has one, does nothing."""

    def __init__(self, needs: Callable[[int], bool] = lambda _: True) -> None:
        """``needs(n)``: whether someone waits for a group, and ``n`` more may be enough."""
        self._needs = needs
        self._waiting = set[GroupId]()
        self._journal: Journal | None = None
        self._about: Mapping[str, Any] = {}
        self._keeps_prompts = False
        self._last = 0
        """Sequence number of the last snapshot."""

    def write_to(self, journal: Journal, about: Mapping[str, Any], *, keeps_prompts: bool = False) -> None:
        """Begin to write.  ``about`` are notes on the run, as JSON values, which a recovery checks.

        A journal that ``keeps_prompts`` has them whole, and not only their epochs and rows.
        """
        self._journal, self._about, self._keeps_prompts = journal, about, keeps_prompts

    # ---- groups

    def admitted(self, group_id: GroupId, prompt: Prompt, queue: PromptQueue) -> None:
        """Record a group that starts for the first time, with the prompts that ``queue`` has taken so far."""
        if self._journal is not None:
            taken, last = queue.num_taken, queue.last_taken
            record = Admitted(group_id=group_id, place=self._place(prompt), prompts_taken=taken, last_taken=last)
            self._journal.append(record)

    def left_out(self, prompt: Prompt, queue: PromptQueue) -> None:
        """Record a prompt in quarantine, which starts no group."""
        if self._journal is not None:
            taken, last = queue.num_taken, queue.last_taken
            self._journal.append(LeftOut(place=self._place(prompt), prompts_taken=taken, last_taken=last))

    def grown(self, group_id: GroupId, partial: PartialSample) -> None:
        """Record the last chunk of an answer in flight."""
        if self._journal is not None and partial.last is not None:
            chunk, weights = partial.last
            start = partial.num_tokens - len(chunk.token_ids)
            record = Grown(group_id=group_id, index=partial.index, start=start, weights=weights, chunk=chunk)
            self._journal.append(record)

    def ended(self, group_id: GroupId, partial: PartialSample, finish: FinishReason) -> None:
        """Record the end of an answer whose chunks are recorded.  Its tokens alone do not always tell it."""
        if self._journal is not None and partial.last is not None:
            chunk, weights = partial.last
            nothing = Chunk(token_ids=(), logprobs=array("f"), version=chunk.version)
            record = Grown(
                group_id=group_id,
                index=partial.index,
                start=partial.num_tokens,
                weights=weights,
                chunk=nothing,
                finish=finish,
            )
            self._journal.append(record)

    def grown_before(self, grown: Iterable[Grown]) -> None:
        """Record the chunks of answers of a killed run, whose journal is in another folder."""
        if self._journal is not None:
            for each in grown:
                self._journal.append(each)

    async def finished(self, dispatch: Dispatch, group: ScoredGroup) -> None:
        """Record a group that was scored and kept, and wait until the record is on the disk.

        A group is trained only after that, so a recovery knows everything that was trained.  Groups that finish soon
        after each other share a commit, unless one of them is needed at once.
        """
        if self._journal is None:
            return
        record = self._journal.append(Finished(dispatch=dispatch, group=group))
        self._waiting.add(group.group_id)
        try:
            self.hurry_if_needed()
            await self._journal.durable(record)
        finally:
            self._waiting.discard(group.group_id)

    @property
    def waiting(self) -> frozenset[GroupId]:
        """The finished groups whose records are not yet known to be on the disk."""
        return frozenset(self._waiting)

    def hurry_if_needed(self) -> None:
        """Write the records of finished groups at once, if someone waits for these groups."""
        if self._journal is not None and self._waiting and self._needs(len(self._waiting)):
            self._journal.hurry()

    async def finished_before(self, groups: Iterable[tuple[Dispatch, ScoredGroup]]) -> None:
        """Record finished groups of a killed run, whose journal is in another folder, and wait for the disk."""
        if self._journal is None:
            return
        records = [self._journal.append(Finished(dispatch=dispatch, group=group)) for dispatch, group in groups]
        if records:
            self._journal.hurry()
            await self._journal.durable(records[-1])

    async def steps_since(self, step: int) -> RecordedSteps | None:
        """Read the batches taken since the snapshot of ``step``; None without a journal that has them.

        Raises JournalDamaged, or OSError.
        """
        return None if self._journal is None else await self._journal.steps_since(step)

    async def written(self) -> None:
        """Wait until the last snapshot is on the disk."""
        if self._journal is not None:
            self._journal.hurry()
            await self._journal.durable(self._last)

    def filtered(self, group: ScoredGroup, reason: str) -> None:
        """Record a group that a filter dropped."""
        if self._journal is not None:
            record = Filtered(
                group_id=group.group_id,
                reason=reason,
                num_tokens=group.num_tokens,
                num_observed=group.num_observed,
            )
            self._journal.append(record)

    def left(self, group_id: GroupId, outcome: GroupOutcome, num_tokens: int) -> None:
        """Record a stale group, whose prompt starts again, or a failed one."""
        if self._journal is not None:
            is_stale = outcome is GroupOutcome.STALE
            record = Left(
                group_id=group_id,
                outcome="stale" if is_stale else "failed",
                num_tokens=num_tokens,
                returns_prompt=is_stale,
            )
            self._journal.append(record)

    def wasted(self, num_tokens: int) -> None:
        """Record tokens that arrived after their group had left."""
        if self._journal is not None:
            self._journal.append(Wasted(num_tokens=num_tokens))

    # ---- steps

    def taken(self, batch: Batch) -> None:
        """Record the groups of a batch, before it is trained."""
        if self._journal is not None:
            self._journal.append(_taken(batch))

    def trained(self, step: int, *, is_skipped: bool) -> None:
        """Record the end of a step."""
        if self._journal is not None:
            self._journal.append(Trained(step=step, is_skipped=is_skipped))

    def published(self, weights: Weights) -> None:
        """Record a version that the engines serve."""
        if self._journal is not None:
            self._journal.append(Published(version=weights.version, step=weights.step))

    def evaluated(self, weights: Weights) -> None:
        """Record the end of an evaluation of ``weights``."""
        if self._journal is not None:
            self._journal.append(Evaluated(version=weights.version, step=weights.step))

    # ---- checkpoints

    def snapshot(
        self,
        state: RunState,
        accounts: tuple[TokenCounts, GroupCounts],
        held: Iterable[Held],
        pending: Iterable[Batch] = (),
    ) -> None:
        """Begin a new segment with the state of a checkpoint.

        ``accounts`` count held groups as such, unlike those of ``state``.  ``pending`` are the recorded batches that
        have not been trained again.
        """
        if self._journal is None:
            return
        tokens, groups = accounts
        self._last = self._journal.begin_segment(
            Snapshot(
                step=state.step,
                state={**replace(state, tokens=tokens, groups=groups).as_json(), "about": dict(self._about)},
                held=tuple(
                    HeldGroup(group_id=group_id, place=self._place(prompt), is_buffered=is_buffered)
                    for group_id, prompt, is_buffered in held
                ),
                pending=tuple(map(_taken, pending)),
            )
        )

    def checkpointed(self, step: int) -> None:
        """Delete what no recovery from the complete checkpoint of ``step`` needs."""
        if self._journal is not None:
            self._journal.checkpointed(step)

    def _place(self, prompt: Prompt) -> PromptPlace:
        return PromptPlace(epoch=prompt.epoch, row=prompt.row, prompt=prompt if self._keeps_prompts else None)


def _taken(batch: Batch) -> Taken:
    return Taken(step=batch.step, group_ids=tuple(group.group_id for group in batch.groups))

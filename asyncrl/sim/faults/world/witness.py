"""The oracles of a life: what must hold at every moment, whatever fails.

Oracles that need one process look at it while it runs.  Oracles of the whole life follow the surviving history: what a
checkpoint holds, and what happened after it in the process that resumed from it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.engines.fake import fake_logprob
from asyncrl.pipeline.sampling.sampler import sample_seed
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.sim.faults.world.plan import Setting
from asyncrl.sim.faults.world.tokens import length_of, token_of
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.types import Batch, Chunk, GroupId, Prompt, ScoredGroup, ScoredSample, Weights

Which = tuple[int, int]
"""Epoch and row of a prompt."""
RUN_SEED = 7
MOST_STEPS = 97
"""Steps that a simulated log-prob tells apart."""


def which(prompt: Prompt) -> Which:
    """Return the identity of a prompt."""
    return prompt.epoch, prompt.row


@dataclass(slots=True)
class Settled:
    """The prompts that were settled, with the way."""

    by_prompt: dict[Which, str] = field(default_factory=dict)

    def add(self, prompt: Which, way: str) -> None:
        """Record a settled prompt.  Raises Violation if it was settled before."""
        if (before := self.by_prompt.get(prompt)) is not None:
            raise Violation("settled once", f"prompt {prompt} is {way}, and was {before}")
        self.by_prompt[prompt] = way

    def copy(self) -> "Settled":
        """Return a copy."""
        return Settled(dict(self.by_prompt))


@dataclass(frozen=True, slots=True)
class Saved:
    """The truth at the moment when a process asked for the state of its run."""

    state: RunState
    settled: Settled
    num_delivered: int

    def is_found(self, found: Any) -> bool:
        """Return whether ``found``, from a checkpoint's file, is this state."""
        state = RunState.from_json(found)
        return replace(state, mark=self.state.mark) == self.state  # the mark is made when the checkpoint begins


def content(batch: Batch) -> list[Any]:
    """Return what a batch trains."""
    return [
        (group.group_id, which(group.prompt), sample.token_ids, sample.spans, scored.reward, scored.loss_mask)
        for group in batch.groups
        for scored in group.samples
        for sample in (scored.sample,)
    ]


class Witness:
    """The oracles of one process.  ``before`` is what held when its checkpoint was made."""

    def __init__(
        self,
        setting: Setting,
        before: Saved | None,
        note: Callable[[str], None],
        again: Mapping[int, Batch] | None = None,
        kept: Set[GroupId] = frozenset(),
    ) -> None:
        """``again`` are the batches that the journal must have, by step, and ``kept`` the groups that it must have."""
        self._setting = setting
        self._again = again or {}
        self._kept = kept
        self._next_step = before.state.step if before else 0
        self._trained = dict[int, Batch]()
        """The batches that this process has trained, by step."""
        self.skipped_steps = set[int]()
        """The steps of this process that changed no weights."""
        self._note = note
        self.settled = before.settled.copy() if before else Settled()
        self.num_delivered = before.num_delivered if before else 0
        """Tokens that went through ``on_chunk``, over the surviving history."""
        self.saved = dict[int, Saved]()
        """The states that were asked for, by step."""
        self._published = before.state.version if before else -1
        self._steps_of = dict[int, int]()
        """The training step of each version."""
        self._masks_nothing = setting.stale == "wait" and not setting.partial
        """Whether no group is trained too late, so that the mask of too old tokens is only a second check."""

    # ---- tokens and versions

    def delivered(self, chunk: Chunk) -> None:
        """Count the tokens of a chunk."""
        self.num_delivered += len(chunk.token_ids)

    def asked(self, request_id: str) -> None:
        """Check that a request generates nothing that the journal has.  Raises Violation."""
        group_id = GroupId(int(request_id.removeprefix("g").split(".")[0].split("~")[0]))
        if group_id in self._kept:
            raise Violation("no finished group is generated again", request_id)

    def took(self, batch: Batch, is_durable: Callable[[GroupId], bool]) -> None:
        """Check a batch that was taken for training.  Raises Violation."""
        lost = [group.group_id for group in batch.groups if group.group_id not in self._kept]
        if lost := [group_id for group_id in lost if not is_durable(group_id)]:
            raise Violation("trained groups are durable", f"step {batch.step} takes groups {lost}")

    def publishing(self, weights: Weights) -> None:
        """Note weights that are about to be published."""
        is_again = weights.version == self._published and self._steps_of.get(weights.version) == weights.step
        if weights.version <= self._published and not (is_again and len(self._steps_of) == 1):
            raise Violation("versions rise", f"{weights} follows version {self._published}")
        self._published = weights.version
        self._steps_of[weights.version] = weights.step
        self._note(f"publish {weights}")

    # ---- groups

    def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
        """See ``GroupObserver.finished``."""
        if reason is not None:
            self.settled.add(which(group.prompt), "filtered")

    def returned(self, prompt: Prompt, group: ScoredGroup | None, outcome: str, /) -> bool:
        """See ``GroupObserver.returned``."""
        if outcome == "failed":
            self.settled.add(which(prompt), "failed")
        return False

    def trained(self, batch: Batch) -> None:
        """Check a batch that the trainer has trained."""
        self._check_batch(batch)
        self._trained[batch.step] = batch
        for group in batch.groups:
            self.settled.add(which(group.prompt), f"trained in step {batch.step}")

    def is_done(self, step: int) -> bool:
        """Return whether this process has trained or skipped the step before."""
        return step < self._next_step

    def trained_again(self, batch: Batch) -> None:
        """Check a batch that a restarted trainer has trained again.  Raises Violation."""
        before = self._trained.get(batch.step)
        if before is None or content(batch) != content(before):
            found = f"step {batch.step} has {content(batch)}, and had {before and content(before)}"
            raise Violation("the same batch again", f"after a restart of the trainer, {found}")
        self._note(f"train step {batch.step} again")

    def skipped(self, batch: Batch) -> None:
        """Note a batch that changed no weights: its groups have failed."""
        self._check_batch(batch)
        self.skipped_steps.add(batch.step)
        for group in batch.groups:
            self.settled.add(which(group.prompt), f"skipped in step {batch.step}")

    def _check_batch(self, batch: Batch) -> None:
        if batch.step != self._next_step:
            raise Violation("steps in order", f"step {batch.step} is trained, not {self._next_step}")
        self._next_step += 1
        if (before := self._again.get(batch.step)) is not None and content(batch) != content(before):
            found = f"step {batch.step} has {content(batch)}, and had {content(before)}"
            raise Violation("the same batch again", found)
        self._note(f"train step {batch.step}: groups {[group.group_id for group in batch.groups]}")
        if len(batch.groups) != self._setting.groups_per_step:
            raise Violation("whole batches", f"step {batch.step} has {len(batch.groups)} groups")
        for group in batch.groups:
            if len(group.samples) != self._setting.group_size:
                raise Violation("whole groups", f"group {group.group_id} has {len(group.samples)} samples")
            for scored in group.samples:
                self._check_sample(batch.step, group, scored)

    def _check_sample(self, step: int, group: ScoredGroup, scored: ScoredSample) -> None:
        sample, longest = scored.sample, self._setting.longest
        who = f"step {step}, group {group.group_id}, sample {sample.index}"
        seed = sample_seed(RUN_SEED, group.group_id, sample.index)
        length = min(length_of(seed, longest), self._setting.max_new_tokens)
        expected = tuple(token_of(seed, place, longest) for place in range(length))
        if sample.token_ids != expected:
            raise Violation("tokens without gap or repeat", f"{who}: {sample.token_ids}, not {expected}")
        if self._masks_nothing and not all(scored.loss_mask):
            raise Violation("deadlines suffice", f"{who}: {sample.spans} of version {group.dispatched}, masked")
        last = -1
        before = group.prompt.token_ids[-1]
        for span in sample.spans:
            if span.weights.version < last or self._steps_of.get(span.weights.version) not in (span.weights.step, None):
                raise Violation("versions rise", f"{who}: {sample.spans}")
            last = span.weights.version
            for place in range(span.start, span.stop):
                token = sample.token_ids[place]
                told = sample.logprobs[place]
                self._check_version(who, span.weights, place, before, token, told)
                if scored.loss_mask[place] and step - span.weights.step > self._setting.staleness:
                    raise Violation("lag at most S", f"{who}: token {place} of {span.weights}")
                before = token

    def _check_version(self, who: str, weights: Weights, place: int, before: int, token: int, told: float) -> None:
        """Check the step of the weights that a token names against its log-prob, which only the true ones give."""
        if told == fake_logprob(before, token, weights.step):
            return
        true = next((step for step in range(-1, MOST_STEPS) if told == fake_logprob(before, token, step)), None)
        is_allowed = not self._setting.has_stamps and true is not None and true > weights.step
        if not is_allowed:
            raise Violation("version of each token", f"{who}: token {place} is of step {true}, and names {weights}")

    # ---- states

    def asked_for_state(self, state: RunState, rows: int) -> None:
        """Check a state that a checkpoint will hold, and remember what is settled by now."""
        taken = {divmod(position, rows) for position in range(state.prompts_taken)}
        outstanding = set(state.outstanding)
        if len(outstanding) != len(state.outstanding) or not outstanding <= taken:
            raise Violation("settled once", f"outstanding {state.outstanding} of {state.prompts_taken} prompts")
        settled = self.settled.by_prompt.keys()
        if taken - outstanding != settled:
            lost, twice = sorted(taken - outstanding - settled), sorted(settled - (taken - outstanding))
            raise Violation("no prompt is lost", f"after step {state.step}: lost {lost}, still outstanding {twice}")
        self._check_counts(state)
        self.saved[state.step] = Saved(state, self.settled.copy(), self.num_delivered)

    def _check_counts(self, state: RunState) -> None:
        counts = Counter(way.split(" in ")[0] for way in self.settled.by_prompt.values())
        groups = state.groups
        failed = groups.failed + groups.quarantined
        found = (groups.trained, groups.filtered, failed)
        expected = (counts["trained"], counts["filtered"], counts["failed"] + counts["skipped"])
        if found != expected:
            raise Violation("ledger", f"after step {state.step}: {groups}, but settled are {dict(counts)}")

    def check_tokens(self, generated: int) -> None:
        """Compare the ledger's tokens with the delivered ones."""
        if generated != self.num_delivered:
            raise Violation("ledger", f"{generated} tokens generated, {self.num_delivered} were delivered")

"""Groups in flight: from admission to scores."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from asyncrl.buffer import Dispatch, masked_until
from asyncrl.errors import plainly
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.task_groups import TaskGroup
from asyncrl.types import GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Weights


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    """A group in flight.  An interrupted group resumes as a new GroupInFlight with the same id and its tokens."""

    dispatch: Dispatch
    prompt: Prompt
    dispatched: Weights
    """The weights that the engines served when the group was admitted or last resumed."""
    partials: list[PartialSample]
    since: float
    """Time of the admission or the last resumption, on the event loop's clock."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Samples generated to the end, by index."""
    scored: dict[int, ScoredSample] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None
    is_gone: bool = False
    """True once the group is no longer in flight; its tasks may still be ending."""
    num_interruptions: int = 0
    """Number of earlier interruptions."""

    @property
    def group_id(self) -> GroupId:
        """Id of the group, the same after an interruption."""
        return self.dispatch.group_id

    @property
    def claims(self) -> int:
        """Number of samples that hold a slot or will ask for one."""
        return len(self.partials) - len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, over all samples."""
        return sum(partial.num_tokens for partial in self.partials)

    @property
    def state(self) -> str:
        """A phrase for what its samples do now, for the watchdog; empty if its tokens tell enough."""
        return ""

    def interrupt(self) -> None:
        """End what its task does not own, before ``resumed``: nothing here."""

    def close(self) -> None:
        """Cancel what its task does not own, because the group left: nothing here."""

    def cut_lengths(self) -> Iterable[int]:
        """Return the number of tokens of each sample that has not ended."""
        return (partial.num_tokens for partial in self.partials if partial.index not in self.samples)

    def resumed(self) -> "GroupInFlight":
        """Return a copy to resume from; tokens that still arrive for this one do not reach the copy."""
        return replace(
            self,
            partials=[partial.resumed() for partial in self.partials],
            samples=dict(self.samples),
            scored=dict(self.scored),
            task=None,
            is_gone=False,
            num_interruptions=self.num_interruptions + 1,
        )


class GroupsInFlight:
    """The groups in flight, by id."""

    def __init__(self) -> None:
        self._by_id: dict[GroupId, GroupInFlight] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[GroupInFlight]:
        return iter(self._by_id.values())

    def add(self, group: GroupInFlight) -> None:
        """Add an admitted or resumed group."""
        self._by_id[group.group_id] = group

    def remove(self, group: GroupInFlight) -> None:
        """Remove a group that ended for any reason, and mark it as gone."""
        group.is_gone = True
        del self._by_id[group.group_id]

    def by_id(self, group_id: GroupId) -> GroupInFlight | None:
        """Return the group with this id, or None if it is not in flight."""
        return self._by_id.get(group_id)


def oldest_in_words(groups: Iterable[GroupInFlight], now: float) -> str:
    """Return a phrase on each of the three groups that were dispatched first."""
    first = sorted(groups, key=lambda group: group.dispatch.order)[:3]
    return "; ".join(
        f"group {group.group_id} (row {group.prompt.row}) for {now - group.since:.0f} s with "
        f"{group.num_tokens} tokens{group.state}"
        for group in first
    )


async def complete(
    group: GroupInFlight,
    sampler: Sampler,
    *,
    on_tokens: Callable[[PartialSample, int], object],
    on_sample: Callable[[Sample], None],
    mask_resumed: bool,
) -> ScoredGroup:
    """Generate and score the missing samples of a group.

    ``on_tokens`` is called with the sample that a chunk extended and the number of its tokens, ``on_sample`` with each
    generated sample.
    ``mask_resumed`` masks the tokens generated before the last resumption.  Raises the error of a failed sample, a bug
    before a named error, once no sample of the group is in flight.
    """

    async def one(partial: PartialSample) -> None:
        if partial.index not in group.samples:
            name = f"g{group.group_id}" + (f"~{group.num_interruptions}" if group.num_interruptions else "")
            sample = await sampler.generate(
                name, group.group_id, group.prompt, partial, lambda num_tokens: on_tokens(partial, num_tokens)
            )
            group.samples[partial.index] = sample
            on_sample(sample)
        if partial.index not in group.scored and not sampler.scores_groups:
            group.scored[partial.index] = await sampler.score(group.prompt, group.samples[partial.index])

    with plainly():
        async with TaskGroup() as samples:
            for partial in group.partials:
                samples.create_task(one(partial), name=f"sample-{group.group_id}.{partial.index}")
    if sampler.scores_groups:
        samples_of_group = [group.samples[partial.index] for partial in group.partials]
        group.scored = {each.sample.index: each for each in await sampler.score_group(group.prompt, samples_of_group)}
    scored = (group.scored[partial.index] for partial in group.partials)
    if mask_resumed and group.num_interruptions:
        scored = (masked_until(each, partial.resumed_at) for each, partial in zip(scored, group.partials, strict=True))
    return ScoredGroup(group_id=group.group_id, prompt=group.prompt, dispatched=group.dispatched, samples=tuple(scored))

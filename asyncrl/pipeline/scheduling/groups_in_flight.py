"""One group from its admission to its score."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from asyncrl.buffer import Due, masked_until
from asyncrl.errors import plainly
from asyncrl.pipeline.sampling.partial_sample import PartialSample
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.types import GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Weights


@dataclass(slots=True, kw_only=True)
class GroupInFlight:
    """A group in flight.  One that is interrupted goes on as another flight with the same id and what was written."""

    due: Due
    prompt: Prompt
    dispatched: Weights
    """What the engines were serving when the group was admitted, or went on."""
    partials: list[PartialSample]
    since: float
    samples: dict[int, Sample] = field(default_factory=dict)
    """Generated to the end, by index."""
    scored: dict[int, ScoredSample] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None
    is_gone: bool = False
    """It was interrupted or dropped; its tasks are ending."""
    num_interruptions: int = 0
    """How often it was interrupted before."""

    @property
    def group_id(self) -> GroupId:
        """Of the group."""
        return self.due.group_id

    @property
    def claims(self) -> int:
        """Samples that have, or will ask for, a slot."""
        return len(self.partials) - len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Written so far."""
        return sum(partial.num_tokens for partial in self.partials)

    def cut_lengths(self) -> Iterator[int]:
        """Tokens of each sample that has not ended."""
        return (partial.num_tokens for partial in self.partials if partial.index not in self.samples)

    def resumed(self) -> "GroupInFlight":
        """The flight that goes on from here; what still arrives for this one does not reach it."""
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

    def add(self, rollout: GroupInFlight) -> None:
        """It was admitted."""
        self._by_id[rollout.group_id] = rollout

    def remove(self, rollout: GroupInFlight) -> None:
        """It ended, whatever the end."""
        rollout.is_gone = True
        del self._by_id[rollout.group_id]

    def by_id(self, group_id: GroupId) -> GroupInFlight | None:
        """The one with this id, if it is in flight."""
        return self._by_id.get(group_id)


async def complete(
    rollout: GroupInFlight,
    sampler: Sampler,
    *,
    on_tokens: Callable[[int], None],
    on_sample: Callable[[Sample], None],
    mask_resumed: bool,
) -> ScoredGroup:
    """Generate and score what is missing.  ``on_tokens`` and ``on_sample`` hear of what the engines delivered.

    ``mask_resumed`` leaves out of the loss what was there when the group last went on.  Raises what a sample raised, a
    bug before an expected failure, once no sample of the group is in flight.
    """

    async def one(partial: PartialSample) -> None:
        if partial.index not in rollout.samples:
            name = f"g{rollout.group_id}" + (f"~{rollout.num_interruptions}" if rollout.num_interruptions else "")
            sample = await sampler.generate(name, rollout.group_id, rollout.prompt, partial, on_tokens)
            rollout.samples[partial.index] = sample
            on_sample(sample)
        if partial.index not in rollout.scored:
            rollout.scored[partial.index] = await sampler.score(rollout.prompt, rollout.samples[partial.index])

    with plainly():
        async with asyncio.TaskGroup() as samples:
            for partial in rollout.partials:
                samples.create_task(one(partial), name=f"sample-{rollout.group_id}.{partial.index}")
    scored = (rollout.scored[partial.index] for partial in rollout.partials)
    if mask_resumed and rollout.num_interruptions:
        scored = (
            masked_until(each, partial.resumed_at) for each, partial in zip(scored, rollout.partials, strict=True)
        )
    return ScoredGroup(
        group_id=rollout.group_id, prompt=rollout.prompt, dispatched=rollout.dispatched, samples=tuple(scored)
    )

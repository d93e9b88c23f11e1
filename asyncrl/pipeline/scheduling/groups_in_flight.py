"""One group from its admission to its score."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from asyncrl.buffer import Due, masked_until
from asyncrl.errors import plainly
from asyncrl.pipeline.sampling.partial_sample import Draft
from asyncrl.pipeline.sampling.sampler import Sampler
from asyncrl.types import GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Weights


@dataclass(slots=True, kw_only=True)
class Flight:
    """A group in flight.  One that is interrupted goes on as another flight with the same id and what was written."""

    due: Due
    prompt: Prompt
    dispatched: Weights
    """What the engines were serving when the group was admitted, or went on."""
    drafts: list[Draft]
    since: float
    samples: dict[int, Sample] = field(default_factory=dict)
    """Generated to the end, by index."""
    scored: dict[int, ScoredSample] = field(default_factory=dict)
    task: "asyncio.Task[None] | None" = None
    is_gone: bool = False
    """It was interrupted or dropped; its tasks are ending."""
    turn: int = 0
    """How often it was interrupted before."""

    @property
    def group_id(self) -> GroupId:
        """Of the group."""
        return self.due.group_id

    @property
    def claims(self) -> int:
        """Samples that have, or will ask for, a slot."""
        return len(self.drafts) - len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Written so far."""
        return sum(draft.num_tokens for draft in self.drafts)

    def cut_lengths(self) -> Iterator[int]:
        """Tokens of each sample that has not ended."""
        return (draft.num_tokens for draft in self.drafts if draft.index not in self.samples)

    def resumed(self) -> "Flight":
        """The flight that goes on from here; what still arrives for this one does not reach it."""
        return replace(
            self,
            drafts=[draft.resumed() for draft in self.drafts],
            samples=dict(self.samples),
            scored=dict(self.scored),
            task=None,
            is_gone=False,
            turn=self.turn + 1,
        )


class Flights:
    """The groups in flight, by id."""

    def __init__(self) -> None:
        self._by_id: dict[GroupId, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._by_id.values())

    def add(self, flight: Flight) -> None:
        """It was admitted."""
        self._by_id[flight.group_id] = flight

    def remove(self, flight: Flight) -> None:
        """It ended, whatever the end."""
        flight.is_gone = True
        del self._by_id[flight.group_id]

    def by_id(self, group_id: GroupId) -> Flight | None:
        """The one with this id, if it is in flight."""
        return self._by_id.get(group_id)


async def complete(
    flight: Flight,
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

    async def one(draft: Draft) -> None:
        if draft.index not in flight.samples:
            name = f"g{flight.group_id}" + (f"~{flight.turn}" if flight.turn else "")
            sample = await sampler.generate(name, flight.group_id, flight.prompt, draft, on_tokens)
            flight.samples[draft.index] = sample
            on_sample(sample)
        if draft.index not in flight.scored:
            flight.scored[draft.index] = await sampler.score(flight.prompt, flight.samples[draft.index])

    with plainly():
        async with asyncio.TaskGroup() as samples:
            for draft in flight.drafts:
                samples.create_task(one(draft), name=f"sample-{flight.group_id}.{draft.index}")
    scored = (flight.scored[draft.index] for draft in flight.drafts)
    if mask_resumed and flight.turn:
        scored = (masked_until(each, draft.resumed_at) for each, draft in zip(scored, flight.drafts, strict=True))
    return ScoredGroup(
        group_id=flight.group_id, prompt=flight.prompt, dispatched=flight.dispatched, samples=tuple(scored)
    )

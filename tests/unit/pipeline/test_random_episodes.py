"""Under random events in any order, episodes are trained on exactly the tokens that the engines saw and generated.

Random histories on a virtual clock, as in ``test_random_histories``, with functions that take turns, observe, branch,
fan out, use tools, give up calls, raise, and ignore their cancellation.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import batched
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.engines.fake import fake_logprob, fake_token
from asyncrl.episodes import EpisodeOutcome, EpisodeStart, EpisodeTurns, GeneratedTurn, Trajectory
from asyncrl.errors import EpisodeEnded, EpisodeFailed, plainly
from asyncrl.types import Batch, Chunk, Request, ScoredGroup, ScoredSample
from tests.unit.pipeline.episodes import Part, response, trajectory
from tests.unit.pipeline.harness import World, drawn, named
from tests.unit.pipeline.test_random_histories import CHOICES as SINGLE_TURN_CHOICES
from tests.unit.pipeline.test_random_histories import Story, assert_finished_once, ended_clean, resolved, vars_of

HISTORIES = 400
TOGETHER = 20

TOOL_S = (0.0, 0.0, 0.003, 0.05, 0.4)


class Agent:
    """An ``EpisodeFn`` whose seed decides what it does; ``unruly`` is the percentage of episodes that misbehave."""

    def __init__(self, unruly: int) -> None:
        self.unruly = unruly
        self.problems: list[str] = []
        """Events that no function may see."""
        self.ignored: set[str] = set()
        """Episodes that returned a result after their cancellation."""

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """See ``EpisodeFn``."""
        one = _Run(self, start, turns)
        is_unruly = start.seed // 7 % 100 < self.unruly
        if is_unruly and start.seed % 3 == 0:
            return await one.stubborn()
        outcome = await one.behave()
        if is_unruly and start.seed % 3 == 1:
            raise EpisodeFailed("raised")
        return outcome


class _Run:
    """One call of an Agent."""

    def __init__(self, agent: Agent, start: EpisodeStart, turns: EpisodeTurns) -> None:
        self.agent = agent
        self.start = start
        self.turns = turns
        self.fate = start.seed
        self.tool_s = 0.0

    def draw(self, number: int) -> int:
        """Draw 0 to ``number`` - 1."""
        self.fate = (self.fate * 1103515245 + 12345) % 2**31
        return (self.fate >> 8) % number

    async def behave(self) -> EpisodeOutcome:
        """Take turns as drawn, and return what they make."""
        kind = self.draw(5)
        if kind == 0:
            made = [await self.conversation(self.start.prompt.token_ids, 1 + self.draw(3))]
        elif kind == 1:
            made = await self.branched()
        elif kind == 2:
            made = await self.fanned_out()
        elif kind == 3:
            await self.given_up()
            made = [await self.conversation(self.start.prompt.token_ids, 2)]
        else:
            made = [await self.conversation(self.start.prompt.token_ids, 1)]
            if self.draw(2):
                made *= 2  # trained twice
        made = [replace(each, sample=replace(each.sample, metadata={"mask": each.loss_mask})) for each in made]
        return EpisodeOutcome(trajectories=tuple(made), tool_s=self.tool_s, metrics={"episodes/made": len(made)})

    async def stubborn(self) -> EpisodeOutcome:
        """Catch everything and return a result all the same."""
        made = trajectory(self.start.prompt.token_ids, [], reward=1.0)
        for _ in range(4):
            try:
                made = await self.conversation(self.start.prompt.token_ids, 2)
            except EpisodeEnded:
                self.agent.ignored.add(self.start.name)
                break
            except BaseException:  # noqa: BLE001 (as a user's function may)
                continue
        made = replace(made, sample=replace(made.sample, metadata={"mask": made.loss_mask}))
        return EpisodeOutcome(trajectories=(made,))

    async def conversation(self, prompt: tuple[int, ...], num_turns: int, before: Sequence[Part] = ()) -> Trajectory:
        """Take turns with observations between them."""
        parts = list(before)
        for number in range(num_turns):
            if number or before:
                parts.append(await self.tool())
            parts.append(await self.generate(prompt + response(parts)))
        left_out = [self.draw(num_turns + 1)] if self.draw(4) == 0 else []
        reward = float(self.draw(3)) if self.draw(2) else None
        return trajectory(prompt, parts, left_out=left_out, reward=reward)

    async def branched(self) -> list[Trajectory]:
        """Continue one prefix in two ways, at once."""
        prompt = self.start.prompt.token_ids
        first: list[Part] = [await self.generate(prompt)]
        with plainly():
            async with asyncio.TaskGroup() as both:
                tasks = [both.create_task(self.conversation(prompt, 1, first)) for _ in range(2)]
        one, other = (task.result() for task in tasks)
        size = len(first[0].token_ids) if isinstance(first[0], GeneratedTurn) else 0
        return [one, replace(other, loss_mask=(0,) * size + other.loss_mask[size:])]  # the shared turn counts once

    async def fanned_out(self) -> list[Trajectory]:
        """Let agents with prompts of their own work at once."""
        with plainly():
            async with asyncio.TaskGroup() as agents:
                tasks = [
                    agents.create_task(self.conversation((*self.start.prompt.token_ids, 60 + number), 1 + number))
                    for number in range(2 + self.draw(2))
                ]
        return [task.result() for task in tasks]

    async def given_up(self) -> None:
        """Ask an engine, and do not wait for the answer: its tokens are in no sample."""
        try:
            async with asyncio.timeout(0.004):
                await self.generate(self.start.prompt.token_ids)
        except TimeoutError:
            pass

    async def tool(self) -> tuple[int, ...]:
        """Use a tool and return what it says."""
        seconds = TOOL_S[self.draw(len(TOOL_S))]
        self.tool_s += seconds
        await asyncio.sleep(seconds)
        return tuple(self.draw(50) for _ in range(self.draw(4)))

    async def generate(self, token_ids: tuple[int, ...]) -> GeneratedTurn:
        """Generate a turn; a function sees no interruption, and chunks make up the turn."""
        chunks: list[Chunk] = []
        try:
            turn = await self.turns.generate(token_ids, self.start.sampling, chunks.append)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if type(error).__name__ not in ("EpisodeEnded", "SampleFailed"):
                self.agent.problems.append(repr(error))
            raise
        if turn.token_ids != tuple(token for chunk in chunks for token in chunk.token_ids):
            self.agent.problems.append(f"{self.start.name}: the chunks are not the turn")
        return turn


CHOICES: dict[str, tuple[Any, ...]] = {
    **SINGLE_TURN_CHOICES,
    "steps": (1, 3, 6),  # more steps, younger groups and shorter steps: groups that are too old are interrupted
    "interval": (1, 1, 2),
    "staleness": (0, 0, 1, 2),
    "stale": ("wait", "mask", "drop", "drop"),
    "partial": (False, True, True),
    "over_sampling": (None, 2, 5),
    "train_seconds": (0.01, 0.1),
    "short": (2, 9, 30),
    "unruly": (0, 0, 10, 40),
    "max_episodes": (None, None, 1, 6),
    "episode_timeout_s": (1000.0, 1000.0, 1000.0, 0.2),
}


def plan_of(draws: bytes) -> dict[str, Any]:
    """The plan that the bytes choose."""
    return {**resolved(drawn(CHOICES, draws), "g{group}.{sample}.t{turn}"), "max_failed_groups": 40, "chunk": 3}


class EpisodeStory(Story):
    """A story whose samples are generated by an Agent."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.agent = Agent(plan.pop("unruly"))
        short, tail = plan["short"], plan["tail"]
        super().__init__({**plan, "episode": self.agent})

        def lengths(request: Request) -> int:
            longest: int = short * (tail if request.seed % 11 == 0 else 1)
            return 1 + (request.seed + len(request.token_ids)) % longest

        self.world.lengths = lengths


@settings(
    max_examples=HISTORIES // TOGETHER + 1,  # the first is all zeros
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=TOGETHER * len(CHOICES), max_size=TOGETHER * len(CHOICES)))
@pytest.mark.timeout(360)
def test_over_random_histories_episodes_are_trained_on_what_the_engines_saw(draws: bytes) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for each in batched(draws, len(CHOICES)):
            with named(plan := plan_of(bytes(each))):
                live_and_check(EpisodeStory(plan))
    finally:
        logging.disable(logging.NOTSET)


def live_and_check(story: EpisodeStory) -> None:
    story.live()
    world = story.world
    assert not story.agent.problems
    assert max(world.lags, default=0) <= world.staleness
    assert world.engine.most_busy <= world.slots
    assert world.engine.busy == 0
    assert world.all_slots.in_use == 0
    load = world.all_slots.load
    assert load is not None
    assert (load.num_open, load.num_active, load.num_held) == (0, 0, 0)
    stats = world.scheduler.stats()  # checks both accounts
    assert all(count >= 0 for count in vars_of(stats.groups) + vars_of(stats.tokens))
    assert_finished_once(story, stats)
    if story.has_ended:
        ended_clean(world, stats, story.num_spoiled)
    requests = by_call(world)
    for batch in world.trainer.batches:
        for group in batch.groups:
            check_group(story, batch, group, requests)
    groups = [group for batch in world.trainer.batches for group in batch.groups]
    in_loss = sum(sum(scored.loss_mask) for group in groups for scored in group.samples)
    if story.has_ended:
        assert stats.tokens.trained == sum(group.num_trained for group in groups)
        assert stats.tokens.trained_copies == in_loss - stats.tokens.trained
        assert stats.tokens.observed >= sum(group.num_observed for group in groups)


def by_call(world: World) -> dict[str, list[Request]]:
    """The requests of each engine call, in order, by its first request's id."""
    found: dict[str, list[Request]] = {}
    for request in world.engine.requests:
        name = request.request_id.partition("~")[0].partition("-")[0]
        found.setdefault(name, []).append(request)
    return found


def check_group(story: EpisodeStory, batch: Batch, group: ScoredGroup, requests: dict[str, list[Request]]) -> None:
    world = story.world
    indexes = [scored.sample.index for scored in group.samples]
    assert indexes == sorted(set(indexes))
    assert {scored.sample.rollout for scored in group.samples} == set(range(world.group_size))
    of_turns = {
        (each.sample.rollout, turn.call): turn.stop - turn.start for each in group.samples for turn in each.sample.turns
    }
    assert sum(of_turns.values()) <= group.num_tokens
    for scored in group.samples:
        sample = scored.sample
        assert f"g{group.group_id}.{sample.rollout}" not in story.agent.ignored
        assert sample.group_id == group.group_id
        whole = (*(sample.prompt_ids or ()), *sample.token_ids)
        first = len(whole) - len(sample.token_ids)
        for turn in sample.turns:
            asked = requests[f"g{group.group_id}.{sample.rollout}.t{turn.call}"]
            for request in asked:  # each attempt had the context, and the first tokens of the turn
                assert first + turn.start <= len(request.token_ids) <= first + turn.stop
                assert request.token_ids == whole[: len(request.token_ids)]
            for place in range(first + turn.start, first + turn.stop):
                assert whole[place] == fake_token(asked[0].seed, place)
        check_marks(scored, whole, batch.step - world.staleness, exact=not world.mask_resumed)


def check_marks(scored: ScoredSample, whole: tuple[int, ...], oldest: int, *, exact: bool) -> None:
    """Check that spans, log-probs and mask line up with the tokens; ``oldest`` is the oldest step in the loss."""
    sample = scored.sample
    first = len(whole) - len(sample.token_ids)
    steps: list[int | None] = [None] * len(sample.token_ids)
    for span in sample.spans:
        steps[span.start : span.stop] = [span.weights.step] * (span.stop - span.start)
    told = sample.metadata["mask"]
    for place, step in enumerate(steps):
        token, is_in_loss = sample.token_ids[place], bool(scored.loss_mask[place])
        if step is None:
            assert not is_in_loss
            assert sample.logprobs[place] == 0.0
            continue
        assert sample.logprobs[place] == fake_logprob(whole[first + place - 1], token, step)
        if exact:
            assert is_in_loss == (bool(told[place]) and step >= oldest)
        else:
            assert not is_in_loss or (told[place] and step >= oldest)

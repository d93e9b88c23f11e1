"""Over random histories, the columns of a sample are those of an answer that nothing ever cut.

The experts and the kept ids of the fake engine are functions of the tokens alone, so they can be computed anew from
each trained sample.
"""

import asyncio
import logging
from itertools import batched
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncrl.engines.fake import VOCABULARY, FakeTokenizer, fake_kept, fake_routes, fake_top
from asyncrl.episodes import EpisodeOutcome, EpisodeStart, EpisodeTurns
from asyncrl.errors import EpisodeEnded, plainly
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.token_columns import TokenSets
from asyncrl.types import Request, Sample
from tests.unit.pipeline.harness import World, drawn, named
from tests.unit.pipeline.test_random_episodes import CHOICES as EPISODE_CHOICES
from tests.unit.pipeline.test_random_histories import Story, resolved

HISTORIES = 100
TOGETHER = 20
LIMITS = EpisodeLimits(vocabulary_size=VOCABULARY, max_context_len=10_000)


class Talker:
    """An ``EpisodeFn`` that takes turns, observes, branches and asks twice at once, as its seed decides."""

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        """See ``EpisodeFn``."""
        session = EpisodeSession(start, turns, LIMITS, FakeTokenizer().decode)
        tokens = start.prompt.token_ids
        for number in range(1 + start.seed % 4):
            before = tokens
            turn = await session.generate(before)
            tokens = (*before, *turn.token_ids, *range(1, (start.seed >> number) % 4))
            await asyncio.sleep(0.003 * (start.seed % 3))
            fate = (start.seed >> 2 * number) % 5
            if fate == 0:  # a second answer behind the same tokens
                await session.generate(before)
            elif fate == 1:  # the history changes
                tokens = (*tokens[: max(4, len(tokens) - 3)], 9)
            elif fate == 2:
                tokens = await self._both(session, tokens)
        return session.outcome()

    async def _both(self, session: EpisodeSession, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Continue in two ways at once, one of which is given up if it takes long."""

        async def given_up() -> None:
            try:
                async with asyncio.timeout(0.01):
                    await session.generate((*tokens, 5))
            except (TimeoutError, EpisodeEnded):
                pass

        with plainly():
            async with asyncio.TaskGroup() as both:
                both.create_task(given_up())
                turn = both.create_task(session.generate((*tokens, 6)))
        return (*tokens, 6, *turn.result().token_ids)


def story_of(plan: dict[str, Any], *, is_episode: bool, routes: str) -> Story:
    """A story whose engine returns columns."""
    plan.pop("unruly")
    if not is_episode:
        del plan["max_episodes"], plan["episode_timeout_s"]
    short, tail = plan["short"], plan["tail"]
    limits = {"top_p": 0.9, "num_top": 2, "routes": routes}
    story = Story({**plan, **limits, **({"episode": Talker()} if is_episode else {})})

    def lengths(request: Request) -> int:
        longest: int = short * (tail if request.seed % 11 == 0 else 1)
        return 1 + (request.seed + len(request.token_ids)) % longest

    if is_episode:
        story.world.lengths = lengths
    return story


@settings(
    max_examples=HISTORIES // TOGETHER + 1,
    phases=(Phase.generate, Phase.shrink),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=TOGETHER * len(EPISODE_CHOICES), max_size=TOGETHER * len(EPISODE_CHOICES)))
@pytest.mark.parametrize("is_episode", [False, True])
@pytest.mark.timeout(360)
def test_over_random_histories_columns_are_those_of_an_uncut_answer(is_episode: bool, draws: bytes) -> None:
    requests = "g{group}.{sample}.t{turn}" if is_episode else "g{group}.{sample}"
    logging.disable(logging.CRITICAL)
    try:
        for each in batched(draws, len(EPISODE_CHOICES)):
            plan = {
                **resolved(drawn(EPISODE_CHOICES, bytes(each)), requests),
                "max_failed_groups": 40,
                "chunk": 3,
            }
            with named(plan):
                story = story_of(plan, is_episode=is_episode, routes="end" if each[-1] % 3 == 0 else "chunks")
                story.live()
                check(story.world)
    finally:
        logging.disable(logging.NOTSET)


def check(world: World) -> None:
    for batch in world.trainer.batches:
        for group in batch.groups:
            for scored in group.samples:
                sample = scored.sample
                prompt = group.prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
                befores = (*prompt, *sample.token_ids)[len(prompt) - 1 : -1]
                assert sample.kept == written(sample, fake_kept(befores, sample.token_ids))
                assert sample.top == written(sample, fake_top(befores, sample.token_ids, world.num_top))
                check_routes(world, sample, (*prompt, *sample.token_ids))


def check_routes(world: World, sample: Sample, whole: tuple[int, ...]) -> None:
    """Assert that the sample has all its rows; with routes at the end, a lost engine may have taken the last ones."""
    if sample.routes is None:
        assert world.routes == "end"
        return
    num_missing = sample.routes.num_missing
    assert num_missing == 0 or (world.routes == "end" and world.failures)
    assert sample.routes.missing in ((), ((len(whole) - 1 - num_missing, len(whole) - 1),))
    known = len(whole) - 1 - num_missing
    assert sample.routes.part(0, known) == fake_routes(whole).part(0, known)


def written(sample: Sample, sets: TokenSets) -> TokenSets:
    """The sets of the tokens that the policy wrote; those of observations are empty."""
    wrote = np.zeros(len(sample.token_ids), bool)
    for span in sample.spans:
        wrote[span.start : span.stop] = True
    is_there = np.repeat(wrote, sets.counts_T)
    return TokenSets(
        counts_T=np.where(wrote, sets.counts_T, 0),
        ids_I=sets.ids_I[is_there],
        logprobs_I=None if sets.logprobs_I is None else sets.logprobs_I[is_there],
    )

"""Episodes in the pipeline: turns, tools, interruptions, cancellations and limits."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.engines.fake import FakeEngine, FakeTokenizer
from asyncrl.episodes import EpisodeFn, EpisodeOutcome, EpisodeStart, EpisodeTurns
from asyncrl.errors import EngineLost, EpisodeEnded, EpisodeFailed, FailureBudgetSpent, Stalled
from asyncrl.metrics.timeline import NoTimeline
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.pipeline.sampling.episodes import Episodes
from asyncrl.pipeline.sampling.open_episode import END_S
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.types import Chunk, Prompt, Request, Reward, Sample, SamplingParams, ScoredGroup, Weights
from tests.unit.pipeline.episodes import Part, ToolUser, response, trajectory
from tests.unit.pipeline.harness import World, token_sum
from tests.virtual_time import run_virtually

LATE: dict[str, Any] = {
    "groups_per_step": 1,
    "group_size": 1,
    "staleness": 0,
    "slots": 2,
    "over_sampling": 2,
    "stale": "drop",
    "chunk": 1,
}
"""Two groups for each batch of one: the slower one becomes too old."""


def slow_at(group: int, length: int = 40) -> Any:
    """Lengths of 8 tokens, and ``length`` in the first attempt of the first turn of one group."""
    return lambda request: length if request.request_id == f"g{group}.0.t0" else 8


def groups_of(world: World) -> list[ScoredGroup]:
    return [group for batch in world.trainer.batches for group in batch.groups]


def requests_of(world: World, name: str) -> list[Request]:
    return [request for request in world.engine.requests if request.request_id.startswith(name)]


def test_an_episode_is_trained_turn_by_turn() -> None:
    world = World(episode=ToolUser(turns=3)).run()
    scored = world.trainer.batches[0].groups[0].samples[0]
    assert [(turn.start, turn.stop) for turn in scored.sample.turns] == [(0, 8), (10, 18), (20, 28)]
    assert scored.loss_mask == (1,) * 8 + (0,) * 2 + (1,) * 8 + (0,) * 2 + (1,) * 8
    tokens = world.facts[-1].scheduler.tokens
    assert tokens.trained == 4 * 8 * 24
    assert tokens.observed == 4 * 8 * 4
    assert world.all_slots.in_use == 0


def test_every_call_has_an_id_and_a_seed_and_the_first_has_the_seed_of_a_single_turn() -> None:
    world, single = World(episode=ToolUser(turns=2)).run(), World().run()
    calls = requests_of(world, "g1.1.")
    assert [request.request_id for request in calls] == ["g1.1.t0", "g1.1.t1"]
    assert {request.routing_key for request in calls} == {"g1.1"}
    (alone,) = requests_of(single, "g1.1")
    assert alone.routing_key is None
    assert calls[0].seed == alone.seed
    assert len({request.seed for request in world.engine.requests}) == len(world.engine.requests)


def test_an_episode_of_one_turn_generates_what_a_single_turn_generates() -> None:
    worlds = World(episode=ToolUser(turns=1)).run(), World().run()
    one, other = ([scored.sample.token_ids for g in groups_of(world) for scored in g.samples] for world in worlds)
    assert one == other


# ---- interruptions


def sampler_of(function: EpisodeFn, slots: Slots) -> Sampler:
    """A sampler without a scheduler, on an engine whose answers have 8 tokens."""
    engine, serving = FakeEngine(lambda request: 8), ServingWeights(Weights(version=0, step=0))
    engine.continue_generation(serving.now)
    return Sampler(
        engine=RetryingEngine(engine, 0, lambda: serving.now),
        reward=token_sum,
        reward_timeout_s=1.0,
        tokenizer=FakeTokenizer(),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=100),
        slots=slots,
        serving=serving,
        timeline=NoTimeline(),
        seed=1,
        episodes=EpisodeSettings(function=function),
    )


@pytest.mark.parametrize("mask_resumed", [False, True])
def test_a_turn_continues_behind_its_tokens_when_its_group_is_interrupted(mask_resumed: bool) -> None:
    world = World(steps=3, partial=True, mask_resumed=mask_resumed, lengths=slow_at(0), episode=ToolUser(2), **LATE)
    world.run()
    first, second, *_ = requests_of(world, "g0.0.t0")
    kept = len(second.token_ids) - len(first.token_ids)
    assert 0 < kept < 40
    assert second.request_id == "g0.0.t0~1"
    (scored,) = next(group for group in groups_of(world) if group.group_id == 0).samples
    assert scored.sample.turns[0].stop == kept + 8  # the fake's lengths count from the new request
    assert sum(scored.loss_mask[:kept]) == 0 if mask_resumed else True
    assert all(scored.loss_mask[kept : kept + 8])
    assert len(world.facts) == 3


def test_tokens_without_the_number_of_their_call_are_masked_by_age_after_a_resumption() -> None:
    class Renumbered(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            (made,) = (await super().__call__(start, turns)).trajectories
            unknown = tuple(replace(turn, call=2**30 + turn.call) for turn in made.sample.turns)
            return EpisodeOutcome(trajectories=(replace(made, sample=replace(made.sample, turns=unknown)),))

    lengths = slow_at(0)
    world = World(steps=3, partial=True, mask_resumed=True, lengths=lengths, episode=Renumbered(1), **LATE).run()
    (scored,) = next(group for group in groups_of(world) if group.group_id == 0).samples
    first, second = scored.sample.spans
    assert first.weights.step < second.weights.step
    assert scored.loss_mask == (0,) * first.stop + (1,) * (second.stop - first.stop)


def test_a_resumption_masks_the_tokens_of_episodes_that_had_ended() -> None:
    async def main() -> None:
        load = EpisodeLoad(8)
        async with Episodes(load, NoTimeline()) as episodes:
            sampler = sampler_of(ToolUser(turns=1), Slots(2, load))
            prompt = Prompt(row=0, epoch=0, text="0", token_ids=(1,), label=None)
            episode = episodes.open(sampler, prompt, name="g0", group_seed=0, index=0, group_size=1)
            episode.resume(lambda num_tokens: True)
            assert len((await episode.outcome()).trajectories[0].sample.token_ids) == 8
            assert episode.resumed_at(0) == 0
            episode.interrupt()
            episode.resume(lambda num_tokens: True)
            assert episode.resumed_at(0) == 8

    run_virtually(main())


def test_tools_continue_while_the_group_is_interrupted() -> None:
    tools: dict[str, float] = {}

    class Watched(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            turn = await turns.generate(start.prompt.token_ids, start.sampling)
            if start.group_id == 0:
                await asyncio.sleep(0.3)
                tools[start.name] = asyncio.get_running_loop().time()
            again = await turns.generate((*start.prompt.token_ids, *turn.token_ids), start.sampling)
            return EpisodeOutcome(trajectories=(trajectory(start.prompt.token_ids, [turn, again]),))

    world = World(steps=3, partial=True, episode=Watched(), train_seconds=5.0, **LATE).run()
    assert tools == pytest.approx({"g0.0": 0.38})  # during the first step, of 5 s
    assert requests_of(world, "g0.0.t1")[0].weights.step == 1
    assert 0 in [group.group_id for group in groups_of(world)]


def test_chunks_are_passed_on_and_together_are_the_turn() -> None:
    class Streaming(ToolUser):
        seen: list[Chunk]

        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            chunks: list[Chunk] = []
            turn = await turns.generate(start.prompt.token_ids, start.sampling, chunks.append)
            assert turn.token_ids == tuple(token for chunk in chunks for token in chunk.token_ids)
            assert len(chunks) > 1
            return EpisodeOutcome(trajectories=(trajectory(start.prompt.token_ids, [turn]),))

    World(steps=3, partial=True, lengths=slow_at(0), episode=Streaming(), **LATE).run()


# ---- cancellation


def test_the_function_of_a_dropped_group_is_cancelled_and_its_result_is_ignored() -> None:
    ends = list[str]()

    class Stubborn(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            try:
                turn = await turns.generate(start.prompt.token_ids, start.sampling)
            except BaseException:
                if start.group_id != 0:
                    raise
                try:
                    await turns.generate(start.prompt.token_ids, start.sampling)
                except EpisodeEnded as error:
                    ends.append(error.reason)
                return EpisodeOutcome(trajectories=(trajectory(start.prompt.token_ids, []),))
            return EpisodeOutcome(trajectories=(trajectory(start.prompt.token_ids, [turn]),))

    world = World(steps=3, lengths=slow_at(0), episode=Stubborn(), **LATE).run()
    assert ends == ["cancelled"]
    assert 0 not in [group.group_id for group in groups_of(world)]
    assert world.facts[-1].scheduler.groups.stale > 0


def test_a_function_that_refuses_to_end_delays_the_end_of_the_run_by_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            while start.group_id == 0:
                try:
                    await asyncio.sleep(1e6)
                except asyncio.CancelledError:
                    continue
            return await super().__call__(start, turns)

    world = World(steps=3, episode=Deaf(turns=1), **LATE).run()
    assert world.seconds < 3 * 2.0 + END_S
    assert "g0.0: its function did not end within 10 s of its cancellation" in caplog.text


def test_clean_up_of_a_cancelled_function_runs() -> None:
    cleaned = list[str]()

    class Tidy(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            try:
                return await super().__call__(start, turns)
            finally:
                await asyncio.sleep(0.5)
                cleaned.append(start.name)

    tidy = Tidy(turns=2)
    World(steps=2, episode=tidy, lengths=slow_at(0, 400), **LATE).run()
    assert sorted(cleaned) == sorted(start.name for start in tidy.starts)


# ---- failures and limits


class Failing(ToolUser):
    """Raises ``error`` in the first group."""

    def __init__(self, error: Exception) -> None:
        super().__init__(turns=1)
        self.error = error

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        made = await super().__call__(start, turns)
        if start.group_id == 0 and start.index == 1:
            raise self.error
        return made


def test_an_episode_that_fails_costs_its_group() -> None:
    world = World(episode=Failing(EpisodeFailed("the tool burns"))).run()
    groups = world.facts[-1].scheduler.groups
    assert groups.failed == 1
    assert world.facts[-1].scheduler.tokens.failed > 0


def test_a_bug_of_the_function_ends_the_run() -> None:
    with pytest.raises(KeyError, match="missing"):
        World(episode=Failing(KeyError("missing"))).run()


def test_an_episode_without_trajectories_has_failed() -> None:
    async def silent(start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        return EpisodeOutcome(trajectories=())

    with pytest.raises(FailureBudgetSpent, match="episode 0 returned no trajectory"):
        World(episode=silent).run()


def test_an_episode_has_a_time_limit() -> None:
    tools = ToolUser(turns=2, tool_s=lambda start, turn: 1e5 if start.group_id == 0 else 0.1)
    world = World(episode=tools, episode_timeout_s=20.0).run()
    stats = world.facts[-1].scheduler
    assert stats.groups.failed == 1
    assert stats.episodes is not None
    assert stats.episodes.ended["failed"] == 2


def test_the_time_of_an_interruption_does_not_count_in_the_time_limit() -> None:
    world = World(
        steps=3,
        partial=True,
        lengths=slow_at(0),
        episode=ToolUser(turns=1),
        episode_timeout_s=2.0,
        train_seconds=30.0,
        **LATE,
    ).run()
    assert world.facts[-1].scheduler.groups.failed == 0
    assert 0 in [group.group_id for group in groups_of(world)]


def test_a_lost_engine_is_hidden_from_the_function() -> None:
    world = World(episode=ToolUser(turns=2), failures={"g0.0.t1": EngineLost("gone")}).run()
    first, again = requests_of(world, "g0.0.t1")
    assert again.request_id == "g0.0.t1-1"
    assert again.token_ids[: len(first.token_ids)] == first.token_ids
    assert world.facts[-1].scheduler.groups.failed == 0


def test_the_watchdog_says_that_a_tool_is_waited_for() -> None:
    tools = ToolUser(turns=2, tool_s=1e5)
    with pytest.raises(Stalled, match=r"0 in a tool for 100 s, 1 in a tool for 100 s"):
        World(episode=tools, episode_timeout_s=1e6, watchdog_s=100.0).run()


def test_a_turn_counts_as_progress_for_the_watchdog() -> None:
    # 60 s in a tool, then 60 s until the first tokens of the turn.
    world = World(steps=1, episode=ToolUser(turns=4, tool_s=60.0), seconds_per_token=7.5, watchdog_s=61.0).run()
    assert len(world.trainer.batches) == 1


@pytest.mark.parametrize("is_of_turn", [False, True])
def test_a_reward_that_is_no_finite_number_costs_its_group(is_of_turn: bool) -> None:
    class Undefined(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            (made,) = (await super().__call__(start, turns)).trajectories
            if start.group_id == 1 and is_of_turn:
                (turn,) = made.sample.turns
                made = replace(made, sample=replace(made.sample, turns=(replace(turn, reward=float("nan")),)))
            elif start.group_id == 1:
                made = replace(made, reward=Reward(value=float("nan")))
            return EpisodeOutcome(trajectories=(made,))

    world = World(episode=Undefined(turns=1)).run()
    assert world.facts[-1].scheduler.groups.failed == 1
    assert 1 not in [group.group_id for group in groups_of(world)]


def test_a_group_whose_episodes_leave_all_tokens_out_is_trained_and_not_generated_again() -> None:
    class Unusable(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            assert len(self.starts) < 100, "the prompt is generated again and again"
            (made,) = (await super().__call__(start, turns)).trajectories
            mask = (0,) * len(made.loss_mask) if start.prompt.row == 1 else made.loss_mask
            return EpisodeOutcome(trajectories=(replace(made, loss_mask=mask),))

    world = World(episode=Unusable(turns=1)).run()
    stats = world.facts[-1].scheduler
    assert stats.groups.trained == 16
    assert (stats.groups.stale, stats.tokens.masked) == (0, 16)


# ---- rewards and fan-out


class Team(ToolUser):
    """An episode with three samples; ``rewards`` are set inside, None leaves one to the reward function."""

    def __init__(self, rewards: Sequence[float | None]) -> None:
        super().__init__()
        self.rewards = rewards

    async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        made = []
        for number, reward in enumerate(self.rewards):
            prompt = (*start.prompt.token_ids, number)
            parts: list[Part] = [await turns.generate(prompt, start.sampling)]
            parts += [(1, 2), await turns.generate(prompt + response(parts) + (1, 2), start.sampling)]
            made.append(trajectory(prompt, parts, reward=reward))
        return EpisodeOutcome(trajectories=tuple(made), metrics={"episodes/made": len(made)})


def test_an_episode_may_return_several_samples_which_share_its_rollout() -> None:
    world = World(episode=Team([0.5, 1.0, 2.0])).run()
    samples = groups_of(world)[0].samples
    assert [scored.sample.index for scored in samples] == [0, 1, 2, 3, 4, 5]
    assert [scored.sample.rollout for scored in samples] == [0, 1, 0, 1, 0, 1]
    assert [scored.sample.prompt_ids for scored in samples][::2] == [(1, 2, 3, 0), (1, 2, 3, 1), (1, 2, 3, 2)]
    assert [scored.reward for scored in samples] == [0.5, 0.5, 1.0, 1.0, 2.0, 2.0]
    stats = world.facts[0].scheduler
    assert stats.episodes is not None
    assert stats.episodes.sums["episodes/made"] == 3 * stats.episodes.ended["finished"]


def test_the_reward_function_is_asked_only_for_samples_without_a_reward() -> None:
    asked = list[int]()

    async def reward(prompt: Prompt, sample: Sample) -> float:
        asked.append(sample.index)
        return 9.0

    world = World(steps=1, groups_per_step=1, slots=2, staleness=0, episode=Team([None, 3.0]), reward=reward).run()
    assert sorted(asked) == [0, 1]
    assert [scored.reward for scored in groups_of(world)[0].samples] == [9.0, 9.0, 3.0, 3.0]


def test_a_group_reward_sees_all_samples_once_and_rewards_set_inside_stay() -> None:
    class OfGroup:
        calls: list[list[int]] = []  # noqa: RUF012

        async def __call__(self, prompt: Prompt, sample: Sample) -> float:
            raise AssertionError

        async def of_group(self, prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
            self.calls.append([sample.index for sample in samples])
            return [9.0] * len(samples)

    world = World(steps=1, groups_per_step=1, slots=2, staleness=0, episode=Team([None, 3.0]), reward=OfGroup()).run()
    assert OfGroup.calls == [[0, 1, 2, 3]]
    scored = groups_of(world)[0].samples
    assert [each.reward for each in scored] == [9.0, 9.0, 3.0, 3.0]
    assert all(each.loss_mask == (1,) * 8 + (0,) * 2 + (1,) * 8 for each in scored)


def test_tokens_count_once_although_user_code_trains_them_twice_and_unused_ones_are_masked() -> None:
    class Wasteful(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            await turns.generate(start.prompt.token_ids, start.sampling)
            made = (await super().__call__(start, turns)).trajectories[0]
            return EpisodeOutcome(trajectories=(made, made))

    tokens = World(steps=2, staleness=0, episode=Wasteful(turns=2)).run().facts[0].scheduler.tokens
    assert (tokens.trained, tokens.masked, tokens.trained_copies) == (8 * 16, 8 * 8, 8 * 16)
    assert tokens.observed == 8 * 4  # in two samples each


# ---- slots and admission


def test_tools_hold_no_slots() -> None:
    world = World(steps=2, slots=2, group_size=1, groups_per_step=8, staleness=2, episode=ToolUser(3, tool_s=1.0)).run()
    assert world.engine.most_busy == 2
    assert world.seconds < 10.0  # 16 groups one after the other in two slots would take 18 s


def test_at_most_max_episodes_are_open() -> None:
    open_now, most = 0, 0

    class Counted(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            try:
                return await super().__call__(start, turns)
            finally:
                open_now -= 1

    World(steps=3, slots=8, staleness=5, max_episodes=6, episode=Counted(3, tool_s=3.0)).run()
    assert most == 6


def test_tool_delays_of_up_to_30_seconds_cost_few_tokens_per_second() -> None:
    def rate(tool_s: float) -> float:
        tools = ToolUser(turns=3, tool_s=lambda start, turn: tool_s * ((start.seed * (turn + 7)) % 1000) / 1000)
        world = World(
            steps=25,
            groups_per_step=8,
            group_size=4,
            staleness=20,
            slots=32,
            max_episodes=1024,
            lengths=lambda request: 10 + request.seed % 20,
            chunk=30,
            seconds_per_token=0.4,
            train_seconds=0.1,
            update_seconds=0.0,
            watchdog_s=1e6,
            episode=tools,
        ).run()
        first, last = world.facts[4], world.facts[15]  # before the end, where no further episodes start
        tokens = last.scheduler.tokens.generated - first.scheduler.tokens.generated
        return tokens / sum(facts.step_s for facts in world.facts[5:16])

    assert rate(30.0) >= 0.98 * rate(0.0)  # the promise is 0.95; without the measured share it is 0.48


def test_admission_follows_the_measured_share_before_the_first_episode_ends() -> None:
    began, ended = list[float](), list[float]()

    class Timed(ToolUser):
        async def __call__(self, start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
            began.append(asyncio.get_running_loop().time())
            made = await super().__call__(start, turns)
            ended.append(asyncio.get_running_loop().time())
            return made

    World(steps=2, slots=4, groups_per_step=8, staleness=3, episode=Timed(turns=20, tool_s=10.0)).run()
    assert sum(seconds < ended[0] for seconds in began) == 16  # all that --max-episodes lets start


# ---- evaluation


def test_episodes_of_an_evaluation_do_not_keep_a_first_group_waiting() -> None:
    world = World(
        steps=10,
        slots=8,
        group_size=4,
        groups_per_step=1,
        held_out=200,
        eval_interval=3,
        max_episodes=4,
        episode=ToolUser(turns=2, tool_s=lambda start, turn: start.seed % 97 / 40),
    ).run()
    assert max(facts.step_s for facts in world.facts[1:8]) < 5.0  # a pass takes more than 100 s


def test_an_evaluation_runs_the_same_function() -> None:
    team = Team([1.0, 2.0])
    world = World(steps=2, held_out=5, eval_interval=1, episode=team).run()
    reports = [facts.evaluation for facts in world.facts if facts.evaluation is not None]
    assert [report.accuracy for report in reports] == [{"held": 1.5}] * len(reports)
    requests = [request for request in world.engine.requests if request.request_id.startswith("eval-")]
    assert len(requests) == 5 * 4 * len(reports)
    seeds = [request.seed for request in requests if "-held-3." in request.request_id]
    assert seeds[:4] == seeds[4:8]


def test_episodes_of_an_evaluation_use_half_of_the_slots_at_once() -> None:
    most = 0

    def lengths(request: Request) -> int:
        nonlocal most
        most = max(most, sum(each.request_id.startswith("eval") for each in world.engine.now_busy))
        return 8

    tools = ToolUser(3, tool_s=1.0)
    world = World(steps=1, held_out=16, eval_interval=1, slots=4, episode=tools, lengths=lengths)
    world.run()
    assert most == 2
    assert world.seconds < 2 * 16  # more than two are open at once: their tools alone take 2 s each


def test_a_held_out_episode_that_fails_is_left_out() -> None:
    async def broken(start: EpisodeStart, turns: EpisodeTurns, /) -> EpisodeOutcome:
        if start.data_set == "held" and start.prompt.row == 1:
            raise EpisodeFailed("no")
        return await ToolUser(1)(start, turns)

    world = World(steps=2, held_out=3, eval_interval=1, episode=broken).run()
    report = next(facts.evaluation for facts in world.facts if facts.evaluation is not None)
    assert (report.num_samples, report.num_failed) == (2, 1)


def test_a_users_evaluation_function_gets_the_first_sample_and_the_mean_reward() -> None:
    async def mine(evaluation: Any) -> dict[str, list[float]]:
        prompt = evaluation.prompts["held"][0]
        sample = await evaluation.generate("held", prompt)
        assert sample.prompt_ids == (*prompt.token_ids, 0)
        return {"held": [await evaluation.score("held", prompt, sample)]}

    world = World(steps=2, held_out=3, eval_interval=1, episode=Team([1.0, 4.0]), eval_function=mine).run()
    report = next(facts.evaluation for facts in world.facts if facts.evaluation is not None)
    assert report.accuracy == {"held": 2.5}

"""The session of an episode: limits, checks, clocks and results."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome
from asyncrl.errors import EpisodeEnded
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession, Verdict
from asyncrl.types import Reward
from tests.unit.rollouts.turns import SAMPLING, ScriptedTurns, start_of
from tests.virtual_time import run_virtually

LIMITS = EpisodeLimits(vocabulary_size=64, max_context_len=20, max_turns=3)


def session_of(turns: ScriptedTurns, limits: EpisodeLimits = LIMITS) -> EpisodeSession:
    return EpisodeSession(start_of(), turns, limits, lambda ids: " ".join(map(str, ids)))


def two_tokens(call: int, *_: object) -> tuple[int, ...]:
    return (10 + call, 20 + call)


def run(episode: object) -> object:
    return run_virtually(episode)[0]  # type: ignore[arg-type]


def test_turns_and_observations_become_one_trajectory() -> None:
    async def episode() -> EpisodeOutcome:
        session = session_of(ScriptedTurns(two_tokens))
        await session.generate((1, 2, 3))
        await asyncio.sleep(5.0)
        await session.generate((1, 2, 3, 10, 20, 7))
        return session.outcome(Verdict(rewards={0: Reward(value=0.5)}, metadata={"tool": "x"}, turn_rewards={1: 0.25}))

    outcome = run(episode())
    assert isinstance(outcome, EpisodeOutcome)
    (made,) = outcome.trajectories
    assert made.sample.token_ids == (10, 20, 7, 11, 21)
    assert made.sample.prompt_ids is None  # the prompt of the group
    assert made.reward == Reward(value=0.5)
    assert made.sample.metadata == {"tool": "x"}
    assert [turn.reward for turn in made.sample.turns] == [None, 0.25]
    assert (outcome.end, outcome.tool_s) == (EpisodeEnd.FINISHED, 5.0)


def test_branches_and_dropped_tokens_are_metrics() -> None:
    async def episode() -> EpisodeOutcome:
        session = session_of(ScriptedTurns(two_tokens))
        await session.generate((1, 2, 3))
        await session.generate((1, 2, 3, 10, 9))
        session.counts["episodes/retokenized_tokens"] += 2
        return session.outcome(Verdict(metrics={"tool_calls": 1.0}))

    outcome = run(episode())
    assert isinstance(outcome, EpisodeOutcome)
    assert outcome.metrics == {
        "episodes/branches/edited": 1.0,
        "episodes/dropped_tokens": 1.0,
        "episodes/retokenized_tokens": 2.0,
        "tool_calls": 1.0,
    }


def test_no_turn_of_an_episode_whose_tool_failed_is_trained() -> None:
    async def episode() -> EpisodeOutcome:
        session = session_of(ScriptedTurns(two_tokens))
        await session.generate((1, 2, 3))  # by an HTTP client, so the function's verdict does not know the call
        await session.generate((1, 2, 3, 10, 20, 7))
        return session.outcome(Verdict(end=EpisodeEnd.TOOL_FAILED, left_out=frozenset({1})))

    outcome = run(episode())
    assert isinstance(outcome, EpisodeOutcome)
    assert [each.loss_mask for each in outcome.trajectories] == [(0,) * 5]
    assert outcome.end is EpisodeEnd.TOOL_FAILED


@pytest.mark.parametrize("token_ids", [(1, 64), (1, -1), (1, 2**40), (1, 2.5), ("1",)])
def test_token_ids_that_the_model_lacks_reach_no_engine(token_ids: tuple[int, ...]) -> None:
    async def episode() -> list[object]:
        turns = ScriptedTurns(two_tokens)
        with pytest.raises(ValueError, match="token ids must be"):
            await session_of(turns).generate(token_ids)
        return [*turns.asked]

    assert run(episode()) == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("json_schema", {"type": "object"}, '{"type": "object"}'),
        ("regex", ["a"], "a"),
        ("ebnf", 5, "root ::= a"),
        ("structural_tag", "", "{}"),
        ("stop_regex", [5], ["a", "b"]),
        ("stop_regex", "(", "a|b"),
        ("stop_regex", ["a", "["], []),
        ("stop_regex", f"a{{{2**70}}}", "a{5}"),
        ("min_p", "0.1", 0),
        ("frequency_penalty", True, 0.5),
        ("presence_penalty", [], -1.0),
        ("ignore_eos", "yes", False),
        ("logit_bias", {"5": None}, {"5": -100, "6": 0.5}),
        ("logit_bias", [5], None),
    ],
)
def test_a_setting_of_a_wrong_type_reaches_no_engine(name: str, wrong: object, right: object) -> None:
    async def episode() -> int:
        turns = ScriptedTurns(two_tokens)
        session = session_of(turns)
        with pytest.raises(ValueError, match=f"^{name} must be .*, got "):
            await session.generate((1, 2, 3), replace(SAMPLING, extra={name: wrong}))
        await session.generate((1, 2, 3), replace(SAMPLING, extra={name: right}))
        return len(turns.asked)

    assert run(episode()) == 1


@pytest.mark.parametrize(("given", "asked"), [((5,), (7, 8, 5)), ((), (7, 8)), ((8, 5), (7, 8, 5)), ((7, 9), (7, 9))])
def test_a_turn_with_stop_tokens_of_its_own_keeps_the_models_end_tokens(
    given: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    async def episode() -> tuple[int, ...]:
        turns = ScriptedTurns(two_tokens)
        usual = replace(SAMPLING, stop_token_ids=(7, 9))
        limits = replace(LIMITS, end_tokens=(7, 8))
        session = EpisodeSession(start_of(sampling=usual), turns, limits, str)
        await session.generate((1, 2, 3), replace(usual, stop_token_ids=given))
        return turns.asked[0][1].stop_token_ids

    assert run(episode()) == asked


def test_an_observation_with_an_id_that_the_model_lacks_is_refused() -> None:
    async def episode() -> None:
        session = session_of(ScriptedTurns(two_tokens))
        await session.generate((1, 2, 3))
        with pytest.raises(ValueError, match="token ids must be 0 to 63, got 99"):
            await session.generate((1, 2, 3, 10, 20, 99))

    run(episode())


def test_a_turn_is_shortened_to_the_room_that_is_left() -> None:
    async def episode() -> int:
        turns = ScriptedTurns(two_tokens)
        await session_of(turns).generate(tuple(range(15)))
        return turns.asked[0][1].max_new_tokens

    assert run(episode()) == 5


@pytest.mark.parametrize(("num_tokens", "most"), [(15, 64), (1, 5)])
def test_the_minimum_length_of_a_turn_never_exceeds_its_maximum(num_tokens: int, most: int) -> None:
    async def episode() -> tuple[int, int]:
        turns = ScriptedTurns(two_tokens)
        sampling = replace(SAMPLING, max_new_tokens=most, min_new_tokens=8)
        await session_of(turns).generate(tuple(range(num_tokens)), sampling)
        return turns.asked[0][1].max_new_tokens, turns.asked[0][1].min_new_tokens

    assert run(episode()) == (5, 5)


def test_a_full_context_ends_with_its_name() -> None:
    async def episode() -> EpisodeSession:
        session = session_of(ScriptedTurns(two_tokens))
        await session.generate((1, 2, 3))
        with pytest.raises(EpisodeEnded, match="maximum context length 20") as raised:
            await session.generate(tuple(range(20)))
        assert raised.value.reason == "context_full"
        return session

    session = run(episode())
    assert isinstance(session, EpisodeSession)
    assert session.end is EpisodeEnd.CONTEXT_FULL


def test_more_turns_than_allowed_end_with_their_name() -> None:
    async def episode() -> EpisodeOutcome:
        session = session_of(ScriptedTurns(two_tokens))
        for _ in range(3):
            await session.generate((1, 2, 3))
        with pytest.raises(EpisodeEnded, match="max-turns is 3") as raised:
            await session.generate((1, 2, 3))
        assert raised.value.reason == "max_turns"
        return session.outcome()

    outcome = run(episode())
    assert isinstance(outcome, EpisodeOutcome)
    assert (outcome.end, len(outcome.trajectories)) == (EpisodeEnd.MAX_TURNS, 3)


def test_a_turn_that_ends_after_its_episode_is_not_recorded() -> None:
    async def episode() -> EpisodeSession:
        gate = asyncio.Event()
        session = session_of(ScriptedTurns(two_tokens, gate=gate))
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(_refused(session))
            await asyncio.sleep(1.0)
            session.close(EpisodeEnd.CANCELLED)
            gate.set()
        assert call.result() == "cancelled"
        assert await _refused(session) == "over"
        return session

    session = run(episode())
    assert isinstance(session, EpisodeSession)
    assert session.record.lines == []


async def _refused(session: EpisodeSession) -> str:
    with pytest.raises(EpisodeEnded) as raised:
        await session.generate((1, 2, 3))
    return raised.value.reason


def test_an_episode_without_a_call_has_no_result() -> None:
    async def episode() -> None:
        with pytest.raises(ValueError, match="without a call of the model"):
            session_of(ScriptedTurns(two_tokens)).outcome()

    run(episode())


def test_time_on_engines_is_counted_once_for_calls_at_the_same_time() -> None:
    async def episode() -> EpisodeOutcome:
        gate = asyncio.Event()
        session = session_of(ScriptedTurns(two_tokens, gate=gate))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                tasks.create_task(session.generate((1, 2, 3)))
            await asyncio.sleep(4.0)
            gate.set()
        await asyncio.sleep(1.0)
        return session.outcome()

    outcome = run(episode())
    assert isinstance(outcome, EpisodeOutcome)
    assert outcome.tool_s == pytest.approx(1.0)

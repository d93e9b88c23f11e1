"""The trajectories that the samples of a slime function become."""

import functools
import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.compat.episodes.trajectories import (
    CUT,
    LOGPROBS_DIFFER,
    MOVED,
    UNMATCHED,
    outcome_of,
    trajectories_of,
)
from asyncrl.episodes import GeneratedTurn, Trajectory
from asyncrl.errors import EpisodeFailed
from asyncrl.rollouts.interfaces import SlimeResult
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.types import FIRST_ARTIFICIAL_CALL, FinishReason, ScoredSample, Span, Weights
from tests.unit.rollouts.test_record import sets_of
from tests.unit.rollouts.turns import WEIGHTS, ScriptedTurns, start_of, turn_of
from tests.virtual_time import run_virtually

PROMPT = (1, 2, 3)
FIRST, SEEN, SECOND = (10, 11, 12, 13, 14), (60, 61), (20, 21, 22, 23)
"""Two turns with an observation between them."""
OLD, NEW = Weights(version=3, step=6), Weights(version=4, step=8)


def on_a_loop(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on an event loop, whose clock a session needs."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def main() -> None:
            test(**given)

        run_virtually(main())

    return run


def session_of(*calls: tuple[tuple[int, ...], GeneratedTurn], max_context_len: int = 100) -> EpisodeSession:
    limits = EpisodeLimits(vocabulary_size=64, max_context_len=max_context_len)
    session = EpisodeSession(start_of(PROMPT, text="p"), ScriptedTurns(lambda *_: ()), limits, str)
    for context, turn in calls:
        session.record.add(context, turn)
    return session


def two_turns(**limits: int) -> EpisodeSession:
    """A session of two turns; the second began under old weights and ended under new ones."""
    spans = (Span(weights=OLD, start=0, stop=1), Span(weights=NEW, start=1, stop=4))
    second = replace(turn_of(1, SECOND, finish=FinishReason.LENGTH), spans=spans)
    return session_of((PROMPT, turn_of(0, FIRST)), (PROMPT + FIRST + SEEN, second), **limits)


def state(response_ids: tuple[int, ...], **more: Any) -> dict[str, Any]:
    prompt = list(more.pop("prompt_ids", PROMPT))
    return {
        "tokens": prompt + list(response_ids),
        "response_length": len(response_ids),
        "response": "r",
        "reward": 1.0,
        "status": "completed",
        "metadata": {},
        "prompt": "p",
        "label": "42",
    } | more


def result_of(*states: dict[str, Any], is_list: bool = False) -> SlimeResult:
    return SlimeResult(samples=states, is_list=is_list)


def only(session: EpisodeSession, given: dict[str, Any], counts: Counter[str] | None = None) -> Trajectory:
    (found,) = trajectories_of(session, result_of(given), None, counts)
    ScoredSample(sample=found.sample, reward=0.0, loss_mask=found.loss_mask)  # raises unless the mask is within turns
    return found


def turns_of(found: Trajectory) -> list[tuple[int, int, int]]:
    return [(turn.call, turn.start, turn.stop) for turn in found.sample.turns]


MASK = [1] * 5 + [0] * 2 + [1] * 4


@on_a_loop
def test_turns_are_found_by_position_with_the_engines_logprobs_and_versions() -> None:
    counts: Counter[str] = Counter()
    found = only(two_turns(), state(FIRST + SEEN + SECOND, loss_mask=MASK), counts)
    assert turns_of(found) == [(0, 0, 5), (1, 7, 11)]
    assert [(span.weights.version, span.start, span.stop) for span in found.sample.spans] == [
        (3, 0, 5), (3, 7, 8), (4, 8, 11)
    ]  # fmt: skip
    assert found.sample.logprobs[:6].tolist() == [-1.0, -1.015625, -1.03125, -1.046875, -1.0625, 0.0]
    assert found.sample.logprobs[7] == -2.0
    assert found.loss_mask == tuple(MASK)
    assert found.reward is not None and found.reward.value == 1.0
    assert (found.sample.text, found.sample.prompt_ids, found.sample.finish) == ("r", None, FinishReason.STOP)
    assert +counts == Counter()


@on_a_loop
def test_copied_logprobs_that_differ_are_counted_and_not_used() -> None:
    counts: Counter[str] = Counter()
    copied = [-1.0, -1.015625, -9.0, -1.046875, -1.0625, None, None, -2.0, None, -2.03125, -2.046875]
    found = only(two_turns(), state(FIRST + SEEN + SECOND, loss_mask=MASK, rollout_log_probs=copied), counts)
    assert counts[LOGPROBS_DIFFER] == 2
    assert found.sample.logprobs[2] == -1.03125


@on_a_loop
def test_unknown_logprobs_of_the_engine_do_not_differ_from_unknown_copies() -> None:
    counts: Counter[str] = Counter()
    turn = replace(turn_of(0, FIRST), logprobs=array("f", [math.nan] * 5))
    only(session_of((PROMPT, turn)), state(FIRST, rollout_log_probs=[math.nan, None, math.nan, -1.0, math.nan]), counts)
    assert counts[LOGPROBS_DIFFER] == 1


@on_a_loop
def test_observations_in_the_mask_are_trained_without_a_logprob_and_count_as_old_as_the_episode() -> None:
    counts: Counter[str] = Counter()
    found = only(two_turns(), state(FIRST + SEEN + SECOND, loss_mask=None), counts)
    assert turns_of(found) == [(0, 0, 5), (FIRST_ARTIFICIAL_CALL, 5, 7), (1, 7, 11)]
    assert [math.isnan(each) for each in found.sample.logprobs] == [False] * 5 + [True] * 2 + [False] * 4
    assert found.sample.spans[1] == Span(weights=OLD, start=5, stop=7)
    assert counts == Counter({UNMATCHED: 2})


@on_a_loop
def test_trained_tokens_of_an_episode_of_empty_turns_have_the_weights_that_are_served() -> None:
    counts: Counter[str] = Counter()
    found = only(session_of((PROMPT, turn_of(0, ()))), state((40, 41)), counts)
    assert turns_of(found) == [(FIRST_ARTIFICIAL_CALL, 0, 2)]
    assert found.sample.spans == (Span(weights=WEIGHTS, start=0, stop=2),)
    assert all(map(math.isnan, found.sample.logprobs))
    assert counts == Counter({UNMATCHED: 2})


@on_a_loop
def test_a_changed_end_of_a_turn_keeps_the_turns_beginning() -> None:
    counts: Counter[str] = Counter()
    found = only(session_of((PROMPT, turn_of(0, FIRST))), state((10, 11, 12, 13, 50, 51)), counts)
    assert turns_of(found) == [(0, 0, 4), (FIRST_ARTIFICIAL_CALL, 4, 6)]
    assert found.sample.turns[0].finish is FinishReason.STOP
    assert counts == Counter({UNMATCHED: 2})


@on_a_loop
def test_turns_behind_other_tokens_are_found_by_content() -> None:
    counts: Counter[str] = Counter()
    response = (50, *FIRST, 60, *SECOND)
    found = only(two_turns(), state(response, loss_mask=[0, *[1] * 5, 0, *[1] * 4]), counts)
    assert turns_of(found) == [(0, 1, 6), (1, 7, 11)]
    assert counts == Counter({MOVED: 9})


@on_a_loop
def test_the_kept_ids_of_a_turn_are_those_of_the_tokens_that_the_function_returned() -> None:
    first = replace(turn_of(0, FIRST), kept=sets_of(*([token, 1] for token in FIRST)))
    session = session_of((PROMPT, first), (PROMPT + FIRST + SEEN, turn_of(1, SECOND)))
    found = only(session, state((*FIRST[:4], 50, *SEEN, *SECOND), loss_mask=MASK))
    assert found.sample.kept == sets_of(*([token, 1] for token in FIRST[:4]), *([[]] * 7))


@on_a_loop
def test_a_turn_found_by_content_may_have_another_end() -> None:
    counts: Counter[str] = Counter()
    found = only(two_turns(), state((50, 10, 11, 12, 13, 9), loss_mask=[0, 1, 1, 1, 1, 1]), counts)
    assert turns_of(found) == [(0, 1, 5), (FIRST_ARTIFICIAL_CALL, 5, 6)]
    assert counts == Counter({MOVED: 4, UNMATCHED: 1})


@on_a_loop
def test_a_turn_that_was_left_out_takes_no_tokens_of_one_that_begins_alike() -> None:
    counts: Counter[str] = Counter()
    refused, taken = (10, 11, 12, 13, 30, 31), (10, 11, 12, 13, 40, 41)
    session = session_of((PROMPT, turn_of(0, refused)), (PROMPT, turn_of(1, taken)))
    found = only(session, state((50, *taken), loss_mask=[0, *[1] * 6]), counts)
    assert turns_of(found) == [(1, 1, 7)]
    assert found.sample.logprobs[1] == -2.0
    assert counts == Counter({MOVED: 6})


@on_a_loop
def test_of_turns_with_another_end_the_one_with_most_tokens_alike_is_found() -> None:
    counts: Counter[str] = Counter()
    refused, taken = (10, 11, 12, 13, 30, 31), (10, 11, 12, 13, 40, 41)
    session = session_of((PROMPT, turn_of(0, refused)), (PROMPT, turn_of(1, taken)))
    found = only(session, state((50, *taken[:5], 9), loss_mask=[0, *[1] * 6]), counts)
    assert turns_of(found) == [(1, 1, 6), (FIRST_ARTIFICIAL_CALL, 6, 7)]
    assert found.sample.logprobs[1] == -2.0


@on_a_loop
def test_a_turn_with_another_end_may_stand_before_a_whole_one() -> None:
    counts: Counter[str] = Counter()
    response = (50, 10, 11, 12, 13, 9, *SEEN, *SECOND)
    found = only(two_turns(), state(response, loss_mask=[0, *[1] * 5, 0, 0, *[1] * 4]), counts)
    assert turns_of(found) == [(0, 1, 5), (FIRST_ARTIFICIAL_CALL, 5, 6), (1, 8, 12)]
    assert counts == Counter({MOVED: 8, UNMATCHED: 1})


@on_a_loop
def test_earlier_turns_may_be_part_of_the_prompt() -> None:
    given = state(SECOND, prompt_ids=PROMPT + FIRST + SEEN)
    found = only(two_turns(), given)
    assert turns_of(found) == [(1, 0, 4)]
    assert found.sample.prompt_ids == PROMPT + FIRST + SEEN


@on_a_loop
def test_a_prompt_may_end_within_a_turn() -> None:
    found = only(two_turns(), state((12, 13, 14), prompt_ids=(*PROMPT, 10, 11)))
    assert turns_of(found) == [(0, 0, 3)]
    assert found.sample.logprobs[0] == -1.03125
    assert found.sample.spans == (Span(weights=OLD, start=0, stop=3),)


@on_a_loop
def test_a_removed_sample_keeps_its_reward_and_trains_nothing() -> None:
    found = only(two_turns(), state(FIRST, remove_sample=True))
    assert found.loss_mask == (0,) * 5
    assert found.reward is not None


@on_a_loop
def test_a_sample_without_turns_consists_of_observations() -> None:
    found = only(two_turns(), state((40, 41), loss_mask=[0, 0]))
    assert found.sample.num_observed == 2
    assert found.sample.spans == ()


@pytest.mark.parametrize(("mask", "trained"), [(None, (1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1)), ([], (0,) * 11)])
@on_a_loop
def test_a_function_that_sets_no_tokens_gets_the_record(mask: list[int] | None, trained: tuple[int, ...]) -> None:
    found = only(two_turns(), state((), loss_mask=mask, response="", status="pending", reward=0.5))
    assert found.sample.token_ids == FIRST + SEEN + SECOND
    assert found.loss_mask == trained
    assert found.reward is not None and found.reward.value == 0.5


@on_a_loop
def test_parallel_calls_with_equal_tokens_are_told_apart() -> None:
    session = session_of((PROMPT, turn_of(0, FIRST)), (PROMPT, turn_of(1, FIRST)), (PROMPT, turn_of(2, FIRST)))
    copied = turn_of(1, FIRST).logprobs.tolist()
    states = (state(FIRST, rollout_log_probs=copied), state(FIRST), state(FIRST))
    found = trajectories_of(session, result_of(*states, is_list=True))
    assert [each.sample.turns[0].call for each in found] == [1, 0, 2]
    assert [each.sample.index for each in found] == [0, 1, 2]


@pytest.mark.parametrize("copied", [None, [-1.0] * 20])
@on_a_loop
def test_equal_turns_may_be_in_the_prompt_of_a_sample(copied: list[float] | None) -> None:
    context = PROMPT + FIRST + SEEN
    session = session_of((PROMPT, turn_of(0, FIRST)), (context, turn_of(1, (20,))), (context, turn_of(2, (30,))))
    assert len(session.record.lines) == 2  # both hold turn 0
    counts: Counter[str] = Counter()
    given = state((40,) * 20, prompt_ids=(*context, 50, 51, 52, 53), rollout_log_probs=copied)
    found = only(session, given, counts)
    assert turns_of(found) == [(FIRST_ARTIFICIAL_CALL, 0, 20)]
    assert counts[UNMATCHED] == 20


@on_a_loop
def test_tokens_beyond_the_context_are_cut() -> None:
    counts: Counter[str] = Counter()
    found = only(two_turns(max_context_len=9), state(FIRST + SEEN + SECOND, loss_mask=MASK), counts)
    assert found.sample.token_ids == (*FIRST, 60)
    assert found.sample.finish is FinishReason.LENGTH
    assert counts[CUT] == 5


@pytest.mark.parametrize(
    ("status", "finish"),
    [("truncated", FinishReason.LENGTH), ("failed", FinishReason.STOP), ("pending", FinishReason.LENGTH)],
)
@on_a_loop
def test_the_status_decides_how_the_sample_ended(status: str, finish: FinishReason) -> None:
    assert only(two_turns(), state(FIRST + SEEN + SECOND, loss_mask=MASK, status=status)).sample.finish is finish


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (state(FIRST, response_length=9), "e0: the sample has 8 tokens, and a response_length of 9"),
        (state(FIRST, loss_mask=[1]), "e0: the sample has a loss_mask of 1 entries, its response_length is 5"),
        (state(FIRST, loss_mask=[1, 2, 1, 1, 1]), "a loss_mask with other entries than 0 and 1"),
        (state(FIRST, rollout_log_probs=[0.0]), "has 1 rollout_log_probs, its response_length is 5"),
        (state(FIRST, response_length=-2), "has a response_length of -2; it is a number of tokens"),
        (state(FIRST, response_length=math.inf), "has a response_length of inf; it is a number of tokens"),
        (state(FIRST, loss_mask=1), "has loss_mask of the type int; it is a list"),
        (state(FIRST, metadata=["x"]), "has metadata of the type list; it is a dict"),
        (state((10, 64)), "has the token 64; token ids are 0 to 63"),
        (state(("a",)), "has tokens that are no token ids"),  # type: ignore[arg-type]
        (state(FIRST, status="aborted", reward=None), "has the status aborted and no reward"),
    ],
)
@on_a_loop
def test_a_sample_that_cannot_be_trained_is_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(EpisodeFailed, match="e0: the sample ") as error:
        only(two_turns(), given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@on_a_loop
def test_tokens_of_nowhere_cannot_be_trained() -> None:
    with pytest.raises(EpisodeFailed, match="the function never called the model"):
        only(session_of(), state(FIRST))
    with pytest.raises(EpisodeFailed, match="no response, and the function never called the model"):
        only(session_of(), state(()))
    with pytest.raises(EpisodeFailed, match="returned an empty list"):
        trajectories_of(two_turns(), result_of(is_list=True))


@on_a_loop
def test_the_outcome_has_the_counts_and_ends_the_episode() -> None:
    session = two_turns()
    outcome = outcome_of(session, result_of(state(FIRST + SEEN)), reward_key=None)
    assert outcome.metrics == {UNMATCHED: 2.0}
    assert session.is_over
    scores = state(FIRST, reward={"score": 0.5, "held": 0.75})
    (made,) = outcome_of(two_turns(), result_of(scores), reward_key="score", eval_reward_key="held").trajectories
    assert made.reward is not None
    assert (made.reward.value, made.reward.parts) == (0.5, {"score": 0.5, "held": 0.75})

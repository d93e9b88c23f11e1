"""Log-probs of engines and trainer are compared under the same weights, without delaying training."""

import asyncio
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.engines.fake import FakeEngine, fake_kept, fake_logprob
from asyncrl.episodes import GeneratedTurn
from asyncrl.errors import EngineLost
from asyncrl.pipeline import logprob_check
from asyncrl.pipeline.logprob_check import (
    PROBE_INTERVAL,
    PROBED_TOKENS,
    EngineProbes,
    Probed,
    differences_by_engine,
    engine_logprobs,
    mean_difference,
    written_by,
)
from asyncrl.types import Batch, FinishReason, ScoredSample, Span, Turn, Weights
from tests.unit.pipeline.episodes import trajectory
from tests.unit.pipeline.harness import World, uneven
from tests.unit.scored_groups import group
from tests.virtual_time import run_virtually

NOW = Weights(version=3, step=3)


@pytest.mark.parametrize(("interval", "staleness"), [(1, 0), (1, 1), (1, 3), (2, 2), (3, 4)])
def test_log_probs_are_compared_where_engine_and_trainer_hold_the_same_weights(interval: int, staleness: int) -> None:
    # In the fakes a token's log-prob depends on the weights: it differs from 0 when weights are mixed up.
    world = World(steps=8, interval=interval, staleness=staleness, lengths=uneven).run()
    compared = [facts.logprob_diff for facts in world.facts]
    assert compared == [0.0 if step % interval == 0 else None for step in range(8)]


async def _gone(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
    raise EngineLost("gone")


def _slow(seconds: float, cancelled_s: float = 0.0) -> Any:
    async def score(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(cancelled_s)
        return (0.0,) * (len(token_ids) - start)

    return score


@pytest.mark.parametrize(("score", "why"), [(_gone, ": gone"), (_slow(1e6), " until the engines are faster again")])
def test_a_comparison_that_fails_is_left_out_and_says_why(
    score: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(steps=3, lengths=uneven, score=score).run()
    assert [facts.logprob_diff for facts in world.facts][1:] == [None, None]
    assert f"no log-probs to compare with{why}" in caplog.text


@pytest.mark.parametrize(
    ("train_seconds", "update_seconds", "score_seconds", "step_seconds"),
    [
        (5.0, 0.0, 4.0, 5.0),
        (0.5, 0.0, 1.5, 1.5),
        (0.5, 1.0, 1.5, 3.5),  # it begins when the previous weights have been published, which takes two seconds
        (5.0, 0.0, 1e6, 5.0),
        (0.5, 0.0, 1e6, 2.0),
        (0.5, 1.0, 1e6, 4.0),
        (5.0, 2.4, 1e6, 6.8),
    ],
)
def test_a_comparison_delays_only_short_steps_and_not_for_long(
    train_seconds: float, update_seconds: float, score_seconds: float, step_seconds: float
) -> None:
    world = World(
        steps=6,
        staleness=3,
        slots=64,
        train_seconds=train_seconds,
        update_seconds=update_seconds,
        score=_slow(score_seconds, cancelled_s=5.0 if score_seconds == 1e6 else 0.0),
    ).run()
    assert world.seconds < 60.0  # and nothing of it is left at the end
    facts = world.facts[3:]
    assert [(each.logprob_diff is None) for each in facts] == [score_seconds == 1e6] * 3
    assert [each.step_s - each.trainer_waited_s for each in facts] == pytest.approx([step_seconds] * 3, abs=0.01)


def test_slow_engines_give_one_warning_until_they_are_faster(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([1e6] * 4 * 4 + [0.1] * 4 + [1e6] * 1000)

    async def score(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        return await _slow(next(seconds))(token_ids, start)  # type: ignore[no-any-return]

    world = World(steps=10, staleness=4, slots=64, score=score).run()
    compared = [facts.logprob_diff is not None for facts in world.facts]
    assert compared == [True, False, False, False, False, True, False, False, False, False]
    assert caplog.text.count("no log-probs to compare with") == 2


def test_log_probs_of_weights_that_changed_meanwhile_are_not_compared() -> None:
    """A restarted engine without a snapshot gets the weights after the trainer's step, as all engines do."""

    async def late(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        await asyncio.sleep(1.5)
        return await FakeEngine.score(world.engine, token_ids, start)

    world = World(steps=8, staleness=3, slots=64, train_seconds=0.5, trains_during_updates=False, score=late)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            while not running.done():
                await asyncio.sleep(0.3)
                world.updater.rejoined.set()

    run_virtually(main())
    assert len(world.updater.published) > 8
    assert {facts.logprob_diff for facts in world.facts} <= {0.0, None}


@pytest.mark.parametrize(
    ("broken", "train_seconds"),
    [("training", 5.0), ("scoring", 5.0), ("scoring", 0.5), ("an update", 5.0), ("an update", 0.5)],
)
def test_a_bug_while_tokens_are_scored_ends_the_run_unchanged(broken: str, train_seconds: float) -> None:
    """The error comes after a second: during training of five seconds, and after training of half a second."""

    async def raise_it(*about: Any) -> Any:
        await asyncio.sleep(1.0)
        raise KeyError(broken)

    world = World(
        steps=6,
        staleness=3,
        slots=64,
        train_seconds=train_seconds,
        score=raise_it if broken == "scoring" else _slow(1e6),
    )

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(world.main())
            while not world.facts:  # noqa: ASYNC110 -- on a virtual clock
                await asyncio.sleep(0.5)
            if broken == "training":
                world.trainer.train = raise_it  # type: ignore[method-assign,assignment]  # raises, whatever it is given
            elif broken == "an update":
                world.updater.publish = raise_it  # type: ignore[method-assign,assignment]  # raises, whatever it is given

    with pytest.raises(ExceptionGroup) as caught:
        run_virtually(main())
    assert [repr(error) for error in caught.value.exceptions] == [repr(KeyError(broken))]


# ---- which answers, and how


def test_only_answers_of_the_present_weights_are_compared() -> None:
    fresh, old = group(1, [1.0, 1.0], [2, 0], step=3), group(2, [1.0], [2], step=2)
    answers = dict(enumerate((*old.samples, *fresh.samples)))
    assert written_by(NOW, answers) == {1: array("f", [-1.0, -1.0])}


def test_the_loop_compares_no_more_tokens_than_a_mean_needs() -> None:
    half = logprob_check.COMPARED_TOKENS // 2
    answers = dict(enumerate(group(1, [1.0] * 5, [half] * 5, step=3).samples))
    assert list(written_by(NOW, answers)) == [0, 1]


def test_answers_within_top_p_are_compared_by_their_own_log_probs_and_never_scored() -> None:
    asked: list[tuple[int, ...]] = []

    class Scoring(FakeEngine):
        async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
            asked.append(token_ids)
            return await super().score(token_ids, start)

    async def found(step: int) -> dict[int, Sequence[float]]:
        groups = (group(1, [1.0], [2], step=step), group(2, [1.0], [2], step=step))
        kept = fake_kept((1, 7), (7, 7))
        first = replace(groups[0].samples[0], sample=replace(groups[0].samples[0].sample, kept=kept))
        batch = Batch(step=3, groups=(replace(groups[0], samples=(first,)), groups[1]))
        return await engine_logprobs(batch, NOW, Scoring())

    assert list(run_virtually(found(3))[0]) == [0, 1]
    assert list(run_virtually(found(2))[0]) == [1]
    assert asked == [(1, 7, 7)]


def test_answers_with_unknown_log_probs_are_not_compared() -> None:
    (scored,) = group(1, [1.0], [2], step=3).samples
    unknown = replace(scored, sample=replace(scored.sample, logprobs=array("f", [-1.0, math.nan])))
    assert written_by(NOW, {0: unknown, 1: scored}) == {1: array("f", [-1.0, -1.0])}


def batch_of(*lengths: int) -> Batch:
    return Batch(step=3, groups=(group(1, [1.0] * len(lengths), lengths, step=3),))


def test_the_difference_is_a_mean_over_all_tokens() -> None:
    from_trainer = ((), (-1.0, -2.0), (-0.5,), (-3.0,))
    batch = batch_of(0, 2, 1, 1)
    assert mean_difference(batch, {1: array("f", [-1.5, -1.5]), 2: (-0.25,)}, from_trainer) == pytest.approx(1.25 / 3)
    assert mean_difference(batch, {}, from_trainer) is None


def test_answers_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 and 1 log-probs of answer 0"):
        mean_difference(batch_of(1), {0: array("f", [-1.0, -1.0])}, ((-1.0,),))


def test_only_the_trained_tokens_of_an_episode_are_compared() -> None:
    turn = GeneratedTurn(
        call=0,
        token_ids=(5, 6),
        logprobs=array("f", [-1.0, -2.0]),
        spans=(Span(weights=NOW, start=0, stop=2),),
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    made = trajectory((1, 2), [turn, (9,), replace(turn, call=1)], left_out=[1])
    scored = ScoredSample(sample=made.sample, reward=1.0, loss_mask=made.loss_mask)
    batch = Batch(step=3, groups=(replace(group(1, [1.0], step=3), samples=(scored,)),))
    from_trainer = (-1.5, -2.0, math.nan, math.nan, 7.0)
    assert mean_difference(batch, {0: made.sample.logprobs}, (from_trainer,)) == pytest.approx(0.25)


def test_groups_of_uneven_sizes_and_prompts_of_episodes_are_scored_again() -> None:
    async def engine_scores(batch: Batch) -> dict[int, Sequence[float]]:
        return await logprob_check.engine_logprobs(batch, Weights(version=9, step=9), FakeEngine())

    alone, several = group(1, [1.0], [3]), group(2, [1.0] * 3, [3, 1, 1])
    other = replace(several.samples[0].sample, prompt_ids=(1, 4, 4))
    several = replace(several, samples=(replace(several.samples[0], sample=other), *several.samples[1:]))
    batch = Batch(step=9, groups=(alone, several, group(3, [1.0], [2])))
    scored, _ = run_virtually(engine_scores(batch))
    assert {place: len(each) for place, each in scored.items()} == {0: 3, 1: 3, 4: 2}
    assert scored[1][0] == fake_logprob(4, 7, 0)
    assert scored[0][0] == fake_logprob(1, 7, 0)


def test_unknown_log_probs_are_not_compared() -> None:
    whole = group(1, [1.0], [2], step=3).samples[0]
    turns = (Turn(call=0, start=0, stop=2, finish=FinishReason.STOP),)
    unknown = replace(whole.sample, logprobs=array("f", [math.nan] * 2), turns=turns)
    assert written_by(NOW, {0: replace(whole, sample=unknown), 1: whole}) == {1: whole.sample.logprobs}


# ---- probes: each engine scores the same tokens


def _of_step(step: int) -> Any:
    async def score(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        places = range(start, len(token_ids))
        return tuple(fake_logprob(token_ids[place - 1], token_ids[place], step) for place in places)

    return score


def test_one_engine_that_keeps_its_weights_is_found_by_its_number() -> None:
    world = World(steps=10, lengths=uneven)

    async def current(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        return await world.engine.score(token_ids, start)

    world.scorers = lambda: {0: current, 1: _of_step(0), 2: current}
    world.run()
    probed = {each.batch.step: each.engine_logprob_diffs for each in world.facts if each.engine_logprob_diffs}
    assert list(probed) == list(range(0, 10, PROBE_INTERVAL))
    assert all(apart[0] == apart[2] == 0.0 for apart in probed.values())
    assert [apart[1] > 0.0 for apart in probed.values()] == [False, True, True]


def test_prompts_are_scored_with_one_engine_as_well() -> None:
    world = World(steps=5, scorers=lambda: {0: _of_step(0)}).run()
    assert [each.surprise_ratio is not None for each in world.facts] == [True, False, False, False, True]
    assert all(not each.engine_logprob_diffs for each in world.facts)


def test_an_engine_that_fails_is_left_out_of_the_comparison() -> None:
    (only,) = batch_of(2).groups
    batch = Batch(step=3, groups=(replace(only, prompt=replace(only.prompt, token_ids=(1, 2, 3))),))

    async def scored(*scorers: Any) -> Probed:
        return await EngineProbes(lambda: dict(enumerate(scorers)), 64).score(batch)

    assert run_virtually(scored(_of_step(3)))[0].prompts is not None
    probed, _ = run_virtually(scored(_gone, _of_step(3), _of_step(4)))
    assert sorted(probed.engines) == [1, 2]
    assert probed.prompts is None  # the first engine scores them


def test_a_probe_scores_only_the_beginning_of_a_long_answer() -> None:
    asked: list[int] = []

    async def score(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        asked.append(len(token_ids) - start)
        return (-1.0,) * (len(token_ids) - start)

    async def differences() -> Any:
        batch = batch_of(2 * PROBED_TOKENS)
        probed = await EngineProbes(lambda: {0: score, 1: score}, None).score(batch)
        return differences_by_engine(batch, probed.engines, ((-1.5,) * 2 * PROBED_TOKENS,))

    found, _ = run_virtually(differences())
    assert asked == [PROBED_TOKENS] * 2
    assert found == {0: 0.5, 1: 0.5}


@pytest.mark.parametrize(("by", "ratio"), [(0, 0.5), (1, 2.0), (-1, 2.0), (3, 1.0)])
def test_prompts_whose_ids_are_off_by_one_are_less_probable_than_the_right_ones(by: int, ratio: float) -> None:
    right = (60, 61, 62, 63)

    async def score(token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """A model that knows one prompt."""
        return (-1.0 if token_ids == right else -2.0,) * (len(token_ids) - start)

    (only,) = batch_of(2).groups
    given = tuple((token + by) % 64 for token in right)
    batch = Batch(step=3, groups=(replace(only, prompt=replace(only.prompt, token_ids=given)),))

    async def probed() -> Probed:
        return await EngineProbes(lambda: {0: score}, 64).score(batch)

    assert run_virtually(probed())[0].prompts == ratio


def test_late_probes_cost_neither_the_comparison_nor_the_run() -> None:
    world = World(steps=3, staleness=3, slots=64, scorers=lambda: {0: _slow(1e6), 1: _slow(1e6)}).run()
    assert all(each.logprob_diff == 0.0 and not each.engine_logprob_diffs for each in world.facts)

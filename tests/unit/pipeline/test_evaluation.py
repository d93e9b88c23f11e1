"""Evaluation of several sets on a virtual clock."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import EngineRejected
from asyncrl.types import Estimate, EvalReport, Prompt, Request, Sample, SamplingParams
from tests.unit.pipeline.harness import World

PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=50)
GREEDY = replace(PLAIN, temperature=0.0, max_new_tokens=5)
LONG = replace(PLAIN, max_new_tokens=200, min_new_tokens=30, repetition_penalty=1.1)
SETS = {"plain": (6, 1, PLAIN), "greedy": (3, 4, GREEDY), "long": (2, 2, LONG)}


def first_report(**plan: Any) -> tuple[World, EvalReport]:
    world = World(steps=2, eval_interval=2, **plan).run()
    report = world.facts[0].evaluation
    assert report is not None
    return world, report


def requests_of(world: World, name: str) -> list[Request]:
    return [request for request in world.engine.requests if request.request_id.startswith(f"eval-0-{name}-")]


def texts(report: EvalReport, name: str) -> list[tuple[str, ...]]:
    found = defaultdict[int, list[str]](list)
    for prompt, scored in report.answers[name]:
        found[prompt.row].append(scored.sample.text)
    return [tuple(found[row]) for row in sorted(found)]


def test_each_set_is_asked_with_its_own_sampling_and_number_of_answers() -> None:
    world, report = first_report(held_out_sets=SETS)
    for name, (rows, each, sampling) in SETS.items():
        asked = requests_of(world, name)
        assert len(asked) == rows * each
        assert {request.sampling for request in asked} == {sampling}
        assert list(map(len, texts(report, name))) == [each] * rows
    assert report.num_samples == 6 + 12 + 4
    assert {len(scored.sample.token_ids) for _, scored in report.answers["long"]} == {30}
    assert report.sets["greedy"].truncated == 1.0
    assert report.sets["greedy"].tokens_max == 5


def test_an_answer_with_a_reward_that_is_too_large_has_failed() -> None:
    async def reward(prompt: Prompt, sample: Sample) -> float:
        return 1e200 if prompt.row == 1 else 1.0

    _, report = first_report(held_out_sets=SETS, eval_rewards={"plain": reward})
    assert (report.sets["plain"].num_failed, report.sets["plain"].mean) == (1, Estimate(1.0, 0.0))


def test_all_sets_together_hold_at_most_half_of_the_slots_and_training_continues() -> None:
    many = {name: (40, each, sampling) for name, (_, each, sampling) in SETS.items()}
    world = World(steps=8, slots=16, held_out_sets=many, eval_interval=1, train_seconds=0.2)
    most = 0

    def lengths(request: Request) -> int:  # called as each request begins
        nonlocal most
        most = max(most, sum(one.request_id.startswith("eval") for one in world.engine.now_busy))
        return 40

    world.lengths = lengths
    world.run()
    assert 0 < most <= 8
    assert len(world.trainer.batches) == 8
    first = next(place for place, facts in enumerate(world.facts) if facts.evaluation)
    second = next(place for place, facts in enumerate(world.facts) if facts.evaluation and place > first)
    assert second - first > 1  # steps were trained during the second pass


def test_adding_or_reordering_sets_changes_no_answer_of_another() -> None:
    alone = first_report(held_out_sets={"plain": SETS["plain"]}, lengths=lambda request: 5 + request.seed % 40)[1]
    swapped = {"long": SETS["long"], "plain": SETS["plain"], "greedy": SETS["greedy"]}
    among = first_report(held_out_sets=swapped, lengths=lambda request: 5 + request.seed % 40)[1]
    assert texts(alone, "plain") == texts(among, "plain")
    assert len(set(texts(alone, "plain"))) == 6


def test_sets_with_the_same_prompts_get_answers_of_their_own_and_every_pass_the_same() -> None:
    twins = {"a": (4, 2, PLAIN), "b": (4, 2, PLAIN)}
    world = World(steps=4, eval_interval=2, held_out_sets=twins).run()
    passes = [facts.evaluation for facts in world.facts if facts.evaluation]
    assert len(passes) == 3
    assert texts(passes[0], "a") != texts(passes[0], "b")
    assert texts(passes[0], "a") == texts(passes[1], "a") == texts(passes[2], "a")


def test_fewer_rows_leave_the_other_rows_answers_as_they_are() -> None:
    all_rows = first_report(held_out_sets={"a": (6, 1, PLAIN)})[1]
    three = first_report(held_out_sets={"a": (3, 1, PLAIN)})[1]
    assert texts(three, "a") == texts(all_rows, "a")[:3]


def test_a_failing_set_does_not_spoil_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(prompt: Prompt, sample: Sample) -> float:
        raise ValueError("no reward")

    rejected = {f"eval-0-plain-{row}.0": EngineRejected("too long") for row in range(6)}
    world, report = first_report(held_out_sets=SETS, failures=rejected, eval_rewards={"greedy": broken})
    warnings = [record.getMessage() for record in caplog.records if "held-out row" in record.getMessage()]
    expected = ["held-out row 0 of greedy", "held-out row 0 of greedy", "held-out row 0 of plain"]  # in two passes
    assert sorted(line.split(" failed")[0] for line in warnings) == expected
    assert list(report.accuracy) == ["long"]
    assert (report.num_failed, report.num_samples) == (18, 4)
    assert len(world.trainer.batches) == 2


def test_one_failed_answer_is_left_out_and_counted_in_its_set() -> None:
    _, report = first_report(held_out_sets=SETS, failures={"eval-0-greedy-1.2": EngineRejected("no")})
    assert {name: each.num_failed for name, each in report.sets.items()} == {"plain": 0, "greedy": 1, "long": 0}
    assert list(map(len, texts(report, "greedy"))) == [4, 3, 4]
    assert [scored.sample.index for prompt, scored in report.answers["greedy"] if prompt.row == 1] == [0, 1, 3]


def test_with_time_shared_gpus_a_pass_of_several_sets_ends_before_training_takes_them() -> None:
    world, report = first_report(held_out_sets=SETS, colocate=True, staleness=0, lengths=lambda _: 40)
    assert report.weights == report.newest
    assert report.num_samples == 22
    assert len(world.trainer.batches) == 2


def test_an_interrupted_answer_keeps_the_rest_of_its_minimum_length() -> None:
    sets = {"long": (4, 1, replace(LONG, min_new_tokens=150))}
    world = World(steps=6, eval_interval=2, held_out_sets=sets, abort=True, train_seconds=0.3).run()
    asked = [request for request in world.engine.requests if request.request_id.startswith("eval-")]
    resumed = [request for request in asked if len(request.token_ids) > 3]
    assert resumed
    for request in resumed:
        written = len(request.token_ids) - 3
        assert request.sampling.min_new_tokens == 150 - written
        assert request.sampling.max_new_tokens == 200 - written
    for report in (facts.evaluation for facts in world.facts if facts.evaluation):
        assert {len(scored.sample.token_ids) for _, scored in report.answers["long"]} == {150}


def test_the_most_frequent_text_decides_the_majority_vote() -> None:
    async def by_parity(prompt: Prompt, sample: Sample) -> float:
        return float(len(sample.token_ids) % 2)

    sets = {"a": (8, 5, replace(PLAIN, max_new_tokens=3))}
    _, report = first_report(held_out_sets=sets, lengths=lambda request: 1 + request.seed % 3, reward=by_parity)
    found = report.sets["a"]
    assert set(found.pass_at) == {1, 2, 4}
    assert set(found.majority_at) == {5}
    rights = [scored.reward for _, scored in report.answers["a"]]
    assert found.pass_at[1].value == pytest.approx(sum(rights) / 40)
    assert found.mean.value == found.pass_at[1].value

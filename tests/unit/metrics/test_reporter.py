import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.metrics.facts import TokenCounts
from asyncrl.metrics.reporter import Reporter, row
from asyncrl.metrics.sinks import JsonlSink, Row
from asyncrl.types import FIRST_ARTIFICIAL_CALL, Batch
from tests.declared_metrics import is_declared
from tests.unit.metrics.made import (
    SUMS,
    TOKENS,
    UPDATE,
    evaluated_set,
    evaluation,
    facts,
    group,
    scored,
    with_episodes,
    with_routes,
)

BEFORE = TokenCounts(generated=700, trained=500, held=200)


class KeptRows:
    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.closed = False

    def write(self, row: Row, /) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def test_rewards_are_those_of_the_batch() -> None:
    numbers = row(facts(), BEFORE)
    assert numbers["reward/mean"] == 0.625  # 1, 0, 0.5, 1
    assert numbers["reward/std"] == pytest.approx(math.sqrt(0.171875))


def test_lag_counts_trained_tokens_only() -> None:
    numbers = row(facts(), BEFORE)
    assert numbers["lag/max"] == 1  # the span of lag 2 is masked out
    assert numbers["lag/mean"] == pytest.approx(5 / 12)


def test_lag_is_left_out_when_nothing_was_trained() -> None:
    masked = Batch(step=5, groups=(group(0, scored(0, 1.0, (0, 0), (1, 0, 2))),))
    numbers = row(replace(facts(), batch=masked), BEFORE)
    assert "lag/max" not in numbers
    assert "lag/mean" not in numbers


def test_responses_are_those_of_the_batch() -> None:
    numbers = row(facts(), BEFORE)
    assert numbers["response/tokens_mean"] == 3.75
    assert numbers["response/tokens_max"] == 6
    assert numbers["response/truncated"] == 0.25


def test_token_and_group_counts_balance_in_a_row() -> None:
    numbers = row(facts(), BEFORE)
    tokens = [numbers[f"tokens/{fate}"] for fate in ("trained", "masked", "filtered", "stale", "failed", "held")]
    groups = [value for name, value in numbers.items() if name.startswith("groups/") and name != "groups/admitted"]
    assert tokens == [600, 50, 200, 40, 10, 100]
    assert numbers["tokens/generated"] == sum(tokens)
    assert numbers["groups/admitted"] == sum(groups)


def test_names_with_half_a_surrogate_pair_can_be_written(tmp_path: Path) -> None:
    step = facts()
    first, *others = step.batch.groups
    odd = replace(first.samples[0], reward_parts={"\ud83d": 0.5})
    given = replace(step, batch=replace(step.batch, groups=(replace(first, samples=(odd,)), *others)))
    with closing(Reporter([JsonlSink(tmp_path)])) as reporter:
        assert reporter.step(given)["reward/part/\\ud83d"] == 0.5
        assert reporter.write({"tools/\ud83d": 2}) == {"tools/\\ud83d": 2}, "the name of a log function or an episode"


def test_a_filter_reason_becomes_a_metric() -> None:
    numbers = row(facts(), BEFORE)
    assert numbers["filter/all rewards equal"] == 4
    assert numbers["filter/too long"] == 2


def test_numbers_that_do_not_exist_are_left_out() -> None:
    numbers = row(facts(), BEFORE)
    assert not [name for name in numbers if name.startswith(("eval/", "time/update"))]
    assert "train/logprob_diff" not in numbers
    assert row(facts(logprob_diff=0.01), BEFORE)["train/logprob_diff"] == 0.01
    assert row(facts(update=UPDATE), BEFORE)["time/update_pause_s"] == 0.02


def test_one_held_out_set_has_one_accuracy_and_several_have_a_mean() -> None:
    one = row(facts(evaluated=evaluation(4, gsm=0.5)), BEFORE)
    two = row(facts(evaluated=evaluation(4, gsm=0.5, hard=0.25)), BEFORE)
    assert (one["eval/accuracy"], one["eval/version"], one["eval/step"]) == (0.5, 4, 4)
    assert "eval/gsm/accuracy" not in one
    assert (two["eval/accuracy"], two["eval/gsm/accuracy"], two["eval/hard/accuracy"]) == (0.375, 0.5, 0.25)


def test_throughput_is_what_the_step_added() -> None:
    numbers = row(facts(), BEFORE)
    assert numbers["throughput/tokens_generated_per_s"] == 75  # 300 tokens in 4 s
    assert numbers["throughput/tokens_trained_per_s"] == 25


def test_a_step_without_duration_has_no_throughput() -> None:
    numbers = row(replace(facts(), step_s=0.0), BEFORE)
    assert "throughput/tokens_generated_per_s" not in numbers


def test_the_reporter_carries_the_counts_from_step_to_step() -> None:
    kept = KeptRows()
    reporter = Reporter([kept])
    reporter.step(facts(0))
    reporter.step(facts(1, tokens=replace(TOKENS, generated=1400, trained=1000)))
    assert [row["throughput/tokens_generated_per_s"] for row in kept.rows] == [250, 100]
    assert [row["throughput/tokens_trained_per_s"] for row in kept.rows] == [150, 100]


def test_a_resumed_run_does_not_count_old_tokens_as_new() -> None:
    assert Reporter([], before=BEFORE).step(facts())["throughput/tokens_generated_per_s"] == 75


def test_episodes_have_their_ends_times_and_turns() -> None:
    found = row(with_episodes(facts()), BEFORE)
    assert {name: found[name] for name in found if name.startswith(("episodes/", "turns/"))} == {
        "episodes/open": 9,
        "episodes/finished": 7,
        "episodes/max_turns": 1,
        "episodes/context_full": 2,
        "episodes/tool_failed": 3,
        "episodes/cancelled": 4,
        "episodes/failed": 5,
        "episodes/tool_s": 6.0,
        "episodes/engine_s": 2.0,
        "episodes/tool_share": 0.75,
        **SUMS,
        "turns/mean": 0.5,  # the three samples without turns were made by hand
        "turns/max": 2,
    }
    assert (found["tokens/observed"], found["tokens/trained_copies"]) == (11, 12)
    assert found["response/tokens_mean"] == 3.25  # 2 of 4 tokens are observations
    assert not [name for name in row(facts(), BEFORE) if name.startswith(("episodes/", "turns/", "tokens/obs"))]


def test_trained_tokens_without_an_engine_call_are_no_turn() -> None:
    found = with_episodes(facts())
    group, *groups = found.batch.groups
    whole, *samples = group.samples
    first, second = whole.sample.turns
    sample = replace(whole.sample, turns=(first, replace(second, call=FIRST_ARTIFICIAL_CALL)))
    group = replace(group, samples=(replace(whole, sample=sample), *samples))
    assert row(replace(found, batch=replace(found.batch, groups=(group, *groups))), BEFORE)["turns/max"] == 1


def test_metrics_of_user_code_do_not_replace_the_counts_of_episodes() -> None:
    found = with_episodes(facts())
    assert found.scheduler.episodes is not None
    stats = replace(found.scheduler.episodes, sums={"episodes/finished": 1000.0})
    replaced = replace(found, scheduler=replace(found.scheduler, episodes=stats))
    assert row(replaced, BEFORE)["episodes/finished"] == 7


def test_an_evaluation_has_the_step_and_version_of_its_weights_in_the_row_of_another_step() -> None:
    found = row(facts(5, evaluated=evaluation(6, gsm=0.75)), BEFORE)
    expected = {"step": 5, "eval/version": 6, "eval/step": 6, "eval/failed": 1, "eval/accuracy": 0.75}
    assert {name: number for name, number in found.items() if name == "step" or name.startswith("eval/")} == expected


def test_each_held_out_set_has_estimates_with_margins() -> None:
    report = replace(evaluation(6, gsm=0.5), sets={"gsm": evaluated_set(0.5)}, metrics={"aime/len": 3.0})
    found = {
        name: number
        for name, number in row(facts(evaluated=report), BEFORE).items()
        if name.startswith("eval/") and name.count("/") > 1
    }
    assert found == {
        "eval/gsm/reward": 0.5,
        "eval/gsm/reward_ci95": 0.05,
        "eval/gsm/pass@1": 0.5,
        "eval/gsm/pass@1_ci95": 0.05,
        "eval/gsm/pass@4": 0.75,
        "eval/gsm/majority@4": 0.625,
        "eval/gsm/majority@4_ci95": 0.02,
        "eval/gsm/truncated": 0.125,
        "eval/gsm/tokens_mean": 10.0,
        "eval/gsm/tokens_max": 20,
        "eval/gsm/failed": 1,
        "eval/function/aime/len": 3.0,
    }
    assert [name for name in found if not is_declared(name)] == []


def test_closing_the_reporter_closes_every_sink_even_when_one_fails() -> None:
    class FullDisk(KeptRows):
        def close(self) -> None:
            raise OSError("no space left")

    first, last = KeptRows(), KeptRows()
    with pytest.raises(OSError, match="no space"):
        Reporter([first, FullDisk(), last]).close()
    assert first.closed
    assert last.closed


def test_the_share_of_positions_without_routes_counts_samples_that_have_none() -> None:
    given = facts()
    assert "rollout/routes_missing" not in row(given, TOKENS)
    with_some = with_routes(given)  # of the first sample, all but one position
    positions = [2 + len(each.sample.token_ids) - 1 for made in given.batch.groups for each in made.samples]
    assert row(with_some, TOKENS)["rollout/routes_missing"] == (1 + sum(positions[1:])) / sum(positions)

"""The scheduler, on fakes and a virtual clock: overlap, order, bounds, failures and accounts."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from asyncrl.engines.fake import FakeCheckpoints, FakePrompts
from asyncrl.errors import DataError, EngineLost, EngineRejected, FailureBudgetSpent, FilterBudgetSpent, Stalled
from asyncrl.metrics.facts import GroupCounts, TokenCounts
from asyncrl.metrics.reporter import row
from asyncrl.pipeline.sampling.sampler import MOST_VERSIONS, ServingWeights
from asyncrl.pipeline.scheduling.accounts import Accounts
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.types import Prompt, Request, Sample, ScoredGroup, Weights
from tests.unit.pipeline import harness
from tests.unit.pipeline.harness import World, uneven
from tests.virtual_time import run_virtually


def test_generation_overlaps_with_training() -> None:
    # 8 tokens at 10 ms; every batch after the first is generated while the trainer works.
    world = World(steps=5, train_seconds=2.0, update_seconds=0.0).run()
    assert world.seconds == pytest.approx(0.08 + 5 * 2.0)


def test_without_staleness_training_and_generation_alternate() -> None:
    world = World(steps=5, staleness=0, train_seconds=2.0, update_seconds=0.0).run()
    assert world.seconds == pytest.approx(5 * (0.08 + 2.0))
    assert set(world.lags) == {0}


def test_without_staleness_batches_are_those_of_a_plain_loop() -> None:
    world = World(steps=5, staleness=0, lengths=uneven).run()
    assert world.trained_ids == [list(range(4 * step, 4 * step + 4)) for step in range(5)]


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (4, 1)])
def test_no_token_is_trained_above_the_bound(staleness: int, interval: int) -> None:
    world = World(steps=12, staleness=staleness, interval=interval, lengths=uneven).run()
    assert max(world.lags) <= staleness


def test_samples_in_flight_never_exceed_the_slots_and_fill_them() -> None:
    world = World(steps=4, slots=5, groups_per_step=8, group_size=3, lengths=uneven).run()
    assert world.engine.most_busy == 5


def test_a_run_ends_with_more_slots_than_samples() -> None:
    world = World(steps=2, slots=10_000).run()
    assert world.engine.most_busy == 16  # two batches of four groups of two


def test_no_group_is_generated_that_no_step_is_left_to_train() -> None:
    world = World(steps=3, staleness=5, lengths=uneven).run()
    assert world.prompts.taken == 3 * 4


def test_weights_are_published_after_every_interval() -> None:
    world = World(steps=6, interval=2, staleness=2).run()
    assert [(weights.version, weights.step) for weights in world.updater.published] == [(1, 2), (2, 4), (3, 6)]


def test_a_sample_in_flight_at_an_update_continues_and_records_both_versions() -> None:
    world = World(steps=4, lengths=lambda request: 4 + 300 * (request.seed % 3 == 0), train_seconds=0.5).run()
    spans = [
        [(span.weights.version, span.stop - span.start) for span in scored.sample.spans]
        for batch in world.trainer.batches
        for group in batch.groups
        for scored in group.samples
    ]
    crossing = [span for span in spans if len(span) > 1]
    assert crossing
    assert all(sum(count for _, count in span) == 304 for span in crossing)
    assert all(versions == sorted(versions) for versions in ([version for version, _ in span] for span in crossing))


def test_rejected_groups_are_replaced() -> None:
    def keep_even(group: ScoredGroup) -> str | None:
        return "odd" if group.group_id % 2 else None

    world = World(steps=4, keep=keep_even).run()
    stats = world.facts[-1].scheduler
    assert stats.filter_reasons == {"odd": stats.groups.filtered}
    assert stats.groups.trained == 16
    assert all(group_id % 2 == 0 for batch in world.trained_ids for group_id in batch)


def test_a_filter_that_rejects_everything_ends_the_run_and_says_why() -> None:
    with pytest.raises(FilterBudgetSpent, match=r"50 groups in a row .*50 of them for 'too easy'"):
        World(keep=lambda group: "too easy").run()


def test_a_lost_engine_is_tried_again_with_the_tokens_kept() -> None:
    world = World(max_new_tokens=10, chunk=4, failures={"g0.0": EngineLost("gone")}).run()
    again = next(request for request in world.engine.requests if request.request_id == "g0.0-1")
    groups = [group for batch in world.trainer.batches for group in batch.groups]
    first = next(group for group in groups if group.group_id == 0).samples[0].sample
    assert again.token_ids[3:] == first.token_ids[:4]
    assert again.sampling.max_new_tokens == 6
    assert len(first.token_ids) == 10  # of 4 + 8
    assert world.facts[-1].scheduler.retries == 1


def test_an_answer_whose_end_was_lost_is_not_written_twice() -> None:
    world = World(max_new_tokens=4, chunk=4, failures={"g0.0": EngineLost("gone")}).run()
    assert all(not request.request_id.startswith("g0.0-") for request in world.engine.requests)
    assert world.facts[-1].scheduler.retries == 0


def test_another_attempt_starts_from_the_weights_of_its_own_time() -> None:
    def slow_group_0(request: Request) -> int:
        return 400 if request.request_id.startswith("g0") else 8

    world = World(
        staleness=3,
        slots=32,
        chunk=12,
        lengths=slow_group_0,
        failures={"g0.0": EngineLost("gone")},
        seconds_per_token=0.5,
    )
    world.run()
    again = next(request for request in world.engine.requests if request.request_id == "g0.0-1")
    group = next(group for batch in world.trainer.batches for group in batch.groups if group.group_id == 0)
    assert group.samples[0].sample.spans[0].weights.version == 0
    assert again.weights.version > 0
    assert max(world.lags) <= 3


def test_samples_of_a_group_are_drawn_differently() -> None:
    world = World().run()
    assert len({request.seed for request in world.engine.requests}) == len(world.engine.requests)


def test_the_final_weights_are_saved_once() -> None:
    assert World().run().trainer.saved == [Path("model")]


def test_a_slot_is_free_while_the_reward_is_computed() -> None:
    async def slow(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(5.0)
        return 1.0

    world = World(steps=1, staleness=0, slots=2, reward=slow, train_seconds=1.0).run()  # 8 samples, 2 at a time
    assert world.seconds < 5.0 + 1.0 + 1.0


def test_failures_are_counted_in_a_row() -> None:
    async def every_third(prompt: Prompt, sample: Sample) -> float:
        if prompt.row % 3 == 0:
            raise ValueError("no")
        return 1.0

    world = World(steps=8, slots=2, reward=every_third, max_failed_groups=2).run()
    groups = world.facts[-1].scheduler.groups
    assert (groups.trained, groups.failed) == (32, 16)  # of rows 0 to 47, with two failures in a row allowed


def test_rejections_are_counted_in_a_row() -> None:
    def keep_every_third(group: ScoredGroup) -> str | None:
        return None if group.group_id % 3 == 0 else "unlucky"

    world = World(steps=8, slots=2, keep=keep_every_third, max_filtered_groups=8).run()
    groups = world.facts[-1].scheduler.groups
    assert sorted(number for ids in world.trained_ids for number in ids) == list(range(0, 96, 3))
    assert groups.filtered + groups.stale == 63  # of groups 0 to 94, with eight rejections in a row allowed


def test_long_answers_do_not_look_stuck() -> None:
    world = World(steps=1, lengths=lambda request: 5000, chunk=50, watchdog_s=1.0).run()  # with a chunk every 0.5 s
    assert world.seconds > 50.0
    (batch,) = world.trainer.batches
    assert {len(each.sample.token_ids) for group in batch.groups for each in group.samples} == {5000}


def test_a_reward_cancelled_from_inside_costs_its_group_and_nothing_else() -> None:
    async def cancelled(prompt: Prompt, sample: Sample) -> float:
        if prompt.row == 0:
            raise asyncio.CancelledError
        return 1.0

    world = World(reward=cancelled, held_out=3).run()
    assert world.facts[-1].scheduler.groups.failed == 1
    assert world.facts[0].evaluation is not None
    assert world.facts[0].evaluation.num_failed == 1


def test_a_reward_may_be_any_real_number() -> None:
    async def numpy_number(prompt: Prompt, sample: Sample) -> Any:
        return np.float32(0.5)

    world = World(reward=numpy_number).run()
    assert world.facts[-1].scheduler.groups.failed == 0


@pytest.mark.parametrize("answer", [True, "", ["no"]])
def test_a_filter_that_gives_neither_none_nor_a_reason_is_told_so(answer: object) -> None:
    with pytest.raises(FailureBudgetSpent, match="a filter must return None or a reason"):
        World(keep=lambda group: answer).run()


def test_a_sample_that_keeps_failing_costs_its_group_and_no_more() -> None:
    lost = EngineLost("gone")
    world = World(retries=1, chunk=4, failures={"g2.1": lost, "g2.1-1": lost}).run()
    stats = world.facts[-1].scheduler
    assert stats.groups.failed == 1
    assert stats.tokens.failed > 0
    assert stats.groups.trained == 16
    assert all(2 not in batch for batch in world.trained_ids)
    assert world.all_slots.free == world.all_slots.size


def test_a_refused_request_is_not_tried_again() -> None:
    world = World(lengths=uneven, failures={"g1.0": EngineRejected("too long")}).run()
    assert world.all_slots.free == world.all_slots.size
    assert world.facts[-1].scheduler.groups.failed == 1
    assert world.facts[-1].scheduler.retries == 0


def test_too_many_failures_in_a_row_end_the_run() -> None:
    async def broken(prompt: Prompt, sample: Sample) -> float:
        raise KeyError("answer")

    with pytest.raises(FailureBudgetSpent, match=r"3 groups failed in a row .*KeyError: 'answer'"):
        World(reward=broken).run()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None])
def test_a_reward_that_is_no_finite_number_costs_the_group(value: object) -> None:
    async def strange(prompt: Prompt, sample: Sample) -> object:
        return value if prompt.row == 0 else 1.0

    world = World(reward=strange).run()
    assert world.facts[-1].scheduler.groups.failed == 1


def test_a_slow_reward_costs_the_group() -> None:
    async def slow(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(1e6 if prompt.row == 0 else 0)
        return 1.0

    world = World(reward=slow).run()
    assert world.facts[-1].scheduler.groups.failed == 1


def test_a_bug_ends_the_run_as_it_is() -> None:
    def broken(request: Request) -> int:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        World(lengths=broken).run()


def test_a_slow_source_of_prompts_starves_admission_and_loses_nothing() -> None:
    world = World(steps=4, prompt_seconds=10.0, train_seconds=1.0, lengths=uneven).run()
    assert world.prompts.taken == 4 * 4
    assert world.seconds == pytest.approx(16 * 10.0, abs=10.0)  # the source is what everything waits for
    assert sorted(group_id for ids in world.trained_ids for group_id in ids) == list(range(16))


def test_with_a_slow_source_an_interrupted_group_resumes_without_a_new_prompt() -> None:
    world = World(steps=4, staleness=0, partial=True, over_sampling=6, prompt_seconds=10.0, lengths=uneven).run()
    assert world.facts[-1].scheduler.groups.stale + world.facts[-1].scheduler.groups.trained == world.prompts.taken


def test_a_stuck_source_of_prompts_is_named() -> None:
    with pytest.raises(Stalled, match=r"0 groups in flight, .* waiting for the data source for 50 s without a prompt"):
        World(prompt_seconds=1e6, watchdog_s=50.0).run()


def test_a_source_that_ends_ends_the_run() -> None:
    class Ended(FakePrompts):
        async def ready(self) -> None:
            if self.taken == 6:
                raise DataError("no more prompts")

    world = World()
    with pytest.raises(DataError, match="no more prompts"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "FakePrompts", Ended)
        world.run()
    assert world.prompts.taken == 6


def test_a_stuck_engine_ends_the_run_with_an_error_that_names_what_waits() -> None:
    stuck = World(seconds_per_token=float("inf"), watchdog_s=50.0)
    with pytest.raises(Stalled, match=r"step 0 has 0 of 4 groups; 8 groups in flight, 16 of 16 slots"):
        stuck.run()


def test_cancelling_the_run_aborts_what_is_in_flight() -> None:
    world = World(steps=100, lengths=lambda request: 1000)

    async def main() -> None:
        try:
            async with asyncio.timeout(3.0):
                await world.main()
        except TimeoutError:
            return
        raise AssertionError("the run ended by itself")

    run_virtually(main())
    assert world.engine.requests
    assert world.engine.busy == 0


def test_evaluation_runs_during_training_and_before_the_first_step() -> None:
    world = World(steps=6, held_out=20, eval_interval=2, train_seconds=5.0).run()
    reports = [facts.evaluation for facts in world.facts]
    versions = [report.weights.version if report else None for report in reports]
    assert versions == [0, None, 2, None, 4, 6]
    assert world.seconds == pytest.approx(6 * 5.0, rel=0.1)
    assert all(report.num_samples == 20 for report in reports if report)


@pytest.mark.parametrize("eval_interval", [1, 2, 3])
def test_every_pass_is_reported_once_and_the_first_and_last_are_of_one_version(eval_interval: int) -> None:
    world = World(
        steps=7, held_out=9, eval_interval=eval_interval, train_seconds=0.2, lengths=lambda request: 40, slots=8
    ).run()
    passes = {request.request_id.split("-")[1] for request in world.engine.requests if request.request_id[0] == "e"}
    reports = [facts.evaluation for facts in world.facts if facts.evaluation]
    assert {str(report.weights.version) for report in reports} == passes
    assert len(reports) == len(passes)
    for report in (reports[0], reports[-1]):
        assert report.weights == report.newest
    assert reports[-1].weights.step == 7


@pytest.mark.parametrize(("steps", "eval_interval", "measured"), [(4, 1, [0, 1, 2, 4]), (6, 5, [0, 6])])
def test_a_pass_that_is_due_one_step_before_the_end_is_left_out(
    steps: int, eval_interval: int, measured: list[int]
) -> None:
    world = World(steps=steps, held_out=2, eval_interval=eval_interval).run()
    assert [facts.evaluation.weights.step for facts in world.facts if facts.evaluation] == measured


def test_evaluation_never_holds_more_than_half_the_slots() -> None:
    world = World(steps=1, held_out=100, slots=8, groups_per_step=1, group_size=1, lengths=lambda request: 50).run()
    evaluating = {request.request_id for request in world.engine.requests if request.request_id.startswith("eval")}
    assert len(evaluating) == 100
    assert world.engine.most_busy <= 5


def test_waiting_for_the_first_evaluation_is_not_waiting_for_data() -> None:
    world = World(steps=1, held_out=100, slots=8, groups_per_step=1, group_size=1, lengths=lambda request: 50).run()
    assert world.facts[0].trainer_waited_s == pytest.approx(0.5)


def test_inspecting_held_groups_changes_nothing() -> None:
    def look(group: ScoredGroup) -> None:
        assert looked.scheduler.gauges().tokens.generated > 0

    looked = World(steps=6, lengths=uneven, keep=look)
    looked.run()
    plain = World(steps=6, lengths=uneven).run()
    assert [facts.scheduler for facts in looked.facts] == [facts.scheduler for facts in plain.facts]


def test_at_most_64_reasons_of_filters_are_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    numbers = itertools.count()

    def keep(group: ScoredGroup) -> str | None:
        number = next(numbers)
        return f"reward {number / 7:.6f}\nis too low" if number % 2 else None

    checkpoints = FakeCheckpoints(0.0)
    world = World(steps=40, groups_per_step=8, slots=64, keep=keep, checkpoints=checkpoints).run()
    stats = world.facts[-1].scheduler
    assert len(stats.filter_reasons) == 65
    assert sum(stats.filter_reasons.values()) == stats.groups.filtered
    assert stats.filter_reasons["other"] == stats.groups.filtered - 64
    assert not any("\n" in reason for reason in stats.filter_reasons)
    assert checkpoints.written[40]["reasons"] == stats.filter_reasons
    assert len(orjson.dumps(row(world.facts[-1], TokenCounts()))) < 6000
    assert [record.message for record in caplog.records if "reasons" in record.message] == [
        "filters have given 64 reasons; further ones count as 'other', the next is: reward 18.428571\\nis too low"
    ]


def test_a_resumed_run_folds_reasons_of_an_earlier_one() -> None:
    before = _state_with({f"reason {number}": number + 1 for number in range(100)})
    reasons = Accounts(2, before).reasons
    assert len(reasons) == 65
    assert reasons["reason 99"] == 100
    assert reasons["other"] == sum(range(1, 37))


def _state_with(reasons: dict[str, int]) -> RunState:
    return RunState(
        step=1,
        version=1,
        next_id=1,
        prompts_taken=1,
        outstanding=(),
        tokens=TokenCounts(),
        groups=GroupCounts(),
        reasons=reasons,
        verdicts=(),
        retries=0,
        aborts=0,
    )


def test_the_versions_that_chunks_may_name_do_not_grow_with_the_run() -> None:
    serving = ServingWeights(Weights(version=0, step=0))
    for version in range(1, 3 * MOST_VERSIONS):
        serving.set(Weights(version=version, step=version))
    assert len(serving.by_version) == MOST_VERSIONS
    assert serving.now.version in serving.by_version

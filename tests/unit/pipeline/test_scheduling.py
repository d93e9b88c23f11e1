"""The scheduler, on fakes and a virtual clock: overlap, order, bounds, failures, and that nothing is lost."""

import asyncio
import random

import pytest

from asyncrl.errors import EngineLost, EngineRejected, FailureBudgetSpent, FilterBudgetSpent, Stalled
from asyncrl.types import Prompt, Request, Sample, ScoredGroup
from tests.unit.pipeline.harness import World
from tests.virtual_time import run_virtually


def uneven(request: Request) -> int:
    """5 to 204 tokens."""
    return 5 + request.seed % 200


def test_generation_hides_behind_training() -> None:
    # 8 tokens at 10 ms; every batch after the first is generated while the trainer works.
    world = World(steps=5, train_seconds=2.0, push_seconds=0.0).run()
    assert world.seconds == pytest.approx(0.08 + 5 * 2.0)


def test_without_staleness_training_and_generation_alternate() -> None:
    world = World(steps=5, staleness=0, train_seconds=2.0, push_seconds=0.0).run()
    assert world.seconds == pytest.approx(5 * (0.08 + 2.0))
    assert set(world.lags) == {0}


def test_without_staleness_batches_are_those_of_a_plain_loop() -> None:
    world = World(steps=5, staleness=0, lengths=uneven).run()
    assert world.trained_ids == [list(range(4 * step, 4 * step + 4)) for step in range(5)]


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (1, 2), (2, 2), (3, 2), (4, 1)])
def test_no_token_is_trained_above_the_bound(staleness: int, interval: int) -> None:
    world = World(steps=12, staleness=staleness, interval=interval, lengths=uneven).run()
    assert max(world.lags) <= staleness


def test_the_bound_holds_and_the_accounts_balance_over_random_runs() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        interval = rng.randint(1, 3)
        world = World(
            steps=rng.randint(2, 8),
            groups_per_step=rng.randint(1, 5),
            group_size=rng.randint(1, 4),
            interval=interval,
            staleness=rng.randint(interval - 1, interval + 2),
            slots=rng.randint(1, 20),
            lengths=lambda request: 1 + request.seed % 97,
            train_seconds=rng.choice([0.01, 0.3, 3.0]),
            keep=lambda group: "unlucky" if group.group_id % 5 == 0 else None,
            held_out=rng.choice([0, 3]),
            eval_interval=2,
        ).run()
        assert max(world.lags) <= world.staleness
        assert world.engine.most_busy <= world.slots
        assert world.engine.busy == 0
        assert len(world.trainer.batches) == world.steps
        tokens = world.facts[-1].scheduler.tokens
        assert tokens.held == 0
        assert tokens.generated == tokens.trained + tokens.filtered
        trained = [group_id for batch in world.trained_ids for group_id in batch]
        assert len(trained) == len(set(trained)) == world.steps * world.groups_per_step
        assert world.prompts.taken == world.facts[-1].scheduler.groups.admitted


def test_samples_in_flight_never_exceed_the_slots_and_fill_them() -> None:
    world = World(steps=4, slots=5, groups_per_step=8, group_size=3, lengths=uneven).run()
    assert world.engine.most_busy == 5


def test_more_slots_than_work_are_no_trouble() -> None:
    world = World(steps=2, slots=10_000).run()
    assert world.engine.most_busy == 16  # two batches of four groups of two


def test_nothing_is_generated_that_no_step_is_left_to_train() -> None:
    world = World(steps=3, staleness=5, lengths=uneven).run()
    assert world.prompts.taken == 3 * 4


def test_weights_are_pushed_after_every_interval() -> None:
    world = World(steps=6, interval=2, staleness=2).run()
    assert [(weights.version, weights.step) for weights in world.updater.pushed] == [(1, 2), (2, 4), (3, 6)]


def test_a_sample_in_flight_at_an_update_goes_on_and_says_so() -> None:
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


def test_rejected_groups_are_made_up_for() -> None:
    def keep_even(group: ScoredGroup) -> str | None:
        return "odd" if group.group_id % 2 else None

    world = World(steps=4, keep=keep_even).run()
    stats = world.facts[-1].scheduler
    assert stats.filter_reasons == {"odd": stats.groups.filtered}
    assert stats.groups.trained == 16
    assert all(group_id % 2 == 0 for batch in world.trained_ids for group_id in batch)


def test_a_filter_that_rejects_everything_ends_the_run_and_says_why() -> None:
    with pytest.raises(FilterBudgetSpent, match=r"50 groups in a row .*'too easy' \(50 of 50"):
        World(keep=lambda group: "too easy").run()


def test_a_lost_engine_is_tried_again_with_the_tokens_kept() -> None:
    world = World(failures={"g0.0": EngineLost("gone")}).run()
    again = next(request for request in world.engine.requests if request.request_id == "g0.0-1")
    groups = [group for batch in world.trainer.batches for group in batch.groups]
    first = next(group for group in groups if group.group_id == 0).samples[0].sample
    assert again.token_ids[3:] == first.token_ids[:4]
    assert len(first.token_ids) == 4 + 8  # the fake writes 8 per request
    assert world.facts[-1].scheduler.retries == 1


def test_a_sample_that_keeps_failing_costs_its_group_and_no_more() -> None:
    lost = EngineLost("gone")
    world = World(retries=1, failures={"g2.1": lost, "g2.1-1": lost}).run()
    stats = world.facts[-1].scheduler
    assert stats.groups.failed == 1
    assert stats.tokens.failed > 0
    assert stats.groups.trained == 16
    assert all(2 not in batch for batch in world.trained_ids)


def test_a_refused_request_is_not_tried_again() -> None:
    world = World(failures={"g1.0": EngineRejected("too long")}).run()
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


def test_a_stuck_engine_ends_the_run_and_says_who_waits_for_whom() -> None:
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


def test_evaluation_runs_beside_training_and_before_the_first_step() -> None:
    world = World(steps=6, held_out=20, eval_interval=3, train_seconds=5.0).run()
    reports = [facts.evaluation for facts in world.facts]
    versions = [report.weights.version if report else None for report in reports]
    assert versions == [0, None, None, 3, None, 6]
    assert world.seconds == pytest.approx(6 * 5.0, rel=0.1)
    assert all(report.num_samples == 20 for report in reports if report)


def test_evaluation_never_holds_more_than_half_the_slots() -> None:
    world = World(steps=1, held_out=100, slots=8, groups_per_step=1, group_size=1, lengths=lambda request: 50).run()
    evaluating = {request.request_id for request in world.engine.requests if request.request_id.startswith("eval")}
    assert len(evaluating) == 100
    assert world.engine.most_busy <= 5


def test_log_probs_of_engine_and_trainer_are_compared_at_every_step() -> None:
    world = World(steps=4).run()
    assert all(facts.logprob_diff is not None for facts in world.facts)
    assert world.facts[0].logprob_diff == 0.0

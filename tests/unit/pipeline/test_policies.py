"""Groups that grow old, are interrupted, or exceed a batch."""

import asyncio
from functools import partial
from itertools import chain
from typing import Any

import pytest

from asyncrl.engines.fake import FakeEngine, FakePrompts
from asyncrl.errors import FilterBudgetSpent
from asyncrl.pipeline.sampling.sampler import sample_seed
from asyncrl.types import Chunk, Picked, Request, ScoredGroup, Weights
from tests.unit.pipeline.harness import World
from tests.virtual_time import run_virtually


def one_straggler(request: Request) -> int:
    """Lengths under which the first answer of the first group takes 100 times as long as all others."""
    is_it = request.request_id.startswith(("g0.0", "g0~"))
    return 800 - (len(request.token_ids) - 3) if is_it else 8


def half(group: ScoredGroup) -> str | None:
    """A filter that rejects every other prompt."""
    return "odd" if group.prompt.row % 2 else None


def tokens(world: World) -> Any:
    return world.facts[-1].scheduler.tokens


# ---- wait, mask, drop


def test_by_default_the_batch_waits_for_a_straggler_that_is_due() -> None:
    world = World(steps=4, lengths=one_straggler, train_seconds=0.5).run()
    assert 0 in world.trained_ids[1]  # started under step 0, staleness 1
    assert world.facts[1].trainer_waited_s > 5.0
    assert tokens(world).stale == tokens(world).masked == 0


def test_drop_cancels_a_group_that_is_due_and_unfinished_and_its_prompt_comes_again() -> None:
    world = World(steps=4, lengths=one_straggler, train_seconds=0.5, stale="drop").run()
    assert all(fact.trainer_waited_s < 1.0 for fact in world.facts)
    trained = [group for batch in world.trainer.batches for group in batch.groups]
    assert 0 not in [group.group_id for group in trained]
    assert [group.prompt.row for group in trained].count(0) == 1
    assert tokens(world).stale > 0


@pytest.mark.parametrize("partial", [False, True])
def test_dropped_groups_leave_the_engines_before_the_weights_change(partial: bool) -> None:
    world = World(steps=3, group_size=1, lengths=one_straggler, train_seconds=0.5, stale="drop", partial=partial)
    present: list[list[str]] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            await asyncio.sleep(0)
            world.updater.before_snapshot = lambda: present.append(
                [request.request_id for request in world.engine.now_busy]
            )
            await running

    run_virtually(main())
    assert "g0.0" in present[0]  # due at the second step
    assert "g0.0" not in present[1]


def test_mask_never_waits_and_masks_tokens_that_are_too_old() -> None:
    world = World(steps=12, lengths=one_straggler, train_seconds=1.0, update_seconds=0.0, stale="mask").run()
    assert all(fact.trainer_waited_s < 0.5 for fact in world.facts)
    (step,) = [batch.step for batch in world.trainer.batches if 0 in [group.group_id for group in batch.groups]]
    straggler = next(group for group in world.trainer.batches[step].groups if group.group_id == 0)
    sample, mask = straggler.samples[0].sample, straggler.samples[0].loss_mask
    ages = [step - span.weights.step for span in sample.spans for _ in range(span.start, span.stop)]
    assert mask == tuple(int(age <= 1) for age in ages)
    assert 0 < sum(mask) < len(mask)
    assert tokens(world).masked == mask.count(0) + len(straggler.samples[1].loss_mask)
    assert world.facts[step].scheduler.tokens.stale == 0


def test_a_group_with_nothing_left_to_train_on_is_stale() -> None:
    """Under ``mask``, a buffer filter withholds a kept group until all its tokens are too old."""

    def late_for_the_first(step: int, waiting: Any, size: int) -> Picked:
        return Picked(train=tuple(group.group_id for group in waiting if group.group_id or step >= 3)[:size])

    world = World(steps=6, stale="mask", groups_per_step=1, pick=late_for_the_first).run()
    assert tokens(world).stale == 16
    assert world.scheduler.stats().groups.stale == 1
    assert 0 not in [group.group_id for group in groups(world)]
    assert max(world.lags) <= 1


# ---- partial rollouts


def test_a_partial_group_resumes_after_its_last_token_and_loses_none() -> None:
    whole = World(steps=1, groups_per_step=1, lengths=one_straggler).run()
    world = World(steps=14, lengths=one_straggler, train_seconds=0.5, stale="drop", partial=True).run()
    straggler = trained_group(world, 0)
    expected = trained_group(whole, 0)
    assert [each.sample.token_ids for each in straggler.samples] == [each.sample.token_ids for each in expected.samples]
    again = [request for request in world.engine.requests if request.request_id.startswith("g0~")]
    assert len(again) >= 3
    assert tokens(world).stale == len(again)  # the fake engine delivers one token more for each that is cancelled
    for request in again:
        written = len(request.token_ids) - 3
        assert request.token_ids[3:] == straggler.samples[0].sample.token_ids[:written]
        assert request.sampling.max_new_tokens == world.max_new_tokens - written
    assert max(world.lags) <= 1


def test_only_tokens_after_the_interruption_of_a_partial_group_are_trained_if_configured() -> None:
    plain = World(steps=14, lengths=one_straggler, train_seconds=0.5, stale="drop", partial=True).run()
    masked = World(
        steps=14, lengths=one_straggler, train_seconds=0.5, stale="drop", partial=True, mask_resumed=True
    ).run()
    last = [request for request in masked.engine.requests if request.request_id.startswith("g0~")][-1]
    resumed_at = len(last.token_ids) - 3
    mask = trained_group(masked, 0).samples[0].loss_mask
    assert mask == (0,) * resumed_at + (1,) * (len(mask) - resumed_at)
    assert sum(trained_group(masked, 0).samples[1].loss_mask) == 0  # it was done before
    assert sum(mask) <= sum(trained_group(plain, 0).samples[0].loss_mask)


def trained_group(world: World, group_id: int) -> ScoredGroup:
    (found,) = [group for batch in world.trainer.batches for group in batch.groups if group.group_id == group_id]
    return found


# ---- updates that abort


def test_an_update_that_aborts_loses_no_token_and_counts_no_failure() -> None:
    def long(request: Request) -> int:
        return 300 - (len(request.token_ids) - 3)

    settings: dict[str, Any] = {"steps": 6, "staleness": 3, "lengths": long, "train_seconds": 0.7}
    paused, aborted = World(**settings).run(), World(**settings, abort=True).run()
    assert aborted.facts[-1].scheduler.aborts > 10
    assert aborted.facts[-1].scheduler.retries == 0
    assert all_tokens(aborted) == all_tokens(paused)
    assert any(len(scored.sample.spans) > 2 for group in groups(aborted) for scored in group.samples)


def test_answers_with_a_grammar_begin_anew_and_their_first_tokens_are_stale() -> None:
    settings: dict[str, Any] = {"steps": 6, "staleness": 3, "lengths": lambda request: 300, "train_seconds": 0.7}
    world = World(**settings, abort=True, grammar="a+").run()
    last = world.facts[-1].scheduler
    assert last.aborts > 10
    assert last.groups.stale == 0
    assert last.tokens.stale > 10 * 20
    assert last.tokens.trained == 6 * 4 * 2 * 300
    assert all(len(scored.sample.spans) == 1 for group in groups(world) for scored in group.samples)


def test_tokens_that_wait_for_the_end_of_their_answer_keep_the_watchdog_quiet() -> None:
    # An answer takes 30 s, and its first token is delivered then.
    world = World(steps=2, grammar="a+", lengths=lambda request: 3000, watchdog_s=10.0).run()
    assert world.facts[-1].scheduler.tokens.trained == 2 * 4 * 2 * 3000


def groups(world: World) -> list[ScoredGroup]:
    return [group for batch in world.trainer.batches for group in batch.groups]


def all_tokens(world: World) -> dict[int, list[tuple[int, ...]]]:
    return {group.group_id: [scored.sample.token_ids for scored in group.samples] for group in groups(world)}


# ---- filters, refill, surplus


def test_a_filter_that_rejects_half_wastes_few_groups_beyond_the_rejected() -> None:
    world = World(
        steps=25,
        groups_per_step=16,
        staleness=2,
        slots=256,
        keep=half,
        train_seconds=0.2,
        update_seconds=0.0,
        lengths=lambda request: 1 + request.seed % 60,
        chunk=60,
    ).run()
    spent = tokens(world)
    before_the_end = world.facts[-3].scheduler.tokens
    assert before_the_end.stale <= 0.02 * before_the_end.generated
    assert 0.8 < spent.filtered / spent.trained < 1.2
    # The engines work ahead although half of it will be rejected: 3 batches are all that would run without a filter.
    assert world.engine.most_busy > world.group_size * 3 * 16


def test_kept_groups_beyond_the_batch_stay_for_the_next_one() -> None:
    world = World(steps=6, staleness=2, groups_per_step=3, slots=64, train_seconds=5.0).run()
    assert [len(ids) for ids in world.trained_ids] == [3] * 6
    assert sorted(chain.from_iterable(world.trained_ids)) == list(range(18))
    assert tokens(world).stale == 0


def test_over_sampling_caps_what_is_started_for_a_rejecting_filter() -> None:
    def most_outstanding(over_sampling: int | None) -> int:
        world = World(steps=20, groups_per_step=8, staleness=0, slots=256, keep=half, over_sampling=over_sampling).run()
        seen = [request.request_id for request in world.engine.requests]
        assert len(seen) == len(set(seen))
        return world.engine.most_busy // world.group_size

    tight, roomy, free = most_outstanding(8), most_outstanding(10), most_outstanding(None)
    assert tight == 8 < roomy <= 10
    assert roomy < free <= 16


def test_with_drop_the_over_sampling_asked_for_is_started_and_the_first_to_finish_make_the_batch() -> None:
    world = World(
        steps=3, groups_per_step=4, staleness=0, slots=64, over_sampling=6, stale="drop", lengths=one_straggler
    ).run()
    assert world.engine.most_busy == 6 * world.group_size
    assert 0 not in world.trained_ids[0]


def test_the_buffer_holds_no_more_than_it_may() -> None:
    free = World(steps=8, staleness=4, slots=64, train_seconds=5.0).run()
    full = World(steps=8, staleness=4, slots=64, train_seconds=5.0, buffer_size=4).run()
    assert max(fact.scheduler.groups.buffered for fact in free.facts) > 8
    assert max(fact.scheduler.groups.buffered for fact in full.facts) == 4
    assert full.prompts.taken == free.prompts.taken


def test_a_buffer_filter_picks_and_drops() -> None:
    def youngest(step: int, waiting: Any, size: int) -> Picked:
        drop = {waiting[0].group_id: "first"} if step == 1 and len(waiting) > size else {}
        rest = [group.group_id for group in waiting if group.group_id not in drop]
        return Picked(train=tuple(rest[-size:]), drop=drop)

    world = World(steps=3, groups_per_step=2, staleness=3, slots=64, pick=youngest, train_seconds=5.0).run()
    assert world.trained_ids == [[4, 5], [2, 3], [1, 6]]  # of 0 to 5, of 1 to 3, and of 1 and 6
    assert world.facts[-1].scheduler.filter_reasons == {"first": 1}
    assert max(world.lags) <= 3


@pytest.mark.parametrize(("staleness", "stale"), [(0, "wait"), (1, "wait"), (4, "mask"), (4, "drop")])
def test_groups_that_a_buffer_filter_leaves_take_no_place_of_others(staleness: int, stale: str) -> None:
    def choosy(step: int, waiting: Any, size: int) -> Picked:
        return Picked(train=tuple(group.group_id for group in waiting if group.prompt.row % 4 != 3)[:size])

    world = World(steps=8, staleness=staleness, stale=stale, slots=64, pick=choosy).run()
    assert [len(ids) for ids in world.trained_ids] == [4] * 8
    assert all(group.prompt.row % 4 != 3 for group in groups(world))


def test_a_buffer_filter_is_asked_once_for_a_batch_that_was_ready_before_it_was_taken() -> None:
    asked: list[int] = []

    def oldest(step: int, waiting: Any, size: int) -> Picked:
        asked.append(step)
        return Picked(train=tuple(group.group_id for group in waiting[:size]))

    world = World(steps=4, staleness=2, slots=64, pick=oldest)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(world.main())
            await asyncio.sleep(0)

            async def collect_first() -> bool:
                if len(world.trainer.batches) < world.steps:
                    await world.scheduler.batch_ready()
                return True

            world.updater.snapshot = collect_first  # type: ignore[method-assign]

    run_virtually(main())
    assert asked == [0, 1, 2, 3]
    assert len(world.trained_ids) == 4


@pytest.mark.parametrize("takes", [Picked(), None])
def test_a_buffer_filter_that_makes_no_batch_ends_the_run(takes: Picked | None) -> None:
    def stubborn(step: int, waiting: Any, size: int) -> Picked:
        return takes or Picked(drop={group.group_id: "no" for group in waiting})

    world = World(steps=2, slots=64, pick=stubborn, max_filtered_groups=30)
    with pytest.raises(FilterBudgetSpent, match="the buffer filter made no batch of 3"):
        world.run()


def test_answers_that_a_buffer_filter_drops_for_their_length_are_a_bias() -> None:
    def no_long(step: int, waiting: Any, size: int) -> Picked:
        long = {group.group_id: "long" for group in waiting if group.num_tokens > 60}
        return Picked(train=tuple(group.group_id for group in waiting if group.group_id not in long)[:size], drop=long)

    world = World(
        steps=60, staleness=3, slots=64, pick=no_long, lengths=lambda request: 200 if request.seed % 8 == 0 else 8
    ).run()
    assert world.facts[-1].scheduler.lengths.alarm is not None


def test_no_more_samples_run_than_the_limit_allows_now() -> None:
    world = World(steps=4, staleness=3, slots=16, lengths=lambda request: 50)

    async def main() -> None:
        async with asyncio.TaskGroup() as both:
            running = both.create_task(world.main())
            await asyncio.sleep(0.1)
            world.all_slots.set_limit(3)
            await asyncio.sleep(1.0)  # what ran has ended
            assert world.engine.busy == 3
            world.all_slots.set_limit(16)
            await running

    run_virtually(main())
    assert world.engine.most_busy == 16


# ---- no staleness is the plain loop


def test_without_staleness_batches_are_those_of_a_plain_synchronous_loop_group_by_group() -> None:
    def uneven(request: Request) -> int:
        return 1 + request.seed % 50

    world = World(steps=6, staleness=0, lengths=uneven, keep=half, slots=64, over_sampling=4).run()
    expected, _ = run_virtually(plain_loop(world, uneven))
    assert [[content(group) for group in batch.groups] for batch in world.trainer.batches] == expected


def _write(written: list[int], chunk: Chunk) -> None:
    written.extend(chunk.token_ids)


async def plain_loop(world: World, lengths: Any) -> list[list[Any]]:
    """Sample prompts until a batch is full, then train and publish.  Shares only the fake engine's draws."""
    engine, prompts, batches, group_id = FakeEngine(lengths), FakePrompts(world.rows), [], 0
    for step in range(world.steps):
        engine.continue_generation(Weights(version=step, step=step))
        batch: list[Any] = []
        while len(batch) < world.groups_per_step:
            prompt = prompts.take()
            answers: list[tuple[int, ...]] = []
            for index in range(world.group_size):
                written: list[int] = []
                request = world.request(f"plain{group_id}.{index}", prompt, sample_seed(1, group_id, index), step)
                await engine.generate(request, partial(_write, written))
                answers.append(tuple(written))
            if prompt.row % 2 == 0:
                batch.append((prompt.row, step, answers))
            group_id += 1
        batches.append(batch)
    return batches


def content(group: ScoredGroup) -> Any:
    steps = {span.weights.step for scored in group.samples for span in scored.sample.spans}
    assert len(steps) == 1
    return (group.prompt.row, steps.pop(), [scored.sample.token_ids for scored in group.samples])

"""Hooks in a whole run: the trainer gets what they return, the accounts balance, and a failure ends the run."""

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.errors import HookFailed
from asyncrl.hooks.batch_hooks import BatchHooks, FlaggedHook
from asyncrl.hooks.native import all_samples, reward_post_process, sample_filter
from asyncrl.types import GroupId, ScoredGroup
from tests.unit.hooks.callers import InlineCaller
from tests.unit.pipeline.harness import World


def hooks(*functions: Any, seconds: float = 0.0) -> BatchHooks:
    flagged = [FlaggedHook(flag="--flag", hook=function) for function in functions]
    return BatchHooks(flagged, InlineCaller(seconds), 60.0, keeps_filtered=True)


def first_of_each(step: int, groups: Sequence[ScoredGroup]) -> list[tuple[GroupId, int]]:
    return [(group.group_id, 0) for group in groups]


def test_masked_tokens_are_accounted_and_the_trainer_gets_the_masks() -> None:
    world = World(steps=3, hooks=hooks(sample_filter(first_of_each))).run()
    for batch in world.trainer.batches:
        for group in batch.groups:
            assert [any(scored.loss_mask) for scored in group.samples] == [False, True]
    tokens = world.facts[-1].scheduler.tokens
    assert tokens.masked == tokens.trained > 0
    assert world.facts[0].batch == world.trainer.batches[0]


def test_outcomes_reach_the_trainer() -> None:
    outcomes = reward_post_process(lambda groups: [[0.5, -0.5] for _ in groups])
    world = World(steps=2, hooks=hooks(outcomes)).run()
    seen = {scored.outcome for batch in world.trainer.batches for group in batch.groups for scored in group.samples}
    assert seen == {0.5, -0.5}


def test_filtered_groups_are_seen_with_their_step() -> None:
    seen: list[tuple[int, int, int]] = []

    def look(step: int, trained: Sequence[ScoredGroup], filtered: Sequence[ScoredGroup]) -> None:
        seen.append((step, len(trained), len(filtered)))

    world = World(
        steps=3, keep=lambda group: "odd" if group.group_id % 2 else None, hooks=hooks(all_samples(look))
    ).run()
    assert [(step, trained) for step, trained, _ in seen] == [(0, 4), (1, 4), (2, 4)]
    assert 0 < sum(filtered for *_, filtered in seen) <= world.facts[-1].scheduler.groups.filtered


def test_hooks_take_their_time_and_generation_continues() -> None:
    plain = World(steps=4).run()
    slow = World(steps=4, hooks=hooks(sample_filter(lambda step, groups: []), seconds=3.0)).run()
    assert [facts.hooks_s for facts in slow.facts] == [pytest.approx(3.0)] * 4
    assert slow.seconds == pytest.approx(plain.seconds + 12.0)
    assert plain.facts[0].hooks_s is None
    assert max(slow.lags, default=0) <= 1


def test_a_hook_that_fails_ends_the_run_before_the_step_is_trained() -> None:
    def breaks(step: int, groups: Sequence[ScoredGroup]) -> list[tuple[GroupId, int]]:
        return [] if step < 2 else [(GroupId(-1), 0)]

    world = World(steps=4, hooks=hooks(sample_filter(breaks)))
    with pytest.raises(HookFailed, match=r"^step 2: --flag breaks: "):
        world.run()
    assert [batch.step for batch in world.trainer.batches] == [0, 1]


def test_observers_get_prompts_of_stale_and_failed_groups_and_may_keep_them() -> None:
    class Observer:
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool]] = []

        def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
            self.seen.append(("finished", group.prompt.row >= 0))

        def returned(self, prompt: Any, group: ScoredGroup | None, outcome: str, /) -> bool:
            self.seen.append((outcome, group is not None))
            return True

    observer = Observer()
    plan: dict[str, Any] = {
        "steps": 5,
        "stale": "drop",
        "staleness": 1,
        "lengths": lambda request: 5 + request.seed % 400,
    }
    world = World(**plan, observers=(observer,)).run()
    stale = [outcome for outcome, _ in observer.seen].count("stale")
    assert stale == world.facts[-1].scheduler.groups.stale > 0
    assert len(rows_started(world)) == len(set(rows_started(world)))
    without = World(**plan).run()
    assert len(rows_started(without)) > len(set(rows_started(without)))  # stale prompts start again


def rows_started(world: World) -> list[tuple[int, ...]]:
    """The prompt of each group, in the order of the groups."""
    first = {request.request_id.split(".")[0]: request.token_ids for request in world.engine.requests}
    return [tokens[:3] for tokens in first.values()]


def test_failed_groups_are_reported() -> None:
    outcomes: list[str] = []

    class Observer:
        def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
            pass

        def returned(self, prompt: Any, group: ScoredGroup | None, outcome: str, /) -> bool:
            outcomes.append(outcome)
            return False

    async def reward(prompt: Any, sample: Any) -> float:
        if prompt.row == 2:
            raise ValueError("no")
        return 1.0

    world = World(steps=2, reward=reward, observers=(Observer(),)).run()
    assert outcomes.count("failed") == world.facts[-1].scheduler.groups.failed == 1


def test_the_answers_of_a_resumed_group_know_it() -> None:
    straggler = {0: 600}
    world = World(
        steps=14,
        lengths=lambda request: straggler.get(int(request.request_id.split(".")[0].split("~")[0][1:]), 8),
        train_seconds=0.5,
        stale="drop",
        partial=True,
    ).run()
    samples = [scored.sample for batch in world.trainer.batches for group in batch.groups for scored in group.samples]
    assert any(sample.resumed_at for sample in samples)
    assert all(0 <= sample.resumed_at <= len(sample.token_ids) for sample in samples)
    groups = {group.group_id: group for batch in world.trainer.batches for group in batch.groups}
    assert all(each.sample.group_id == number for number, group in groups.items() for each in group.samples)


@pytest.mark.parametrize("keeps", [False, True])
def test_an_evaluation_keeps_its_answers_if_a_log_function_wants_them(keeps: bool) -> None:
    world = World(steps=2, held_out=3, eval_interval=1, keeps_answers=keeps).run()
    (report,) = [facts.evaluation for facts in world.facts if facts.evaluation][-1:]
    answers = report.answers.get("held", ())
    assert [prompt.row for prompt, _ in answers] == ([0, 1, 2] if keeps else [])
    assert all(scored.sample.group_id is None for _, scored in answers)

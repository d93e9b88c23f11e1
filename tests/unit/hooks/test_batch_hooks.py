"""The hooks of a step in both shapes: what they change, what is refused, and how errors are named."""

import asyncio
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.batch_hooks import (
    all_samples_from_slime,
    convert_from_slime,
    reward_post_process_from_slime,
    sample_filter_from_slime,
)
from asyncrl.errors import HookFailed
from asyncrl.hooks.batch_hooks import BatchHooks, FlaggedHook
from asyncrl.hooks.changes import samples_of, with_samples
from asyncrl.hooks.native import all_samples, convert, reward_post_process, sample_filter
from asyncrl.hooks.worker import Worker
from asyncrl.protocols import BatchHook
from asyncrl.types import Batch, FinishReason, ScoredGroup
from tests.unit.scored_groups import group

ARGS = SlimeArgs(reward_key=None, n_samples_per_prompt=2)
PLAIN = SlimeArgs()


def batch(step: int = 4) -> Batch:
    return Batch(step=step, groups=(group(3, (0.0, 1.0), (2, 3)), group(5, (1.0, 0.5), (1, 2))))


def masks(changed: Batch) -> list[tuple[int, ...]]:
    return [scored.loss_mask for scored in samples_of(changed)]


def rewards(changed: Batch) -> list[float]:
    return [scored.reward for scored in samples_of(changed)]


def outcomes(changed: Batch) -> list[float | None]:
    return [scored.outcome for scored in samples_of(changed)]


def run(*hooks: BatchHook, before: Batch | None = None, filtered: Sequence[ScoredGroup] = ()) -> Batch:
    flagged = [FlaggedHook(flag=f"--flag-{place}", hook=hook) for place, hook in enumerate(hooks)]
    prepared = BatchHooks(flagged, Worker("test"), 60.0, keeps_filtered=True)
    for each in filtered:
        prepared.finished(each, "dull")
    return asyncio.run(prepared.prepared(before or batch()))


def test_hooks_are_called_again_without_the_filtered_groups_which_wait_for_the_next_batch() -> None:
    seen: list[tuple[int, int]] = []
    hook = all_samples(lambda step, trained, filtered: seen.append((step, len(filtered))))
    hooks = BatchHooks([FlaggedHook(flag="--flag", hook=hook)], Worker("test"), 60.0, keeps_filtered=True)
    hooks.finished(group(9, (0.0, 0.0), (1, 1)), "dull")
    assert asyncio.run(hooks.prepared_again(batch(3))) == batch(3)
    asyncio.run(hooks.prepared(batch(4)))
    assert seen == [(3, 0), (4, 1)]


def refused(hook: BatchHook) -> str:
    with pytest.raises(HookFailed) as error:
        run(hook)
    return str(error.value)


# ---- the sample filter


def test_a_native_sample_filter_names_the_samples_to_leave_out() -> None:
    def cut(step: int, groups: Sequence[ScoredGroup]) -> set[tuple[int, int]]:
        assert step == 4
        return {(groups[0].group_id, 1)}

    changed = run(sample_filter(cut))
    assert masks(changed) == [(1, 1), (0, 0, 0), (1,), (1, 1)]
    assert rewards(changed) == rewards(batch())


def test_slimes_sample_filter_sets_remove_sample() -> None:
    def cut(args: Any, groups: list[list[Sample]]) -> None:
        assert args is ARGS
        assert [[sample.index for sample in each] for each in groups] == [[6, 7], [10, 11]]
        groups[1][0].remove_sample = True
        groups[0][1].loss_mask = [0, 1, 1]

    assert masks(run(sample_filter_from_slime(cut, ARGS))) == [(1, 1), (0, 1, 1), (0,), (1, 1)]


def test_a_removed_sample_counts_in_its_group() -> None:
    def cut(args: Any, groups: list[list[Sample]]) -> None:
        groups[0][0].remove_sample = True

    seen: list[float] = []

    def look(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
        seen.extend(sample.reward for sample in samples)
        return seen, seen

    run(sample_filter_from_slime(cut, ARGS), reward_post_process_from_slime(look, ARGS))
    assert seen == [0.0, 1.0, 1.0, 0.5]


# ---- all samples


def test_all_samples_sees_trained_and_filtered_groups_once() -> None:
    seen: list[Any] = []

    def look(step: int, trained: Sequence[ScoredGroup], filtered: Sequence[ScoredGroup]) -> None:
        seen.append((step, [each.group_id for each in trained], [each.group_id for each in filtered]))

    hooks = BatchHooks([FlaggedHook(flag="--f", hook=all_samples(look))], Worker("test"), 60.0, keeps_filtered=True)
    hooks.finished(group(4, (1.0, 1.0)), "dull")
    hooks.finished(group(7, (1.0, 0.0)), None)

    async def two() -> None:
        await hooks.prepared(batch(4))
        await hooks.prepared(batch(5))

    asyncio.run(two())
    assert seen == [(4, [3, 5], [4]), (5, [3, 5], [])]


def test_slimes_all_samples_gets_every_group_by_number_and_the_source() -> None:
    seen: list[Any] = []

    def look(args: Any, groups: list[list[Sample]], data_source: Any) -> None:
        seen.append(([each[0].group_index for each in groups], data_source(2)))

    hook = all_samples_from_slime(look, ARGS, get_samples=lambda count: [[Sample()]] * count)
    assert run(hook, filtered=[group(4, (1.0, 1.0))]) == batch()
    assert seen == [([3, 4, 5], [[Sample()]] * 2)]


def test_filtered_groups_are_kept_only_for_a_hook_that_sees_them() -> None:
    seen: list[int] = []
    look = all_samples(lambda step, trained, filtered: seen.append(len(filtered)))
    hooks = BatchHooks([FlaggedHook(flag="--f", hook=look)], Worker("test"), 60.0)
    hooks.finished(group(4, (1.0, 1.0)), "dull")
    asyncio.run(hooks.prepared(batch()))
    assert seen == [0]


# ---- rewards


def test_a_native_post_process_gives_outcomes_by_group() -> None:
    changed = run(reward_post_process(lambda groups: [[10.0 * each.group_id, -1.0] for each in groups]))
    assert outcomes(changed) == [30.0, -1.0, 50.0, -1.0]
    assert rewards(changed) == rewards(batch())


def test_slimes_post_process_gives_reported_and_trained_rewards() -> None:
    class Tensor:
        def __init__(self, values: list[float]) -> None:
            self.values = values

        def flatten(self) -> "Tensor":
            return self

        def tolist(self) -> list[float]:
            return self.values

    def halves(args: Any, samples: list[Sample]) -> Any:
        return [sample.reward * 2 for sample in samples], Tensor([sample.reward / 2 for sample in samples])

    changed = run(reward_post_process_from_slime(halves, ARGS))
    assert rewards(changed) == [0.0, 2.0, 2.0, 1.0]
    assert outcomes(changed) == [0.0, 0.5, 0.5, 0.25]


def test_a_reward_that_a_hook_of_slimes_shape_writes_reaches_the_next() -> None:
    def writes(args: Any, groups: list[list[Sample]]) -> None:
        groups[0][0].reward = 9.0
        groups[0][0].note = "seen"  # type: ignore[attr-defined]

    def reads(args: Any, samples: list[Sample]) -> Any:
        assert samples[0].note == "seen"  # type: ignore[attr-defined]
        return [sample.reward for sample in samples], [0.0] * 4

    assert rewards(run(sample_filter_from_slime(writes, ARGS), reward_post_process_from_slime(reads, ARGS)))[0] == 9.0


# ---- conversions


def test_a_native_conversion_changes_masks_rewards_and_logprobs() -> None:
    def change(before: Batch) -> Batch:
        first = before.groups[0]
        scored = first.samples[1]
        sample = replace(scored.sample, logprobs=array("f", [0.0, 0.0, 0.0]))
        scored = replace(scored, sample=sample, loss_mask=(0, 1, 0), reward=7.0)
        return replace(before, groups=(replace(first, samples=(first.samples[0], scored)), *before.groups[1:]))

    changed = run(convert(change))
    assert masks(changed)[1] == (0, 1, 0)
    assert rewards(changed)[1] == 7.0
    assert list(samples_of(changed)[1].sample.logprobs) == [0.0, 0.0, 0.0]


def train_data(samples: list[Sample]) -> dict[str, Any]:
    """The columns of slime's own conversion."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [1.5 * (sample.reward - 0.5) for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [1 if sample.status == Sample.Status.TRUNCATED else 0 for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": list(range(len(samples))),
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_mask_sums": [sample.effective_response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        "source_names": ["unknown"] * len(samples),
    }


def converting(change: Callable[[dict[str, Any]], Any]) -> BatchHook:
    def mine(args: Any, samples: list[Sample]) -> Any:
        data = train_data(samples)
        changed = change(data)
        return data if changed is None else changed

    return convert_from_slime(mine, ARGS)


def test_slimes_own_columns_change_only_the_outcomes() -> None:
    changed = run(converting(lambda data: None))
    assert outcomes(changed) == [-0.75, 0.75, 0.75, 0.0]
    assert masks(changed) == masks(batch())
    assert [scored.sample for scored in samples_of(changed)] == [scored.sample for scored in samples_of(batch())]


def test_columns_may_change_masks_rewards_logprobs_and_the_reason_of_the_end() -> None:
    def change(data: dict[str, Any]) -> None:
        data["loss_masks"][1] = [0, 0, 1]
        data["raw_reward"][0] = 3
        data["rollout_log_probs"][2] = [-0.5]
        data["truncated"][3] = 1

    changed = run(converting(change))
    assert masks(changed)[1] == (0, 0, 1)
    assert rewards(changed)[0] == 3.0
    assert list(samples_of(changed)[2].sample.logprobs) == [-0.5]
    assert samples_of(changed)[3].sample.finish is FinishReason.LENGTH


def test_rows_may_come_in_another_order_with_their_indices() -> None:
    changed = run(converting(lambda data: {name: list(reversed(column)) for name, column in data.items()}))
    assert outcomes(changed) == [-0.75, 0.75, 0.75, 0.0]


def test_unknown_logprobs_pass_through_a_conversion() -> None:
    before = batch()
    first, *others = samples_of(before)
    unknown = array("f", [float("nan")] * len(first.sample.logprobs))
    changed = replace(first, sample=replace(first.sample, logprobs=unknown))
    before = with_samples(before, [changed, *others])
    after = run(converting(lambda data: data), before=before)
    assert all(math.isnan(each) for each in samples_of(after)[0].sample.logprobs)


def test_masked_tokens_stay_masked() -> None:
    before = batch()
    first = before.groups[0]
    old = replace(first, samples=(replace(first.samples[0], loss_mask=(0, 1)), first.samples[1]))
    changed = run(
        converting(lambda data: data.__setitem__("loss_masks", [[1] * n for n in data["response_lengths"]])),
        before=replace(before, groups=(old, before.groups[1])),
    )
    assert masks(changed)[0] == (0, 1)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"multimodal_train_inputs": [1] * 4}, "returned the keys multimodal_train_inputs, which asyncrl cannot train"),
        ({"rewards": [1.0]}, "key rewards has 1 entries for 4 samples; leave a sample out by its loss mask"),
        ({"sample_indices": [6, 7, 10, 12]}, "key sample_indices lacks sample 11 of the batch"),
        ({"rollout_ids": [0, 0, 1, 2]}, "key rollout_ids must have one value per episode"),
        ({"loss_masks": [[1], [1, 1, 1], [1], [1, 1]]},
         "sample 0 of group 3 (row 3): the loss mask has 1 entries for 2 response tokens"),
        ({"loss_masks": [[1, 2], [1, 1, 1], [1], [1, 1]]}, "a loss mask must have 0 and 1 alone, got 2"),
        ({"rewards": [0.0, float("nan"), 0.0, 0.0]},
         "the entry of rewards for sample 1 of group 3 (row 3) must be a number from -1e15 to 1e15, got nan"),
        ({"rollout_log_probs": [[0.0], [0.0] * 3, [0.0], [0.0] * 2]}, "has 2 response tokens, got 1 rollout_log_probs"),
        ({"response_lengths": [1, 3, 1, 2]}, "sample 0 of group 3 (row 3) has 2 response tokens, response_lengths"),
        ({"tokens": [[1, 7, 8], [1, 7, 7, 7], [1, 7], [1, 7, 7]]},
         "the tokens of sample 0 of group 3 (row 3) are not those of its prompt and of the engines"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], line: str) -> None:
    said = refused(converting(lambda data: data.update(change)))
    assert said.startswith("step 4: --flag-0 mine: ")
    assert line in said


def any_of(function: Any) -> Any:
    """Let a function of a wrong shape pass the type checker."""
    return function


def longer(before: Batch) -> Batch:
    scored = before.groups[0].samples[0]
    sample = replace(scored.sample, token_ids=(8, 8))
    return replace(
        before, groups=(replace(before.groups[0], samples=(replace(scored, sample=sample),)), *before.groups[1:])
    )


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        (sample_filter(any_of(lambda step, groups: [(9, 0)])), "left out (9, 0), which is no (group_id, index)"),
        (sample_filter(any_of(lambda step, groups: [1])), "must return pairs (group_id, index), got [1]"),
        (sample_filter(any_of(lambda step, groups: None)), "must return pairs (group_id, index), got None"),
        (reward_post_process(any_of(lambda groups: [[1.0, 2.0]])), "must return one list per group, 2 in all"),
        (reward_post_process(any_of(lambda groups: [[1.0], [1.0, 2.0]])), "group 3 has 2 samples, got [1.0]"),
        (reward_post_process(any_of(lambda groups: [[1.0, "x"]] * 2)), "the outcome of sample 1 of group 3"),
        (convert(any_of(lambda before: None)), "must return a Batch, got None"),
        (convert(any_of(lambda before: replace(before, groups=before.groups[:1]))), "must keep the groups"),
        (convert(longer), "must keep the groups and samples"),
        (all_samples(any_of(lambda step, trained, filtered: 1 / 0)), "ZeroDivisionError: division by zero"),
        (reward_post_process_from_slime(lambda args, samples: [1.0], PLAIN), "must return (raw_rewards, rewards)"),
        (reward_post_process_from_slime(lambda args, samples: ([1.0], [1.0]), PLAIN), "returned 1 raw rewards for 4"),
        (convert_from_slime(lambda args, samples: samples, PLAIN), "must return a dict of train data, got a list"),
        (all_samples_from_slime(lambda args, groups, source: source(3), PLAIN), "'NoneType' object is not callable"),
    ],
)  # fmt: skip
def test_mistakes_are_named(hook: BatchHook, line: str) -> None:
    said = refused(hook)
    assert said.startswith("step 4: --flag-0 ")
    assert line in said


def test_outcomes_are_for_all_samples_or_none() -> None:
    def half(args: Any, samples: list[Sample]) -> dict[str, Any]:
        return {}

    def one(before: Batch) -> Batch:
        first = before.groups[0]
        samples = (replace(first.samples[0], outcome=1.0), first.samples[1])
        return replace(before, groups=(replace(first, samples=samples), before.groups[1]))

    assert run(convert_from_slime(half, PLAIN)) == batch()
    assert refused(convert(one)) == (
        "step 4: 1 of 4 samples have an outcome after the hooks; all samples must have one, or none"
    )


def test_the_order_is_that_of_the_hooks() -> None:
    order: list[str] = []

    def seen(name: str) -> BatchHook:
        return all_samples(lambda step, trained, filtered: order.append(name))

    run(seen("first"), seen("second"), seen("third"))
    assert order == ["first", "second", "third"]

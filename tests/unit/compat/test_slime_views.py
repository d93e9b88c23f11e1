"""The samples that a function returned, as filters and hooks of slime's shape see them."""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.compat import Sample, SlimeArgs, filter_from_slime, pick_from_slime
from asyncrl.compat.batch_hooks import convert_from_slime, reward_post_process_from_slime, sample_filter_from_slime
from asyncrl.compat.plugin_shapes import group_reward_from_slime, reward_from_slime
from asyncrl.compat.slime_views import SLIME_STATE, group_to_slime, metadata_of_state, nested
from asyncrl.errors import FilterFailed, HookFailed
from asyncrl.types import Batch, FinishReason, GroupId, Prompt, ScoredGroup, ScoredSample, Span, Turn, Weights
from asyncrl.types import Sample as OurSample
from tests.unit.scored_groups import group

ARGS = SlimeArgs(reward_key=None)
PROMPT = Prompt(row=9, epoch=0, text="q", token_ids=(1, 2), label="42", metadata={"given": 1})
W = Weights(version=5, step=5)


def state(**more: Any) -> dict[str, Any]:
    plain = {"index": 6, "group_index": 3, "prompt": "q", "label": "42", "status": "completed", "metadata": {}}
    return plain | {"session_id": "k", "is_list": False} | more


def fanned(*sizes: int, is_list: bool = True) -> ScoredGroup:
    """Group 3, whose episodes have ``sizes`` samples each."""
    samples: list[ScoredSample] = []
    for rollout, size in enumerate(sizes):
        for place in range(size):
            left = state(index=6 + rollout, is_list=is_list, tool_calls=place, metadata={"given": 1, "new": [rollout]})
            sample = OurSample(
                index=len(samples),
                rollout_index=rollout,
                group_id=GroupId(3),
                token_ids=(7, 8, 9),
                logprobs=array("f", [-1.0, 0.0, -3.0]),
                spans=(Span(weights=W, start=0, stop=1), Span(weights=W, start=2, stop=3)),
                turns=tuple(Turn(call=place, start=at, stop=at + 1, finish=FinishReason.STOP) for at in (0, 2)),
                prompt_ids=(1, 2, 3 + place),
                text="left by the function",
                finish=FinishReason.STOP,
                seconds=1.0,
                metadata=metadata_of_state(left, PROMPT),
            )
            samples.append(ScoredSample(sample=sample, reward=float(place), loss_mask=(1, 0, 1)))
    return ScoredGroup(group_id=GroupId(3), prompt=PROMPT, dispatched=W, samples=tuple(samples))


def test_a_view_has_what_the_function_left() -> None:
    view = group_to_slime(fanned(1, 2))[2]
    assert (view.index, view.group_index, view.rollout_id) == (7, 3, 7)
    assert (view.tool_calls, view.session_id, view.response) == (1, "k", "left by the function")  # type: ignore[attr-defined]
    assert view.metadata == {"given": 1, "new": [1]}
    assert (view.tokens, view.response_length, view.loss_mask) == ([1, 2, 4, 7, 8, 9], 3, [1, 0, 1])
    assert (view.status, view.reward, view.rollout_log_probs) == (Sample.Status.COMPLETED, 1.0, [-1.0, 0.0, -3.0])
    assert not hasattr(view, "is_list")


@pytest.mark.parametrize("is_group", [False, True])
def test_a_reward_sees_the_loss_mask_of_an_episode(*, is_group: bool) -> None:
    seen: list[Sample] = []

    def rm(args: Any, given: Any, **kwargs: Any) -> Any:
        seen.extend(given if is_group else [given])

    first = fanned(1).samples[0].sample
    if is_group:
        group_reward_from_slime(rm, ARGS)(PROMPT, [first])
    else:
        reward_from_slime(rm, ARGS)(PROMPT, first)
    assert [(view.loss_mask, view.effective_response_length) for view in seen] == [([1, 0, 1], 2)]


def test_a_view_is_rebuilt_after_a_journey_and_is_one_object_from_then_on() -> None:
    there = pickle.loads(pickle.dumps(fanned(2)))
    first = group_to_slime(there)
    first[0].tool_calls = 9  # type: ignore[attr-defined]
    assert group_to_slime(there)[0] is first[0]
    assert group_to_slime(fanned(2))[0].tool_calls == 0  # type: ignore[attr-defined]


def test_only_what_differs_from_a_new_sample_is_kept() -> None:
    kept = metadata_of_state(state(tokens=[1], loss_mask=[1], reward=1.0, remove_sample=False), PROMPT)
    assert kept == {
        SLIME_STATE: {"index": 6, "group_index": 3, "status": "completed", "session_id": "k", "is_list": False}
    }


def test_filters_get_lists_where_functions_returned_lists() -> None:
    seen: list[list[Any]] = []

    def keep(args: Any, samples: list[Any], **kwargs: Any) -> bool:
        seen.append([len(each) if isinstance(each, list) else each for each in samples])
        return True

    adapted = filter_from_slime(keep, ARGS)
    adapted(fanned(1, 3))
    adapted(plain := fanned(1, 1, is_list=False))
    assert seen == [[1, 3], group_to_slime(plain)]


def test_groups_without_episodes_stay_flat() -> None:
    plain = group(2, (0.0, 1.0))
    assert nested(plain, group_to_slime(plain)) == group_to_slime(plain)


def test_buffer_filters_return_groups_of_lists() -> None:
    def pick(args: Any, rollout_id: int, buffer: list[list[Any]], size: int) -> list[list[Any]]:
        assert [len(item) for item in buffer[0]] == [1, 2]
        return [buffer.pop(0)]

    assert pick_from_slime(pick, ARGS)(0, [fanned(1, 2)], 1).train == (3,)
    with pytest.raises(FilterFailed, match="returned: 2 of the 3 samples of group 3"):
        pick_from_slime(lambda args, step, buffer, size: [buffer[0][1:]], ARGS)(0, [fanned(1, 2)], 1)


def batch_of(*groups: ScoredGroup) -> Batch:
    return Batch(step=0, groups=groups)


def test_sample_filters_change_samples_inside_lists() -> None:
    def remove(args: Any, groups: list[list[list[Sample]]]) -> None:
        groups[0][1][0].remove_sample = True

    changed = sample_filter_from_slime(remove, ARGS)(batch_of(fanned(1, 2)), [])
    assert [sum(scored.loss_mask) for scored in changed.groups[0].samples] == [2, 0, 2]


def test_uneven_groups_are_post_processed_flat() -> None:
    def process(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
        assert [(sample.group_index, sample.index) for sample in samples] == [(3, 6), (3, 7), (3, 7)]
        return [each.get_reward_value(args) for each in samples], [0.5, 1.5, 2.5]

    changed = reward_post_process_from_slime(process, ARGS)(batch_of(fanned(1, 2)), [])
    assert [scored.outcome for scored in changed.groups[0].samples] == [0.5, 1.5, 2.5]


def test_train_data_of_several_samples_per_rollout() -> None:
    def columns(samples: Sequence[Sample], **more: Any) -> dict[str, Any]:
        return {
            "tokens": [sample.tokens for sample in samples],
            "sample_indices": [sample.index for sample in samples],
            "rollout_ids": [sample.rollout_id for sample in samples],
            "loss_masks": [[1, 0, 0] for _ in samples],
        } | more

    batch = batch_of(fanned(1, 2))
    changed = convert_from_slime(lambda args, samples: columns(samples), ARGS)(batch, [])
    assert [scored.loss_mask for scored in changed.groups[0].samples] == [(1, 0, 0)] * 3
    for ids in ([6, 7, 8], [6, 6, 7], [6, 6, 6]):
        hook = convert_from_slime(lambda args, samples, ids=ids: columns(samples, rollout_ids=ids), ARGS)
        with pytest.raises(HookFailed, match="key rollout_ids must have one value per episode"):
            hook(batch, [])
    other = convert_from_slime(lambda args, samples: columns(samples, sample_indices=[7, 6, 7]), ARGS)
    with pytest.raises(HookFailed, match="several samples of an episode share an index"):
        other(batch, [])


def test_several_samples_of_native_episodes_share_an_index() -> None:
    bare = fanned(2, 1)
    samples = tuple(replace(each, sample=replace(each.sample, metadata={"tool": 1})) for each in bare.samples)
    views = group_to_slime(replace(bare, samples=samples))
    assert [(view.index, view.rollout_id) for view in views] == [(6, 6), (6, 6), (7, 7)]
    assert views[0].metadata == {"given": 1, "tool": 1}

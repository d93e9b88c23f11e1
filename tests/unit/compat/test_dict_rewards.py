"""Dict rewards in slime's samples."""

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.compat import Sample, SlimeArgs, filter_from_slime
from asyncrl.compat.batch_hooks import convert_from_slime, reward_post_process_from_slime, sample_filter_from_slime
from asyncrl.compat.slime_views import group_to_slime
from asyncrl.hooks.changes import samples_of
from asyncrl.types import Batch, ScoredGroup
from tests.unit.scored_groups import group

ARGS = SlimeArgs(reward_key="score")
PARTS = [{"score": 1.0, "acc": True}, {"score": 2.0, "acc": False}]


def dict_group() -> ScoredGroup:
    plain = group(0, (1.0, 2.0))
    samples = (replace(each, reward_parts=part) for each, part in zip(plain.samples, PARTS, strict=True))
    return replace(plain, samples=tuple(samples))


def test_slime_s_filters_see_the_dict_and_its_entry() -> None:
    plain, dicts, args = group(0, (1.0, 2.0)), dict_group(), ARGS
    assert [sample.reward for sample in group_to_slime(dicts)] == PARTS
    assert [sample.get_reward_value(args) for sample in group_to_slime(dicts)] == [1.0, 2.0]
    assert [sample.get_reward_value(SlimeArgs(reward_key=None)) for sample in group_to_slime(dicts)] == PARTS
    assert [sample.get_reward_value(args) for sample in group_to_slime(plain)] == [1.0, 2.0]
    assert [sample.reward for sample in group_to_slime(plain)] == [1.0, 2.0]

    def keep(args, samples, **kwargs):  # type: ignore[no-untyped-def]
        return sum(sample.get_reward_value(args) for sample in samples) > 2.5 and not samples[1].reward["acc"]

    assert filter_from_slime(keep, args)(dicts) is None


@pytest.mark.parametrize(
    ("written", "value", "parts"),
    [
        ({"score": 5.0, "acc": False}, 5.0, {"score": 5.0, "acc": False}),
        ({"score": 5.0}, 5.0, {"score": 5.0}),
        (3.0, 3.0, {}),
    ],
)
def test_a_reward_that_a_hook_writes_over_a_dict_reaches_the_hooks_after_it(
    written: Any, value: float, parts: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def write(args: Any, groups: list[list[Sample]]) -> None:
        groups[0][0].reward = written

    def post_process(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
        seen.append(samples[0].reward)
        rewards = [sample.get_reward_value(args) for sample in samples]
        return rewards, rewards

    def to_train_data(args: Any, samples: list[Sample]) -> dict[str, Any]:
        seen.append(samples[0].reward)
        return {}

    batch = Batch(step=0, groups=(dict_group(),))
    for hook in (
        sample_filter_from_slime(write, ARGS),
        reward_post_process_from_slime(post_process, ARGS),
        convert_from_slime(to_train_data, ARGS),
    ):
        batch = hook(batch, ())
    changed, other = samples_of(batch)
    assert seen == [written, written]
    assert (changed.reward, changed.outcome, changed.reward_parts) == (value, value, parts)
    assert (other.reward, other.outcome, other.reward_parts) == (2.0, 2.0, PARTS[1])


def test_an_entry_that_a_hook_changes_in_place_is_read_back() -> None:
    def write(args: Any, groups: list[list[Sample]]) -> None:
        groups[0][1].reward["score"] = 7.0

    changed = samples_of(sample_filter_from_slime(write, ARGS)(Batch(step=0, groups=(dict_group(),)), ()))
    assert [scored.reward for scored in changed] == [1.0, 7.0]
    assert [scored.reward_parts for scored in changed] == [PARTS[0], {"score": 7.0, "acc": False}]
    assert PARTS[1]["score"] == 2.0

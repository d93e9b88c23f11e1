"""Dict rewards in slime's samples."""

from dataclasses import replace

from asyncrl.compat import SlimeArgs, filter_from_slime
from asyncrl.compat.slime_types import group_to_slime
from tests.unit.scored_groups import group


def test_slime_s_filters_see_the_dict_and_its_entry() -> None:
    plain = group(0, (1.0, 2.0))
    parts = [{"score": 1.0, "acc": True}, {"score": 2.0, "acc": False}]
    dicts = replace(
        plain,
        samples=tuple(replace(each, reward_parts=part) for each, part in zip(plain.samples, parts, strict=True)),
    )
    args = SlimeArgs(reward_key="score")
    assert [sample.reward for sample in group_to_slime(dicts)] == parts
    assert [sample.get_reward_value(args) for sample in group_to_slime(dicts)] == [1.0, 2.0]
    assert [sample.get_reward_value(SlimeArgs(reward_key=None)) for sample in group_to_slime(dicts)] == parts
    assert [sample.get_reward_value(args) for sample in group_to_slime(plain)] == [1.0, 2.0]
    assert [sample.reward for sample in group_to_slime(plain)] == [1.0, 2.0]

    def keep(args, samples, **kwargs):  # type: ignore[no-untyped-def]
        return sum(sample.get_reward_value(args) for sample in samples) > 2.5 and not samples[1].reward["acc"]

    assert filter_from_slime(keep, args)(dicts) is None

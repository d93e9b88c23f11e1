"""Buckets of a mixture: in the model's order, or with the experts of one part each."""

import re
from itertools import chain

import pytest

from asyncrl.engines.megatron.weights.hf_weights import plan_buckets
from asyncrl.engines.weight_sync.buckets import WeightBucket
from tests.engines.megatron.tiny import one_rank, trainer_settings, write_checkpoint

MAX_BYTES = 20_000
Buckets = tuple[WeightBucket, ...]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Buckets]:
    """The plans for 1, 2, 3 and 4 parts of four experts."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("model") / "hf", moe=True)
    with one_rank(trainer_settings(checkpoint)) as rank:
        model, shape = rank._model, rank._shape  # noqa: SLF001
        return {parts: plan_buckets(model, shape, MAX_BYTES, None, parts)[0] for parts in (1, 2, 3, 4)}


def names(buckets: Buckets) -> list[str]:
    return list(chain.from_iterable(bucket.names for bucket in buckets))


def test_one_part_keeps_the_models_order(plans: dict[int, Buckets]) -> None:
    assert {bucket.expert_part for bucket in plans[1]} == {None}
    layers = [int(found[1]) for name in names(plans[1]) if (found := re.search(r"layers\.(\d+)", name))]
    assert layers == sorted(layers)
    assert all(bucket.num_bytes <= MAX_BYTES for bucket in plans[1])


def test_experts_of_different_parts_never_share_a_bucket(plans: dict[int, Buckets]) -> None:
    for num_parts in (2, 4):
        for bucket in plans[num_parts]:
            experts = {int(found[1]) for name in bucket.names if (found := re.search(r"experts\.(\d+)", name))}
            parts = {expert * num_parts // 4 for expert in experts}
            assert parts == ({bucket.expert_part} - {None})
            assert bucket.num_bytes <= MAX_BYTES
        assert {bucket.expert_part for bucket in plans[num_parts]} == {None, *range(num_parts)}


def test_every_plan_has_every_tensor_once(plans: dict[int, Buckets]) -> None:
    for buckets in plans.values():
        assert sorted(names(buckets)) == sorted(names(plans[1]))


def test_a_part_is_filled_across_layers(plans: dict[int, Buckets]) -> None:
    """Otherwise a model of many layers would have several half-empty buckets per layer."""
    num_bytes = {part: sum(each.num_bytes for each in plans[2] if each.expert_part == part) for part in (None, 0, 1)}
    fewest = sum(-(-size // MAX_BYTES) for size in num_bytes.values())
    assert len(plans[2]) <= fewest + len(num_bytes)


def test_experts_that_parts_do_not_divide_are_planned_for_all_ranks(plans: dict[int, Buckets]) -> None:
    assert plans[3] == plans[1]

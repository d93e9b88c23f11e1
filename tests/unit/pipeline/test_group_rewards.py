"""Rewards of whole groups, and rewards with several numbers, on a virtual clock."""

from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.errors import FailureBudgetSpent
from asyncrl.metrics.facts import TokenCounts
from asyncrl.metrics.reporter import row
from asyncrl.types import Prompt, Reward, Sample
from tests.unit.pipeline.harness import World, uneven


class Ranks:
    """A group reward: the rank of each answer by its length, and a record of the calls."""

    def __init__(self, num_missing: int = 0) -> None:
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.num_missing = num_missing

    async def __call__(self, prompt: Prompt, sample: Sample, /) -> Reward:
        raise AssertionError("a sample was scored alone")

    async def of_group(self, prompt: Prompt, samples: Sequence[Sample], /) -> list[Reward]:
        self.calls.append((prompt.row, tuple(sample.index for sample in samples)))
        lengths = sorted(len(sample.token_ids) for sample in samples)
        ranks = [lengths.index(len(sample.token_ids)) for sample in samples]
        return [Reward(value=float(rank), parts={"rank": rank, "text": "x"}) for rank in ranks][self.num_missing :]


@pytest.mark.parametrize("changes", [{}, {"partial": True, "stale": "drop", "lengths": uneven, "staleness": 2}])
def test_a_group_is_scored_once_with_all_its_samples(changes: dict[str, Any]) -> None:
    ranks = Ranks()
    run = World(reward=ranks, group_size=3, **changes).run()
    assert all(indices == (0, 1, 2) for _, indices in ranks.calls)
    rows = [row for row, _ in ranks.calls]
    assert len(rows) == len(set(rows))
    for batch in run.trainer.batches:
        for group in batch.groups:
            lengths = sorted(len(scored.sample.token_ids) for scored in group.samples)
            for scored in group.samples:
                rank = lengths.index(len(scored.sample.token_ids))
                assert (scored.reward, scored.reward_parts["rank"]) == (rank, rank)


def test_a_wrong_number_of_rewards_is_named() -> None:
    with pytest.raises(FailureBudgetSpent, match=r"row \d: got 1 rewards for a group of 2 samples"):
        World(reward=Ranks(num_missing=1)).run()


@pytest.mark.parametrize("value", [1e200, -1.7e308, 10**400])
def test_a_reward_without_a_square_costs_its_group(value: float) -> None:
    """Neither the metrics of a step nor the trainer's standard deviation could use it."""

    async def reward(prompt: Prompt, sample: Sample) -> float:
        return value if prompt.row == 1 else 1e15 * sample.index

    run = World(reward=reward, group_size=2).run()
    assert run.facts[-1].scheduler.groups.failed > 0
    numbers = [row(each, TokenCounts()) for each in run.facts]
    assert {each["reward/std"] for each in numbers} == {5e14}


def test_the_numbers_of_a_dict_reward_are_metrics() -> None:
    async def reward(prompt: Prompt, sample: Sample) -> Reward:
        parts = {"score": 2.0, "even": sample.index % 2 == 0, "text": "x", "bad": float("nan"), "large": 10**400}
        return Reward(value=2.0, parts=parts | ({"rare": 4} if sample.index else {}))

    run = World(reward=reward).run()
    numbers = row(run.facts[0], TokenCounts())
    assert {name: value for name, value in numbers.items() if name.startswith("reward/")} == {
        "reward/mean": 2.0,
        "reward/std": 0.0,
        "reward/part/score": 2.0,
        "reward/part/even": 0.5,
        "reward/part/rare": 4.0,
    }

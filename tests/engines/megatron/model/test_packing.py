"""The positions of a sample's tokens in microbatches."""

import random
from collections import Counter
from dataclasses import fields
from typing import ClassVar

import numpy as np
import pytest

from asyncrl.engines.megatron.model.packing import (
    Example,
    Packing,
    contiguous_parts,
    even_parts,
    examples_of,
    microbatches,
    pack,
)
from tests.engines.megatron.tiny import random_batch


def test_bins_hold_every_sample_once_within_their_size() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 60))]
        bins = pack(lengths, 32)
        assert sorted(place for places in bins for place in places) == list(range(len(lengths)))
        for places in bins:
            assert sum(lengths[place] for place in places) <= 32 or len(places) == 1
        fullness = sorted(sum(lengths[place] for place in places) for places in bins)
        assert len(bins) < 2 or fullness[0] + fullness[1] > 32  # no two bins would fit into one


def test_packing_is_deterministic() -> None:
    lengths = [5, 9, 5, 3, 9, 1]
    assert pack(lengths, 10) == [[0, 2], [1, 5], [3], [4]] == pack(lengths, 10)


def test_parts_are_contiguous_and_even() -> None:
    assert [list(range(10))[part] for part in contiguous_parts(10, 4)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]


def test_even_parts_hold_every_sample_once_and_differ_by_little() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        lengths = [min(4096, int(rng.lognormvariate(6, 1))) for _ in range(rng.randint(0, 300))]
        parts = even_parts(lengths, 8)
        assert sorted(place for places in parts for place in places) == list(range(len(lengths)))
        sums = [sum(lengths[place] for place in places) for places in parts]
        assert max(sums) - min(sums) <= max(lengths, default=0)
        if len(lengths) > 100:
            assert max(sums) <= 1.02 * sum(sums) / 8


def test_microbatches_of_a_fixed_number_of_samples_ignore_lengths() -> None:
    examples = [example for group in examples_of(random_batch(groups=3, group_size=3)) for example in group]
    rows = microbatches(examples, 0, 1, Packing(max_tokens=1, num_samples=4))
    assert [row.indices for row in rows] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]


def test_a_response_token_is_predicted_at_the_position_before_it() -> None:
    first = Example(
        index=0,
        token_ids=(10, 11, 12, 13),
        num_response=2,
        loss_mask=(1, 0),
        behaviour_logprobs=(-1.0, -2.0),
        advantages=np.array([0.5, 0.0], np.float32),
    )
    second = Example(
        index=1,
        token_ids=(20, 21),
        num_response=1,
        loss_mask=(1,),
        behaviour_logprobs=(-3.0,),
        advantages=np.array([-1.0], np.float32),
    )
    (row,) = microbatches([first, second], 0, 1, Packing(max_tokens=100))
    assert row.token_ids_T.tolist() == [10, 11, 12, 20]
    assert row.positions_T.tolist() == [0, 1, 2, 0]
    assert row.edges.tolist() == [0, 3, 4]
    assert row.longest == 3
    assert [(row.token_ids_T[s], t) for s, t in zip(row.sources_R, row.targets_R, strict=True)] == [
        (11, 12),
        (12, 13),
        (20, 21),
    ]
    assert row.mask_R.tolist() == [True, False, True]
    assert row.advantages_R is not None
    assert row.advantages_R.tolist() == [0.5, 0.0, -1.0]
    assert row.behaviour_logprobs_R.tolist() == [-1.0, -2.0, -3.0]
    assert row.proximal_logprobs_R is row.ref_logprobs_R is None


@pytest.mark.parametrize(
    "packing",
    [
        Packing(max_tokens=20),
        Packing(max_tokens=20, is_balanced=True),
        Packing(max_tokens=20, num_samples=2),
        Packing(max_tokens=20, num_samples=2, is_balanced=True),
    ],
)
def test_ranks_have_equally_many_microbatches_and_each_sample_is_on_one_rank(packing: Packing) -> None:
    batch = random_batch(groups=3, group_size=3)
    examples = [example for group in examples_of(batch) for example in group]
    ranks = [microbatches(examples, rank, 4, packing) for rank in range(4)]
    assert len({len(rows) for rows in ranks}) == 1
    assert sorted(index for rows in ranks for row in rows for index in row.indices) == list(range(9))


class Counting(Example):
    """An example that counts how often its length is read."""

    reads: ClassVar = Counter[int]()

    @property
    def num_inputs(self) -> int:
        self.reads[self.index] += 1
        return super().num_inputs


def counting(example: Example) -> Counting:
    return Counting(**{each.name: getattr(example, each.name) for each in fields(example)})


def test_samples_are_distributed_once_whatever_the_number_of_ranks() -> None:
    examples = [counting(each) for group in examples_of(random_batch(groups=8)) for each in group]
    reads = []
    for ranks in (2, 16):
        Counting.reads.clear()
        microbatches(examples, 0, ranks, Packing(max_tokens=20, is_balanced=True))
        reads.append(Counting.reads[examples[-1].index])
    assert reads[0] == reads[1]


def test_a_rank_without_samples_still_has_a_microbatch() -> None:
    (row,) = microbatches([], 0, 1, Packing(max_tokens=100))
    assert len(row.token_ids_T) == 1
    assert len(row.targets_R) == 0


def test_an_example_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a response of 2 in 2 tokens"):
        Example(index=0, token_ids=(1, 2), num_response=2, loss_mask=(1, 1), behaviour_logprobs=(0.0, 0.0))

"""The columns of routes and token sets, cut and joined."""

from array import array
from itertools import pairwise

import numpy as np
import pytest

from asyncrl.token_columns import Routes, TokenSets, completed, joined_sets
from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Weights


def routes(num_positions: int, *missing: tuple[int, int]) -> Routes:
    rows = np.arange(num_positions * 6, dtype=np.uint8).reshape(num_positions, 2, 3)
    return Routes(experts_NLK=rows, missing=missing)


def sets(*ids: tuple[int, ...], logprobs: bool = True) -> TokenSets:
    flat = [each for one in ids for each in one]
    return TokenSets(
        counts_T=np.array([len(one) for one in ids], np.int32),
        ids_I=np.array(flat, np.int32),
        logprobs_I=-np.array(flat, np.float32) if logprobs else None,
    )


@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 0, 7, 7)])
def test_cut_routes_join_to_the_whole(cuts: tuple[int, ...]) -> None:
    whole = routes(7, (1, 4), (5, 6))

    parts = [whole.part(start, stop) for start, stop in pairwise(cuts)]

    assert Routes.joined(parts) == whole
    assert sum(part.num_missing for part in parts) == whole.num_missing == 4


def test_unknown_routes_are_all_missing() -> None:
    joined = Routes.joined([routes(2), Routes.unknown(3, routes(2)), Routes.unknown(0, routes(2)), routes(1)])

    assert (len(joined), joined.missing) == (6, ((2, 5),))


@pytest.mark.parametrize("missing", [((2, 1),), ((3, 5), (1, 2)), ((0, 8),)])
def test_missing_rows_lie_within_the_routes_in_order(missing: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="not in order"):
        routes(7, *missing)


def test_routes_of_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        Routes(experts_NLK=np.zeros((1, 2, 3), np.int64))


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("cut", range(5))
def test_cut_sets_join_to_the_whole(cut: int, logprobs: bool) -> None:
    whole = sets((1, 2, 3), (), (4,), (5, 6), logprobs=logprobs)

    joined = TokenSets.joined([whole.part(0, cut), whole.part(cut, 4)])

    assert joined == whole
    assert joined != sets((1, 2, 3), (), (4,), (5, 7), logprobs=logprobs)
    assert joined != sets((1, 2, 3), (), (4,), (5, 6), logprobs=not logprobs)


def test_sets_without_and_with_logprobs_are_not_joined() -> None:
    with pytest.raises(ValueError, match="only some"):
        TokenSets.joined([sets((1,)), sets((1,), logprobs=False)])


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ids in all have 2"):
        TokenSets(counts_T=np.array([1, 2], np.int32), ids_I=np.array([5, 6], np.int32))


def test_ids_within_other_sets_keep_their_order_and_log_probs() -> None:
    found = sets((3, 1, 2), (), (4, 5)).within(sets((1, 3), (7,), (5, 9)))

    assert found == sets((3, 1), (), (5,))


def test_log_probs_are_shifted_token_by_token() -> None:
    found = sets((3, 1), (), (4,)).shifted(np.array([1.0, 9.0, -1.0], np.float32))

    assert found.logprobs_I is not None
    assert found.logprobs_I.tolist() == [-2.0, 0.0, -5.0]


def test_positions_behind_the_known_ones_are_missing() -> None:
    assert completed([], 5) is None
    assert completed([routes(3), routes(2)], 5) == Routes.joined([routes(3), routes(2)])
    assert completed([routes(5)], 3) == routes(5).part(0, 3)
    longer = completed([routes(3, (1, 2))], 5)
    assert longer is not None
    assert (len(longer), longer.missing) == (5, ((1, 2), (3, 5)))


def test_sets_of_tokens_without_any_are_empty() -> None:
    assert joined_sets([(2, None), (0, None)]) is None
    assert joined_sets([(1, None), (2, sets((3,), (4, 5))), (1, None)]) == sets((), (3,), (4, 5), ())


def test_a_sample_has_a_row_for_each_token_but_the_last_and_rewards_do_not_see_it() -> None:
    def sample(num_rows: int, prompt_ids: tuple[int, ...] | None) -> Sample:
        return Sample(
            index=0,
            token_ids=(),
            logprobs=array("f"),
            spans=(),
            text="",
            finish=FinishReason.STOP,
            seconds=0.0,
            prompt_ids=prompt_ids,
            routes=routes(num_rows),
        )

    assert sample(3, (1, 2, 3, 4)).without_columns().routes is None
    with pytest.raises(ValueError, match="4 tokens of prompt and response have 4 rows of routes"):
        sample(4, (1, 2, 3, 4))
    with pytest.raises(ValueError, match="2 tokens of prompt and response have 3 rows of routes"):
        ScoredGroup(
            group_id=GroupId(0),
            prompt=Prompt(row=0, epoch=0, text="", token_ids=(1, 2), label=None),
            dispatched=Weights(version=0, step=0),
            samples=(ScoredSample(sample=sample(3, None), reward=0.0, loss_mask=()),),
        )

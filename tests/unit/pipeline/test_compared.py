"""Which log-probs of the engines are compared with the trainer's."""

from array import array

import pytest

from asyncrl.pipeline import agreement
from asyncrl.pipeline.agreement import mean_difference, written_by
from asyncrl.types import Weights
from tests.unit.scored_groups import group

NOW = Weights(version=3, step=3)


def test_only_answers_of_the_present_weights_are_compared() -> None:
    fresh, old = group(1, [1.0, 1.0], [2, 0], step=3), group(2, [1.0], [2], step=2)
    answers = dict(enumerate((*old.samples, *fresh.samples)))
    assert written_by(NOW, answers) == {1: array("f", [-1.0, -1.0])}


def test_the_loop_compares_no_more_tokens_than_a_mean_needs() -> None:
    half = agreement.COMPARED_TOKENS // 2
    answers = dict(enumerate(group(1, [1.0] * 5, [half] * 5, step=3).samples))
    assert list(written_by(NOW, answers)) == [0, 1]


def test_the_difference_is_a_mean_over_all_tokens() -> None:
    from_trainer = ((), (-1.0, -2.0), (-0.5,), (-3.0,))
    assert mean_difference({1: array("f", [-1.5, -1.5]), 2: (-0.25,)}, from_trainer) == pytest.approx(1.25 / 3)
    assert mean_difference({}, from_trainer) is None


def test_answers_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 and 1 log-probs of answer 0"):
        mean_difference({0: array("f", [-1.0, -1.0])}, ((-1.0,),))

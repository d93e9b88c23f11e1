import math
import random
from itertools import combinations
from statistics import fmean, stdev

import pytest

from asyncrl.held_out.estimates import Z, clustered_mean, mean_pass_at_k, pass_at_k, powers_of_two


@pytest.mark.parametrize("num_answers", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(num_answers: int) -> None:
    for num_right in range(num_answers + 1):
        answers = [place < num_right for place in range(num_answers)]
        for k in range(1, num_answers + 1):
            assert pass_at_k(num_answers, num_right, k) == pytest.approx(fmean(map(any, combinations(answers, k))))


def test_pass_at_k_of_many_answers_is_exact() -> None:
    assert pass_at_k(4000, 1, 2000) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_needs_k_answers(k: int) -> None:
    with pytest.raises(ValueError, match=f"k must be 1 to 3, got {k}"):
        pass_at_k(3, 1, k)


def test_ks_are_powers_of_two() -> None:
    assert [powers_of_two(limit) for limit in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_prompts_with_too_few_answers_are_left_out_of_pass_at_k() -> None:
    rights = [[True, False], [False, False], [True]]
    assert mean_pass_at_k(rights, 2).value == 0.5  # type: ignore[union-attr]
    assert mean_pass_at_k(rights, 1).value == 0.5  # type: ignore[union-attr]
    assert mean_pass_at_k(rights, 4) is None


def test_with_one_answer_per_prompt_the_margin_is_the_usual_one() -> None:
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    found = clustered_mean([[value] for value in values])
    assert found is not None
    assert found.value == 0.6
    assert found.margin == pytest.approx(Z * stdev(values) / math.sqrt(5))


def test_equal_answers_to_a_prompt_count_as_one() -> None:
    once = clustered_mean([[0.0], [1.0], [1.0]])
    often = clustered_mean([[0.0] * 8, [1.0] * 8, [1.0] * 8])
    assert once is not None
    assert often is not None
    assert often.margin == pytest.approx(once.margin)


def test_a_margin_needs_two_prompts_and_a_mean_one_answer() -> None:
    found = clustered_mean([[1.0, 0.0], []])
    assert found is not None
    assert (found.value, found.margin) == (0.5, None)
    assert clustered_mean([[], []]) is None


def test_the_interval_covers_the_truth_nineteen_times_of_twenty() -> None:
    chance, covered = random.Random(0), 0
    for _ in range(1000):
        groups = []
        for _ in range(60):
            p = chance.choice([0.1, 0.9])  # a prompt is easy or hard, so its answers are alike
            groups.append([float(chance.random() < p) for _ in range(4)])
        found = clustered_mean(groups)
        assert found is not None
        covered += abs(found.value - 0.5) <= (found.margin or 0)
    assert 925 <= covered <= 975

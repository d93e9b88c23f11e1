from array import array

import pytest

from asyncrl.held_out.summary import summary
from asyncrl.types import EvalAnswers, EvalSetReport, FinishReason, Prompt, Sample, ScoredSample, Span, Weights

WEIGHTS = Weights(version=0, step=0)


def answers(*rewards_and_texts: tuple[float, str], row: int = 0, cut: bool = False) -> EvalAnswers:
    samples = tuple(
        ScoredSample(
            sample=Sample(
                index=index,
                token_ids=(1,) * len(text),
                logprobs=array("f", [0.0]) * len(text),
                spans=(Span(weights=WEIGHTS, start=0, stop=len(text)),),
                text=text,
                finish=FinishReason.LENGTH if cut else FinishReason.STOP,
                seconds=1.0,
            ),
            reward=reward,
            loss_mask=(1,) * len(text),
        )
        for index, (reward, text) in enumerate(rewards_and_texts)
    )
    return EvalAnswers(
        prompt=Prompt(row=row, epoch=0, text="", token_ids=(1,), label=None),
        samples=samples,
        finals=tuple(text for _, text in rewards_and_texts),
    )


def summed(*groups: EvalAnswers, n: int, threshold: float | None = None) -> EvalSetReport:
    found = summary(groups, samples_per_prompt=n, pass_threshold=threshold, num_failed=1)
    assert found is not None
    return found


def test_all_numbers_of_a_set() -> None:
    one = answers((1.0, "7"), (0.0, "88"), (0.0, "88"), (0.0, "9"))
    two = answers((1.0, "7"), (1.0, "7"), (0.0, "8888"), (1.0, "7"), row=1, cut=True)
    found = summed(one, two, n=4)
    assert found.mean.value == 0.5
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == pytest.approx({1: 0.5, 2: 0.75, 4: 1.0})
    assert {k: estimate.value for k, estimate in found.majority_at.items()} == {4: 0.5}
    assert (found.truncated, found.tokens_mean, found.tokens_max, found.num_failed) == (0.5, 13 / 8, 4, 1)
    assert found.pass_at[4].margin == 0.0


@pytest.mark.parametrize(
    ("rewards", "threshold", "expected"),
    [
        ((-1.0, 1.0), None, 0.5),
        ((0.0, 0.1), None, None),
        ((0.0, 0.1), 0.1, 0.5),
        ((0.0, 1.0), 2.0, 0.0),
    ],
)
def test_pass_at_k_needs_answers_that_are_right_or_wrong(
    rewards: tuple[float, float], threshold: float | None, expected: float | None
) -> None:
    found = summed(answers(*((reward, "x") for reward in rewards)), n=2, threshold=threshold)
    value = found.pass_at[1].value if found.pass_at else None
    assert value == expected
    assert bool(found.majority_at) == (expected is not None)


def test_one_answer_per_prompt_has_no_majority() -> None:
    assert summed(answers((1.0, "7")), n=1).majority_at == {}


def test_a_prompt_with_failed_answers_counts_where_it_has_enough() -> None:
    found = summed(answers((1.0, "7"), (1.0, "7")), answers((0.0, "8"), row=1), n=2)
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == {1: 0.5, 2: 1.0}
    assert found.majority_at[2].value == 1.0
    assert found.mean.value == pytest.approx(2 / 3)


def test_a_set_without_answers_has_no_numbers() -> None:
    assert summary([answers()], samples_per_prompt=1, pass_threshold=None, num_failed=3) is None

"""Learning-rate schedules: their shape at the edges.

``tests/engines/megatron/train/test_learning_rates.py`` compares them with Megatron's scheduler.
"""

from typing import Literal

import pytest

from asyncrl.algorithms.learning_rate import LearningRateSchedule


def test_a_constant_rate_warms_up_and_stays() -> None:
    schedule = LearningRateSchedule(lr=1.0, warmup_iters=4)
    assert [schedule.rate(step) for step in (0, 1, 3, 4, 1000)] == [0.25, 0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("style", "rates"),
    [("linear", [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]), ("cosine", [0.5, 1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2])],
)
def test_a_decay_starts_after_the_warm_up_and_ends_at_the_minimum(style: str, rates: list[float]) -> None:
    schedule = LearningRateSchedule(lr=1.0, style=style, min_lr=0.2, warmup_iters=2, decay_iters=6)  # type: ignore[arg-type]
    assert [schedule.rate(step) for step in range(8)] == pytest.approx(rates, abs=1e-6)


def test_no_step_of_a_run_has_the_rate_zero() -> None:
    schedule = LearningRateSchedule(lr=1.0, style="cosine", warmup_iters=1, decay_iters=5)
    assert all(schedule.rate(step) > 0 for step in range(5))
    assert schedule.rate(5) == 0


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_a_later_first_step_shifts_the_warm_up_and_keeps_the_end(
    style: Literal["constant", "linear", "cosine"],
) -> None:
    whole = LearningRateSchedule(lr=1.0, style=style, min_lr=0.2, warmup_iters=2, decay_iters=6)
    later = LearningRateSchedule(lr=1.0, style=style, min_lr=0.2, warmup_iters=2, decay_iters=9, first_step=3)
    assert [later.rate(step + 3) for step in range(8)] == pytest.approx([whole.rate(step) for step in range(8)])
    assert {later.rate(step) for step in range(3)} == {whole.rate(0)}


def test_a_decay_that_ends_within_the_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="decay_iters 3 must be above warmup_iters 3"):
        LearningRateSchedule(lr=1.0, style="linear", warmup_iters=3, decay_iters=3)
    with pytest.raises(ValueError, match=r"decay_iters 3 must be above first_step 2 \+ warmup_iters 1"):
        LearningRateSchedule(lr=1.0, style="linear", warmup_iters=1, decay_iters=3, first_step=2)

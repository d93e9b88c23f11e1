"""The differences between log-probs of engines and trainer, against plain formulas."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.metrics.mismatch import Mismatch, answers
from asyncrl.types import FinishReason, Sample, ScoredSample, Span, TrainReport, Weights
from tests.declared_metrics import is_declared
from tests.unit.metrics.made import batch


def scored(logprobs: Sequence[float], mask: Sequence[int], *spans: tuple[int, int, int]) -> ScoredSample:
    sample = Sample(
        index=0,
        token_ids=tuple(range(len(logprobs))),
        logprobs=array("f", logprobs),
        spans=tuple(
            Span(weights=Weights(version=step, step=step), start=start, stop=stop) for step, start, stop in spans
        ),
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    return ScoredSample(sample=sample, reward=0.0, loss_mask=tuple(mask))


def test_numbers_are_those_of_the_plain_formulas() -> None:
    random = np.random.default_rng(0)
    engine = random.normal(-1, 0.5, 3_000).astype(np.float32)
    trainer = (engine + random.normal(0, 0.05, 3_000)).astype(np.float32)
    mismatch = Mismatch(7)
    mismatch.add(scored(engine.tolist(), [1] * 3_000, (5, 0, 1_000), (7, 1_000, 3_000)), trainer.tolist())

    numbers = mismatch.numbers()
    log_ratio = trainer.astype(np.float64) - engine
    for part, these in {
        "mismatch": log_ratio,
        "mismatch/age/2": log_ratio[:1_000],
        "mismatch/age/0": log_ratio[1_000:],
        "mismatch/position/0": log_ratio[:1_024],
        "mismatch/position/1024": log_ratio[1_024:],
    }.items():
        assert numbers.pop(f"{part}/logprob_mean") == pytest.approx(np.abs(these).mean(), rel=1e-9)
        assert numbers.pop(f"{part}/logprob_max") == pytest.approx(np.abs(these).max(), rel=1e-9)
        assert numbers.pop(f"{part}/k3") == pytest.approx((np.exp(these) - 1 - these).mean(), rel=1e-6)
        assert numbers.pop(f"{part}/logprob_p99") == pytest.approx(np.quantile(np.abs(these), 0.99), rel=0.1)
    assert numbers == {}


def test_tokens_outside_the_loss_and_unknown_ones_do_not_count() -> None:
    mismatch = Mismatch(0)
    mismatch.add(scored([-1.0, float("nan"), -1.0, -1.0], [1, 1, 0, 1], (0, 0, 4)), [-1.5, -1.0, -9.0, -1.0])

    numbers = mismatch.numbers()

    assert numbers["mismatch/logprob_mean"] == pytest.approx(0.25)
    assert numbers["mismatch/logprob_max"] == 0.5
    assert [name for name in numbers if not is_declared(name)] == []


def test_equal_logprobs_have_no_mismatch() -> None:
    mismatch = Mismatch(0)
    mismatch.add(scored([-1.0, -2.0], [1, 1], (0, 0, 2)), [-1.0, -2.0])

    assert set(mismatch.numbers().values()) == {0.0}


def test_without_a_trained_token_there_are_no_numbers() -> None:
    mismatch = Mismatch(0)
    mismatch.add(scored([-1.0], [0], (0, 0, 1)), [-1.5])

    assert mismatch.numbers() == {}


def test_a_report_without_logprobs_has_no_answers() -> None:
    report = TrainReport(
        loss=0.0, grad_norm=0.0, clip_fraction=0.0, entropy=0.0, learning_rate=0.0, seconds=0.0, logprobs=()
    )

    assert list(answers(batch(), report)) == []

"""Off-policy corrections against loops over samples."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.corrections import Level, Mode, importance_weights, off_policy_sequences

LENGTHS = [3, 5, 1, 2]
MASK = [1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
"""Loss mask of four samples; the last one has no token in the loss."""


def drawn(scale: float = 0.5) -> tuple[list[float], list[float]]:
    new, old = np.random.default_rng(3).normal(scale=scale, size=(2, len(MASK)))
    return new.tolist(), old.tolist()


def expected_ratios(level: str, proximal: list[float], behaviour: list[float]) -> list[float]:
    ratios, start = [], 0
    for length in LENGTHS:
        places = range(start, start + length)
        logs = [proximal[t] - behaviour[t] if MASK[t] else 0.0 for t in places]
        counted = sum(MASK[t] for t in places)
        if level == "token":
            ratios += [math.exp(log) for log in logs]
        elif level == "sequence":
            ratios += [math.exp(sum(logs))] * length
        else:
            ratios += [math.exp(sum(logs) / max(1, counted))] * length
        start += length
    return ratios


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask", "whole"])
def test_weights_are_the_ratios_truncated_masked_or_whole(level: Level, mode: Mode) -> None:
    proximal, behaviour = drawn(scale=0.2)
    ratios = expected_ratios(level, proximal, behaviour)
    outside = [bool(counts) and not 0.8 <= ratio <= 1.3 for ratio, counts in zip(ratios, MASK, strict=True)]
    weights, is_outside = importance_weights(
        torch.tensor(proximal).double(),
        torch.tensor(behaviour).double(),
        torch.tensor(MASK).bool(),
        LENGTHS,
        level=level,
        mode=mode,
        low=0.8,
        high=1.3,
    )
    assert is_outside.tolist() == outside
    assert 0 < sum(outside) < sum(MASK)
    for weight, ratio, out, counts in zip(weights.tolist(), ratios, outside, MASK, strict=True):
        if counts:
            held = {"truncate": min(max(ratio, 0.8), 1.3), "mask": 0.0 if out else ratio, "whole": ratio}[mode]
            assert weight == pytest.approx(held, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_masked_token_may_carry_any_number(level: Level) -> None:
    behaviour = torch.tensor([-1.0, float("nan"), 1e30])
    weights, outside = importance_weights(
        torch.full((3,), -1.0),
        behaviour,
        torch.tensor([True, False, False]),
        [3],
        level=level,
        mode="mask",
        low=0.5,
        high=2.0,
    )
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert not outside.any()


def test_weights_are_constants() -> None:
    proximal = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights, _ = importance_weights(
        proximal, torch.zeros(2), torch.ones(2).bool(), [2], level="token", mode="whole", low=0.0, high=2.0
    )
    assert not weights.requires_grad


def test_sequences_that_moved_away_and_were_bad_are_left_out() -> None:
    new, old = drawn()
    advantages = [-1.0] * 3 + [2.0] * 5 + [-1.0] + [-1.0] * 2
    expected, start = [], 0
    for length in LENGTHS:
        places = range(start, start + length)
        distance = sum((old[t] - new[t]) * MASK[t] for t in places) / max(1, sum(MASK[t] for t in places))
        expected += [bool(MASK[t]) and advantages[t] < 0 and distance > 0.01 for t in places]
        start += length
    proximal, behaviour, estimated = (torch.tensor(row).double() for row in (new, old, advantages))
    got = off_policy_sequences(proximal, behaviour, estimated, torch.tensor(MASK).bool(), LENGTHS, delta=0.01)
    assert got.tolist() == expected
    assert 0 < sum(expected) < sum(MASK)


def test_an_empty_microbatch_has_no_corrections() -> None:
    nothing, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    weights, _ = importance_weights(nothing, nothing, mask, (), level="sequence", mode="mask", low=0.5, high=2.0)
    assert weights.tolist() == off_policy_sequences(nothing, nothing, nothing, mask, (), delta=0.1).tolist() == []

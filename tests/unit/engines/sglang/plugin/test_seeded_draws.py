"""The draws that replace SGLang's on a CPU have the right distribution and depend only on seed and position."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from asyncrl.engines.sglang.plugin.cpu.draw import draw_with_seed, draw_within_limits  # noqa: E402

DRAWS = 100_000


@pytest.mark.parametrize("varies", ["seed", "position"])
def test_draws_follow_the_distribution(varies: str) -> None:
    torch.manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(1, 64), -1)
    numbers, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 12345)
    seed, position = (numbers, fixed) if varies == "seed" else (fixed, numbers)
    drawn = draw_with_seed(logprobs.expand(DRAWS, -1), seed, position).view(-1)
    expected = logprobs[0].exp()
    spread = (expected * (1 - expected) / DRAWS).sqrt()
    assert ((drawn.bincount(minlength=64) / DRAWS - expected).abs() < 5 * spread).all()


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(32, 64), -1)
    seeds, positions = torch.arange(32), torch.arange(32) * 7
    together = draw_with_seed(logprobs, seeds, positions)
    alone = [draw_with_seed(logprobs[i : i + 1], seeds[i : i + 1], positions[i : i + 1]).item() for i in range(32)]
    assert together.view(-1).tolist() == alone
    assert together.shape == (32, 1)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    nothing = float("-inf")
    logprobs = torch.tensor([[nothing, 0.0, -1.0, nothing]]).expand(DRAWS, -1)
    assert set(draw_with_seed(logprobs, torch.arange(DRAWS), torch.arange(DRAWS)).view(-1).tolist()) == {1, 2}


Limits = dict[str, float]
FREE: Limits = {}
LIMITS: list[Limits] = [
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
]
EVERY_TOKEN = 1 << 30
"""SGLang's top-k of a request without one."""


def drawn(probs: Any, rows: list[Limits], seeds: Any, positions: Any) -> list[int]:
    """Draw one token for each row of ``probs``, within the limits of the same row of ``rows``."""
    found = draw_within_limits(
        probs,
        torch.tensor([row.get("top_k", EVERY_TOKEN) for row in rows], dtype=torch.int32),
        torch.tensor([row.get("top_p", 1.0) for row in rows]),
        torch.tensor([row.get("min_p", 0.0) for row in rows]),
        any("min_p" in row for row in rows),
        seeds,
        positions,
    )
    assert found.dtype == torch.int32
    assert found.shape == (len(rows),)
    return [int(token) for token in found]


@pytest.mark.parametrize("mate", LIMITS, ids=str)
def test_a_row_without_limits_gets_the_same_token_alone_and_with_any_mate(mate: Limits) -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(64, 100), -1)
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    alone = draw_with_seed(probs.log(), seeds, positions).view(-1).tolist()
    together = drawn(probs, [mate if row % 2 else FREE for row in range(64)], seeds, positions)
    assert together[::2] == alone[::2]
    assert together[1::2] != alone[1::2]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_row_with_limits_gets_the_same_token_alone_and_with_any_mate(limits: Limits) -> None:
    torch.manual_seed(1)
    probs = torch.softmax(torch.randn(len(LIMITS) + 1, 100), -1)
    probs[1:] = probs[0]
    seeds, positions = torch.full((len(probs),), 7), torch.arange(len(probs))
    alone = drawn(probs[:1], [limits], seeds[:1], positions[:1])
    assert drawn(probs, [limits, *LIMITS], seeds, positions)[:1] == alone


def test_limits_apply_jointly_to_the_given_probabilities() -> None:
    probs = torch.tensor([[0.05, 0.4, 0.25, 0.1, 0.2]])
    expected: dict[str, tuple[Limits, set[int]]] = {
        "top_k=2": ({"top_k": 2}, {1, 2}),
        "top_p=0.65 ends with the token that reaches it": ({"top_p": 0.65}, {1, 2}),
        "top_p=0.7": ({"top_p": 0.7}, {1, 2, 4}),
        "min_p=0.5": ({"min_p": 0.5}, {1, 2, 4}),
        "min_p=1": ({"min_p": 1.0}, {1}),
        "greedy": ({"top_k": 1}, {1}),
        "top_k of the vocabulary's size": ({"top_k": 5}, {0, 1, 2, 3, 4}),
        "all": ({"top_k": 3, "top_p": 0.9, "min_p": 0.6}, {1, 2}),
    }
    many = torch.arange(500)
    for name, (limits, tokens) in expected.items():
        assert set(drawn(probs.expand(500, -1), [limits] * 500, many, many)) == tokens, name


def test_limited_draws_follow_the_distribution() -> None:
    probs = torch.tensor([[0.05, 0.4, 0.25, 0.1, 0.2]]).expand(DRAWS, -1)
    numbers = torch.arange(DRAWS)
    found = torch.tensor(drawn(probs, [{"top_p": 0.7}] * DRAWS, numbers, numbers)).bincount(minlength=5) / DRAWS
    expected = torch.tensor([0.0, 0.4, 0.25, 0.0, 0.2]) / 0.85
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_the_given_probabilities_stay_as_they_are() -> None:
    """SGLang reports log-probs from them after the draw."""
    probs = torch.softmax(torch.randn(4, 10), -1)
    before = probs.clone()
    drawn(probs, [{"top_p": 0.5}] * 4, torch.arange(4), torch.arange(4))
    assert torch.equal(probs, before)

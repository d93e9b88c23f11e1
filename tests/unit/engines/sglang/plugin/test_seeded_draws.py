"""The draw that replaces SGLang's on a CPU has the right distribution and depends only on seed and position."""

import pytest

torch = pytest.importorskip("torch")

from asyncrl.engines.sglang.plugin.draw import draw_with_seed  # noqa: E402

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

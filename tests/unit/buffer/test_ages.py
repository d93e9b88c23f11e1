"""Tokens that are too old are masked out of the loss, and no others."""

from array import array
from dataclasses import replace

from asyncrl.buffer import masked_before, masked_in
from asyncrl.types import FinishReason, GroupId, Prompt, Sample, ScoredGroup, ScoredSample, Span, Turn, Weights


def group(*steps: tuple[int, ...], mask: tuple[int, ...] | None = None) -> ScoredGroup:
    """A group with one sample for each of ``steps``: two tokens of the weights of each step in it."""
    return ScoredGroup(
        group_id=GroupId(0),
        prompt=Prompt(row=0, epoch=0, text="", token_ids=(1,), label=None),
        dispatched=Weights(version=0, step=0),
        samples=tuple(scored(index, written, mask) for index, written in enumerate(steps)),
    )


def scored(index: int, steps: tuple[int, ...], mask: tuple[int, ...] | None) -> ScoredSample:
    size = 2 * len(steps)
    spans = tuple(
        Span(weights=Weights(version=step, step=step), start=2 * place, stop=2 * place + 2)
        for place, step in enumerate(steps)
    )
    sample = Sample(
        index=index,
        token_ids=(7,) * size,
        logprobs=array("f", [-1.0]) * size,
        spans=spans,
        text="",
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    return ScoredSample(sample=sample, reward=1.0, loss_mask=mask or (1,) * size)


def masks(group: ScoredGroup) -> list[tuple[int, ...]]:
    return [scored.loss_mask for scored in group.samples]


def test_an_answer_that_continued_under_earlier_weights_after_a_kill_is_masked_behind_newer_ones_too() -> None:
    masked = masked_before(group((1, 2, 1, 2), (2, 1)), 2)
    assert masks(masked) == [(0, 0, 1, 1, 0, 0, 1, 1), (1, 1, 0, 0)]
    assert masked.oldest_trained_step == 2


def test_tokens_of_older_weights_leave_the_loss() -> None:
    assert masks(masked_before(group((0, 1, 2), (2,), (0,)), 1)) == [(0, 0, 1, 1, 1, 1), (1, 1), (0, 0)]


def test_a_group_that_is_young_enough_is_left_alone() -> None:
    young = group((1, 2), ())
    assert masked_before(young, 1) is young


def test_a_mask_that_is_there_stays() -> None:
    assert masks(masked_before(group((0, 1), mask=(1, 1, 0, 1)), 1)) == [(0, 0, 0, 1)]


def test_the_age_of_a_group_is_that_of_its_oldest_token_in_the_loss() -> None:
    assert group((0, 1)).oldest_trained_step == 0
    assert masked_before(group((0, 1)), 1).oldest_trained_step == 1
    assert masked_before(group((0, 1)), 2).oldest_trained_step is None
    assert group().oldest_trained_step is None


def test_turns_in_any_order_of_age_lose_exactly_their_old_tokens() -> None:
    (whole,) = group((2, 0, 1, 3)).samples
    turns = tuple(Turn(call=call, start=2 * call, stop=2 * call + 2, finish=FinishReason.STOP) for call in range(4))
    of_turns = replace(whole, sample=replace(whole.sample, turns=turns), loss_mask=(1, 0, 1, 1, 1, 1, 1, 1))
    mixed = replace(group((2,)), samples=(of_turns,))
    assert masks(masked_before(mixed, 2)) == [(1, 0, 0, 0, 0, 0, 1, 1)]
    assert masked_before(mixed, 0) is mixed


def test_ranges_of_tokens_are_masked() -> None:
    (whole,) = group((0, 0)).samples
    assert masked_in(whole, [(0, 1), (2, 3), (3, 3)]).loss_mask == (0, 1, 0, 1)

"""The hooks of a step in their native shape, each as a function from batch to batch."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrl.errors import HookFailed
from asyncrl.hooks.changes import left_out, masked, name_of_sample, number, samples_of, with_samples
from asyncrl.protocols import AllSamplesFn, BatchHook, ConvertFn, RewardPostProcessFn, SampleFilterFn
from asyncrl.types import Batch, GroupId, ScoredGroup, ScoredSample


def sample_filter(function: SampleFilterFn) -> BatchHook:
    """Adapt a function that returns the samples to leave out of the loss."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        returned = function(batch.step, batch.groups)
        chosen = _pairs(returned)
        known = {(group.group_id, scored.sample.index) for group in batch.groups for scored in group.samples}
        unknown = sorted(chosen - known)
        if unknown:
            raise HookFailed(f"left out {unknown[0]}, which is no (group_id, index) of a sample in the batch")
        samples = [
            left_out(scored) if (group.group_id, scored.sample.index) in chosen else scored
            for group in batch.groups
            for scored in group.samples
        ]
        return with_samples(batch, samples)

    return _named(change, function)


def all_samples(function: AllSamplesFn) -> BatchHook:
    """Adapt a function that only looks."""

    def look(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        function(batch.step, batch.groups, filtered)
        return batch

    return _named(look, function)


def reward_post_process(function: RewardPostProcessFn) -> BatchHook:
    """Adapt a function that returns an outcome for each sample of each group."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        rows = function(batch.groups)
        if not isinstance(rows, Sequence) or len(rows) != len(batch.groups):
            raise HookFailed(f"must return one list per group, {len(batch.groups)} in all, got {_short(rows)}")
        return replace(
            batch, groups=tuple(_with_outcomes(group, row) for group, row in zip(batch.groups, rows, strict=True))
        )

    return _named(change, function)


def convert(function: ConvertFn) -> BatchHook:
    """Adapt a function from batch to batch, and check its result."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        changed = function(batch)
        if not isinstance(changed, Batch):
            raise HookFailed(f"must return a Batch, got {_short(changed)}")
        before, after = _names(batch), _names(changed)
        if before != after:
            raise HookFailed(
                "must keep the groups and samples of the batch, in order; use loss masks to leave some out"
            )
        samples = [_checked(old, new) for old, new in zip(samples_of(batch), samples_of(changed), strict=True)]
        return with_samples(batch, samples)

    return _named(change, function)


def _named(change: BatchHook, function: Callable[..., object]) -> BatchHook:
    """Give ``change`` the name of the user's function, for errors."""
    functools.update_wrapper(change, function, assigned=("__name__",), updated=())
    return change


def _pairs(returned: object) -> set[tuple[GroupId, int]]:
    try:
        return {(GroupId(group_id), index) for group_id, index in returned}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise HookFailed(f"must return pairs (group_id, index), got {_short(returned)}") from None


def _with_outcomes(group: ScoredGroup, row: object) -> ScoredGroup:
    values = row.tolist() if hasattr(row, "tolist") else row
    if not isinstance(values, Sequence) or len(values) != len(group.samples):
        raise HookFailed(f"group {group.group_id} has {len(group.samples)} samples, got {_short(values)}")
    named = (
        (scored, number(value, f"the outcome of {name_of_sample(group, scored.sample.index)}"))
        for scored, value in zip(group.samples, values, strict=True)
    )
    return replace(group, samples=tuple(replace(scored, outcome=value) for scored, value in named))


def _names(batch: Batch) -> list[tuple[GroupId, tuple[int, ...], int]]:
    return [
        (group.group_id, group.prompt.token_ids, scored.sample.index)
        for group in batch.groups
        for scored in group.samples
    ]


def _checked(old: ScoredSample, new: ScoredSample) -> ScoredSample:
    if new.sample.token_ids != old.sample.token_ids or new.sample.spans != old.sample.spans:
        raise HookFailed("changed the tokens of a sample, which must be the engines' tokens")
    number(new.reward, "a reward")
    if new.outcome is not None:
        number(new.outcome, "an outcome")
    return masked(replace(new, loss_mask=old.loss_mask), new.loss_mask, "a sample")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

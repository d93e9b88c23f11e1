"""The adapters for slime's hooks of a step: they see slime's samples, and their changes are read back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.compat.slime_views import group_to_slime, nested
from asyncrl.compat.train_data import converted
from asyncrl.errors import HookFailed, name_of
from asyncrl.hooks.changes import left_out, masked, name_of_sample, number, samples_of, with_samples
from asyncrl.protocols import BatchHook
from asyncrl.types import Batch, ScoredGroup, ScoredSample

GetSamples = Callable[[int], list[list[Sample]]]


def sample_filter_from_slime(function: Callable[..., Any], args: SlimeArgs) -> BatchHook:
    """Adapt ``fn(args, groups)``, which sets ``remove_sample``."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        views = _views(batch.groups)
        function(args, _nested(batch.groups, views))
        return _read_back(batch, views, args)

    return _named(change, function)


def all_samples_from_slime(
    function: Callable[..., Any], args: SlimeArgs, get_samples: GetSamples | None = None
) -> BatchHook:
    """Adapt ``fn(args, all_groups, data_source)``; ``data_source`` is ``get_samples`` of the user's source, or None."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        views = _views(batch.groups)
        groups = [*zip(batch.groups, views, strict=True), *zip(filtered, _views(filtered), strict=True)]
        ordered = sorted(groups, key=lambda each: each[0].group_id)
        function(args, [nested(group, found) for group, found in ordered], get_samples)
        return _read_back(batch, views, args)

    return _named(change, function)


def reward_post_process_from_slime(function: Callable[..., Any], args: SlimeArgs) -> BatchHook:
    """Adapt ``fn(args, samples) -> (raw_rewards, rewards)``: raw rewards are reported, rewards are trained."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        views = _views(batch.groups)
        returned = function(args, list(chain(*views)))
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise HookFailed(f"must return (raw_rewards, rewards), got a {type(returned).__name__}")
        samples = samples_of(_read_back(batch, views, args))
        raw, rewards = (
            _column(column, name, samples) for column, name in zip(returned, ("raw reward", "reward"), strict=True)
        )
        changed = (
            replace(scored, reward=told, outcome=trained)
            for scored, told, trained in zip(samples, raw, rewards, strict=True)
        )
        return with_samples(batch, list(changed))

    return _named(change, function)


def convert_from_slime(function: Callable[..., Any], args: SlimeArgs) -> BatchHook:
    """Adapt ``fn(args, samples) -> dict`` of train data."""

    def change(batch: Batch, filtered: Sequence[ScoredGroup], /) -> Batch:
        views = _views(batch.groups)
        data = function(args, list(chain(*views)))
        if not isinstance(data, Mapping):
            raise HookFailed(f"must return a dict of train data, got a {type(data).__name__}")
        return converted(_read_back(batch, views, args), data, [view.index for view in chain(*views)])

    return _named(change, function)


def _named(change: BatchHook, function: Callable[..., Any]) -> BatchHook:
    change.__name__ = name_of(function)  # type: ignore[attr-defined]
    return change


def _nested(groups: Sequence[ScoredGroup], views: Sequence[Sequence[Sample]]) -> list[list[Any]]:
    return [nested(group, found) for group, found in zip(groups, views, strict=True)]


def _views(groups: Sequence[ScoredGroup]) -> list[list[Sample]]:
    return [group_to_slime(group) for group in groups]


def _read_back(batch: Batch, views: Sequence[Sequence[Sample]], args: SlimeArgs) -> Batch:
    """Return ``batch`` with the rewards, loss masks and ``remove_sample`` of its samples' views.

    Raises HookFailed if one is not allowed.
    """
    pairs = (
        (group, scored, view)
        for group, row in zip(batch.groups, views, strict=True)
        for scored, view in zip(group.samples, row, strict=True)
    )
    return with_samples(batch, [_changed(group, scored, view, args) for group, scored, view in pairs])


def _changed(group: ScoredGroup, scored: ScoredSample, view: Sample, args: SlimeArgs) -> ScoredSample:
    name = name_of_sample(group, scored.sample.index)
    if view.reward != (scored.reward_parts or scored.reward):
        parts = dict(view.reward) if isinstance(view.reward, Mapping) else {}
        value = number(view.get_reward_value(args), f"the reward of {name}")
        scored = replace(scored, reward=value, reward_parts=parts)
    if view.loss_mask is not None:
        scored = masked(scored, view.loss_mask, name)
    return left_out(scored) if view.remove_sample else scored


def _column(column: Any, name: str, samples: Sequence[ScoredSample]) -> list[float]:
    values = column.flatten().tolist() if hasattr(column, "flatten") else list(column)
    if len(values) != len(samples):
        raise HookFailed(f"returned {len(values)} {name}s for {len(samples)} samples")
    return [number(value, f"{name} {place}") for place, value in enumerate(values)]

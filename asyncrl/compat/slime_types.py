"""The objects that slime's plug-ins receive: ``Sample`` and ``args``."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from asyncrl.compat.slime_sample import Sample, SlimeStatus
from asyncrl.types import FinishReason, Prompt, ScoredGroup
from asyncrl.types import Sample as OurSample

SlimeArgs = SimpleNamespace
"""The value of every flag, as attributes named with underscores: ``SlimeArgs(**config.flat(run))``."""


@dataclass(slots=True)
class DynamicFilterOutput:
    """slime's result of a filter.  Mutable, because slime's own filters change it."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
    """No effect.  In slime it keeps a rejected group if replacing it would start another wave of sampling.  Here there
    are no waves: one new group replaces a rejected one."""


def to_slime(
    prompt: Prompt,
    sample: OurSample,
    reward: float | None,
    loss_mask: Sequence[int],
    reward_parts: Mapping[str, Any] | None = None,
    *,
    group_size: int | None = None,
) -> Sample:
    """Convert one sample to slime's terms; ``reward_parts`` are the entries of a dict reward.

    Every call for one sample returns the same object, with ``reward`` and ``loss_mask`` as given.  ``group_size`` is
    needed for an index that is unique in the run.
    """
    known = _VIEWS.get(id(sample))
    view = _view(prompt, sample, group_size) if known is None or known[0]() is not sample else known[1]
    view.reward = dict(reward_parts) if reward_parts else reward
    view.loss_mask = list(loss_mask)
    return view


def group_to_slime(group: ScoredGroup) -> list[Sample]:
    """Convert all samples of a group to slime's terms."""
    size = len(group.samples)
    views = [
        to_slime(group.prompt, scored.sample, scored.reward, scored.loss_mask, scored.reward_parts, group_size=size)
        for scored in group.samples
    ]
    if any(scored.sample.resumed_at for scored in group.samples):  # as in slime, its finished answers are marked too
        for view, scored in zip(views, group.samples, strict=True):
            _mark_first_step(view, scored.sample)
    return views


def _view(prompt: Prompt, sample: OurSample, group_size: int | None) -> Sample:
    group_id = sample.group_id
    view = Sample(
        group_index=prompt.row if group_id is None else group_id,
        index=sample.index if group_id is None or group_size is None else group_id * group_size + sample.index,
        prompt=prompt.text if prompt.messages is None else _copied(list(prompt.messages)),
        tokens=[*prompt.token_ids, *sample.token_ids],
        response=sample.text,
        response_length=len(sample.token_ids),
        label=prompt.label,
        weight_versions=[str(span.weights.version) for span in sample.spans],
        rollout_log_probs=sample.logprobs.tolist(),
        status=_STATUS[sample.finish],
        metadata=_copied(dict(prompt.metadata)),
    )
    if sample.resumed_at:
        _mark_first_step(view, sample)
    _keep_view(sample, view)
    return view


def _copied(value: Any) -> Any:
    """Copy dicts and lists at every depth: a view may change its own, and the prompt belongs to all samples."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def carry_view(old: OurSample, new: OurSample) -> None:
    """Give ``new``, a changed copy of ``old``, the view of ``old``."""
    if (known := _VIEWS.get(id(old))) is not None:
        _keep_view(new, known[1])


def _keep_view(sample: OurSample, view: Sample) -> None:
    key = id(sample)
    _VIEWS[key] = (weakref.ref(sample, lambda _: _VIEWS.pop(key, None)), view)


def _mark_first_step(view: Sample, sample: OurSample) -> None:
    if sample.spans:
        view.metadata.setdefault("start_rollout_id", sample.spans[0].weights.step)


_FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters"
OUR_NAMES = {
    f"{_FILTERS}.check_reward_nonzero_std": "asyncrl.filters.check_reward_nonzero_std",
    # slime's fallback keeps equal rewards rather than start another wave of sampling.  Here there are no waves.
    f"{_FILTERS}.check_reward_nonzero_std_with_fallback": "asyncrl.filters.check_reward_nonzero_std",
}
"""The equivalents of slime's built-in functions, by slime's dotted path."""

_STATUS = {
    FinishReason.STOP: SlimeStatus.COMPLETED,
    FinishReason.LENGTH: SlimeStatus.TRUNCATED,
    FinishReason.ABORT: SlimeStatus.ABORTED,
}

_VIEWS: dict[int, tuple[weakref.ref[OurSample], Sample]] = {}
"""slime's view of each living sample, by the sample's id.

Invariant: an entry is removed when its sample is freed, so an id never finds the view of another sample.  Single
dictionary operations are atomic, so hooks in other threads may read it.
"""

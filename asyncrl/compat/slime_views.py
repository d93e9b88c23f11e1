"""slime's view of the samples of a run: one object per answer, for all functions of slime's shape."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.compat.slime_sample import Sample, SlimeStatus
from asyncrl.types import FinishReason, Prompt, ScoredGroup
from asyncrl.types import Sample as OurSample

SLIME_STATE = "slime_state"
"""The key of a sample's metadata under which the attributes of a function's Sample are kept."""

_REBUILT = (
    *("tokens", "loss_mask", "rollout_log_probs", "response", "response_length", "metadata", "reward"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"),
)
"""Attributes of a view that are made from the values of the run."""


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
    """Convert all samples of a group to slime's terms, in one list."""
    size = len({scored.sample.rollout for scored in group.samples})
    views = [
        to_slime(group.prompt, scored.sample, scored.reward, scored.loss_mask, scored.reward_parts, group_size=size)
        for scored in group.samples
    ]
    if any(scored.sample.resumed_at for scored in group.samples):  # as in slime, its finished answers are marked too
        for view, scored in zip(views, group.samples, strict=True):
            _mark_first_step(view, scored.sample)
    for view in views if size < len(views) else ():
        view.rollout_id = view.index if view.rollout_id is None else view.rollout_id
    return views


def nested(group: ScoredGroup, views: Sequence[Sample]) -> list[Any]:
    """Return the views as slime has a group: one item per episode, which is a list if its function returned one."""
    items: dict[int, list[Sample]] = {}
    lists: set[int] = set()
    for scored, view in zip(group.samples, views, strict=True):
        rollout = scored.sample.rollout
        items.setdefault(rollout, []).append(view)
        if len(items[rollout]) > 1 or scored.sample.metadata.get(SLIME_STATE, {}).get("is_list"):
            lists.add(rollout)
    return [found if rollout in lists else found[0] for rollout, found in items.items()]


def flattened(items: Sequence[Any]) -> list[Any]:
    """Return the samples of a group of ``nested``, in one list."""
    return [each for item in items for each in (item if isinstance(item, list | tuple) else (item,))]


def metadata_of_state(state: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    """Return the metadata of a sample that a function left in ``state``: its own, and the further attributes."""
    own = {
        name: value
        for name, value in (state.get("metadata") or {}).items()
        if name not in prompt.metadata or prompt.metadata[name] != value
    }
    plain = Sample(prompt=_prompt_of(prompt), label=prompt.label).to_dict()
    unlike = {name: value for name, value in state.items() if name not in plain or plain[name] != value}
    return own | {SLIME_STATE: {name: unlike[name] for name in unlike if name not in _REBUILT}}


def _view(prompt: Prompt, sample: OurSample, group_size: int | None) -> Sample:
    group_id = sample.group_id
    prompt_ids = prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
    view = Sample(
        group_index=prompt.row if group_id is None else group_id,
        index=sample.rollout if group_id is None or group_size is None else group_id * group_size + sample.rollout,
        prompt=_prompt_of(prompt),
        tokens=[*prompt_ids, *sample.token_ids],
        response=sample.text,
        response_length=len(sample.token_ids),
        label=prompt.label,
        weight_versions=[str(span.weights.version) for span in sample.spans],
        rollout_log_probs=sample.logprobs.tolist(),
        status=_STATUS[sample.finish],
        metadata=_copied(dict(prompt.metadata)),
    )
    if sample.kept is not None:  # arrays, as slime has tensors
        view.rollout_top_p_token_ids = sample.kept.ids_I
        view.rollout_top_p_token_offsets = np.concatenate([[0], np.cumsum(sample.kept.counts_T)]).astype(np.int32)
    if sample.routes is not None:
        view.rollout_routed_experts = sample.routes.experts_NLK
    _add_state(view, sample)
    if sample.resumed_at:
        _mark_first_step(view, sample)
    _keep_view(sample, view)
    return view


def _add_state(view: Sample, sample: OurSample) -> None:
    """Give a view the attributes that the function of its episode left on its own sample."""
    if not sample.metadata:
        return
    kept = sample.metadata.get(SLIME_STATE, {})
    view.metadata |= _copied({name: value for name, value in sample.metadata.items() if name != SLIME_STATE})
    made = Sample.from_dict({"status": view.status, **_copied(kept)})
    for name in kept.keys() - {"is_list"}:
        setattr(view, name, getattr(made, name))


def _prompt_of(prompt: Prompt) -> Any:
    return prompt.text if prompt.messages is None else _copied(list(prompt.messages))


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

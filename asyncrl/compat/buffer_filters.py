"""The adapter for slime's buffer filters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.compat.slime_sample import Sample
from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.compat.slime_views import flattened, group_to_slime, nested
from asyncrl.errors import FilterFailed, name_of
from asyncrl.protocols import PickFn
from asyncrl.types import GroupId, Picked, ScoredGroup


def pick_from_slime(function: Callable[..., Any], args: SlimeArgs) -> PickFn:
    """Adapt ``buffer_filter(args, rollout_id, buffer, num_samples)`` to a PickFn.

    ``buffer`` is a list of groups, each a list of Samples.  Returned groups are trained.  Groups that the function
    neither returns nor leaves in ``buffer`` are dropped, with the function's name as the reason.  ``rollout_id`` is
    the step.
    """
    name = name_of(function)
    translated: dict[GroupId, list[Any]] = {}  # a cache: the filter is called for every group that ends

    def pick(step: int, waiting: Sequence[ScoredGroup], size: int, /) -> Picked:
        known = {group.group_id: translated.get(group.group_id) or _translated(group) for group in waiting}
        translated.clear()
        translated.update(known)
        buffer = [list(samples) for samples in known.values()]
        returned = function(args, step, buffer, size)
        if not isinstance(returned, list | tuple):
            raise FilterFailed(f"must return a list of groups, got {returned!r}")
        train = tuple(_whole(group, known, "returned") for group in returned)
        left = {_whole(group, known, "left in the buffer") for group in buffer}
        return Picked(train=train, drop={group_id: name for group_id in known if group_id not in left.union(train)})

    return pick


def _translated(group: ScoredGroup) -> list[Any]:
    return nested(group, group_to_slime(group))


def _whole(group: object, known: Mapping[GroupId, list[Any]], what: str) -> GroupId:
    """Return the id of a group, read from its samples.

    Raises FilterFailed unless ``group`` is a group of the buffer with all its samples.
    """
    samples = flattened(group) if isinstance(group, list | tuple) else []
    ids = {sample.group_index if isinstance(sample, Sample) else None for sample in samples}
    found = ids.pop() if len(ids) == 1 else None
    group_id = None if found is None else GroupId(found)
    if group_id is None or group_id not in known:
        raise FilterFailed(f"{what}: {_short(group)}, which is no group of the buffer")
    if len(samples) != (whole := len(flattened(known[group_id]))):
        raise FilterFailed(f"{what}: {len(samples)} of the {whole} samples of group {group_id}")
    return group_id


def _short(value: object) -> str:
    text = repr(value)  # may be megabytes for a group
    return text if len(text) <= 80 else f"{text[:80]}..."

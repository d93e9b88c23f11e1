"""The check of a user's buffer filter: its exceptions and its result, at every call."""

import asyncio
from collections.abc import Sequence

from asyncrl.errors import FilterFailed, place_of
from asyncrl.protocols import PickFn
from asyncrl.types import GroupId, Picked, ScoredGroup


def checked_pick(pick: PickFn, label: str) -> PickFn:
    """Return ``pick`` with checks.  It raises FilterFailed if ``pick`` raises or its result is not allowed.

    ``label`` is the flag and the path of the function, which its errors name.
    """

    def checked(step: int, waiting: Sequence[ScoredGroup], size: int, /) -> Picked:
        try:
            picked = pick(step, waiting, size)
        except FilterFailed as error:
            raise FilterFailed(f"step {step}: {label}: {error}") from error
        except (Exception, asyncio.CancelledError) as error:  # a user function may raise anything; it never awaits
            text = f"{type(error).__name__}: {error}{place_of(error)}"
            raise FilterFailed(f"step {step}: {label}: {text}") from error
        problem = _problem(picked, {group.group_id for group in waiting}, size)
        if problem is not None:
            raise FilterFailed(f"step {step}: {label}: {problem}")
        return picked

    return checked


def _problem(picked: object, waiting: set[GroupId], size: int) -> str | None:
    if not isinstance(picked, Picked):
        return f"must return Picked(train=..., drop=...), got {picked!r}"
    if len(picked.train) > size:
        return f"picked {len(picked.train)} groups, at most {size} fit into the batch"
    twice = sorted({group_id for group_id in picked.train if picked.train.count(group_id) > 1})
    if twice:
        return f"picked group {twice[0]} twice"
    both = sorted(picked.drop.keys() & set(picked.train))
    if both:
        return f"picked group {both[0]} and dropped it as well"
    unknown = [group_id for group_id in (*picked.train, *picked.drop) if group_id not in waiting]
    if unknown:
        return f"named {unknown[0]!r}, which is no group that waits"
    silent = [group_id for group_id, reason in picked.drop.items() if not (isinstance(reason, str) and reason)]
    return f"dropped group {silent[0]} without a reason" if silent else None

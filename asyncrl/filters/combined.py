"""Several filters as one."""

from asyncrl.protocols import KeepFn
from asyncrl.types import ScoredGroup


def all_of(*filters: KeepFn) -> KeepFn:
    """Combine ``filters``: keep the groups that all of them keep; the first filter that drops a group gives the reason.

    Filters with slime's signature cannot be combined, because they take more than the group.
    """
    for keep in filters:
        if not callable(keep):
            raise TypeError(f"{keep!r} is not a filter; combine filters in a file and name the result")

    def keep_all_of(group: ScoredGroup, /) -> str | None:
        return next((reason for keep in filters if (reason := keep(group)) is not None), None)

    return keep_all_of

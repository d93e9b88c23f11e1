"""The training order of finished groups, and the groups that no step can train in time.  Pure arithmetic, no waiting.

Let each step train B groups, oldest first, beginning with the current step.  A group has a *place* if it is then
trained by its deadline.  Deadlines never decrease from one dispatch to the next.  Groups with the same deadline are
therefore adjacent in dispatch order, and at most S + 1 deadlines exist at a time (S is the maximum staleness).  All
questions about places can therefore be answered deadline by deadline, however many groups there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from asyncrl.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A group and the last step that may train on it.  Deadlines never decrease as ``order`` grows."""

    order: int
    """Dispatch number, unique per group; a resumed group gets a new one."""
    deadline: int
    group_id: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """No batch is available until ``missing`` groups with a deadline up to ``deadline`` have ended."""

    deadline: float
    """Latest deadline of the missing groups; infinite if any group counts."""
    missing: int
    """Number of groups, at least 1, that must end (finish, fail or be rejected) before another attempt."""


class Outstanding:
    """The groups that were started and may still be trained, finished or not.

    Adding, finishing and removing a group take constant time.  Looking for a batch takes time proportional to the
    number of deadlines.
    """

    def __init__(self) -> None:
        self._cohorts: dict[int, _Cohort] = {}  # by deadline, in ascending order
        self._last_deadline = -1
        self.num_finished = 0

    def start(self, dispatch: Dispatch) -> None:
        """Add a newly dispatched group.  Raises ValueError if its deadline precedes that of an earlier group."""
        if dispatch.deadline < self._last_deadline:
            raise ValueError(f"deadlines fall: {dispatch} after a deadline of {self._last_deadline}")
        self._last_deadline = dispatch.deadline
        self._cohorts.setdefault(dispatch.deadline, _Cohort()).members[dispatch.order] = dispatch

    def finish(self, dispatch: Dispatch) -> None:
        """Mark a group as ready to be trained."""
        self._cohorts[dispatch.deadline].finished.add(dispatch.order)
        self.num_finished += 1

    def remove(self, dispatch: Dispatch) -> None:
        """Remove a group that was taken for training or dropped."""
        cohort = self._cohorts[dispatch.deadline]
        del cohort.members[dispatch.order]
        if dispatch.order in cohort.finished:
            cohort.finished.remove(dispatch.order)
            self.num_finished -= 1
        if not cohort.members:
            del self._cohorts[dispatch.deadline]

    def num_unfinished(self, step: int) -> int:
        """Return the number of unfinished groups that are not overdue at ``step``."""
        return sum(
            len(cohort.members) - len(cohort.finished) for deadline, cohort in self._cohorts.items() if deadline >= step
        )

    def finished(self) -> Iterator[Dispatch]:
        """Yield the finished groups, oldest first."""
        for cohort in self._cohorts.values():
            if cohort.finished:
                yield from (dispatch for order, dispatch in cohort.members.items() if order in cohort.finished)

    def oldest(self, *, size: int) -> tuple[Dispatch, ...] | NotYet:
        """Return the ``size`` oldest finished groups, regardless of unfinished ones."""
        if self.num_finished < size:
            return NotYet(deadline=float("inf"), missing=size - self.num_finished)
        return tuple(islice(self.finished(), size))

    def oldest_in_time(self, *, step: int, size: int) -> tuple[Dispatch, ...] | NotYet:
        """Return the ``size`` oldest finished groups, unless an older unfinished group would then miss its deadline.

        A finished group may overtake an older unfinished one only while all remaining groups can still be trained in
        time, ``size`` at each later step, earliest deadline first.  Otherwise the caller waits for the unfinished
        groups, so that the choice is not biased towards short answers.  Groups without a place are ignored here: they
        need the filter to reject an older group first.
        """
        if self.num_finished < size:
            return self.oldest(size=size)
        return self._too_many_left(step, size) or self.oldest(size=size)

    def _too_many_left(self, step: int, size: int) -> NotYet | None:
        """Find the first deadline that the groups left after the next batch could not all meet."""
        to_take, placed, left = size, 0, 0
        for deadline, cohort in self._cohorts.items():
            with_a_place = min(len(cohort.members), max(0, (deadline - step + 1) * size - placed))
            taken = min(len(cohort.finished), to_take)
            left += with_a_place - min(taken, cohort.num_finished_among(with_a_place))
            placed += with_a_place
            to_take -= taken
            room = (deadline - step) * size
            if with_a_place and left > room:
                return NotYet(deadline=deadline, missing=left - room)
        return None

    def doomed(self, *, step: int, size: int) -> tuple[Dispatch, ...]:
        """Return the groups that no step from ``step`` on can train in time.

        Finished older groups fill every place before their deadline.  Unfinished groups fill none, because a filter
        may still reject them.
        """
        places, lost = 0, list[Dispatch]()
        for deadline, cohort in self._cohorts.items():
            room = (deadline - step + 1) * size
            if places + len(cohort.finished) < room:
                places += len(cohort.finished)
                continue
            for order, dispatch in cohort.members.items():
                if places >= room:
                    lost.append(dispatch)
                elif order in cohort.finished:
                    places += 1
        return tuple(lost)

    def overdue(self, *, step: int) -> tuple[Dispatch, ...]:
        """Return the groups whose deadline is before ``step``, oldest first."""
        return tuple(
            dispatch
            for deadline, cohort in self._cohorts.items()
            if deadline < step
            for dispatch in cohort.members.values()
        )


class _Cohort:
    """The groups that share one deadline."""

    __slots__ = ("finished", "members")

    def __init__(self) -> None:
        self.members: dict[int, Dispatch] = {}  # by order, ascending
        self.finished: set[int] = set()
        """``order`` of the finished members."""

    def num_finished_among(self, oldest: int) -> int:
        """Return the number of finished groups among the ``oldest`` first members."""
        if oldest == len(self.members):
            return len(self.finished)
        return sum(order in self.finished for order in islice(self.members, oldest))

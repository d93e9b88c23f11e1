"""In which order finished groups are trained, and which groups never can be.  Pure arithmetic; it never waits.

With B groups per step, a group has a *place* if it can be trained by its deadline when the older ones go first, B at
each step from the present one on.  Deadlines never fall from one dispatch to the next, so groups with the same deadline
are neighbours in the order of dispatch, and there are at most as many deadlines as steps of staleness, and one.  What
follows from places can therefore be counted deadline by deadline, however many groups there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from asyncrl.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A group and the last step that may train on it.  Deadlines never fall as ``order`` grows."""

    order: int
    """Of dispatch; no two groups share one."""
    deadline: int
    group_id: GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class NotYet:
    """No batch can be cut, and none can until ``missing`` groups with at most this deadline have ended."""

    deadline: float
    """Infinite when there are too few finished groups, whichever."""
    missing: int
    """At least 1.  When so many have ended (finished, failed or rejected) it is time to look again."""


class Outstanding:
    """The groups that were started and may yet be trained, finished or not.

    Adding, finishing and removing a group take constant time, a look whether there is a batch takes time with the
    number of deadlines.
    """

    def __init__(self) -> None:
        self._cohorts: dict[int, _Cohort] = {}  # by deadline, which is their order, too
        self._last_deadline = -1
        self.num_finished = 0

    def start(self, due: Due) -> None:
        """A group was dispatched, after all others.  Raises ValueError if its deadline is before one of theirs."""
        if due.deadline < self._last_deadline:
            raise ValueError(f"deadlines fall: {due} after a deadline of {self._last_deadline}")
        self._last_deadline = due.deadline
        self._cohorts.setdefault(due.deadline, _Cohort()).members[due.order] = due

    def finish(self, due: Due) -> None:
        """It is ready to be trained."""
        self._cohorts[due.deadline].finished.add(due.order)
        self.num_finished += 1

    def remove(self, due: Due) -> None:
        """It was trained, or never will be."""
        cohort = self._cohorts[due.deadline]
        del cohort.members[due.order]
        if due.order in cohort.finished:
            cohort.finished.remove(due.order)
            self.num_finished -= 1
        if not cohort.members:
            del self._cohorts[due.deadline]

    def num_unfinished(self, step: int) -> int:
        """Unfinished groups that have not missed their deadline at ``step``."""
        return sum(
            len(cohort.members) - len(cohort.finished) for deadline, cohort in self._cohorts.items() if deadline >= step
        )

    def finished(self) -> Iterator[Due]:
        """The finished groups, oldest first."""
        for cohort in self._cohorts.values():
            if cohort.finished:
                yield from (due for order, due in cohort.members.items() if order in cohort.finished)

    def oldest(self, *, size: int) -> tuple[Due, ...] | NotYet:
        """The ``size`` oldest finished groups, whatever is unfinished."""
        if self.num_finished < size:
            return NotYet(deadline=float("inf"), missing=size - self.num_finished)
        return tuple(islice(self.finished(), size))

    def oldest_in_time(self, *, step: int, size: int) -> tuple[Due, ...] | NotYet:
        """The ``size`` oldest finished groups, unless taking them would make an older unfinished one miss its deadline.

        A finished group may overtake an unfinished older one only while the groups left behind can still all be trained
        in time: ``size`` of them at each step after this one, the tightest deadline first.  Otherwise the caller waits
        for the unfinished ones, which keeps the choice free of a preference for short answers.  Groups without a place
        (a filter may reject some before them) have no claim.
        """
        if self.num_finished < size:
            return self.oldest(size=size)
        return self._too_many_left(step, size) or self.oldest(size=size)

    def _too_many_left(self, step: int, size: int) -> NotYet | None:
        """The first deadline by which the groups left behind by the next batch would need more steps than there are."""
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

    def doomed(self, *, step: int, size: int) -> tuple[Due, ...]:
        """Groups that no step from ``step`` on can train in time, whatever happens: finished older ones fill every
        place.  Unfinished ones fill none, as a filter may yet reject them.
        """
        places, lost = 0, list[Due]()
        for deadline, cohort in self._cohorts.items():
            room = (deadline - step + 1) * size
            if places + len(cohort.finished) < room:
                places += len(cohort.finished)
                continue
            for order, due in cohort.members.items():
                if places >= room:
                    lost.append(due)
                elif order in cohort.finished:
                    places += 1
        return tuple(lost)

    def overdue(self, *, step: int) -> tuple[Due, ...]:
        """Groups whose deadline is before ``step``, oldest first."""
        return tuple(
            due for deadline, cohort in self._cohorts.items() if deadline < step for due in cohort.members.values()
        )


class _Cohort:
    """The groups with one deadline."""

    __slots__ = ("finished", "members")

    def __init__(self) -> None:
        self.members: dict[int, Due] = {}  # by order, which is that of the dictionary, too
        self.finished: set[int] = set()
        """Orders."""

    def num_finished_among(self, oldest: int) -> int:
        """How many of so many oldest members are finished."""
        if oldest == len(self.members):
            return len(self.finished)
        return sum(order in self.finished for order in islice(self.members, oldest))

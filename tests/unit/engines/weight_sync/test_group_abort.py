"""Aborting the groups of an update."""

from threading import Barrier
from typing import Any, cast

from asyncrl.engines.weight_sync.group_abort import abort_together


def test_no_abort_waits_for_another_one_to_return() -> None:
    meeting, aborted = Barrier(3, timeout=60.0), list[int]()

    class Group:
        """A group whose abort returns only once all groups are being aborted; the second one has a dead member."""

        def __init__(self, number: int) -> None:
            self.number = number

        def abort(self) -> None:
            meeting.wait()
            aborted.append(self.number)
            if self.number == 1:
                raise RuntimeError("a member is dead")

    abort_together(cast("Any", [Group(number) for number in range(3)]))
    assert sorted(aborted) == [0, 1, 2]

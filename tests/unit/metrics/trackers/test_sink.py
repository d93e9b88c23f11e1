"""The sink of a tracker neither blocks nor fails, whatever the tracker does."""

import logging
import time
from collections.abc import Callable, Iterator
from threading import Condition, Event

import pytest

from asyncrl.metrics.reporter import Reporter
from asyncrl.metrics.sinks import Row
from asyncrl.metrics.trackers.sink import TrackerLimits, TrackerSink

AT_ONCE = TrackerLimits(pause_s=0.0, longest_pause_s=0.0, finish_s=20.0)
SOON = TrackerLimits(pause_s=0.0, longest_pause_s=0.0, finish_s=0.05, end_s=0.05)
FOR_EVER = 60.0
"""Seconds that a test takes if the sink waits for the tracker."""


class FakeTracker:
    """A tracker in memory whose calls do what the test gives for them."""

    def __init__(self, **calls: Callable[[], None]) -> None:
        self._calls = calls
        self.changed = Condition()
        self.rows: list[Row] = []
        self.opened = 0
        self.finished = 0
        self.abandoned = 0

    def open(self) -> str:
        self.opened += 1
        self._do("open")
        return "here"

    def log(self, row: Row, /) -> None:
        self._do("log")
        with self.changed:
            self.rows.append(row)
            self.changed.notify_all()

    def finish(self) -> None:
        self._do("finish")
        self.finished += 1

    def abandon(self) -> None:
        self.abandoned += 1

    def wait_for(self, num_rows: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.rows) >= num_rows, FOR_EVER)

    def _do(self, call: str) -> None:
        self._calls.get(call, lambda: None)()


class Forgetful(FakeTracker):
    """Holds rows in memory until it finishes, loses them when it is abandoned, and refuses the row of one step."""

    def __init__(self, refused: int, **calls: Callable[[], None]) -> None:
        super().__init__(**calls)
        self._refused = refused
        self.kept: list[Row] = []

    def log(self, row: Row, /) -> None:
        if row["step"] == self._refused:
            raise ValueError("bad row")
        super().log(row)

    def finish(self) -> None:
        super().finish()
        self.kept += self.rows
        self.rows.clear()

    def abandon(self) -> None:
        super().abandon()
        self.rows.clear()


@pytest.fixture
def released() -> Iterator[Event]:
    """Ends the calls that hang for ever."""
    event = Event()
    yield event
    event.set()


def rows(count: int) -> list[Row]:
    return [{"step": step, "reward/mean": 0.5} for step in range(count)]


def raising(*errors: Exception) -> Callable[[], None]:
    """Raise ``errors`` one after the other, then nothing."""
    left = list(errors)

    def call() -> None:
        if left:
            raise left.pop(0)

    return call


def always(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def held(count: int) -> str:
    return f"fake: {count} rows were sent to it before it was lost, and may be missing; metrics.jsonl has every row"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_rows_arrive_in_order_and_close_waits_for_them(caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker()
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(50):
        sink.write(row)
    sink.close()
    assert tracker.rows == rows(50)
    assert sink.place == "fake: here"
    assert (tracker.opened, tracker.finished, sink.num_dropped) == (1, 1, 0)
    assert warnings(caplog) == []


@pytest.mark.parametrize("call", ["open", "log", "finish"])
def test_a_call_that_hangs_for_ever_delays_neither_rows_nor_the_end(
    call: str, released: Event, caplog: pytest.LogCaptureFixture
) -> None:
    def hang() -> None:
        released.wait(FOR_EVER)

    tracker = FakeTracker(**{call: hang})
    sink = TrackerSink("fake", tracker, SOON)
    started = time.monotonic()
    for row in rows(3):
        sink.write(row)
    if call == "finish":
        tracker.wait_for(3)
    sink.close()
    assert time.monotonic() - started < FOR_EVER / 4
    assert tracker.abandoned == 2
    assert warnings(caplog)[0] == "fake: not finished within 0.05 s, and abandoned"
    unsent = "fake: 3 rows were not sent; metrics.jsonl has every row"
    assert warnings(caplog)[1:] == [held(3) if call == "finish" else unsent]


@pytest.mark.parametrize("call", ["open", "log", "finish"])
def test_a_call_that_always_raises_is_reported_once_with_its_reason(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = FakeTracker(**{call: always(OSError("no route to host\nand more"))})
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(3):
        sink.write(row)
    sink.close()
    lines = warnings(caplog)
    assert lines[0].startswith("fake: OSError: no route to host; the run continues")
    assert len(lines) == 2
    assert (tracker.finished > 0) == (call == "log")


def test_a_tracker_finishes_what_it_holds_after_it_refused_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """W&B keeps rows in memory, so a tracker that is ended without finishing loses the rows that it took."""
    tracker = Forgetful(refused=3)
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(5):
        sink.write(row)
    with tracker.changed:
        assert tracker.changed.wait_for(lambda: rows(5)[4] in tracker.rows, FOR_EVER)
    sink.close()
    assert tracker.kept == [row for row in rows(5) if row["step"] != 3]
    assert (sink.num_dropped, sink.num_unsure) == (1, 0)
    assert warnings(caplog)[-1] == "fake: 1 rows were not sent; metrics.jsonl has every row"


def test_rows_that_a_lost_tracker_held_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Forgetful(refused=3, finish=raising(OSError("killed")))
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(5):
        sink.write(row)
    with tracker.changed:
        assert tracker.changed.wait_for(lambda: rows(5)[4] in tracker.rows, FOR_EVER)
    sink.close()
    assert tracker.kept == rows(5)[4:]
    assert (sink.num_dropped, sink.num_unsure) == (1, 3)
    assert warnings(caplog)[-1] == held(3)


def test_a_tracker_that_is_down_for_a_while_gets_every_row_once(caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker(open=raising(OSError("down"), OSError("down")), log=raising(OSError("reset")))
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(5):
        sink.write(row)
    tracker.wait_for(5)
    sink.close()
    assert tracker.rows == rows(5)
    assert tracker.opened == 4
    assert [line for line in warnings(caplog) if "sent again" in line] == ["fake: rows are sent again"]


def test_a_row_that_is_refused_twice_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker(log=raising(ValueError("bad row"), ValueError("bad row")))
    sink = TrackerSink("fake", tracker, AT_ONCE)
    for row in rows(3):
        sink.write(row)
    tracker.wait_for(2)
    sink.close()
    assert tracker.rows == rows(3)[1:]
    assert sink.num_dropped == 1
    assert warnings(caplog)[-1] == "fake: 1 rows were not sent; metrics.jsonl has every row"


def test_a_full_queue_drops_the_oldest_rows(released: Event) -> None:
    opened = Event()

    def hang() -> None:
        opened.set()
        released.wait(FOR_EVER)

    tracker = FakeTracker(open=hang)
    sink = TrackerSink("fake", tracker, TrackerLimits(rows=4, finish_s=20.0))
    assert opened.wait(FOR_EVER)
    for row in rows(10):
        sink.write(row)
    assert sink.num_dropped == 6
    released.set()
    sink.close()
    assert tracker.rows == rows(10)[6:]


def test_closing_ends_a_pause_after_a_failure() -> None:
    opened, down = Event(), raising(OSError("down"))

    def fail_once() -> None:
        opened.set()
        down()

    tracker = FakeTracker(open=fail_once)
    sink = TrackerSink("fake", tracker, TrackerLimits(pause_s=FOR_EVER, finish_s=20.0))
    sink.write(rows(1)[0])
    assert opened.wait(FOR_EVER)  # a failure after the close ends the sink
    sink.close()
    assert tracker.rows == rows(1)


def test_an_abandoned_tracker_is_not_opened_again() -> None:
    """The call in progress fails when the tracker is abandoned, as that of a killed process does."""
    left = Event()

    def hang() -> None:
        assert left.wait(FOR_EVER)
        raise OSError("killed")

    class Killable(FakeTracker):
        def abandon(self) -> None:
            super().abandon()
            left.set()

    tracker = Killable(open=hang)
    sink = TrackerSink("fake", tracker, TrackerLimits(pause_s=0.0, longest_pause_s=0.0, finish_s=0.05, end_s=20.0))
    sink.write(rows(1)[0])
    sink.close()
    assert tracker.opened == 1


def test_the_reporter_closes_files_even_if_a_tracker_hangs(released: Event) -> None:
    closed = list[str]()

    class File:
        def write(self, row: Row, /) -> None:
            pass

        def close(self) -> None:
            closed.append("file")

    def hang() -> None:
        released.wait(FOR_EVER)

    Reporter([File(), TrackerSink("fake", FakeTracker(open=hang), SOON)]).close()
    assert closed == ["file"]

"""The sink that hands rows to a tracker, in a thread, from a bounded queue."""

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Protocol

from asyncrl.errors import first_line
from asyncrl.metrics.sinks import Row

logger = logging.getLogger(__name__)

MOST_TRIES = 2
"""Attempts to send one row, so that a row that the tracker refuses does not hold up all later rows."""


class Tracker(Protocol):
    """A service that receives rows.  Each call but ``abandon`` may block, and may raise any exception."""

    def open(self) -> str:
        """Connect, and return where the run can be seen."""

    def log(self, row: Row, /) -> None:
        """Send one row."""

    def finish(self) -> None:
        """Send what is still held back, and disconnect."""

    def abandon(self) -> None:
        """Disconnect at once, so that a call in progress in another thread fails.  Neither blocks nor raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLimits:
    """The limits of a sink."""

    rows: int = 4096
    """Rows that wait at most; a row takes about 5 kB."""
    pause_s: float = 5.0
    """Seconds before the next attempt after a failure; doubled after each further failure."""
    longest_pause_s: float = 600.0
    finish_s: float = 60.0
    """Seconds that ``close`` waits for the rows that are left."""
    end_s: float = 5.0
    """Seconds for the call in progress to fail after the tracker was abandoned."""


class TrackerSink:
    """A sink that never blocks ``write``, never raises, and closes within ``finish_s`` and ``end_s`` of its limits.

    Rows wait in a queue; if it is full, the oldest row is dropped.  A thread sends them.  After a failure, the tracker
    is opened again after a pause, for as long as the run lasts.  Failures are logged when they begin and end.

    A tracker holds rows in memory until it finishes: after a refused row it is therefore asked to finish before it is
    opened again.  Rows that it held when it was lost are counted.
    """

    def __init__(self, name: str, tracker: Tracker, limits: TrackerLimits | None = None) -> None:
        self._name = name
        self._tracker = tracker
        self._limits = limits or TrackerLimits()
        # Invariant: the fields below are read and written under this lock.  The lock is never held during a call of
        # the tracker, so that ``write`` on the event loop waits for microseconds at most.
        self._changed = Condition()
        self._rows: deque[Row] = deque()
        self._is_closing = False
        self._is_abandoned = False
        self._place: str | None = None
        self._num_dropped = 0
        self._current: Row | None = None
        self._num_tries = 0
        self._num_sent = 0
        self._num_held = 0
        self._num_unsure = 0
        # Only the thread uses this one.
        self._is_down = False
        self._thread = Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str | None:
        """The name of the tracker, and where the run can be seen; None until the tracker is open."""
        with self._changed:
            return self._place

    @property
    def num_dropped(self) -> int:
        """Rows that were not sent, and will not be."""
        with self._changed:
            return self._num_dropped

    @property
    def num_unsure(self) -> int:
        """Rows that were sent to a tracker that did not finish, and that it may have lost."""
        with self._changed:
            return self._num_unsure + self._num_held

    def write(self, row: Row, /) -> None:
        """Queue one row."""
        with self._changed:
            if len(self._rows) >= self._limits.rows:
                self._rows.popleft()
                self._num_dropped += 1
            self._rows.append(row)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait until all rows are sent, at most ``finish_s`` seconds; then abandon the tracker."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(self._limits.finish_s)
        if self._thread.is_alive():
            logger.warning("%s: not finished within %g s, and abandoned", self._name, self._limits.finish_s)
            self._abandon()
        with self._changed:
            lost = self._num_dropped + len(self._rows) + (self._current is not None)
        if lost:
            logger.warning("%s: %d rows were not sent; metrics.jsonl has every row", self._name, lost)
        if unsure := self.num_unsure:
            text = "%s: %d rows were sent to it before it was lost, and may be missing; metrics.jsonl has every row"
            logger.warning(text, self._name, unsure)

    def _abandon(self) -> None:
        """End the call in progress and the thread."""
        with self._changed:
            self._is_abandoned = True
        self._tracker.abandon()
        # The thread may just have been about to open the tracker: then the first call came too early.
        self._thread.join(self._limits.end_s)
        self._tracker.abandon()

    def _serve(self) -> None:
        pause = self._limits.pause_s
        while True:
            with self._changed:
                was_closing, sent_before = self._is_closing, self._num_sent
            try:
                self._session()
            except Exception as error:  # noqa: BLE001 (a tracker may raise anything, and must not end the run)
                self._tracker.abandon()
                self._note_failure(error)
            else:
                return
            with self._changed:
                self._num_unsure, self._num_held = self._num_unsure + self._num_held, 0
                pause = self._limits.pause_s if self._num_sent > sent_before else pause
                is_done = self._is_closing and not self._rows and self._current is None
                if was_closing or is_done or self._is_abandoned:
                    return
                self._changed.wait_for(lambda: self._is_closing, pause)
            pause = min(2 * pause, self._limits.longest_pause_s)

    def _session(self) -> None:
        """Open the tracker, send rows until ``close``, and finish.  Raises whatever the tracker raises."""
        place = f"{self._name}: {self._tracker.open()}"
        logger.info("%s", place)
        with self._changed:
            self._place = place
        try:
            self._send()
        except Exception:
            with suppress(Exception):  # the first error is reported; a failure here leaves the rows counted
                self._finish()
            raise
        self._finish()

    def _send(self) -> None:
        while (row := self._next()) is not None:
            self._tracker.log(row)
            with self._changed:
                self._current = None
                self._num_sent += 1
                self._num_held += 1
            if self._is_down:
                self._is_down = False
                logger.warning("%s: rows are sent again", self._name)

    def _finish(self) -> None:
        self._tracker.finish()
        with self._changed:
            self._num_held = 0

    def _next(self) -> Row | None:
        """Wait for a row and return it: first the one whose sending failed.  None after ``close``, without rows."""
        with self._changed:
            if self._current is not None and self._num_tries >= MOST_TRIES:
                self._current = None
                self._num_dropped += 1
            if self._current is None:
                self._changed.wait_for(lambda: self._rows or self._is_closing)
                if not self._rows:
                    return None
                self._current, self._num_tries = self._rows.popleft(), 0
            self._num_tries += 1
            return self._current

    def _note_failure(self, error: Exception) -> None:
        text = f"{self._name}: {type(error).__name__}: {first_line(error)}"
        if self._is_down or self._is_abandoned:
            logger.debug("%s", text)
            return
        self._is_down = True
        logger.warning("%s; the run continues, metrics.jsonl has every row, and sending is tried again", text)

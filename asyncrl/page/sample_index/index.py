"""The index of one run: filled in a thread, newest steps first, while views already read what is there.

request ──refresh──▶ thread: find files ──▶ load segments ──▶ read new files ──▶ save segments        ends when done
                                                  │               │
view ◀──────────────reads──────────────── DuckDB ◀┴───────────────┘

waits for     the disk, in the thread; a request waits at most ``FIRST_PATIENCE_S``
on failure    a file that cannot be read is named and skipped; without a writable folder the index is in memory only
on exit       the thread is abandoned; segments appear whole or not at all
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from itertools import batched
from pathlib import Path
from typing import Any

import duckdb

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.errors import DataError
from asyncrl.page.sample_index import segments, tables
from asyncrl.page.sample_index.segments import WIDTH, Segment
from asyncrl.page.sample_index.step_files import Found, Stamp, find, read_columns

FIRST_PATIENCE_S, PATIENCE_S = 1.0, 0.2
"""Seconds that a request waits for the thread: while the index is empty, and later."""
LOOK_S = 2.0
"""Seconds between two looks at the folder of samples."""
SAVE_S = 60.0
"""Seconds between two writes of the same segment, while a run adds steps to it."""
_SEGMENTS_AT_ONCE = 10
"""Segments that are loaded together: DuckDB takes 0.7 s for a million samples, and 2.4 s if it gets them one by one."""
_STEPS_AT_ONCE = 25
"""Steps that are added together: more take fewer insertions and more memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The steps that are in the index."""

    num_indexed: int = 0
    num_files: int = 0
    is_complete: bool = False
    """Whether all files are in the index, or the thread has ended."""
    problems: Sequence[str] = ()
    """One line for each file that was skipped."""
    in_memory: str = ""
    """Why the index is not kept on the disk; empty if it is."""


class SampleIndex:
    """The index of one run.  ``refresh`` may be called from one thread at a time, ``cursor`` from any.

    Invariant: only the thread of ``_update`` changes the database and the private fields below ``progress``; others
    read ``progress``, which is replaced as a whole.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.progress = Progress()
        self._database = tables.connect()
        self._thread: Future[None] | None = None
        self._looked_at = -LOOK_S
        self._stamps: dict[int, Stamp] = {}
        self._skipped: dict[int, tuple[Stamp, str]] = {}
        self._loaded: set[int] = set()
        self._unsaved: set[int] = set()
        self._saved_at: dict[int, float] = {}
        self._in_memory = ""
        self._is_behind = True

    def refresh(self, patience_s: float | None = None, *, last_step: int | None = None) -> Progress:
        """Index what is new, in a thread, and wait for it at most ``patience_s``; None stands for the usual.

        Steps after ``last_step`` are left out: they are of the former life of a resumed run.
        """
        if self._thread is None or (self._thread.done() and time.monotonic() - self._looked_at >= LOOK_S):
            self._thread = in_daemon_thread(lambda: self._update(last_step), "sample index")
        usual_s = PATIENCE_S if self.progress.num_indexed else FIRST_PATIENCE_S
        wait([self._thread], usual_s if patience_s is None else patience_s)
        if self._thread.done() and (error := self._thread.exception()) is not None:
            problem = f"the index is incomplete: {type(error).__name__}: {error}"
            return replace(self.progress, is_complete=True, problems=[*self.progress.problems, problem])
        return self.progress

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a connection for one request; it sees whole steps only."""
        return self._database.cursor()

    def steps(self) -> list[int]:
        """Return the steps in the index, in ascending order."""
        return sorted(self._stamps.copy())

    def _update(self, last_step: int | None) -> None:
        """Bring the index to the state of the files.  Raises OSError if the folder cannot be read."""
        self._looked_at = time.monotonic()
        found = find(self.run_dir, last_step)
        database = self._database.cursor()
        self._forget(database, found)
        self._is_behind = any(self._is_new(step, stamp) for step, stamp in found.steps.items())
        self._note(found)
        numbers = sorted({step // WIDTH for step in found.steps}, reverse=True)
        for several in batched([number for number in numbers if number not in self._loaded], _SEGMENTS_AT_ONCE):
            self._load(database, several, found)
        for number in numbers:
            self._read(database, number, found)
            self._save(database, number)
        self._is_behind = False
        self._note(found)

    def _forget(self, database: duckdb.DuckDBPyConnection, found: Found) -> None:
        """Remove steps whose file is gone or left out."""
        if gone := sorted(self._stamps.keys() - found.steps.keys()):
            tables.remove_steps(database, gone)
            for step in gone:
                del self._stamps[step]
        self._skipped = {step: skip for step, skip in self._skipped.items() if skip[0] == found.steps.get(step)}

    def _load(self, database: duckdb.DuckDBPyConnection, numbers: Sequence[int], found: Found) -> None:
        """Add the rows of segments on the disk whose files are still the same."""
        self._loaded.update(numbers)
        loaded = [segments.load(self.run_dir, number, found.steps) for number in numbers]
        usable = [segment for segment in loaded if segment is not None]
        if not usable:
            return
        versions = [version for segment in usable for version in segment.versions]
        try:
            tables.add_rows(database, tables.joined([segment.samples for segment in usable]), versions)
        except duckdb.Error:
            return  # the files were damaged in a way that Parquet does not notice; they will be replaced
        for segment in usable:
            self._stamps.update(segment.stamps)
        self._note(found)

    def _read(self, database: duckdb.DuckDBPyConnection, number: int, found: Found) -> None:
        """Add the steps of a segment that are new or were written again, the newest first."""
        new = [step for step in found.steps if step // WIDTH == number and self._is_new(step, found.steps[step])]
        for steps in batched(sorted(new, reverse=True), _STEPS_AT_ONCE):
            chunks = dict(self._chunks(steps, found))
            if chunks:
                self._add(database, chunks, found)
                self._unsaved.add(number)
            self._note(found)

    def _add(self, database: duckdb.DuckDBPyConnection, chunks: Mapping[int, Any], found: Found) -> None:
        """Add the rows of some steps, or skip these steps if DuckDB rejects what is in them."""
        stamps = {step: found.steps[step] for step in chunks}
        try:
            tables.add_steps(
                database, tables.joined(list(chunks.values())), sorted(chunks.keys() & self._stamps.keys())
            )
        except duckdb.Error as error:
            reason = str(error).partition("\n")[0]
            skipped = f"{self.run_dir}: one of the steps {min(chunks)} to {max(chunks)} cannot be read: {reason}"
            self._skipped.update({step: (stamp, skipped) for step, stamp in stamps.items()})
        else:
            self._stamps.update(stamps)

    def _is_new(self, step: int, stamp: Stamp) -> bool:
        skipped = self._skipped.get(step)
        return self._stamps.get(step) != stamp and (skipped is None or skipped[0] != stamp)

    def _chunks(self, steps: Iterable[int], found: Found) -> Iterator[tuple[int, Any]]:
        """Yield the columns of each file that can be read."""
        for step in steps:
            try:
                yield step, read_columns(self.run_dir, step, tables.SOURCE_COLUMNS)
            except DataError as error:
                self._skipped[step] = (found.steps[step], str(error))

    def _save(self, database: duckdb.DuckDBPyConnection, number: int) -> None:
        """Write a segment that has new rows, unless it was written a short time ago."""
        is_recent = time.monotonic() - self._saved_at.get(number, -SAVE_S) < SAVE_S
        if number not in self._unsaved or is_recent or self._in_memory:
            return
        first, last = number * WIDTH, (number + 1) * WIDTH - 1
        samples, versions = tables.rows_between(database, first, last)
        stamps = {step: stamp for step, stamp in self._stamps.items() if first <= step <= last}
        try:
            segments.save(self.run_dir, Segment(number=number, stamps=stamps, samples=samples, versions=versions))
        except BlockingIOError:
            return  # another page of this run writes now; this segment is tried again later
        except OSError as error:
            self._in_memory = str(error)
            return
        self._unsaved.discard(number)
        self._saved_at[number] = time.monotonic()

    def _note(self, found: Found) -> None:
        foreign = [f"{name} is no file of a step" for name in found.foreign]
        self.progress = Progress(
            num_indexed=len(self._stamps),
            num_files=len(found.steps) - len(self._skipped),
            is_complete=not self._is_behind,
            problems=[*sorted({text for _, text in self._skipped.values()}), *foreign],
            in_memory=self._in_memory,
        )

"""The timeline of a run: a Chrome trace that ui.perfetto.dev and chrome://tracing open.

Times are the event loop's, in seconds.  The track ``trainer`` shows training, waiting for a batch and saving;
``engines`` shows pauses and weight updates; ``evaluation`` shows its passes.  Below them are counters and one lane per
slot with its samples.  A span costs about 3 microseconds; several hundred of them share one write of 64 KiB.

A long run has several files, its parts: ``timeline.json``, ``timeline.part2.json`` and so on, each of which opens in a
viewer.  The first part and the newest ones stay, parts between them are removed.  A full disk raises nothing.
"""

import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import orjson

from asyncrl.metrics.appended_file import AppendedFile

type Track = Literal["trainer", "engines", "evaluation"]

TIMELINE_FILE = "timeline.json"

PART_BYTES = 256 * 1024 * 1024
"""Size of a part: as much as viewers open in seconds, some two million samples."""
MOST_PARTS = 16
"""Parts that stay, the first and the newest: 4 GiB."""

TRACKS: dict[str, int] = {"trainer": 1, "engines": 2, "evaluation": 3}
"""Process id of each track; Perfetto shows them in this order."""
SAMPLES = 4
"""Process id of the samples and the counters."""
_BATCH_BYTES = 64 * 1024
"""Most bytes kept in memory: some 400 samples, few enough to lose and to write at once (about 30 microseconds)."""
_MOST_WAITING_BYTES = 4 * _BATCH_BYTES
"""Most bytes kept while the disk refuses them; further events are lost."""
_BATCH_S = 2.0
"""Seconds after which a finished event is written, provided that another event follows."""


class Timeline(Protocol):
    """A record of events in any order.  Spans of one track, and samples of one slot, nest or do not overlap."""

    def span(self, track: Track, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Record an activity of a track; the viewer shows ``args`` when it is clicked."""

    def sample(self, slot: int, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Record that a sample held ``slot``."""

    def counter(self, name: str, at_s: float, value: float) -> None:
        """Record that ``name`` has ``value`` from ``at_s`` on."""

    def close(self) -> None:
        """Finish; nothing may be recorded afterwards."""


class NoTimeline:
    """A timeline that records nothing."""

    def span(self, track: Track, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Do nothing."""

    def sample(self, slot: int, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Do nothing."""

    def counter(self, name: str, at_s: float, value: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TimelineFile:
    """A timeline written to ``run_dir/timeline.json`` and further parts while the run continues.

    Without ``close`` only the final bracket is missing, which both viewers accept.  A resumed run leaves existing files
    alone and writes ``timeline-2.json``.  Memory stays below a few batches of events, and files below ``most_parts``
    times ``part_bytes``, however long the run.
    """

    def __init__(
        self, run_dir: Path, origin_s: float, *, part_bytes: int = PART_BYTES, most_parts: int = MOST_PARTS
    ) -> None:
        """``origin_s`` is the loop time to be shown as 0.  ``most_parts`` is at least 2."""
        self._path = _unused(run_dir / TIMELINE_FILE)
        self._origin_s = origin_s
        self._part_bytes = part_bytes
        self._most_parts = most_parts
        # Invariant: only the event loop's thread records, so no lock is needed.
        self._waiting = bytearray()
        self._written_s = origin_s
        self._part = 1
        self._open_part()

    def span(self, track: Track, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Record an activity of a track; the viewer shows ``args`` when it is clicked."""
        self._add(TRACKS[track], 1, name, start_s, stop_s, args)

    def sample(self, slot: int, name: str, start_s: float, stop_s: float, **args: Any) -> None:
        """Record that a sample held ``slot``."""
        lane = slot + 1  # viewers take thread 0 for the process itself
        if slot not in self._slots:
            self._slots.add(slot)
            self._name("thread_name", SAMPLES, lane, name=f"slot {slot}")
            self._name("thread_sort_index", SAMPLES, lane, sort_index=slot)
        self._add(SAMPLES, lane, name, start_s, stop_s, args)

    def counter(self, name: str, at_s: float, value: float) -> None:
        """Record that ``name`` has ``value`` from ``at_s`` on."""
        event = {"ph": "C", "name": name, "pid": SAMPLES, "ts": self._microseconds(at_s), "args": {"value": value}}
        self._put(event, at_s)

    def close(self) -> None:
        """Write the events in memory and the final bracket.  May be called again."""
        if not self._file.closed:
            self._close_part()

    def _open_part(self) -> None:
        """Begin a part with the names of its tracks."""
        self._file = AppendedFile(part_of(self._path, self._part), most_waiting=_MOST_WAITING_BYTES)
        self._separator = b"[\n"
        self._slots: set[int] = set()
        for order, (track, process) in enumerate([*TRACKS.items(), ("samples in flight", SAMPLES)]):
            self._name("process_name", process, 0, name=track)
            self._name("process_sort_index", process, 0, sort_index=order)
            if process != SAMPLES:
                self._name("thread_name", process, 1, name=track)
        self._file.write(self._waiting)
        self._waiting.clear()

    def _close_part(self) -> None:
        self._file.write(self._waiting + b"\n]\n")
        self._waiting.clear()
        self._file.close()

    def _next_part(self) -> None:
        """Begin the next part, and remove the second-oldest one if there are too many."""
        self._close_part()
        self._part += 1
        outdated = self._part - self._most_parts + 1
        if outdated > 1:
            with suppress(OSError):
                part_of(self._path, outdated).unlink()
        self._open_part()

    def _add(self, process: int, lane: int, name: str, start_s: float, stop_s: float, args: dict[str, Any]) -> None:
        start = self._microseconds(start_s)
        duration = self._microseconds(stop_s) - start
        event = {"ph": "X", "name": name, "pid": process, "tid": lane, "ts": start, "dur": duration, "args": args}
        self._put(event, stop_s)

    def _name(self, what: str, process: int, lane: int, **args: Any) -> None:
        self._put({"ph": "M", "name": what, "pid": process, "tid": lane, "args": args}, self._written_s)

    def _microseconds(self, at_s: float) -> int:
        # Both ends of a span are rounded, never its duration, so that neighbours still touch and never overlap.
        return round((at_s - self._origin_s) * 1e6)

    def _put(self, event: dict[str, Any], at_s: float) -> None:
        self._waiting += self._separator
        self._waiting += orjson.dumps(event)
        self._separator = b",\n"
        if len(self._waiting) >= _BATCH_BYTES or at_s - self._written_s >= _BATCH_S:
            self._written_s = at_s
            self._write()

    def _write(self) -> None:
        self._file.write(self._waiting)
        self._waiting.clear()
        if self._file.size >= self._part_bytes:
            self._next_part()


def part_of(path: Path, number: int) -> Path:
    """Return the file of one part of the timeline ``path``, counted from 1."""
    return path if number == 1 else path.with_stem(f"{path.stem}.part{number}")


def parts_of(path: Path) -> list[Path]:
    """Return the files of all parts of the timeline ``path``, in order; parts in between may have been removed."""
    numbers = [int(found.stem.rpartition(".part")[2]) for found in path.parent.glob(f"{path.stem}.part*{path.suffix}")]
    return [part_of(path, number) for number in range(1, max(numbers, default=1) + 1)]


def _unused(path: Path) -> Path:
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())

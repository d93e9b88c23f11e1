"""A timeline as compact arrays, read on by a daemon thread.

request ──refresh──▶ thread: bytes appended since the last time ──▶ arrays ──snapshot──▶ request

waits for     the disk, in the thread only; ``refresh`` waits for the thread as long as its caller wants
on failure    the sentence of the error is shown; the next refresh tries again
on exit       the thread is left alone: it changes no file
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.metrics.timeline import SAMPLES, parts_of
from asyncrl.page.spans.activities import TRAINS, UPDATE, activity_of
from asyncrl.page.spans.blocks import Block, new_blocks, spans_in
from asyncrl.page.spans.columns import Array, Columns
from asyncrl.page.spans.summing import Tiling, engine_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The part of the files that was read."""

    read_bytes: int
    total_bytes: int
    is_reading: bool
    num_removed: int
    """Parts that the run removed because the timeline became too long."""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The spans that were read by some moment.  Times are seconds of the timeline."""

    spans: Mapping[str, Array]
    """Activities of the tracks: ``start``, ``stop``, ``kind``."""
    texts: Sequence[tuple[str, Mapping[str, Any]]]
    """Name and arguments of each of ``spans``; may have further entries."""
    samples: Mapping[str, Array]
    """``start``, ``stop``, ``kind`` and ``slot``."""

    @cached_property
    def first_s(self) -> float:
        """The beginning of the first span."""
        return min((float(each["start"].min()) for each in (self.spans, self.samples) if len(each["start"])), default=0)

    @cached_property
    def last_s(self) -> float:
        """The end of the last span."""
        return max((float(each["stop"].max()) for each in (self.spans, self.samples) if len(each["stop"])), default=0)

    @cached_property
    def steps(self) -> dict[int, tuple[float, float]]:
        """Beginning and end of each training step; a resumed run repeats steps in another file."""
        places = np.flatnonzero(self.spans["kind"] == TRAINS)
        starts, stops = self.spans["start"][places].tolist(), self.spans["stop"][places].tolist()
        numbers = [int(self.texts[place][0].removeprefix("step ")) for place in places]
        return dict(zip(numbers, zip(starts, stops, strict=True), strict=True))

    @cached_property
    def engines(self) -> Tiling:
        """The state of the engines at each time."""
        updates = self.spans["kind"] == UPDATE
        return engine_states(
            (self.samples["start"], self.samples["stop"]),
            (self.spans["start"][updates], self.spans["stop"][updates]),
        )


@dataclass(slots=True)
class _Store:
    """Everything that was read from one set of files."""

    spans: Columns = field(default_factory=lambda: Columns(start="f8", stop="f8", kind="u1"))
    texts: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    samples: Columns = field(default_factory=lambda: Columns(start="f8", stop="f8", kind="u1", slot="i4"))
    blocks: list[Block] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """The first sample of each block."""
    offsets: dict[Path, int] = field(default_factory=dict)
    inode: int = 0


class Recording:
    """The timeline of one run: its file and further parts.  Any thread may call any method."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        # Invariant: only the reading thread changes the store, and it holds the lock while it does.
        self._store = _Store()
        self._reading: Future[None] | None = None
        self._problem = ""
        self._last: Snapshot | None = None

    def refresh(self, patience_s: float) -> None:
        """Read on in the background, and wait for that, at most ``patience_s``."""
        with self._lock:
            if self._reading is None or self._reading.done():
                self._reading = in_daemon_thread(self._read, "timeline")
            reading = self._reading
        try:
            reading.result(timeout=patience_s)
            self._problem = ""
        except TimeoutError:
            return
        except OSError as error:
            self._problem = f"{error.filename}: {error.strerror}"

    def progress(self) -> Progress:
        """Return how far the files were read."""
        parts = parts_of(self._path)
        sizes = [_size(part) for part in parts]
        with self._lock:
            read = sum(self._store.offsets.get(part, 0) for part in parts if part.exists())
            is_reading = self._reading is not None and not self._reading.done()
        return Progress(
            read_bytes=read,
            total_bytes=sum(size or 0 for size in sizes),
            is_reading=is_reading,
            num_removed=sum(size is None for size in sizes[1:]),
            problem=self._problem,
        )

    def snapshot(self) -> Snapshot:
        """Return what was read so far; the same object until there is more."""
        with self._lock:
            spans, samples = self._store.spans.view(), self._store.samples.view()
            last = self._last
            if last is None or len(last.texts) > len(self._store.texts) or _differs(last, spans, samples):
                last = self._last = Snapshot(spans=spans, samples=samples, texts=self._store.texts)
            return last

    def events_of(self, places: Array) -> list[dict[str, Any]]:
        """Read samples again, in order: name and arguments, which are not kept.  Empty ones were removed."""
        with self._lock:
            blocks, firsts = list(self._store.blocks), np.array(self._store.firsts, dtype=np.int64)
        of_block = np.searchsorted(firsts, places, "right") - 1
        samples: dict[int, list[dict[str, Any]]] = {}
        for number in np.unique(of_block).tolist():
            samples[number] = _samples_of(blocks[number])
        wanted = zip(of_block.tolist(), (places - firsts[of_block]).tolist(), strict=True)
        return [samples[number][place] if place < len(samples[number]) else {} for number, place in wanted]

    def _read(self) -> None:
        self._begin_again_if_replaced()
        for part in parts_of(self._path):
            if _size(part) is None:
                continue
            for block, data in new_blocks(part, self._store.offsets.get(part, 0)):
                self._add(block, spans_in(data))

    def _begin_again_if_replaced(self) -> None:
        """Forget what was read if the first file is another one by now, or shorter."""
        found = self._path.stat()
        if found.st_ino != self._store.inode or found.st_size < self._store.offsets.get(self._path, 0):
            with self._lock:
                self._store = _Store(inode=found.st_ino)

    def _add(self, block: Block, events: list[dict[str, Any]]) -> None:
        samples = [event for event in events if event["pid"] == SAMPLES]
        tracks = [event for event in events if event["pid"] != SAMPLES]
        # Whatever may fail comes before the first change of the store, or the next refresh would add the block again.
        of_samples = _columns_of(samples) | {"slot": [event["tid"] - 1 for event in samples]}
        of_tracks, texts = _columns_of(tracks), [(event["name"], event["args"]) for event in tracks]
        with self._lock:
            store = self._store
            store.blocks.append(block)
            store.firsts.append(len(store.samples))
            store.samples.append(of_samples, len(samples))
            store.texts += texts
            store.spans.append(of_tracks, len(tracks))
            store.offsets[block.path] = block.offset + block.size


def timelines_in(run_dir: Path) -> list[Path]:
    """Return the timelines of a run directory, the newest first: each resumption of a run wrote another one."""
    found = {path: path.stem.removeprefix("timeline").removeprefix("-") for path in run_dir.glob("timeline*.json")}
    numbers = {path: int(number or 1) for path, number in found.items() if number.isdecimal() or not number}
    return sorted(numbers, key=lambda path: -numbers[path])


def _columns_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    starts = np.array([event["ts"] for event in events], dtype=np.float64)
    return {
        "start": starts / 1e6,
        "stop": (starts + np.array([event["dur"] for event in events], dtype=np.float64)) / 1e6,
        "kind": [activity_of(event) for event in events],
    }


def _samples_of(block: Block) -> list[dict[str, Any]]:
    try:
        return [event for event in spans_in(block.read()) if event["pid"] == SAMPLES]
    except OSError:
        return []


def _differs(last: Snapshot, spans: Mapping[str, Array], samples: Mapping[str, Array]) -> bool:
    return len(last.spans["start"]) != len(spans["start"]) or len(last.samples["start"]) != len(samples["start"])


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None

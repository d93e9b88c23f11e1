"""The segments of a journal and the counts of their records, one line each."""

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.buffer.journal.frames import Kind
from asyncrl.buffer.journal.reader import OpenSegment, opened
from asyncrl.buffer.journal.segments import segments
from asyncrl.errors import DataError


def folder_of(given: Path) -> Path:
    """Return the folder of a run's journal.  Raises DataError if there is none.

    ``given`` is that folder, the folder of ``--save`` around it, or a run directory, whose settings name the latter.
    """
    saves = list(_saves(given))
    for folder in (given / _FOLDER, given, *(save / _FOLDER for save in saves)):
        if folder.is_dir() and segments(folder):
            return folder
    if saves:
        raise DataError(f"{given} has no journal, nor has the folder of --save in its settings: {saves[0]}")
    raise DataError(f"{given} has no journal; it is in the folder of --save: give that folder")


_FOLDER = "journal"
"""The journal's folder, in that of the checkpoints."""


def _saves(run_dir: Path) -> Iterator[Path]:
    """Yield the folders of ``--save`` in the settings of a run directory, the newest settings first."""
    for file in sorted(run_dir.glob("*.toml"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            save = tomllib.loads(file.read_text(encoding="utf-8")).get("save")
        except ValueError:
            continue  # not the settings of a run
        if isinstance(save, str):
            yield run_dir / save


def listing(folder: Path) -> Iterator[str]:
    """Yield a line for each segment, with every checksum verified, and one for all.  Raises JournalDamaged."""
    found = opened(folder)
    total: Counter[Kind] = Counter()
    num_bytes = 0
    for segment in found:
        counts = Counter(frame.kind for frame in segment.frames())
        total += counts
        num_bytes += len(segment.data)
        yield f"{segment.segment.path.name}  {_mb(len(segment.data))}  {_origin(segment)}: {in_words(counts)}"
    yield f"{len(found)} segments  {_mb(num_bytes)}: {in_words(total)}"
    yield "every checksum is right"


def in_words(counts: Counter[Kind]) -> str:
    """Return the counts of the kinds that occur."""
    found = (f"{counts[kind]:,} {kind.name.lower().replace('_', ' ')}" for kind in Kind if counts[kind])
    return ", ".join(found) or "no records"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first column is flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        yield "  ".join((first.ljust(widths[0]), *cells)).rstrip()


def _origin(segment: OpenSegment) -> str:
    snapshot = segment.snapshot()
    run = f"run {segment.header.run_epoch}"
    return run if snapshot is None else f"{run}, snapshot of step {snapshot.step}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"

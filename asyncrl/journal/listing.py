"""The segments of a journal and the counts of their records, one line each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.buffer.journal.frames import Kind
from asyncrl.buffer.journal.reader import OpenSegment, opened
from asyncrl.buffer.journal.segments import segments
from asyncrl.errors import DataError


def folder_of(run_dir: Path) -> Path:
    """Return the folder of a run's journal, which may be given itself.  Raises DataError if there is none."""
    for folder in (run_dir / "journal", run_dir):
        if folder.is_dir() and segments(folder):
            return folder
    raise DataError(f"{run_dir} has no journal: neither it nor its folder journal has a file segment-NUMBER.journal")


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

"""The index on the disk: Parquet files of many steps in the run directory, so that it is made once."""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from asyncrl.page.sample_index.step_files import Stamp
from asyncrl.page.sample_index.tables import SAMPLE_COLUMNS, Version
from asyncrl.rollout_log.whole_file import write_whole

FOLDER = "page"
"""Folder in the run directory."""
FORMAT = 1
"""Segments of another format are ignored and replaced."""
WIDTH = 200
"""Steps of a segment: 10,000 steps are 50 files, and a live run writes the samples of 200 steps again at most."""
_KEY = b"asyncrl"
"""Key of our entry in the metadata of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The rows of the index for the steps ``number * WIDTH`` to ``(number + 1) * WIDTH - 1``."""

    number: int
    stamps: Mapping[int, Stamp]
    """The files of which the rows were made."""
    samples: Any
    """Pyarrow's table."""
    versions: Sequence[Version]


def load(run_dir: Path, number: int, now: Mapping[int, Stamp]) -> Segment | None:
    """Return the part of a segment whose files are as they are ``now``; None if there is none that can be used."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        table = pq.read_table(_path(run_dir, number))
        entry = orjson.loads(table.schema.metadata[_KEY])
        if entry["format"] != FORMAT or table.column_names != list(SAMPLE_COLUMNS):
            return None
        stamps = {step: Stamp(size, mtime_ns) for step, size, mtime_ns in entry["stamps"]}
        versions = [(step, version, lag, tokens) for step, version, lag, tokens in entry["versions"]]
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):
        return None
    segment = Segment(number=number, stamps=stamps, samples=table.replace_schema_metadata(None), versions=versions)
    same = {step: stamp for step, stamp in stamps.items() if stamp == now.get(step)}
    return segment if len(same) == len(stamps) else _only(segment, same)


def save(run_dir: Path, segment: Segment) -> None:
    """Write a segment.  Raises OSError, and BlockingIOError if another page writes at the same moment."""
    import pyarrow.parquet as pq

    stamps = [(step, stamp.size, stamp.mtime_ns) for step, stamp in segment.stamps.items()]
    entry = {"format": FORMAT, "stamps": stamps, "versions": segment.versions}
    table = segment.samples.replace_schema_metadata({_KEY: orjson.dumps(entry)})
    path = _path(run_dir, segment.number)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with alone(path.parent):
        write_whole(path, lambda partial: pq.write_table(table, partial, compression="zstd"))


def _only(segment: Segment, stamps: Mapping[int, Stamp]) -> Segment:
    """Return the part of a segment that was made of some of its files."""
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    kept = pc.is_in(segment.samples["step"], pa.array(list(stamps), pa.int32()))
    versions = [version for version in segment.versions if version[0] in stamps]
    return replace(segment, stamps=stamps, samples=segment.samples.filter(kept), versions=versions)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other pages of the same run from writing: two would write the same unfinished file."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / FOLDER / f"samples-{number * WIDTH:06d}.parquet"

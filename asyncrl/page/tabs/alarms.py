"""The alarms of a run, from its files: the rows of all steps, and the samples of the newest ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.alarms.alarm import Alarm
from asyncrl.alarms.texts import MOST_ANSWERS, Answer, text_numbers
from asyncrl.alarms.watch import Watch
from asyncrl.page.runs.run_files import RunFiles
from asyncrl.page.runs.run_status import State

PART = "alarms"
"""The name of what is kept between two looks at a run."""
MOST_AT_ONCE = 1_000
"""Steps that are watched in 20 ms."""
NEWEST = 4
"""Steps whose samples are read when a run is first looked at; a file takes some 10 ms."""


@dataclass(slots=True)
class _Watched:
    """The watch of a run, and how far it has come."""

    watch: Watch
    num_replaced: int
    """Rows that a resumed run had replaced when the watch began."""
    num_steps: int = 0


def is_watched(run: RunFiles) -> bool:
    """Whether ``alarms_of`` takes no longer than a moment."""
    return PART in run.parts or len(run.rows.steps()) <= MOST_AT_ONCE


def alarms_of(run: RunFiles) -> Sequence[Alarm]:
    """Return the alarms of a run, the oldest first.

    Reads the samples of at most the ``NEWEST`` steps, and nothing twice.
    """
    from asyncrl.rollout_log.files import file_of  # imports numpy

    watched = run.parts.get(PART)
    if not isinstance(watched, _Watched) or watched.num_replaced != run.rows.num_replaced:
        watch = Watch(update_interval=_update_interval(run))
        watched = run.parts[PART] = _Watched(watch=watch, num_replaced=run.rows.num_replaced)
    steps = run.rows.steps()
    new = steps[watched.num_steps :]
    if new and run.state is State.RUNNING and not file_of(run.path, new[-1]).exists():
        new.pop()  # its file may come in a moment
    names = [name for name in run.rows.names() if watched.watch.is_read(name)]
    for step in new:
        texts = _texts(file_of(run.path, step)) if step in steps[-NEWEST:] else {}
        watched.watch.add(step, {**{name: run.rows.number(name, step) for name in names}, **texts})
    watched.num_steps += len(new)
    return watched.watch.alarms


def _update_interval(run: RunFiles) -> int:
    """Return the run's steps between two weight updates; 1 if its settings do not tell."""
    found = run.settings().get("update-weights-interval")
    return found if isinstance(found, int) else 1


def numbers_of(run: RunFiles, step: int) -> Mapping[str, float]:
    """Return the row of a step with the numbers of its texts, as far as there are any."""
    from asyncrl.rollout_log.files import file_of

    return {**run.rows.at(step), **_texts(file_of(run.path, step))}


def _texts(path: Path) -> Mapping[str, float]:
    """Return the numbers of the texts of one step; empty if there is no file that can be read."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        with pq.ParquetFile(path) as file:
            rows: Sequence[dict[str, Any]] = next(
                file.iter_batches(MOST_ANSWERS, columns=["group_id", "response"])
            ).to_pylist()
    except (OSError, StopIteration, pa.ArrowException):
        return {}
    return text_numbers(Answer(row["group_id"], row["response"]) for row in rows)

"""The newest steps of a run, in the form that the calibration reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import orjson

from asyncrl.errors import DataError
from asyncrl.metrics.timeline import parts_of
from asyncrl.page.spans.blocks import Block, new_blocks, spans_in
from asyncrl.sim.calibration.calibrate import SKIPPED_STEPS
from asyncrl.sim.calibration.measured import MeasuredRun, MeasuredSample, MeasuredStep, Recorded, recorded

MOST_STEPS = 40
"""Steps of the stretch: as many as a calibration needs, and seconds to replay."""
LEAST_STEPS = 8
_TAIL_BYTES = 64 * 1024 * 1024
"""Bytes of the timeline that are read, from its end: some 400,000 samples."""
_PROMPT_FILES = 4
_PROMPT_TOKENS = 256
_OTHER_SAMPLES = {
    "custom-generate-function-path": "episodes of a user function",
    "agent-command": "episodes of an agent",
    "colocate": "trainer and engines on the same GPUs",
}
"""Flags of runs that the simulator does not model."""


def stretch_of(timeline: Path, settings: Mapping[str, Any]) -> MeasuredRun:
    """Return the newest steps of the run that wrote ``timeline``, counted from 0.  Raises DataError."""
    for flag, what in _OTHER_SAMPLES.items():
        if settings.get(flag):
            raise DataError(f"the simulator does not model {what} (--{flag})")
    whole = recorded(list(_spans(timeline)))
    rows = _rows(timeline.parent / "metrics.jsonl")
    steps = [step for step in whole.steps if step.step in rows][-MOST_STEPS:]
    least = LEAST_STEPS + int(settings.get("max-staleness", settings.get("update-weights-interval", 1)))
    if len(steps) < least:
        raise DataError(f"the run has {len(steps)} finished steps in its timeline, at least {least} are needed")
    return _cut(whole, steps, rows, dict(settings))


def prompt_tokens_of(run_dir: Path) -> tuple[int, bool]:
    """Return the mean number of tokens of a prompt, and whether it was measured."""
    files = sorted((run_dir / "rollouts").glob("step-*.parquet"))[-_PROMPT_FILES:]
    if not files:
        return _PROMPT_TOKENS, False
    query = "select avg(len(prompt_tokens)) from read_parquet(?)"
    try:
        found = duckdb.execute(query, [[str(file) for file in files]]).fetchone()
    except duckdb.Error:
        return _PROMPT_TOKENS, False
    return (max(1, round(found[0])), True) if found and found[0] else (_PROMPT_TOKENS, False)


def _spans(timeline: Path) -> Iterator[dict[str, Any]]:
    """Yield the spans at the end of a timeline.  Raises DataError."""
    try:
        parts = [part for part in parts_of(timeline) if part.exists()]
        skipped = max(0, sum(part.stat().st_size for part in parts) - _TAIL_BYTES)
        for part in parts:
            size = part.stat().st_size
            for _, data in _blocks(part, min(skipped, size)):
                yield from spans_in(data)
            skipped = max(0, skipped - size)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}") from error


def _blocks(part: Path, offset: int) -> Iterator[tuple[Block, bytes]]:
    return new_blocks(part, offset) if offset < part.stat().st_size else iter(())


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """Return the newest row of each step."""
    found = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if "time/step_s" in row:
            found[int(row["step"])] = row
    return found


def _cut(
    whole: Recorded, steps: Sequence[MeasuredStep], rows: Mapping[int, dict[str, Any]], settings: dict[str, Any]
) -> MeasuredRun:
    """Return a run of ``steps`` alone: times, steps and groups are counted from its beginning."""
    first = steps[0].step
    before = [step.stop_s for step in whole.steps if step.step == first - 1]
    start = before[-1] if before else min(sample.start_s for sample in whole.samples)
    stop = steps[-1].stop_s
    samples = [sample for sample in whole.samples if sample.stop_s > start and sample.start_s < stop]
    group = _first_group(samples, start)
    updates = [(each.start_s - start, each.stop_s - start) for each in whole.updates if start < each.stop_s <= stop]
    return MeasuredRun(
        samples=tuple(_moved(sample, start, group) for sample in samples),
        steps=tuple(
            replace(step, step=number, start_s=step.start_s - start, stop_s=step.stop_s - start)
            for number, step in enumerate(steps)
        ),
        updates=tuple(updates),
        rows=tuple(rows[step.step] | {"step": number} for number, step in enumerate(steps)),
        config=settings,
    )


def _first_group(samples: Sequence[MeasuredSample], start: float) -> int:
    """Return the first group that began after ``start``."""
    older = [sample.group for sample in samples if sample.group is not None and sample.start_s < start]
    return max(older, default=min((each.group for each in samples if each.group is not None), default=0) - 1) + 1


def _moved(sample: MeasuredSample, start: float, group: int) -> MeasuredSample:
    """Return a sample in the times and numbers of the stretch; groups that began earlier are below 0."""
    number = None if sample.group is None else sample.group - group
    return replace(sample, group=number, start_s=sample.start_s - start, stop_s=sample.stop_s - start)


def lengths_of(run: MeasuredRun) -> list[int]:
    """Return the lengths of the answers, sorted."""
    return sorted(run.lengths.values())


def acceptance_of(run: MeasuredRun) -> float:
    """Return the share of the groups that the filter kept."""
    shares: list[float] = [row.get("filter/acceptance", 1.0) for row in run.rows[SKIPPED_STEPS:]]
    return min(1.0, max(0.01, sum(shares) / len(shares)))

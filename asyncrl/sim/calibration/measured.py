"""The record of a real run, as far as a model needs it: settings, samples, steps and updates."""

import lzma
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from asyncrl.errors import DataError
from asyncrl.metrics.sinks import METRICS_FILE
from asyncrl.metrics.timeline import TIMELINE_FILE, parts_of

_SAMPLE = re.compile(r"g(\d+)(?:~\d+)?\.(\d+)")
"""The name of a training sample's span; held-out samples have other names."""
_STEP = re.compile(r"step (\d+)")
_UPDATE = re.compile(r"update to version (\d+)")
_SAME_S = 0.01
"""Most seconds between two clocks that read the same step; the event loop's resolution is milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSample:
    """One answer, in seconds of the timeline."""

    group: int | None
    """The group's number; None for held-out prompts."""
    index: int
    start_s: float
    stop_s: float
    tokens: int
    version: int
    """Version of the weights under which it was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One training step."""

    step: int
    start_s: float
    stop_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUpdate:
    """One weight update, from the pause of the first engine to the end."""

    version: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A timeline that was read, of one run or of several in sequence; each list is ordered by end time."""

    samples: tuple[MeasuredSample, ...]
    steps: tuple[MeasuredStep, ...]
    updates: tuple[MeasuredUpdate, ...]
    taken: tuple[tuple[float, float], ...]
    """Seconds from and to, while the trainer waited for the snapshot of its weights."""

    def run(self, first_version: int, train_s: Sequence[float]) -> "Recorded":
        """The run whose steps took ``train_s`` to train, the first of which made ``first_version``.

        Versions count on from run to run, but a new deployment starts again.  Raises DataError if there is no such run.
        """
        size, versions = len(train_s), list(range(first_version, first_version + len(train_s)))
        for place in range(len(self.updates) - size + 1):
            updates = self.updates[place : place + size]
            steps = tuple(step for step in self.steps if step.stop_s <= updates[-1].start_s)[-size:]
            took = [step.stop_s - step.start_s for step in steps]
            made = [update.version for update in updates]
            if made == versions and len(took) == size and np.allclose(took, train_s, rtol=0.0, atol=_SAME_S):
                start_s = self.updates[place - 1].stop_s if place else 0.0
                return self._between(start_s, updates, steps)
        raise DataError(f"the timeline has no run of {size} steps that starts with version {first_version}")

    def _between(
        self, start_s: float, updates: tuple[MeasuredUpdate, ...], steps: tuple[MeasuredStep, ...]
    ) -> "Recorded":
        """The part between ``start_s`` and the last update.  Samples start under the version before the first one."""
        oldest = updates[0].version - 1
        samples = tuple(
            each
            for each in self.samples
            if start_s <= each.start_s <= updates[-1].stop_s and oldest <= each.version <= updates[-1].version
        )
        return replace(self, samples=samples, steps=steps, updates=updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run directory that was read."""

    samples: tuple[MeasuredSample, ...]
    steps: tuple[MeasuredStep, ...]
    updates: tuple[tuple[float, float], ...]
    """Seconds from and to."""
    rows: tuple[dict[str, Any], ...]
    """Rows of ``metrics.jsonl``."""
    config: dict[str, Any]
    """Flags of the resolved configuration."""

    @property
    def lengths(self) -> dict[tuple[int, int], int]:
        """Tokens of each answer, by group and index."""
        return {(sample.group, sample.index): sample.tokens for sample in self.samples if sample.group is not None}


def read_run(run_dir: Path) -> MeasuredRun:
    """Read a run directory.  Raises DataError, which names the file that is missing or invalid."""
    recorded = read_timeline(run_dir / TIMELINE_FILE)
    return MeasuredRun(
        samples=recorded.samples,
        steps=recorded.steps,
        updates=tuple((update.start_s, update.stop_s) for update in recorded.updates),
        rows=tuple(orjson.loads(line) for line in _lines(run_dir / METRICS_FILE)),
        config=_config(run_dir),
    )


def read_timeline(path: Path) -> Recorded:
    """Read a timeline with all its parts, compressed (.xz) or not.  Raises DataError, also if a part was removed."""
    parts = parts_of(path)
    if (missing := len(parts) - sum(part.exists() for part in parts)) and path.exists():
        raise DataError(f"{path}: {missing} of its {len(parts)} parts were removed during the run; use a shorter run")
    return recorded([event for part in parts for event in _timeline(part) if event["ph"] == "X"])


def recorded(spans: Sequence[dict[str, Any]]) -> Recorded:
    """Sort the spans of a timeline by what they are."""
    return Recorded(
        samples=tuple(_sample(event) for event in spans if "finish" in event["args"]),
        steps=tuple(_step(event) for event in spans if _STEP.fullmatch(event["name"])),
        updates=tuple(_update(event, name) for event in spans if (name := _UPDATE.fullmatch(event["name"]))),
        taken=tuple(_ends(event) for event in spans if event["name"] == "weights taken"),
    )


def _timeline(path: Path) -> list[dict[str, Any]]:
    text = "\n".join(_lines(path)).rstrip().rstrip(",")
    text = text if text.endswith("]") else text + "]"  # a run that was killed leaves the bracket open
    try:
        events: list[dict[str, Any]] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: {error}") from error
    return events


def _lines(path: Path) -> list[str]:
    try:
        text = lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
    except lzma.LZMAError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; is this the directory of a run with --timeline?") from error
    return text.splitlines()


def _config(run_dir: Path) -> dict[str, Any]:
    files = sorted(run_dir.glob("*.toml"))
    if len(files) != 1:
        raise DataError(f"{run_dir}: {len(files)} TOML files, needs exactly one: the resolved configuration")
    return tomllib.loads(files[0].read_text())


def _ends(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _sample(event: dict[str, Any]) -> MeasuredSample:
    start, stop = _ends(event)
    name = _SAMPLE.match(event["name"])
    return MeasuredSample(
        group=int(name[1]) if name else None,
        index=int(name[2]) if name else 0,
        start_s=start,
        stop_s=stop,
        tokens=event["args"]["tokens"],
        version=event["args"]["version"],
    )


def _update(event: dict[str, Any], name: re.Match[str]) -> MeasuredUpdate:
    start, stop = _ends(event)
    return MeasuredUpdate(version=int(name[1]), start_s=start, stop_s=stop)


def _step(event: dict[str, Any]) -> MeasuredStep:
    start, stop = _ends(event)
    return MeasuredStep(step=int(event["name"].split()[1]), start_s=start, stop_s=stop, tokens=event["args"]["tokens"])

"""What a real run left behind, as far as a model of it needs: its settings, samples, steps and updates."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import DataError
from asyncrl.metrics.timeline import TIMELINE_FILE

_SAMPLE = re.compile(r"g(\d+)(?:~\d+)?\.(\d+)")
"""Of training; held-out samples have other names."""
_STEP = re.compile(r"step (\d+)")
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSample:
    """One answer, in seconds of the timeline."""

    group: int | None
    """None for held-out prompts."""
    index: int
    start_s: float
    stop_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One span of the trainer."""

    step: int
    start_s: float
    stop_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run directory that was read."""

    samples: tuple[MeasuredSample, ...]
    steps: tuple[MeasuredStep, ...]
    updates: tuple[tuple[float, float], ...]
    """From, to, in seconds."""
    rows: tuple[dict[str, Any], ...]
    """Of ``metrics.jsonl``."""
    config: dict[str, Any]
    """Flags, as resolved."""

    @property
    def lengths(self) -> dict[tuple[int, int], int]:
        """Tokens by group and index."""
        return {(sample.group, sample.index): sample.tokens for sample in self.samples if sample.group is not None}


def read_run(run_dir: Path) -> MeasuredRun:
    """Read a run directory.  Raises DataError, naming the file that is missing or not what it should be."""
    events = _timeline(run_dir / TIMELINE_FILE)
    spans = [event for event in events if event["ph"] == "X"]
    return MeasuredRun(
        samples=tuple(_sample(event) for event in spans if "finish" in event["args"]),
        steps=tuple(_step(event) for event in spans if _STEP.fullmatch(event["name"])),
        updates=tuple(_ends(event) for event in spans if event["name"].startswith("update to version")),
        rows=tuple(orjson.loads(line) for line in _lines(run_dir / METRICS_FILE)),
        config=_config(run_dir),
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
        return path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; is this the directory of a run with --timeline?") from error


def _config(run_dir: Path) -> dict[str, Any]:
    files = sorted(run_dir.glob("*.toml"))
    if len(files) != 1:
        raise DataError(f"{run_dir}: {len(files)} TOML files, one is needed: the resolved configuration")
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
    )


def _step(event: dict[str, Any]) -> MeasuredStep:
    start, stop = _ends(event)
    return MeasuredStep(step=int(event["name"].split()[1]), start_s=start, stop_s=stop, tokens=event["args"]["tokens"])

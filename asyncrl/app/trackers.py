"""The trackers that a run sends its metrics to."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from asyncrl.config import RunConfig, TrackerConfig, flat
from asyncrl.config.areas.ranges import refuse
from asyncrl.config.knobs import knobs
from asyncrl.config.secret_names import is_secret, masked
from asyncrl.errors import ConfigError
from asyncrl.metrics.trackers.process import TrackerProcess
from asyncrl.metrics.trackers.sink import TrackerLimits, TrackerSink

WANDB = "asyncrl.metrics.trackers.wandb_run:WandbRun"
TRACKIO = "asyncrl.metrics.trackers.trackio_run:TrackioRun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trackers:
    """The sinks of a run's trackers, and the processes behind them."""

    sinks: tuple[TrackerSink, ...]
    processes: tuple[TrackerProcess, ...]

    def places(self) -> list[str]:
        """One line for each open tracker, with the place where the run can be seen."""
        return [sink.place for sink in self.sinks if sink.place is not None]

    def pids(self) -> set[int]:
        """The ids of the processes that run now."""
        return {process.pid for process in self.processes if process.pid is not None}


def check_trackers(trackers: TrackerConfig) -> None:
    """Raise ConfigError with one line for each tracker whose package is not installed."""
    wanted = {"wandb": trackers.sends_to_wandb, "trackio": trackers.use_trackio}
    refuse(
        f"use-{name}: the package {name} is not installed; install asyncrl[{name}] (uv sync --extra {name}), or leave "
        f"out use-{name}"
        for name, is_wanted in wanted.items()
        if is_wanted and find_spec(name) is None
    )


def open_trackers(run: RunConfig, run_dir: Path, logs: Path, limits: TrackerLimits | None = None) -> Trackers:
    """Start the trackers of ``run``; their output goes to files in ``logs``.  Never waits for a tracker."""
    wanted: dict[str, tuple[str, Mapping[str, Any]]] = {}
    if run.trackers.sends_to_wandb:
        wanted["wandb"] = (WANDB, wandb_options(run, run_dir))
    if run.trackers.use_trackio:
        wanted["trackio"] = (TRACKIO, trackio_options(run))
    if wanted:
        with suppress(OSError):  # each tracker then says that its log cannot be written, and tries again
            logs.mkdir(exist_ok=True)
    processes = {
        name: TrackerProcess(backend, options, logs / f"{name}.log") for name, (backend, options) in wanted.items()
    }
    return Trackers(
        sinks=tuple(TrackerSink(name, process, limits) for name, process in processes.items()),
        processes=tuple(processes.values()),
    )


def wandb_options(run: RunConfig, run_dir: Path) -> dict[str, Any]:
    """The arguments of ``WandbRun``.  The id is chosen here, so that a restarted process continues the same run.

    Raises ConfigError if W&B's folder cannot be made.
    """
    trackers = run.trackers
    run_id = trackers.wandb_run_id or uuid4().hex[:8]
    group = trackers.wandb_group or run.name
    group = group if trackers.disable_wandb_random_suffix else f"{group}_{run_id}"
    folder = trackers.wandb_dir or run_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"wandb-dir {folder}: {error.strerror}; give another path") from error
    return {
        "key": None if trackers.wandb_key is None else trackers.wandb_key.text,
        "host": trackers.wandb_host,
        "mode": trackers.wandb_mode,
        "driver": os.getpid(),
        "project": trackers.wandb_project,
        "entity": trackers.wandb_team,
        "group": group,
        "name": group,
        "id": run_id,
        "resume": "allow",
        "dir": str(folder),
        "config": public_settings(run),
    }


def trackio_options(run: RunConfig) -> dict[str, Any]:
    """The arguments of ``TrackioRun``."""
    trackers = run.trackers
    return {
        "project": trackers.trackio_project,
        "name": trackers.trackio_name or f"{run.name}_{uuid4().hex[:8]}",
        "group": run.name,
        "space_id": trackers.trackio_space_id,
        "resume": "allow",
        "config": public_settings(run),
    }


def public_settings(run: RunConfig) -> dict[str, Any]:
    """Return the settings of ``run`` without secrets, for a service outside; paths are texts."""
    ours = {knob.field for knob in knobs().values()}  # flat has no secrets of ours, and ``reward_key`` is none
    shown = {name: value for name, value in flat(run).items() if name in ours or not is_secret(name)}
    return {name: str(value) if isinstance(value, Path) else masked(value) for name, value in shown.items()}

"""The files of one run, as the page reads them."""

import os
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.page.runs.rows import Rows
from asyncrl.page.runs.run_status import RunStatus, State, read_status, state_of

METRICS_FILE = "metrics.jsonl"
VERSIONS_FILE = "versions.json"


@dataclass(slots=True)
class RunFiles:
    """A run directory.  Views hold ``lock`` while they read, so that ``rows`` and indexes change between views only."""

    path: Path
    number: int
    """Position among the runs of the page, from 0."""
    name: str
    """The name of the run directory, with folders above it as far as other runs of the page have the same one."""
    rows: Rows
    lock: Lock = field(default_factory=Lock)
    parts: dict[str, Any] = field(default_factory=dict)
    """Values that views keep between requests, by the view's name."""
    is_read: bool = False
    """Whether the rows were read once; until then, a page may take seconds."""

    @property
    def status(self) -> RunStatus | None:
        """The content of ``status.json``."""
        return read_status(self.path)

    @property
    def state(self) -> State:
        """Whether the run is running, has ended or was killed."""
        return state_of(self.status)

    def duration_s(self) -> float | None:
        """Return the seconds from the beginning of the run to its end, or until now; None without a status.

        A run that was killed, or may have been, wrote no end: its last row stands for it.
        """
        if (status := self.status) is None:
            return None
        ended = status.ended
        if ended is None:
            ended = time.time() if self.state is State.RUNNING else self._last_written()
        return max(0.0, ended - status.began)

    def _last_written(self) -> float:
        """Return the time of the last row in seconds since 1970; 0 without rows."""
        with suppress(OSError):
            return _written(self.path / METRICS_FILE)
        return 0.0

    def settings_files(self) -> list[Path]:
        """Return the files with settings, the newest first: NAME.toml, then those of earlier runs, NAME.1.toml."""
        found = {path.stem: path for path in self.path.glob("*.toml")}
        earlier = [path for stem, path in found.items() if stem.rpartition(".")[0] in found]
        current = [path for path in found.values() if path not in earlier]
        return [*sorted(current, key=_written, reverse=True), *sorted(earlier, key=_written, reverse=True)]

    def settings(self) -> dict[str, Any]:
        """Return the resolved configuration; empty if it cannot be read."""
        for path in self.settings_files():
            try:
                return tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return {}
        return {}


def _written(path: Path) -> float:
    return path.stat().st_mtime


def open_runs(folders: list[Path]) -> list[RunFiles]:
    """Return the runs in ``folders``.  Raises ConfigError if one is no run directory."""
    for folder in folders:
        _check(folder)
    runs = enumerate(zip(folders, _names(folders), strict=True))
    return [RunFiles(path, number, name, Rows(path / METRICS_FILE)) for number, (path, name) in runs]


def _check(folder: Path) -> None:
    """Raise ConfigError if a folder is no run directory, or is that of another user, to whom it is closed."""
    try:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder")
        if not (folder / VERSIONS_FILE).exists() and not (folder / METRICS_FILE).exists():
            raise ConfigError(f"{folder} is no run directory: it has neither {METRICS_FILE} nor {VERSIONS_FILE}")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error


def _names(folders: list[Path]) -> list[str]:
    """Return the shortest name of each folder that no other one has."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]  # ``.`` has a name then, and a link keeps its own
    return [_name(path, [other for other in paths if other != path]) for path in paths]


def _name(path: Path, others: list[Path]) -> str:
    for count in range(1, len(path.parts)):
        if all(path.parts[-count:] != other.parts[-count:] for other in others):
            return "/".join(path.parts[-count:])
    return str(path)

"""Carries the trainer's weights to every engine through a disk that all of them share: where no network group reaches.

    take    the trainer writes its weights to FOLDER/taken, and may go on training once they are on the disk
    push    FOLDER/taken becomes FOLDER/version-N ──▶ pause all engines ──▶ each reads it ──▶ all go on

A folder has its name when it is complete: it is written beside and renamed.  Version N stays until all engines have
version N + 1, so the disk holds two, and a third under another name only after an update that was interrupted.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.everyone import everyone
from asyncrl.engines.paused import LOST_S, Pausable, PausedRound, PauseMode
from asyncrl.engines.roster import Roster
from asyncrl.errors import ConfigError, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)

SETS = 2
"""Of weights that the disk holds at once: the one that engines have, and the next."""


class WeightWriter(Protocol):
    """The trainer's side.  Raises TrainerFailed or WeightUpdateFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What the weights are, in parts; the same for every update."""

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        """Write the present weights, as engines read them, to ``folder``, which appears when it is complete."""


class WeightReader(Pausable, Protocol):
    """One engine's side.  Raises EngineTimeout, EngineLost or EngineRejected."""

    async def read(self, folder: Path, *, label: str, timeout_s: float) -> None:
        """Take the weights in ``folder``; ``label`` becomes the weight version."""


class DiskUpdater:
    """``WeightUpdater`` through a folder.  ``connect`` comes first, once; one ``push`` at a time."""

    def __init__(
        self,
        roster: Roster[WeightReader],
        writer: WeightWriter,
        *,
        folder: Path,
        timeout_s: float,
        pause_mode: PauseMode = "in_place",
        lost_s: float = LOST_S,
    ) -> None:
        """``folder`` is this updater's alone; what is in it goes.  ``timeout_s`` is for each bucket's worth of bytes.

        ``lost_s`` is how long a failure waits for the engine that died of it.
        """
        self._roster = roster
        self._engines: tuple[WeightReader, ...] = ()
        """That the weights were written for."""
        self._taken_at = 0
        """The roster's changes by then."""
        self._writer = writer
        self._folder = folder
        self._timeout_s = timeout_s
        self._round = PausedRound(roster, timeout_s=timeout_s, pause_mode=pause_mode, lost_s=lost_s)
        self._buckets: tuple[WeightBucket, ...] = ()

    async def connect(self) -> None:
        """Make the folder, and ask what will be written.  Raises WeightUpdateFailed."""
        await self._on_disk(partial(_make_empty, self._folder))
        await everyone("asking what will be written", {"trainer": self._ask_for_buckets()}, self._timeout_s)

    async def take(self) -> bool:
        """See ``WeightUpdater.take``: the weights are written."""
        if not self._buckets:
            raise WeightUpdateFailed("take came before connect, or the trainer has nothing to write")
        self._engines, self._taken_at = self._roster.present, self._roster.changes
        if self._engines:  # those that come back get an update of their own
            writing = self._writer.write_weights(self._taken, timeout_s=self._long_s)
            await everyone("writing the weights", {"trainer": writing}, self._long_s)
        return True

    async def push(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.push``: they are read."""
        if not self._buckets:
            raise WeightUpdateFailed("push came before connect, or the trainer has nothing to write")
        if not self._engines:
            return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
        version = self._folder / f"version-{weights.version}"
        await self._on_disk(partial(_rename, self._taken, version))
        move = partial(self._read, version, str(weights.version))
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        report = await self._round.run(self._engines, self._taken_at, move, num_bytes)
        await self._on_disk(partial(_remove_all_but, version))
        return report

    async def newcomers(self) -> None:
        """See ``WeightUpdater.newcomers``."""
        await self._roster.newcomers()

    async def close(self) -> None:
        """Remove the folder, which engines do not read any more, or say that it stays."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        except TimeoutError:
            logger.warning("%s was not removed within %g s: it stays", self._folder, self._timeout_s)

    @property
    def _taken(self) -> Path:
        return self._folder / "taken"

    @property
    def _long_s(self) -> float:
        """For all weights."""
        return self._timeout_s * len(self._buckets)

    async def _ask_for_buckets(self) -> None:
        self._buckets = await self._writer.weight_buckets()

    async def _read(self, version: Path, label: str) -> None:
        reading = {engine.url: engine.read(version, label=label, timeout_s=self._long_s) for engine in self._engines}
        await everyone("reading the weights", reading, self._long_s)

    async def _on_disk(self, work: Callable[[], None]) -> None:
        """Off the event loop: a shared disk may take its time."""

        async def done() -> None:
            try:
                await asyncio.to_thread(work)
            except OSError as error:
                raise WeightUpdateFailed(
                    f"{error.filename}: {error.strerror}; trainer, engines and this process must share the disk"
                ) from error

        await everyone("preparing the weights", {f"update-weight-disk-dir {self._folder}": done()}, self._timeout_s)


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError unless ``folder``, which need not be there, can take two sets of weights of ``num_bytes``."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise ConfigError(f"update-weight-disk-dir {folder}: cannot be written to: {error.strerror}") from error
    if free < SETS * num_bytes:
        raise ConfigError(
            f"update-weight-disk-dir {folder}: {free / 1e9:.1f} GB are free, {SETS} sets of weights take "
            f"{SETS * num_bytes / 1e9:.1f} GB"
        )


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _rename(taken: Path, version: Path) -> None:
    if version.exists():
        shutil.rmtree(version)
    taken.rename(version)


def _remove_all_but(version: Path) -> None:
    """Of the versions; what another process still has open may stay until the next update."""
    for other in version.parent.glob("version-*"):
        if other != version:
            shutil.rmtree(other, ignore_errors=True)

"""Weight updates through a disk that trainer and engines share, for deployments that no network group can span.

    snapshot     the trainer writes its weights to FOLDER/taken; training may continue once they are on the disk
    resnapshot   the written weights stay, and are for the engines that are present now
    publish      FOLDER/taken becomes FOLDER/version-N ──▶ pause all engines ──▶ each reads it ──▶ all resume

A folder is written under another name and renamed once complete.  The version that all engines serve stays while the
next one is written and read.  Older versions, and versions of an interrupted update, are removed before that.
"""

import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncrl.daemon_threads import off_loop
from asyncrl.engines.gather import ask_one, gather
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.round import LOST_S, Pausable, PausedRound, PauseMode, Stillness
from asyncrl.errors import AsyncRLError, ConfigError, WeightUpdateFailed
from asyncrl.event_loop import Deadline
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)

SETS = 2
"""Sets of weights that the disk holds at most: the one that engines serve, and the next one."""


class WeightWriter(Protocol):
    """The trainer's side of an update through files.  Every method raises TrainerFailed or WeightUpdateFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """Return all weights as buckets; the same for every update."""

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        """Write the current weights, in the engines' format, to ``folder``, which appears only once complete."""


class WeightReader(Pausable, Protocol):
    """One engine's side of an update through files.  Raises EngineTimeout, EngineLost or EngineRejected."""

    async def receive_folder(self, folder: Path, *, label: str, timeout_s: float) -> float | None:
        """Read the weights in ``folder``; ``label`` becomes the weight version.

        Returns the seconds since the engine's last forward pass ended; None if it does not know.
        """


class DiskUpdater:
    """``WeightUpdater`` through a folder.  Call ``connect`` once, first; at most one ``publish`` at a time."""

    def __init__(
        self,
        membership: EngineMembership[WeightReader],
        writer: WeightWriter,
        *,
        folder: Path,
        timeout_s: float,
        pause_mode: PauseMode = "in_place",
        silence_s: float = math.inf,
        lost_s: float = LOST_S,
    ) -> None:
        """Set the folder, which must not exist, and the deadlines, in seconds.

        ``timeout_s`` applies to each bucket's worth of bytes, written or read.  ``silence_s`` is the longest silence of
        a request; it limits the reading, because requests get no tokens meanwhile.  ``lost_s`` is how long a failed
        update waits for its cause, an engine, to be found dead.
        """
        self._writer = writer
        self._folder = folder
        self._is_made = False
        self._written: Path | None = None
        """The folder of the last snapshot."""
        self._served: Path | None = None
        """The folder of the weights that all engines serve."""
        self._timeout_s = timeout_s
        self._silence_s = silence_s
        self._round = PausedRound[WeightReader](membership, timeout_s=timeout_s, pause_mode=pause_mode, lost_s=lost_s)
        self._buckets: tuple[WeightBucket, ...] = ()

    async def connect(self) -> None:
        """Create the folder and ask the trainer for its buckets.  Raises WeightUpdateFailed."""
        await self._on_disk(partial(self._folder.mkdir, parents=True))
        self._is_made = True
        asking = self._writer.weight_buckets()
        self._buckets = await ask_one("listing the buckets", "trainer", asking, self._timeout_s)

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``.  Writes the weights."""
        if not self._buckets:
            raise WeightUpdateFailed("snapshot was called before connect, or the trainer has no weights to write")
        self._written = None
        self._round.choose()
        if self._round.engines:  # restarted engines get another update
            await self._on_disk(partial(_remove_versions, self._folder, self._served))
            writing = self._writer.write_weights(self._taken, timeout_s=self._long_s)
            await ask_one("writing the weights", "trainer", writing, self._long_s)
            self._written = self._taken
        return True

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``.  The written weights are still on the disk."""
        self._round.choose()
        return self._written is not None

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``.  Has the engines read the written weights."""
        if not self._buckets:
            raise WeightUpdateFailed("publish was called before connect, or the trainer has no weights to write")
        if not self._round.engines:
            return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
        if self._written is None:
            raise WeightUpdateFailed("publish was called before snapshot")
        if self._written == self._taken:
            version = self._folder / f"version-{weights.version}"
            await self._on_disk(partial(_rename, self._taken, version))
            self._written = version
        receive = partial(self._receive, self._written, str(weights.version))
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        report = await self._round.publish(receive, num_bytes)
        self._served = self._written
        return report

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._round.wait_for_rejoined()

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``.  The written weights are still on the disk."""

    async def close(self) -> None:
        """Remove the folder, which engines no longer read; log a warning if it stays."""
        if not self._is_made:
            return
        try:
            async with Deadline(self._timeout_s):
                await off_loop(partial(shutil.rmtree, self._folder), "disk")
        except TimeoutError:
            logger.warning(
                "%s was not removed within %g s; remove it if it is still there", self._folder, self._timeout_s
            )
        except OSError as error:  # the trainer is still writing to it, or another process has a file of it open
            logger.warning("%s stays: %s", self._folder, error)

    @property
    def _taken(self) -> Path:
        return self._folder / "taken"

    @property
    def _long_s(self) -> float:
        """The deadline in seconds for all weights."""
        return self._timeout_s * len(self._buckets)

    async def _receive(self, version: Path, label: str) -> float | None:
        deadline_s, still = min(self._long_s, self._silence_s), Stillness()

        failed: dict[str, AsyncRLError] = {}

        async def read(engine: WeightReader) -> None:
            try:
                still.note(await engine.receive_folder(version, label=label, timeout_s=deadline_s))
            except AsyncRLError as error:  # the other engines finish reading; cancelling would not stop them
                failed[engine.url] = error

        reading = {engine.url: read(engine) for engine in self._round.engines}
        doing = "reading the weights"
        if deadline_s < self._long_s:
            doing += ", with requests that may be silent no longer (request-timeout-s)"
        await gather(doing, reading, deadline_s)
        for url, error in failed.items():
            raise WeightUpdateFailed(f"{doing}: {url}: {error}") from error
        return still.first()

    async def _on_disk(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread, because a shared disk may be slow.  Raises WeightUpdateFailed."""

        async def done() -> None:
            try:
                await off_loop(work, "disk")
            except OSError as error:
                raise WeightUpdateFailed(
                    f"{error.filename}: {error.strerror}; trainer, engines and this process must share the disk"
                ) from error

        await gather("preparing the weights", {f"update-weight-disk-dir {self._folder}": done()}, self._timeout_s)


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raise ConfigError unless ``folder``, which need not exist, has room for ``SETS`` sets of ``num_bytes`` bytes."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        raise ConfigError(f"update-weight-disk-dir {folder}: cannot be written to: {error.strerror}") from error
    if free < SETS * num_bytes:
        raise ConfigError(
            f"update-weight-disk-dir {folder}: {free / 1e9:.1f} GB are free, {SETS} sets of weights take "
            f"{SETS * num_bytes / 1e9:.1f} GB"
        )


def _rename(taken: Path, version: Path) -> None:
    if version.exists():
        shutil.rmtree(version)
    taken.rename(version)


def _remove_versions(folder: Path, served: Path | None) -> None:
    """Remove all versions except ``served``.

    A file that another process has open may stay until the next update.
    """
    for version in folder.glob("version-*"):
        if version != served:
            shutil.rmtree(version, ignore_errors=True)

"""Carries the trainer's weights to engines on the same GPUs: each bucket lies there once, and the engine maps it.

    every rank gathers bucket i ──▶ a handle of it, as text ──▶ its engine loads from there ──▶ bucket i + 1

NCCL takes no two ranks on one GPU, so there is no group; the engines' loaders put tensors where they belong each time.

Knows neither HTTP nor torch: engines and trainer are Protocols.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from asyncrl.engines.gather import ask_one, gather
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.errors import WeightUpdateFailed
from asyncrl.event_loop import loop_time
from asyncrl.types import UpdateReport, Weights


class TensorSharer(Protocol):
    """The trainer's side.  Raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What will be shared, in order; the same for every update."""

    async def share(self, bucket: int) -> Sequence[str]:
        """Put the present weights of a bucket where engines can map it: one handle of each rank, for its GPU.

        What was shared before is gone: nobody may have it mapped any more.
        """

    async def unshare(self) -> None:
        """Take back what is shared."""


class TensorReceiver(Protocol):
    """One engine's side.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    url: str
    num_ranks: int

    async def receive_handles(self, handles: Sequence[str], *, label: str | None) -> None:
        """Load what the handles, one for each rank of the engine, stand for; ``label`` becomes the weight version.

        When this returns, nothing of it is mapped any more.
        """


class TensorUpdater:
    """``WeightUpdater`` by shared memory, for engines that have no requests.  One ``publish`` at a time."""

    def __init__(
        self, engines: Sequence[TensorReceiver], sharer: TensorSharer, *, ranks_per_engine: int, timeout_s: float
    ) -> None:
        """Engines have ``ranks_per_engine`` of the trainer's ranks each, in order, and take the handles of the first.

        ``timeout_s`` is for each bucket, on either side.
        """
        self._engines = tuple(engines)
        self._sharer = sharer
        self._ranks_per_engine = ranks_per_engine
        self._timeout_s = timeout_s
        self._buckets: tuple[WeightBucket, ...] = ()

    async def connect(self) -> None:
        """Ask what there will be.  Raises WeightUpdateFailed."""
        asking = self._sharer.weight_buckets()
        self._buckets = await ask_one("asking what will be sent", "trainer", asking, self._timeout_s)

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``: nothing is copied, the trainer waits."""
        return False

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``: there is no copy."""
        return False

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``.  The engines must have no requests."""
        if not self._buckets:
            raise WeightUpdateFailed("publish came before connect, or the trainer has nothing to send")
        began, last = loop_time(), len(self._buckets) - 1
        for number in range(len(self._buckets)):
            await self._receive(number, str(weights.version) if number == last else None)
        await ask_one("taking the last bucket back", "trainer", self._sharer.unshare(), self._timeout_s)
        seconds = loop_time() - began
        return UpdateReport(
            pause_s=seconds, total_s=seconds, num_bytes=sum(bucket.num_bytes for bucket in self._buckets)
        )

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``: none come."""
        await asyncio.Event().wait()

    async def _receive(self, bucket: int, label: str | None) -> None:
        # Invariant: every engine has answered before the next bucket is shared.  An engine that still had this one
        # mapped would read memory that the trainer has freed.
        sharing = self._sharer.share(bucket)
        handles = await ask_one(f"sharing bucket {bucket}", "trainer", sharing, self._timeout_s)
        loading = {}
        for number, engine in enumerate(self._engines):
            first = number * self._ranks_per_engine
            loading[engine.url] = engine.receive_handles(handles[first : first + engine.num_ranks], label=label)
        await gather(f"loading bucket {bucket}", loading, self._timeout_s)

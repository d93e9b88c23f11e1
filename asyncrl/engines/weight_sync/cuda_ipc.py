"""Weight updates by CUDA IPC, to engines on the trainer's GPUs: a bucket lies there once, and the engine maps it.

    every rank gathers bucket i ──▶ a handle of it, as text ──▶ its engine loads from there ──▶ bucket i + 1

NCCL does not allow two ranks on one GPU, so there is no group.  In every update the engines' loaders look up the place
of each tensor.

Uses neither HTTP nor torch: engines and trainer are Protocols.
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
    """The trainer's side of shared memory.  Every method raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """Return the buckets in the order in which they are shared; the same for every update."""

    async def share(self, bucket: int) -> Sequence[str]:
        """Gather the current weights of a bucket and return one handle of each rank, for its GPU.

        Frees the previous bucket, which no engine may have mapped any more.
        """

    async def unshare(self) -> None:
        """Free the shared bucket, which no engine may have mapped any more."""


class TensorReceiver(Protocol):
    """One engine's side of shared memory.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    url: str
    num_ranks: int

    async def receive_handles(self, handles: Sequence[str], *, label: str | None) -> None:
        """Load the bucket behind the handles, one handle per rank of the engine; ``label`` becomes the weight version.

        When this returns, the bucket is no longer mapped.
        """


class TensorUpdater:
    """``WeightUpdater`` by shared memory, for engines that have no requests.  At most one ``publish`` at a time."""

    def __init__(
        self, engines: Sequence[TensorReceiver], sharer: TensorSharer, *, ranks_per_engine: int, timeout_s: float
    ) -> None:
        """Assign ``ranks_per_engine`` of the trainer's ranks to each engine, in order.

        An engine gets the handles of the first ``num_ranks`` of them.  ``timeout_s`` is the deadline of each bucket,
        for the trainer and for the engines.
        """
        self._engines = tuple(engines)
        self._sharer = sharer
        self._ranks_per_engine = ranks_per_engine
        self._timeout_s = timeout_s
        self._buckets: tuple[WeightBucket, ...] = ()

    async def connect(self) -> None:
        """Ask the trainer for its buckets.  Raises WeightUpdateFailed."""
        asking = self._sharer.weight_buckets()
        self._buckets = await ask_one("listing the buckets", "trainer", asking, self._timeout_s)

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``.  Copies nothing, so the trainer waits."""
        return False

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``.  There is no copy to send."""
        return False

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``.  The engines must have no requests."""
        if not self._buckets:
            raise WeightUpdateFailed("publish was called before connect, or the trainer has no weights to send")
        began, last = loop_time(), len(self._buckets) - 1
        for number in range(len(self._buckets)):
            await self._receive(number, str(weights.version) if number == last else None)
        await ask_one("freeing the last bucket", "trainer", self._sharer.unshare(), self._timeout_s)
        seconds = loop_time() - began
        return UpdateReport(
            pause_s=seconds, total_s=seconds, num_bytes=sum(bucket.num_bytes for bucket in self._buckets)
        )

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``.  A trainer that shares its GPUs is not restarted."""

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``.  Never returns: this updater does not track restarted engines."""
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

"""The trainer as the controller sees it: all ranks as one, by Ray."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.checkpoints import folder_of
from asyncrl.engines.cluster.actors import BESIDE
from asyncrl.engines.cluster.calls import answered, together
from asyncrl.errors import TrainerFailed
from asyncrl.types import Batch, TrainReport


class RayTrainer:
    """``Trainer``, and the trainer's side of every way to send weights, over actors of ``RankActor``, rank 0 first.

    One call at a time, but for ``join_engines``, ``send_again`` and ``abandon``, of which there is one at a time, too.
    """

    def __init__(self, ranks: Sequence[Any], *, train_timeout_s: float, control_timeout_s: float) -> None:
        self._ranks = ranks
        self._train_timeout_s = train_timeout_s
        self._control_timeout_s = control_timeout_s
        self.has_begun_checkpoint = False
        """Whether there may be one that is being written."""

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        import ray

        # Invariant: a batch is frozen.  A thread cannot be cancelled: after the timeout it may still read the batch.
        # Copied into Ray's store once for all ranks, off the loop: a batch of long answers is many megabytes.
        try:
            async with asyncio.timeout(self._control_timeout_s):
                shared = await asyncio.to_thread(ray.put, batch)
        except TimeoutError as error:
            raise TrainerFailed(f"Ray took no batch within {self._control_timeout_s:g} s") from error
        reports: list[TrainReport] = await self._all("train", shared, timeout_s=self._train_timeout_s)
        return reports[0]

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        await self._all("save", path, timeout_s=self._train_timeout_s)

    async def begin_checkpoint(self, folder: Path, run: Mapping[str, Any], with_optimizer: bool) -> None:
        """Return once every rank has its copy."""
        self.has_begun_checkpoint = True
        await self._all("begin_checkpoint", folder, dict(run), with_optimizer, timeout_s=self._train_timeout_s)

    async def finish_checkpoint(self, timeout_s: float | None = None) -> None:
        """Return once no rank writes any more."""
        await self._all("finish_checkpoint", timeout_s=timeout_s or self._train_timeout_s)

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """See ``WeightSender.weight_buckets``."""
        buckets: tuple[WeightBucket, ...] = await self._first("weight_buckets")
        return buckets

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """See ``WeightSender.join_engines``."""
        await self._beside("join_engines", master_address, master_port, world_size, group_name, backend)

    async def take(self, *, is_checked: bool) -> bool:
        """See ``WeightSender.take``."""
        is_taken: list[bool] = await self._all("take", is_checked, timeout_s=self._control_timeout_s)
        return is_taken[0]

    async def send_again(self, *, is_checked: bool) -> bool:
        """See ``WeightSender.send_again``."""
        is_sent: bool = await self._beside("send_again", is_checked)
        return is_sent

    async def send(self, *, is_checked: bool, timeout_s: float) -> None:
        """See ``WeightSender.send``."""
        await self._all("send", is_checked, timeout_s=timeout_s)

    async def abandon(self, group_name: str) -> None:
        """See ``WeightSender.abandon``."""
        await self._beside("abandon", group_name)

    async def share(self, bucket: int) -> list[str]:
        """See ``TensorSharer.share``."""
        return await self._all("share", bucket, timeout_s=self._control_timeout_s)

    async def unshare(self) -> None:
        """See ``TensorSharer.unshare``."""
        await self._all("unshare", timeout_s=self._control_timeout_s)

    async def fetch(self) -> None:
        """See ``MemoryOwner.fetch``."""
        await self._all("fetch", timeout_s=self._control_timeout_s)

    async def put_away_optimizer(self) -> None:
        """See ``MemoryOwner.put_away_optimizer``."""
        await self._all("put_away_optimizer", timeout_s=self._control_timeout_s)

    async def put_away_weights(self) -> None:
        """See ``MemoryOwner.put_away_weights``."""
        await self._all("put_away_weights", timeout_s=self._control_timeout_s)

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        """See ``WeightWriter.write_weights``."""
        await self._all("write_weights", folder, timeout_s=timeout_s)

    async def _beside(self, method: str, *args: object) -> Any:
        """Of rank 0, whatever it is doing."""
        call = getattr(self._ranks[0], method).options(concurrency_group=BESIDE).remote(*args)
        return await answered(call, f"trainer rank 0, {method}", self._control_timeout_s)

    async def _first(self, method: str, *args: object) -> Any:
        return await answered(
            getattr(self._ranks[0], method).remote(*args), f"trainer rank 0, {method}", self._control_timeout_s
        )

    async def _all(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        calls = [
            answered(getattr(rank, method).remote(*args), f"trainer rank {number}, {method}", timeout_s)
            for number, rank in enumerate(self._ranks)
        ]
        return await together(calls)


class RayCheckpointer:
    """``Checkpointer`` in one folder, of a trainer's state."""

    def __init__(self, trainer: RayTrainer, root: Path, *, with_optimizer: bool, about: Mapping[str, Any]) -> None:
        """``about`` is kept with every checkpoint, besides what the run says."""
        self._trainer = trainer
        self._root = root
        self._with_optimizer = with_optimizer
        self._about = dict(about)

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """See ``Checkpointer.begin``."""
        notes = {**self._about, "optimizer": self._with_optimizer, "state": dict(run)}
        await self._trainer.begin_checkpoint(folder_of(self._root, step), notes, self._with_optimizer)

    async def finish(self) -> None:
        """See ``Checkpointer.finish``."""
        await self._trainer.finish_checkpoint()

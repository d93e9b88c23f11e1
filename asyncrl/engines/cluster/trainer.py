"""The trainer as the controller sees it: all ranks as one, by Ray."""

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.engines.buckets import WeightBucket
from asyncrl.errors import AsyncRLError, TrainerFailed
from asyncrl.types import Batch, TrainReport


class RayTrainer:
    """``Trainer`` and ``WeightSender`` over actors of ``RankActor``, rank 0 first.  One call at a time."""

    def __init__(self, ranks: Sequence[Any], *, train_timeout_s: float, control_timeout_s: float) -> None:
        self._ranks = ranks
        self._train_timeout_s = train_timeout_s
        self._control_timeout_s = control_timeout_s

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        import ray

        # Copied into Ray's store once for all ranks, off the loop: a batch of long answers is many megabytes.
        shared = await asyncio.to_thread(ray.put, batch)
        reports: list[TrainReport] = await self._all("train", shared, timeout_s=self._train_timeout_s)
        return reports[0]

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        await self._all("save", path, timeout_s=self._train_timeout_s)

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """See ``WeightSender.weight_buckets``."""
        buckets: tuple[WeightBucket, ...] = await self._first("weight_buckets")
        return buckets

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """See ``WeightSender.join_engines``."""
        await self._first("join_engines", master_address, master_port, world_size, group_name, backend)

    async def send(self, index: int) -> None:
        """See ``WeightSender.send``."""
        await self._first("send", index)

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


async def answered(call: Any, what: str, timeout_s: float) -> Any:
    """The answer of an actor.  Our own errors pass as they are; everything else becomes TrainerFailed.

    ``what`` says who was asked for what.
    """
    import ray

    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise TrainerFailed(f"{what}: no answer within {timeout_s:g} s") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, AsyncRLError):
            raise error.cause from error
        raise TrainerFailed(f"{what}: {type(error.cause).__name__}: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise TrainerFailed(f"{what}: {_first_line(error)}") from error


async def together(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """All answers, or the first error, without waiting for those that would never answer."""
    try:
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(_await(call)) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]


async def _await(call: Awaitable[Any]) -> Any:
    return await call


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

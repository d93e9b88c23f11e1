"""Carries the trainer's weights to every engine, over a collective group of the trainer's rank 0 and all engine ranks.

    pause all ──▶ for each bucket: engines told what comes, trainer broadcasts ──▶ all go on

Knows neither HTTP nor torch: engines and trainer are Protocols.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, Protocol

from asyncrl.engines.buckets import WeightBucket
from asyncrl.errors import AsyncRLError, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

PauseMode = Literal["in_place", "retract"]
"""Requests held by an update keep their KV cache, or give it up and compute it anew under the new weights."""


class WeightSender(Protocol):
    """The trainer's side.  Raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What will be sent, in order; the same for every update."""

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group as rank 0, which also serves its rendezvous at ``master_port``."""

    async def send(self, index: int) -> None:
        """Broadcast bucket ``index`` of the present weights to the group."""


class WeightReceiver(Protocol):
    """One engine's side.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    url: str
    num_ranks: int

    async def pause(self, mode: PauseMode) -> None:
        """Hold every request where it is; ``mode`` says what becomes of its KV cache."""

    async def go_on(self) -> None:
        """Let requests go on."""

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group with ``num_ranks`` ranks from ``rank_offset``."""

    async def receive(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> None:
        """Take and load one bucket; ``label`` becomes the weight version."""


class BroadcastUpdater:
    """``WeightUpdater`` by broadcast.  ``connect`` comes first, once; one ``push`` at a time."""

    def __init__(
        self,
        engines: tuple[WeightReceiver, ...],
        sender: WeightSender,
        *,
        master_address: str,
        master_port: int,
        backend: str,
        timeout_s: float,
        pause_mode: PauseMode = "in_place",
        group_name: str = "asyncrl",
    ) -> None:
        """``timeout_s`` is for the connection, and for each bucket of a push."""
        self._engines = engines
        self._sender = sender
        self._master_address = master_address
        self._master_port = master_port
        self._backend = backend
        self._timeout_s = timeout_s
        self._pause_mode: PauseMode = pause_mode
        self._group_name = group_name
        self._buckets: tuple[WeightBucket, ...] = ()

    async def connect(self) -> None:
        """Form the group.  Raises WeightUpdateFailed."""
        world_size = 1 + sum(engine.num_ranks for engine in self._engines)
        joining = {
            "trainer": self._sender.join_engines(
                master_address=self._master_address,
                master_port=self._master_port,
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
            )
        }
        rank_offset = 1
        for engine in self._engines:
            joining[engine.url] = engine.join_group(
                master_address=self._master_address,
                master_port=self._master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
            )
            rank_offset += engine.num_ranks
        await self._together("forming the weight-update group", joining)
        await self._together("asking what will be sent", {"trainer": self._ask_for_buckets()})

    async def push(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.push``.

        After a failure before the first bucket the engines go on; after that they stay paused, for their weights are
        neither the old nor the new ones.
        """
        if not self._buckets:
            raise WeightUpdateFailed("push came before connect, or the trainer has nothing to send")
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._pause()
        for index in range(len(self._buckets)):
            await self._send(index, str(weights.version))
        await self._together("going on", {engine.url: engine.go_on() for engine in self._engines})
        took = clock() - began
        return UpdateReport(pause_s=took, total_s=took, num_bytes=sum(bucket.num_bytes for bucket in self._buckets))

    async def _ask_for_buckets(self) -> None:
        self._buckets = await self._sender.weight_buckets()

    async def _pause(self) -> None:
        try:
            await self._together("pausing", {engine.url: engine.pause(self._pause_mode) for engine in self._engines})
        except WeightUpdateFailed:
            for engine in self._engines:
                with contextlib.suppress(AsyncRLError):  # the failure to report is the first one
                    await engine.go_on()
            raise

    async def _send(self, index: int, label: str) -> None:
        """One bucket, from the trainer to all engines.  The last one brings the label: then all weights are new."""
        bucket, num_buckets = self._buckets[index], len(self._buckets)
        moving = {
            engine.url: engine.receive(
                bucket, group_name=self._group_name, label=label if index == num_buckets - 1 else None
            )
            for engine in self._engines
        }
        await self._together(
            f"sending bucket {index + 1} of {num_buckets}", {**moving, "trainer": self._sender.send(index)}
        )

    async def _together(self, doing: str, work: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Run all of ``work`` within the deadline, or raise one WeightUpdateFailed that names who did not do it."""
        waiting = set(work)
        failed: dict[str, AsyncRLError] = {}

        async def one(who: str, task: Coroutine[Any, Any, None]) -> None:
            try:
                await task
            except AsyncRLError as error:
                failed.setdefault(who, error)
                raise
            waiting.discard(who)

        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                for who, task in work.items():
                    tasks.create_task(one(who, task), name=f"{doing}: {who}")
        except TimeoutError as error:
            missing = ", ".join(sorted(waiting))
            raise WeightUpdateFailed(f"{doing}: no answer from {missing} within {self._timeout_s:g} s") from error
        except ExceptionGroup as errors:
            _, bugs = errors.split(AsyncRLError)
            if bugs is not None:
                raise bugs.exceptions[0] from errors
            who, cause = next(iter(failed.items()))
            raise WeightUpdateFailed(f"{doing}: {who}: {cause}") from cause

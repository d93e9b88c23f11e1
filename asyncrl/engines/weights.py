"""Carries the trainer's weights to every engine, over a collective group of the trainer's rank 0 and all engine ranks.

    take    the trainer copies its weights, begins to send them, and may go on training
    push    pause all engines ──▶ they receive ──▶ all go on

The first push sends bucket by bucket, by name; engines that say so take all later ones in one request
(``engines/sglang/direct``).

Knows neither HTTP nor torch: engines and trainer are Protocols.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.roster import Roster
from asyncrl.errors import AsyncRLError, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

PauseMode = Literal["in_place", "retract"]
"""Requests held by an update keep their KV cache, or give it up and compute it anew under the new weights."""


LOST_S = 5.0
"""For an engine whose connection broke to be found dead, or not: they are looked at every half second."""


class WeightSender(Protocol):
    """The trainer's side.  Raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What will be sent, in order; the same for every update."""

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group as rank 0, which also serves its rendezvous at ``master_port``."""

    async def take(self, *, is_checked: bool) -> bool:
        """Copy the present weights and begin to broadcast them to the group, all buckets in order.

        False, and nothing done, when ``send`` is to do it instead.
        """

    async def send(self, *, is_checked: bool) -> None:
        """Broadcast the present weights to the group, all buckets in order.  Training has to wait for it.

        ``is_checked``: a checksum behind each bucket, for engines that ask for it.
        """


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

    async def receive(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> bool:
        """Take and load one bucket; ``label`` becomes the weight version.

        True: it can take this bucket with others in ``receive_all`` from now on.
        """

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool
    ) -> None:
        """Take and load all buckets; ``is_checked``: and compare what came, and the weights, with the trainer's."""


class BroadcastUpdater:
    """``WeightUpdater`` by broadcast.  ``connect`` comes first, once; one ``push`` at a time.

    The group is formed anew when the engines of the roster have changed: a group whose member died is of no use.
    """

    def __init__(
        self,
        roster: Roster[WeightReceiver],
        sender: WeightSender,
        *,
        master_address: str,
        find_port: Callable[[], Awaitable[int]],
        backend: str,
        timeout_s: float,
        pause_mode: PauseMode = "in_place",
        group_name: str = "asyncrl",
        is_checked: bool = False,
        lost_s: float = LOST_S,
    ) -> None:
        """``timeout_s`` is for the connection, and for each bucket of a push.  ``find_port`` finds one that is free.

        ``is_checked``: each update is compared with what the trainer sent, once engines take all buckets at once.
        ``lost_s`` is how long a failure waits for the engine that died of it.
        """
        self._roster = roster
        self._engines: tuple[WeightReceiver, ...] = ()
        """In the group, with the trainer."""
        self._formed_for = -1
        """The roster's changes that the group knows of."""
        self._sender = sender
        self._master_address = master_address
        self._find_port = find_port
        self._backend = backend
        self._timeout_s = timeout_s
        self._pause_mode: PauseMode = pause_mode
        self._prefix = self.group_name = group_name
        self._is_checked = is_checked
        self._lost_s = lost_s
        self._buckets: tuple[WeightBucket, ...] = ()
        self.is_direct = False
        """Whether all engines take all buckets at once, as the next push will have them do."""
        self._is_taken = False
        """Whether the trainer is sending already."""

    async def connect(self) -> None:
        """Form the group of all engines that are there.  Raises WeightUpdateFailed."""
        self._engines, self._formed_for = self._roster.present, self._roster.changes
        self.group_name = f"{self._prefix}-{self._formed_for}"
        self._is_taken = self.is_direct = False
        master_port = await self._find_port()
        world_size = 1 + sum(engine.num_ranks for engine in self._engines)
        joining = {
            "trainer": self._sender.join_engines(
                master_address=self._master_address,
                master_port=master_port,
                world_size=world_size,
                group_name=self.group_name,
                backend=self._backend,
            )
        }
        rank_offset = 1
        for engine in self._engines:
            joining[engine.url] = engine.join_group(
                master_address=self._master_address,
                master_port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=self.group_name,
                backend=self._backend,
            )
            rank_offset += engine.num_ranks
        await self._together("forming the weight-update group", joining, self._timeout_s)
        await self._together("asking what will be sent", {"trainer": self._ask_for_buckets()}, self._timeout_s)

    async def take(self) -> bool:
        """See ``WeightUpdater.take``."""
        if not self._buckets:
            raise WeightUpdateFailed("take came before connect, or the trainer has nothing to send")
        try:
            if self._roster.changes != self._formed_for:
                await self.connect()
        except WeightUpdateFailed as error:
            await self._blame_the_lost(error)
            raise
        await self._together("copying the weights", {"trainer": self._take()}, self._timeout_s)
        return self._is_taken

    async def push(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.push``.

        After a failure before the first bucket the engines go on; after that they stay paused, for their weights are
        neither the old nor the new ones.
        """
        if not self._buckets:
            raise WeightUpdateFailed("push came before connect, or the trainer has nothing to send")
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            paused = await self._pause()
            await self._move(str(weights.version))
            await self._together("going on", {engine.url: engine.go_on() for engine in self._engines}, self._timeout_s)
        except WeightUpdateFailed as error:
            await self._blame_the_lost(error)
            raise
        self._roster.settle(self._engines)
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        return UpdateReport(pause_s=clock() - paused, total_s=clock() - began, num_bytes=num_bytes)

    async def newcomers(self) -> None:
        """See ``WeightUpdater.newcomers``."""
        await self._roster.newcomers()

    async def _blame_the_lost(self, error: WeightUpdateFailed) -> None:
        """Raises UpdateInterrupted if an engine died, which is seen some time after its connection broke."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lost_s):
                await self._roster.changed(self._formed_for)
            raise UpdateInterrupted(str(error)) from error

    async def _ask_for_buckets(self) -> None:
        self._buckets = await self._sender.weight_buckets()

    async def _take(self) -> None:
        self._is_taken = await self._sender.take(is_checked=self._checks)

    async def _pause(self) -> float:
        """When the first engine stood still: until then it finished a forward pass, which may be a long prefill."""
        stood_still: list[float] = []

        async def pause(engine: WeightReceiver) -> None:
            await engine.pause(self._pause_mode)
            stood_still.append(asyncio.get_running_loop().time())

        pausing = {engine.url: pause(engine) for engine in self._engines}
        try:
            await self._together("pausing", pausing, self._timeout_s)
        except WeightUpdateFailed:
            for engine in self._engines:
                with contextlib.suppress(AsyncRLError):  # the failure to report is the first one
                    await engine.go_on()
            raise
        return min(stood_still)

    async def _move(self, label: str) -> None:
        """All buckets, from the trainer to all engines."""
        moving = {} if self._is_taken else {"trainer": self._sender.send(is_checked=self._checks)}
        self._is_taken = False
        if self.is_direct:
            moving |= {engine.url: self._receive_all(engine, label) for engine in self._engines}
            await self._together("sending the weights", moving, self._timeout_s)
            return
        kept: list[bool] = []
        moving |= {engine.url: self._receive_each(engine, label, kept) for engine in self._engines}
        await self._together("sending the weights", moving, self._timeout_s * len(self._buckets))
        self.is_direct = all(kept)

    async def _receive_all(self, engine: WeightReceiver, label: str) -> None:
        await engine.receive_all(self._buckets, group_name=self.group_name, label=label, is_checked=self._is_checked)

    async def _receive_each(self, engine: WeightReceiver, label: str, kept: list[bool]) -> None:
        """Bucket by bucket.  The last one brings the label: then all weights are new."""
        last = len(self._buckets) - 1
        for number, bucket in enumerate(self._buckets):
            told = label if number == last else None
            kept.append(await engine.receive(bucket, group_name=self.group_name, label=told))

    @property
    def _checks(self) -> bool:
        """Whether the trainer sends checksums: only engines that take all buckets at once ask for them."""
        return self._is_checked and self.is_direct

    async def _together(self, doing: str, work: Mapping[str, Coroutine[Any, Any, None]], timeout_s: float) -> None:
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
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                for who, task in work.items():
                    tasks.create_task(one(who, task), name=f"{doing}: {who}")
        except TimeoutError as error:
            missing = ", ".join(sorted(waiting))
            raise WeightUpdateFailed(f"{doing}: no answer from {missing} within {timeout_s:g} s") from error
        except ExceptionGroup as errors:
            _, bugs = errors.split(AsyncRLError)
            if bugs is not None:
                raise bugs.exceptions[0] from errors
            who, cause = next(iter(failed.items()))
            raise WeightUpdateFailed(f"{doing}: {who}: {cause}") from cause

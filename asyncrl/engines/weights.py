"""Carries the trainer's weights to every engine, over a collective group of the trainer's rank 0 and all engine ranks.

    take    the trainer copies its weights, begins to send them, and may go on training
    again   the trainer, which trains, begins to send that copy to the engines that there are now
    push    pause all engines ──▶ they receive ──▶ all go on

The first push sends bucket by bucket, by name; engines that say so take all later ones in one request
(``engines/sglang/direct``).

Knows neither HTTP nor torch: engines and trainer are Protocols.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.everyone import everyone
from asyncrl.engines.paused import LOST_S, Pausable, PausedRound, PauseMode, Stillness
from asyncrl.engines.roster import Roster
from asyncrl.errors import AsyncRLError, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)


class WeightSender(Protocol):
    """The trainer's side.  Raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """What will be sent, in order; the same for every update."""

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group as rank 0, also while training, and serve its rendezvous at ``master_port``."""

    async def take(self, *, is_checked: bool) -> bool:
        """Copy the present weights and begin to broadcast them to the group, all buckets in order.

        False, and nothing done, when ``send`` is to do it instead.
        """

    async def send_again(self, *, is_checked: bool) -> bool:
        """Begin to broadcast what ``take`` copied last once more, also while training.

        False, and nothing done, if it has no copy of it any more.
        """

    async def send(self, *, is_checked: bool, timeout_s: float) -> None:
        """Broadcast the present weights to the group, all buckets in order.  Training has to wait for it.

        ``is_checked``: a checksum behind each bucket, for engines that ask for it.
        """

    async def abandon(self, group_name: str) -> None:
        """Give that group up at once, also while training: nobody in it waits for its members any more.

        Nothing, if the trainer is in another group by now.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What an engine says of one bucket, or all of them, that it has loaded."""

    is_kept: bool
    """It can take this bucket with others in ``receive_all`` from now on."""
    still_s: float | None = None
    """Seconds since it stood still, if it knows; of the last bucket."""
    not_replayed: tuple[str, ...] = ()
    """First tensors of buckets whose copies were found to be incomplete, and which are loaded by name from now on."""


class WeightReceiver(Pausable, Protocol):
    """One engine's side.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    num_ranks: int

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group with ``num_ranks`` ranks from ``rank_offset``."""

    async def receive(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> Received:
        """Take and load one bucket; ``label`` becomes the weight version."""

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool
    ) -> Received:
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
        self._round = PausedRound(roster, timeout_s=timeout_s, pause_mode=pause_mode, lost_s=lost_s)
        self._prefix = self.group_name = group_name
        self._is_checked = is_checked
        self._buckets: tuple[WeightBucket, ...] = ()
        self.is_direct = False
        """Whether all engines take all buckets at once, as the next push will have them do."""
        self._is_taken = False
        """Whether the trainer is sending already."""
        self._is_copied = False
        """Whether it can send the same once more."""
        self._warned = set[tuple[str, str]]()
        """Engines and buckets."""

    async def connect(self) -> None:
        """Form the group of all engines that are there.  Raises WeightUpdateFailed."""
        self._engines, self._formed_for = self._roster.present, self._roster.changes
        self.group_name = f"{self._prefix}-{self._formed_for}"
        self._is_taken = self.is_direct = False
        if not self._engines:  # those that come back get an update of their own
            return
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
        await everyone("forming the weight-update group", joining, self._timeout_s)
        if not self._buckets:
            await everyone("asking what will be sent", {"trainer": self._ask_for_buckets()}, self._timeout_s)

    async def take(self) -> bool:
        """See ``WeightUpdater.take``."""
        if not self._buckets:
            raise WeightUpdateFailed("take came before connect, or the trainer has nothing to send")
        self._is_copied = False
        await self._reconnect()
        if not self._engines:
            return True
        await everyone("copying the weights", {"trainer": self._take()}, self._timeout_s)
        self._is_copied = self._is_taken
        return self._is_taken

    async def take_again(self) -> bool:
        """See ``WeightUpdater.take_again``."""
        if not self._is_copied:
            return False
        await self._reconnect()
        if not self._engines:
            return True
        await everyone("sending the copied weights again", {"trainer": self._send_again()}, self._timeout_s)
        return self._is_taken

    async def push(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.push``."""
        if not self._buckets:
            raise WeightUpdateFailed("push came before connect, or the trainer has nothing to send")
        if not self._engines:
            return UpdateReport(pause_s=0.0, total_s=0.0, num_bytes=0)
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        move = partial(self._move, str(weights.version))
        try:
            return await self._round.run(self._engines, self._formed_for, move, num_bytes, self._abandon)
        except UpdateInterrupted:
            await self._abandon()
            raise

    async def newcomers(self) -> None:
        """See ``WeightUpdater.newcomers``."""
        await self._roster.newcomers()

    async def _reconnect(self) -> None:
        """Form the group anew, if engines have come or gone."""
        if self._roster.changes != self._formed_for:
            async with self._round.blaming_the_lost(self._roster.present, self._roster.changes):
                await self.connect()

    async def _abandon(self) -> bool:
        """Before anybody waits for the trainer, which itself may wait for the engine that has died."""
        try:
            await self._sender.abandon(self.group_name)
        except AsyncRLError as error:  # the trainer will be asked again
            logger.warning("%s was not given up: %s", self.group_name, error)
            return False
        return True

    async def _ask_for_buckets(self) -> None:
        self._buckets = await self._sender.weight_buckets()

    async def _take(self) -> None:
        self._is_taken = await self._sender.take(is_checked=self._checks)

    async def _send_again(self) -> None:
        self._is_taken = await self._sender.send_again(is_checked=self._checks)

    async def _move(self, label: str) -> float | None:
        """All buckets, from the trainer to all engines; when the first of them stood still, if all say so."""
        kept: list[bool] = []
        still = Stillness()
        receive = partial(self._receive_all, still) if self.is_direct else partial(self._receive_each, still, kept)
        timeout_s = self._timeout_s * (1 if self.is_direct else len(self._buckets))
        moving = {engine.url: receive(engine, label) for engine in self._engines}
        if not self._is_taken:
            moving["trainer"] = self._sender.send(is_checked=self._checks, timeout_s=timeout_s)
        self._is_taken = False
        await everyone("sending the weights", moving, timeout_s)
        self.is_direct = self.is_direct or all(kept)
        return still.first()

    async def _receive_all(self, still: Stillness, engine: WeightReceiver, label: str) -> None:
        received = await engine.receive_all(
            self._buckets, group_name=self.group_name, label=label, is_checked=self._is_checked
        )
        still.note(received.still_s)
        self._warn_of(engine, received)

    async def _receive_each(self, still: Stillness, kept: list[bool], engine: WeightReceiver, label: str) -> None:
        """Bucket by bucket.  The last one brings the label: then all weights are new."""
        *others, last = self._buckets
        for bucket in others:
            kept.append((await engine.receive(bucket, group_name=self.group_name, label=None)).is_kept)
        received = await engine.receive(last, group_name=self.group_name, label=label)
        kept.append(received.is_kept)
        still.note(received.still_s)

    def _warn_of(self, engine: WeightReceiver, received: Received) -> None:
        """Once for each engine and bucket: an engine repeats it in every answer, one of which may be lost."""
        for name in received.not_replayed:
            if (engine.url, name) not in self._warned:
                self._warned.add((engine.url, name))
                logger.warning(
                    "%s: SGLang's loader did more for the bucket of %s than the copies that were watched; its weights "
                    "are right, and it is loaded by SGLang from now on, which takes longer",
                    engine.url,
                    name,
                )

    @property
    def _checks(self) -> bool:
        """Whether the trainer sends checksums: only engines that take all buckets at once ask for them."""
        return self._is_checked and self.is_direct

"""Weight updates by broadcast, over a collective group of the trainer's rank 0 and all engine ranks.

                 trainer                                        engines
    snapshot     snapshot: copies its weights and begins to
                 send the copy; training may continue
    resnapshot   resend: begins to send that copy once more
    publish      send: sends its weights, unless a copy is      pause all ──▶ receive ──▶ all resume
                 being sent; training waits

The first update sends bucket by bucket, with tensor names.  Engines that support it receive all buckets of later
updates in one request (``engines/sglang/plugin/direct``).  From the third update on, each rank of an engine with expert
parallelism gets only the experts that it holds (``expert_parts``).

If an update fails and all engines answer HTTP, the trainer meets each engine in a separate group (``path_check``).
Engines that it cannot meet are restarted, and the update is repeated without them.  A restarted engine is met before it
joins the group of all: NCCL would hang there for everyone if its path is still cut.

Uses neither HTTP nor torch: engines and trainer are Protocols.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Protocol

from asyncrl.engines.gather import ask_one, gather
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import EngineParts, name_of_parts, num_parts_of, obstacle, worst_of
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.reach import EngineEnd, Reach, TrainerEnd
from asyncrl.engines.weight_sync.round import LOST_S, Pausable, PausedRound, PauseMode, Stillness
from asyncrl.errors import AsyncRLError, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights

logger = logging.getLogger(__name__)

_MOST_NAMED = 3
"""Most buckets that a warning names."""


class WeightSender(TrainerEnd, Protocol):
    """The trainer's side of a broadcast.  Every method raises TrainerFailed."""

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """Return the buckets in the order in which they are sent; the same for every update."""

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        """Serve the rendezvous of a group at ``master_port`` until the group is left; possible while training."""

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group as rank 0, once it is open; possible while training."""

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        """Join, as rank 0, one more group of ``world_size`` ranks for each expert part; possible while training."""

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        """Copy the current weights and begin to broadcast the copy to the group, all buckets in order.

        ``by_part`` broadcasts the buckets of an expert part to the group of that part alone.  Returns False, without a
        copy, if ``send`` must send the weights instead.
        """

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        """Begin to broadcast the last snapshot once more; possible while training.

        Returns False, without a broadcast, if the snapshot is gone.
        """

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        """Broadcast the current weights to the group, all buckets in order.  Training must wait until this returns.

        ``is_checked`` adds a checksum after each bucket, for engines that expect it.
        """

    async def abandon(self, group_name: str) -> None:
        """Give up that group at once, so that no member waits for another any longer; possible while training.

        No-op if the trainer is already in another group.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An engine's answer once it has loaded a bucket."""

    is_recorded: bool
    """Whether the engine can receive this bucket with others in ``receive_all`` from now on."""
    still_s: float | None = None
    """Seconds since the end of the engine's last forward pass, sent with the last bucket; None if unknown."""
    not_replayed: tuple[str, ...] = ()
    """First tensors of the buckets whose recorded copies were found incomplete; they are loaded by name from now on."""
    parts: EngineParts | None = None
    """The expert parts that need each bucket; None if the engine has no expert parallelism or does not report it."""


class WeightReceiver(Pausable, EngineEnd, Protocol):
    """One engine's side of a broadcast.  Every command raises EngineTimeout, EngineLost or EngineRejected."""

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join the group with ``num_ranks`` ranks from ``rank_offset``."""

    async def join_parts(self, *, rank_offset: int, world_size: int, group_name: str, backend: str) -> None:
        """Join the group of each rank's expert part, from ``rank_offset`` in each of them."""

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> Received:
        """Receive and load one bucket; ``label`` becomes the weight version."""

    async def receive_all(
        self, buckets: Sequence[WeightBucket], *, group_name: str, label: str, is_checked: bool, by_part: bool
    ) -> Received:
        """Receive and load all buckets; ``label`` becomes the weight version.

        With ``by_part`` each rank receives only the buckets that its expert part needs.  ``is_checked`` compares the
        received bytes and the loaded weights with the trainer's.
        """


class PartState(Enum):
    """The agreement of trainer and engines that each rank gets only the experts that it holds."""

    UNKNOWN = auto()
    """No direct update of this group has ended, so that no engine has reported."""
    REFUSED = auto()
    """An engine holds experts elsewhere, or does not report it."""
    AGREED = auto()
    """All engines hold the experts as planned; the groups of the parts are formed before the next update."""
    JOINED = auto()
    """The groups are there."""


class BroadcastUpdater:
    """``WeightUpdater`` by broadcast.  Call ``connect`` once, first; at most one ``publish`` at a time.

    The group is formed anew whenever the membership has changed, because a group with a dead member is of no use, and
    after a command's connection broke, because the trainer has given the group up.
    """

    def __init__(
        self,
        membership: EngineMembership[WeightReceiver],
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
        """Set the deadlines: ``timeout_s`` for forming the group and for each bucket of an update.

        ``find_port`` returns a free port on the trainer's host.  ``is_checked`` compares each update with what the
        trainer sent, once engines receive all buckets at once.  ``lost_s`` is how many seconds a failed update waits
        for its cause, an engine, to be found dead.
        """
        self._sender = sender
        self._master_address = master_address
        self._find_port = find_port
        self._backend = backend
        self._timeout_s = timeout_s
        self._reach = Reach(
            sender, master_address=master_address, find_port=find_port, backend=backend, timeout_s=timeout_s
        )
        self._membership = membership
        self._round = PausedRound[WeightReceiver](membership, timeout_s=timeout_s, pause_mode=pause_mode, lost_s=lost_s)
        """The round whose engines form the group with the trainer."""
        self._prefix = self.group_name = group_name
        self._num_groups = 0
        self._is_checked = is_checked
        self._buckets: tuple[WeightBucket, ...] = ()
        self.is_direct = False
        """Whether all engines receive all buckets in one request in the next update."""
        self._by_part = PartState.UNKNOWN
        """Whether each rank gets only the experts that it holds in the next update."""
        self._reports: dict[str, EngineParts | None] = {}
        """The reports of the engines on the last direct update."""
        self._is_sending = False
        """Whether the trainer is already sending a snapshot."""
        self._has_snapshot = False
        """Whether the trainer may be able to resend the last snapshot."""
        self._needs_group = False
        """Whether the trainer was restarted since the group was formed."""
        self._warned = set[tuple[str, str]]()
        """Pairs of engine URL and bucket that have been warned about."""

    async def connect(self) -> None:
        """Form the group of the trainer and all engines that are present.  Raises WeightUpdateFailed."""
        self._round.choose()
        self.group_name = f"{self._prefix}-{self._num_groups}"
        self._num_groups += 1
        self._is_sending = self.is_direct = False
        self._by_part = PartState.UNKNOWN
        if not self._round.engines:  # restarted engines get another update
            return
        master_port = await self._find_port()
        world_size = 1 + sum(engine.num_ranks for engine in self._round.engines)
        # First, so that an engine that meets a closed port knows that the group was given up.
        opening = self._sender.open_group(
            master_address=self._master_address, master_port=master_port, group_name=self.group_name
        )
        await ask_one("opening the weight-update group", "trainer", opening, self._timeout_s)
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
        for engine in self._round.engines:
            joining[engine.url] = engine.join_group(
                master_address=self._master_address,
                master_port=master_port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=self.group_name,
                backend=self._backend,
            )
            rank_offset += engine.num_ranks
        await gather("forming the weight-update group", joining, self._timeout_s)
        self._needs_group = False
        if not self._buckets:
            asking = self._sender.weight_buckets()
            self._buckets = await ask_one("listing the buckets", "trainer", asking, self._timeout_s)

    def trainer_restarted(self, address: str) -> None:
        """See ``WeightUpdater.trainer_restarted``.  Engines leave the group of the old ranks once they are in another.

        An engine that waits in it fails by itself: its store ended with rank 0.
        """
        self._master_address = self._reach.master_address = address
        self._needs_group = True
        self._is_sending = self._has_snapshot = False

    async def snapshot(self) -> bool:
        """See ``WeightUpdater.snapshot``."""
        if not self._buckets:
            raise WeightUpdateFailed("snapshot was called before connect, or the trainer has no weights to send")
        self._has_snapshot = False
        await self._reconnect()
        if not self._round.engines:
            return True
        copying = self._sender.snapshot(is_checked=self._checks, by_part=self.is_by_part)
        self._is_sending = await ask_one("copying the weights", "trainer", copying, self._timeout_s)
        self._has_snapshot = self._is_sending
        return self._is_sending

    async def resnapshot(self) -> bool:
        """See ``WeightUpdater.resnapshot``."""
        if not self._has_snapshot:
            return False
        await self._reconnect()
        if not self._round.engines:
            return True
        resending = self._sender.resend(is_checked=self._checks, by_part=self.is_by_part)
        self._is_sending = await ask_one("resending the snapshot", "trainer", resending, self._timeout_s)
        return self._is_sending

    async def publish(self, weights: Weights) -> UpdateReport:
        """See ``WeightUpdater.publish``."""
        if not self._buckets:
            raise WeightUpdateFailed("publish was called before connect, or the trainer has no weights to send")
        num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        receive = partial(self._receive, str(weights.version))
        self._reports = {}
        try:
            report = await self._round.publish(receive, num_bytes, self._abandon, self._cut_off)
        except UpdateInterrupted:
            await self._abandon()
            raise
        self._decide_parts()
        return replace(report, rank_bytes=worst_of(self._reports.values()))

    async def wait_for_rejoined(self) -> None:
        """See ``WeightUpdater.wait_for_rejoined``."""
        await self._round.wait_for_rejoined()

    @property
    def is_by_part(self) -> bool:
        """Whether each rank gets only the experts that it holds in the next update."""
        return self._by_part is PartState.JOINED

    async def _reconnect(self) -> None:
        """Form the group anew if the membership has changed, or the groups of expert parts if they are needed now."""
        if self._round.is_outdated or self._needs_group:
            await self._round.leave_out(await self._reach.unmet(self._membership.waiting))
            await self._form(self.connect)
        elif self._by_part is PartState.AGREED and self._round.engines:
            await self._form(self._join_parts)

    async def _form(self, forming: Callable[[], Awaitable[None]]) -> None:
        """Form groups.  After a failure, neither the trainer nor an engine waits for other members any longer."""
        try:
            async with self._round.blaming_the_lost(self._abandon, self._cut_off):
                await forming()
        except UpdateInterrupted:
            await self._abandon()
            raise

    async def _join_parts(self) -> None:
        """Form one group of the trainer and all engines for each expert part."""
        num_parts = num_parts_of(self._buckets)
        name = name_of_parts(self.group_name, num_parts)
        world_size = 1 + sum(engine.num_ranks // num_parts for engine in self._round.engines)
        joining = {
            "trainer": self._sender.join_parts(
                num_parts=num_parts, world_size=world_size, group_name=name, backend=self._backend
            )
        }
        rank_offset = 1
        for engine in self._round.engines:
            joining[engine.url] = engine.join_parts(
                rank_offset=rank_offset, world_size=world_size, group_name=name, backend=self._backend
            )
            rank_offset += engine.num_ranks // num_parts
        await gather("forming the groups of expert parts", joining, self._timeout_s)
        self._by_part = PartState.JOINED

    def _decide_parts(self) -> None:
        """Decide, after the first direct update, whether later ones send experts by part; warn once if they do not."""
        if self._by_part is not PartState.UNKNOWN or not self._reports:
            return
        sizes = {parts.num_parts for parts in self._reports.values() if parts is not None}
        if num_parts_of(self._buckets) == 1 and sizes <= {1}:
            return
        ranks = {engine.url: engine.num_ranks for engine in self._round.engines}
        reason = obstacle(self._buckets, ranks, self._reports)
        self._by_part = PartState.AGREED if reason is None else PartState.REFUSED
        if reason is not None and ("", reason) not in self._warned:
            self._warned.add(("", reason))
            logger.warning("weight updates send all experts to every engine rank: %s", reason)

    async def _abandon(self) -> bool:
        """Give up the group, and return whether that worked.

        Called before anything waits for the trainer, which may itself be waiting for the engine that died.
        """
        try:
            await self._sender.abandon(self.group_name)
        except AsyncRLError as error:  # the trainer is asked again later
            logger.warning("the trainer did not give up the update group %s: %s", self.group_name, error)
            return False
        return True

    async def _cut_off(self) -> dict[str, str]:
        """Return the engines of this update that the trainer cannot meet, with the reasons.

        Returns nothing if it meets none of several: the fault may be its own.
        """
        engines = self._round.engines
        if not await self._abandon():  # also ends what the trainer still does for the group
            return {}
        logger.warning("all engines answer HTTP; the trainer meets each of the %d over %s", len(engines), self._backend)
        unmet = await self._reach.unmet(engines)
        if len(unmet) == len(engines) > 1:
            logger.warning("the trainer meets none of the %d engines: %s", len(engines), next(iter(unmet.values())))
            return {}
        return unmet

    async def _receive(self, label: str) -> float | None:
        """Send all buckets from the trainer to all engines.

        Returns the event loop's time at which the first engine had ended its last forward pass; None unless all know.
        """
        recorded: list[bool] = []
        still = Stillness()
        receive = partial(self._receive_all, still) if self.is_direct else partial(self._receive_each, still, recorded)
        timeout_s = self._timeout_s * (1 if self.is_direct else len(self._buckets))
        sending = {engine.url: receive(engine, label) for engine in self._round.engines}
        if not self._is_sending:
            sending["trainer"] = self._sender.send(
                is_checked=self._checks, by_part=self.is_by_part, timeout_s=timeout_s
            )
        self._is_sending = False
        await gather("sending the weights", sending, timeout_s)
        self.is_direct = self.is_direct or all(recorded)
        return still.first()

    async def _receive_all(self, still: Stillness, engine: WeightReceiver, label: str) -> None:
        received = await engine.receive_all(
            self._buckets,
            group_name=self.group_name,
            label=label,
            is_checked=self._is_checked,
            by_part=self.is_by_part,
        )
        still.note(received.still_s)
        self._reports[engine.url] = received.parts
        self._warn_of(engine, received)

    async def _receive_each(self, still: Stillness, recorded: list[bool], engine: WeightReceiver, label: str) -> None:
        """Receive bucket by bucket.  The last bucket carries the label, because only then all weights are new."""
        *others, last = self._buckets
        for bucket in others:
            recorded.append((await engine.receive_bucket(bucket, group_name=self.group_name, label=None)).is_recorded)
        received = await engine.receive_bucket(last, group_name=self.group_name, label=label)
        recorded.append(received.is_recorded)
        still.note(received.still_s)

    def _warn_of(self, engine: WeightReceiver, received: Received) -> None:
        """Warn once per engine and bucket.  An engine repeats the names in every answer, because one may be lost."""
        new = [name for name in received.not_replayed if (engine.url, name) not in self._warned]
        if not new:
            return
        self._warned.update((engine.url, name) for name in new)
        logger.warning(
            "%s: SGLang's loader did more for %d bucket(s) than the copies that were recorded (first tensors: %s); the "
            "weights are right, and SGLang's loader loads these buckets from now on, which takes longer",
            engine.url,
            len(new),
            ", ".join(new[:_MOST_NAMED]) + (", ..." if len(new) > _MOST_NAMED else ""),
        )

    @property
    def _checks(self) -> bool:
        """Whether the trainer sends checksums.  Only engines that receive all buckets at once expect them."""
        return self._is_checked and self.is_direct

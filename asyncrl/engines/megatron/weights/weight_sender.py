"""The trainer's end of a weight update: sends the weights to the engines as buckets of bytes.

    snapshot   all buckets are copied at once ──▶ training continues ║ a thread broadcasts the copies
    resend     the thread broadcasts the copies again, after an engine was lost or restarted
    send       bucket i is broadcast while i+1 is copied; training waits for the last one
    share      engines on the same device map one bucket at a time; training waits for the last one
    write      tensor after tensor is written to files; training waits for the last one

With expert-parallel engines, each bucket of experts is broadcast to the ranks of one expert part (``expert_parts``).
A snapshot takes as many bytes on rank 0's device as the engines have weights.  Where that is too much, weights are sent
without a snapshot, through two buffers, which are allocated before the engines pause.
Tensors that engines have in FP8 are quantized as they are gathered.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from asyncrl.engines.megatron.checkpoint.hf_files import replace_checkpoint
from asyncrl.engines.megatron.weights.fp8 import BlockFp8
from asyncrl.engines.megatron.weights.handles import handle_of
from asyncrl.engines.megatron.weights.hf_weights import export_bucket, parts_of, plan_buckets, sent_changes
from asyncrl.engines.megatron.weights.sharding import Weight, is_split, local_weights
from asyncrl.engines.megatron.weights.update_group import flatten, stream_of_its_own
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.flat import checksum, views
from asyncrl.engines.weight_sync.group_abort import UpdateGroups, abandon, is_abandoned, wait_on_stream
from asyncrl.errors import TrainerOutOfMemory, WeightUpdateFailed
from asyncrl.internals import Internal
from asyncrl.models.shape import ModelShape

INTERNALS = (
    Internal(name="torch._foreach_copy_", used_in=__name__),
    Internal(name="torch.cuda.ipc_collect", used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

ARRIVAL_S = 60.0
"""The deadline for all waiting engines to receive a bucket while training waits, in seconds.  A dead engine never
receives it."""
LOOK_EVERY_S = 0.0005
"""The interval between two looks at whether they have, in seconds."""
FINISH_S = 5.0
"""The time in which sending must end here after all engines have received everything, in seconds.  A lost engine never
receives it."""


class RankWeightSender:
    """The sender of one rank.  Every rank makes the same calls.

    ``groups`` connect rank 0 and the engines; they are None on the other ranks.  ``by_part`` sends each bucket with an
    expert part to the group of that part, and all others to the main group.
    """

    def __init__(
        self,
        model: GPTModel,
        shape: ModelShape,
        max_bytes: int,
        *,
        is_copied: bool,
        fp8: BlockFp8 | None = None,
        num_parts: int = 1,
    ) -> None:
        """Plan the buckets.  Collective.

        ``is_copied``: copy the weights, so that training continues while they are sent.  ``fp8``: the tensors that
        engines have in FP8, and receive in FP8.  ``num_parts``: the engines' expert parts.
        """
        self.buckets, self._plan = plan_buckets(model, shape, max_bytes, fp8, num_parts)
        self._fp8 = fp8
        self._model = model
        self._shape = shape
        self._device = next(model.parameters()).device
        self._is_copied = is_copied
        self._copies: _Copies | None = None
        self._sending: _Sending | None = None
        self._shared: Tensor | None = None

    @torch.no_grad()
    def snapshot(self, groups: UpdateGroups | None, *, is_checked: bool, by_part: bool = False) -> bool:
        """Copy the present weights and begin to broadcast the copy.

        Returns False if the caller must use ``send`` instead, for which buffers are then allocated.  Raises
        WeightUpdateFailed if the previous broadcast failed.
        """
        self.finish()
        if not self._is_copied:
            self._copies = None  # frees the buffers of an interrupted update
            if groups is not None:
                self._copies = self._new_copies(2)
            return False
        if groups is None:
            self._follow()
            return True
        if self._copies is None or not self._copies.are_current():
            self._copies = None
            self._copies = self._new_copies(len(self.buckets))
        flats = list(self._copies.snapshot(self._model))
        # Invariant: the copies are complete before the thread starts.  It broadcasts on another stream, which does not
        # wait for this one, and training may change the weights as soon as this returns.
        _synchronize(self._device)
        self._sending = _Sending(flats, groups, self._route(groups, by_part=by_part), is_checked=is_checked)
        return True

    def resend(self, groups: UpdateGroups, *, is_checked: bool, by_part: bool = False) -> bool:
        """Begin to broadcast the last snapshot once more, from rank 0.  Another thread may be training.

        Returns False if that snapshot is gone.  Raises WeightUpdateFailed if the previous broadcast failed.
        """
        self.finish()
        if not self._is_copied or self._copies is None:
            return False
        flats = self._copies.flats
        self._sending = _Sending(flats, groups, self._route(groups, by_part=by_part), is_checked=is_checked)
        return True

    @torch.no_grad()
    def send(self, groups: UpdateGroups | None, *, is_checked: bool, by_part: bool = False) -> None:
        """Broadcast the present weights, and return when all engines have them.  Raises WeightUpdateFailed."""
        if groups is None:
            self._follow()
            return
        copies, self._copies = self._copies or self._new_copies(2), None
        flats = copies.snapshot(self._model)
        try:
            sent = zip(flats, self._route(groups, by_part=by_part), strict=True)
            _broadcast(sent, groups, is_checked=is_checked, within_s=ARRIVAL_S)
        except RuntimeError as error:
            for _ in flats:  # the other ranks take part in gathering all buckets, whether or not sending failed
                pass
            kind = TrainerOutOfMemory if isinstance(error, torch.OutOfMemoryError) else WeightUpdateFailed
            raise kind(f"the weights were not delivered: {error}") from error

    @torch.no_grad()
    def share(self, bucket: int) -> str:
        """Gather the present weights of a bucket on this rank's device and return a handle of them.  Collective.

        See ``handles``.
        """
        self.unshare()  # first, because there is memory for one bucket only
        self._shared = self._gathered(self._plan[bucket])
        _synchronize(self._device)
        return handle_of(self._shared, self.buckets[bucket])

    def unshare(self) -> None:
        """Free the shared bucket.  Call it when no engine has the bucket mapped any more."""
        # Invariant: no engine has the bucket mapped.  ``ipc_collect`` frees what other processes have released.
        self._shared = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write(self, source: Path, folder: Path, *, is_writer: bool) -> None:
        """Write the weights that ``send`` would send to ``folder``, with the other files of the checkpoint ``source``.

        ``folder`` appears, or is replaced, when it is complete.  Ranks without ``is_writer`` only contribute their
        parts.  Raises WeightUpdateFailed.
        """
        if not is_writer:
            self._follow()
            return
        buckets = map(self._exported, self._plan)
        try:
            replace_checkpoint(chain.from_iterable(buckets), source, folder, sent_changes(source, self._shape))
        except OSError as error:
            raise WeightUpdateFailed(f"{folder}: the weights cannot be written: {error.strerror}") from error

    def finish(self) -> None:
        """Return once nothing is being sent.  Raises WeightUpdateFailed if sending failed or did not end in time."""
        sending = self._sending
        if sending is None:
            return
        if not sending.has_ended(FINISH_S):
            self.abandon()
            raise WeightUpdateFailed(f"the weights were not delivered {FINISH_S:g} s after the update")
        self._sending = None
        if sending.failure is not None:
            raise WeightUpdateFailed(f"the weights were not delivered: {sending.failure}")

    def abandon(self) -> None:
        """Stop sending.  The group cannot be used any more."""
        sending, self._sending = self._sending, None
        if sending is not None and not sending.has_ended(0.0):
            abandon(sending.groups)
            if not sending.has_ended(FINISH_S):  # gloo has no abort; the broadcast ends at the group's timeout
                logger.warning("an abandoned weight update still holds %d buckets", len(self.buckets))
                self._copies = None

    def _route(self, groups: UpdateGroups, *, by_part: bool) -> list[dist.ProcessGroup]:
        """Return the group that each bucket is broadcast to."""
        parts = [bucket.expert_part if by_part else None for bucket in self.buckets]
        return [groups.main if part is None else groups.parts[part] for part in parts]

    def _new_copies(self, num_buffers: int) -> "_Copies":
        return _Copies(self._model, self._shape, self.buckets, self._plan, self._fp8, num_buffers)

    def _follow(self) -> None:
        """Contribute this rank's parts to all buckets, which rank 0 gathers."""
        if is_split():
            for weights in self._plan:
                for _ in export_bucket(self._model, self._shape, weights):
                    pass

    def _gathered(self, weights: Sequence[Weight]) -> Tensor:
        return flatten(tensor for _, tensor in self._exported(weights))

    def _exported(self, weights: Sequence[Weight]) -> Iterator[tuple[str, Tensor]]:
        return export_bucket(self._model, self._shape, weights, self._fp8)


class _Sending:
    """A thread that broadcasts buckets, and its failure."""

    def __init__(
        self, flats: Sequence[Tensor], groups: UpdateGroups, route: Sequence[dist.ProcessGroup], *, is_checked: bool
    ) -> None:
        """Begin to broadcast each of ``flats`` to the group at its place in ``route``."""
        self.groups = groups
        # Invariant: until ``has_ended`` the buckets belong to the thread.  ``RankWeightSender`` calls ``finish`` before
        # it writes to them; otherwise engines would receive a mix of two versions.  ``failure`` is read only after the
        # thread has ended.
        # It is a text: an exception refers to the frames that have the groups.  gloo leaves a group only once nothing
        # refers to it, and until then its members may wait in it.
        self.failure: str | None = None
        self._flats = flats
        self._route = route
        self._is_checked = is_checked
        self._thread = Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        """Whether the thread has ended; waits for at most ``within_s`` seconds."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with stream_of_its_own(self._flats[0].device):
                _broadcast(zip(self._flats, self._route, strict=True), self.groups, is_checked=self._is_checked)
        except (RuntimeError, ValueError) as error:  # ValueError: this rank left the group meanwhile
            self.failure = str(error)


class _Copies:
    """The buffers for the buckets of a model, used in rotation, and the copies that fill them."""

    def __init__(
        self,
        model: GPTModel,
        shape: ModelShape,
        buckets: Sequence[WeightBucket],
        plan: Sequence[Sequence[Weight]],
        fp8: BlockFp8 | None,
        num_buffers: int,
    ) -> None:
        """Allocate at most ``num_buffers`` buffers.  With one for each bucket, every bucket lasts."""
        num_buffers = min(num_buffers, len(buckets))
        sizes = [max(bucket.num_bytes for bucket in buckets[first::num_buffers]) for first in range(num_buffers)]
        device = next(model.parameters()).device
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self.flats = [buffers[number % num_buffers][: each.num_bytes] for number, each in enumerate(buckets)]
        self._weights = local_weights(model)
        self._parameters = tuple(model.parameters())
        self._addresses = self._places()
        self._plan = plan
        self._shape = shape
        self._fp8 = fp8
        self._targets = [
            views(flat, bucket.dtypes, bucket.shapes) for flat, bucket in zip(self.flats, buckets, strict=True)
        ]
        self._is_exported = is_split() or fp8 is not None
        """Whether buckets need gathering or quantization, not copies alone."""
        self._pairs = [] if self._is_exported else list(map(self._sorted, self._targets, plan))

    def are_current(self) -> bool:
        """Whether the model's weights still have the same addresses."""
        return self._places() == self._addresses

    def snapshot(self, model: GPTModel) -> Iterator[Tensor]:
        """Copy the present weights and yield bucket after bucket.  Collective.

        A bucket lasts until the caller requests the one ``num_buffers`` later.
        """
        for number, flat in enumerate(self.flats):
            if self._is_exported:
                exported = export_bucket(model, self._shape, self._plan[number], self._fp8)
                for target, (_, tensor) in zip(self._targets[number], exported, strict=True):
                    target.copy_(tensor)
            else:
                for targets, sources in self._pairs[number]:
                    torch._foreach_copy_(targets, sources)
            yield flat

    def _places(self) -> list[int]:
        # Invariant: these are the parameters, not ``self._weights``.  The parts of experts are views, which keep
        # the old memory if a parameter gets other memory.
        return [parameter.data_ptr() for parameter in self._parameters]

    def _sorted(
        self, all_targets: Sequence[Tensor], weights: Sequence[Weight]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return targets and sources of a bucket in lists of like dtypes and strides.  One call copies a list."""
        pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        named = ((weight.name, self._weights[weight.name]) for weight in weights)
        all_sources = chain.from_iterable(parts_of(name, whole, self._shape) for name, whole in named)
        for target, source in zip(all_targets, all_sources, strict=True):
            target = target.view(source.shape)
            key = source.dtype, target.stride() == source.stride()
            targets, sources = pairs.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)
        return list(pairs.values())


def _broadcast(
    buckets: Iterator[tuple[Tensor, dist.ProcessGroup]],
    groups: UpdateGroups,
    *,
    is_checked: bool,
    within_s: float | None = None,
) -> None:
    """Broadcast bucket after bucket, each to its group.  The next one is requested while one is in flight.

    Raises RuntimeError, also if a bucket has not arrived within ``within_s`` seconds.  The groups cannot be used after
    that.
    """
    # Invariant: a broadcast starts only after the one before it, also if their groups differ.  Engines receive in the
    # same order, so no rank waits in one group for a member that waits in another.
    under_way: list[tuple[Any, Tensor]] = []
    arrived = flat = None
    for flat, group in buckets:
        _wait_for(arrived, groups, within_s)
        for work, sent in under_way:
            wait_on_stream(work, sent.device)
        arrived = _mark(flat.device)
        under_way = [(dist.broadcast(flat, src=0, group=group, async_op=True), flat)]
        if is_checked:
            told = checksum(flat)
            under_way.append((dist.broadcast(told, src=0, group=group, async_op=True), told))
    for work, sent in under_way:
        wait_on_stream(work, sent.device)
    if flat is not None:
        _wait_for(_mark(flat.device), groups, within_s)
        _synchronize(flat.device)
    if is_abandoned(groups.main):  # in an abandoned group, the waits above return although buckets have not arrived
        raise RuntimeError("the update was given up")


def _mark(device: torch.device) -> Any:
    """Record an event after the work that this thread has queued on its GPU; None on a CPU, which has none."""
    if device.type == "cpu":
        return None
    mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _wait_for(mark: Any, groups: UpdateGroups, within_s: float | None) -> None:
    """Wait until the GPU has reached ``mark``, for ``within_s`` seconds at most.

    Raises RuntimeError after that time, having abandoned the groups.  Without ``within_s`` it returns at once, because
    the driver then abandons groups that take too long.
    """
    if mark is None or within_s is None:
        return
    deadline = time.monotonic() + within_s
    while not mark.query():
        if time.monotonic() > deadline:
            abandon(groups)
            raise RuntimeError(f"not every engine took a bucket within {within_s:g} s")
        time.sleep(LOOK_EVERY_S)


def _synchronize(device: torch.device) -> None:
    """Wait for the work on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

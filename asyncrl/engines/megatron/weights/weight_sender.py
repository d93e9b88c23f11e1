"""The trainer's end of a weight update: the weights as buckets of bytes, on their way to the engines.

    snapshot   all buckets are copied at once ──▶ training continues ║ a thread broadcasts the copies
    resend     the thread broadcasts them again, where an engine was lost or is back
    send       bucket i is broadcast while i+1 is copied; training waits for the last one
    share      engines on the same device map one bucket at a time; training waits for the last one
    write      tensor after tensor is written to files; training waits for the last one

A snapshot takes as many bytes on rank 0's device as the engines have weights; where that is too much, weights are
sent without one, with room for two buckets, which is made before the engines stand still.
What engines have in fp8 is quantised as it is gathered.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from asyncrl.engines.megatron.weights.update_group import flatten
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.flat import checksum, views
from asyncrl.engines.weight_sync.group_abort import abandon, is_abandoned, wait_on_stream
from asyncrl.errors import WeightUpdateFailed
from asyncrl.internals import Internal
from asyncrl.models.shape import ModelShape

INTERNALS = (
    Internal(name="torch._foreach_copy_", used_in=__name__),
    Internal(name="torch.cuda.ipc_collect", used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

logger = logging.getLogger(__name__)

ARRIVAL_S = 60.0
"""For all engines, which wait for it, to have a bucket, where training waits for that; one that has died never has."""
LOOK_EVERY_S = 0.0005
"""Whether they have."""
FINISH_S = 5.0
"""For what all engines have received to be over on this side as well; an engine that is gone never receives it."""


class RankWeightSender:
    """One rank's part.  Every rank makes the same calls; ``group``, that of rank 0 and the engines, has rank 0 only."""

    def __init__(
        self, model: GPTModel, shape: ModelShape, max_bytes: int, *, beside: bool, fp8: BlockFp8 | None = None
    ) -> None:
        """``beside``: copy the weights, so that training goes on while they are sent.  Collective.

        ``fp8``: what the engines have in fp8, and get so.
        """
        self.buckets, self._plan = plan_buckets(model, shape, max_bytes, fp8)
        self._fp8 = fp8
        self._model = model
        self._shape = shape
        self._device = next(model.parameters()).device
        self._goes_beside = beside
        self._copies: _Copies | None = None
        self._sending: _Sending | None = None
        self._shared: Tensor | None = None

    @torch.no_grad()
    def snapshot(self, group: dist.ProcessGroup | None, *, is_checked: bool) -> bool:
        """Copy the present weights and begin to broadcast the copy.

        False, and all prepared, where ``send`` is to do it.  Raises WeightUpdateFailed if the broadcast before failed.
        """
        self.finish()
        if not self._goes_beside:
            self._copies = None  # of an update that was interrupted
            if group is not None:
                self._copies = self._new_copies(2)
            return False
        if group is None:
            self._follow()
            return True
        if self._copies is None or not self._copies.are_current():
            self._copies = None
            self._copies = self._new_copies(len(self.buckets))
        flats = list(self._copies.snapshot(self._model))
        # Invariant: the copies are complete before the thread starts.  It broadcasts on another stream, which does not
        # wait for this one, and training may change the weights as soon as this returns.
        _synchronize(self._device)
        self._sending = _Sending(flats, group, is_checked=is_checked)
        return True

    def resend(self, group: dist.ProcessGroup, *, is_checked: bool) -> bool:
        """Begin to broadcast the last snapshot once more, from rank 0, also while another thread trains.

        False if that snapshot is gone.  Raises WeightUpdateFailed if the broadcast before failed.
        """
        self.finish()
        if not self._goes_beside or self._copies is None:
            return False
        self._sending = _Sending(self._copies.flats, group, is_checked=is_checked)
        return True

    @torch.no_grad()
    def send(self, group: dist.ProcessGroup | None, *, is_checked: bool) -> None:
        """Broadcast the present weights; return when all engines have them.  Raises WeightUpdateFailed."""
        if group is None:
            self._follow()
            return
        copies, self._copies = self._copies or self._new_copies(2), None
        flats = copies.snapshot(self._model)
        try:
            _broadcast(flats, group, is_checked=is_checked, within_s=ARRIVAL_S)
        except RuntimeError as error:
            for _ in flats:  # the other ranks give their parts of all buckets, whatever becomes of them
                pass
            raise WeightUpdateFailed(f"the weights were not delivered: {error}") from error

    @torch.no_grad()
    def share(self, bucket: int) -> str:
        """A handle of the present weights of a bucket, whole, on this rank's device.  See ``handles``.  Collective."""
        self.unshare()  # first: there is room for one
        self._shared = self._gathered(self._plan[bucket])
        _synchronize(self._device)
        return handle_of(self._shared, self.buckets[bucket])

    def unshare(self) -> None:
        """Free what was shared; nobody has it mapped any more."""
        # Invariant: no engine has the bucket mapped.  ``ipc_collect`` frees what other processes have released.
        self._shared = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write(self, source: Path, folder: Path, *, is_writer: bool) -> None:
        """Write what ``send`` sends to ``folder``, beside what else belongs to the checkpoint ``source``.

        ``folder`` appears, or changes, when it is complete.  Raises WeightUpdateFailed.
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
        """Return once nothing is being sent.  Raises WeightUpdateFailed if it could not be."""
        sending = self._sending
        if sending is None:
            return
        if not sending.has_ended(FINISH_S):
            self.abandon()
            raise WeightUpdateFailed(f"the weights were not delivered {FINISH_S:g} s after the update")
        self._sending = None
        if sending.failure is not None:
            raise WeightUpdateFailed(f"the weights were not delivered: {sending.failure}") from sending.failure

    def abandon(self) -> None:
        """Stop sending: the group is of no use any more."""
        sending, self._sending = self._sending, None
        if sending is not None and not sending.has_ended(0.0):
            abandon(sending.group)
            if not sending.has_ended(FINISH_S):  # gloo knows no abort; it ends with the group's own deadline
                logger.warning("an abandoned weight update still holds %d buckets", len(self.buckets))
                self._copies = None

    def _new_copies(self, num_buffers: int) -> "_Copies":
        return _Copies(self._model, self._shape, self.buckets, self._plan, self._fp8, num_buffers)

    def _follow(self) -> None:
        """Give rank 0 this rank's parts."""
        if is_split():
            for weights in self._plan:
                for _ in export_bucket(self._model, self._shape, weights):
                    pass

    def _gathered(self, weights: Sequence[Weight]) -> Tensor:
        return flatten(tensor for _, tensor in self._exported(weights))

    def _exported(self, weights: Sequence[Weight]) -> Iterator[tuple[str, Tensor]]:
        return export_bucket(self._model, self._shape, weights, self._fp8)


class _Sending:
    """A thread that broadcasts buckets, and what became of it."""

    def __init__(self, flats: Sequence[Tensor], group: dist.ProcessGroup, *, is_checked: bool) -> None:
        self.group = group
        # Invariant: until ``has_ended`` the buckets belong to the thread.  ``RankWeightSender`` calls ``finish`` before
        # it writes to them; otherwise engines would get halves of two versions.  ``failure`` is read only after the
        # thread ended.
        self.failure: Exception | None = None
        self._flats = flats
        self._is_checked = is_checked
        self._thread = Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        """Whether it is over, waiting for so long at most."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with _stream_of_its_own(self._flats[0].device):
                _broadcast(iter(self._flats), self.group, is_checked=self._is_checked)
        except (RuntimeError, ValueError) as error:  # ValueError: of a group that was left meanwhile
            self.failure = error


class _Copies:
    """Buffers for the buckets of a model, used in turns, and what is copied where."""

    def __init__(
        self,
        model: GPTModel,
        shape: ModelShape,
        buckets: Sequence[WeightBucket],
        plan: Sequence[Sequence[Weight]],
        fp8: BlockFp8 | None,
        num_buffers: int,
    ) -> None:
        """``num_buffers``: with as many as there are buckets, all of them last."""
        num_buffers = min(num_buffers, len(buckets))
        sizes = [max(bucket.num_bytes for bucket in buckets[first::num_buffers]) for first in range(num_buffers)]
        device = next(model.parameters()).device
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self.flats = [buffers[number % num_buffers][: each.num_bytes] for number, each in enumerate(buckets)]
        self._weights = local_weights(model)
        self._addresses = self._places()
        self._plan = plan
        self._shape = shape
        self._fp8 = fp8
        self._targets = [
            views(flat, bucket.dtypes, bucket.shapes) for flat, bucket in zip(self.flats, buckets, strict=True)
        ]
        self._is_exported = is_split() or fp8 is not None
        """Whether more than copies is needed."""
        self._pairs = [] if self._is_exported else list(map(self._sorted, self._targets, plan))

    def are_current(self) -> bool:
        """Whether the model's weights still lie where they lay."""
        return self._places() == self._addresses

    def snapshot(self, model: GPTModel) -> Iterator[Tensor]:
        """Copy the present weights, bucket after bucket.  Collective.

        A bucket lasts until the one ``num_buffers`` later is asked for.
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
        return [weight.data_ptr() for weight in self._weights.values()]

    def _sorted(
        self, all_targets: Sequence[Tensor], weights: Sequence[Weight]
    ) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Targets and sources of a bucket; one call copies many where dtypes and strides are alike."""
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
    flats: Iterator[Tensor], group: dist.ProcessGroup, *, is_checked: bool, within_s: float | None = None
) -> None:
    """One after the other; the next one is asked for while one is under way.

    Raises RuntimeError, also where a bucket has not arrived ``within_s``: the group is of no use any more then.
    """
    under_way: list[tuple[Any, Tensor]] = []
    arrived = flat = None
    for flat in flats:
        _wait_for(arrived, group, within_s)
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
        _wait_for(_mark(flat.device), group, within_s)
        _synchronize(flat.device)
    if is_abandoned(group):  # then nothing waits for what has not come
        raise RuntimeError("the update was given up")


def _mark(device: torch.device) -> Any:
    """What is done once this thread's GPU has come here; a CPU is here already."""
    if device.type == "cpu":
        return None
    mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _wait_for(mark: Any, group: dist.ProcessGroup, within_s: float | None) -> None:
    """Raises RuntimeError, having left the group; without ``within_s`` somebody else looks after that."""
    if mark is None or within_s is None:
        return
    deadline = time.monotonic() + within_s
    while not mark.query():
        if time.monotonic() > deadline:
            abandon(group)
            raise RuntimeError(f"not every engine took a bucket within {within_s:g} s")
        time.sleep(LOOK_EVERY_S)


@contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Beside what the main thread has its GPU do."""
    if device.type == "cpu":
        yield
        return
    # Device and stream are a thread's own.  On the default stream a broadcast would wait for all of a training step.
    torch.cuda.set_device(device)  # a thread begins with the first one
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def _synchronize(device: torch.device) -> None:
    """Wait for what this thread has asked its GPU to do."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

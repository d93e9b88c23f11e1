"""The trainer's end of a weight update: the weights as buckets of bytes, on their way to the engines.

    beside training   all buckets are copied at once ──▶ training goes on ║ a thread broadcasts the copies
    in between        bucket i is broadcast while i+1 is gathered; training waits for the last one

The copy takes as many bytes on rank 0's device as the model has; where that is too much, updates go in between.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from asyncrl.engines.buckets import WeightBucket
from asyncrl.engines.flat import checksum, views
from asyncrl.engines.megatron.shape import ModelShape
from asyncrl.engines.megatron.sharding import Weight, is_split, local_weights
from asyncrl.engines.megatron.update_group import flatten
from asyncrl.engines.megatron.weights import export_bucket, parts_of, plan_buckets
from asyncrl.errors import WeightUpdateFailed

LARGEST_SHARE = 0.1
"""Of the device's memory, for a copy of the weights that nobody asked for."""
FINISH_S = 5.0
"""For what all engines have received to be over on this side as well; an engine that is gone never receives it."""


class Outbox:
    """One rank's part.  Every rank makes the same calls; ``group``, that of rank 0 and the engines, has rank 0 only."""

    def __init__(self, model: GPTModel, shape: ModelShape, max_bytes: int, *, beside: bool | None) -> None:
        """``beside`` None: where the copy takes at most LARGEST_SHARE of the device's memory.  Collective."""
        self.buckets, self._plan = plan_buckets(model, shape, max_bytes)
        self._model = model
        self._shape = shape
        self._device = next(model.parameters()).device
        self._goes_beside = self._has_room() if beside is None else beside
        self._copies: _Copies | None = None
        self._sending: tuple[Thread, dist.ProcessGroup] | None = None
        self._failure: RuntimeError | None = None

    @torch.no_grad()
    def take(self, group: dist.ProcessGroup | None, *, is_checked: bool) -> bool:
        """Copy the present weights and begin to broadcast them; False, and nothing done, where updates go in between.

        Raises WeightUpdateFailed if the broadcast before failed.
        """
        self.finish()
        if not self._goes_beside:
            return False
        if group is None:
            self._follow()
            return True
        if self._copies is None or not self._copies.are_current():
            self._copies = _Copies(self._model, self._shape, self.buckets, self._plan)
        self._copies.take(self._model)
        _synchronize(self._device)
        thread = Thread(target=self._send_copies, args=(group, is_checked), name="weights", daemon=True)
        thread.start()
        self._sending = thread, group
        return True

    @torch.no_grad()
    def send(self, group: dist.ProcessGroup | None, *, is_checked: bool) -> None:
        """Broadcast the present weights; return when all engines have them.  Raises WeightUpdateFailed."""
        if group is None:
            self._follow()
            return
        try:
            _broadcast((self._gathered(weights) for weights in self._plan), group, is_checked=is_checked)
        except RuntimeError as error:
            raise WeightUpdateFailed(f"the weights were not delivered: {error}") from error

    def finish(self) -> None:
        """Return once nothing is being sent.  Raises WeightUpdateFailed if it could not be."""
        if self._sending is not None:
            thread, group = self._sending
            thread.join(FINISH_S)
            if thread.is_alive():
                group.abort()
                thread.join()
            self._sending = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise WeightUpdateFailed(f"the weights were not delivered: {failure}") from failure

    def abandon(self) -> None:
        """Stop sending: the group is of no use any more."""
        if self._sending is not None:
            thread, group = self._sending
            if thread.is_alive():
                group.abort()
            thread.join()
        self._sending = self._failure = None

    def _has_room(self) -> bool:
        if self._device.type == "cpu":
            return True
        total: int = torch.cuda.get_device_properties(self._device).total_memory
        return sum(bucket.num_bytes for bucket in self.buckets) <= LARGEST_SHARE * total

    def _follow(self) -> None:
        """Give rank 0 this rank's parts."""
        if is_split():
            for weights in self._plan:
                for _ in export_bucket(self._model, self._shape, weights):
                    pass

    def _gathered(self, weights: Sequence[Weight]) -> Tensor:
        return flatten(tensor for _, tensor in export_bucket(self._model, self._shape, weights))

    def _send_copies(self, group: dist.ProcessGroup, is_checked: bool) -> None:
        assert self._copies is not None
        try:
            with _stream_of_its_own(self._device):
                _broadcast(iter(self._copies.flats), group, is_checked=is_checked)
        except RuntimeError as error:
            self._failure = error


class _Copies:
    """All buckets of a model, one after the other, and where their tensors are."""

    def __init__(
        self,
        model: GPTModel,
        shape: ModelShape,
        buckets: Sequence[WeightBucket],
        plan: Sequence[Sequence[Weight]],
    ) -> None:
        device = next(model.parameters()).device
        self.flats = [torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device) for bucket in buckets]
        self._weights = local_weights(model)
        self._addresses = self._places()
        self._plan = plan
        self._shape = shape
        self._targets = [
            views(flat, bucket.dtypes, bucket.shapes) for flat, bucket in zip(self.flats, buckets, strict=True)
        ]
        self._pairs = {} if is_split() else self._sorted()

    def are_current(self) -> bool:
        """Whether the model's weights still lie where they lay."""
        return self._places() == self._addresses

    def take(self, model: GPTModel) -> None:
        """What the weights are now.  Collective."""
        if is_split():
            for targets, weights in zip(self._targets, self._plan, strict=True):
                for target, (_, tensor) in zip(targets, export_bucket(model, self._shape, weights), strict=True):
                    target.copy_(tensor)
        for targets, sources in self._pairs.values():
            torch._foreach_copy_(targets, sources)

    def _places(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights.values()]

    def _sorted(self) -> dict[Any, tuple[list[Tensor], list[Tensor]]]:
        """Targets and sources; one call copies many where dtypes and strides are alike."""
        pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        names = (weight.name for weight in chain.from_iterable(self._plan))
        sources = chain.from_iterable(parts_of(name, self._weights[name], self._shape) for name in names)
        for target, source in zip(chain.from_iterable(self._targets), sources, strict=True):
            target = target.view(source.shape)
            key = source.dtype, target.stride() == source.stride()
            targets, alike = pairs.setdefault(key, ([], []))
            targets.append(target)
            alike.append(source)
        return pairs


def _broadcast(flats: Iterator[Tensor], group: dist.ProcessGroup, *, is_checked: bool) -> None:
    """One after the other; the next one is asked for while one is under way.  Raises RuntimeError."""
    under_way: list[tuple[Any, Tensor]] = []
    flat = None
    for flat in flats:
        for work, _ in under_way:
            work.wait()
        under_way = [(dist.broadcast(flat, src=0, group=group, async_op=True), flat)]
        if is_checked:
            told = checksum(flat)
            under_way.append((dist.broadcast(told, src=0, group=group, async_op=True), told))
    for work, _ in under_way:
        work.wait()
    if flat is not None:
        _synchronize(flat.device)


@contextmanager
def _stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Beside what the main thread has its GPU do."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_device(device)  # a thread begins with the first one
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def _synchronize(device: torch.device) -> None:
    """Wait for what this thread has asked its GPU to do."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

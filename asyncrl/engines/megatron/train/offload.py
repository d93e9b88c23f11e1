"""The trainer's device memory, moved to host memory while engines have the GPU, and back to the device.

    weights      parameters, buffers, Megatron's parameter buffers          copied to host memory
    optimizer    Adam's averages, and float32 copies of 16-bit weights      copied to host memory
    gradients    Megatron's gradient buffers                                freed; every step starts from zeros

A tensor stays the same object: the storage under it is emptied, and filled again later.  Megatron's ``offload_to_cpu``
of its buffers works so for gradients, and for weights with a distributed optimizer.  Megatron's offload of the
optimizer replaces the tensors by new ones, which invalidates views of the old ones.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from asyncrl.engines.megatron.setup.fused_adam import optimizers
from asyncrl.engines.megatron.setup.pinned import pin, unpin
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.distributed.DistributedDataParallel",
        attributes=("buffers", "expert_parallel_buffers"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer",
        attributes=("grad_data", "param_data"),
        used_in=__name__,
    ),
    Internal(name="torch.UntypedStorage", attributes=("data_ptr", "nbytes", "resize_"), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

_ALIGNMENT = 64
"""Alignment of each storage in the host copy, in bytes: a cache line, and a multiple of every element's size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Emptied:
    """A storage whose memory was freed."""

    storage: torch.UntypedStorage
    num_bytes: int
    copy: Tensor | None
    """Its contents in host memory; None if they are not needed again."""


class Stash:
    """The storages under some tensors, which can be emptied and filled again."""

    def __init__(self, find: Callable[[], Iterable[Tensor]], *, keeps: bool) -> None:
        """Cover the tensors that ``find`` returns.

        ``find`` is called each time, because an optimizer makes its state in its first step.  ``keeps``: the contents
        are needed again.
        """
        self._find = find
        self._keeps = keeps
        self._host = HostMemory()
        self._emptied: list[_Emptied] = []

    def put_away(self) -> None:
        """Free the memory to torch's allocator.  The tensors must not be touched until ``fetch``."""
        if self._emptied:
            return
        storages = _storages(self._find())
        copies: Iterable[Tensor | None] = [None] * len(storages)
        if self._keeps:
            copies = self._host.parts([storage.nbytes() for storage in storages])
        self._emptied = [
            _Emptied(storage=storage, num_bytes=storage.nbytes(), copy=copy)
            for storage, copy in zip(storages, copies, strict=True)
        ]
        for each in self._emptied:
            if each.copy is not None:
                each.copy.copy_(_bytes_of(each.storage), non_blocking=True)
        # Invariant: all copies are complete before a storage is emptied.  The next owner of its memory, perhaps another
        # process, may write there at once.
        _synchronize()
        for each in self._emptied:
            each.storage.resize_(0)

    def fetch(self) -> None:
        """Allocate the memory again, with the contents that were kept."""
        for each in self._emptied:
            each.storage.resize_(each.num_bytes)
            if each.copy is not None:
                _bytes_of(each.storage).copy_(each.copy, non_blocking=True)
        _synchronize()
        self._emptied = []


class TrainerMemory:
    """All device memory of a rank's learners.  Each of its three methods may be called again when its work is done."""

    def __init__(self, learners: Sequence[Any]) -> None:
        """Cover ``learners``, which have a ``model``, its ``parallel`` wrapper and an ``optimizer``."""
        self._learners = tuple(learners)
        self._weights = Stash(lambda: chain.from_iterable(map(_weights_of, self._learners)), keeps=True)
        self._optimizer = Stash(self._optimizers, keeps=True)
        self._gradients = Stash(self._gradient_buffers, keeps=False)

    def fetch(self) -> None:
        """Move everything to the device; gradients must be set to zero before they are added to."""
        for stash in (self._weights, self._optimizer, self._gradients):
            stash.fetch()

    def put_away_optimizer(self) -> None:
        """Free the device memory of optimizer and gradients; the weights stay readable."""
        for learner in self._learners:
            learner.optimizer.zero_grad()  # frees float32 copies of gradients
        gc.collect()  # reference cycles left by training
        self._gradients.put_away()
        self._optimizer.put_away()
        _hand_back()

    def put_away_weights(self) -> None:
        """Free the device memory of the weights."""
        self._weights.put_away()
        _hand_back()

    def _optimizers(self) -> Iterator[Tensor]:
        """Find optimizer tensors that are not views of the weights.

        A float32 model has such views: its weights have no copy of higher precision.
        """
        weights = {storage.data_ptr() for storage in _storages(chain.from_iterable(map(_weights_of, self._learners)))}
        for learner in self._learners:
            for tensor in _optimizer_of(learner.optimizer):
                if tensor.untyped_storage().data_ptr() not in weights:
                    yield tensor

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for learner in self._learners:
            for buffer in chain(learner.parallel.buffers, learner.parallel.expert_parallel_buffers):
                yield buffer.grad_data


class HostMemory:
    """One growing block of host memory, pinned where possible, so that a GPU copies at full speed."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None
        self._is_pinned = False

    def parts(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return blocks of ``sizes`` bytes, one after the other."""
        starts, total = [], 0
        for size in sizes:
            starts.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        whole = self._at_least(total)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _at_least(self, num_bytes: int) -> Tensor:
        if self._whole is None or self._whole.numel() < num_bytes:
            # Invariant: memory is unpinned before it is freed, and no copy is running then: ``put_away`` and ``fetch``
            # synchronise before they return.
            if self._whole is not None and self._is_pinned:
                unpin(self._whole)
            self._whole = None  # freed before a larger block is allocated
            self._whole = torch.empty(num_bytes, dtype=torch.uint8)
            self._is_pinned = num_bytes > 0 and pin(self._whole)
        return self._whole


def _weights_of(learner: Any) -> Iterator[Tensor]:
    yield from learner.model.parameters()
    yield from learner.model.buffers()
    for buffer in chain(learner.parallel.buffers, learner.parallel.expert_parallel_buffers):
        if buffer.param_data is not None:
            yield buffer.param_data


def _optimizer_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that each part of the optimizer updates, and its state."""
    for part in optimizers(optimizer).values():
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Collect each storage once, without empty ones; with a GPU, also without those in host memory."""
    is_wanted = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == is_wanted
    }
    return [storage for storage in found.values() if storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _hand_back() -> None:
    """Return the memory that torch's allocator caches to the device, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""The self-test of a bucket's replay: whether the copies that were watched are all that SGLang's loaders do.

    every byte changed   load ─▶ checksums ═ replay ─▶ checksums     the loaders write all that the replay writes
    as it came           replay ─▶ checksums ═ load ─▶ checksums     the replay writes all that the loaders write

A weight that the replay misses has changed bytes until the last load.  Without the changed bytes, a test in a step
whose weights hardly differ from those before it would pass whatever was missed.  The watcher misses what a loader
copies in a thread of its own, because torch's dispatch modes are local to a thread, and what a loader does differently
from one load to the next.

Everything here may launch a CUDA kernel for the first time, which waits for the whole device: no broadcast may be
under way.  Each rank tests its own copies.  Loaders use no collectives, so ranks may come to different verdicts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

from asyncrl.engines.sglang.plugin.copies import KeptBucket

Storages = dict[int, Any]
"""The bytes of tensors, by their address: views that share memory are there once."""


class ReplayCheck:
    """The self-tests of one update."""

    def __init__(self, model: Any, buckets: Iterable[KeptBucket]) -> None:
        self._model = model
        self._buckets = tuple(buckets)

    def passes(self, bucket: KeptBucket, flat: Any, replay: Callable[[], None]) -> bool:
        """Whether ``replay`` and SGLang's loaders leave the same bytes; the loaders' are in place afterwards.

        The host waits for the device a fixed number of times, whatever the number of weights.
        """
        _change_every_byte(flat)
        self._load(bucket, flat)
        loaded_first = self._checksums(bucket)
        replay()
        replayed_second = self._checksums(bucket)
        _change_every_byte(flat)  # back to what it was
        replay()
        replayed_first = self._checksums(bucket)
        self._load(bucket, flat)
        loaded_second = self._checksums(bucket)
        return _are_equal(loaded_first, replayed_second) and _are_equal(replayed_first, loaded_second)

    def _load(self, bucket: KeptBucket, flat: Any) -> None:
        """Load and wait: a loader's thread may launch on another stream, and still read ``flat``."""
        import torch

        self._model.load_weights(bucket.tensors(flat))
        if flat.device.type != "cpu":
            torch.cuda.synchronize(flat.device)

    @cached_property
    def _replayed(self) -> Counter[int]:
        """How many bytes the replays of all buckets write, by the storage's address."""
        found: Counter[int] = Counter()
        for (address, _), num_bytes in {_region(target) for bucket in self._buckets for target in bucket.targets}:
            found[address] += num_bytes
        return found

    def _checksums(self, bucket: KeptBucket) -> dict[Any, Any]:
        """By device, in one tensor: a checksum for each storage that the bucket can reach.

        A storage that other buckets' replays write completely is left out: it is tested with them.  Otherwise each
        bucket would have the whole model read, and a model of 1,000 buckets would be read 4,000 times.
        """
        from asyncrl.engines.weight_sync.flat import checksums

        own = {target.untyped_storage().data_ptr() for target in bucket.targets}
        reached = defaultdict[Any, list[Any]](list)
        for address, stored in _storages(self._model).items():
            if address in own or self._replayed[address] < stored.numel():
                reached[stored.device].append(stored)
        return {device: checksums(storages) for device, storages in reached.items()}


def _are_equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[device], other[device]) for device in one)


def _region(target: Any) -> tuple[tuple[int, int], int]:
    """The address of the storage that ``target`` lies in, its place there, and its size in bytes."""
    storage = target.untyped_storage().data_ptr()
    return (storage, target.data_ptr() - storage), target.numel() * target.itemsize


def _change_every_byte(flat: Any) -> None:
    """The lowest bit of each: a second call undoes it, and numbers stay finite."""
    flat.bitwise_xor_(1)


def _storages(model: Any) -> Storages:
    """Raw bytes, whatever the dtype and the strides, of the model's parameters and buffers."""
    import torch

    found: Storages = {}
    for tensor in chain(model.parameters(), model.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta" and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found

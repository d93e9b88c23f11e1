"""The self-test of a bucket's replay: whether the recorded copies are all that SGLang's loaders do.

    every byte changed   load ─▶ checksums ═ replay ─▶ checksums     the loaders write all that the replay writes
    as it came           replay ─▶ checksums ═ load ─▶ checksums     the replay writes all that the loaders write

A weight that the replay misses keeps changed bytes until the last load.  Without changed bytes, the test would pass
whatever was missed if a step hardly changes the weights.

The watcher misses two things: copies that a loader makes in another thread, because torch's dispatch modes are local to
a thread, and differences between one load and the next.

Each rank tests its own copies.  Loaders use no collectives, so ranks may come to different verdicts.

Invariant: no broadcast is in flight during a test.  A test may launch a CUDA kernel for the first time, which waits for
the whole device, and would wait for good if the trainer has died.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

from asyncrl.engines.sglang.plugin.copies import RecordedBucket

Storages = dict[int, Any]
"""The bytes of tensors, by storage address.  Views that share memory appear once."""


class ReplayCheck:
    """The self-tests of one update.

    Not kept for the next update: the addresses in ``_replayed`` hold only while model and targets stay where they are.
    """

    def __init__(self, model: Any, buckets: Iterable[RecordedBucket]) -> None:
        self._model = model
        self._buckets = tuple(buckets)

    def passes(self, bucket: RecordedBucket, flat: Any, replay: Callable[[], None]) -> bool:
        """Return whether ``replay`` and SGLang's loaders write the same bytes; the loaders' are in place afterwards.

        The host waits for the device a fixed number of times, whatever the number of weights.
        """
        # Invariant: ``flat`` is ours: all of it has arrived (``finish``), and the caller asks for the next broadcast
        # only after the test.  The bytes change twice, so that the trainer's are in ``flat`` at the last load.
        _change_every_byte(flat)
        self._load(bucket, flat)
        loaded_first = self._checksums(bucket)
        replay()
        replayed_second = self._checksums(bucket)
        _change_every_byte(flat)  # restores the trainer's bytes
        replay()
        replayed_first = self._checksums(bucket)
        self._load(bucket, flat)
        loaded_second = self._checksums(bucket)
        return _are_equal(loaded_first, replayed_second) and _are_equal(replayed_first, loaded_second)

    def _load(self, bucket: RecordedBucket, flat: Any) -> None:
        """Load and wait for the device.

        A loader's thread launches on the default stream, and may still read ``flat`` when the loader has returned; the
        scheduler's stream, which changes ``flat`` next, does not wait for the default stream.
        """
        import torch

        self._model.load_weights(bucket.tensors(flat))
        if flat.device.type != "cpu":
            torch.cuda.synchronize(flat.device)

    @cached_property
    def _replayed(self) -> Counter[int]:
        """The number of bytes that the replays of all buckets write, by storage address."""
        found: Counter[int] = Counter()
        for (address, _), num_bytes in {_region(target) for bucket in self._buckets for target in bucket.targets}:
            found[address] += num_bytes
        return found

    def _checksums(self, bucket: RecordedBucket) -> dict[Any, Any]:
        """Return the checksums of all storages that the bucket can reach, as one tensor per device.

        A storage that the replays of other buckets write completely is left out, because it is tested with them.
        Otherwise each bucket would read the whole model, and a model of 1,000 buckets would be read 4,000 times.
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
    """Return the address of the storage that holds ``target``, its offset there, and its size in bytes."""
    storage = target.untyped_storage().data_ptr()
    return (storage, target.data_ptr() - storage), target.numel() * target.itemsize


def _change_every_byte(flat: Any) -> None:
    """Flip the lowest bit of each byte, in place.  A second call undoes it, and numbers stay finite."""
    flat.bitwise_xor_(1)


def _storages(model: Any) -> Storages:
    """Return the raw bytes of the model's parameters and buffers, whatever their dtypes and strides."""
    import torch

    found: Storages = {}
    for tensor in chain(model.parameters(), model.buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta" and storage.data_ptr() not in found:
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found

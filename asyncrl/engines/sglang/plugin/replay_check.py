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

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain
from typing import Any

from asyncrl.engines.sglang.plugin.copies import RecordedBucket

Storages = dict[int, tuple[Any, str | None]]
"""The bytes of tensors and the number of their layer, by storage address.  Views that share memory appear once."""

logger = logging.getLogger(__name__)


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
        try:
            loaded, replayed = self._with_changed_bytes(bucket, flat, replay)
            is_alike = _are_equal(loaded, replayed)
        except Exception:  # a loader may refuse the changed values: then SGLang loads this bucket from now on
            logger.warning("asyncrl: the bucket of %s cannot be tested", bucket.names[0], exc_info=True)
            is_alike = False
        replay()
        replayed = self._checksums(bucket)
        load_alone(self._model, bucket, flat)
        return is_alike and _are_equal(replayed, self._checksums(bucket))

    def _with_changed_bytes(self, bucket: RecordedBucket, flat: Any, replay: Callable[[], None]) -> tuple[Any, Any]:
        """Return the checksums after a load and after a replay of other bytes; restore the trainer's bytes."""
        _change_every_byte(flat)
        try:
            load_alone(self._model, bucket, flat)
            loaded = self._checksums(bucket)
            replay()
            return loaded, self._checksums(bucket)
        finally:
            _change_every_byte(flat)

    @cached_property
    def _replayed(self) -> Counter[int]:
        """The number of bytes that the replays of all buckets write, by storage address."""
        found: Counter[int] = Counter()
        for (address, _), num_bytes in {_region(target) for bucket in self._buckets for target in bucket.targets}:
            found[address] += num_bytes
        return found

    def _checksums(self, bucket: RecordedBucket) -> dict[Any, Any]:
        """Return the checksums of all storages that the bucket can reach, as one tensor per device.

        A storage that the replays of other buckets write completely is left out, because it is tested with them.  One
        that they write in part counts for buckets of the same layer alone: buckets of DeepSeek mix experts with weights
        that are never replayed, so that most storages are of this kind.  Otherwise each bucket would read most of the
        model, and a model of 1,000 buckets would be read 4,000 times.
        """
        from asyncrl.engines.weight_sync.flat import checksums

        own = {target.untyped_storage().data_ptr() for target in bucket.targets}
        layers = set(map(_layer, bucket.names))
        reached = defaultdict[Any, list[Any]](list)
        for address, (stored, layer) in _storages(self._model).items():
            replayed = self._replayed[address]
            if address in own or not replayed or (replayed < stored.numel() and layer in layers):
                reached[stored.device].append(stored)
        return {device: checksums(storages) for device, storages in reached.items()}


def load_alone(model: Any, bucket: RecordedBucket, flat: Any) -> None:
    """Have SGLang's loaders load a bucket while the device does nothing else.

    A loader's thread launches on the default stream, for which the scheduler's stream does not wait: without the first
    wait it could read ``flat`` too early, without the second ``flat`` could change while it is read.
    """
    _wait_for_device(flat)
    model.load_weights(bucket.tensors(flat))
    _wait_for_device(flat)


def _wait_for_device(flat: Any) -> None:
    import torch

    if flat.device.type != "cpu":
        torch.cuda.synchronize(flat.device)


def _are_equal(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[device], other[device]) for device in one)


def _region(target: Any) -> tuple[tuple[int, int], int]:
    """Return the address of the storage that holds ``target``, its offset there, and its size in bytes."""
    storage = target.untyped_storage().data_ptr()
    return (storage, target.data_ptr() - storage), target.numel() * target.itemsize


def _change_every_byte(flat: Any) -> None:
    """Flip the lowest bit of each byte, in place.  A second call undoes it.

    The largest numbers may become infinite or NaN: in E4M3, 448 does.
    """
    flat.bitwise_xor_(1)


def _storages(model: Any) -> Storages:
    """Return the raw bytes of the model's parameters and buffers, whatever their dtypes and strides."""
    import torch

    found: Storages = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta" and storage.data_ptr() not in found:
            stored = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found[storage.data_ptr()] = stored, _layer(name)
    return found


def _layer(name: str) -> str | None:
    """Return the first number in a name like ``model.layers.12.mlp.experts.w13_weight``; None without one."""
    return next((part for part in name.split(".") if part.isdecimal()), None)

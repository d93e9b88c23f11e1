"""Weight updates at the speed of copies: a plug-in of stock SGLang, group ``sglang.srt.plugins``.

SGLang's loaders find by name, tensor by tensor, where each one belongs: 0.1 s for a dense model, more than a second for
the thousands of tensors of a mixture of experts, while generation stands still.  The answer never changes, so it is
watched once:

    first update   flattened_bucket, by SGLang's loaders ──▶ watched: which bytes were copied where
    every later    DIRECT: all buckets in one request    ──▶ the same copies again

    bucket i+1 ──network──▶ one buffer  ║  bucket i in the other buffer ──copies──▶ weights

A bucket whose loading was more than copies (a cast by hand, a product of weights, a value read) is loaded by SGLang's
loaders every time.  Without the plug-in, updates go on as the first one.
"""

import logging
import pkgutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from threading import Event, Thread
from typing import Any

from asyncrl.engines.sglang.labels import DIRECT, DIRECT_CHECKED, KEPT

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATE = f"{_UPDATER}.update_weights_from_distributed"
_JOIN = f"{_UPDATER}.init_weights_update_group"
ARRIVAL_S = 60.0
"""For an update to arrive, from a trainer that has it ready: 100 GB take a second.  Then the group is given up, so that
this server can answer, and join another."""
LOOK_EVERY_S = 0.0002
"""Whether what was asked for is done; an update takes some milliseconds at least."""
ASK_EVERY_S = 0.25
"""Whether the trainer has given the update up, because another engine died: it is asked over the network."""

_ALIGNMENT = 64
"""Of the buffers' sizes: a multiple of every element's."""

logger = logging.getLogger(__name__)


def activate() -> None:
    """Register the hooks, or warn that there is nothing to hook.  SGLang calls it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        for target in (_UPDATE, _JOIN):
            pkgutil.resolve_name(target)
    except (AttributeError, ImportError) as error:
        logger.warning(
            "asyncrl: this SGLang is unlike 0.5.16 inside (%s); weight updates take longer, and end this server, too, "
            "when another one dies in them",
            error,
        )
        return
    HookRegistry.register(_UPDATE, DirectUpdates().around_update, HookType.AROUND)
    HookRegistry.register(_JOIN, around_join, HookType.AROUND)


def around_join(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """The server outlives the death of another member."""
    from asyncrl.engines.abandoned import without_watchdog

    with without_watchdog():
        return original(*args, **kwargs)


Pairs = tuple[list[Any], list[Any]]
"""Tensors to copy to, and those to copy from."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """What is known of one bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    targets: tuple[Any, ...] = ()
    """Where its pieces belong; nothing when the loaders do more than copy."""
    pieces: tuple[tuple[int, tuple[int, ...], tuple[int, ...], Any], ...] = ()
    """What is copied to each target: its first byte in the bucket, sizes, strides and dtype."""
    copies: dict[int, list[Pairs]] = field(default_factory=dict)
    """By number of the buffer that the bucket lies in; made when first needed, which takes longer than the copies."""

    def tensors(self, flat: Any) -> list[tuple[str, Any]]:
        """Its tensors by name, which lie in ``flat``."""
        from asyncrl.engines.flat import views

        return list(zip(self.names, views(flat, self.dtypes, self.shapes), strict=True))


class DirectUpdates:
    """The hook of one scheduler process."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        """By the name of the bucket's first tensor."""
        self._buffers: list[Any] = []
        self._places: list[int] = []
        """Where the model's weights lay when they were watched."""

    def around_update(
        self,
        original: Callable[..., tuple[bool, str]],
        updater: Any,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        """Take one bucket and watch where it goes, or all buckets that were taken before."""
        groups = updater._model_update_group  # noqa: SLF001 (SGLang has no public way)
        group = groups.get(group_name)
        if group is None or load_format not in ("flattened_bucket", DIRECT, DIRECT_CHECKED):
            return original(updater, names, dtypes, shapes, group_name, load_format)
        failure = None
        try:
            _leave_others(groups, group_name)
            if load_format == "flattened_bucket":
                self._take_first(updater, group, names, dtypes, shapes)
            else:
                self._take_all(updater, group, names, is_checked=load_format == DIRECT_CHECKED)
        except Exception as error:
            logger.exception("asyncrl: a weight update failed")
            failure = f"{type(error).__name__}: {error}"
        failure = first_failure(failure, _ranks_of_this_engine())
        return (True, KEPT) if failure is None else (False, f"weights may be partly updated: {failure}")

    def _take_first(self, updater: Any, group: Any, names: Any, dtypes: Any, shapes: Any) -> None:
        bucket = _Kept(
            names=tuple(names),
            dtypes=tuple(dtypes),
            shapes=tuple(map(tuple, shapes)),
            num_bytes=num_bytes(dtypes, shapes),
        )
        flat = self._make_room(updater, bucket.num_bytes)[0][: bucket.num_bytes]
        _wait(_broadcast(flat, group), flat, group)
        _finish(flat, group)  # loaders may read a number, and would wait for it for good
        _watch(bucket, flat, lambda: updater.get_model().load_weights(bucket.tensors(flat)))
        _rehearse(bucket, flat)
        _finish(flat, group)
        self._kept[bucket.names[0]] = bucket
        self._places = _places(updater.get_model())

    def _take_all(self, updater: Any, group: Any, names: Sequence[str], *, is_checked: bool) -> None:
        self._forget_if_moved(updater.get_model())
        buckets = [self._kept[name] for name in names]
        buffers = self._make_room(updater, max(bucket.num_bytes for bucket in buckets))
        flats = [buffers[number % 2][: bucket.num_bytes] for number, bucket in enumerate(buckets)]
        coming = _broadcast(flats[0], group)
        for number, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
            _wait(coming, flat, group)
            if is_checked:
                _check_arrival(flat, group, bucket)
            if number + 1 < len(buckets):  # asked for before the copies, so that it comes while they are made
                coming = _broadcast(flats[number + 1], group)
            self._load(updater, group, bucket, flat, number % 2)
            if is_checked:
                _check_copies(bucket, number % 2)
        _finish(buffers[0], group)

    def _load(self, updater: Any, group: Any, bucket: _Kept, flat: Any, buffer: int) -> None:
        import torch

        if not bucket.targets:
            _finish(flat, group)
            updater.get_model().load_weights(bucket.tensors(flat))
            return
        if buffer not in bucket.copies:
            bucket.copies[buffer] = _copies(bucket, self._buffers[buffer])
        for targets, sources in bucket.copies[buffer]:
            torch._foreach_copy_(targets, sources)

    def _forget_if_moved(self, model: Any) -> None:
        """Copies to where weights lay would go nowhere: something else has put others in their place."""
        if (places := _places(model)) != self._places:
            logger.warning("asyncrl: the model's weights have moved; they are loaded by SGLang again")
            self._places = places
            for bucket in self._kept.values():
                bucket.targets = ()
                bucket.copies.clear()

    def _make_room(self, updater: Any, num_bytes: int) -> list[Any]:
        """Two buffers of at least so many bytes."""
        import torch

        if not self._buffers or self._buffers[0].numel() < num_bytes:
            for bucket in self._kept.values():
                bucket.copies.clear()
            self._buffers = []
            size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=updater.device) for _ in range(2)]
        return self._buffers


def num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Of a bucket."""
    import torch

    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def _places(model: Any) -> list[int]:
    """Addresses of the model's weights."""
    return [parameter.data_ptr() for parameter in model.parameters()]


# ---- groups


def first_failure(failure: str | None, ranks: Any) -> str | None:
    """This rank's failure, or that another one has failed: SGLang passes on the answer of an engine's first rank alone.

    Collective over ``ranks``, which a rank that has failed reaches first; the others come ``ARRIVAL_S`` later at most.
    """
    import torch
    import torch.distributed as dist

    if ranks is None:
        return failure
    all_is_well = torch.tensor(int(failure is None))
    dist.all_reduce(all_is_well, op=dist.ReduceOp.MIN, group=ranks)
    return failure or (None if all_is_well else "another rank of this engine failed; the server's log says why")


def _ranks_of_this_engine() -> Any:
    """SGLang's group of them on CPUs; None for a single one."""
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return None
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def _leave_others(groups: dict[str, Any], present: str) -> None:
    """Of groups from before an engine was lost or came back nobody has use, and each holds memory on the GPU."""
    import torch.distributed as dist

    for name in [each for each in groups if each != present]:
        group = groups.pop(name)
        with suppress(RuntimeError):  # its other members may be gone
            group.abort()
        dist.destroy_process_group(group)


# ---- arriving


def _broadcast(flat: Any, group: Any) -> Any:
    import torch.distributed as dist

    return dist.broadcast(flat, src=0, group=group, async_op=True)


def _wait(coming: Any, flat: Any, group: Any) -> None:
    """What is done with ``flat`` from now on sees what came; on a GPU, this process goes on at once."""
    from asyncrl.engines.abandoned import wait_on_stream

    if flat.device.type == "cpu":
        _until(coming.is_completed, group)
    wait_on_stream(coming, flat.device)


def _finish(flat: Any, group: Any) -> None:
    """Return when everything has come and was copied.  Raises TimeoutError and ConnectionError."""
    if flat.device.type == "cpu":
        return
    import torch

    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    _until(done.query, group)


def _until(is_done: Callable[[], bool], group: Any) -> None:
    """Raises TimeoutError, or ConnectionError once the trainer has given the update up; the group is left then."""
    began = time.monotonic()
    asking = None
    try:
        while not is_done():
            waited_s = time.monotonic() - began
            if asking is None and waited_s > ASK_EVERY_S:
                asking = _Asking(group)
            if asking is not None and asking.is_abandoned:
                group.abort()
                raise ConnectionError("the trainer has given this update up")
            if waited_s > ARRIVAL_S:
                group.abort()
                raise TimeoutError(f"nothing came for {ARRIVAL_S:g} s")
            time.sleep(LOOK_EVERY_S)
    finally:
        if asking is not None:
            asking.is_over.set()


class _Asking:
    """A thread that asks whether the trainer has given an update up: a host that is gone may not answer for long."""

    def __init__(self, group: Any) -> None:
        self.is_over = Event()
        self.is_abandoned = False
        self._group = group
        Thread(target=self._run, name="asyncrl-abandoned", daemon=True).start()

    def _run(self) -> None:
        from asyncrl.engines.abandoned import is_abandoned

        while not self.is_abandoned and not self.is_over.wait(ASK_EVERY_S):
            self.is_abandoned = is_abandoned(self._group)


def _check_arrival(flat: Any, group: Any, bucket: _Kept) -> None:
    """The trainer sends its checksum behind each bucket."""
    import torch

    from asyncrl.engines.flat import checksum

    told = torch.empty((), dtype=torch.int64, device=flat.device)
    _wait(_broadcast(told, group), told, group)
    _finish(told, group)
    if (found := checksum(flat).item()) != told.item():
        raise ValueError(f"the bucket of {bucket.names[0]} has checksum {found}, the trainer's {told.item()}")


# ---- watching, and doing it again


def _watch(bucket: _Kept, flat: Any, load: Callable[[], object]) -> None:
    """Load, and keep in ``bucket`` what was copied where, if nothing but copying was done."""
    watcher = _watcher(flat)
    with watcher:
        load()
    if watcher.more_than_copies is not None:
        logger.warning("asyncrl: the bucket of %s is no mere copy: %s", bucket.names[0], watcher.more_than_copies)
        return
    bucket.targets = tuple(target for target, _ in watcher.pairs)
    bucket.pieces = tuple(
        (source.data_ptr() - flat.data_ptr(), tuple(source.shape), source.stride(), source.dtype)
        for _, source in watcher.pairs
    )


def _watcher(flat: Any) -> Any:
    """A context that sees every operation on tensors.  Made here, since importing torch takes seconds."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten
    storage = flat.untyped_storage().data_ptr()

    def is_ours(tensor: Any) -> bool:
        return bool(tensor.untyped_storage().data_ptr() == storage)

    class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.pairs: list[tuple[Any, Any]] = []
            self.more_than_copies: str | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            if tensors and not func.is_view:
                self._note(func, tensors)
            return func(*args, **(kwargs or {}))

        def _note(self, func: Any, tensors: list[Any]) -> None:
            if func == aten.copy_.default:
                target, source = tensors
                if is_ours(source) and not is_ours(target) and target.shape == source.shape:
                    self.pairs.append((target.detach(), source.detach()))
                    return
            elif func in (aten.fill_.Scalar, aten.zero_.default) and not is_ours(tensors[0]):
                return  # the same number every time, as in the rows that fill up a vocabulary
            self.more_than_copies = self.more_than_copies or str(func)

    return Watcher()


def _copies(bucket: _Kept, buffer: Any) -> list[Pairs]:
    """What to copy from the bucket in ``buffer``, sorted: one call copies many where dtypes and strides are alike."""
    groups: dict[Any, Pairs] = {}
    for target, (start, sizes, strides, dtype) in zip(bucket.targets, bucket.pieces, strict=True):
        target, dtype = _plain(target, dtype)
        source = buffer.view(dtype).as_strided(sizes, strides, start // dtype.itemsize)
        targets, sources = groups.setdefault((target.dtype, dtype, target.stride() == strides), ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def _rehearse(bucket: _Kept, flat: Any) -> None:
    """Copy what loaders have just copied once more, as later updates do.

    CUDA loads a kernel when it is first launched, and waits until the GPU has nothing to do: then that would be a
    broadcast, of which a member may have died.
    """
    import torch

    for targets, sources in _copies(bucket, flat):
        torch._foreach_copy_(targets, sources)


def _plain(target: Any, dtype: Any) -> tuple[Any, Any]:
    """Numbers in fp8 as bytes: not every operation on tensors knows fp8, and a copy needs to know nothing of it."""
    import torch

    if target.dtype == dtype and dtype.itemsize == 1:
        return target.view(torch.uint8), torch.uint8
    return target, dtype


def _check_copies(bucket: _Kept, buffer: int) -> None:
    import torch

    for targets, sources in bucket.copies.get(buffer, []):
        for target, source in zip(targets, sources, strict=True):
            if not torch.equal(target, source.to(target.dtype)):
                raise ValueError(f"a weight in the bucket of {bucket.names[0]} is not what came")

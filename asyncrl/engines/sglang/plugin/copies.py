"""Buckets whose loading was watched once: where SGLang's loaders copied each piece, and how to replay these copies.

Invariant: only the scheduler's thread uses these objects, and it launches everything on its current stream.  Copies on
another stream would not wait for the broadcast, nor the next broadcast for them.
"""

import logging
from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

logger = logging.getLogger(__name__)

Pairs = tuple[list[Any], list[Any]]
"""Tensors to copy to, and as many tensors to copy from."""


@dataclass(slots=True, kw_only=True)
class RecordedBucket:
    """The recorded copies of one bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    targets: tuple[Any, ...] = ()
    """The parts of the model's weights that the pieces are copied to; empty if the loaders do more than copy.

    They refer to the weights' memory.  If the model's weights are moved, they must be dropped (``forget``): copies
    would go to memory that the model no longer uses.
    """
    pieces: tuple[tuple[int, tuple[int, ...], tuple[int, ...], Any], ...] = ()
    """The source of each target: its first byte in the bucket, sizes, strides and dtype."""
    copies: dict[int, list[Pairs]] = field(default_factory=dict)
    """Views for the copies, by number of the buffer that holds the bucket.

    Made when first needed, which takes longer than the copies.  They refer to the buffer's memory: whoever replaces the
    buffers must clear them, or old bytes would be copied.
    """
    is_unused: bool = False
    """Whether the loaders were seen to do nothing with the bucket: this rank holds none of its experts.

    The self-test confirms this like a replay, with no copies.
    """
    needed_bytes: int = 0
    """The bytes of the tensors that this rank holds any part of; all, if the loaders do more than copy."""
    is_tested: bool = False
    """Whether a replay was found to do all that the loaders do (``replay_check``)."""

    def tensors(self, flat: Any) -> list[tuple[str, Any]]:
        """Return the bucket's tensors with their names, as views of ``flat``."""
        from asyncrl.engines.weight_sync.flat import views

        return list(zip(self.names, views(flat, self.dtypes, self.shapes), strict=True))

    def watch(self, flat: Any, load: Callable[[], object], *, may_be_unused: bool = False) -> None:
        """Call ``load``, and record its copies unless it does more than copy.

        ``flat`` must be the beginning of a buffer.  ``may_be_unused``: loaders may skip the bucket on this rank.
        """
        # Invariant: torch's dispatch modes are local to a thread.  Copies that a loader makes in other threads are not
        # seen here; ``replay_check`` finds them.
        watcher = _watcher(flat)
        with watcher:
            load()
        self.needed_bytes = self.num_bytes
        if watcher.more_than_copies is not None:
            logger.warning(
                "asyncrl: the bucket of %s is no mere copy: %s; SGLang's loaders load it in every update",
                self.names[0],
                watcher.more_than_copies,
            )
            return
        self.targets = tuple(target for target, _ in watcher.pairs)
        self.pieces = tuple(
            (source.data_ptr() - flat.data_ptr(), tuple(source.shape), source.stride(), source.dtype)
            for _, source in watcher.pairs
        )
        self.is_unused = may_be_unused and not self.targets
        if self.targets or self.is_unused:
            self.needed_bytes = self._bytes_of({start for start, *_ in self.pieces})

    def launch_once(self, buffer: Any) -> None:
        """Repeat the copies that the loaders have just made from ``buffer``, as later updates do.

        CUDA loads a kernel at its first launch, and waits until the GPU is idle.  In a later update it would wait for
        the next broadcast, which never ends if a member has died.
        """
        _copy(self._pairs(buffer))

    def copy(self, buffers: Sequence[Any], number: int) -> None:
        """Replay the recorded copies from the buffer of that number.  Launches them and does not wait."""
        if number not in self.copies:
            self.copies[number] = self._pairs(buffers[number])
        _copy(self.copies[number])

    def check(self, number: int) -> None:
        """Raise ValueError unless every weight equals its piece of that buffer.  Waits for the GPU."""
        import torch

        for targets, sources in self.copies.get(number, []):
            for target, source in zip(targets, sources, strict=True):
                if not torch.equal(target, source.to(target.dtype)):
                    raise ValueError(f"a weight in the bucket of {self.names[0]} differs from the received one")

    @property
    def is_replayed(self) -> bool:
        """Whether the recorded copies, of which there are none for an unused bucket, replace SGLang's loaders."""
        return bool(self.targets) or self.is_unused

    @property
    def needs_test(self) -> bool:
        """Whether the bucket is replayed and has not been tested yet."""
        return self.is_replayed and not self.is_tested

    def forget(self) -> None:
        """Stop replaying the bucket: SGLang's loaders load it until its copies are recorded anew.

        An unused bucket stays unused: it has no copies to drop.
        """
        self.targets = ()
        self.copies.clear()

    def refuse(self) -> None:
        """Forget the bucket, of which the loaders use more than was recorded."""
        self.forget()
        self.is_unused = False
        self.needed_bytes = self.num_bytes

    def _bytes_of(self, starts: Collection[int]) -> int:
        """Return the bytes of all tensors in which one of ``starts`` lies."""
        sizes = [num_bytes([dtype], [shape]) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        ends = list(accumulate(sizes))
        return sum(sizes[place] for place in {bisect(ends, start) for start in starts})

    def _pairs(self, buffer: Any) -> list[Pairs]:
        """Return the copies from ``buffer``, grouped by dtype and strides: one call copies a whole group."""
        groups: dict[Any, Pairs] = {}
        for target, (start, sizes, strides, dtype) in zip(self.targets, self.pieces, strict=True):
            target, dtype = _plain(target, dtype)
            source = buffer.view(dtype).as_strided(sizes, strides, start // dtype.itemsize)
            targets, sources = groups.setdefault((target.dtype, dtype, target.stride() == strides), ([], []))
            targets.append(target)
            sources.append(source)
        return list(groups.values())


def num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Return the size in bytes of a bucket with tensors of these dtypes and shapes."""
    import torch

    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def _copy(pairs: Sequence[Pairs]) -> None:
    import torch

    for targets, sources in pairs:
        torch._foreach_copy_(targets, sources)


def _plain(target: Any, dtype: Any) -> tuple[Any, Any]:
    """View fp8 tensors as bytes: not every tensor operation supports fp8, and a copy does not need it."""
    import torch

    if target.dtype == dtype and dtype.itemsize == 1:
        return target.view(torch.uint8), torch.uint8
    return target, dtype


def _watcher(flat: Any) -> Any:
    """Return a context that sees every tensor operation.  Defined here because importing torch takes seconds."""
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
                return  # the same value every time, as in the rows that pad a vocabulary
            self.more_than_copies = self.more_than_copies or str(func)

    return Watcher()

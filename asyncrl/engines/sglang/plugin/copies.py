"""Buckets whose loading was watched once: where SGLang's loaders put each piece, and the same copies again."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

logger = logging.getLogger(__name__)

Pairs = tuple[list[Any], list[Any]]
"""Tensors to copy to, and those to copy from."""


@dataclass(slots=True, kw_only=True)
class KeptBucket:
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
    is_tested: bool = False
    """Whether a replay of it was found to be all that the loaders do (``replay_check``)."""

    def tensors(self, flat: Any) -> list[tuple[str, Any]]:
        """Its tensors by name, which lie in ``flat``."""
        from asyncrl.engines.weight_sync.flat import views

        return list(zip(self.names, views(flat, self.dtypes, self.shapes), strict=True))

    def watch(self, flat: Any, load: Callable[[], object]) -> None:
        """Load, and keep what was copied where, if nothing but copying was done."""
        watcher = _watcher(flat)
        with watcher:
            load()
        if watcher.more_than_copies is not None:
            logger.warning("asyncrl: the bucket of %s is no mere copy: %s", self.names[0], watcher.more_than_copies)
            return
        self.targets = tuple(target for target, _ in watcher.pairs)
        self.pieces = tuple(
            (source.data_ptr() - flat.data_ptr(), tuple(source.shape), source.stride(), source.dtype)
            for _, source in watcher.pairs
        )

    def launch_once(self, buffer: Any) -> None:
        """Copy what loaders have just copied from ``buffer`` once more, as later updates do.

        CUDA loads a kernel when it is first launched, and waits until the GPU has nothing to do: then that would be a
        broadcast, of which a member may have died.
        """
        _copy(self._pairs(buffer))

    def copy(self, buffers: Sequence[Any], number: int) -> None:
        """Copy again what was watched, from the buffer of that number."""
        if number not in self.copies:
            self.copies[number] = self._pairs(buffers[number])
        _copy(self.copies[number])

    def check(self, number: int) -> None:
        """Raise ValueError unless every weight is what was copied from that buffer."""
        import torch

        for targets, sources in self.copies.get(number, []):
            for target, source in zip(targets, sources, strict=True):
                if not torch.equal(target, source.to(target.dtype)):
                    raise ValueError(f"a weight in the bucket of {self.names[0]} is not what came")

    @property
    def needs_test(self) -> bool:
        """Whether it is replayed, and was not tested yet."""
        return bool(self.targets) and not self.is_tested

    def forget(self) -> None:
        """Replay it no more: loaders are asked every time."""
        self.targets = ()
        self.copies.clear()

    def _pairs(self, buffer: Any) -> list[Pairs]:
        """What to copy from ``buffer``, sorted: one call copies many where dtypes and strides are alike."""
        groups: dict[Any, Pairs] = {}
        for target, (start, sizes, strides, dtype) in zip(self.targets, self.pieces, strict=True):
            target, dtype = _plain(target, dtype)
            source = buffer.view(dtype).as_strided(sizes, strides, start // dtype.itemsize)
            targets, sources = groups.setdefault((target.dtype, dtype, target.stride() == strides), ([], []))
            targets.append(target)
            sources.append(source)
        return list(groups.values())


def num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Of a bucket."""
    import torch

    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def _copy(pairs: Sequence[Pairs]) -> None:
    import torch

    for targets, sources in pairs:
        torch._foreach_copy_(targets, sources)


def _plain(target: Any, dtype: Any) -> tuple[Any, Any]:
    """Numbers in fp8 as bytes: not every operation on tensors knows fp8, and a copy needs to know nothing of it."""
    import torch

    if target.dtype == dtype and dtype.itemsize == 1:
        return target.view(torch.uint8), torch.uint8
    return target, dtype


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

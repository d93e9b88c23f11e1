"""A bucket of weights as text: a handle by which an SGLang server on the same device maps the bucket's memory.

SGLang's ``MultiprocessingSerializer``, ``FlattenedTensorBucket`` and ``monkey_patch_torch_reductions`` make the same,
but cost 4 to 9 s and 1,700 modules to import.  ``tests/contract/test_tensor_updates.py`` has a real server read it.
"""

import base64
import io
from collections.abc import Callable
from math import prod
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing
import torch.multiprocessing.reductions
from torch import Tensor

from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.internals import Internal

INTERNALS = (
    Internal(name="torch.multiprocessing.reductions.reduce_tensor", parameters=("tensor",), used_in=__name__),
    Internal(
        name="torch.multiprocessing.reductions.rebuild_cuda_tensor",
        parameters=(
            "tensor_cls",
            "tensor_size",
            "tensor_stride",
            "tensor_offset",
            "storage_cls",
            "dtype",
            "storage_device",
            "storage_handle",
            "storage_size_bytes",
            "storage_offset_bytes",
            "requires_grad",
            "ref_counter_handle",
            "ref_counter_offset",
            "event_handle",
            "event_sync_required",
        ),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(name="torch.multiprocessing.get_sharing_strategy", used_in=__name__),
    Internal(name="torch.multiprocessing.set_sharing_strategy", parameters=("new_strategy",), used_in=__name__),
    Internal(name="multiprocessing.reduction.ForkingPickler", used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

_SHARING: Any = torch.multiprocessing
"""torch has no types for it."""
_DEVICE = 6
"""Which argument of ``rebuild_cuda_tensor`` has the device's number."""


def handle_of(flat: Tensor, bucket: WeightBucket) -> str:
    """For ``flat``, the bytes of the bucket, which must live until the server has loaded them.

    On a CPU ``flat`` moves to shared memory when this is first called.
    """
    metadata, start = [], 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = prod(shape) * dtype.itemsize
        metadata.append(
            SimpleNamespace(
                name=name, shape=torch.Size(shape), dtype=dtype, start_idx=start, end_idx=start + size, numel=size
            )
        )
        start += size
    return _text({"flattened_tensor": _Reduced(*_reduced(flat)), "metadata": metadata})


class _Reduced:
    """Pickles as whatever ``function(*args)`` makes."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._made_by = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made_by


def _reduced(flat: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A GPU by its name: it may have another number in the server."""
    function, args = _SHARING.reductions.reduce_tensor(flat)
    if flat.device.type == "cuda":
        name = str(torch.cuda.get_device_properties(flat.device).uuid)
        args = (*args[:_DEVICE], name, *args[_DEVICE + 1 :])
    return function, args


def _text(shared: dict[str, Any]) -> str:
    """By a name in the file system: the other way, a file descriptor, goes to a process's own children only."""
    # Invariant: one thread at a time.  The strategy belongs to the process, and another thread would share by it, too.
    before = _SHARING.get_sharing_strategy()
    _SHARING.set_sharing_strategy("file_system")
    try:
        written = io.BytesIO()
        ForkingPickler(written).dump(shared)
    finally:
        _SHARING.set_sharing_strategy(before)
    return base64.b64encode(written.getvalue()).decode()

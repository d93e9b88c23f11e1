"""The handle of a bucket of weights: a text with which an SGLang server on the same device maps the bucket's memory.

SGLang's ``MultiprocessingSerializer``, ``FlattenedTensorBucket`` and ``monkey_patch_torch_reductions`` make the same,
but importing them takes 4 to 9 s and 1,700 modules.  In ``tests/contract/test_tensor_updates.py`` a real server reads
the handle.
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
"""``torch.multiprocessing``, for which torch has no types."""
_DEVICE = 6
"""The index of the device's number among the arguments of ``rebuild_cuda_tensor``."""


def handle_of(flat: Tensor, bucket: WeightBucket) -> str:
    """Return the handle of ``flat``, the bytes of the bucket, which must live until the server has loaded them.

    On a CPU the first call moves ``flat`` to shared memory.
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
    """An object that unpickles as the result of ``function(*args)``."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._made_by = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made_by


def _reduced(flat: Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Reduce ``flat``, with a GPU's UUID in place of its number, which may be another one in the server."""
    function, args = _SHARING.reductions.reduce_tensor(flat)
    if flat.device.type == "cuda":
        name = str(torch.cuda.get_device_properties(flat.device).uuid)
        args = (*args[:_DEVICE], name, *args[_DEVICE + 1 :])
    return function, args


def _text(shared: dict[str, Any]) -> str:
    """Pickle ``shared`` to text, with shared memory as a name in the file system.

    torch's other strategy, a file descriptor, reaches only the children of this process.
    """
    # Invariant: one thread at a time.  The strategy belongs to the process, so another thread would use it as well.
    before = _SHARING.get_sharing_strategy()
    _SHARING.set_sharing_strategy("file_system")
    try:
        written = io.BytesIO()
        ForkingPickler(written).dump(shared)
    finally:
        _SHARING.set_sharing_strategy(before)
    return base64.b64encode(written.getvalue()).decode()

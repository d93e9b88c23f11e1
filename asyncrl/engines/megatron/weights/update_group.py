"""The process group through which weights reach the engines: rank 0 is ours, the others are SGLang's.

SGLang's ``sglang.srt.utils.common.init_custom_process_group`` and ``FlattenedTensorBucket`` do the same, but importing
them takes 4 to 9 s and 1,700 modules.  ``tests/engines/megatron/weights/test_update_group.py`` compares the two.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from asyncrl.engines.weight_sync.part_groups import make_group
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="torch.distributed.rendezvous.rendezvous", parameters=("url", "rank", "world_size"), used_in=__name__
    ),
)
"""Names that may change with the library: see docs/internals.md."""

JOIN_S = 60.0
"""The deadline for all members to join, in seconds.  They are asked at the same time, and an engine joins between two
forward passes.  An engine that has died meanwhile blocks the trainer for this long."""


def join_update_group(
    master_address: str, master_port: int, world_size: int, group_name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Wait until all members have joined, for at most ``JOIN_S``, and return the group.

    ``timeout_s`` limits the group's collectives with gloo.  With NCCL the waiting sides have deadlines
    (``weight_sender``, ``arrival``).  SGLang uses the same private names of torch on its side.
    """
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, 0, world_size, timeout=min(timeout, timedelta(seconds=JOIN_S))))
    store.set_timeout(timeout)
    return make_group(store, rank, world_size, name=group_name, backend=backend, timeout_s=timeout_s)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Concatenate the bytes of all tensors, as ``load_format="flattened_bucket"`` receives them."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


@contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on a separate stream, in parallel with the main thread's work."""
    if device.type == "cpu":
        yield
        return
    # Each thread has a current device and stream.  On the default stream a broadcast would wait for a whole training
    # step.
    torch.cuda.set_device(device)  # a new thread starts with the first device
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield

"""The receiving end of a weight update, with SGLang's own functions in the order of its weight updater.

engine_process.py PORT TARGET    with the buckets as JSON on standard input, one line
"""

import json
import sys

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from sglang.srt.utils.common import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket


def main(port: str, target: str) -> None:
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=1, group_name="weights"
    )
    received = {}
    for bucket in json.loads(sys.stdin.readline()):
        rows = zip(bucket["names"], bucket["dtypes"], bucket["shapes"], strict=True)
        empty = [(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in rows]
        flat = FlattenedTensorBucket(named_tensors=empty)
        dist.broadcast(flat.get_flattened_tensor(), src=0, group=group)
        received.update({name: tensor.clone() for name, tensor in flat.reconstruct_tensors()})
    save_file(received, target)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main(*sys.argv[1:])

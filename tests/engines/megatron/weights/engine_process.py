"""The receiving end of a weight update, with SGLang's functions in the order of its weight updater.

It joins the group as a server with our plug-in does, so the names that we hook must exist.

    python -m tests.engines.megatron.weights.engine_process PORT TARGET

It prints the line "joins" once its imports, which can take longer than the deadline to join, are done.  Standard input
has the buckets as one line of JSON.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from asyncrl.engines.sglang.plugin import direct
from tests.engines.sglang.plugin.direct_process import hash_store


def joined(port: str) -> dist.ProcessGroup:
    """The group, made without torch's watchdog."""
    make, made_with = weight_updater.init_custom_process_group, []

    def make_and_look(**about: Any) -> Any:
        made_with.append(os.environ["TORCH_NCCL_BLOCKING_WAIT"])
        return make(**about)

    weight_updater.init_custom_process_group = make_and_look
    direct.activate()
    HookRegistry.apply_hooks()
    updater = SimpleNamespace(tp_rank=0, _model_update_group={})
    sys.stdout.write("joins\n")
    sys.stdout.flush()
    join = weight_updater.WeightUpdater.init_weights_update_group
    assert join(updater, "127.0.0.1", int(port), 1, 2, "weights", "gloo")[0]
    assert made_with == ["1"]
    group: dist.ProcessGroup = updater._model_update_group["weights"]  # noqa: SLF001
    return group


def main(port: str, target: str) -> None:
    group = joined(port)
    received = {}
    for bucket in json.loads(sys.stdin.readline()):
        rows = zip(bucket["names"], bucket["dtypes"], bucket["shapes"], strict=True)
        empty = [(name, torch.empty(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in rows]
        flat = FlattenedTensorBucket(named_tensors=empty)
        dist.broadcast(flat.get_flattened_tensor(), src=0, group=group)
        received.update({name: tensor.clone() for name, tensor in flat.reconstruct_tensors()})
    save_file(received, target)


if __name__ == "__main__":
    dist.init_process_group("gloo", store=hash_store(), rank=0, world_size=1)
    main(*sys.argv[1:])

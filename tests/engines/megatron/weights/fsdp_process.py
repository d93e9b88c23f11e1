"""Save a model as a program that trains with FSDP does: sharded by FSDP2 over two processes, by torch DCP.

    python -m tests.engines.megatron.weights.fsdp_process RANK PORT HF_FOLDER TARGET [PREFIX]

With PREFIX ``stateful``, the checkpoint has the names of slime's trainer (``model_state.model.``), else the given ones.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class ModelState(Stateful):  # type: ignore[misc,unused-ignore]
    """The model's part of a checkpoint."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": get_model_state_dict(self.model)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("the tests only save")


def main(rank: int, port: str, checkpoint: str, target: str, prefix: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if prefix == "stateful":
        save({"model_state": ModelState(model)}, checkpoint_id=target)
    else:
        state = {prefix + name: tensor for name, tensor in get_model_state_dict(model).items()}
        save(state | {"optim.step": torch.ones(3)}, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, port, checkpoint, target, *rest = sys.argv[1:]
    main(int(rank), port, checkpoint, target, "".join(rest))

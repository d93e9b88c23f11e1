"""One of two ranks of an engine with expert parallelism, which receives updates with the plug-in ``direct``.

    python -m tests.engines.sglang.plugin.parts_process RANK ENGINE_PORT GROUP_PORT

Its model loads the experts of its part alone, like SGLang's.  Standard input has one request per line.
"""

import json
import re
import sys
from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.engines.sglang.plugin import direct, expert_parts
from asyncrl.engines.sglang.plugin.expert_parts import ExpertPart
from tests.engines.sglang.plugin.direct_process import Model, group_of, met, never

NUM_EXPERTS = 4
NUM_PARTS = 2
_EXPERT = re.compile(r"experts\.(\d+)\.")


class PartModel(Model):
    """A model with the experts of one part."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self._part = part

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in tensors if self.holds(name))

    def holds(self, name: str) -> bool:
        found = _EXPERT.search(name)
        return found is None or int(found[1]) * NUM_PARTS // NUM_EXPERTS == self._part


class Updater:
    """The object that SGLang hands to the hooks."""

    device = "cpu"

    def __init__(self, group: dist.ProcessGroup, model: Model) -> None:
        self._model_update_group = {"weights": group}
        self.get_model = lambda: model


def main(rank: int, port: str) -> None:
    group = group_of(met(port, 1 + rank, 3), 1 + rank, 3, "weights")
    part = ExpertPart(number=rank, num_parts=NUM_PARTS)
    for module in (direct, expert_parts):
        module.part_of_this_rank = lambda: part  # type: ignore[attr-defined]
        module.ranks_of_this_engine = lambda: dist.group.WORLD  # type: ignore[attr-defined]
    model, hook = PartModel(rank), direct.DirectUpdates()
    updater = Updater(group, model)
    buckets: list[dict[str, Any]] = []
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["load_format"] == "join":
            told = direct.around_join(never, updater, "", 0, 1, 1 + 1, asked["names"][0], "gloo")
        else:
            if asked["load_format"] == "flattened_bucket":
                here = [model.holds(name) for name in asked["names"]]
                buckets.append({key: list(compress(asked[key], here)) for key in ("names", "dtypes", "shapes")})
                model.parts(buckets[-1:])  # allocates the weights, as a model does before it is loaded
            told = hook.around_receive(
                never, updater, asked["names"], asked["dtypes"], asked["shapes"], "weights", asked["load_format"]
            )
        if asked["target"]:
            save_file(model.parts(buckets), f"{asked['target']}-{rank}")
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    number, engine_port, group_port = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{engine_port}", rank=int(number), world_size=NUM_PARTS
    )
    main(int(number), group_port)

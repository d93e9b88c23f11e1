"""An engine that receives weight updates with the plug-in ``direct``, around a model with its own loaders.

    python -m tests.engines.sglang.plugin.direct_process PORT

Standard input has one update per line, standard output its outcome.
"""

import json
import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from asyncrl.engines.sglang.plugin.direct import DirectUpdates

MOST_ROWS = 256


class Model:
    """A model that joins queries, keys and values into one weight, casts norms by hand, and copies all others."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.num_loaded = 0

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.num_loaded += 1
            place = self._place(name, tensor)
            place.copy_(tensor.float().to(tensor.dtype) * 1 if name.endswith("norm.weight") else tensor)

    def _place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if part in name:
                joined = name.replace(part, "qkv_proj")
                if joined not in self.weights:
                    self.weights[joined] = torch.empty(3, MOST_ROWS, *tensor.shape[1:], dtype=tensor.dtype)
                return self.weights[joined][number].narrow(0, 0, len(tensor))
        if name not in self.weights:
            self.weights[name] = torch.empty_like(tensor)
        return self.weights[name]

    def parameters(self) -> Iterable[torch.Tensor]:
        return self.weights.values()

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.items()

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ()

    def move(self) -> None:
        self.weights = {name: weight.clone() for name, weight in self.weights.items()}

    def parts(self, buckets: Iterable[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The weights under the names and shapes that they were received with."""
        found = {}
        for bucket in buckets:
            for name, dtype, shape in zip(bucket["names"], bucket["dtypes"], bucket["shapes"], strict=True):
                empty = torch.empty(shape, dtype=getattr(torch, dtype))
                found[name] = self._place(name, empty).clone().contiguous()
        return found


class Updater:
    """The object that SGLang hands to the hook."""

    device = "cpu"

    def __init__(self, group: dist.ProcessGroup, model: Model) -> None:
        self._model_update_group = {"before": alone(), "weights": group}
        self.get_model = lambda: model


def alone() -> dist.ProcessGroup:
    """A group without other members, as after the death of all of them."""
    return group_of(hash_store(), 0, 1, "before", timeout_s=9.0)


def group_of(
    store: distributed_c10d.Store, rank: int, size: int, name: str, *, backend: str = "gloo", timeout_s: float = 60.0
) -> dist.ProcessGroup:
    """Make a process group as SGLang does."""
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001
        size,
        rank,
        [],
        backend,
        distributed_c10d.PrefixStore(name, store),
        group_name=distributed_c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}  # noqa: SLF001
    return group


def hash_store() -> distributed_c10d.Store:
    """A store for a group of one process."""
    store: distributed_c10d.Store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not re-export it
    return store


def met(port: int | str, rank: int, size: int) -> distributed_c10d.Store:
    """The store of a group's members; waits until all are connected."""
    store: distributed_c10d.Store
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, size, timeout=timedelta(seconds=60)))
    return store


def never(*about: object) -> tuple[bool, str]:
    """SGLang's method for formats other than ours; the tests never reach it."""
    raise NotImplementedError


def main(port: str) -> None:
    group = group_of(met(port, 1, 2), 1, 2, "weights")
    model, hook = Model(), DirectUpdates()
    buckets: list[dict[str, Any]] = []
    updater = Updater(group, model)
    for line in sys.stdin:
        asked = json.loads(line)
        before = model.num_loaded
        if asked["load_format"] == "move":
            model.move()
            continue
        if asked["load_format"] == "flattened_bucket":
            buckets.append(asked)
            model.parts([asked])  # allocates the weights, as a model does before it is loaded
        answer = hook.around_receive(
            never, updater, asked["names"], asked["dtypes"], asked["shapes"], "weights", asked["load_format"]
        )
        assert list(updater._model_update_group) == ["weights"]  # noqa: SLF001
        if asked["target"]:
            save_file(model.parts(buckets), asked["target"])
        sys.stdout.write(json.dumps([*answer, model.num_loaded - before]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=hash_store(), rank=0, world_size=1)
    main(*sys.argv[1:])

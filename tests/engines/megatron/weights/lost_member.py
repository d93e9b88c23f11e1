"""A member of an update group of three: the trainer, or an engine with the plug-in ``direct``.  The second one dies.

    python -m tests.engines.megatron.weights.lost_member RANK DEVICE BACKEND PORT SECOND_PORT

Prints the outcomes of three updates; the second one loses its member.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tests.megatron_imports import megatron_imports

with megatron_imports():
    from asyncrl.engines.megatron.weights.update_group import GroupStore, join_update_group
    from asyncrl.engines.megatron.weights.weight_sender import _Sending

from asyncrl.engines.sglang.labels import DIRECT
from asyncrl.engines.sglang.plugin.direct import DirectUpdates, around_join
from asyncrl.engines.weight_sync.group_abort import UpdateGroups, abandon
from asyncrl.engines.weight_sync.store_connection import wait_until_served
from tests.engines.sglang.plugin.direct_process import group_of, hash_store, met, never

NUM_BYTES = 64_000_000
DIES_AFTER_S = 2.0
"""Seconds until the second member dies: the others have the first update, partly through it, and run the second."""
UNTIL_GIVEN_UP_S = 6.0
"""Seconds until the group is abandoned: longer than torch's watchdog, as the test sets it, would let a process live."""
ENDS_S = 60.0


class Model:
    def __init__(self, device: str) -> None:
        self.weight = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self.weight.copy_(tensor)

    def parameters(self) -> list[torch.Tensor]:
        return [self.weight]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("weight", self.weight)]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []


class Updater:
    """The object that SGLang hands to the hook."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._model_update_group: dict[str, dist.ProcessGroup] = {}
        model = Model(device)
        self.get_model = lambda: model

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> tuple[bool, str]:
        """Join the group as SGLang does."""
        self._model_update_group[name] = group_of(met(port, rank, size), rank, size, name, backend=backend)
        return True, ""


def trainer(device: str, backend: str, ports: list[str]) -> list[object]:
    told: list[object] = []
    for number, (port, size) in enumerate(zip(ports, (3, 2), strict=True)):
        store = GroupStore("127.0.0.1", int(port))
        group = join_update_group(store, size, f"group-{number}", backend, ENDS_S)
        groups = UpdateGroups(main=group)
        flat = torch.full((NUM_BYTES,), 1 + number, dtype=torch.uint8, device=device)
        sending = _Sending([flat], groups, [group], is_checked=False)
        told.append((sending.has_ended(ENDS_S), str(sending.failure)))
        if number == 0:
            sending = _Sending([flat], groups, [group], is_checked=False)
            time.sleep(UNTIL_GIVEN_UP_S)
            began = time.monotonic()
            store.close()
            abandon(groups)
            told.append((sending.has_ended(ENDS_S), str(sending.failure)))
            dist.destroy_process_group(group)
            told.append(time.monotonic() - began)
    return told


def engine(rank: int, device: str, backend: str, ports: list[str]) -> list[object]:
    dist.init_process_group("gloo", store=hash_store(), rank=0, world_size=1)
    updater, hook = Updater(device), DirectUpdates()

    def update(group: str, load_format: str) -> tuple[bool, str]:
        return hook.around_receive(never, updater, ["w"], ["uint8"], [[NUM_BYTES]], group, load_format)

    wait_until_served("127.0.0.1", int(ports[0]), ENDS_S, ENDS_S)  # the driver asks the trainer first
    around_join(Updater.join, updater, "127.0.0.1", int(ports[0]), rank, 3, "group-0", backend)
    told: list[object] = [update("group-0", "flattened_bucket")]
    if rank == 1:
        time.sleep(DIES_AFTER_S)
        os.kill(os.getpid(), signal.SIGKILL)
    told.append(update("group-0", DIRECT))
    began = time.monotonic()
    wait_until_served("127.0.0.1", int(ports[1]), ENDS_S, ENDS_S)
    around_join(Updater.join, updater, "127.0.0.1", int(ports[1]), 1, 2, "group-1", backend)
    told.append(update("group-1", DIRECT))
    return [*told, updater.get_model().weight[::1000].unique().tolist(), time.monotonic() - began]  # type: ignore[no-untyped-call]  # torch is untyped


if __name__ == "__main__":
    faulthandler.dump_traceback_later(1.5 * ENDS_S, exit=True)
    rank, device, backend, *ports = sys.argv[1:]
    torch.ones(1, device=device)
    told = engine(int(rank), device, backend, ports) if int(rank) else trainer(device, backend, ports)
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    sys.stdin.read()  # the trainer outlives its engines: what NCCL sends by sockets may be in its threads still
    os._exit(0)  # servers and ranks end like this: without telling the group

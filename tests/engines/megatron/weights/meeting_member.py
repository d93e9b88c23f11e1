"""A member of path checks: the trainer, or an engine with the plug-in ``direct`` whose path is cut in the second check.

    python -m tests.engines.megatron.weights.meeting_member ROLE DEVICE BACKEND PORT PORT PORT

The trainer prints the failure of each check, or nothing for it, and its seconds; the engine prints its answers.
"""

import faulthandler
import json
import os
import sys
import time

import torch
import torch.distributed as dist

from asyncrl.engines.megatron.weights.engine_meeting import meet_engine
from asyncrl.engines.sglang.plugin.direct import around_join
from asyncrl.engines.weight_sync.path_check import PATH_CHECK, Meeting
from asyncrl.engines.weight_sync.store_connection import wait_until_served
from asyncrl.errors import WeightUpdateFailed
from tests.engines.sglang.plugin.direct_process import group_of, hash_store, met

PATH_S = {"cpu": 2.0, "cuda:0": 20.0}


class Updater:
    """The object that SGLang hands to the hook."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._model_update_group: dict[str, dist.ProcessGroup] = {}

    def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> tuple[bool, str]:
        """Join the group as SGLang does."""
        self._model_update_group[name] = group_of(met(port, rank, size), rank, size, name, backend=backend)
        return True, ""


def trainer(device: str, backend: str, ports: list[str]) -> list[object]:
    told: list[object] = []
    for number, port in enumerate(ports):
        began, failure = time.monotonic(), ""
        try:
            where = Meeting(
                master_address="127.0.0.1",
                master_port=int(port),
                world_size=2,
                group_name=f"{PATH_CHECK}{number}",
                backend=backend,
            )
            meet_engine(where, torch.device(device), PATH_S[device] if number == 1 else 60.0)
        except WeightUpdateFailed as error:
            failure = str(error)
        told.append((failure, time.monotonic() - began))
    return told


def engine(device: str, backend: str, ports: list[str]) -> list[object]:
    """Join all groups; in the second one, never enter the collective."""
    dist.init_process_group("gloo", store=hash_store(), rank=0, world_size=1)
    updater = Updater(device)

    def join(number: int) -> tuple[bool, str]:
        where = "127.0.0.1", int(ports[number]), 1, 2, f"{PATH_CHECK}{number}", backend
        wait_until_served(*where[:2], 120.0, 120.0)  # the driver asks both sides at once
        return updater.join(*where) if number == 1 else around_join(Updater.join, updater, *where)

    return [join(number) for number in range(len(ports))]


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150.0, exit=True)
    role, device, backend, *ports = sys.argv[1:]
    torch.ones(1, device=device)
    told = (trainer if role == "trainer" else engine)(device, backend, ports)
    sys.stdout.write(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # ranks and servers end like this, whatever their threads wait for

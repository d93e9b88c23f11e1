"""One raw ``torch.distributed`` broadcast, with which a weight update is compared.

Its functions are outside of ``__main__``, which a spawned process does not import.
"""

import argparse
import multiprocessing
import os
import time
from typing import Any

from asyncrl.engines.cluster.actors import NetworkPlace

RAW_TIMES = 6
"""Number of broadcasts; the first one sets up the connections and does not count."""
TIMEOUT_S = 120.0
"""Seconds for each process to end."""


def raw_s_of(asked: argparse.Namespace, num_bytes: int) -> float:
    """The fastest of some broadcasts from the first device to those of the engines, each rank in a new process."""
    (port,) = NetworkPlace().free_ports(1)
    spawn = multiprocessing.get_context("spawn")
    answers: Any = spawn.SimpleQueue()
    world = 1 + asked.engine_gpus
    ranks = [
        spawn.Process(target=_raw_rank, args=(rank, world, port, num_bytes, asked.device, answers))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
    if any(rank.exitcode != 0 for rank in ranks):  # None: it has not ended in time
        for rank in ranks:
            rank.kill()
        raise SystemExit(f"error: the raw broadcast failed: exit codes {[rank.exitcode for rank in ranks]}")
    best: float = answers.get()
    return best


def _raw_rank(rank: int, world: int, port: int, num_bytes: int, device: str, answers: Any) -> None:
    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as in the product
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(RAW_TIMES):
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(flat, src=0)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        answers.put(slowest.min().item())
    dist.destroy_process_group()

"""Ranks and engines on several machines, in a real Ray whose machines are processes of this one."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest

PROGRAM = """
import asyncio
import ray
from ray.cluster_utils import Cluster
from asyncrl.engines.cluster.placement import Layout, reserve

class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id()

async def machines(tensor_parallel):
    layout = Layout(
        device="cpu", num_ranks=4, num_engines=2, gpus_per_engine=1, is_shared=False, tensor_parallel=tensor_parallel
    )
    place = await reserve(ray, layout, 20.0, together_s=3.0 if tensor_parallel == 4 else 20.0)
    actors = [place.rank(Where, rank) for rank in range(4)] + [place.engine(Where, number) for number in range(2)]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=90)
    place.release_resources()
    return "".join("abcdef"[list(dict.fromkeys(nodes)).index(node)] for node in nodes)

three = {"num_cpus": 3, "env_vars": {"RAY_worker_niceness": "0"}}
cluster = Cluster(initialize_head=True, head_node_args={**three, "include_dashboard": False})
cluster.add_node(**three)
try:
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    for tensor_parallel in (1, 2, 4):
        print(tensor_parallel, asyncio.run(machines(tensor_parallel)))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.timeout(540)
def test_tensor_parallel_ranks_share_a_machine() -> None:
    """Ray gets its own folder: in its default folder other programs would find this cluster, and join it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # pytest's folder is too long for Ray's sockets
    own = {"RAY_TMPDIR": folder, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=450, check=False, env=environment
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert sorted(said) == ["1", "2", "4"], done.stderr
    assert said["2"][:4] == "aabb"  # placed one by one, Ray would pack them aaab
    assert said["4"][:4] in ("aaab", "aabb")  # four do not fit onto a machine of three
    assert "room for 4 trainer ranks each (tensor-model-parallel-size 4)" in done.stderr

"""Ranks and engines on several machines, in a real Ray whose machines are processes of this one."""

import subprocess
import sys

PROGRAM = """
import asyncio, os, sys
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"  # as the product's session says
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
    place = await reserve(ray, layout, 20.0)
    actors = [place.rank(Where, rank) for rank in range(4)] + [place.engine(Where, number) for number in range(2)]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=30)
    place.give_up()
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


def test_tensor_parallel_ranks_share_a_machine() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    said = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert sorted(said) == ["1", "2", "4"], done.stderr
    assert said["1"][:4] == "aaab"  # three fit onto a machine
    assert said["2"][:4] == "aabb"
    assert said["4"][:4] == "aaab"  # four do not
    assert "tensor-model-parallel-size 4: the largest machine has 3 CPUs" in done.stderr

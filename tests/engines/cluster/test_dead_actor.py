"""The real Ray: a server's actor that was killed, stopped or lost with its machine is replaced."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
import os
import signal
import ray
from pathlib import Path
from ray.cluster_utils import Cluster
from asyncrl.engines.cluster.actors import ServerActor
from asyncrl.engines.cluster.placement import Layout, reserve
from asyncrl.engines.cluster.server import Server
from asyncrl.errors import ServerFailed

class Actor(ServerActor):
    def where(self):
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def start_sleep(self, log):
        self.start("sleep", ("sleep", "600"), {}, log, "key")
        return self._server.pid

def say(*words):
    with open(os.environ["SAID"], "a") as said:  # Ray's processes share our standard output, and some lines lack an end
        print(*words, file=said)

def add_machine(cluster):
    cluster.add_node(num_cpus=1, env_vars={"RAY_worker_niceness": "0"})

async def start(server):
    pid, node = await server.actor.where.remote()
    child = await server.actor.start_sleep.remote(Path(os.environ["RAY_TMPDIR"]) / "log")
    await server.check()
    return pid, node, child

async def ended(server, what):
    try:
        async with asyncio.timeout(20):
            while True:
                await server.check()
                await asyncio.sleep(0.1)  # a process lives on for a moment without its raylet
    except ServerFailed:
        say(what, "ended")

async def main(cluster):
    layout = Layout(device="cpu", num_ranks=1, num_engines=1, gpus_per_engine=1, is_shared=False)
    place = await reserve(ray, layout, 20.0)
    create = lambda: place.engine(Actor, 0)
    server = Server(name="sglang-0", actor=create(), timeout_s=3.0, create=create, kill=place.kill)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        pid, node, child = await start(server)
        os.kill(pid, number)
        await ended(server, number.name)
        await server.renew()
        again, same, _ = await asyncio.wait_for(start(server), 40)
        say(number.name, "replaced", again != pid and same == node and not Path(f"/proc/{child}/exe").exists())
    _, node, _ = await start(server)
    lost = next(each for each in cluster.list_all_nodes() if each.node_id == node)
    add_machine(cluster)
    cluster.remove_node(lost, allow_graceful=False)
    await ended(server, "machine")
    async with asyncio.timeout(60):
        while True:  # as the keeper does: Ray may choose the lost machine until it misses the machine's heartbeats
            await server.renew()
            try:
                await server.check()
                break
            except ServerFailed:
                pass
        _, elsewhere, _ = await start(server)
    say("machine replaced", elsewhere != node)

# The head is the machine of this program, which the cluster cannot lose: no actor may be there.
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
add_machine(cluster)
add_machine(cluster)
try:
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    asyncio.run(main(cluster))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings of Ray that notice a lost machine in seconds; by default it takes 15 s."""


@pytest.mark.timeout(720)
def test_an_actor_that_died_hangs_or_lost_its_machine_is_replaced(tmp_path: Path) -> None:
    """Ray gets its own folder: in its default folder other programs would find this cluster, and join it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # pytest's folder is too long for Ray's sockets
    said = tmp_path / "said"
    own = {"RAY_TMPDIR": folder, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "SAID": str(said), **SOON}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600, check=False, env=environment
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert said.read_text().splitlines() == [
        "SIGKILL ended",
        "SIGKILL replaced True",
        "SIGSTOP ended",
        "SIGSTOP replaced True",
        "machine ended",
        "machine replaced True",
    ], done.stderr

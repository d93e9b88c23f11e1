"""A trainer that trains, and waits for members of a group, can be told to abandon an update, in a real Ray."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, threading, time
from asyncrl.engines.cluster.actors import RankActor
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.placement import Layout, reserve
from asyncrl.engines.cluster.session import ray_session
from asyncrl.engines.cluster.ray_trainer import RayTrainer

class Rank:
    def __init__(self):
        self.given_up = threading.Event()
        self.told = []
        self.member_is_missing = threading.Event()
    def send(self, is_checked, by_part):
        self.training_thread = threading.get_ident()
        assert self.given_up.wait(60.0)
    def abandon(self, group_name):
        self.told.append(group_name)
        self.member_is_missing.set()
    def join_engines(self, *where):
        self.told.append(where[-2])
        if where[-2] == "asyncrl-3":
            assert self.member_is_missing.wait(60.0)
    def resend(self, is_checked, by_part):
        self.given_up.set()
        return True
    def snapshot(self, is_checked, by_part):
        return [self.training_thread == threading.get_ident(), *self.told]

class Actor(RankActor):
    def __init__(self):
        self._rank = Rank()

async def main(ray):
    layout = Layout(device="cpu", num_ranks=1, num_engines=1, gpus_per_engine=1, is_shared=False)
    place = await reserve(ray, layout, 60.0)
    rank = place.rank(Actor, 0)
    addresses = Addresses(is_single_node=False, timeout_s=60.0)
    await addresses.rank(rank)  # its process has started
    trainer = RayTrainer([rank], train_timeout_s=60.0, control_timeout_s=60.0)
    sending = asyncio.create_task(trainer.send(is_checked=False, by_part=False, timeout_s=60.0))
    where = dict(master_address="h", master_port=1, world_size=2, backend="gloo")
    forming = asyncio.create_task(trainer.join_engines(group_name="asyncrl-3", **where))
    await asyncio.sleep(0.5)
    began = time.monotonic()
    await trainer.abandon("asyncrl-3")
    await forming
    host, port = await addresses.rank(rank)
    await trainer.join_engines(group_name="asyncrl-4", **where)
    assert time.monotonic() - began < 30.0
    assert await trainer.resend(is_checked=False, by_part=False)
    await sending
    print(*await trainer.snapshot(is_checked=False, by_part=False))

with ray_session(2, hold_signals=lambda: None) as ray:
    asyncio.run(main(ray))
"""


@pytest.mark.timeout(540)
def test_a_busy_rank_abandons_and_restarts_an_update_at_once_and_has_one_thread_for_other_calls() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=450, check=False)
    assert done.stdout.split()[-4:] == ["True", "asyncrl-3", "asyncrl-3", "asyncrl-4"], done.stderr

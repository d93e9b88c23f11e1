"""Engines whose path for weights is cut while they answer HTTP: found, restarted, and the only ones that pay."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.fake import FakeEngine, FakeUpdater
from asyncrl.engines.slow_engines import DecodingSpeed
from asyncrl.engines.weight_sync.broadcast import BroadcastUpdater, Received, WeightReceiver
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.errors import EngineRejected, TrainerFailed, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights
from tests.steps import Step, failing, nothing
from tests.unit.engines.weight_sync.recorders import PausableRecorder, Recorder, TwoBuckets
from tests.unit.pipeline.harness import World
from tests.virtual_time import run_virtually

CUT_S = 60.0
"""Seconds until engines give a broadcast up, as in the plug-in."""
PATH_S = 20.0


@dataclass
class Network:
    """The paths for weights, and who has met."""

    cut: set[str] = field(default_factory=set)
    group: set[str] = field(default_factory=set)
    """The engines of the update group."""
    came: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    """For each path check, whether its engine came."""


class Engine(PausableRecorder):
    """An engine that always answers HTTP; a broadcast reaches all members of a group or none."""

    num_ranks = 1

    def __init__(self, url: str, network: Network, *, knows_checks: bool = True) -> None:
        super().__init__(url)
        self.versions: list[str] = []
        self._network = network
        self._knows_checks = knows_checks

    async def probe(self, timeout_s: float) -> None:
        pass

    async def decoding_speed(self, timeout_s: float) -> DecodingSpeed | None:
        return None

    async def join_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        if rank_offset == 1:
            self._network.group.clear()
        self._network.group.add(self.url)

    async def join_parts(self, *, rank_offset: int, world_size: int, group_name: str, backend: str) -> None:
        raise AssertionError("there are no experts here")

    async def meet_trainer(self, where: Meeting) -> bool:
        await self._do("meet")
        if self._knows_checks and self.url in self._network.cut:
            await asyncio.Event().wait()
        if self._knows_checks:
            self._network.came[where.group_name].set()
        return self._knows_checks

    async def receive_bucket(self, bucket: WeightBucket, *, group_name: str, label: str | None) -> Received:
        if self._network.cut & self._network.group:
            await asyncio.sleep(CUT_S)
            raise EngineRejected(f"nothing came for {CUT_S:g} s")
        self.versions += [] if label is None else [label]
        return Received(is_recorded=False)

    async def receive_all(self, *args: object, **kwargs: object) -> Received:
        raise AssertionError("no bucket is recorded here")


class Trainer(Recorder, TwoBuckets):
    """A trainer that copies its weights."""

    def __init__(self, network: Network, step: Step = nothing) -> None:
        super().__init__(step)
        self._network = network

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        await asyncio.sleep(0)

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        await self._do(f"join {world_size}")

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        raise AssertionError("there are no experts here")

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        await self._do("meet")
        try:
            async with asyncio.timeout(timeout_s):
                await self._network.came[where.group_name].wait()
        except TimeoutError as error:
            raise WeightUpdateFailed(f"did not meet the engine within {timeout_s:g} s") from error

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        await self._do("snapshot")
        return True

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        await self._do("resend")
        return True

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        raise AssertionError("this trainer has copies")

    async def abandon(self, group_name: str) -> None:
        await self._do("abandon")


async def a_port() -> int:
    return 1


class Cluster:
    """Engines at a network with a supervisor that restarts them."""

    def __init__(self, *urls: str, heals: bool = True, step: Step = nothing, knows_checks: bool = True) -> None:
        """``heals``: a restart puts an engine where its path is whole."""
        self.network = Network()
        self.engines = {url: Engine(url, self.network, knows_checks=knows_checks) for url in urls}
        self.trainer = Trainer(self.network, step)
        self.membership: EngineMembership[WeightReceiver] = EngineMembership(tuple(self.engines.values()))
        self.told: list[str] = []
        """The record of what the pool of requests was told."""
        self._heals = heals

    def updater(self) -> BroadcastUpdater:
        return BroadcastUpdater(
            self.membership,
            self.trainer,
            master_address="here",
            find_port=a_port,
            backend="gloo",
            timeout_s=120.0,
        )

    def supervisor(self, max_restarts: int = 3) -> EngineSupervisor:
        servers: Any = [Server(url, self) for url in self.engines]
        started = [
            StartedEngine(control=self.engines[each.name], server=each, start=each.start, probe_timeout_s=30.0)
            for each in servers
        ]
        return EngineSupervisor(started, self.membership, self, max_restarts=max_restarts)

    def heal(self, url: str) -> None:
        if self._heals:
            self.network.cut.discard(url)

    def leave(self, url: str) -> None:
        self.told.append(f"{url} leaves")

    def join(self, url: str) -> None:
        self.told.append(f"{url} joins")

    def move(self, url: str, new_url: str) -> None:
        raise AssertionError("no engine moves here")

    async def route(self, url: str) -> None:
        pass

    async def drain(self, url: str) -> None:
        raise AssertionError("no engine is slow here")

    async def forget(self, url: str) -> None:
        self.told.append(f"{url} is forgotten")


@dataclass
class Server:
    """The process of an engine; it never ends by itself."""

    name: str
    cluster: Cluster

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def renew(self) -> None:
        await asyncio.sleep(0.1)

    async def start(self) -> Engine:
        await asyncio.sleep(10.0)
        self.cluster.heal(self.name)
        return self.cluster.engines[self.name]


def published(cluster: Cluster, *cut: str) -> tuple[WeightUpdateFailed | None, float]:
    """Publish one version with these engines cut off; return the error, and the time it came."""

    async def run() -> WeightUpdateFailed | None:
        updater = cluster.updater()
        await updater.connect()
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(cluster.supervisor().keep())
            cluster.network.cut.update(cut)
            assert await updater.snapshot()
            try:
                await updater.publish(Weights(version=1, step=1))
            except WeightUpdateFailed as error:
                return error
            finally:
                keeping.cancel()
        return None

    return run_virtually(run())


def test_an_engine_that_is_cut_off_is_the_only_one_restarted(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("a", "b", "c")
    error, seconds = published(cluster, "b")
    assert isinstance(error, UpdateInterrupted)
    assert [engine.url for engine in cluster.membership.present] == ["a", "c"]
    assert seconds == pytest.approx(CUT_S + PATH_S + 5.0)
    assert cluster.trainer.told == ["join 4", "snapshot", "abandon", "abandon", *["meet"] * 3, "abandon"]
    (warning,) = [each.getMessage() for each in caplog.records if "restarting" in each.getMessage()]
    assert warning == (
        "b answers HTTP but runs no gloo collective with the trainer at here: did not meet the engine within 20 s; "
        "restarting it (restart 1 of at most 3 an hour)"
    )


def test_several_engines_that_are_cut_off_are_all_gone_before_the_update_is_repeated() -> None:
    cluster = Cluster("a", "b", "c")
    error, _ = published(cluster, "a", "c")
    assert isinstance(error, UpdateInterrupted)
    assert [engine.url for engine in cluster.membership.present] == ["b"]


def test_an_update_is_final_if_the_trainer_meets_none_of_several_engines() -> None:
    cluster = Cluster("a", "b")
    error, _ = published(cluster, "a", "b")
    assert not isinstance(error, UpdateInterrupted)
    assert len(cluster.membership.present) == 2


def test_the_only_engine_is_restarted_if_it_is_cut_off() -> None:
    error, _ = published(Cluster("a"), "a")
    assert isinstance(error, UpdateInterrupted)


def test_an_update_is_final_if_engines_know_no_path_checks_or_the_trainer_does_not_answer() -> None:
    for cluster in (
        Cluster("a", "b", knows_checks=False),
        Cluster("a", "b", step=failing("abandon", TrainerFailed("busy"))),
    ):
        error, _ = published(cluster, "b")
        assert str(error).endswith(f"nothing came for {CUT_S:g} s")
        assert not isinstance(error, UpdateInterrupted)
        assert len(cluster.membership.present) == 2


def test_a_trainer_that_fails_in_a_path_check_ends_the_update() -> None:
    with pytest.raises(ExceptionGroup) as error:
        published(Cluster("a", "b", step=failing("meet", TrainerFailed("no answer"))), "b")
    assert error.group_contains(TrainerFailed, match="no answer")


class Broadcasts(FakeUpdater):
    """The updates of a run: broadcasts to the cluster, while the run's engine stands still."""

    def __init__(self, engine: FakeEngine, updater: BroadcastUpdater) -> None:
        super().__init__(engine)
        self._engine = engine
        self._updater = updater

    async def wait_for_rejoined(self) -> None:
        await self._updater.wait_for_rejoined()

    async def snapshot(self) -> bool:
        if not self.published:
            await self._updater.connect()
        return await self._updater.snapshot()

    async def resnapshot(self) -> bool:
        return await self._updater.resnapshot()

    async def publish(self, weights: Weights) -> UpdateReport:
        await self._engine.pause()
        report = await self._updater.publish(weights)
        self._engine.continue_generation(weights)
        self.published.append(weights)
        return report


@dataclass(kw_only=True)
class CutWorld(World):
    """A run in which the engine "b" of three is cut off after some seconds."""

    steps: int = 40
    train_seconds: float = 10.0
    cluster: Cluster
    max_restarts: int = 3

    def make_updater(self) -> FakeUpdater:
        return Broadcasts(self.engine, self.cluster.updater())

    async def main(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self.cluster.supervisor(self.max_restarts).keep())
            asyncio.get_running_loop().call_later(2.5, self.cluster.network.cut.add, "b")
            await super().main()
            keeping.cancel()


def test_a_cut_costs_a_run_one_restart_and_no_training_step() -> None:
    cluster = Cluster("a", "b", "c")
    world = CutWorld(cluster=cluster).run()
    engines, versions = cluster.engines, [weights.version for weights in world.updater.published]
    assert cluster.told == ["b leaves", "b joins"]
    assert [batch.step for batch in world.trainer.batches] == list(range(40))
    assert world.updater.published[-1].step == 40
    assert engines["a"].versions == engines["c"].versions == list(map(str, versions))
    missed = [version for version in engines["a"].versions if version not in engines["b"].versions]
    assert 0 < len(missed) <= 3  # the repeated update, and those of the 10 s in which it started
    assert engines["b"].versions[-1] == engines["a"].versions[-1]
    lost = set(range(1, versions[-1] + 1)) - set(versions)
    assert len(lost) == 1  # the version of the update that failed is never used again
    assert 400.0 <= world.seconds < 400.0 + 1.2 * (CUT_S + PATH_S + 5.0)


def test_an_engine_whose_path_stays_cut_is_left_out_and_never_joins_the_group_of_the_others() -> None:
    cluster = Cluster("a", "b", "c", heals=False)
    world = CutWorld(cluster=cluster, max_restarts=2).run()
    assert cluster.told == ["b leaves", "b is forgotten"]
    assert [engine.url for engine in cluster.membership.present] == ["a", "c"]
    assert [batch.step for batch in world.trainer.batches] == list(range(40))
    assert cluster.trainer.told.count("join 4") == 1
    assert cluster.engines["b"].told.count("meet") == 3  # after the update that failed, and after each restart
    assert cluster.engines["a"].versions == [str(weights.version) for weights in world.updater.published]

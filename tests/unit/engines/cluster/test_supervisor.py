"""An engine that ends is restarted, and gets requests once it has the present weights."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import EngineRejected, EngineTimeout, ServerFailed
from tests.virtual_time import run_virtually

ROUTER_S = 15.0
PROBE_S = 30.0


@dataclass
class FakeServer:
    """A server whose lives last ``lives`` seconds, one after the other."""

    name: str
    lives: list[float]
    started: int = 0
    refusals: list[Exception] = field(default_factory=list)
    """Errors that its next starts raise, one each."""
    hangs_at: float = math.inf
    """Time from which its first life no longer answers probes."""
    answer: Exception = field(default_factory=lambda: EngineTimeout("silent for 30 s"))
    """The error of such a probe, after 30 s."""

    async def watch(self) -> None:
        await asyncio.sleep(self.lives[self.started])
        raise ServerFailed(f"{self.name} ended")

    async def stop(self) -> None:
        await asyncio.sleep(0.1)

    async def probe(self) -> None:
        if self.started == 0 and asyncio.get_running_loop().time() >= self.hangs_at:
            await asyncio.sleep(PROBE_S)
            raise self.answer

    async def start(self) -> None:
        await asyncio.sleep(10.0)
        if self.refusals:
            raise self.refusals.pop(0)
        self.started += 1


@dataclass
class Member:
    url: str


@dataclass
class Log:
    """A record of the times at which each engine gained and lost requests."""

    said: list[tuple[float, str]] = field(default_factory=list)

    def leave(self, url: str) -> None:
        self._say(f"{url} leaves")

    def join(self, url: str) -> None:
        self._say(f"{url} joins")

    async def route(self, url: str) -> None:
        await asyncio.sleep(ROUTER_S)
        self._say(f"{url} is routed")

    def _say(self, text: str) -> None:
        self.said.append((round(asyncio.get_running_loop().time(), 3), text))


def kept(
    lives: dict[str, list[float]],
    max_restarts: int,
    seconds: float,
    then: Callable[[EngineMembership[Member]], None] | None = None,
    refusals: Sequence[Exception] = (),
    unresponsive_at: float | None = None,
    **hangs: Any,
) -> Log:
    """Run a supervisor for ``seconds``, with an update every 20 seconds; ``then`` is called at the end.

    ``refusals`` are the errors of each engine's next starts; ``hangs`` are fields of each FakeServer.  The engine "a"
    is marked unresponsive once, at ``unresponsive_at``.
    """
    log, membership = Log(), EngineMembership([Member(url) for url in lives])
    servers = [FakeServer(url, each, refusals=list(refusals), **hangs) for url, each in lives.items()]
    engines = [
        StartedEngine(url=each.name, server=each, start=each.start, probe=each.probe)  # type: ignore[arg-type]
        for each in servers
    ]
    supervisor = EngineSupervisor(engines, membership, log, max_restarts=max_restarts)

    async def update() -> None:
        while True:
            await asyncio.sleep(20.0)
            membership.mark_synced(membership.present)

    async def main() -> None:
        if unresponsive_at is not None:
            asyncio.get_running_loop().call_later(unresponsive_at, membership.mark_unresponsive, "a", "does not answer")
        async with asyncio.TaskGroup() as tasks:
            both = [tasks.create_task(supervisor.keep()), tasks.create_task(update())]
            await asyncio.sleep(seconds)
            for task in both:
                task.cancel()
        if then is not None:
            then(membership)

    run_virtually(main())
    return log


def test_an_engine_that_ends_is_back_after_the_next_update() -> None:
    log = kept({"a": [5.0, 1000.0], "b": [1000.0]}, 3, 50.0)
    assert log.said == [(5.0, "a leaves"), (20.0, "a joins"), (35.0, "a is routed")]


def test_a_restarted_engine_waits_for_an_update_that_began_after_its_restart() -> None:
    log = kept({"a": [12.0, 1000.0]}, 3, 50.0)
    assert log.said == [(12.0, "a leaves"), (40.0, "a joins")]


def test_an_engine_may_end_again_also_before_the_router_knows_that_it_was_back() -> None:
    log = kept({"a": [5.0, 9.0, 1000.0]}, 3, 70.0)
    assert [text for _, text in log.said] == ["a leaves", "a joins"] * 2 + ["a is routed"]


def test_an_engine_may_end_while_it_waits_for_an_update() -> None:
    log = kept({"a": [21.0, 2.0, 1000.0]}, 3, 70.0)  # ready again at 31, ends at 33, ready at 53, served at 60
    assert log.said == [(21.0, "a leaves"), (60.0, "a joins")]


def test_an_unresponsive_engine_is_killed_and_restarted() -> None:
    log = kept({"a": [1000.0, 1000.0], "b": [1000.0]}, 3, 50.0, unresponsive_at=5.0)
    assert log.said == [(5.0, "a leaves"), (20.0, "a joins"), (35.0, "a is routed")]


def test_unresponsive_engine_counts_as_lost_and_reports_reason() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [1000.0, 1000.0], "b": [1000.0]}, 0, 50.0, unresponsive_at=5.0)
    assert error.group_contains(ServerFailed, match="a does not answer")


def test_a_restarted_engine_may_become_unresponsive_before_its_update() -> None:
    log = kept({"a": [21.0, 1000.0, 1000.0]}, 3, 70.0, unresponsive_at=33.0)  # ready at 31, again at 53, served at 60
    assert log.said == [(21.0, "a leaves"), (60.0, "a joins")]


def test_an_engine_that_fails_its_liveness_probe_is_killed_and_restarted() -> None:
    """The probe at 10 is answered, the one at 20 is not for 30 s; the engine is ready at 60 and synced at 80."""
    log = kept({"a": [1000.0, 1000.0]}, 3, 82.0, hangs_at=15.0)
    assert log.said == [(50.0, "a leaves"), (80.0, "a joins")]


def test_an_engine_without_a_liveness_probe_is_left_alone() -> None:
    log = kept({"a": [1000.0]}, 0, 90.0, hangs_at=15.0, answer=EngineRejected("404"))
    assert log.said == []


REFUSALS = (ServerFailed("no memory is free yet"), ServerFailed("not ready within 10 s"))


def test_an_engine_that_does_not_start_is_started_again() -> None:
    """Starts at 5, at 25 (10 s after a failure at 15) and at 55 (20 s after one at 35): ready at 65, synced at 80."""

    def look(membership: EngineMembership[Member]) -> None:
        assert membership.num_changes == 2  # it was lost once, and came back once

    log = kept({"a": [5.0, 1000.0]}, 3, 96.0, look, refusals=REFUSALS)
    assert log.said == [(5.0, "a leaves"), (80.0, "a joins"), (95.0, "a is routed")]


def test_a_failed_restart_counts_as_a_loss() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [5.0, 1000.0], "b": [1000.0]}, 2, 60.0, refusals=REFUSALS)
    assert error.group_contains(ServerFailed, match="not ready within 10 s")


def test_too_many_engine_losses_end_the_run() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [5.0, 1000.0], "b": [6.0]}, 1, 50.0)
    assert error.group_contains(ServerFailed, match="b ended")


def test_membership_knows_which_engines_are_present_and_which_wait() -> None:
    def look(membership: EngineMembership[Member]) -> None:
        assert [member.url for member in membership.present] == ["a", "b"]
        assert membership.num_changes == 2

    kept({"a": [5.0, 1000.0], "b": [1000.0]}, 3, 50.0, look)

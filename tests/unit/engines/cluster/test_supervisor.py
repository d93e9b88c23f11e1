"""An engine that ends is restarted, and gets requests once it has the present weights."""

import asyncio
import errno
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import EngineLost, EngineRejected, EngineTimeout, ServerFailed
from tests.virtual_time import run_virtually

ROUTER_S = 15.0
FORGET_S = 1.0
PROBE_S = 30.0


@dataclass
class FakeServer:
    """A server whose lives last ``lives`` seconds, one after the other."""

    name: str
    lives: list[float]
    url: str = ""
    started: int = 0
    refusals: list[Exception] = field(default_factory=list)
    """Errors that its next starts raise, one each."""
    hangs_at: float = math.inf
    """Time from which its first life no longer answers probes."""
    answer: Exception = field(default_factory=lambda: EngineTimeout("silent for 30 s"))
    """The error of such a probe."""
    unanswered_s: float = math.inf
    """Seconds after which such a probe fails, at most its deadline."""
    until: float = math.inf
    """Time from which it answers again."""
    answered: int = 0
    """If not 0, every so many probes one is answered all the same."""
    num_probes: int = 0
    probe_s: float = 0.0
    """Seconds that any other probe takes."""
    dead_actors: int = 0
    """The number of its next restarts that find the actor dead; the server then moves to another URL."""

    def __post_init__(self) -> None:
        self.url = self.name

    async def watch(self) -> None:
        await asyncio.sleep(self.lives[self.started])
        raise ServerFailed(f"{self.name} ended")

    async def renew(self) -> None:
        await asyncio.sleep(0.1)
        if self.dead_actors:
            self.dead_actors -= 1
            self.url += "2"

    async def probe(self, timeout_s: float) -> None:
        await asyncio.sleep(self.probe_s)
        self.num_probes += 1
        if self.answered and self.num_probes % self.answered == 0:
            return
        if self.started == 0 and self.hangs_at <= asyncio.get_running_loop().time() < self.until:
            await asyncio.sleep(min(timeout_s, self.unanswered_s))
            raise self.answer

    async def start(self) -> "At":
        await asyncio.sleep(10.0)
        if self.refusals:
            raise self.refusals.pop(0)
        self.started += 1
        return At(self.url, self)


@dataclass
class Member:
    url: str


@dataclass
class At(Member):
    """A server at one of its URLs."""

    server: FakeServer

    async def probe(self, timeout_s: float) -> None:
        await self.server.probe(timeout_s)


@dataclass
class Log:
    """A record of the times at which each engine gained and lost requests."""

    said: list[tuple[float, str]] = field(default_factory=list)

    def leave(self, url: str) -> None:
        self._say(f"{url} leaves")

    def move(self, url: str, new_url: str) -> None:
        self._say(f"{url} moves to {new_url}")

    async def drain(self, url: str) -> None:
        self._say(f"{url} is drained")

    def join(self, url: str) -> None:
        self._say(f"{url} joins")

    async def route(self, url: str) -> None:
        await asyncio.sleep(ROUTER_S)
        self._say(f"{url} is routed")

    async def forget(self, url: str) -> None:
        await asyncio.sleep(FORGET_S)
        self._say(f"{url} is forgotten")

    def _say(self, text: str) -> None:
        self.said.append((round(asyncio.get_running_loop().time(), 3), text))


def kept(
    lives: dict[str, list[float]],
    max_restarts: int,
    seconds: float,
    then: Callable[[EngineMembership[Member]], None] | None = None,
    refusals: Sequence[Exception] = (),
    unresponsive_at: float | None = None,
    min_engines: int = 1,
    update_every_s: float = 20.0,
    **about: Any,
) -> Log:
    """Run a supervisor for ``seconds``, with an update every ``update_every_s``; ``then`` is called at the end.

    ``refusals`` are the errors of each engine's next starts; ``about`` are fields of each FakeServer.  The engine "a"
    is marked unresponsive once, at ``unresponsive_at``.
    """
    log, membership = Log(), EngineMembership([Member(url) for url in lives])
    servers = [FakeServer(url, each, refusals=list(refusals), **about) for url, each in lives.items()]
    engines = [
        StartedEngine(control=At(each.name, each), server=each, start=each.start, probe_timeout_s=PROBE_S)  # type: ignore[arg-type]
        for each in servers
    ]
    supervisor = EngineSupervisor(engines, membership, log, max_restarts=max_restarts, min_engines=min_engines)

    async def update() -> None:
        while True:
            await asyncio.sleep(update_every_s)
            membership.mark_synced(membership.present, membership.num_changes)

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
        kept({"a": [1000.0, 1000.0], "b": [1000.0]}, 0, 50.0, unresponsive_at=5.0, min_engines=2)
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


def unreached() -> EngineLost:
    """The error of a command to which the network has no way."""
    error = EngineLost("no way to the host")
    error.__cause__ = OSError(errno.EHOSTUNREACH, "No route to host")
    return error


def test_an_engine_on_a_machine_that_has_vanished_is_restarted() -> None:
    """Its actor says nothing.  Probes at 20, 33 and 46 find no way, each after 3 s; it is ready at 59, synced at 60."""
    log = kept({"a": [1000.0, 1000.0]}, 3, 62.0, hangs_at=15.0, answer=unreached(), unanswered_s=3.0)
    assert log.said == [(49.0, "a leaves"), (60.0, "a joins")]


def test_an_engine_whose_probe_it_answers_with_an_error_is_left_alone() -> None:
    log = kept({"a": [1000.0]}, 0, 200.0, hangs_at=15.0, answer=EngineLost("answered 500"), unanswered_s=3.0)
    assert log.said == []


def test_an_engine_that_was_out_of_reach_for_two_probes_is_left_alone() -> None:
    log = kept({"a": [1000.0]}, 0, 200.0, hangs_at=15.0, until=41.0, answer=unreached(), unanswered_s=3.0)
    assert log.said == []


def test_an_engine_that_is_out_of_reach_now_and_then_is_left_alone() -> None:
    log = kept({"a": [1000.0]}, 0, 300.0, hangs_at=15.0, answered=3, answer=unreached(), unanswered_s=3.0)
    assert log.said == []


REFUSALS = (ServerFailed("no memory is free yet"), ServerFailed("not ready within 10 s"))


def test_an_engine_that_does_not_start_is_started_again() -> None:
    """Starts at 5, at 25 (10 s after a failure at 15) and at 55 (20 s after one at 35): ready at 65, synced at 80."""

    def look(membership: EngineMembership[Member]) -> None:
        assert membership.num_changes == 2  # it was lost once, and came back once

    log = kept({"a": [5.0, 1000.0]}, 3, 96.0, look, refusals=REFUSALS)
    assert log.said == [(5.0, "a leaves"), (80.0, "a joins"), (95.0, "a is routed")]


def test_a_failed_restart_counts_as_a_restart() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [5.0, 1000.0]}, 2, 60.0, refusals=REFUSALS + REFUSALS)
    assert error.group_contains(ServerFailed, match="10 s; its restarts are used up .* engines left: 0, needed: 1")


HOUR = 3600.0
NEVER = 1e9


def test_the_run_continues_without_an_engine_whose_restarts_are_used_up(caplog: pytest.LogCaptureFixture) -> None:
    """Ends at 5 and, back from 20, at 35: the second end finds no restart until the first is an hour old, at 3605."""
    log = kept({"a": [5.0, 15.0, NEVER], "b": [NEVER]}, 1, HOUR + 60)
    times = [at for at, text in log.said if text in ("a leaves", "a joins")]
    assert times == [5.0, 20.0, 35.0, HOUR + 20.0]
    assert "the run continues with 1 of 2 engines; it is started again in 3570 s" in caplog.text


def test_the_run_ends_when_no_engine_has_a_restart_left() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [5.0, 15.0], "b": [500.0, 20.0]}, 1, HOUR)
    assert error.group_contains(ServerFailed, match="b ended; its restarts are used up .* engines left: 0")


def test_an_engine_without_restarts_is_never_started_again() -> None:
    log = kept({"a": [5.0], "b": [NEVER]}, 0, 5 * HOUR)
    assert log.said == [(5.0, "a leaves"), (6.1, "a is forgotten")]


def test_where_all_engines_are_needed_the_first_one_without_a_restart_ends_the_run() -> None:
    with pytest.raises(ExceptionGroup) as error:
        kept({"a": [5.0], "b": [NEVER]}, 0, 50.0, min_engines=2)
    assert error.group_contains(ServerFailed, match="a ended; its restarts are used up .* engines left: 1, needed: 2")


def test_only_the_engines_that_are_not_lost_are_watched() -> None:
    engines = [
        StartedEngine(control=At(each.name, each), server=each, start=each.start, probe_timeout_s=PROBE_S)  # type: ignore[arg-type]
        for each in (FakeServer("a", [5.0]), FakeServer("b", [NEVER]))
    ]
    supervisor = EngineSupervisor(engines, EngineMembership([Member("a"), Member("b")]), Log(), max_restarts=0)

    async def main() -> list[str]:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(supervisor.keep())
            await asyncio.sleep(9.0)
            keeping.cancel()
        return [server.name for server in supervisor.watched]

    assert run_virtually(main())[0] == ["b"]


def test_sixty_four_engines_outlive_a_month_of_one_death_per_thousand_hours_each() -> None:
    month = 30 * 24 * HOUR
    draw = random.Random(3)
    lives = {f"e{number}": [draw.expovariate(1 / (1000 * HOUR)) for _ in range(20)] for number in range(64)}
    log = kept(lives, 3, month, update_every_s=HOUR, probe_s=month)
    assert sum(text.endswith("leaves") for _, text in log.said) > 30


def test_an_engine_whose_actor_died_comes_back_at_another_url() -> None:
    def look(membership: EngineMembership[Member]) -> None:
        assert [member.url for member in membership.present] == ["a2", "b"]

    log = kept({"a": [5.0, 1000.0], "b": [1000.0]}, 3, 50.0, look, dead_actors=1)
    assert log.said == [(5.0, "a leaves"), (15.1, "a moves to a2"), (20.0, "a2 joins"), (35.0, "a2 is routed")]


def test_membership_knows_which_engines_are_present_and_which_wait() -> None:
    def look(membership: EngineMembership[Member]) -> None:
        assert [member.url for member in membership.present] == ["a", "b"]
        assert membership.num_changes == 2

    kept({"a": [5.0, 1000.0], "b": [1000.0]}, 3, 50.0, look)


@pytest.mark.parametrize("num_turns", range(8))
def test_supervision_ends_although_an_engine_dies_in_that_moment(num_turns: int) -> None:
    async def main() -> bool:
        server = FakeServer("a", [5.0, 1e6])
        at = At("a", server)
        engine = StartedEngine(control=at, server=server, start=server.start, probe_timeout_s=PROBE_S)  # type: ignore[arg-type]
        supervisor = EngineSupervisor([engine], EngineMembership([at]), Log(), max_restarts=5)
        keeping = asyncio.get_running_loop().create_task(supervisor.keep())
        await asyncio.sleep(5.0)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait([keeping], timeout=300.0)
        return keeping.cancelled()

    assert run_virtually(main()) == (True, 5.0)

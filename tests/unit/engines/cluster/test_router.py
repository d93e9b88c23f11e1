"""A router that ends or hangs is restarted, and requests go to the engines directly meanwhile."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.engines.cluster.router import RouterSupervisor
from asyncrl.errors import EngineTimeout, ServerFailed
from tests.virtual_time import run_virtually

ENGINES = ("a", "b")


@dataclass
class FakeRouter:
    """A router, with its server; each of its lives lasts ``lives`` seconds."""

    lives: list[float]
    silent_from: float = math.inf
    """Time from which its first life no longer answers."""
    refusals: int = 0
    """The number of its next starts that fail."""
    started: int = 0
    url: str = "r"
    told: list[str] = field(default_factory=list)

    @property
    def server(self) -> "FakeRouter":
        return self

    async def watch(self) -> None:
        await asyncio.sleep(self.lives[self.started])
        raise ServerFailed("router ended")

    async def renew(self) -> None:
        await asyncio.sleep(0.5)

    async def probe(self) -> None:
        if self.started == 0 and asyncio.get_running_loop().time() >= self.silent_from:
            await asyncio.sleep(5.0)
            raise EngineTimeout("no answer within 5 s")

    async def start(self, engine_urls: Sequence[str], _timeout_s: float, *, at: str | None) -> None:
        await asyncio.sleep(2.0)
        if self.refusals:
            self.refusals -= 1
            raise ServerFailed("its port is taken")
        self.url = at or f"{self.url}2"
        self.started += 1
        self.told.append(f"for {', '.join(engine_urls)}")


@dataclass
class Pool:
    urls: tuple[str, ...] = ENGINES
    said: list[tuple[float, str]] = field(default_factory=list)

    def bypass_router(self) -> None:
        self.said.append((asyncio.get_running_loop().time(), "bypass"))

    def use_router(self, url: str) -> None:
        self.said.append((asyncio.get_running_loop().time(), url))


def kept(router: FakeRouter, seconds: float) -> Pool:
    pool = Pool()
    anything: Any = router

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(RouterSupervisor(anything, pool).keep())
            await asyncio.sleep(seconds)
            keeping.cancel()

    run_virtually(main())
    return pool


def test_a_router_that_ends_is_restarted_at_its_url_for_the_engines_that_get_requests() -> None:
    router = FakeRouter([5.0, 1e9])
    assert kept(router, 20.0).said == [(5.0, "bypass"), (7.5, "r")]
    assert router.told == ["for a, b"]


def test_a_silent_router_is_replaced_after_two_probes() -> None:
    """The probes at 12 and, after 5 s of silence and 2 s, at 19 are not answered; the second one ends at 24."""
    assert kept(FakeRouter([1e9, 1e9], silent_from=11.0), 40.0).said == [(24.0, "bypass"), (26.5, "r")]


def test_a_router_that_does_not_start_is_started_again_elsewhere() -> None:
    """The first attempt fails at 7.5; the second one begins 10 s later, and is ready at 20."""
    assert kept(FakeRouter([5.0, 1e9], refusals=1), 40.0).said == [(5.0, "bypass"), (20.0, "r2")]

"""Several fake engines under the real supervisor, each with its own speed."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from asyncrl.engines.cluster.supervisor import EngineSupervisor, StartedEngine
from asyncrl.engines.fake import FakeEngine
from asyncrl.engines.sglang.client.calls_in_flight import CallsInFlight
from asyncrl.engines.sglang.client.least_busy import LeastBusy
from asyncrl.engines.slow_engines import DecodingSpeed
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.types import Chunk, FinishReason, Request, Weights

START_S = 20.0
"""Seconds that a restart takes."""


class Engine:
    """A fake engine, its server and its control."""

    def __init__(
        self,
        number: int,
        create: Callable[..., FakeEngine],
        seconds_per_token: float,
        draws: random.Random,
        noise: float,
    ) -> None:
        self.url = self.name = f"engine-{number}"
        self.starts = 0
        self._create = partial(create, seconds_per_token=seconds_per_token)
        self._calls = CallsInFlight()
        self._noise = draws, noise
        self._renewed()

    def _renewed(self) -> None:
        self.fake = self._create()
        self._num_tokens, self._since, self._speed = 0, 0.0, 0.0

    def slow_down(self, times: float) -> None:
        """Decode ``times`` slower, until the next restart."""
        self.fake.seconds_per_token *= times

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        def count(chunk: Chunk) -> None:
            self._num_tokens += len(chunk.token_ids)
            on_chunk(chunk)

        call = self._calls.begin(request.request_id)
        try:
            async with call:
                return await self.fake.generate(request, count)
        finally:
            self._calls.end(call)
        raise AssertionError

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def renew(self) -> None:
        """End the server: its requests are lost."""
        self._calls.fail_all()
        await asyncio.sleep(0.1)

    async def start(self) -> "Engine":
        await asyncio.sleep(START_S)
        self.starts += 1
        self._renewed()
        return self

    async def probe(self, timeout_s: float) -> None:
        await asyncio.sleep(0.001)

    async def decoding_speed(self, timeout_s: float) -> DecodingSpeed:
        """Return the speed since the last call, with noise; while nothing is decoded, the last speed again."""
        now, (draws, noise) = asyncio.get_running_loop().time(), self._noise
        if self._num_tokens and now > self._since:
            measured = self._num_tokens / (now - self._since)
            self._speed, self._num_tokens = measured * draws.uniform(1 - noise, 1 + noise), 0
        self._since = now
        return DecodingSpeed(tokens_per_s=self._speed, running=self.fake.busy)


class Fleet:
    """Engines with these seconds per token, each request on the least busy one; the supervisor restarts them."""

    def __init__(
        self,
        lengths: Callable[[Request], int],
        *,
        speeds: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        noise: float = 0.3,
        share: float = 0.5,
        seed: int = 0,
        seconds_per_token: float,
        **about: Any,
    ) -> None:
        create = partial(FakeEngine, lengths, **about)
        self.engines = {
            engine.url: engine
            for engine in (
                Engine(number, create, seconds_per_token / speed, random.Random(seed + number), noise)
                for number, speed in enumerate(speeds)
            )
        }
        self._choices = LeastBusy(tuple(self.engines))
        self.said: list[str] = []
        """Engines that left, were drained and joined, in order."""
        self.rejoined: Callable[[], None] = lambda: None
        self._membership = EngineMembership(self.engines.values())
        self.supervisor = EngineSupervisor(
            [
                StartedEngine(control=each, server=each, start=partial(self._start, each), probe_timeout_s=30.0)  # type: ignore[arg-type]
                for each in self.engines.values()
            ],
            self._membership,
            self,
            max_restarts=3,
            slow_share=share,
        )

    async def _start(self, engine: Engine) -> Engine:
        await engine.start()
        asyncio.get_running_loop().call_soon(self.rejoined)
        return engine

    # ---- RolloutEngine

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        await self._choices.some()
        url = self._choices.lease(request.routing_key)
        try:
            return await self.engines[url].generate(request, on_chunk)
        finally:
            self._choices.release(url)

    async def interrupt(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in self.engines.values():
                tasks.create_task(each.fake.interrupt())

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        return await next(iter(self.engines.values())).fake.score(token_ids, start)

    # ---- the updater's engine

    async def pause(self) -> None:
        for each in self.engines.values():
            await each.fake.pause()

    def continue_generation(self, weights: Weights) -> None:
        for each in self.engines.values():
            each.fake.continue_generation(weights)
        self._membership.mark_synced(self._membership.present, self._membership.num_changes)

    @property
    def busy(self) -> int:
        return sum(each.fake.busy for each in self.engines.values())

    # ---- Pool

    def leave(self, url: str) -> None:
        self.said.append(f"{url} leaves")
        self._choices.remove(url)

    async def drain(self, url: str) -> None:
        self.said.append(f"{url} is drained")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await self.engines[url].fake.interrupt()

    def join(self, url: str) -> None:
        self.said.append(f"{url} joins")
        self._choices.add(url)

    def move(self, url: str, new_url: str) -> None:
        raise AssertionError("no engine moves")

    async def route(self, url: str) -> None:
        await asyncio.sleep(0)

    async def forget(self, url: str) -> None:
        await asyncio.sleep(0)

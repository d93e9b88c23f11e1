"""A small model of engines whose requests grow by a token per step and are retracted when the KV cache is full."""

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.pipeline.sampling.kv_limit import next_fit, next_limit
from asyncrl.types import EngineLoad

PROMPT = 100
MEDIAN, LIMIT = 400, 6400
PREFILL = 512
"""Tokens of prompts, or of retracted requests, that an engine reads in the time of one decoding step: 25,000 a second
at 20 ms per step."""


@dataclass(eq=False)
class Request:
    length: int
    written: int = 0
    """When it last came to run or was retracted."""
    ends_at: int = 0
    """By the engine's count of decoding steps, while it runs."""

    @property
    def held(self) -> int:
        return PROMPT + self.written


@dataclass(eq=False)
class Engine:
    """Retracts those that wrote least, as SGLang does; takes from its queue what fits just now."""

    capacity: int
    running: list[Request] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    retracted: int = 0
    written: int = 0
    """Tokens."""
    used: int = 0
    """Tokens held by the running requests."""
    decoded: int = 0
    """Decoding steps."""
    next_end: int = sys.maxsize
    """The first decoding step after which a running request has ended, or an earlier one."""

    @property
    def busy(self) -> int:
        return len(self.running) + len(self.queue)

    def step(self) -> None:
        """One decoding step, or one pass over prompts, which holds up decoding."""
        if self.used + len(self.running) > self.capacity:
            self._retract()
        if not self._prefill():
            self._decode()

    def _retract(self) -> None:
        for request in self.running:
            request.written = request.length - (request.ends_at - self.decoded)
        self.running.sort(key=lambda request: -request.written)
        while self.used + len(self.running) > self.capacity:
            request = self.running.pop()
            self.used -= request.held
            self.queue.append(request)
            self.retracted += 1

    def _prefill(self) -> bool:
        room = PREFILL
        while self.queue and self.used + self.queue[0].held + len(self.running) < self.capacity and room > 0:
            request = self.queue.popleft()
            self.used, room = self.used + request.held, room - request.held
            request.ends_at = self.decoded + max(1, request.length - request.written)
            self.next_end = min(self.next_end, request.ends_at)
            self.running.append(request)
        return room < PREFILL

    def _decode(self) -> None:
        self.written += len(self.running)
        self.used += len(self.running)
        self.decoded += 1
        if self.decoded >= self.next_end:
            self.used -= sum(PROMPT + request.length for request in self.running if request.ends_at <= self.decoded)
            self.running = [request for request in self.running if request.ends_at > self.decoded]
            self.next_end = min((request.ends_at for request in self.running), default=sys.maxsize)

    def load(self) -> EngineLoad:
        return EngineLoad(kv_used=self.used / self.capacity, running=len(self.running), waiting=len(self.queue))


@dataclass
class Outcome:
    """``late`` is the second half of the time, when the first wave of requests is gone."""

    written: int = 0
    late_written: int = 0
    retracted: int = 0
    late_retracted: int = 0
    fits: list[int] = field(default_factory=list)


def simulate(
    *,
    slots: int,
    capacity: int,
    follows: bool,
    num_engines: int = 2,
    num_steps: int = 16_000,
    period: int = 100,
    seed: int = 0,
    median: Callable[[int], float] = lambda _step: MEDIAN,
    sigma: float = 1.264,
) -> Outcome:
    """Keep as many requests in flight as the limit allows, out of an endless supply, each to the shorter engine.

    ``sigma`` 1.264 puts the 95th percentile of the log-normal lengths at 8 times their ``median``.
    """
    draw = random.Random(seed)
    engines = [Engine(capacity) for _ in range(num_engines)]
    limit = fit = slots
    before: tuple[EngineLoad, ...] = ()
    outcome = Outcome()
    for step in range(num_steps):
        in_use = sum(engine.busy for engine in engines)
        if follows and step % period == period - 1:
            now = tuple(engine.load() for engine in engines)
            fit = next_fit(now, before, fit=fit, in_use=in_use, size=slots)
            limit, before = next_limit(now, fit=fit, in_use=in_use), now
            outcome.fits.append(fit)
        for _ in range(limit - in_use):
            length = min(LIMIT, 1 + int(median(step) * math.exp(draw.gauss(0, sigma))))
            min(engines, key=lambda engine: engine.busy).queue.append(Request(length))
        for engine in engines:
            engine.step()
        if step == num_steps // 2:
            outcome.late_written = -sum(engine.written for engine in engines)
            outcome.late_retracted = -sum(engine.retracted for engine in engines)
    outcome.written = sum(engine.written for engine in engines)
    outcome.retracted = sum(engine.retracted for engine in engines)
    outcome.late_written += outcome.written
    outcome.late_retracted += outcome.retracted
    return outcome

"""How many samples may be in flight, so that the engines' KV caches hold them.

Answers grow while they are written.  When a cache is full, the engine retracts requests: their KV entries are thrown
away and computed again later, by which time others are retracted, a storm in which much is computed and little is
written.  Requests that wait in an engine's queue gain nothing either: they grow old there.

So the number that *fits* is cut to what runs when requests stay queued, and grows by one per engine while all of it is
used and the caches have room: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the increase and
decrease algorithms for congestion avoidance", 1989).  A cut takes effect only as samples end; until then there is no
second one, as TCP cuts once per round trip (Jacobson, "Congestion avoidance and control", 1988).  And while a cache is
nearly full nothing is started at all: what runs there still grows.

Measured on the model in ``tests/unit/pipeline/sampling/kv_model.py`` against an unlimited run (seeds 0 to 7, the
second half of 16,000 decoding steps): where an engine's cache holds some 60 requests, of 200 slots, 1 to 13 % of the
retractions are left (mean 7 %), and 82 to 100 % of the tokens are written (mean 94 %); where it holds 28, of 60
slots, 5 to 15 % (mean 9 %) and 79 to 88 % (mean 85 %). The tokens are the price: a cache that is always full writes
most."""

import asyncio
import logging
from typing import NoReturn

from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.protocols import LoadProbe
from asyncrl.types import EngineLoad

logger = logging.getLogger(__name__)

FULL = 0.9
"""Nothing is started while an engine's requests hold more of its KV cache: the rest is for them to grow.  On the model
0.85 loses more tokens, 0.95 leaves more retractions."""

ROOM = 0.8
"""More may fit while every engine's requests hold less.  Between the two the limit rests, which damps swings."""


def next_fit(now: tuple[EngineLoad, ...], before: tuple[EngineLoad, ...], *, fit: int, in_use: int, size: int) -> int:
    """How many samples fit, judged anew: 1 to ``size`` and at least one per engine.

    ``now`` and ``before`` are two looks at the engines; who is queued in one look only has just arrived.  ``in_use`` is
    how many samples are in flight.
    """
    if not now:
        return fit
    lowest = min(size, len(now))
    queued, fullest = min(_waiting(now), _waiting(before)), _fullest(now)
    if queued > len(now) or (queued and fullest > ROOM):  # one per engine may be our own last raise
        running = sum(load.running for load in now)
        return max(lowest, min(fit, running)) if in_use <= fit else fit
    if fullest < ROOM and not _waiting(now) and in_use >= fit:
        return min(size, fit + len(now))
    return max(lowest, fit)


def next_limit(now: tuple[EngineLoad, ...], *, fit: int, in_use: int) -> int:
    """How many samples may be in flight until the next look: those that fit, and no new ones while a cache is full."""
    is_full = bool(now) and _fullest(now) > FULL
    return max(min(fit, len(now)), min(fit, in_use)) if is_full else fit


async def follow_kv(probe: LoadProbe, slots: Slots, period_s: float) -> NoReturn:
    """Set the limit of ``slots`` every ``period_s`` seconds, until cancelled.

    Nothing announces how full engines are, so they are asked.  One that does not answer is left out; if none does, the
    limit stays.
    """
    fit = slots.limit
    before: tuple[EngineLoad, ...] = ()
    while True:
        await asyncio.sleep(period_s)
        now = await probe.loads()
        if not now:
            continue
        fit = next_fit(now, before, fit=fit, in_use=slots.in_use, size=slots.size)
        limit = next_limit(now, fit=fit, in_use=slots.in_use)
        if limit != slots.limit:
            logger.debug("samples in flight: limit %d -> %d, %d fit; engines: %s", slots.limit, limit, fit, now)
            slots.set_limit(limit)
        before = now


def _fullest(loads: tuple[EngineLoad, ...]) -> float:
    return max(load.kv_used for load in loads)


def _waiting(loads: tuple[EngineLoad, ...]) -> int:
    return sum(load.waiting for load in loads)

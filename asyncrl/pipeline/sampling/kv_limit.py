"""A limit on the samples in flight, so that the engines' KV caches hold them.

Answers grow while they are generated.  When a KV cache is full, the engine retracts requests: it discards their KV
entries and computes them again later.  Meanwhile others are retracted, so much is computed and little generated.
Requests that wait in an engine's queue gain nothing either, because their weights grow old.

The number of samples that *fit* follows additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the
increase and decrease algorithms for congestion avoidance", 1989).  It is cut to the number of running requests when
requests stay queued.  It grows by one per engine while all of it is used and the caches have room.  A cut takes effect
only as samples end; until then there is no second cut, as TCP cuts once per round trip (Jacobson, "Congestion avoidance
and control", 1988).  While a cache is nearly full no sample is started at all, because the running ones still grow.

Measured on the model in ``tests/unit/pipeline/sampling/kv_model.py`` against an unlimited run (seeds 0 to 7, the second
half of 16,000 decoding steps):

    requests per cache   slots   retractions left       tokens generated
    some 60              200     1 to 13 %, mean 7 %    82 to 100 %, mean 94 %
    28                   60      5 to 15 %, mean 9 %    79 to 88 %, mean 85 %

The lost tokens are the price: a cache that is always full generates most.
"""

import asyncio
import logging
from typing import NoReturn

from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.protocols import LoadProbe
from asyncrl.types import EngineLoad

logger = logging.getLogger(__name__)

FULL = 0.9
"""Share of a KV cache above which no sample is started; the rest is for running requests to grow.

On the model, 0.85 loses more tokens and 0.95 leaves more retractions.
"""

ROOM = 0.8
"""Share of the KV cache below which, on every engine, the limit may grow.

Between ROOM and FULL the limit stays, which damps oscillation.
"""


def next_fit(now: tuple[EngineLoad, ...], before: tuple[EngineLoad, ...], *, fit: int, in_use: int, size: int) -> int:
    """Return the number of samples that fit now: at most ``size``, and at least one per engine if ``size`` allows.

    ``now`` and ``before`` are two successive measurements.  A request queued in only one of them has just arrived and
    does not count.  ``in_use`` is the number of samples in flight.
    """
    if not now:
        return fit
    lowest = min(size, len(now))
    queued, fullest = min(_waiting(now), _waiting(before)), _fullest(now)
    if queued > len(now) or (queued and fullest > ROOM):  # one per engine may stem from the last increase
        running = sum(load.running for load in now)
        return max(lowest, min(fit, running)) if in_use <= fit else fit
    if fullest < ROOM and not _waiting(now) and in_use >= fit:
        return min(size, fit + len(now))
    return max(lowest, fit)


def next_limit(now: tuple[EngineLoad, ...], *, fit: int, in_use: int) -> int:
    """Return the limit until the next measurement: the samples that fit, and no new ones while a cache is full."""
    is_full = bool(now) and _fullest(now) > FULL
    return max(min(fit, len(now)), min(fit, in_use)) if is_full else fit


async def follow_kv(probe: LoadProbe, slots: Slots, period_s: float) -> NoReturn:
    """Set the limit of ``slots`` every ``period_s`` seconds, until cancelled.

    Engines do not announce their load, so they are polled.  An engine that does not answer is left out; if none
    answers, the limit stays.
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

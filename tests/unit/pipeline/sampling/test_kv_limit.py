import asyncio

import pytest

from asyncrl.pipeline.sampling.kv_limit import follow_kv, next_fit, next_limit
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.types import EngineLoad
from tests.unit.pipeline.sampling.kv_model import LIMIT, simulate
from tests.virtual_time import run_virtually


def loads(*engines: tuple[float, int, int]) -> tuple[EngineLoad, ...]:
    """Loads of engines; each of ``each`` is (KV used, running, waiting)."""
    return tuple(EngineLoad(kv_used=used, running=running, waiting=waiting) for used, running, waiting in engines)


ROOMY = loads((0.3, 20, 0), (0.4, 20, 0))
BUSY = loads((0.85, 20, 0), (0.78, 20, 0))
FULL = loads((0.93, 20, 0), (0.5, 20, 0))
QUEUED = loads((0.96, 20, 7), (0.5, 20, 0))
CAPPED = loads((0.3, 16, 8), (0.3, 16, 8))


@pytest.mark.parametrize(
    ("now", "before", "fit", "in_use", "expected"),
    [
        pytest.param(ROOMY, ROOMY, 40, 40, 42, id="room and all used: one more per engine"),
        pytest.param(ROOMY, ROOMY, 99, 99, 100, id="never above the slots there are"),
        pytest.param(ROOMY, ROOMY, 50, 40, 50, id="room, but no demand"),
        pytest.param(BUSY, BUSY, 40, 40, 40, id="between the marks it rests"),
        pytest.param(FULL, FULL, 40, 40, 40, id="full, but no request waits"),
        pytest.param(QUEUED, QUEUED, 47, 47, 40, id="requests stay queued: what runs"),
        pytest.param(QUEUED, ROOMY, 47, 47, 47, id="just queued"),
        pytest.param(QUEUED, QUEUED, 42, 47, 42, id="an earlier cut has not worked yet"),
        pytest.param(CAPPED, CAPPED, 48, 48, 32, id="queued although there is room: the engine runs no more"),
        pytest.param(loads((0.3, 16, 1)), loads((0.3, 16, 1)), 17, 17, 17, id="one queued is our own last raise"),
        pytest.param(loads((0.99, 1, 9)), loads((0.99, 1, 9)), 10, 10, 1, id="never below one per engine"),
        pytest.param((), BUSY, 40, 40, 40, id="no engine answered"),
    ],
)
def test_the_limit_is_the_number_of_answers_that_fit_the_cache(
    now: tuple[EngineLoad, ...], before: tuple[EngineLoad, ...], fit: int, in_use: int, expected: int
) -> None:
    assert next_fit(now, before, fit=fit, in_use=in_use, size=100) == expected


@pytest.mark.parametrize(
    ("now", "fit", "in_use", "expected"),
    [(BUSY, 40, 35, 40), (FULL, 40, 35, 35), (FULL, 40, 47, 40), (FULL, 40, 0, 2), (FULL, 1, 1, 1), ((), 40, 35, 40)],
)
def test_nothing_is_started_while_a_cache_is_full(
    now: tuple[EngineLoad, ...], fit: int, in_use: int, expected: int
) -> None:
    assert next_limit(now, fit=fit, in_use=in_use) == expected


def test_a_limit_is_always_one_that_slots_take() -> None:
    for fit in range(1, 9):
        for in_use in range(9):
            for now in (ROOMY, FULL, QUEUED, CAPPED, loads((1.0, 0, 9)), loads((0.0, 0, 0))):
                judged = next_fit(now, now, fit=fit, in_use=in_use, size=8)
                assert 1 <= next_limit(now, fit=judged, in_use=in_use) <= 8


def test_storms_of_retractions_end() -> None:
    free, followed = (simulate(slots=200, capacity=80_000, num_engines=1, follows=follows) for follows in (False, True))
    assert free.late_retracted > 2_500
    assert followed.late_retracted < 0.2 * free.late_retracted
    assert followed.late_written > 0.75 * free.late_written


def test_where_every_request_fits_none_is_held_back() -> None:
    free, followed = (
        simulate(slots=64, capacity=80_000, follows=follows, num_steps=8_000) for follows in (False, True)
    )
    assert free.retracted == followed.retracted == 0
    assert followed.written == free.written


def test_the_limit_converges() -> None:
    followed = simulate(slots=300, capacity=60_000, num_engines=1, follows=True, sigma=0.3, num_steps=10_000)
    late = followed.fits[len(followed.fits) // 2 :]
    assert max(late) - min(late) < 0.15 * min(late)


def test_the_limit_follows_answers_that_get_shorter_again() -> None:
    long = simulate(slots=100, capacity=40_000, num_engines=1, follows=True, median=lambda _: LIMIT / 4, sigma=0.3)
    short = simulate(
        slots=100,
        capacity=40_000,
        num_engines=1,
        follows=True,
        median=lambda step: LIMIT / 4 if step < 6_000 else 100,
        sigma=0.3,
    )
    assert long.fits[-1] < 50
    assert short.fits[-1] > 2 * long.fits[-1]


class Probe:
    """A probe that answers with each of ``looks`` once, then always with the last one."""

    def __init__(self, *looks: tuple[EngineLoad, ...]) -> None:
        self._looks = list(looks)
        self.asked = 0

    async def loads(self) -> tuple[EngineLoad, ...]:
        """See ``LoadProbe.loads``."""
        self.asked += 1
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]


def limits_over_time(probe: Probe, *, size: int, held: int, seconds: float) -> list[int]:
    """The limit after each second, with ``held`` slots in use."""

    async def hold(slots: Slots) -> None:
        async with slots.hold():
            await asyncio.sleep(1e6)

    async def main() -> list[int]:
        slots = Slots(size)
        limits: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(hold(slots)) for _ in range(held)]
            running.append(tasks.create_task(follow_kv(probe, slots, 1.0)))
            await asyncio.sleep(0.5)
            while len(limits) < seconds:
                await asyncio.sleep(1.0)
                limits.append(slots.limit)
            for task in running:
                task.cancel()
        return limits

    return run_virtually(main())[0]


def test_the_limit_of_the_slots_is_set_every_period() -> None:
    probe = Probe(BUSY, QUEUED, QUEUED, BUSY, ROOMY)
    assert limits_over_time(probe, size=64, held=47, seconds=5) == [64, 47, 40, 40, 42]
    assert probe.asked == 5


def test_a_full_cache_stops_starts_only_while_it_is_full() -> None:
    assert limits_over_time(Probe(FULL, FULL, BUSY), size=64, held=47, seconds=3) == [47, 47, 64]


def test_engines_that_do_not_answer_leave_the_limit_alone() -> None:
    assert limits_over_time(Probe(QUEUED, QUEUED, (), ()), size=64, held=47, seconds=5) == [47, 40, 40, 40, 40]

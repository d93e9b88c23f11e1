import asyncio

import pytest

from asyncrl.metrics.loop_lag import LoopLag, watch_loop


def test_the_lag_is_the_worst_delay_of_a_sleep() -> None:
    now_s = 10.0
    delays = iter([0.0, 0.03, 0.01])
    lag = LoopLag()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        late_s = next(delays, None)
        if late_s is None:
            raise asyncio.CancelledError
        now_s += seconds + late_s

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_loop(lag, clock=lambda: now_s, sleep=sleep))
    assert lag.take_max_ms() == pytest.approx(30.0)


def test_reading_the_lag_resets_it() -> None:
    lag = LoopLag()
    lag.observe(0.25)
    assert [lag.take_max_ms(), lag.take_max_ms()] == [250.0, 0.0]

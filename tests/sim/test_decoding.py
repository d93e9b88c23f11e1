"""One modelled engine against arithmetic by hand."""

from typing import Any

import pytest

from asyncrl.sim.model.costs import EngineCosts
from asyncrl.sim.model.decoding import Decoder, Job

FIXED, EACH = 0.01, 0.002


def costs(**changes: Any) -> EngineCosts:
    """Costs under which a step of b requests takes 10 + 2 b milliseconds, and prefill takes next to nothing."""
    plain = {"fixed_s": FIXED, "per_request_s": EACH, "per_context_token_s": 0.0, "prefill_tokens_per_s": 1e12}
    return EngineCosts(**{**plain, "kv_tokens": 10**6, "max_running": 100, **changes})


def run(decoder: Decoder) -> list[tuple[float, Job]]:
    """Every end of a request with its time, from one event to the next."""
    now, ends = 0.0, []
    while (wait := decoder.next_event_s()) is not None:
        now += wait
        ends += [(now, job) for job in decoder.advance(now)]
    return ends


def decoder_with(*jobs: Job, grain: int = 1, **changes: float) -> Decoder:
    decoder = Decoder(costs(**changes), grain)
    for job in jobs:
        decoder.add(job, fresh=True)
    decoder.advance(0.0)
    return decoder


def test_two_requests_share_the_engine_until_the_shorter_ends() -> None:
    short, long = Job(1, 10), Job(1, 30)
    ends = run(decoder_with(short, long))
    assert [job for _, job in ends] == [short, long]
    assert [at for at, _ in ends] == pytest.approx([10 * 0.014, 10 * 0.014 + 20 * 0.012])


def test_a_request_that_comes_later_slows_the_first_from_then_on() -> None:
    first, second = Job(1, 20), Job(1, 20)
    decoder = decoder_with(first)
    assert decoder.advance(0.06) == []  # 5 tokens of 12 ms
    decoder.add(second, fresh=True)
    decoder.advance(0.06)
    decoder.follow()
    assert (first.written, second.written) == pytest.approx((5.0, 0.0))
    assert decoder.next_event_s() == pytest.approx(15 * 0.014)


def test_steps_grow_with_the_context() -> None:
    # Step number i, counted from 0, has 100 + i tokens of context at its beginning: on average 105 over 10 steps.
    ends = run(decoder_with(Job(100, 10), per_context_token_s=0.001))
    assert ends[0][0] == pytest.approx(10 * 0.012 + 10 * 0.105)


def test_prefill_delays_decoding() -> None:
    # 200 prompt tokens at 1000 per second, then 10 steps of two requests.
    ends = run(decoder_with(Job(100, 10), Job(100, 10), prefill_tokens_per_s=1000.0))
    assert [at for at, _ in ends] == pytest.approx([0.2 + 0.14] * 2)


def test_requests_above_the_batch_limit_wait_for_a_place() -> None:
    ends = run(decoder_with(Job(1, 10), Job(1, 10), max_running=1))
    assert [at for at, _ in ends] == pytest.approx([0.12, 0.24])


def test_a_full_cache_sends_the_youngest_back_and_it_is_prefilled_again() -> None:
    old, young = Job(100, 100), Job(100, 100)
    decoder = decoder_with(old, young, kv_tokens=300, prefill_tokens_per_s=1000.0)
    # 200 tokens of context; 50 steps of two fill the cache.  Then 50 steps of the old one alone; then the young one,
    # which prefills its 150 tokens again.
    ends = run(decoder)
    full = 0.2 + 50 * 0.014
    assert [job for _, job in ends] == [old, young]
    assert ends[0][0] == pytest.approx(full + 50 * 0.012)
    assert ends[1][0] == pytest.approx(full + 50 * 0.012 + 0.15 + 50 * 0.012)
    assert decoder.work.retractions == 1
    assert decoder.work.recomputed == pytest.approx(150)


def test_a_pause_stops_every_request_and_may_cost_the_cache() -> None:
    job = Job(100, 10)
    decoder = decoder_with(job, prefill_tokens_per_s=1000.0)
    decoder.advance(0.1 + 0.06)
    decoder.pause()
    assert decoder.next_event_s() is None
    decoder.advance(5.0)
    decoder.continue_generation(recompute=True)
    assert decoder.next_event_s() == pytest.approx(0.105 + 5 * 0.012)
    assert decoder.work.recomputed == pytest.approx(105)


def test_a_request_taken_off_no_longer_slows_the_others() -> None:
    stays, goes = Job(1, 10), Job(1, 10)
    decoder = decoder_with(stays, goes)
    decoder.advance(0.07)
    decoder.remove(goes)
    assert goes.written == pytest.approx(5)
    assert decoder.next_event_s() == pytest.approx(5 * 0.012)


def test_a_slowed_engine_takes_longer() -> None:
    decoder = decoder_with(Job(1, 10))
    decoder.slowdown = 1.5
    assert decoder.next_event_s() == pytest.approx(1.5 * 0.12)


def test_a_simulated_token_takes_as_long_as_the_tokens_it_stands_for() -> None:
    fine = run(decoder_with(Job(200, 100), Job(200, 300), per_context_token_s=1e-5))
    coarse = run(decoder_with(Job(20, 10), Job(20, 30), per_context_token_s=1e-5, grain=10))
    assert [at for at, _ in coarse] == pytest.approx([at for at, _ in fine])


def test_work_is_counted() -> None:
    decoder = decoder_with(Job(3, 10), Job(4, 30))
    run(decoder)
    assert decoder.work.busy_s == pytest.approx(0.14 + 0.24)
    assert decoder.work.request_s == pytest.approx(2 * 0.14 + 0.24)
    assert decoder.work.prefilled == 7


def test_the_longest_context_slows_every_request_until_it_ends() -> None:
    # Step number i, counted from 0, takes 14 ms and one for each of the 100 + i tokens of the longer context; the
    # other is alone from step 10 on, with 20 tokens.
    long, short = Job(100, 10), Job(10, 20)
    ends = run(decoder_with(long, short, per_longest_token_s=0.001))
    together = 10 * 0.014 + 10 * 0.105
    assert [job for _, job in ends] == [long, short]
    assert [at for at, _ in ends] == pytest.approx([together, together + 10 * 0.012 + 10 * 0.025])


def test_requests_that_arrive_together_share_the_fixed_time_of_a_prefill() -> None:
    decoder = decoder_with(Job(1, 10), Job(1, 10), prefill_fixed_s=0.05)
    assert decoder.next_event_s() == pytest.approx(0.05 + 0.14)
    decoder.advance(0.05 + 0.07)
    decoder.add(Job(1, 10), fresh=True)
    decoder.advance(0.05 + 0.07)
    assert decoder.next_event_s() == pytest.approx(0.05 + 5 * 0.016)


@pytest.mark.parametrize(("running", "seconds"), [(1, 0.004), (2, 0.004), (5, 0.007), (8, 0.01), (10, 0.012)])
def test_a_table_replaces_the_linear_cost(running: int, seconds: float) -> None:
    assert costs(by_running=((2, 0.004), (8, 0.01))).step_s(running, 100) == pytest.approx(seconds)


def test_a_table_in_disorder_is_refused() -> None:
    with pytest.raises(ValueError, match="growing numbers of requests"):
        costs(by_running=((8, 0.01), (2, 0.004)))

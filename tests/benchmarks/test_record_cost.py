import threading
import time
from typing import Any

import pytest

from benchmarks.common.command_line import split_at_dashes
from benchmarks.record_cost.__main__ import FIRST_BLOCKS, LEFT_OUT, cost_of
from benchmarks.record_cost.program import DRIVER_S, OTHERS_S, RECORDS_S, Spent, is_with

BLOCK = 5


def rows(num_steps: int, cost: float) -> list[dict[str, Any]]:
    """Steps of 100 tokens in a second, or ``cost`` seconds longer where records are written.

    The driver takes a tenth of a second of CPU time, and as much longer, of which its threads notice half; the others
    take a second.
    """
    told, driver_s, records_s = [], 0.0, 0.0
    for step in range(num_steps):
        driver_s += 0.1 + cost * is_with(step, BLOCK)
        seconds = 1.0 + cost * is_with(step, BLOCK)
        row = {"tokens/trained": 100 * (step + 1), "time/step_s": seconds, DRIVER_S: driver_s, OTHERS_S: step + 1.0}
        records_s += cost * is_with(step, BLOCK) / 2
        row[RECORDS_S] = records_s
        told.append(row)
    return told


def test_the_ratio_is_that_of_neighbouring_blocks() -> None:
    cost = cost_of(rows(8 * BLOCK, 0.25), BLOCK)
    assert cost.num_pairs == 3
    assert (cost.tokens_per_s_with, cost.tokens_per_s_without) == (80.0, 100.0)
    assert cost.ratio == pytest.approx(0.8)
    assert cost.error == pytest.approx(0.0)
    assert [cost.driver_us_with, cost.driver_us_without] == pytest.approx([3500.0, 1000.0])
    assert cost.all_us == pytest.approx(12250.0)
    assert cost.share == pytest.approx(2500 / 12250)
    assert cost.share_error == pytest.approx(0.0)
    assert cost.of_threads == pytest.approx(0.125 / 1.35)
    assert cost.of_threads_error == pytest.approx(0.0)


def test_the_first_steps_of_a_block_do_not_count() -> None:
    told = rows(8 * BLOCK, 0.0)
    for step, row in enumerate(told):
        if step % BLOCK < LEFT_OUT or step < FIRST_BLOCKS * BLOCK:
            row["time/step_s"] = 50.0
    assert cost_of(told, BLOCK).ratio == pytest.approx(1.0)


def test_noise_alone_is_no_gain() -> None:
    """One pair is twice as fast with records, and the next one twice as fast without."""
    told = rows(6 * BLOCK, 0.0)
    for step, row in enumerate(told):
        row["time/step_s"] = 2.0 if step // BLOCK in (3, 4) else 1.0
    assert cost_of(told, BLOCK).ratio == pytest.approx(1.0)


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="two are needed"):
        cost_of(rows(5 * BLOCK, 0.0), BLOCK)


def test_time_in_functions_and_threads_is_counted_once() -> None:
    class Work:
        def outer(self) -> int:
            return self.inner() + self.inner()

        def inner(self) -> int:
            return burn(0.02)

        def run(self) -> None:
            burn(0.05)
            ended.wait(30.0)

    def burn(seconds: float) -> int:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        return 1

    ended, spent, work = threading.Event(), Spent(), Work()
    spent.timed(Work, "outer", "inner")
    spent.thread(Work, "run")
    assert work.outer() == 2
    assert 0.04 <= spent.seconds() < 0.08
    thread = threading.Thread(target=work.run)
    thread.start()
    while spent.seconds() < 0.09 and thread.is_alive():
        time.sleep(0.001)
    assert 0.09 <= spent.seconds() < 0.2
    ended.set()
    thread.join()


@pytest.mark.parametrize(
    ("argv", "own", "further"),
    [
        (["journal", "--steps", "9"], ["journal", "--steps", "9"], []),
        (["journal", "--frozen", "--", "--lr", "1", "--"], ["journal", "--frozen"], ["--lr", "1", "--"]),
    ],
)
def test_words_behind_dashes_are_flags_of_the_run(argv: list[str], own: list[str], further: list[str]) -> None:
    assert split_at_dashes(argv) == (own, further)

"""Log functions add numbers to rows; no error, delay or hang of theirs reaches the run."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from asyncrl.compat import Sample, SlimeArgs
from asyncrl.compat.log_functions import eval_log_from_slime, rollout_log_from_slime
from asyncrl.hooks.log_hooks import MOST_WAITING, LogHooks
from asyncrl.hooks.worker import Worker
from asyncrl.types import Batch, EvalReport, Weights
from tests.unit.hooks.callers import InlineCaller
from tests.unit.scored_groups import group
from tests.virtual_time import run_virtually

ROW = {"step": 3, "reward/mean": 0.5, "time/step_s": 2.5, "eval/accuracy": 0.25}
COUNTS = {"log_function/errors": 0, "log_function/skipped": 0}
GROUP = group(3, (0.0, 1.0), num_cut=1)
REPORT = EvalReport(
    weights=Weights(version=1, step=4),
    newest=Weights(version=1, step=4),
    accuracy={"gsm": 0.5},
    num_samples=2,
    num_failed=0,
    num_tokens=2,
    seconds=1.0,
    answers={"gsm": tuple((GROUP.prompt, scored) for scored in GROUP.samples)},
)


def batch(step: int = 3) -> Batch:
    return Batch(step=step, groups=(GROUP,))


def written(logs: LogHooks, steps: int = 1, evaluation: EvalReport | None = None) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(logs.run())
            for step in range(steps):
                logs.step(batch(step), evaluation, {**ROW, "step": step}, rows.append)
                await asyncio.sleep(0)
            await logs.finish()
            running.cancel()

    run_virtually(main())
    return rows


def rollout(function: Callable[..., Any], seconds: float = 0.0) -> LogHooks:
    return LogHooks(function, None, lambda: InlineCaller(seconds), 60.0)


def test_numbers_are_added_to_the_row_of_their_step() -> None:
    def mine(step: int, seen: Batch, row: Mapping[str, Any]) -> dict[str, float]:
        assert seen.step == row["step"] == step
        return {"mine/twice": 2 * row["step"]}

    assert written(rollout(mine), steps=3) == [
        {**ROW, "step": step, "mine/twice": 2 * step, **COUNTS} for step in range(3)
    ]


def test_a_function_may_return_nothing() -> None:
    assert written(rollout(lambda step, seen, row: None)) == [{**ROW, "step": 0, **COUNTS}]


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda step, seen, row: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda step, seen, row: [1], "must return a dict of numbers or None, got a list"),
        (lambda step, seen, row: {"a": "b"}, "returned 'a': 'b', not a name and a number"),
        (lambda step, seen, row: {"a": 10**400}, "returned 'a': OverflowError: int too large to convert to float"),
        (lambda step, seen, row: {"reward/mean": 1}, "returned reward/mean, which the row already has"),
    ],
)
def test_errors_are_counted_and_logged_once(
    function: Callable[..., Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rows = written(rollout(function), steps=3)
    assert [row["log_function/errors"] for row in rows] == [1, 2, 3]
    (record,) = caplog.records
    assert line in record.getMessage()


def test_a_function_slower_than_training_misses_steps_and_every_row_is_written() -> None:
    rows = written(rollout(lambda step, seen, row: {"mine": 1.0}, seconds=50.0), steps=20)
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[-1]["log_function/skipped"] == 20 - sum("mine" in row for row in rows) > 0
    assert sum("mine" in row for row in rows) <= MOST_WAITING + 1


def test_a_function_that_hangs_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    end, rows = threading.Event(), list[Mapping[str, Any]]()

    def hangs(step: int, seen: Batch, row: Mapping[str, Any]) -> None:
        end.wait()

    logs = LogHooks(hangs, None, lambda: Worker("test"), 1.0)  # ``finish`` leaves as long for the call to begin

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(logs.run())
            for step in range(3):
                logs.step(batch(step), None, {"step": step}, rows.append)
                await logs.finish()
            running.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    end.set()
    assert [(row["log_function/errors"], row["log_function/skipped"]) for row in rows] == [(1, 0), (1, 1), (1, 2)]
    (record,) = caplog.records
    assert "it is not called any more" in record.getMessage()


def test_a_function_that_hangs_leaves_the_other_alone() -> None:
    end, rows = threading.Event(), list[Mapping[str, Any]]()

    def hangs(step: int, seen: Batch, row: Mapping[str, Any]) -> None:
        end.wait()

    def quick(step: int, report: EvalReport, row: Mapping[str, Any]) -> dict[str, float]:
        return {"mine/step": step}

    logs = LogHooks(hangs, quick, lambda: Worker("test"), 0.5)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(logs.run())
            for step in range(2):
                logs.step(batch(step), REPORT, {"step": step}, rows.append)
                await logs.finish()
            running.cancel()

    asyncio.run(main())
    end.set()
    assert [row["mine/step"] for row in rows] == [4, 4]
    assert [row["log_function/skipped"] for row in rows] == [0, 1]


def test_a_run_that_ends_early_writes_every_row() -> None:
    rows: list[Mapping[str, Any]] = []
    logs = rollout(lambda step, seen, row: {"mine": 1.0})
    for step in range(3):
        logs.step(batch(step), None, {"step": step}, rows.append)
    logs.flush()
    assert [row["step"] for row in rows] == [0, 1, 2]


def test_the_end_of_a_run_waits_no_longer_than_the_functions_may_take() -> None:
    rows: list[Mapping[str, Any]] = []
    logs = rollout(lambda step, seen, row: {"mine": 1.0})
    for step in range(3):
        logs.step(batch(step), None, {"step": step}, rows.append)
    _, seconds = run_virtually(logs.finish())  # nothing calls the functions
    assert seconds == 4 * 60.0
    assert [row["step"] for row in rows] == [0, 1, 2]


def test_slimes_rollout_log_sees_samples_row_and_seconds() -> None:
    seen: list[Any] = []

    def mine(rollout_id: int, args: Any, samples: list[Sample], extra_metrics: Any, rollout_time: float) -> bool:
        seen.append((rollout_id, [sample.reward for sample in samples], extra_metrics["reward/mean"], rollout_time))
        return True

    logs = rollout(rollout_log_from_slime(mine, SlimeArgs()))
    assert written(logs) == [{**ROW, "step": 0, **COUNTS}]
    assert seen == [(0, [0.0, 1.0], 0.5, 2.5)]


def test_slimes_eval_log_sees_the_columns_of_each_set() -> None:
    seen: list[Any] = []

    def mine(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
        samples = data["gsm"].pop("samples")
        seen.append((rollout_id, data, [sample.index for sample in samples], extra_metrics))
        return False

    written(LogHooks(None, eval_log_from_slime(mine, SlimeArgs()), InlineCaller, 60.0), evaluation=REPORT)
    written(LogHooks(None, eval_log_from_slime(mine, SlimeArgs()), InlineCaller, 60.0))  # a step without evaluation
    assert seen == [(3, {"gsm": {"rewards": [0.0, 1.0], "truncated": [True, False]}}, [0, 1], {"eval/accuracy": 0.25})]


def test_numbers_that_slimes_log_functions_write_into_extra_metrics_are_in_the_row(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mine(rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: Any, rollout_time: float) -> Any:
        rollout_extra_metrics |= {"my/calls": np.float32(1.5), "my/flag": True, "reward/mean": 0.75, "step": 99}
        rollout_extra_metrics |= {"my/text": "no", "my/nothing": math.nan}

    first, second = written(rollout(rollout_log_from_slime(mine, SlimeArgs())), steps=2)
    assert first == {**ROW, "step": 0, "my/calls": 1.5, "my/flag": 1.0, "reward/mean": 0.75, **COUNTS}
    assert (second["step"], second["my/calls"]) == (1, 1.5)
    assert [record.getMessage() for record in caplog.records] == [
        "log function mine: extra_metrics['my/text'] is no finite number but 'no'; it is not written",
        "log function mine: extra_metrics['my/nothing'] is no finite number but nan; it is not written",
    ]


def test_a_log_function_that_returns_true_has_logged_its_numbers_itself() -> None:
    def mine(rollout_id: int, args: Any, samples: list[Sample], extra_metrics: Any, rollout_time: float) -> bool:
        extra_metrics["my/calls"] = 1.5
        return True

    assert written(rollout(rollout_log_from_slime(mine, SlimeArgs()))) == [{**ROW, "step": 0, **COUNTS}]


def test_numbers_that_slimes_eval_log_writes_are_in_the_row() -> None:
    def mine(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, Any]) -> bool:
        extra_metrics |= {"eval/accuracy": 0.5, "eval/mine": 2}
        return False

    logs = LogHooks(None, eval_log_from_slime(mine, SlimeArgs()), InlineCaller, 60.0)
    assert written(logs, evaluation=REPORT) == [{**ROW, "step": 0, "eval/accuracy": 0.5, "eval/mine": 2.0, **COUNTS}]


def test_a_native_eval_log_gets_the_report() -> None:
    def mine(step: int, report: EvalReport, row: Mapping[str, Any]) -> dict[str, float]:
        return {"mine/answers": len(report.answers["gsm"]), "mine/step": step}

    (row,) = written(LogHooks(None, mine, InlineCaller, 60.0), evaluation=REPORT)
    assert (row["mine/answers"], row["mine/step"]) == (2, 4)

import math
from collections.abc import Callable

import pytest

from asyncrl.alarms.alarm_log import AlarmLog
from asyncrl.alarms.history import History
from asyncrl.alarms.rule import Rule

type Make = Callable[[int], dict[str, float]]


def logged(caplog: pytest.LogCaptureFixture, make: Make, log: AlarmLog | None = None) -> list[str]:
    """Write twenty rows, and return the lines of the log."""
    log = log or AlarmLog()
    for step in range(20):
        log.write({"step": step, "version": step, "time/step_s": 1.0, **make(step)})
    log.close()
    assert all(record.levelname == "WARNING" for record in caplog.records)
    return caplog.messages


def test_an_alarm_is_logged_once_in_words(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(caplog, lambda step: {"response/truncated": 1.0})
    assert line.startswith("alarm at step 2: Answers do not end. 100% of the answers reach the length limit")


def test_an_alarm_that_comes_back_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    assert len(logged(caplog, lambda step: {"response/truncated": float(step % 10 < 5)})) == 1


def test_different_alarms_are_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, lambda step: {"response/truncated": 1.0, "filter/acceptance": 0.0})
    titles = [line.split(": ")[1].partition(".")[0] for line in lines]
    assert titles == ["Answers do not end", "Most groups are filtered"]


def test_a_sound_run_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, lambda step: {"reward/mean": 0.5, "reward/std": 0.4, "response/truncated": 0.1}) == []


def test_the_alarm_of_lengths_is_left_to_the_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, lambda step: {"length/alarm": 1, "length/ratio": 0.5}) == []


def test_a_number_that_is_not_finite_is_a_missing_one(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, lambda step: {"train/grad_norm": math.nan if step < 5 else 1.0, "train/loss": math.inf})
    assert lines == []


def test_a_row_with_an_evaluation_alone_is_no_step(caplog: pytest.LogCaptureFixture) -> None:
    log = AlarmLog()
    for step in range(20):
        log.write({"step": step, "response/truncated": 1.0})
    assert caplog.messages == []


def test_a_rule_that_fails_ends_the_watch_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail(history: History) -> str | None:
        raise ZeroDivisionError(history.step)

    rule = Rule(title="Broken", needs=("step",), sign=fail, look="")
    (line,) = logged(caplog, lambda step: {}, AlarmLog([rule]))
    assert line == "alarms are not watched any more: ZeroDivisionError: 0"

"""Each rule raises its alarm in a history that shows the fault, and in none that only resembles it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asyncrl.alarms.alarm import Alarm
from asyncrl.alarms.rules import RULES
from asyncrl.alarms.watch import Watch

type Make = Callable[[int], dict[str, float]]


def watched(make: Make, num_steps: int = 30) -> Sequence[Alarm]:
    watch = Watch()
    for step in range(num_steps):
        watch.add(step, {"step": step, **make(step)})
    return watch.alarms


def titles(make: Make, num_steps: int = 30) -> list[str]:
    return [alarm.title for alarm in watched(make, num_steps)]


def falling(step: int) -> float:
    return 0.4 * 0.8**step


FAULTS: dict[str, Make] = {
    "Reward without variance": lambda step: {"reward/mean": 1.0, "reward/std": 0.0},
    "Token ids are shifted": lambda step: {"prompts/surprise_ratio": 1.4} if step % 4 == 0 else {},
    "Entropy has collapsed": lambda step: {"train/entropy": falling(step), "reward/mean": 0.3, "reward/std": 0.4},
    "Entropy rises": lambda step: {"train/entropy": 0.3 + 0.1 * step},
    "Gradient norm jumps": lambda step: {"train/grad_norm": 30.0 if step in {8, 20} else 1.0},
    "Many tokens are clipped": lambda step: {"train/clip_fraction": 0.5},
    "Batches are skipped": lambda step: {"train/skipped": int(step in {10, 15})},
    "Log-prob difference grows": lambda step: {"train/logprob_diff": 0.01 * 1.1**step},
    "One engine differs": lambda step: (
        {"engine/0/logprob_diff": 0.01, "engine/1/logprob_diff": 0.05} if step % 4 == 0 else {}
    ),
    "Weights do not arrive": lambda step: {"version": min(step, 5), "samples/slots": 64, "train/skipped": 0},
    "Log-probs are not compared": lambda step: {"train/logprob_diff": 0.01} if step < 5 else {},
    "Requests fail": lambda step: {"retries": 2 * step, "length/trained": 16 * step},
    "An engine is slow": lambda step: {"engines/slow": int(step > 10)},
    "An engine is missing": lambda step: {"engines/serving": 2 if step < 10 else 1},
    "Event loop is late": lambda step: {"time/loop_lag_ms": 3000.0},
    "Log-probs are missing": lambda step: {"train/unknown_logprobs": 0.2},
    "Lengths are biased": lambda step: {"length/alarm": 1, "length/ratio": 0.8},
    "Answers do not end": lambda step: {"response/truncated": 0.97},
    "Most groups are filtered": lambda step: {"filter/acceptance": 0.02},
    "Repeated text": lambda step: {"texts/repeated": 0.6},
    "Garbage text": lambda step: {"texts/garbage": 0.2},
    "Empty answers": lambda step: {"texts/empty": 0.9},
    "Answers begin with a role": lambda step: {"texts/begin_turn": 1.0},
    "All answers are alike": lambda step: {"texts/alike": 1.0},
}
SOUND: dict[str, Make] = {
    "a few batches are all right": lambda step: {"reward/mean": 1.0, "reward/std": 0.1 if step % 2 == 0 else 0.0},
    "prompts become less probable in training": lambda step: {"prompts/surprise_ratio": 0.6 + 0.04 * step},
    "entropy falls while the reward rises": lambda step: {
        "train/entropy": 0.05 + falling(step),
        "reward/mean": 1.0 - 0.7 * 0.9**step,
        "reward/std": 0.4,
    },
    "entropy falls slowly": lambda step: {
        "train/entropy": 0.4 * 0.95**step,
        "reward/mean": 0.3,
        "reward/std": 0.4,
    },
    "the gradient norm varies": lambda step: {"train/grad_norm": (0.1, 0.3, 0.7, 1.2)[step % 4]},
    "the gradient norm jumps once": lambda step: {"train/grad_norm": 30.0 if step == 20 else 1.0},
    "the gradient norm jumps after 21 steps again": lambda step: {"train/grad_norm": 30.0 if step in {8, 29} else 1.0},
    "most gradients are zero": lambda step: {"train/grad_norm": 0.0 if step % 4 else 0.5},
    "one batch is skipped": lambda step: {"train/skipped": int(step == 10)},
    "replayed routes add to the difference": lambda step: {"train/logprob_diff": 3e-3 if step % 5 else 3e-7},
    "engines round differently": lambda step: {"engine/0/logprob_diff": 0.012, "engine/1/logprob_diff": 0.010},
    "weights follow every eighth step": lambda step: {"version": step // 8, "samples/slots": 64, "train/skipped": 0},
    "no trainer makes weights": lambda step: {"version": 0, "samples/slots": 64},
    "no engine gets weights": lambda step: {"version": 0, "samples/slots": 0, "train/skipped": 0},
    "log-probs are compared every fifth step": lambda step: {"train/logprob_diff": 0.01} if step % 5 == 0 else {},
    "a request fails now and then": lambda step: {"retries": step // 5, "length/trained": 128 * step},
    "a request fails now and then, and the run is resumed": lambda step: {
        "retries": step,
        "length/trained": 1000 * (step + 1 if step < 15 else step - 14),
    },
    "an engine was lost before the run was resumed": lambda step: {"engines/slow": 3, "engines/serving": 2},
    "a run whose engines were slow was resumed": lambda step: {"engines/slow": 3 if step < 5 else 0},
    "the loop is late once": lambda step: {"time/loop_lag_ms": 4000.0 if step == 10 else 20.0},
    "lag is at its bound": lambda step: {"lag/max": 3, "lag/mean": 3.0},
}


def test_every_rule_has_a_fault_here() -> None:
    assert sorted(FAULTS) == sorted(rule.title for rule in RULES)


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_raises_its_alarm_alone(title: str) -> None:
    assert titles(FAULTS[title]) == [title]


@pytest.mark.parametrize("name", SOUND)
def test_what_only_resembles_a_fault_raises_none(name: str) -> None:
    assert titles(SOUND[name]) == []


@pytest.mark.parametrize("interval", [1, 11, 20])
def test_weights_and_log_probs_may_take_as_long_as_the_update_interval(interval: int) -> None:
    def row(step: int) -> dict[str, float]:
        compared = {"train/logprob_diff": 0.01} if step % interval == 0 and step < 200 else {}
        return {
            "step": step,
            "version": min(step, 200) // interval,
            "samples/slots": 64,
            "train/skipped": 0,
            "train/loss": 0.1,
            **compared,
        }

    watch = Watch(update_interval=interval)
    told = [alarm for step in range(300) for alarm in watch.add(step, row(step))]
    expected = 200 - 200 % interval + max(10, 3 * interval)
    assert {alarm.title for alarm in told} == {"Weights do not arrive", "Log-probs are not compared"}
    assert all(expected - interval <= alarm.since <= expected for alarm in told)


def test_an_alarm_names_its_numbers_and_what_to_look_at() -> None:
    (alarm,) = watched(FAULTS["One engine differs"])
    assert alarm.since == 0
    assert "engine 1 differ from the trainer's by 0.05" in alarm.text
    assert alarm.text.endswith("compares the weights of each update.")


def test_an_alarm_whose_sign_goes_has_an_end() -> None:
    (alarm,) = watched(lambda step: {"response/truncated": 0.95 if 5 <= step < 12 else 0.1})
    assert (alarm.since, alarm.until) == (7, 11)


def test_an_engine_that_is_slow_again_after_a_resumption_is_told() -> None:
    (alarm,) = watched(lambda step: {"engines/slow": 3 if step < 20 else 1})
    assert alarm.since == 20
    assert "was restarted, 1 times" in alarm.text


def test_an_alarm_is_told_once_and_again_after_its_end() -> None:
    watch, told = Watch(), dict[int, Sequence[Alarm]]()
    for step in range(20):
        told[step] = watch.add(step, {"response/truncated": 0.1 if step == 10 else 0.95})
    assert [step for step, alarms in told.items() if alarms] == [2, 13]
    assert [(alarm.since, alarm.until) for alarm in watch.alarms] == [(2, None)]


def test_numbers_that_are_missing_raise_nothing() -> None:
    rows: list[dict[str, Any]] = [{}, {"reward/std": None}, {"train/entropy": None, "reward/mean": 1.0}]
    watch = Watch()
    assert [watch.add(step, rows[step % 3]) for step in range(40)] == [[]] * 40

"""Evaluation functions in the native and in slime's shape."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat import BlockingEval, SlimeArgs
from asyncrl.compat.log_functions import eval_log_from_slime
from asyncrl.errors import PluginError
from asyncrl.plugins import EVAL, load_plugin
from asyncrl.types import EvalOutcome, EvalReport, Weights

CODE = """
import numpy
from asyncrl.compat import RolloutFnEvalOutput

async def native(evaluation):
    return {"a": [1.0]}

class Native:
    def __init__(self, reward):
        self.reward = reward
    async def __call__(self, evaluation):
        return {"a": [self.reward]}

def slimes(args, rollout_id, data_source, evaluation=False):
    assert evaluation and data_source is None
    data = {"a": {"rewards": [numpy.float32(1), 0, True], "truncated": [True, False, False], "samples": [1, 2, 3]}}
    return RolloutFnEvalOutput(data=data, metrics={"eval/a/length": 12, "lr": args.lr, "port": args.port + rollout_id})

def only_data(args, rollout_id, data_source, *, evaluation):
    return {"a": {"rewards": []}, "b": {"rewards": [2.5], "truncated": []}}

def none(args, rollout_id, data_source, **kwargs):
    return None

def no_rewards(args, rollout_id, data_source, evaluation=False):
    return {"a": {"truncated": [0]}}

def text(args, rollout_id, data_source, evaluation=False):
    return {"a": {"rewards": ["1"]}}

def wrong_metric(args, rollout_id, data_source, evaluation=False):
    return RolloutFnEvalOutput(data={}, metrics={"x": [1]})

def sync_native(evaluation):
    return {}

async def async_slimes(args, rollout_id, data_source, evaluation=False):
    return {}

def too_few(args, rollout_id):
    return {}

async def too_many(evaluation, more):
    return {}
"""
ARGS = SlimeArgs(lr=0.5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_evaluations.py"
    path.write_text(CODE)
    return path


def slimes(file: Path, name: str) -> BlockingEval:
    loaded = load_plugin(f"{file}:{name}", EVAL, ARGS)
    assert isinstance(loaded, BlockingEval)
    return loaded


@pytest.mark.parametrize("name", ["native", "Native(1.0)"])
def test_the_native_shape_is_used_as_it_is(file: Path, name: str) -> None:
    loaded: Any = load_plugin(f"{file}:{name}", EVAL, ARGS)
    assert asyncio.run(loaded(None)) == {"a": [1.0]}


def test_slimes_shape_gets_args_with_more_attributes_and_returns_an_outcome(file: Path) -> None:
    outcome = slimes(file, "slimes")(4, {"port": 30000})
    assert outcome == EvalOutcome(
        rewards={"a": (1.0, 0.0, 1.0)},
        truncated={"a": 1 / 3},
        metrics={"a/length": 12.0, "lr": 0.5, "port": 30003.0},
        columns={"a": {"rewards": [1, 0, 1], "truncated": [True, False, False], "samples": [1, 2, 3]}},
    )
    assert not hasattr(ARGS, "port")


@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_an_evaluation_and_its_log_have_the_same_rollout_id(step: int) -> None:
    seen: list[int] = []

    def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        seen.append(rollout_id)
        return {}

    def log(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
        seen.append(rollout_id)
        return True

    outcome = BlockingEval(evaluate, ARGS)(step, {})
    weights = Weights(version=step, step=step)
    report = EvalReport(
        weights=weights,
        newest=weights,
        accuracy={},
        num_samples=0,
        num_failed=0,
        num_tokens=0,
        seconds=0.0,
        columns=outcome.columns,
    )
    eval_log_from_slime(log, ARGS)(step, report, {})
    assert seen == [max(0, step - 1)] * 2, "slime evaluates after step r with rollout_id r, and before step 0 with 0"


def test_slimes_shape_may_return_the_data_alone(file: Path) -> None:
    assert slimes(file, "only_data")(0, {}) == EvalOutcome(
        rewards={"a": (), "b": (2.5,)}, columns={"a": {"rewards": []}, "b": {"rewards": [2.5], "truncated": []}}
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("none", "must return RolloutFnEvalOutput or its data, got a NoneType"),
        ("no_rewards", "the data of a must be a dict with a list of rewards, got a dict"),
        ("text", "rewards of a must be a number, got a str: '1'"),
        ("wrong_metric", "x must be a number, got a list"),
    ],
)
def test_a_result_of_another_form_is_named(file: Path, name: str, line: str) -> None:
    with pytest.raises(TypeError, match=line):
        slimes(file, name)(0, {})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sync_native", "a function (evaluation) must be written with 'async def'"),
        ("async_slimes", "has slime's signature, but is written with 'async def'"),
        ("too_few", "must take (evaluation) or slime's (args, rollout_id, data_source, evaluation, **kwargs)"),
        ("too_many", "must take (evaluation) or slime's (args, rollout_id, data_source, evaluation, **kwargs)"),
        ("Native", "is a class; write Native(...) with its arguments, or name a function"),
        ("missing", "missing"),
    ],
)
def test_a_wrong_shape_is_refused_at_the_start(file: Path, name: str, line: str) -> None:
    with pytest.raises(PluginError) as error:
        load_plugin(f"{file}:{name}", EVAL, ARGS)
    assert str(error.value).startswith("--eval-function-path")
    assert line in str(error.value)

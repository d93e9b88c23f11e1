"""Class rewards: one object, batches, and failures of whole batches."""

import asyncio
import itertools
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncrl.errors import RewardFailed
from asyncrl.protocols import HasDeadlines
from asyncrl.rewards import model_process
from asyncrl.rewards.functions import Batched
from asyncrl.rewards.model_process import MOST_IN_BATCH
from asyncrl.rewards.pool import PoolBroken
from asyncrl.rewards.resources import RewardResources
from asyncrl.types import Reward
from tests.unit.rewards.grading import in_a_run, prompt, sample
from tests.unit.rewards.misbehaving import Unreadable


class Model:
    """A model that reports its process and its calls, and misbehaves on some responses."""

    def __init__(self) -> None:
        self.num_calls = 0

    def compute_reward(self, prompts: list[str], responses: list[str]) -> Any:
        self.num_calls += 1
        if "leave" in responses:
            os._exit(4)
        if "short" in responses:
            return [1.0]
        if "number" in responses:
            return 1.0
        if "unreadable" in responses:
            return [Unreadable(os.getpid())]
        if "unprintable" in responses:
            return Unprintable()
        if "raise" in responses:
            raise ValueError("no idea")
        return [
            {"pid": os.getpid(), "call": self.num_calls, "size": len(responses), "of": len(question + response)}
            for question, response in zip(prompts, responses, strict=True)
        ]


class Unprintable:
    """A value without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def method(of: Callable[[], Any]) -> Any:
    return of().compute_reward


def fails() -> Any:
    raise OSError("no such model")


RESOLVER = pickle.dumps(partial(method, Model))


def test_answers_that_wait_share_a_call() -> None:
    async def run(resources: RewardResources) -> list[Reward]:
        reward = Batched(RESOLVER, "of")
        await resources.warm([reward])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reward(prompt(text="q"), sample("a" * number))) for number in range(200)]
        return [task.result() for task in tasks]

    rewards = in_a_run(run)
    assert [reward.value for reward in rewards] == [number + 1 for number in range(200)]
    assert len({reward.parts["pid"] for reward in rewards}) == 1
    assert max(reward.parts["size"] for reward in rewards) == MOST_IN_BATCH
    assert max(reward.parts["call"] for reward in rewards) <= 5


def test_a_failed_batch_costs_its_answers_alone() -> None:
    async def run(resources: RewardResources) -> list[str]:
        reward = Batched(RESOLVER, "call")
        texts = []
        for response in ("good", "raise", "number", "leave", "good"):
            try:
                texts.append(str((await reward(prompt(), sample(response))).value))
            except RewardFailed as error:
                texts.append(str(error))
        async with asyncio.TaskGroup() as group:
            both = [group.create_task(_text(reward, response)) for response in ("short", "x")]
        return [*texts, *(task.result() for task in both)]

    assert in_a_run(run) == [
        "1.0",
        "ValueError: no idea (test_model_process.py:45, in compute_reward)",
        "compute_reward must return a list of numbers, got a float: 1.0",
        "its worker died (exit code 4)",
        "1.0",
        "compute_reward returned 1 rewards for 2 responses",
        "compute_reward returned 1 rewards for 2 responses",
    ]


@pytest.mark.timeout(180)
def test_a_result_that_cannot_be_read_fails_its_batch() -> None:
    async def run(resources: RewardResources) -> list[str]:
        reward = Batched(RESOLVER, "call")
        return [await _text(reward, response) for response in ("unreadable", "unprintable")]

    first, second = in_a_run(run)
    assert first.startswith("the result of a worker cannot be read: ModuleNotFoundError")
    assert second == "RuntimeError: no text"


@pytest.mark.timeout(180)
def test_answers_wait_for_a_new_process_if_theirs_ended_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(resources: RewardResources) -> list[float]:
        reward = Batched(RESOLVER, "of")
        await resources.warm([reward])
        model = resources.model(RESOLVER)
        submit, num_calls = model.pool.submit, itertools.count()

        def submitted(*arguments: Any, **limits: Any) -> Any:
            if next(num_calls) == 1:
                raise PoolBroken("the worker processes broke")
            return submit(*arguments, **limits)

        monkeypatch.setattr(model.pool, "submit", submitted)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reward(prompt(), sample("a"))) for _ in range(300)]
        return [task.result().value for task in tasks]

    assert in_a_run(run) == [11.0] * 300


@pytest.mark.timeout(180)
def test_a_batch_that_the_process_never_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process, "LOST_S", 0.0)

    async def run(resources: RewardResources) -> str:
        reward = Batched(RESOLVER, "pid")
        os.kill(int((await reward(prompt(), sample("x"))).value), signal.SIGSTOP)
        return await _text(reward, "x")

    assert in_a_run(run, timeout_s=1.0) == "no worker took the call in time"


def test_a_new_process_gets_the_time_to_make_the_object() -> None:
    limits: list[float] = []

    async def run(resources: RewardResources) -> None:
        reward = Batched(RESOLVER, "pid")
        await resources.warm([reward])
        model = resources.model(RESOLVER)
        submit = model.pool.submit

        def submitted(*arguments: Any, timeout_s: float) -> Any:
            limits.append(timeout_s)
            return submit(*arguments, timeout_s=timeout_s)

        model.pool.submit = submitted  # type: ignore[method-assign, assignment]
        os.kill(int((await reward(prompt(), sample("x"))).value), signal.SIGKILL)
        while model.pool.num_starts == 1:
            await asyncio.sleep(0.05)
            await model.pool.start()
        await reward(prompt(), sample("x"))

    in_a_run(run, timeout_s=30.0, start_timeout_s=120.0)
    assert limits == [30.0, 150.0]


async def _text(reward: Batched, response: str) -> str:
    with pytest.raises(RewardFailed) as error:
        await reward(prompt(), sample(response))
    return str(error.value)


def test_a_cancelled_answer_leaves_the_process_alone() -> None:
    async def run(resources: RewardResources) -> tuple[Any, Any]:
        reward = Batched(RESOLVER, "pid")
        first = await reward(prompt(), sample("x"))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(reward(prompt(), sample("x"))) for _ in range(3)]
            await asyncio.sleep(0)
            tasks[0].cancel()
        return first.value, tasks[2].result().value

    first, last = in_a_run(run)
    assert first == last


def test_an_object_that_cannot_be_made_ends_the_start() -> None:
    async def run(resources: RewardResources) -> None:
        with pytest.raises(RewardFailed, match="OSError: no such model"):
            await resources.warm([Batched(pickle.dumps(partial(method, fails)), None)])

    in_a_run(run)


def test_a_batch_limits_its_own_time() -> None:
    reward = Batched(RESOLVER, None)
    assert isinstance(reward, HasDeadlines)
    assert reward.has_deadlines

"""The interface for users who write an episode, run without engines."""

import asyncio
import logging
import math
import re
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from asyncrl.episodes import EpisodeEnd
from asyncrl.errors import RewardFailed, ToolFailed, ToolTimeout
from asyncrl.rollouts.native import Episode
from asyncrl.rollouts.testing import Played, play
from asyncrl.types import Reward
from tests.unit.rollouts.chat_templates import QWEN3, TemplateTokenizer


async def with_a_calculator(ep: Episode) -> None:
    for _ in range(ep.max_turns):
        turn = await ep.generate(stop="</calc>")
        if "<calc>" not in turn.text:
            break
        found = await ep.call(add, turn.text.split("<calc>")[1].removesuffix("</calc>"))
        ep.observe({"role": "tool", "content": found})
    ep.reward = float(ep.label in ep.turns[-1].text) if isinstance(ep.label, str) else 0.0


def add(text: str) -> str:
    return str(sum(int(each) for each in text.split("+")))


def test_an_episode_with_a_tool() -> None:
    played = play(with_a_calculator, prompt="2 + 3?", answers=["<calc>2+3</calc>", "It is 5."], label="5")
    (found,) = played.trajectories
    between = "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert played.seen == ("2 + 3?", f"2 + 3?<calc>2+3</calc>{between}")
    assert found.sample.text == f"<calc>2+3</calc>{between}It is 5."
    assert found.loss_mask == (1,) * 16 + (0,) * len(between) + (1,) * 8
    assert found.reward == Reward(value=1.0)
    assert (played.end, played.metrics) == (EpisodeEnd.FINISHED, {"episodes/tool_calls": 1.0})


async def at_another_temperature(ep: Episode) -> None:
    await ep.generate(top_p=0.9)
    for _ in range(2):
        await ep.generate(temperature=0.5)


@pytest.mark.parametrize(("is_evaluation", "num_lines"), [(False, 1), (True, 0)])
def test_another_temperature_is_told_once_in_training(
    is_evaluation: bool, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        play(at_another_temperature, prompt="?", answers=["a", "b", "c"], is_evaluation=is_evaluation)
    assert len(caplog.records) == num_lines
    assert all("a call samples with temperature 0.5, the run with 1.0" in each.getMessage() for each in caplog.records)


def test_variables_of_the_prompt_are_those_of_every_turn() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        ep.observe({"role": "user", "content": "And?"})
        await ep.generate()
        await ep.conversation([{"role": "user", "content": "Is it right?"}]).generate()

    played = play(
        episode,
        prompt=[{"role": "user", "content": "2 + 3?"}],
        answers=["5<|im_end|>", "5.<|im_end|>", "Yes.<|im_end|>"],
        template_variables={"enable_thinking": False},
        tokenizer=TemplateTokenizer(QWEN3),
    )
    assert len(played.seen) == 3
    assert all(text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for text in played.seen)


def test_a_tool_that_fails_ends_the_episode_without_training_it() -> None:
    played = play(with_a_calculator, prompt="?", answers=["<calc>two</calc>"])
    assert played.end is EpisodeEnd.TOOL_FAILED
    assert set(played.trajectories[0].loss_mask) == {0}
    assert played.metrics["episodes/tool_errors"] == 1.0


def test_tools_fail_with_named_errors_that_a_function_may_catch() -> None:
    async def slow() -> None:
        await asyncio.sleep(60.0)

    async def episode(ep: Episode) -> None:
        await ep.generate()
        with pytest.raises(ToolFailed, match="add: ValueError: invalid literal"):
            await ep.call(add, "two", timeout_s=20.0)
        with pytest.raises(ToolTimeout, match=r"slow: no result within 0.01 s"):
            await ep.call(slow, timeout_s=0.01)
        with pytest.raises(ToolTimeout, match=r"sleep: no result within 0.05 s"):
            await ep.call(time.sleep, 0.2)
        ep.reward = 1.0

    assert play(episode, prompt="?", answers=["a"], tool_timeout_s=0.05).end is EpisodeEnd.FINISHED


def test_a_tool_with_bound_arguments_runs_where_it_would_without_them_and_keeps_its_name() -> None:
    seen: list[threading.Thread] = []

    class Tool:
        async def __call__(self, function: str, timeout_s: float) -> None:
            seen.append(threading.current_thread())

    def look(**arguments: str) -> None:
        seen.append(threading.current_thread())

    async def episode(ep: Episode) -> None:
        await ep.generate()
        await ep.call(partial(partial(Tool(), function="f"), timeout_s=3.0))
        await ep.call(look, function="f", self="s")
        with pytest.raises(ToolFailed, match="add: ValueError: invalid literal"):
            await ep.call(partial(add, "two"))
        ep.reward = 1.0

    assert play(episode, prompt="?", answers=["a"]).end is EpisodeEnd.FINISHED
    assert [each is threading.current_thread() for each in seen] == [True, False]


@pytest.mark.parametrize(
    ("limit", "end"),
    [({"max_turns": 2}, EpisodeEnd.MAX_TURNS), ({"max_context_len": 12}, EpisodeEnd.CONTEXT_FULL)],
)
def test_a_limit_that_leaves_the_function_keeps_its_turns(limit: dict[str, Any], end: EpisodeEnd) -> None:
    async def endless(ep: Episode) -> None:
        async with asyncio.TaskGroup() as group:  # the limit arrives in an exception group
            group.create_task(forever(ep))

    async def forever(ep: Episode) -> None:
        while True:
            await ep.generate()
            ep.observe("xx")

    played = play(endless, prompt="ab", answers=["abc"] * 9, **limit)
    assert played.end is end
    assert len(played.trajectories[0].sample.turns) == 2


def test_turns_may_have_rewards_or_stay_out_of_the_loss() -> None:
    async def episode(ep: Episode) -> None:
        first = await ep.generate()
        second = await ep.generate()
        first.is_trained, second.reward = False, 0.25
        ep.reward = {"right": 1.0, "short": True}

    (found,) = play(episode, prompt="?", answers=["ab", "cde"], reward_key="right").trajectories
    assert found.loss_mask == (0, 0, 1, 1, 1)
    assert [turn.reward for turn in found.sample.turns] == [None, 0.25]
    assert found.reward == Reward(value=1.0, parts={"right": 1.0, "short": True})


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e16])
def test_rewards_that_cannot_be_trained_are_refused_as_in_a_run(number: float) -> None:
    async def praises_a_turn(ep: Episode) -> None:
        (await ep.generate()).reward = number

    async def praises_itself(ep: Episode) -> None:
        await ep.generate()
        ep.reward = {"right": number}

    with pytest.raises(
        RewardFailed, match=f"a turn's reward must be one number from -1e15 to 1e15, got {re.escape(str(number))}"
    ):
        play(praises_a_turn, prompt="?", answers=["a"])
    with pytest.raises(RewardFailed, match="'right' of a dict reward must be one number from -1e15 to 1e15, got"):
        play(praises_itself, prompt="?", answers=["a"], reward_key="right")


def test_forks_and_conversations_are_samples_of_their_own() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        fork = ep.fork()
        await ep.generate()
        await fork.generate()
        critic = ep.conversation([{"role": "user", "content": "Is it right?"}])
        await critic.generate()
        ep.reward, critic.reward = 1.0, 0.5

    played = play(episode, prompt="?", answers=["a", "b", "c", "yes"])
    texts = [each.sample.text for each in played.trajectories]
    rewards = [each.reward and each.reward.value for each in played.trajectories]
    assert texts == ["ab", "ac", "yes"]
    assert rewards == [1.0, 1.0, 0.5]
    assert [each.loss_mask for each in played.trajectories] == [(1, 1), (0, 1), (1, 1, 1)]
    assert played.seen[3] == "<|im_start|>user\nIs it right?<|im_end|>\n<|im_start|>assistant\n"
    assert played.metrics["episodes/branches/fork"] == 1.0


def test_a_fork_drops_no_tokens() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        fork = ep.fork()
        ep.observe("x")
        await ep.generate()
        await fork.generate()
        ep.reward = 1.0

    assert play(episode, prompt="?", answers=["a", "b", "c"]).metrics == {"episodes/branches/fork": 1.0}


def test_settings_of_one_turn_reach_the_model() -> None:
    async def episode(ep: Episode) -> None:
        turn = await ep.generate(max_new_tokens=2, temperature=0.0, json_schema={"type": "object"}, min_p=0.1)
        assert (turn.text, turn.finish) == ("ab", "length")
        assert ep.token_ids == (*map(ord, "?ab"),)

    assert play(episode, prompt="?", answers=["abc"]).trajectories[0].reward is None


@pytest.mark.parametrize(
    "settings", [{"min_p": np.float32(0.1)}, {"stop_regex": ("a", "b")}, {"logit_bias": {5: np.int64(1)}}]
)
def test_settings_that_a_run_sends_as_json_are_no_mistakes(settings: dict[str, Any]) -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate(**settings)

    assert len(play(episode, prompt="?", answers=["abc"]).trajectories) == 1


@pytest.mark.parametrize("settings", [{"n": 2}, {"max_tokens": 5}, {"sampling_seed": 1}, {"is_normalized": True}])
def test_settings_that_no_turn_has_are_named(settings: dict[str, Any]) -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate(**settings)

    (name,) = settings
    with pytest.raises(
        TypeError, match=rf"^generate has no setting '{name}'; further ones are custom_params, ebnf, .*"
    ):
        play(episode, prompt="?", answers=["abc"])


def test_only_changed_metadata_reaches_the_sample() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        ep.metadata["steps"].append(2)
        ep.metadata["more"] = 3

    given = {"steps": [1], "kept": "x", "tools": [{"name": "add"}]}
    played = play(episode, prompt="?", answers=["a"], metadata=given)
    assert played.trajectories[0].sample.metadata == {"steps": [1, 2], "more": 3}
    assert given["steps"] == [1]


@pytest.mark.parametrize("tools", ["python", '[{"name": "add"}]', {"name": "add"}, None])
def test_metadata_named_tools_that_is_no_list_shows_no_tools(tools: Any) -> None:
    async def episode(ep: Episode) -> None:
        assert ep.tools == ()
        await ep.conversation([{"role": "user", "content": "Hi"}]).generate()

    tokenizer = TemplateTokenizer(QWEN3)
    played = play(episode, prompt="?", answers=["a"], metadata={"tools": tools}, tokenizer=tokenizer)
    assert played.seen == ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",)


def test_mistakes_get_one_line() -> None:
    async def observes_first(ep: Episode) -> None:
        ep.observe([{"role": "user", "content": "?"}])

    async def returns(ep: Episode) -> float:
        await ep.generate()
        return 1.0

    async def asks_nothing(ep: Episode) -> None:
        ep.reward = 1.0

    async def asks_too_much(ep: Episode) -> None:
        await ep.generate()
        await ep.generate()

    async def praises_a_turn(ep: Episode) -> None:
        turn: Any = await ep.generate()
        turn.reward = {"right": 1.0}

    with pytest.raises(RewardFailed, match="a turn's reward must be one number, got a dict"):
        play(praises_a_turn, prompt="?", answers=["a"])
    with pytest.raises(ValueError, match="chat messages must follow a turn"):
        play(observes_first, prompt="?", answers=[])
    with pytest.raises(TypeError, match=r"returns must return None, got a float; set ep\.reward"):
        play(returns, prompt="?", answers=["a"])
    with pytest.raises(ValueError, match="the episode ended without a call of the model"):
        play(asks_nothing, prompt="?", answers=[])
    with pytest.raises(AssertionError, match="the episode asks for turn 1, and answers has only 1"):
        play(asks_too_much, prompt="?", answers=["a"])


def test_token_ids_of_numpy_are_observed() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        ep.observe(np.array([ord("x"), ord("y")]))  # type: ignore[arg-type]
        await ep.generate()

    assert play(episode, prompt="?", answers=["a", "b"]).seen == ("?", "?axy")


@pytest.mark.parametrize(
    "seen",
    [
        *(["some", "lines"], [1.5], [{"role": "tool", "content": "1"}, "2"], [None]),
        *(None, 5, b"output", bytearray(b"output"), {"board": "x.."}, [{"content": "?"}], {"role": None}),
    ],
)
def test_values_that_cannot_be_observed_are_refused(seen: Any) -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        ep.observe(seen)

    with pytest.raises(TypeError, match="observe takes"):
        play(episode, prompt="?", answers=["a"])


@pytest.mark.parametrize("start", [None, 5, b"text", [1, 2], ["text"], [{"board": "x.."}]])
def test_values_that_start_no_conversation_are_refused(start: Any) -> None:
    async def episode(ep: Episode) -> None:
        ep.conversation(start)

    with pytest.raises(TypeError, match="conversation takes"):
        play(episode, prompt="?", answers=["a"])


def test_messages_wait_until_the_model_continues() -> None:
    async def episode(ep: Episode) -> None:
        await ep.generate()
        ep.observe({"role": "tool", "content": "1"})
        assert ep.token_ids[-1] == ord("\n")
        ep.observe({"role": "tool", "content": "2"})
        await ep.generate()

    def text(played: Played) -> str:
        return played.trajectories[0].sample.text

    found = text(play(episode, prompt="?", answers=["a", "b"]))
    assert found.count("<|im_start|>assistant") == 1
    assert "tool\n1<|im_end|>\n<|im_start|>tool\n2" in found


def test_an_address_may_hold_the_key() -> None:
    found: list[str] = []

    async def episode(ep: Episode) -> None:
        await ep.generate()
        found.extend((ep.keyed_url, ep.openai_base_url, ep.api_key))
        ep.reward = 0.0

    play(episode, prompt="?", answers=["x"])
    keyed, plain, key = found
    assert keyed.startswith(f"http://{key}:")
    assert keyed.endswith(f"@{plain.removeprefix('http://').removesuffix('/v1')}")

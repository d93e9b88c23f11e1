"""The loop of tool calls: results and errors as observations, limits, and the formats of calls."""

import argparse
import asyncio
import json
from typing import Any

import pytest

from asyncrl.episodes import EpisodeEnd
from asyncrl.errors import EngineRejected, SampleFailed, SandboxFailed
from asyncrl.rollouts.native import Episode
from asyncrl.rollouts.testing import Played, play
from asyncrl.rollouts.tools.calls import PARSERS, ToolCall
from asyncrl.rollouts.tools.loop import run_tools


def add(a: int, b: int) -> int:
    return a + b


def call(name: str = "add", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(*answers: str, tools: Any = None, max_turns: int | None = None, **options: Any) -> Played:
    async def episode(ep: Episode) -> None:
        turn = await run_tools(ep, tools or {"add": add}, **options)
        ep.reward = float(turn.text == "5")

    return play(episode, prompt="2+3?", answers=answers, max_turns=max_turns)


def observed(result: Played, turn: int = 1) -> list[str]:
    """Return the contents of the tools' messages that the model saw last."""
    text = result.seen[turn].rpartition("</tool_call>")[2]
    return [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]


def test_a_sandbox_that_does_not_work_is_not_shown_to_the_model() -> None:
    async def python(code: str) -> str:
        raise SandboxFailed("the sandbox's directory: No space left on device")

    result = played(call("python", code="1"), "5", tools={"python": python})
    assert result.end is EpisodeEnd.TOOL_FAILED


@pytest.mark.parametrize("error", [SampleFailed("4 attempts, the last: lost"), EngineRejected("answered 400")])
@pytest.mark.parametrize("on_error", ["observe", "raise"])
def test_a_tool_whose_own_call_of_the_model_failed_fails_the_episode(error: Exception, on_error: str) -> None:
    async def judge(text: str) -> str:
        raise error  # as the turn of another conversation does

    with pytest.raises(type(error)):
        played(call("judge", text="?"), "5", tools={"judge": judge}, on_error=on_error)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_that_exits_is_an_error_of_the_tool(is_async: bool) -> None:
    def program(**arguments: Any) -> None:
        argparse.ArgumentParser(exit_on_error=True).parse_args(["--unknown"])

    async def waits(**arguments: Any) -> None:
        program()

    result = played(call("program"), call("program"), "5", tools={"program": waits if is_async else program})
    assert observed(result) == [f"Error: {'waits' if is_async else 'program'}: SystemExit: 2"]
    assert result.end is EpisodeEnd.FINISHED
    assert result.metrics["episodes/tool_errors"] == 2


def test_result_is_observed_and_the_final_answer_ends_the_loop() -> None:
    result = played(call(a=2, b=3), "5")
    assert observed(result) == ["5"]
    assert result.trajectories[0].reward is not None
    assert result.trajectories[0].reward.value == 1.0
    assert result.metrics["episodes/tool_calls"] == 1


def test_calls_of_a_turn_run_at_the_same_time_up_to_a_limit_and_are_observed_in_order() -> None:
    running, most = 0, 0

    async def wait(number: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01 * (5 - number))
        running -= 1
        return f"waited {number}"

    calls = "".join(call("wait", number=number) for number in range(5))
    result = played(calls, "5", tools={"wait": wait}, max_concurrent=3)
    assert observed(result) == [f"waited {number}" for number in range(5)]
    assert most == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call(a=1), "Error: add: TypeError: add() missing 1 required positional argument: 'b'"),
        (call("sub", a=1, b=2), "Error: there is no tool 'sub'; the tools are add"),
        ("<tool_call>{'name'}</tool_call>", "Error: the call is not JSON: Expecting property name"),
        ("<tool_call>[1]</tool_call>", "Error: a call is a JSON object with 'name' and 'arguments'"),
    ],
)
def test_error_is_an_observation(text: str, message: str) -> None:
    result = played(text, "5")
    assert observed(result)[0].startswith(message)
    assert result.end is EpisodeEnd.FINISHED
    assert result.metrics["episodes/tool_errors"] == 1


def derivative(function: str) -> str:
    return f"d({function})"


async def fetch(url: str, timeout_s: float) -> str:
    return f"{url} within {timeout_s} s"


class Echo:
    async def __call__(self, **arguments: Any) -> Any:
        assert asyncio.get_running_loop()  # as every ``async def``, on the loop
        return arguments


@pytest.mark.parametrize(
    ("tool", "arguments", "seen"),
    [
        (derivative, {"function": "x^2"}, "d(x^2)"),
        (fetch, {"url": "a", "timeout_s": 3}, "a within 3 s"),
        (Echo(), {"func": 1, "args": 2, "function": 3}, '{"func": 1, "args": 2, "function": 3}'),
        (add, {"self": 1}, "Error: add: TypeError: add() got an unexpected keyword argument 'self'"),
        (Echo(), {"self": 1}, "Error: Echo: TypeError: "),
    ],
)
def test_arguments_may_have_any_name(tool: Any, arguments: dict[str, Any], seen: str) -> None:
    result = played(call("tool", **arguments), "5", tools={"tool": tool})
    assert observed(result)[0].startswith(seen)
    assert result.metrics["episodes/tool_calls"] == 1
    assert result.end is EpisodeEnd.FINISHED


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("result", [{(1, 2): 3}, deep()], ids=["a key", "deep"])
def test_a_result_that_json_cannot_hold_is_an_error_of_the_tool(result: Any) -> None:
    def look() -> Any:
        return result

    seen = played(call("look"), "5", tools={"look": look})
    assert observed(seen)[0].startswith("Error: look: the result is not JSON: ")
    assert seen.metrics["episodes/tool_errors"] == 1
    assert played(call("look"), tools={"look": look}, on_error="raise").end is EpisodeEnd.TOOL_FAILED


def test_error_may_end_the_episode_untrained() -> None:
    result = played(call(a=1), on_error="raise")
    assert result.end is EpisodeEnd.TOOL_FAILED
    assert sum(result.trajectories[0].loss_mask) == 0


def test_late_tool_is_an_observation() -> None:
    async def sleep() -> None:
        await asyncio.sleep(60)

    result = played(call("sleep"), "5", tools={"sleep": sleep}, timeout_s=0.01)
    assert observed(result) == ["Error: sleep: no result within 0.01 s"]


@pytest.mark.parametrize(("of_run", "of_loop"), [(2, None), (None, 2), (5, 2)])
def test_loop_ends_at_the_limit_of_turns_without_running_more_tools(of_run: int | None, of_loop: int | None) -> None:
    async def episode(ep: Episode) -> None:
        turn = await run_tools(ep, {"see": lambda: "seen"}, max_turns=of_loop)
        ep.reward = float(turn.call)

    text = '<tool_call>{"name": "see", "arguments": {}}</tool_call>'
    result = play(episode, prompt="?", answers=[text] * 2, max_turns=of_run)
    assert len(result.seen) == 2
    assert result.metrics["episodes/tool_calls"] == 1


FORMATS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "x y"}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 2, "b": "x y"}}',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x y"
    "</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx y\n</parameter>\n"
    "</function>\n</tool_call>",
}
EXPECTED = ToolCall(name="add", arguments={"a": 2, "b": "x y"})


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read(name: str) -> None:
    read = PARSERS[name]
    assert read(f"I add.\n{FORMATS[name]}" if name != "llama3" else FORMATS[name]) == [EXPECTED]
    assert read("It is 5.") == []


def test_several_calls_of_llama_and_an_answer_that_is_json() -> None:
    read = PARSERS["llama3"]
    assert [each.name for each in read('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}')] == [
        "a",
        "b",
    ]
    assert read('{"answer": 5}') == []
    assert read('{"name": "a", "parameters": {')[0].error is not None


def test_arguments_may_be_json_in_a_string() -> None:
    text = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert PARSERS["hermes"](f"<tool_call>{text}</tool_call>") == [ToolCall(name="add", arguments={"a": 1})]
    wrong = PARSERS["hermes"]('<tool_call>{"name": "add", "arguments": "{"}</tool_call>')
    assert (wrong[0].name, wrong[0].error is not None) == ("add", True)


@pytest.mark.parametrize(
    ("parser", "form"),
    [
        (
            "glm45",
            "<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>{}</arg_value>\n"
            "<arg_key>mode</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=write>\n<parameter=content>\n{}\n</parameter>\n"
            "<parameter=mode>\n{}\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
@pytest.mark.parametrize("content", ['{"version": 1}', "2024", "true", "null", '"quoted"', "plain"])
def test_an_argument_stays_the_text_that_the_model_wrote_if_its_schema_is_a_string(
    parser: str, form: str, content: str
) -> None:
    written: list[tuple[object, object]] = []

    def write(content: str, mode: int) -> str:
        written.append((content, mode))
        return "done"

    async def episode(ep: Episode) -> None:
        await run_tools(ep, {"write": write}, parser=parser)
        ep.reward = 1.0

    properties = {"content": {"type": "string"}, "mode": {"type": "integer"}}
    schema = {"type": "function", "function": {"name": "write", "parameters": {"properties": properties}}}
    play(episode, prompt="Write.", answers=[form.format(content, 420), "5"], metadata={"tools": [schema]})
    assert written == [(content, 420)]

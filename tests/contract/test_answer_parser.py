"""The process of SGLang's parsers finds tool calls and reasoning."""

import asyncio
import sys
from typing import Any

import pytest

from asyncrl.errors import ServerFailed
from asyncrl.rollouts.gateway.parsing import ParserProcess

COMMAND = (sys.executable, "-m", "asyncrl.engines.sglang.answer_parser")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>\n{"name":"add",  "arguments": {"a":40,"b":2}}\n</tool_call>'


@pytest.mark.timeout(1200)
def test_sglang_s_parsers_find_calls_and_reasoning_in_another_process() -> None:
    async def main() -> None:
        async with ParserProcess(COMMAND, tool_call_parser="qwen25", reasoning_parser="qwen3") as parser:
            found = await parser.parse(f"<think>\nI add.\n</think>\n\n{CALL}", "assistant\n", TOOLS)
            assert found.reasoning is not None
            assert found.reasoning.strip() == "I add."
            assert found.content.strip() == ""
            (call,) = found.tool_calls
            assert (call.name, call.arguments) == ("add", '{"a": 40, "b": 2}')
            assert call.id.startswith("call_")
            opened = await parser.parse("I add.\n</think>\n\nIt is 42.", "assistant\n<think>\n", TOOLS)
            assert opened.reasoning is not None
            assert (opened.reasoning.strip(), opened.content.strip()) == ("I add.", "It is 42.")
            plain = await parser.parse("It is 42.", "assistant\n", TOOLS)
            assert (plain.reasoning, plain.content, plain.tool_calls) == (None, "It is 42.", ())
            broken = await parser.parse("<tool_call>\n{broken\n</tool_call>", "assistant\n", TOOLS)
            assert (broken.tool_calls, "broken" in broken.content) == ((), True)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(parser.parse(f"It is {number}.", "", TOOLS)) for number in range(50)]
            assert [each.result().content for each in asked] == [f"It is {number}." for number in range(50)]

    asyncio.run(main())


def test_a_process_that_ends_is_named() -> None:
    async def main() -> None:
        command = (sys.executable, "-c", "raise SystemExit(3)")
        async with ParserProcess(command, tool_call_parser="qwen25", reasoning_parser=None):
            raise AssertionError("it did not start")

    with pytest.raises(ServerFailed, match="the process of the answer parsers ended with code 3"):
        asyncio.run(main())

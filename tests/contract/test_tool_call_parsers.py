"""Tool calls as they are read here and by SGLang's parsers, on the same answers."""

import json
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollouts.tools.calls import PARSERS, ToolCall, parser_of

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
JSON = json.dumps({"name": "add", "arguments": {"a": 2, "b": "x y"}})
GLM = "<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n"
CODER = "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\nx y\n</parameter>\n</function>"
ANSWERS = {
    "hermes": f"Let me add.<tool_call>{JSON}</tool_call>",
    "qwen": f"Let me add.\n<tool_call>\n{JSON}\n</tool_call>",
    "qwen25": f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>",
    "llama3": "<|python_tag|>" + JSON.replace("arguments", "parameters"),
    "glm": f"<tool_call>add\n{GLM}</tool_call>",
    "glm45": f"I add.\n<tool_call>add\n{GLM}</tool_call>",
    "glm47": f"<tool_call>add{GLM.replace('\n', '')}</tool_call>",
    "qwen3_coder": f"<tool_call>\n{CODER}\n</tool_call>",
}


def of_sglang(name: str, text: str) -> list[ToolCall]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    found: Any = FunctionCallParser([Tool(**SCHEMA)], name).parse_non_stream(text)[1]
    return [ToolCall(name=call.name, arguments=json.loads(call.parameters)) for call in found]


@pytest.mark.timeout(900)  # importing the parsers takes 10 s of CPU time
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_calls_are_those_that_sglang_finds(name: str) -> None:
    text = ANSWERS[name]
    assert PARSERS[name](text) == of_sglang(name, text) != []
    assert PARSERS[name]("It is 5.") == of_sglang(name, "It is 5.") == []


@pytest.mark.timeout(900)
def test_other_formats_are_read_by_sglang_and_unknown_names_are_refused() -> None:
    read = parser_of("pythonic", [SCHEMA])
    assert read('[add(a=2, b="x y")]') == [ToolCall(name="add", arguments={"a": 2, "b": "x y"})]
    with pytest.raises(ConfigError, match=r"no parser of tool calls named 'hermès'; the names are .*hermes"):
        parser_of("hermès")

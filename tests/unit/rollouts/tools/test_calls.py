"""The formats of tool calls, against the regexes that define them, and in texts that a model was not asked for."""

import random
import re
import time
from typing import Any

import pytest

from asyncrl.rollouts.tools.calls import PARSERS, ToolCall, _value


def glm(text: str) -> list[ToolCall]:
    """Return GLM's calls by regexes, which take cubic time."""
    calls = []
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        name = body.partition("<arg_key>")[0].strip()
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
        calls.append(ToolCall(name=name, arguments={key.strip(): _value(value) for key, value in pairs}))
    return calls


def coder(text: str) -> list[ToolCall]:
    """Return the calls of Qwen3-Coder by regexes, which take quadratic time."""
    calls = []
    for name, body in re.findall(r"<function=([^>]*)>(.*?)(?:</function>|\Z)", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>]*)>(.*?)</parameter>", body, re.DOTALL)
        arguments = {key.strip(): _value(value.removeprefix("\n").removesuffix("\n")) for key, value in pairs}
        calls.append(ToolCall(name=name.strip(), arguments=arguments))
    return calls


COMMON = [" ", "\n", "f", "x", "1", '{"a": 2}', ">", "<", "</", "<tool_call>", "</tool_call>"]
GLM_CALL = ["<tool_call>f", "<arg_key>x", "</arg_key>\n<arg_value>", "1", "</arg_value>", "</tool_call>"]
GLM_TAGS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
CODER_CALL = ["<function=f>", "<parameter=x>", "\n1\n", "</parameter>", "</function>"]
CODER_TAGS = ["<function=", "<parameter=", "</func"]
REFERENCES = {
    "glm": (glm, [*COMMON, *GLM_TAGS, *GLM_CALL], GLM_CALL),
    "qwen3_coder": (coder, [*COMMON, *CODER_TAGS, *CODER_CALL], CODER_CALL),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_texts_of_random_tags_give_the_calls_of_the_regexes(name: str) -> None:
    reference, tags, _ = REFERENCES[name]
    numbers = random.Random(0)
    num_arguments = 0
    for _ in range(20_000):
        text = "".join(numbers.choices(tags, k=numbers.randrange(32)))
        expected = reference(text)
        assert PARSERS[name](text) == expected, text
        num_arguments += sum(len(call.arguments) for call in expected)
    assert num_arguments > 200


@pytest.mark.parametrize("name", REFERENCES)
def test_well_formed_texts_with_a_part_lost_doubled_or_moved_give_the_calls_of_the_regexes(name: str) -> None:
    reference, tags, whole = REFERENCES[name]
    numbers = random.Random(0)
    for _ in range(10_000):
        parts = whole * numbers.randrange(1, 4)
        for _ in range(numbers.randrange(4)):
            at = numbers.randrange(len(parts))
            parts[at : at + numbers.randrange(3)] = numbers.choices(tags, k=numbers.randrange(3))
            parts = parts or ["f"]
        text = "".join(parts)
        assert PARSERS[name](text) == reference(text), text


@pytest.mark.parametrize(
    ("name", "start", "part"),
    [
        ("glm", "<tool_call>f", "<arg_key>x</arg_key><arg_value>1"),
        ("glm", "<tool_call>f", "<arg_key>"),
        ("glm", "<tool_call>f<arg_key>", "</arg_key> "),
        ("qwen3_coder", "", "<function="),
        ("qwen3_coder", "<function=f>", "<parameter=a>"),
        ("qwen3_coder", "<function=f>", "<parameter="),
        ("hermes", "", "<tool_call>"),
    ],
)
def test_tags_that_are_never_closed_take_linear_time(name: str, start: str, part: str) -> None:
    began = time.process_time()
    PARSERS[name](start + part * (200_000 // len(part)))
    assert time.process_time() - began < 1.0  # the regexes take seconds to hours


DEEP = "[" * 100_000
ARGUMENTS: dict[str, Any] = {"x": DEEP}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"<tool_call>{DEEP}</tool_call>"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": "{DEEP}"}}</tool_call>'),
        ("llama3", f'{{"name": "f", "parameters": {DEEP}'),
        ("llama3", f'<|python_tag|>{{"x": {DEEP}'),
    ],
    ids=["hermes", "arguments", "llama3", "python_tag"],
)
def test_json_that_is_nested_too_deeply_is_an_error_for_the_model(name: str, text: str) -> None:
    (call,) = PARSERS[name](text)
    assert call.error is not None and len(call.error) < 200


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", f"<tool_call>f<arg_key>x</arg_key><arg_value>{DEEP}</arg_value></tool_call>"),
        ("qwen3_coder", f"<function=f><parameter=x>{DEEP}</parameter></function>"),
    ],
    ids=["glm", "qwen3_coder"],
)
def test_argument_that_is_nested_too_deeply_for_json_stays_text(name: str, text: str) -> None:
    assert PARSERS[name](text) == [ToolCall(name="f", arguments=ARGUMENTS)]

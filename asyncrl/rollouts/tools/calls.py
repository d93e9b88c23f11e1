"""Tool calls in a model's answer.

The formats of Qwen and Hermes, Llama, GLM and Qwen3-Coder are read here.  For every other name the parser of SGLang is
loaded; that takes 10 seconds of CPU time and imports torch, which a process of user code may do and the rest may not.
"""

import functools
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The reason why the call cannot be made, for the model; None for a well-formed call."""


_NOT_JSON = (ValueError, RecursionError)
"""The errors of ``json`` for text that is not JSON, or nested more than about a thousand levels."""

type Parser = Callable[[str], list[ToolCall]]
"""Returns the calls in an answer, in order; none if the answer is final."""


def parser_of(name: str, schemas: Sequence[Any] = ()) -> Parser:
    """Return the parser of a format, by SGLang's name of it.  Blocks while it loads a parser of SGLang.

    ``schemas`` are the tools of the prompt: they tell which arguments are texts, and SGLang's own parsers find no call
    without them.  Raises ConfigError for an unknown name.
    """
    if name in _TYPED:
        return functools.partial(_TYPED[name], schemas=schemas)
    return PARSERS[name] if name in PARSERS else _sglang_parser(name, schemas)


def hermes_calls(text: str) -> list[ToolCall]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Qwen and Hermes."""
    return [_json_call(body) for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL)]


def llama_calls(text: str) -> list[ToolCall]:
    """Read ``{"name": ..., "parameters": {...}}``, behind ``<|python_tag|>`` or alone, several with ``;`` between."""
    before, tag, rest = text.partition("<|python_tag|>")
    rest = (rest if tag else before).strip()
    calls: list[ToolCall] = []
    while rest.startswith("{"):
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except _NOT_JSON as error:
            return [*calls, _wrong(f"the call is not JSON: {error}")] if tag or '"name"' in rest else calls
        if not tag and not (isinstance(value, dict) and "name" in value):
            return calls  # an answer that is JSON
        calls.append(_call_of(value))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


def glm_calls(text: str, schemas: Sequence[Any] = ()) -> list[ToolCall]:
    """Read ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``, the format of GLM.

    A value is JSON or the text itself.  It is the text itself where ``schemas`` name a string.
    """
    calls, texts = [], _texts_of(schemas)
    for body in re.findall(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, re.DOTALL):
        name = body.partition("<arg_key>")[0].strip()
        pairs = _pairs(body, "<arg_key>", _KEY_TO_VALUE, "</arg_value>")
        arguments = {key.strip(): _value(value, (name, key.strip()) in texts) for key, value in pairs}
        calls.append(ToolCall(name=name, arguments=arguments))
    return calls


def coder_calls(text: str, schemas: Sequence[Any] = ()) -> list[ToolCall]:
    """Read ``<function=name><parameter=key>value</parameter>...</function>``, the format of Qwen3-Coder.

    Values are as in ``glm_calls``.
    """
    calls, texts = [], _texts_of(schemas)
    closed = text + "</function>"  # the end of the text ends a call, too
    for name, body in _pairs(closed, "<function=", _END_OF_TAG, "</function>"):
        pairs = _pairs(body, "<parameter=", _END_OF_TAG, "</parameter>")
        arguments = {
            key.strip(): _value(value.removeprefix("\n").removesuffix("\n"), (name.strip(), key.strip()) in texts)
            for key, value in pairs
        }
        calls.append(ToolCall(name=name.strip(), arguments=arguments))
    return calls


_KEY_TO_VALUE = re.compile(r"</arg_key>\s*<arg_value>")
_END_OF_TAG = re.compile(">")

PARSERS: Mapping[str, Parser] = {
    "hermes": hermes_calls,
    "qwen": hermes_calls,
    "qwen25": hermes_calls,
    "llama3": llama_calls,
    "glm": glm_calls,
    "glm45": glm_calls,
    "glm47": glm_calls,
    "qwen3_coder": coder_calls,
}
"""The parsers of this module by SGLang's names of the formats."""
_TYPED = {name: parser for name, parser in PARSERS.items() if parser in (glm_calls, coder_calls)}
"""Parsers of formats that write texts without quotation marks."""


def _pairs(text: str, opening: str, middle: re.Pattern[str], closing: str) -> Iterator[tuple[str, str]]:
    """Yield the two texts of each ``opening ... middle ... closing``, from left to right, in linear time.

    One regex with two lazy parts finds the same.  It takes quadratic or cubic time in text without the last tag,
    because it tries each start with each middle.  Here the first tag that is missing ends the search: a later start
    would miss it, too.
    """
    at = 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        between = middle.search(text, start)
        end = text.find(closing, between.end()) if between else -1
        if not between or end < 0:
            return
        yield text[start : between.start()], text[between.end() : end]
        at = end + len(closing)


def _json_call(body: str) -> ToolCall:
    try:
        return _call_of(json.loads(body))
    except _NOT_JSON as error:
        return _wrong(f"the call is not JSON: {error}")


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return _wrong("a call is a JSON object with 'name' and 'arguments'")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI's API has it
        try:
            arguments = json.loads(arguments)
        except _NOT_JSON as error:
            return ToolCall(name=name, error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name=name, error="the arguments are not a JSON object")
    return ToolCall(name=name, arguments=arguments)


def _wrong(error: str) -> ToolCall:
    return ToolCall(name="", error=error)


def _texts_of(schemas: Sequence[Any]) -> set[tuple[str, str]]:
    """Return the arguments that are strings, as pairs of the tool's name and theirs; schemas may be anything."""
    found = set()
    for schema in schemas:
        function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        for name, each in properties.items() if isinstance(properties, Mapping) else ():
            if isinstance(each, Mapping) and each.get("type") == "string":
                found.add((str(function.get("name")), str(name)))
    return found


def _value(text: str, is_text: bool = False) -> Any:
    """Return a value that is written as JSON, or the text itself."""
    if is_text:
        return text
    try:
        return json.loads(text)
    except _NOT_JSON:
        return text


def _sglang_parser(name: str, schemas: Sequence[Any]) -> Parser:
    parser_class, tool_class = _sglang()
    if name not in parser_class.ToolCallParserEnum:
        known = ", ".join(sorted({*PARSERS, *parser_class.ToolCallParserEnum}))
        raise ConfigError(f"there is no parser of tool calls named '{name}'; the names are {known}")
    parser = parser_class([tool_class(**schema) for schema in schemas], name)

    def calls(text: str) -> list[ToolCall]:
        return [
            _call_of({"name": found.name, "arguments": found.parameters}) for found in parser.parse_non_stream(text)[1]
        ]

    return calls


@functools.cache
def _sglang() -> tuple[Any, Any]:
    calls = importlib.import_module("sglang.srt.function_call.function_call_parser")
    protocol = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    return calls.FunctionCallParser, protocol.Tool

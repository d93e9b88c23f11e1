"""Chat messages in one form, and the answers of the model that a client sends back in its history.

An answer goes to the client parsed: text, reasoning and tool calls.  It comes back in the history of the next request,
often changed in ways that mean nothing: arguments with other spacing, without its reasoning, with further null fields.
``AnswerMemory`` recognises it by its text and its tool calls, so that the recorded tokens can take its place.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from asyncrl.data.tokenizer import Message
from asyncrl.rollouts.gateway.fields import Body, dumped, shown
from asyncrl.rollouts.gateway.refusals import RequestRefused, bad
from asyncrl.rollouts.record import Line

_ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates do not know, with the ones that mean the same."""
_PLAIN_ROLES = frozenset({"system", "user", "assistant", "tool"})


THINK, END_THINK = "<think>", "</think>"
"""Marks of thinking that chat templates look for in the text of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool that the model asked for."""

    id: str
    name: str
    arguments: str
    """A JSON object as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """An answer as the client gets it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class Rendering:
    """A rendered chat.  Longer renderings of the same chat replace the text, so that it is stored once."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One answer of the model, with all that is needed to continue behind it."""

    call: int
    digests: tuple[int, ...]
    """Digests of the settings and messages of its request."""
    rendering: Rendering
    rendered_len: int
    """Characters of the rendering before the answer."""
    line: Line
    start: int
    """Position in ``line.ids`` of the first token of the answer."""
    stop: int
    raw: str
    """The text of the answer with special tokens, without its end token."""
    end: str
    """The text of the end token; empty if the answer has none."""


def messages_of(found: object) -> list[Message]:
    """Return the messages of a request in the form that chat templates expect.  Raises RequestRefused."""
    if not isinstance(found, list) or not found:
        raise bad(f"messages must be a list of at least one message, got {shown(found)}")
    return [_message(each) for each in found]


def _message(found: object) -> Message:
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise bad(f"each of messages must be an object with a role, got {shown(found)}")
    if len(found) == 2 and found["role"] in _PLAIN_ROLES and isinstance(found.get("content"), str):
        return found  # most messages are nothing but a text
    message = {name: value for name, value in found.items() if value is not None}
    message["role"] = _ROLES.get(message["role"], message["role"])
    message["content"] = _text_of(message.get("content", ""))
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(each) for each in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _text_of(content: object) -> str:
    """Return the text of a message, whose parts are joined by spaces as SGLang does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"content must be a text or a list of parts, got {shown(content)}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise bad(f"content must have text parts only, got {shown(part)}")
        parts.append(text)
    return " ".join(parts)


def _tool_call(found: object) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, because templates render them as JSON."""
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f"each of tool_calls must have a function with a name, got {shown(found)}")
    return {**found, "function": {**function, "arguments": arguments_of(function.get("arguments", "{}"))}}


def arguments_of(found: object) -> object:
    """Return the arguments of a tool call as an object.  Raises RequestRefused."""
    if isinstance(found, str):
        try:
            found = orjson.loads(found or "{}")
        except orjson.JSONDecodeError as error:
            raise bad(f"function.arguments of an assistant message must be JSON, got {shown(found)}") from error
    if not isinstance(found, dict):
        raise bad(f"function.arguments of an assistant message must be a JSON object, got {shown(found)}")
    return found


def digest(value: object, name: str) -> int:
    """Return a number that is equal for equal JSON values.  Raises RequestRefused for one that is nested too deeply."""
    return hash(dumped(value, name))


def _key(content: str, calls: Sequence[tuple[str, object]]) -> int:
    return digest([content.strip(), calls], "tool_calls of a message")


@dataclass(frozen=True, slots=True)
class Recognised:
    """The messages of a request, of which some are answers of the model."""

    messages: list[Message]
    answers: Mapping[int, RecordedAnswer]
    """Answers of the model by position."""
    digests: tuple[int, ...]

    @property
    def is_unedited(self) -> bool:
        """Whether everything up to the last answer is as it was when that answer was given."""
        if not self.answers:
            return False
        place = max(self.answers)
        return self.digests[: place + 1] == self.answers[place].digests


@dataclass(slots=True)
class AnswerMemory:
    """The answers that the client of an episode got so far."""

    answers: list[RecordedAnswer] = field(default_factory=list)
    _by_key: dict[int, list[RecordedAnswer]] = field(default_factory=dict)

    def add(self, answer: RecordedAnswer, parsed: ParsedAnswer) -> None:
        """Remember an answer and the form in which the client got it, also without the thinking in its text."""
        self.answers.append(answer)
        calls = [(call.name, _loaded(call.arguments)) for call in parsed.tool_calls]
        for content in {parsed.content, parsed.content.rpartition(END_THINK)[2]}:
            with suppress(RequestRefused):  # the model nested its arguments so deeply that no request may repeat them
                self._by_key.setdefault(_key(content, calls), []).append(answer)

    def recognise(self, messages: list[Message], settings: Body) -> Recognised:
        """Find the model's answers among the messages.  ``settings`` is all else that the rendering depends on.

        Raises RequestRefused for values that are nested too deeply.
        """
        answers: dict[int, RecordedAnswer] = {}
        digests = [digest(settings, "tools and chat_template_kwargs")]
        for place, message in enumerate(messages):
            answer = self._find(message, digests) if message["role"] == "assistant" else None
            if answer is None:
                digests.append(digest(message, "each of messages"))
            else:
                answers[place] = answer
                digests.append(-1 - answer.call)
        return Recognised(messages, answers, tuple(digests))

    def _find(self, message: Message, digests: list[int]) -> RecordedAnswer | None:
        """Return the answer that ``message`` repeats; among several, the one behind the same messages, or the last."""
        if not self._by_key:
            return None
        functions = [each["function"] for each in message.get("tool_calls", ())]
        calls = [(function["name"], function["arguments"]) for function in functions]
        found = self._by_key.get(_key(message["content"], calls), [])
        before = tuple(digests)
        same = (answer for answer in found if answer.digests == before)
        return next(same, found[-1] if found else None)


def _loaded(arguments: str) -> object:
    try:
        return orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return arguments

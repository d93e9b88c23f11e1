"""One request of a chat, whichever API it came through: from messages to parsed answers, which are remembered."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from asyncrl.data.tokenizer import Message
from asyncrl.episodes import GeneratedTurn
from asyncrl.rollouts.gateway.answer_text import Ending, GrowingText
from asyncrl.rollouts.gateway.chats import ParsedAnswer, RecordedAnswer, ToolCall
from asyncrl.rollouts.gateway.open_episodes import OpenEpisode
from asyncrl.rollouts.gateway.parts import Parts, stream_turns, turns_of
from asyncrl.rollouts.gateway.refusals import bad
from asyncrl.rollouts.gateway.rendering import Chat, remember
from asyncrl.rollouts.gateway.sampling import Asked

_PROMPT_END = 64
"""Characters at the end of a prompt that may open the reasoning of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request, in the form that all APIs share."""

    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    """Tools that the model may call; none if it must not."""
    is_call_required: bool
    variables: Mapping[str, Any]
    suffix: str
    asked: Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """An answer to a chat request."""

    parsed: ParsedAnswer
    turn: GeneratedTurn
    ending: Ending


class ChatTurns:
    """Generates the answers to one chat request."""

    def __init__(self, parts: Parts, episode: OpenEpisode, request: ChatRequest, chat: Chat) -> None:
        self.chat = chat
        self.num_cached = episode.num_cached(chat.context)
        self._parts = parts
        self._episode = episode
        self.request = request
        self._rendering = remember(episode.memory, chat)

    @classmethod
    async def of(cls, parts: Parts, episode: OpenEpisode, request: ChatRequest) -> "ChatTurns":
        """Render the request.  Raises RequestRefused."""
        variables = {**parts.template_variables, **episode.template_variables, **request.variables}
        chat = await episode.chats.chat(request.messages, request.tools or None, variables, request.suffix)
        return cls(parts, episode, request, chat)

    async def answers(self) -> list[ChatAnswer]:
        """Generate all answers.  Raises RequestRefused."""
        turns = await turns_of(self._episode, self.chat.context, self.request.asked)
        return [await self._answer(turn) for turn in turns]

    async def stream(self, take: Callable[[int, str, ChatAnswer | None], Awaitable[None]]) -> None:
        """Generate all answers; ``take`` gets each new piece of text, and at last the whole answer with the rest.

        Where tool calls or reasoning are looked for, all of an answer comes at its end.  Raises RequestRefused.
        """
        is_plain = not self._is_parsed and not self.request.is_call_required

        async def note(number: int, growing: GrowingText, turn: GeneratedTurn | None) -> None:
            if turn is not None:
                answer = await self._answer(turn)
                await take(number, growing.rest(answer.parsed.content), answer)
            elif is_plain and (piece := growing.piece()):
                await take(number, piece, None)

        await stream_turns(self._episode, self.chat.context, self.request.asked, self._parts.texts, note)

    @property
    def _is_parsed(self) -> bool:
        parser = self._parts.parser
        return parser.has_reasoning or (parser.has_tools and bool(self.request.tools))

    async def _answer(self, turn: GeneratedTurn) -> ChatAnswer:
        texts, asked = self._parts.texts, self.request.asked
        ending = texts.ending(turn, asked)
        text = texts.text(turn, ending, asked)
        parsed = required_calls(text) if self.request.is_call_required else None
        if parsed is None and self._is_parsed:
            parsed = await self._parts.parser.parse(text, self.chat.rendered[-_PROMPT_END:], self.request.tools)
        answer = ChatAnswer(parsed=parsed or ParsedAnswer(content=text), turn=turn, ending=ending)
        self._remember(answer)
        return answer

    def _remember(self, answer: ChatAnswer) -> None:
        line, start = self._episode.session.record.place_of(answer.turn.call)
        raw, end = self._parts.texts.raw(answer.turn, self.request.asked)
        self._episode.memory.add(
            RecordedAnswer(
                call=answer.turn.call,
                digests=self.chat.recognised.digests,
                rendering=self._rendering,
                rendered_len=len(self.chat.rendered),
                line=line,
                start=start,
                stop=start + len(answer.turn.token_ids),
                raw=raw,
                end=end,
            ),
            answer.parsed,
        )


def required_calls(text: str) -> ParsedAnswer | None:
    """Return the tool calls of an answer that the grammar of ``required_schema`` shaped; None if it was cut short."""
    try:
        found = orjson.loads(text)
        calls = [
            ToolCall(
                id=f"call_{uuid4().hex[:24]}",
                name=each["name"],
                arguments=json.dumps(each["parameters"], ensure_ascii=False),
            )
            for each in found
        ]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    return ParsedAnswer(content="", tool_calls=tuple(calls))


def required_schema(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON schema of a list of at least one call of these tools, as SGLang builds it."""
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        calls.append({"properties": properties, "required": ["name", "parameters"]})
    return json.dumps({"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}})


def tools_of(found: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a request.  Raises RequestRefused."""
    for tool in found:
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad("each of tools must have a function with a name")
    return tuple(found)

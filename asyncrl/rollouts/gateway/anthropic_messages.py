"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: chats as Anthropic's clients send them."""

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from asyncrl.data.tokenizer import Message
from asyncrl.rollouts.gateway.chat_turns import ChatAnswer, ChatRequest, ChatTurns
from asyncrl.rollouts.gateway.chats import arguments_of
from asyncrl.rollouts.gateway.fields import Body, dumped, flag, mapping, objects, shown, text
from asyncrl.rollouts.gateway.openai_chat import chat_request
from asyncrl.rollouts.gateway.parts import Events, Parts, json_response, new_id
from asyncrl.rollouts.gateway.refusals import RequestRefused, bad
from asyncrl.types import FinishReason, SamplingParams

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"xhigh": "max"}


async def messages(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /v1/messages``."""
    episode = parts.episodes.find(request.headers)
    wanted = _chat_request(body, episode.session.start.sampling)
    async with episode.request():
        turns = await ChatTurns.of(parts, episode, wanted)
        if flag(body, "stream"):
            return await _Stream(request, turns, _head(parts, body)).run()
        (answer,) = await turns.answers()
    return json_response(
        {
            **_head(parts, body),
            "content": _blocks(answer),
            "stop_reason": _stop_reason(answer, wanted),
            "stop_sequence": _stop_sequence(answer),
            "usage": _usage(turns, answer),
        }
    )


async def count_tokens(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /v1/messages/count_tokens``."""
    episode = parts.episodes.find(request.headers)
    wanted = _chat_request(body, episode.session.start.sampling)
    async with episode.request():
        variables = {**parts.template_variables, **episode.template_variables, **wanted.variables}
        chat = await episode.chats.chat(wanted.messages, wanted.tools or None, variables, wanted.suffix)
    return json_response({"input_tokens": len(chat.context.token_ids)})


# ---- the request


def _chat_request(body: Body, run: SamplingParams) -> ChatRequest:
    """Return the request as one of OpenAI's.  Raises RequestRefused."""
    found = objects(body, "messages")
    system = [_texts(body["system"])] if body.get("system") else []
    system += [_texts(message.get("content", "")) for message in found if message.get("role") == "system"]
    chat: list[Message] = [{"role": "system", "content": "\n".join(system)}] if system else []
    for message in found:
        if message.get("role") != "system":
            chat += _converted(message)
    return chat_request(
        {
            "messages": chat,
            "tools": [_tool(tool) for tool in objects(body, "tools") if "input_schema" in tool],
            "tool_choice": _tool_choice(mapping(body, "tool_choice")),
            "chat_template_kwargs": _variables(body),
            "stop": body.get("stop_sequences"),
            **{name: body[name] for name in ("max_tokens", "temperature", "top_p", "top_k") if name in body},
        },
        run,
    )


def _variables(body: Body) -> Body:
    variables = mapping(body, "chat_template_kwargs")
    if thinking := mapping(body, "thinking").get("type"):
        variables = {"enable_thinking": thinking != "disabled", **variables}
    if effort := text(mapping(body, "output_config"), "effort"):
        variables = {"reasoning_effort": _EFFORTS.get(effort, effort), **variables}
    return variables


def _converted(message: Body) -> list[Message]:
    """Return a message as OpenAI's messages: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad(f"role must be user or assistant, got {shown(role)}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return (
        _answer_of(objects(message, "content")) if role == "assistant" else _said_by_user(objects(message, "content"))
    )


def _answer_of(blocks: Sequence[Body]) -> list[Message]:
    """Return an assistant's message.  Its thinking is left out: the record has it."""
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            function = {"name": block.get("name"), "arguments": arguments_of(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    content = " ".join(_block_text(block) for block in blocks if block.get("type") == "text")
    return [{"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})]


def _said_by_user(blocks: Sequence[Body]) -> list[Message]:
    """Return the messages of a user and of tools, in the order of the blocks."""
    made: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_block_text(block))
            continue
        if texts:
            made.append({"role": "user", "content": " ".join(texts)})
            texts = []
        result = _texts(block.get("content") or "")
        made.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
    return [*made, {"role": "user", "content": " ".join(texts)}] if texts else made


def _block_text(block: Body) -> str:
    if block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise bad(f"content must have blocks of text, tool_use and tool_result only, got {shown(block.get('type'))}")
    found: str = block["text"]
    return found


def _texts(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block) for block in objects({"content": content}, "content"))


def _tool(tool: Body) -> Body:
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _tool_choice(found: Body) -> object:
    if found.get("type") == "tool":
        return {"type": "function", "function": {"name": found.get("name")}}
    return _TOOL_CHOICES.get(found.get("type", "auto"), found)


# ---- the response


def _head(parts: Parts, body: Body) -> dict[str, Any]:
    return {
        "id": f"msg_{new_id()}",
        "type": "message",
        "role": "assistant",
        "model": text(body, "model") or parts.card.name,
    }


def _blocks(answer: ChatAnswer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.parsed.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.parsed.reasoning, "signature": ""})
    if answer.parsed.content or not answer.parsed.tool_calls:
        blocks.append({"type": "text", "text": answer.parsed.content})
    return blocks + [_tool_use(call.id, call.name, call.arguments) for call in answer.parsed.tool_calls]


def _tool_use(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        given = orjson.loads(arguments or "{}")
        dumped(given, "input")  # else the answer could not be written
    except (orjson.JSONDecodeError, RequestRefused):
        given = {"arguments": arguments}
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def _stop_reason(answer: ChatAnswer, wanted: ChatRequest) -> str:
    if answer.ending.reason is FinishReason.LENGTH:
        return "max_tokens"
    if answer.parsed.tool_calls:
        return "tool_use"
    return "stop_sequence" if _stop_sequence(answer) in wanted.asked.sampling.stop else "end_turn"


def _stop_sequence(answer: ChatAnswer) -> str | None:
    matched = answer.ending.matched
    return matched if isinstance(matched, str) else None


def _usage(turns: ChatTurns, answer: ChatAnswer | None) -> dict[str, int]:
    return {
        "input_tokens": len(turns.chat.context.token_ids) - turns.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": turns.num_cached,
        "output_tokens": 0 if answer is None else len(answer.turn.token_ids),
    }


class _Stream:
    """One streamed answer."""

    def __init__(self, request: web.BaseRequest, turns: ChatTurns, head: dict[str, Any]) -> None:
        self._events = Events(request)
        self._turns = turns
        self._head = head
        self._num_blocks = 0
        self._is_text_open = False

    async def run(self) -> web.StreamResponse:
        """Stream the answer."""
        await self._turns.stream(self._take)
        return self._events.response

    async def _take(self, number: int, piece: str, answer: ChatAnswer | None) -> None:
        if not self._events.has_begun:
            empty: dict[str, Any] = {
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": _usage(self._turns, None),
            }
            await self._send("message_start", message={**self._head, **empty})
        if answer is not None and answer.parsed.reasoning:
            thinking = {"type": "thinking_delta", "thinking": answer.parsed.reasoning}
            await self._block({"type": "thinking", "thinking": "", "signature": ""}, thinking)
        if piece or (answer is not None and not answer.parsed.tool_calls):
            await self._text(piece)
        if answer is not None:
            await self._end(answer)

    async def _text(self, piece: str) -> None:
        if not self._is_text_open:
            self._is_text_open = True
            await self._send("content_block_start", index=self._num_blocks, content_block={"type": "text", "text": ""})
        if piece:
            await self._send("content_block_delta", index=self._num_blocks, delta={"type": "text_delta", "text": piece})

    async def _end(self, answer: ChatAnswer) -> None:
        if self._is_text_open:
            await self._send("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
        for call in answer.parsed.tool_calls:
            empty = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            await self._block(empty, {"type": "input_json_delta", "partial_json": call.arguments})
        delta = {"stop_reason": _stop_reason(answer, self._turns.request), "stop_sequence": _stop_sequence(answer)}
        await self._send("message_delta", delta=delta, usage=_usage(self._turns, answer))
        await self._send("message_stop")

    async def _block(self, empty: dict[str, Any], delta: dict[str, Any]) -> None:
        await self._send("content_block_start", index=self._num_blocks, content_block=empty)
        await self._send("content_block_delta", index=self._num_blocks, delta=delta)
        await self._send("content_block_stop", index=self._num_blocks)
        self._num_blocks += 1

    async def _send(self, kind: str, **fields: object) -> None:
        await self._events.send({"type": kind, **fields}, kind)

"""``POST /v1/chat/completions``: chats as OpenAI's clients send them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from asyncrl.data.tokenizer import Message
from asyncrl.rollouts.gateway.chat_turns import ChatAnswer, ChatRequest, ChatTurns, required_schema, tools_of
from asyncrl.rollouts.gateway.chats import ToolCall, messages_of
from asyncrl.rollouts.gateway.fields import Body, flag, integer, mapping, objects, shown, text
from asyncrl.rollouts.gateway.parts import Events, Parts, json_response, new_id
from asyncrl.rollouts.gateway.refusals import bad
from asyncrl.rollouts.gateway.sampling import asked_by_openai
from asyncrl.types import FinishReason, SamplingParams


async def chat_completions(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /v1/chat/completions``."""
    episode = parts.episodes.find(request.headers)
    if integer(body, "top_logprobs", 0, 0) > 0:
        raise bad("top_logprobs must be 0: the engines report the log-prob of the generated token only")
    wanted = chat_request(body, episode.session.start.sampling)
    made = _Completion(parts, body)
    async with episode.request(text(body, "rid") or ""):
        turns = await ChatTurns.of(parts, episode, wanted)
        if flag(body, "stream"):
            return await made.streamed(request, turns, wanted.asked.n)
        answers = await turns.answers()
    return json_response(made.whole(turns, answers))


def chat_request(body: Body, run: SamplingParams) -> ChatRequest:
    """Return the request in the form that all APIs share.  Raises RequestRefused."""
    messages = messages_of(body.get("messages"))
    tools, is_required = _tools(body)
    messages, suffix = _last_answer(messages, is_continued=flag(body, "continue_final_message"))
    variables = mapping(body, "chat_template_kwargs")
    if effort := text(body, "reasoning_effort"):
        variables = {"reasoning_effort": effort, **variables}
    asked = asked_by_openai(body, run, skips_special_tokens=not tools)
    if is_required:
        sampling = replace(asked.sampling, extra={**asked.sampling.extra, "json_schema": required_schema(tools)})
        asked = replace(asked, sampling=sampling)
    return ChatRequest(
        messages=messages,
        tools=tools,
        is_call_required=is_required,
        variables=variables,
        suffix=suffix,
        asked=asked,
    )


def _tools(body: Body) -> tuple[tuple[Any, ...], bool]:
    """Return the tools that the model may call, and whether it must."""
    tools = tools_of(objects(body, "tools"))
    match body.get("tool_choice"):
        case None | "auto":
            return tools, False
        case "none":
            return (), False
        case "required" if tools:
            return tools, True
        case {"function": {"name": str(name)}} if chosen := [
            tool for tool in tools if tool["function"]["name"] == name
        ]:
            return tuple(chosen), True
        case other:
            raise bad(f"tool_choice must be auto, none, required or one of the tools, got {shown(other)}")


def _last_answer(messages: list[Message], *, is_continued: bool) -> tuple[list[Message], str]:
    """Return the messages without a last one of the assistant, and the text with which the answer begins.

    As in SGLang: the message becomes a user's unless the request asks to continue it.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, ""
    if is_continued:
        return messages[:-1], last["content"]
    return [*messages[:-1], {"role": "user", "content": last["content"]}], ""


class _Completion:
    """The responses to one request."""

    def __init__(self, parts: Parts, body: Body) -> None:
        self._parts = parts
        self._has_logprobs = flag(body, "logprobs")
        self._with_usage = flag(mapping(body, "stream_options"), "include_usage")
        self._head = {
            "id": f"chatcmpl-{new_id()}",
            "created": parts.created,
            "model": text(body, "model") or parts.card.name,
        }

    def whole(self, turns: ChatTurns, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the response with all answers."""
        versions = [span.weights.version for span in answers[0].turn.spans[-1:]]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(number, answer) for number, answer in enumerate(answers)],
            "usage": usage(len(turns.chat.context.token_ids), turns.num_cached, answers),
            "metadata": {"weight_version": str(versions[0]) if versions else None},
        }

    def _choice(self, number: int, answer: ChatAnswer) -> dict[str, Any]:
        parsed = answer.parsed
        message = {
            "role": "assistant",
            "content": parsed.content,
            "reasoning_content": parsed.reasoning,
            "tool_calls": [_call(call) for call in parsed.tool_calls] or None,
        }
        return {
            "index": number,
            "message": {name: value for name, value in message.items() if value is not None},
            "logprobs": self._logprobs(answer),
            "finish_reason": finish_name(answer),
            "matched_stop": answer.ending.matched,
        }

    def _logprobs(self, answer: ChatAnswer) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        decode = self._parts.texts.with_special_tokens.decode
        content = []
        for token, logprob in zip(answer.turn.token_ids, answer.turn.logprobs, strict=True):
            piece = decode((token,))
            content.append({"token": piece, "bytes": list(piece.encode()), "logprob": logprob, "top_logprobs": []})
        return {"content": content}

    async def streamed(self, request: web.BaseRequest, turns: ChatTurns, n: int) -> web.StreamResponse:
        """Stream the answers."""
        events, done, begun = Events(request), list[ChatAnswer](), set[int]()

        async def take(number: int, piece: str, answer: ChatAnswer | None) -> None:
            if number not in begun:
                begun.add(number)
                await events.send(self._chunk(number, {"role": "assistant", "content": ""}))
            for delta in _deltas(piece, answer):
                await events.send(self._chunk(number, delta))
            if answer is not None:
                done.append(answer)
                await events.send(self._chunk(number, {}, answer))

        await turns.stream(take)
        if self._with_usage and len(done) == n:
            total = usage(len(turns.chat.context.token_ids), turns.num_cached, done)
            await events.send({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": total})
        await events.done()
        return events.response

    def _chunk(self, number: int, delta: dict[str, Any], answer: ChatAnswer | None = None) -> dict[str, Any]:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": None if answer is None else self._logprobs(answer),
            "finish_reason": None if answer is None else finish_name(answer),
            "matched_stop": None if answer is None else answer.ending.matched,
        }
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}


def _deltas(piece: str, answer: ChatAnswer | None) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    if answer is not None and answer.parsed.reasoning:
        deltas.append({"reasoning_content": answer.parsed.reasoning})
    if piece:
        deltas.append({"content": piece})
    if answer is not None and answer.parsed.tool_calls:
        calls = [{"index": place, **_call(call)} for place, call in enumerate(answer.parsed.tool_calls)]
        deltas.append({"tool_calls": calls})
    return deltas


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_name(answer: ChatAnswer) -> str:
    """Return OpenAI's ``finish_reason``."""
    if answer.ending.reason is FinishReason.STOP and answer.parsed.tool_calls:
        return "tool_calls"
    return answer.ending.reason.value


def usage(num_prompt: int, num_cached: int, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """Return the numbers of tokens."""
    num_answered = sum(len(answer.turn.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_answered,
        "total_tokens": num_prompt + num_answered,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }

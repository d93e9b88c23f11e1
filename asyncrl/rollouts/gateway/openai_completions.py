"""``POST /v1/completions``: texts or token ids as OpenAI's clients send them."""

import itertools
from typing import Any

from aiohttp import web

from asyncrl.episodes import GeneratedTurn
from asyncrl.rollouts.gateway.answer_text import GrowingText
from asyncrl.rollouts.gateway.contexts import Context
from asyncrl.rollouts.gateway.fields import Body, flag, integer, mapping, shown, text, token_ids
from asyncrl.rollouts.gateway.open_episodes import Content
from asyncrl.rollouts.gateway.parts import Events, Parts, json_response, new_id, stream_turns, turns_of
from asyncrl.rollouts.gateway.refusals import bad
from asyncrl.rollouts.gateway.sampling import Asked, asked_by_openai


async def completions(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /v1/completions``."""
    content = _content(body)
    episode = parts.episodes.find(request.headers, content)
    asked = asked_by_openai(body, episode.session.start.sampling)
    async with episode.request(text(body, "rid") or ""):
        known = Context(token_ids=content.token_ids) if content.token_ids else await episode.texts.context(content.text)
        made = _Completion(parts, body, asked, known, episode.num_cached(known))
        if not flag(body, "stream"):
            return json_response(made.whole(await turns_of(episode, known, asked)))
        events = Events(request)
        await stream_turns(episode, known, asked, parts.texts, made.taking(events))
        await made.end(events)
        return events.response


def _content(body: Body) -> Content:
    if integer(body, "logprobs", 0, 0) > 1:
        raise bad("logprobs must be 0 or 1: the engines report the log-prob of the generated token only")
    if flag(body, "echo"):
        raise bad("echo is not supported by asyncrl's gateway")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return Content(text=prompt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return Content(token_ids=token_ids({"prompt": prompt}, "prompt"))
    raise bad(f"prompt must be one text or one list of token ids, not empty, got {shown(prompt)}")


class _Completion:
    """The responses to one request."""

    def __init__(self, parts: Parts, body: Body, asked: Asked, context: Context, num_cached: int) -> None:
        self._parts = parts
        self._asked = asked
        self._num_prompt = len(context.token_ids)
        self._num_cached = num_cached
        self._num_answered = 0
        self._has_logprobs = body.get("logprobs") is not None
        self._with_usage = flag(mapping(body, "stream_options"), "include_usage")
        self._head = {
            "id": f"cmpl-{new_id()}",
            "object": "text_completion",
            "created": parts.created,
            "model": text(body, "model") or parts.card.name,
        }

    def whole(self, turns: list[GeneratedTurn]) -> dict[str, Any]:
        """Return the response with all answers."""
        choices = [self._last_choice(number, turn, self._text(turn)) for number, turn in enumerate(turns)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    def taking(self, events: Events) -> Any:
        """Return a function that sends the progress of answers as events."""

        async def take(number: int, growing: GrowingText, turn: GeneratedTurn | None) -> None:
            if turn is not None:
                choice = self._last_choice(number, turn, growing.rest(self._text(turn)))
                await events.send({**self._head, "choices": [choice]})
            elif piece := growing.piece():
                await events.send({**self._head, "choices": [_choice(number, piece)]})

        return take

    async def end(self, events: Events) -> None:
        """Send the events behind all answers."""
        if self._with_usage:
            await events.send({**self._head, "choices": [], "usage": self._usage()})
        await events.done()

    def _text(self, turn: GeneratedTurn) -> str:
        return self._parts.texts.text(turn, self._parts.texts.ending(turn, self._asked), self._asked)

    def _last_choice(self, number: int, turn: GeneratedTurn, rest: str) -> dict[str, Any]:
        self._num_answered += len(turn.token_ids)
        ending = self._parts.texts.ending(turn, self._asked)
        choice = _choice(number, rest)
        return {**choice, "logprobs": self._logprobs(turn), "finish_reason": ending.reason.value} | {
            "matched_stop": ending.matched
        }

    def _logprobs(self, turn: GeneratedTurn) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        decode = self._parts.texts.with_special_tokens.decode
        tokens = [decode((token,)) for token in turn.token_ids]
        offsets = list(itertools.accumulate(map(len, tokens), initial=0))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": turn.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_answered,
            "total_tokens": self._num_prompt + self._num_answered,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


def _choice(number: int, piece: str) -> dict[str, Any]:
    return {"index": number, "text": piece, "logprobs": None, "finish_reason": None}

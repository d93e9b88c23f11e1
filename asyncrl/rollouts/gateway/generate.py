"""``POST /generate`` as SGLang 0.5.16 answers it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from aiohttp import web

from asyncrl.episodes import GeneratedTurn
from asyncrl.errors import plainly
from asyncrl.rollouts.gateway.answer_text import Ending, GrowingText
from asyncrl.rollouts.gateway.contexts import Context
from asyncrl.rollouts.gateway.fields import Body, flag, integer, mapping, shown, text, token_ids
from asyncrl.rollouts.gateway.open_episodes import Content, OpenEpisode
from asyncrl.rollouts.gateway.parts import Events, Parts, entries, json_response, new_id, stream_turns, turns_of
from asyncrl.rollouts.gateway.refusals import ABORTED, RequestRefused, bad
from asyncrl.rollouts.gateway.sampling import Asked, asked_by_sglang
from asyncrl.rollouts.record import same_up_to
from asyncrl.task_groups import TaskGroup
from asyncrl.types import FinishReason

_CANNOT = (
    *(
        "image_data",
        "video_data",
        "audio_data",
        "input_embeds",
        "lora_path",
        "session_params",
        "custom_logit_processor",
    ),
    *("return_hidden_states", "return_routed_experts", "return_sampling_mask", "top_logprobs_num", "token_ids_logprob"),
)
"""Fields of SGLang that the gateway refuses, because the engines are not asked for their results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One prompt of a request, with its ``n`` answers."""

    episode: OpenEpisode
    context: Context
    asked: Asked
    rid: str
    began_s: float
    num_cached: int
    returns_logprobs: bool
    has_texts: bool
    logprob_start_len: int


async def generate(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /generate``."""
    if found := next((name for name in _CANNOT if body.get(name)), None):
        raise bad(f"{found} is not supported by asyncrl's gateway")
    contents = _contents(body)
    items = [await _item(parts, request, body, content, place) for place, content in enumerate(contents)]
    episode = items[0].episode
    if any(item.episode is not episode for item in items):
        raise bad("the prompts of one request must belong to one episode")
    is_list = _is_batch(body) or items[0].asked.n > 1
    try:
        async with episode.request(items[0].rid):
            if flag(body, "stream"):
                return await _streamed(parts, request, items, is_list=is_list)
            answers = await _answers(parts, items)
    except RequestRefused as refused:
        if refused.kind != ABORTED:
            raise
        answers = [_aborted(item) for item in items]
        if (events := Events.begun(request)) is not None:
            for place, answer in enumerate(answers):
                await events.send(answer | ({"index": place * items[0].asked.n} if is_list else {}))
            await events.done()
            return events.response
    return json_response(answers if is_list else answers[0])


async def _answers(parts: Parts, items: Sequence[_Item]) -> list[dict[str, Any]]:
    if len(items) == 1:
        turns = [await turns_of(items[0].episode, items[0].context, items[0].asked)]
    else:
        with plainly():
            async with TaskGroup() as tasks:
                calls = [tasks.create_task(turns_of(item.episode, item.context, item.asked)) for item in items]
        turns = [call.result() for call in calls]
    return [
        _answer(parts, item, turn, number)
        for item, made in zip(items, turns, strict=True)
        for number, turn in enumerate(made)
    ]


async def _streamed(
    parts: Parts, request: web.BaseRequest, items: Sequence[_Item], *, is_list: bool
) -> web.StreamResponse:
    """Stream the answers; each event has all of the text and tokens so far, as without incremental streaming."""
    events = Events(request)

    async def stream(place: int, item: _Item) -> None:
        async def take(number: int, growing: GrowingText, turn: GeneratedTurn | None) -> None:
            answer = _partial(parts, item, growing, number) if turn is None else _answer(parts, item, turn, number)
            if is_list:
                answer["index"] = place * item.asked.n + number
            await events.send(answer)

        await stream_turns(item.episode, item.context, item.asked, parts.texts, take)

    with plainly():
        async with TaskGroup() as tasks:
            for place, item in enumerate(items):
                tasks.create_task(stream(place, item))
    await events.done()
    return events.response


def _is_batch(body: Body) -> bool:
    found = body.get("input_ids")
    found = body.get("text") if found is None else found
    return isinstance(found, list) and (not found or not isinstance(found[0], int))


def _contents(body: Body) -> list[Content]:
    """Return the prompts of a request.  Token ids go before text, as in SGLang."""
    ids, texts = body.get("input_ids"), body.get("text")
    if ids is None and texts is None:
        raise bad("Either text, input_ids or input_embeds should be provided.")
    name, found = ("input_ids", ids) if ids is not None else ("text", texts)
    many = found if _is_batch(body) else [found]
    if not many:
        raise bad(f"{name} must not be empty")
    if name == "input_ids":
        return [Content(token_ids=token_ids({name: each}, name)) for each in many]
    return [Content(text=text({name: each}, name) or "") for each in many]


async def _item(parts: Parts, request: web.BaseRequest, body: Body, content: Content, place: int) -> _Item:
    episode = parts.episodes.find(request.headers, content)
    params = body.get("sampling_params")
    asked = asked_by_sglang(_nth(params, place), episode.session.start.sampling)
    context = Context(token_ids=content.token_ids) if content.token_ids else await _text_context(episode, content)
    rid = _nth_rid(body.get("rid"), place)
    return _Item(
        episode=episode,
        context=context,
        asked=asked,
        rid=rid,
        began_s=time.monotonic(),
        num_cached=episode.num_cached(context),
        returns_logprobs=flag(body, "return_logprob"),
        has_texts=flag(body, "return_text_in_logprobs"),
        logprob_start_len=integer(body, "logprob_start_len", -1, -1),
    )


async def _text_context(episode: OpenEpisode, content: Content) -> Context:
    if not content.text:
        raise bad("the input must not be empty")
    return await episode.texts.context(content.text)


def _nth(params: object, place: int) -> Mapping[str, Any]:
    found = params[place] if isinstance(params, list) and place < len(params) else params
    return mapping({"sampling_params": found}, "sampling_params")


def _nth_rid(rid: object, place: int) -> str:
    found = rid[place] if isinstance(rid, list) and place < len(rid) else rid
    if found is None:
        return new_id()
    if not isinstance(found, str):
        raise bad(f"rid must be a text, got {shown(found)}")
    return found


def _answer(parts: Parts, item: _Item, turn: GeneratedTurn, number: int) -> dict[str, Any]:
    ending = parts.texts.ending(turn, item.asked)
    return {
        "text": parts.texts.text(turn, ending, item.asked),
        "output_ids": turn.token_ids,
        "meta_info": {
            **_meta(item, number, finish_of(ending, turn), _version(item, turn), len(turn.token_ids)),
            **_logprobs(parts, item, turn),
            "token_versions": _versions(turn),
            "e2e_latency": time.monotonic() - item.began_s,
        },
    }


def _aborted(item: _Item) -> dict[str, Any]:
    """Return the answer to a request that its client aborted: its tokens are not recorded, and so not shown."""
    finish = {"type": "abort", "message": "Abort by client"}
    meta = _meta(item, 0, finish, str(item.episode.session.weights.version), 0)
    return {"text": "", "output_ids": [], "meta_info": meta}


def _partial(parts: Parts, item: _Item, growing: GrowingText, number: int) -> dict[str, Any]:
    version = str(growing.chunks[-1].version)
    meta = _meta(item, number, None, version, len(growing.token_ids))
    if item.returns_logprobs:
        logprobs = [value for chunk in growing.chunks for value in chunk.logprobs]
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = list(zip(logprobs, growing.token_ids, repeat(None), strict=False))
        meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
    return {"text": growing.text, "output_ids": growing.token_ids, "meta_info": meta}


def _meta(item: _Item, number: int, finish: object, version: str, num_tokens: int) -> dict[str, Any]:
    return {
        "id": item.rid if number == 0 else f"{item.rid}_{number}",
        "finish_reason": finish,
        "prompt_tokens": len(item.context.token_ids),
        "weight_version": version,
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": num_tokens,
        "cached_tokens": item.num_cached,
        "cached_tokens_details": None,
        "dp_rank": None,
    }


def _logprobs(parts: Parts, item: _Item, turn: GeneratedTurn) -> dict[str, Any]:
    if not item.returns_logprobs:
        return {}
    decode = parts.texts.with_special_tokens.decode
    texts = [decode((token,)) for token in turn.token_ids] if item.has_texts else None
    found = entries(turn, texts)
    return {
        "input_token_logprobs": _input_logprobs(item),
        "output_token_logprobs": found,
        "output_token_logprobs_length": len(found),
    }


def _input_logprobs(item: _Item) -> list[tuple[float | None, int, None]]:
    """Return log-probs of the request's tokens from ``logprob_start_len`` on: recorded ones, and None for others.

    The engines are not asked for log-probs of tokens that the model did not write.
    """
    if item.logprob_start_len < 0:
        return []
    token_ids = item.context.token_ids
    known: list[float | None] = [None] * len(token_ids)
    for line in item.episode.session.record.lines:
        num_same = same_up_to(token_ids, line.ids)
        for start, turn in line.turns:
            begin = line.prompt_len + start
            stop = min(num_same, begin + len(turn.token_ids))
            if begin < stop:
                known[begin:stop] = turn.logprobs[: stop - begin]
    first = item.logprob_start_len
    return [(known[place] if place > first else None, token_ids[place], None) for place in range(first, len(token_ids))]


def _versions(turn: GeneratedTurn) -> list[str]:
    """Return the weight version of each token."""
    versions: list[str] = []
    for span in turn.spans:
        versions += [str(span.weights.version)] * (span.stop - span.start)
    return versions


def _version(item: _Item, turn: GeneratedTurn) -> str:
    return str(turn.spans[-1].weights.version) if turn.spans else str(item.episode.session.weights.version)


def finish_of(ending: Ending, turn: GeneratedTurn) -> dict[str, Any]:
    """Return SGLang's ``finish_reason``."""
    if ending.reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(turn.token_ids)}
    return {"type": ending.reason.value} | ({} if ending.matched is None else {"matched": ending.matched})

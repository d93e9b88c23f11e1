"""The parts that the endpoints of the gateway share."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from asyncrl.episodes import GeneratedTurn
from asyncrl.errors import plainly
from asyncrl.rollouts.gateway.answer_text import AnswerTexts, GrowingText
from asyncrl.rollouts.gateway.contexts import Context, Encoder
from asyncrl.rollouts.gateway.open_episodes import OpenEpisode, OpenEpisodes
from asyncrl.rollouts.gateway.parsing import AnswerParser
from asyncrl.rollouts.gateway.refusals import RequestRefused
from asyncrl.rollouts.gateway.sampling import Asked
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Chunk

_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DRAW = random.Random()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The model as clients see it."""

    name: str
    path: str
    max_context_len: int
    model_type: str | None = None
    architectures: tuple[str, ...] | None = None


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts that the endpoints share."""

    card: ModelCard
    encoder: Encoder
    texts: AnswerTexts
    episodes: OpenEpisodes
    parser: AnswerParser
    template_variables: Mapping[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))


type TakesProgress = Callable[[int, GrowingText, GeneratedTurn | None], Awaitable[None]]
"""Takes the number of an answer, its text so far, and its turn once it is complete."""


async def turns_of(episode: OpenEpisode, context: Context, asked: Asked) -> list[GeneratedTurn]:
    """Generate the ``n`` answers that were asked for.  Raises RequestRefused."""
    if asked.n == 1:
        return [await episode.generate(context, asked.sampling)]
    with plainly():
        async with TaskGroup() as tasks:
            calls = [tasks.create_task(episode.generate(context, asked.sampling)) for _ in range(asked.n)]
    return [call.result() for call in calls]


async def stream_turns(
    episode: OpenEpisode, context: Context, asked: Asked, texts: AnswerTexts, take: TakesProgress
) -> None:
    """Generate ``n`` answers and pass their progress to ``take``, one at a time.  Raises RequestRefused.

    Chunks that arrive while ``take`` waits for a slow client are passed together.
    """
    growing = [GrowingText(texts, asked) for _ in range(asked.n)]
    progress: asyncio.Queue[tuple[int, GeneratedTurn | None]] = asyncio.Queue()
    waiting = set[int]()

    async def answer(number: int) -> None:
        def note(chunk: Chunk) -> None:
            growing[number].take(chunk)
            if number not in waiting:
                waiting.add(number)
                progress.put_nowait((number, None))

        progress.put_nowait((number, await episode.generate(context, asked.sampling, note)))

    with plainly():
        async with TaskGroup() as tasks:
            for number in range(asked.n):
                tasks.create_task(answer(number), name=f"answer-{number}")
            left = asked.n
            while left:
                number, turn = await progress.get()
                waiting.discard(number)
                await take(number, growing[number], turn)
                left -= turn is not None


class Events:
    """A response of server-sent events; begins with the first one, so that an earlier error has a status.

    Later errors, such as the end of the episode, pass to the server, which sends them as the last event.
    """

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_EVENTS)
        request[_EVENTS_OF] = self

    @classmethod
    def begun(cls, request: web.BaseRequest) -> "Events | None":
        """Return the response of events that has begun for the request; None if there is none."""
        events = request.get(_EVENTS_OF)
        return events if events is not None and events.has_begun else None

    async def send(self, data: object, event: str | None = None) -> None:
        """Send an event with ``data`` as JSON."""
        head = b"" if event is None else b"event: %b\n" % event.encode()
        await self._write(b"%bdata: %b\n\n" % (head, orjson.dumps(data)))

    async def refuse(self, refused: RequestRefused, *, is_anthropic: bool) -> None:
        """Send the error that ends the stream."""
        if is_anthropic:
            await self.send(refused.as_anthropic(), "error")
        else:
            await self.send(refused.as_openai())
            await self.done()

    async def done(self) -> None:
        """Send the mark at the end of OpenAI's and SGLang's streams."""
        await self._write(b"data: [DONE]\n\n")

    @property
    def has_begun(self) -> bool:
        """Whether an event was sent."""
        return self.response.prepared

    async def _write(self, payload: bytes) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(payload)


_EVENTS_OF = web.RequestKey("events", Events)


def new_id() -> str:
    """Return an id for an answer.  It is no secret; ``uuid4`` would ask the kernel for each."""
    return f"{_DRAW.getrandbits(128):032x}"


def json_response(body: object, status: int = 200) -> web.Response:
    """Return a response with ``body`` as JSON."""
    return web.Response(body=orjson.dumps(body), status=status, headers=_JSON)


def entries(turn: GeneratedTurn, texts: Sequence[str | None] | None = None) -> list[tuple[float, int, str | None]]:
    """Return SGLang's ``output_token_logprobs``: log-prob, token, and its text if asked for."""
    return list(zip(turn.logprobs, turn.token_ids, texts or [None] * len(turn.token_ids), strict=True))

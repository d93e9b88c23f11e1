"""The HTTP server of the controller through which clients reach their episodes."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from aiohttp import web

from asyncrl.daemon_threads import off_loop
from asyncrl.data.tokenizer import TextTokenizer
from asyncrl.errors import ServerFailed, first_line, plainly
from asyncrl.event_loop import Deadline
from asyncrl.rollouts.gateway.answer_text import AnswerTexts
from asyncrl.rollouts.gateway.anthropic_messages import count_tokens, messages
from asyncrl.rollouts.gateway.contexts import Encoder
from asyncrl.rollouts.gateway.fields import Body, body_of, text
from asyncrl.rollouts.gateway.generate import generate
from asyncrl.rollouts.gateway.open_episodes import OpenEpisodes
from asyncrl.rollouts.gateway.openai_chat import chat_completions
from asyncrl.rollouts.gateway.openai_completions import completions
from asyncrl.rollouts.gateway.parsing import AnswerParser, NoParser
from asyncrl.rollouts.gateway.parts import Events, ModelCard, Parts, json_response
from asyncrl.rollouts.gateway.refusals import RequestRefused, encoded
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.session import EpisodeSession
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Weights

logger = logging.getLogger(__name__)

_BODY_S = 60.0
"""Deadline for the body of a request."""
_IDLE_S = 75.0
"""Seconds for which an unused connection stays open: longer than clients keep theirs, so that they close first."""
_CLOSE_S = 2.0
"""Limit for requests in progress when the gateway closes; their episodes are over by then."""
_BACKLOG = 4096
"""Connections that may wait to be accepted; all episodes may open theirs at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """The settings of a gateway."""

    card: ModelCard
    end_tokens: tuple[int, ...]
    """Ids of the tokens that end an answer of the model."""
    host: str = "127.0.0.1"
    port: int = 0
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, which those of a request override."""
    max_body_bytes: int = 16 << 20
    """A million token ids take 8 MiB.  Reading 16 MiB of them stops the controller's loop for 0.5 s."""


class HttpGateway:
    """A ``Gateway``, in the loop of the controller.  ``async with`` opens and closes its port.

    A bug in the pipeline, which a request reaches, ends the block with its exception.  A bug in the handling of a
    request costs the request: it gets status 500, and the traceback is in the log.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: TextTokenizer,
        weights: Callable[[], Weights],
        parser: AnswerParser | None = None,
    ) -> None:
        """``weights`` returns the weights that the engines serve; ``parser`` finds tool calls and reasoning."""
        encoder = Encoder(tokenizer)
        self._settings = settings
        self._weights = weights
        self._host, self._port = settings.host, settings.port
        self._parts = Parts(
            card=settings.card,
            encoder=encoder,
            texts=AnswerTexts(tokenizer, settings.end_tokens),
            episodes=OpenEpisodes(encoder, self._note_bug),
            parser=parser or NoParser(),
            template_variables=settings.template_variables,
        )
        self._answers: dict[tuple[str, str], _Answers] = {
            ("POST", "/generate"): generate,
            ("PUT", "/generate"): generate,
            ("POST", "/v1/chat/completions"): chat_completions,
            ("POST", "/v1/completions"): completions,
            ("POST", "/v1/messages"): messages,
            ("POST", "/v1/messages/count_tokens"): count_tokens,
            ("POST", "/abort_request"): _abort_request,
        }
        self._pages: dict[str, Callable[[], object]] = {
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/v1/models": self._models,
            "/workers": self._workers,
        }

    @property
    def host(self) -> str:
        """Address under which clients reach the gateway."""
        return self._host

    @property
    def port(self) -> int:
        """Port on which the gateway listens."""
        return self._port

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._bug: asyncio.Future[None] = loop.create_future()
        self._server = web.Server(
            self._respond,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,  # paths and headers of agents may hold keys
            keepalive_timeout=_IDLE_S,
            auto_decompress=True,
        )
        try:
            self._listener = await loop.create_server(
                self._server, self._settings.host, self._settings.port, backlog=_BACKLOG
            )
        except OSError as error:
            raise ServerFailed(
                f"the gateway cannot listen on {self._settings.host}:{self._settings.port} (gateway-host, "
                f"gateway-port): {first_line(error)}"
            ) from error
        self._port = self._listener.sockets[0].getsockname()[1]
        self._host = await off_loop(partial(_reachable, self._settings.host), "gateway-host")
        self._stack = contextlib.AsyncExitStack()
        self._stack.enter_context(plainly())
        tasks = await self._stack.enter_async_context(TaskGroup())
        watching = tasks.create_task(self._raise_bug(), name="gateway")
        self._stack.callback(watching.cancel)
        self._stack.push_async_callback(self._close)
        return self

    async def __aexit__(self, *failure: Any) -> bool | None:
        return await self._stack.__aexit__(*failure)

    def open(self, session: EpisodeSession) -> EpisodeAddress:
        """See ``Gateway.open``."""
        return self._parts.episodes.open(session, self._host, self._port)

    def close(self, address: EpisodeAddress) -> None:
        """See ``Gateway.close``."""
        self._parts.episodes.close(address)

    async def _close(self) -> None:
        self._listener.close()
        for episode in self._parts.episodes:
            self._parts.episodes.close(episode.address)
        self._server.pre_shutdown()
        await self._server.shutdown(_CLOSE_S)

    async def _raise_bug(self) -> None:
        await self._bug

    def _note_bug(self, error: Exception) -> None:
        if not self._bug.done():
            self._bug.set_exception(error)

    def _request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: "asyncio.Task[None]"
    ) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        size = self._settings.max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)

    # ---- requests

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0].rstrip("/")
        is_anthropic = path.startswith("/v1/messages")
        try:
            answer = self._answers.get((request.method, path))
            if answer is None:
                return self._page(request.method, path)
            return await answer(self._parts, request, await _body(request))
        except RequestRefused as error:
            refused = error
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone
        except Exception:  # the boundary to programs of others, whose requests may be anything
            logger.exception("a request to %s failed", path)
            refused = RequestRefused(500, "internal error of the gateway")
        return await _refused(request, refused, is_anthropic=is_anthropic)

    def _page(self, method: str, path: str) -> web.Response:
        if path in ("/health", "/health_generate", ""):
            return web.Response()
        if method in ("GET", "HEAD") and path in self._pages:
            return json_response(self._pages[path]())
        if method == "GET" and path.startswith("/v1/models/"):
            return json_response(self._model())
        raise RequestRefused(404, f"{method} {path}: asyncrl's gateway has no such endpoint")

    def _model_info(self) -> object:
        card = self._settings.card
        return {
            "model_path": card.path,
            "tokenizer_path": card.path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": str(self._weights().version),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": card.model_type,
            "architectures": card.architectures,
        }

    def _model(self) -> dict[str, object]:
        card = self._settings.card
        return {
            "id": card.name,
            "object": "model",
            "created": self._parts.created,
            "owned_by": "asyncrl",
            "root": card.name,
            "parent": None,
            "max_model_len": card.max_context_len,
        }

    def _models(self) -> object:
        return {"object": "list", "data": [self._model()]}

    def _workers(self) -> object:
        url = f"http://{self._host}:{self._port}"
        worker = {"id": "gateway", "url": url, "model_id": self._settings.card.name, "is_healthy": True, "load": 0}
        return {"workers": [{**worker, "worker_type": "regular", "priority": 50, "cost": 1.0}], "total": 1}


def _reachable(host: str) -> str:
    """Return the address of this machine where ``host`` means all of its addresses."""
    if host not in ("0.0.0.0", "::"):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


type _Answers = Callable[[Parts, web.BaseRequest, Body], Awaitable[web.StreamResponse]]


async def _body(request: web.BaseRequest) -> Body:
    """Read the body of a request.  Raises RequestRefused."""
    if request.content.is_eof():  # it came with the headers, as nearly always
        return body_of(await _whole(request))
    try:
        async with Deadline(_BODY_S):
            return body_of(await _whole(request))
    except TimeoutError as error:
        raise RequestRefused(408, f"the body of the request did not arrive within {_BODY_S:g} s") from error


async def _whole(request: web.BaseRequest) -> bytes:
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestRefused(413, f"the body of the request is too large: {first_line(error)}") from error


async def _abort_request(parts: Parts, request: web.BaseRequest, body: Body) -> web.StreamResponse:
    """Answer ``POST /abort_request``: end the requests of this client's episode with this id."""
    episode = parts.episodes.find(request.headers)
    if rid := text(body, "rid"):
        episode.abort(rid)
    return web.Response()


async def _refused(request: web.BaseRequest, refused: RequestRefused, *, is_anthropic: bool) -> web.StreamResponse:
    """Answer with the refusal; as the last event, if the response is one of events and has begun."""
    if (events := Events.begun(request)) is not None:
        try:
            await events.refuse(refused, is_anthropic=is_anthropic)
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone
        return events.response
    # Clients of OpenAI and Anthropic repeat requests that end with 5xx, also where that cannot help.
    headers = {"Content-Type": "application/json", "x-should-retry": "false"}
    return web.Response(body=encoded(refused, is_anthropic=is_anthropic), status=refused.status, headers=headers)

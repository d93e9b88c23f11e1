"""A gateway on a real socket with answers from a script."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from asyncrl.episodes import EpisodeOutcome
from asyncrl.rollouts.gateway.parsing import AnswerParser
from asyncrl.rollouts.gateway.parts import ModelCard
from asyncrl.rollouts.gateway.server import GatewaySettings, HttpGateway
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.types import FinishReason, SamplingParams
from tests.unit.rollouts.gateway.templates import QWEN25, tokenizer_with
from tests.unit.rollouts.turns import SAMPLING, WEIGHTS, ScriptedTurns, start_of

type Script = Callable[[int, str, SamplingParams], str | Exception]
"""The number of a call and the text before it, to the text of the answer with its end token."""

ENDS = ("<|im_end|>", "<|user|>", "<|observation|>", "<|eot_id|>", "</s>")


class World:
    """A gateway, and the episodes that a test opens."""

    def __init__(
        self, folder: Path, template: str = QWEN25, *, parser: AnswerParser | None = None, **limits: Any
    ) -> None:
        self.tokenizer = tokenizer_with(folder, template)
        (self.im_end,) = self.tokenizer.encode("<|im_end|>")
        self.limits = EpisodeLimits(**{"vocabulary_size": 1000, "max_context_len": 4096, **limits})
        self.gateway = HttpGateway(
            GatewaySettings(
                card=ModelCard(name="tiny", path="/models/tiny", max_context_len=self.limits.max_context_len),
                end_tokens=tuple(self.tokenizer.encode(end)[0] for end in ENDS),
                max_body_bytes=1 << 20,
            ),
            self.tokenizer,
            lambda: WEIGHTS,
            parser,
        )

    def episode(
        self,
        script: Script | Sequence[str],
        prompt: str = "",
        *,
        name: str = "e0",
        sampling: SamplingParams = SAMPLING,
        gate: asyncio.Event | None = None,
        late: asyncio.Event | None = None,
        finish: FinishReason = FinishReason.STOP,
    ) -> "Client":
        """Open an episode."""
        encode, decode = self.tokenizer.encode, self.tokenizer.decode

        def tokens(call: int, token_ids: tuple[int, ...], asked: SamplingParams) -> Sequence[int] | Exception:
            answer = script(call, decode(token_ids), asked) if callable(script) else script[call]
            return answer if isinstance(answer, Exception) else encode(answer)

        turns = ScriptedTurns(tokens, gate=gate, late=late, finish=finish)
        start = start_of(encode(prompt) if prompt else (1,), text=prompt, name=name, sampling=sampling)
        session = EpisodeSession(start, turns, self.limits, decode)
        return Client(self, session, turns, self.gateway.open(session))


class Client:
    """An open episode with a plain HTTP client."""

    def __init__(self, world: World, session: EpisodeSession, turns: ScriptedTurns, address: EpisodeAddress) -> None:
        self.world = world
        self.session = session
        self.turns = turns
        self.address = address

    @property
    def url(self) -> str:
        """Address of the gateway, without a key."""
        return f"http://{self.address.host}:{self.address.port}"

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.address.key}"}

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and body of the answer; events as a list."""
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body, headers=self.bearer if headers is None else headers) as response,
        ):
            if response.content_type == "text/event-stream":
                return response.status, [line async for line in events(response)]
            return response.status, await response.json() if await response.read() else None

    async def get(self, path: str) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return response.status, await response.json() if await response.read() else None

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The message that answers a chat."""
        status, body = await self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, body
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    def seen(self, call: int) -> str:
        """The text that an engine got in a call."""
        return self.world.tokenizer.decode(self.turns.asked[call][0])

    def outcome(self) -> EpisodeOutcome:
        return self.session.outcome()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").strip()


def run(test: Callable[[World], Coroutine[Any, Any, None]], world: World) -> None:
    """Run a test while the gateway is open."""

    async def opened() -> None:
        async with asyncio.timeout(20), world.gateway:
            await test(world)

    asyncio.run(opened())

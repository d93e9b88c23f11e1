"""Requests for tests of engines, and the answers to them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.protocols import LoadProbe, RolloutEngine
from asyncrl.types import Chunk, EngineLoad, FinishReason, Request, SamplingParams
from tests.sglang_server import Place

PROMPT = (5, 9, 33, 12, 60)


@dataclass(frozen=True, slots=True)
class Answer:
    finish: FinishReason
    chunks: tuple[Chunk, ...]
    loads: tuple[EngineLoad, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprob for chunk in self.chunks for logprob in chunk.logprobs)


def ask(place: Place, seed: int, max_new_tokens: int, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Request:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **sampling}
    return Request(
        request_id=f"request-{seed}",
        token_ids=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **params),
        seed=seed,
        weights=place.weights,
    )


async def answer(engine: RolloutEngine, request: Request) -> Answer:
    chunks: list[Chunk] = []
    finish = await engine.generate(request, chunks.append)
    return Answer(finish, tuple(chunks))


async def answers(engine: RolloutEngine, requests: Sequence[Request]) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(answer(engine, request)) for request in requests]
    return [task.result() for task in running]


async def interrupted(
    engine: RolloutEngine, requests: Sequence[Request], after_s: float = 0.0, probe: LoadProbe | None = None
) -> list[Answer]:
    """Interrupt ``requests`` ``after_s`` after each of them has its first token; the answers until then.

    With ``probe``, wait until it has seen all of them at work: a server reports its load some steps late.
    """
    chunks: list[list[Chunk]] = [[] for _ in requests]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(request, mine.append))
            for request, mine in zip(requests, chunks, strict=True)
        ]
        await until(lambda: all(chunks))
        await asyncio.sleep(after_s)
        loads = await full(probe, len(requests)) if probe else ()
        await engine.interrupt()
        assert all(task.done() for task in running)
    return [Answer(task.result(), tuple(mine), loads) for task, mine in zip(running, chunks, strict=True)]


async def full(probe: LoadProbe, running: int) -> tuple[EngineLoad, ...]:
    """Ask ``probe`` until ``running`` requests run; its last answer, also after 10 s."""
    for _ in range(100):
        loads = await probe.loads()
        if sum(load.running for load in loads) == running:
            break
        await asyncio.sleep(0.1)
    return loads


async def emptied(place: Place) -> None:
    """Wait until the server reports that nothing runs, which is a little after the last answer."""
    async with asyncio.timeout(5.0):
        while await place.num_running():  # noqa: ASYNC110 -- a remote server can only be polled
            await asyncio.sleep(0.02)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not is_true():  # noqa: ASYNC110 -- it depends on a remote server
            await asyncio.sleep(0.01)

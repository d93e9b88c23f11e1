"""Interruptions of the engine client, on a virtual clock."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest

from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.payload import read_event
from asyncrl.errors import EngineRejected
from asyncrl.types import FinishReason, Request, SamplingParams, Weights
from tests.virtual_time import run_virtually

REQUEST = Request(
    request_id="r1",
    token_ids=(1, 2),
    sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9),
    seed=1,
    weights=Weights(version=4, step=4),
)


class RefusingHttp:
    """A client of a server that aborts a request, and refuses the abort some turns of the loop later."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._aborted = asyncio.Event()

    async def stream(
        self, url: str, body: Any, idle_s: float, on_event: Callable[[Any], None], routing_key: str | None = None
    ) -> None:
        await self._aborted.wait()
        meta = {"id": "r1", "finish_reason": {"type": "abort"}, "weight_version": "4", "completion_tokens": 1}
        event = {"output_ids": [7], "meta_info": {**meta, "output_token_logprobs": [[-1.5, 7, None]]}}
        on_event(read_event(orjson.dumps(event)))

    async def command(self, url: str, body: Any, timeout_s: float) -> None:
        self._aborted.set()
        for _ in range(self._num_turns):
            await asyncio.sleep(0)
        raise EngineRejected(f"{url} answered 400")


@pytest.mark.parametrize("num_turns", range(12))
def test_an_interruption_ends_although_the_abort_is_refused_in_that_moment(num_turns: int) -> None:
    async def main() -> FinishReason:
        http = cast(HttpClient, RefusingHttp(num_turns))
        engine = SGLangEngine(http, ("http://a",), router_url=None, request_timeout_s=50.0)
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(engine.generate(REQUEST, lambda chunk: None))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(10.0):
                await engine.interrupt()
        return answer.result()

    reason, seconds = run_virtually(main())
    assert reason is FinishReason.ABORT
    assert seconds < 1.0

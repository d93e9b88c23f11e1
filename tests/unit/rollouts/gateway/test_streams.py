"""Streams that end before their answers do: each client gets one last event that says why."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from tests.unit.rollouts.gateway.world import Client, World, run

QUESTION = [{"role": "user", "content": "What is the weather?"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "It rains"},
    "/v1/completions": {"prompt": "It rains"},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 64},
}
streams = pytest.mark.parametrize("path", REQUESTS)


class Stream:
    """A stream of which the first event was read."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = path
        self.has_begun = asyncio.Event()
        self.lines: list[bytes] = []

    async def read(self) -> None:
        body = {**REQUESTS[self._path], "stream": True, "rid": "mine"}
        url = self._client.url + self._path
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=self._client.bearer) as response:
            async for line in response.content:
                self.lines.append(line)
                self.has_begun.set()

    @property
    def data(self) -> list[Any]:
        found = [line.removeprefix(b"data: ").strip() for line in self.lines if line.startswith(b"data: ")]
        return [orjson.loads(each) for each in found if each != b"[DONE]"]


async def begun(client: Client, path: str, tasks: asyncio.TaskGroup) -> Stream:
    stream = Stream(client, path)
    tasks.create_task(stream.read())
    await stream.has_begun.wait()
    return stream


@streams
def test_a_stream_that_has_begun_names_the_end_of_its_episode(tmp_path: Path, path: str) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains all day.<|im_end|>"], late=asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            stream = await begun(client, path, tasks)
            world.gateway.close(client.address)
        assert "the episode is over" in stream.data[-1]["error"]["message"]

    run(test, World(tmp_path))


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_has_begun_ends_when_its_client_aborts_it(tmp_path: Path, path: str) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains all day.<|im_end|>"], late=asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            stream = await begun(client, path, tasks)
            await client.post("/abort_request", {"rid": "mine"})
        if path == "/generate":
            assert stream.data[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert stream.data[-1]["error"]["message"] == "Abort by client"

    run(test, World(tmp_path))

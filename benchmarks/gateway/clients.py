"""The clients of ``benchmarks.gateway``: each always has a request in progress, turn after turn, episode after episode.

Asks for episodes on the standard output, a client's number a line, and reads their keys from the standard input.
"""

import asyncio
import sys
from typing import Any

import aiohttp
import orjson
import uvloop

OBSERVATION = "The tool returned this list of words and numbers: " + " ".join(str(number) for number in range(40))
"""The message of each client between two turns."""


class Keys:
    """The keys of new episodes."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[str]] = {}

    async def new(self, client: int) -> str:
        """Ask for an episode and return its key."""
        self._waiting[client] = asyncio.get_running_loop().create_future()
        sys.stdout.write(f"{client}\n")
        sys.stdout.flush()
        return await self._waiting[client]

    async def read(self) -> None:
        """Read keys until there are no more."""
        lines = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(lines)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while line := await lines.readline():
            client, key = line.split()
            self._waiting.pop(int(client)).set_result(key.decode())


class Session:
    """One episode of one client."""

    def __init__(self, http: aiohttp.ClientSession, url: str, api: str, client: int, key: str) -> None:
        self._http = http
        self._headers = {"Authorization": f"Bearer {key}", "x-api-key": key, "Content-Type": "application/json"}
        self._url = f"{url}/{'generate' if api == 'generate' else f'v1/{PATHS[api]}'}"
        self._api = api
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": f"{client}"}]
        self._ids = [client % 200 + 1]

    async def turn(self) -> None:
        """Ask for a turn and add its answer and an observation to the history."""
        if self._api == "generate":
            answer = await self._post({"input_ids": self._ids, "return_logprob": True})
            self._ids += answer["output_ids"] + [7] * 60
            return
        more = {"max_tokens": 100_000, "model": "model"}
        answer = await self._post({"messages": self._messages, **more})
        said = answer["choices"][0]["message"] if self._api == "chat" else {k: answer[k] for k in ("role", "content")}
        self._messages += [said, {"role": "user", "content": OBSERVATION}]

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._http.post(self._url, data=orjson.dumps(body), headers=self._headers) as response:
            payload = await response.read()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {payload[:500]!r}")
            return orjson.loads(payload)


PATHS = {"chat": "chat/completions", "messages": "messages"}


async def run(api: str, port: int, clients: int, turns: int) -> None:
    """Run all clients until cancelled."""
    keys = Keys()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()) as http,
        asyncio.TaskGroup() as tasks,
    ):

        async def client(number: int) -> None:
            length = 1 + number % turns  # the first episodes are of all lengths, so that the contexts are mixed at once
            while True:
                session = Session(http, f"http://127.0.0.1:{port}", api, number, await keys.new(number))
                for _ in range(length):
                    await session.turn()
                length = turns

        tasks.create_task(keys.read(), name="keys")
        for number in range(clients):
            tasks.create_task(client(number), name=f"client-{number}")


if __name__ == "__main__":
    uvloop.run(run(**orjson.loads(sys.argv[1])))

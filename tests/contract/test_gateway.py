"""The gateway answers ``POST /generate`` as the real SGLang does: the same fields of the same types, and errors."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from asyncrl.types import FinishReason
from tests.sglang_server import BEARER, Servers
from tests.unit.rollouts.gateway.world import World, run

pytestmark = pytest.mark.timeout(1200)

_ADDED = {"token_versions"}
"""Fields that only asyncrl adds; its plug-in for SGLang adds the same."""
_VARYING = {"response_sent_to_client_ts", "cached_tokens_details"}
"""Fields that some answers of the real server lack, or that are null unless its prefix cache was hit."""
PARAMS = {"temperature": 1.0, "max_new_tokens": 4}
SAME: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": [5, 6, 7], "sampling_params": PARAMS},
    "log-probs": {"input_ids": [5, 6, 7], "sampling_params": PARAMS, "return_logprob": True},
    "several": {"input_ids": [5, 6, 7], "sampling_params": {**PARAMS, "n": 2}},
    "batch": {"input_ids": [[5, 6], [7]], "sampling_params": PARAMS},
    "stream": {"input_ids": [5, 6, 7], "sampling_params": PARAMS, "stream": True, "return_logprob": True},
}
REFUSED: dict[str, dict[str, Any]] = {
    "nothing": {"sampling_params": PARAMS},
    "temperature": {"input_ids": [5], "sampling_params": {"temperature": -1.0}},
    "top_p": {"input_ids": [5], "sampling_params": {"top_p": 0.0}},
    "too long": {"input_ids": [5] * 9000, "sampling_params": PARAMS},
}


@pytest.mark.parametrize("name", SAME)
def test_answers_have_the_same_fields(servers: Servers, tmp_path: Path, name: str) -> None:
    theirs = asyncio.run(_post(servers.engine_url, SAME[name], BEARER))

    async def test(world: World) -> None:
        client = world.episode(lambda *_: "It rains in Paris", finish=FinishReason.LENGTH)
        ours = await _post(client.url, SAME[name], client.bearer)
        assert ours[0] == theirs[0] == 200
        assert set(_types(ours[1])) == set(_types(theirs[1]))

    run(test, World(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_errors_have_the_same_status_and_text(servers: Servers, tmp_path: Path, name: str) -> None:
    status, body = asyncio.run(_post(servers.engine_url, REFUSED[name], BEARER))

    async def test(world: World) -> None:
        client = world.episode(lambda *_: "It rains.")
        ours, found = await _post(client.url, REFUSED[name], client.bearer)
        assert ours == status == 400
        theirs = str(body["error"]["message"])
        common = "longer than the model's context length" if name == "too long" else theirs
        assert common in theirs
        assert common in found["error"]["message"]

    run(test, World(tmp_path))


async def _post(url: str, body: Mapping[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/generate", data=orjson.dumps(body), headers={**headers, "Content-Type": "application/json"})
        as response,
    ):  # fmt: skip
        payload = await response.read()
        if response.content_type != "text/event-stream":
            return response.status, orjson.loads(payload)
        lines = [line.removeprefix(b"data: ") for line in payload.split(b"\n\n") if line]
        assert lines[-1] == b"[DONE]"
        return response.status, orjson.loads(lines[-2])


def _types(value: Any, path: str = "") -> Iterator[str]:
    """The path and the type of each value; entries of a list share a path."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in _ADDED | _VARYING:
                yield from _types(each, f"{path}.{name}")
    elif isinstance(value, list):
        yield f"{path}: list"
        for each in value:
            yield from _types(each, f"{path}[]")
    else:
        yield f"{path}: {type(value).__name__}"

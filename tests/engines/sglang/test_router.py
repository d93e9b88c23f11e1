"""The real router in front of a stand-in for an engine that stops and starts again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import wait_for_router
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.router import listed
from asyncrl.engines.sglang.launch import RouterLaunch, router_command
from asyncrl.errors import EngineLost
from tests.ports import free_ports
from tests.sglang_server import KEY

AWAY_S = 4.0
"""Time without an engine: several health checks of the router."""
HEALTH_FLAGS = {"health-check-interval-secs": "1", "health-failure-threshold": "1", "health-success-threshold": "2"}
"""Flags of a router that soon gives an engine up and is slow to take it back."""
KEYLESS = ("/health", "/health_generate")
"""Paths that SGLang answers without a key."""
SCORED = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}}


@contextlib.asynccontextmanager
async def stand_in(port: int) -> AsyncIterator[None]:
    async def answer(request: web.Request) -> web.Response:
        if request.path not in KEYLESS and request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401)
        return web.json_response({"model_path": "m", "tp_size": 1, **SCORED})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def router(folder: Path, engine_port: int) -> Iterator[str]:
    """The real router, with one engine; yields its URL."""
    port, prometheus_port = free_ports(2)
    launch = RouterLaunch(
        worker_urls=(f"http://127.0.0.1:{engine_port}",),
        port=port,
        key=KEY,
        prometheus_port=prometheus_port,
        flags=HEALTH_FLAGS,
    )
    command = router_command(launch)
    process = ServerProcess("router", command.arguments, command.environment, folder / "router.log", command.key)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def test_a_restarted_engine_gets_requests_before_and_after_the_router_notices_it(tmp_path: Path) -> None:
    async def run(port: int, router_url: str) -> None:
        url = f"http://127.0.0.1:{port}"
        async with HttpClient(KEY) as http:
            engine = SGLangEngine(http, (url,), router_url=router_url, request_timeout_s=10.0)
            async with stand_in(port):
                await wait_for_router(http, router_url, (url,), 30.0)
                assert await engine.score((1, 2), 1) == (-0.5,)
            engine.leave(url)
            await asyncio.sleep(AWAY_S)
            async with stand_in(port):
                engine.join(url)
                with pytest.raises(EngineLost, match="no_available_workers"):
                    await http.ask(f"{router_url}/generate", {"input_ids": [1, 2], "sampling_params": {}}, 10.0)
                assert await engine.score((1, 2), 1) == (-0.5,)  # directly, not through the router
                await engine.route(url)
                assert await engine.score((1, 2), 1) == (-0.5,)  # through the router, which has noticed
                assert await http.ask(f"{router_url}/generate", {"input_ids": [1, 2], "sampling_params": {}}, 10.0)

    (port,) = free_ports(1)
    with router(tmp_path, port) as router_url:
        asyncio.run(run(port, router_url))


def test_the_router_sends_requests_to_an_engine_that_moved_and_forgets_its_earlier_url(tmp_path: Path) -> None:
    async def run(ports: list[int], router_url: str) -> None:
        before, after = (f"http://127.0.0.1:{port}" for port in ports)
        async with HttpClient(KEY) as http:
            engine = SGLangEngine(http, (before,), router_url=router_url, request_timeout_s=10.0)
            async with stand_in(ports[0]):
                await wait_for_router(http, router_url, (before,), 30.0)
            engine.leave(before)
            engine.move(before, after)
            async with stand_in(ports[1]):
                engine.join(after)
                await engine.route(after)
                assert await http.ask(f"{router_url}/generate", {"input_ids": [1, 2], "sampling_params": {}}, 10.0)
                assert await engine.score((1, 2), 1) == (-0.5,)
                assert list(await listed(http, router_url)) == [after]
                (worker,) = (await http.look(f"{router_url}/workers", 5.0))["workers"]
                assert worker["model_id"] == "m"  # the router has the key, so it can ask the engine

    ports = free_ports(2)
    with router(tmp_path, ports[0]) as router_url:
        asyncio.run(run(ports, router_url))

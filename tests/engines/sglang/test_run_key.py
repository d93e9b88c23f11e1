"""Real engines and routers want the key of their run, show it nowhere, and are never taken for those of another run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import wait_for_router, wait_for_server
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.launch import RouterLaunch, router_command
from asyncrl.errors import EngineError, ForeignServer
from tests.ports import free_ports
from tests.sglang_server import BEARER, KEY, Servers, main_process

pytestmark = pytest.mark.timeout(1080)

WRONG = {"Authorization": "Bearer wrong"}


async def status(url: str, headers: dict[str, str]) -> int:
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url) as answer:
        return answer.status


@pytest.mark.parametrize("headers", [{}, WRONG], ids=["no key", "wrong key"])
def test_engine_and_router_answer_only_the_run(servers: Servers, headers: dict[str, str]) -> None:
    engine, router = servers.engine_url, servers.router_url
    for url in (f"{engine}/model_info", f"{engine}/server_info", f"{engine}/v1/models", f"{router}/workers"):
        assert asyncio.run(status(url, headers)) == 401
        assert asyncio.run(status(url, BEARER)) == 200


def test_an_engine_is_not_taken_for_one_of_another_run(servers: Servers) -> None:
    async def ready(key: str) -> None:
        async with HttpClient(key) as http:
            await wait_for_server(http, servers.engine_url, 30.0)
            await wait_for_router(http, servers.router_url, (servers.engine_url,), 30.0)

    asyncio.run(ready(KEY))
    with pytest.raises(ForeignServer, match="refuses this run's key"):
        asyncio.run(ready("key-of-another-run"))


def test_the_key_is_in_no_command_line_environment_log_or_answer(servers: Servers) -> None:
    server = main_process(servers)
    for process in (server, *server.children(recursive=True)):
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in process.environ().values()
    for log in servers.model.parent.glob("*.log"):
        assert KEY not in log.read_text()

    async def info() -> object:
        async with HttpClient(KEY) as http:
            return await http.look(f"{servers.engine_url}/server_info", 30.0)

    told = asyncio.run(info())
    assert isinstance(told, dict)
    assert told["api_key"] == "***"
    assert KEY not in str(told)


@contextlib.asynccontextmanager
async def stand_in(seen: list[str | None], answers: int) -> AsyncIterator[str]:
    """A server of another program, which answers everything with the same status."""

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({}, status=answers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("answers", [200, 404, 500])
def test_a_server_without_a_key_is_foreign_and_never_sees_ours(answers: int) -> None:
    seen: list[str | None] = []

    async def run() -> None:
        async with stand_in(seen, answers) as url, HttpClient(KEY) as http:
            with pytest.raises(ForeignServer, match=f"answers {answers} to a wrong key") as raised:
                await wait_for_server(http, url, 10.0)
            assert "\n" not in str(raised.value)

    asyncio.run(run())
    assert len(seen) == 1
    assert seen[0] is not None
    assert KEY not in seen[0]


def test_a_router_of_another_run_is_foreign_and_its_metrics_are_on_loopback(tmp_path: Path) -> None:
    port, prometheus_port = free_ports(2)
    launch = RouterLaunch(worker_urls=(), port=port, key="key-of-another-run", prometheus_port=prometheus_port)
    command = router_command(launch)
    process = ServerProcess("router", command.arguments, command.environment, tmp_path / "router.log", command.key)

    async def run() -> None:
        async with HttpClient("key-of-another-run") as http:
            await wait_for_router(http, f"http://127.0.0.1:{port}", (), 30.0)
        async with HttpClient(KEY) as http:
            with pytest.raises(ForeignServer):
                await wait_for_router(http, f"http://127.0.0.1:{port}", (), 30.0)
            with pytest.raises(EngineError, match="401"):
                await http.ask(f"http://127.0.0.1:{port}/generate", {"input_ids": [1]}, 10.0)

    try:
        asyncio.run(run())
        listening = [
            each.laddr for each in psutil.Process(process.pid).net_connections("tcp") if each.status == "LISTEN"
        ]
        assert sorted(listening) == sorted([("127.0.0.1", port), ("127.0.0.1", prometheus_port)])
    finally:
        process.stop()

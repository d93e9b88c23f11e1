"""An SGLang server names the plug-ins of ours that it has, and serves without them."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl, wait_for_server
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.installed_plugins import EnginePlugins, missing_warning
from asyncrl.engines.sglang.launch import ServerLaunch, server_command
from tests.ports import free_ports
from tests.sglang_server import KEY, START_S, Servers

pytestmark = pytest.mark.timeout(2 * START_S)  # starts two servers, if no test before it has started the first one


@pytest.fixture
def url_without_plugins(servers: Servers, tmp_path: Path) -> Iterator[str]:
    """The URL of another server that has none of our plug-ins but the platform, which a CPU needs."""
    port, nccl_port = free_ports(2)
    command = server_command(
        ServerLaunch(
            model_path=servers.model, port=port, key=KEY, nccl_port=nccl_port, device="cpu", dtype="float32", seed=1
        )
    )
    environment = {**command.environment, "SGLANG_PLUGINS": "asyncrl_cpu"}
    with contextlib.ExitStack() as stack:
        process = ServerProcess("server without plug-ins", command.arguments, environment, tmp_path / "server.log", KEY)
        stack.callback(process.stop)
        yield f"http://127.0.0.1:{port}"


async def plugins_of(url: str) -> EnginePlugins:
    async with HttpClient(KEY) as http:
        await wait_for_server(http, url, START_S)
        return await EngineControl(http, url, timeout_s=90.0).plugins()


def test_an_engine_with_our_plug_ins_names_them(servers: Servers) -> None:
    said = asyncio.run(plugins_of(servers.engine_url))
    assert said == EnginePlugins(active=("direct", "memory_saver", "routes", "stamps"), refusals={})


def test_an_engine_without_our_plug_ins_is_ready_and_has_none(url_without_plugins: str) -> None:
    said = asyncio.run(plugins_of(url_without_plugins))
    assert said == EnginePlugins(refusals={})
    warning = missing_warning({"sglang-0": said}, ("stamps", "direct"))
    assert warning is not None
    assert "asyncrl_direct is not in sglang-0" in warning

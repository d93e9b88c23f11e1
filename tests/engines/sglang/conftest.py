"""One real SGLang server and router for all tests of this folder that need one."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.sglang_server import Servers, open_sglang, start_servers


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The server and router, started by the first test that asks for them."""
    with start_servers(tmp_path_factory.mktemp("sglang")) as servers:
        yield servers


@pytest.fixture
def restored_servers(servers: Servers) -> Iterator[Servers]:
    """The same servers, whose first weights, scaled, are published again after a test that publishes others."""
    yield servers

    async def restore() -> None:
        async with open_sglang(servers) as place:
            await place.publish()

    asyncio.run(restore())

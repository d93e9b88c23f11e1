"""The two places in which a promise is tested: the fake engine, and the real SGLang behind its router."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from asyncrl.engines.fake import FakeEngine, FakeUpdater
from asyncrl.types import Weights
from tests.sglang_server import Place, Servers, open_sglang, start_servers

OpenPlace = Callable[[], contextlib.AbstractAsyncContextManager[Place]]


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server and router for all tests of this folder."""
    with start_servers(tmp_path_factory.mktemp("contract")) as servers:
        yield servers


@pytest.fixture(params=["fake", "sglang"])
def open_place(request: pytest.FixtureRequest) -> OpenPlace:
    """A function that opens a place inside the test's event loop."""
    if request.param == "fake":
        return open_fake
    servers: Servers = request.getfixturevalue("servers")
    return lambda: open_sglang(servers)


@contextlib.asynccontextmanager
async def open_fake() -> AsyncIterator[Place]:
    engine = FakeEngine(lambda request: request.sampling.max_new_tokens + 1, seconds_per_token=0.001)

    async def num_running() -> int:
        return engine.busy

    yield Place(engine=engine, updater=FakeUpdater(engine), num_running=num_running, weights=Weights(version=0, step=0))

"""The supervisor's view of the simulated processes."""

import asyncio

import pytest

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.errors import ServerFailed
from asyncrl.sim.faults.process import EngineProcess
from asyncrl.sim.faults.world.collective import Collectives
from asyncrl.sim.faults.world.engine import SimEngine
from asyncrl.sim.faults.world.network import Network
from asyncrl.sim.faults.world.plan import Weather, drawn
from tests.virtual_time import run_virtually


def test_the_death_of_an_engine_that_nobody_watched_yet_is_noticed() -> None:
    async def main() -> None:
        weather = Weather(1, lambda: 0.0, lambda line: None)
        network = Network(weather)
        engine = SimEngine(0, drawn(0)[0], network, Collectives(weather, lambda number: ""), lambda line: None)
        engine.start()
        engine.die()
        async with HttpClient(open_session=network.session) as http:
            process = EngineProcess(engine, http, weather)
            with pytest.raises(ServerFailed, match="engine 0 ended"):
                async with asyncio.timeout(5.0):
                    await process.watch()

    assert run_virtually(main())[1] < 1.0

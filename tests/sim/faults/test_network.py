"""The simulated network: connections that break while a request is on its way, or an answer."""

import asyncio
from dataclasses import replace

import orjson
import pytest

from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.collective import Collectives
from asyncrl.sim.faults.world.engine import SimEngine
from asyncrl.sim.faults.world.network import Network
from asyncrl.sim.faults.world.plan import Fault, Weather, drawn
from asyncrl.sim.faults.world.tokens import PROMPT_TOKENS
from tests.virtual_time import run_virtually

BODY = {"rid": "r", "input_ids": [1] * PROMPT_TOKENS, "sampling_params": {"sampling_seed": 11, "max_new_tokens": 12}}
REQUEST = b"POST /generate HTTP/1.1\r\n\r\n%b" % orjson.dumps(BODY)


def engine_in(weather: Weather) -> tuple[SimEngine, Network]:
    """Return a started engine, which generates a token in 0.3 s, and its network."""
    network = Network(weather)
    setting = replace(drawn(0)[0], chunk=1, token_s=0.3, longest=12, aborts_on_disconnect=True)
    engine = SimEngine(0, setting, network, Collectives(weather, lambda number: ""), lambda line: None)
    engine.start()
    return engine, network


def test_a_request_to_a_dead_engine_never_reaches_the_next_process() -> None:
    async def main() -> list[int]:
        weather = Weather(1, loop_time, lambda line: None)
        engine, network = engine_in(weather)
        transport, _ = await network.connect(asyncio.Protocol, engine.netloc)
        partition = Fault(number=0, kind="partition", at=loop_time(), where=0, amount=0.6)
        weather.begin(partition)
        transport.write(REQUEST)
        await asyncio.sleep(1.0)
        engine.die()
        engine.start()
        found = []
        while loop_time() < partition.at + partition.seconds + 2.0:
            await asyncio.sleep(0.1)
            found.append(engine.num_requests)
        return found

    assert set(run_virtually(main())[0]) == {0}


@pytest.mark.parametrize("kind", ["cut", "cut_by_fin"])
def test_an_engine_notices_that_a_connection_was_cut(kind: str) -> None:
    async def main() -> list[int]:
        weather = Weather(1, loop_time, lambda line: None)
        engine, network = engine_in(weather)
        transport, _ = await network.connect(asyncio.Protocol, engine.netloc)
        weather.begin(Fault(number=0, kind=kind, at=0.0, where=0, amount=0.5))
        transport.write(REQUEST)
        await asyncio.sleep(0.1)
        found = [engine.num_requests]
        await asyncio.sleep(0.3)
        return [*found, engine.num_requests]

    assert run_virtually(main())[0] == [1, 0]

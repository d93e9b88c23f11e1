"""The simulated engine while its scheduler waits for other members of a group."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from asyncrl.sim.faults.world.collective import TRAINER, Collectives
from asyncrl.sim.faults.world.engine import FRONT_S, SimEngine
from asyncrl.sim.faults.world.network import Network
from asyncrl.sim.faults.world.plan import Weather, drawn
from tests.virtual_time import run_virtually

GROUP = {"group_name": "weights-0", "world_size": 2}


def played(act: Callable[[SimEngine, Collectives], None]) -> list[str]:
    """Tell an engine to join a group and then to answer a probe, act, and return what it has answered, in order."""
    answered: list[str] = []

    async def main() -> None:
        weather = Weather(1, lambda: 0.0, lambda line: None)
        collectives = Collectives(weather, lambda number: engine.netloc)
        setting = replace(drawn(0)[0], has_direct=True)
        engine = SimEngine(0, setting, Network(weather), collectives, lambda line: None)
        engine.start()
        collectives.serve("weights-0")

        def note(name: str, status: int, answer: Any) -> None:
            answered.append(name)

        for name in ("init_weights_update_group", "server_info", "health"):
            engine.command("POST", f"/{name}", GROUP, partial(note, name))
        await asyncio.sleep(10.0)
        answered.append("-")
        act(engine, collectives)
        await asyncio.sleep(2 * FRONT_S)
        answered.append("up" if engine.is_up else "down")

    run_virtually(main())
    return answered


def test_commands_wait_until_the_group_has_formed() -> None:
    told = played(lambda engine, collectives: collectives.join("weights-0", 2, TRAINER, lambda error: None))
    assert told == ["health", "-", "init_weights_update_group", "server_info", "up"]


def test_commands_wait_until_the_group_is_given_up() -> None:
    told = played(lambda engine, collectives: collectives.abandon("weights-0"))
    assert told == ["health", "-", "init_weights_update_group", "server_info", "up"]


def test_an_engine_without_its_scheduler_answers_nothing_more_and_ends() -> None:
    assert played(lambda engine, collectives: engine.lose_scheduler()) == ["health", "-", "down"]

"""The simulated engine while its scheduler waits for other members of a group, and after it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from asyncrl.engines.sglang.client.machine_probes import GONE_AFTER_S
from asyncrl.event_loop import loop_time
from asyncrl.sim.faults.world.collective import TRAINER, Collectives
from asyncrl.sim.faults.world.engine import FRONT_S, REPORTED_S, SimEngine
from asyncrl.sim.faults.world.network import NO_ROUTE_S, Connection, Network
from asyncrl.sim.faults.world.plan import Fault, Weather, drawn
from asyncrl.sim.faults.world.tokens import PROMPT_TOKENS, length_of, token_of
from tests.virtual_time import run_virtually

GROUP = {"group_name": "weights-0", "world_size": 2}
BODY = orjson.dumps(GROUP)


def engine_of(*, has_direct: bool, faults: Sequence[Fault] = ()) -> tuple[SimEngine, Collectives]:
    """Return a started engine, whose trainer serves the store of ``GROUP``, and the collectives."""
    weather = Weather(1, loop_time, lambda line: None)
    for fault in faults:
        asyncio.get_running_loop().call_at(fault.at, weather.begin, fault)
    collectives = Collectives(weather, lambda number: engine.netloc)
    setting = replace(drawn(0)[0], has_direct=has_direct, chunk=2, token_s=0.3, longest=12)
    engine = SimEngine(0, setting, Network(weather), collectives, lambda line: None)
    engine.start()
    collectives.serve("weights-0")
    return engine, collectives


def played(act: Callable[[SimEngine, Collectives], None]) -> list[str]:
    """Tell an engine to join a group and then to answer a probe, act, and return what it has answered, in order."""
    answered: list[str] = []

    async def main() -> None:
        engine, collectives = engine_of(has_direct=True)

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


class Client:
    """A connection that keeps the tokens which the engine sends."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_ends = 0

    def is_closing(self) -> bool:
        """See ``Connection.is_closing``."""
        return False

    def send(self, payload: bytes, *, is_last: bool = False) -> None:
        """See ``Connection.send``."""
        self.tokens += orjson.loads(payload)["output_ids"]
        self.num_ends += is_last


def asked(engine: SimEngine) -> Client:
    """Ask an engine for an answer, and return the connection."""
    client, sampling = Client(), {"sampling_seed": 3, "max_new_tokens": 5}
    engine.stream(
        cast(Connection, client), {"rid": "r", "input_ids": range(PROMPT_TOKENS), "sampling_params": sampling}
    )
    return client


def command(engine: SimEngine, *names: str) -> None:
    """Give commands whose answers do not matter."""
    for name in names:
        engine.command("POST", f"/{name}", GROUP, lambda status, answer: None)


def assert_whole(client: Client) -> None:
    """Check that the tokens of one answer came in order, with one end."""
    assert client.tokens == [token_of(3, place, 12) for place in range(len(client.tokens))]
    assert (len(client.tokens), client.num_ends) == (min(5, length_of(3, 12)), 1)


def test_tokens_that_fall_due_in_a_collective_and_then_in_a_pause_are_sent_once() -> None:
    async def main() -> Client:
        engine, collectives = engine_of(has_direct=True)
        client = asked(engine)
        await asyncio.sleep(0.3)
        command(engine, "init_weights_update_group", "pause_generation")
        await asyncio.sleep(0.6)
        collectives.join("weights-0", 2, TRAINER, lambda error: None)
        await asyncio.sleep(3.0)
        assert client.tokens == []
        command(engine, "continue_generation")
        await asyncio.sleep(10.0)
        return client

    assert_whole(run_virtually(main())[0])


def test_tokens_that_fall_due_in_a_collective_behind_a_whole_pause_are_sent_once() -> None:
    async def main() -> Client:
        engine, collectives = engine_of(has_direct=True)
        client = asked(engine)
        await asyncio.sleep(0.3)
        command(engine, "init_weights_update_group", "pause_generation", "continue_generation")
        await asyncio.sleep(0.6)
        collectives.join("weights-0", 2, TRAINER, lambda error: None)
        await asyncio.sleep(10.0)
        return client

    assert_whole(run_virtually(main())[0])


def test_tokens_of_an_engine_that_hangs_while_a_pause_ends_are_sent_once() -> None:
    async def main() -> Client:
        engine, collectives = engine_of(has_direct=True, faults=[hang])
        client = asked(engine)
        await asyncio.sleep(0.3)
        command(engine, "init_weights_update_group", "pause_generation")
        await asyncio.sleep(0.6)
        command(engine, "continue_generation")
        await asyncio.sleep(0.2)
        collectives.join("weights-0", 2, TRAINER, lambda error: None)
        await asyncio.sleep(20.0)
        return client

    hang = Fault(number=0, kind="hang", at=1.0, where=0, amount=0.5)
    assert_whole(run_virtually(main())[0])


def test_an_engine_without_the_plug_in_tries_a_closed_store_until_it_is_started_again() -> None:
    async def stuck(*, has_direct: bool) -> list[bool]:
        engine, collectives = engine_of(has_direct=has_direct)
        collectives.abandon_all()
        engine.command("POST", "/init_weights_update_group", GROUP, lambda status, answer: None)
        told = [engine.is_stuck]
        engine.start()
        return [*told, engine.is_stuck]

    assert run_virtually(stuck(has_direct=False))[0] == [True, False]
    assert run_virtually(stuck(has_direct=True))[0] == [False, False]


def test_an_engine_that_a_dead_trainer_frees_obeys_what_waited_for_it() -> None:
    async def main() -> list[str]:
        answered: list[str] = []
        engine, collectives = engine_of(has_direct=True)
        for name in ("weights-0", "weights-1"):
            asked = {**GROUP, "group_name": name}
            told = partial(_note_message, answered, name)
            engine.command("POST", "/init_weights_update_group", asked, told)
        collectives.abandon_all()
        await asyncio.sleep(10.0)
        return answered

    assert run_virtually(main())[0] == [
        "weights-0: the group was abandoned",
        "weights-1: the trainer serves no store",
    ]


def test_a_restarted_engine_is_no_member_of_the_group_of_its_predecessor() -> None:
    async def main() -> list[str]:
        answered: list[str] = []
        engine, collectives = engine_of(has_direct=True)
        command(engine, "init_weights_update_group")
        collectives.join("weights-0", 2, TRAINER, lambda error: None)
        engine.die()
        engine.start()
        collectives.send("weights-0", 3, 1, lambda: None)
        bucket = {**GROUP, "names": ["w0"], "load_format": "flattened_bucket", "weight_version": "3"}
        engine.command("POST", "/update_weights_from_distributed", bucket, partial(_note_message, answered, "bucket"))
        return [*answered, engine.label]

    assert run_virtually(main())[0] == ["bucket: no group weights-0", "default"]


def _note_message(answered: list[str], name: str, status: int, answer: Any) -> None:
    answered.append(f"{name}: {answer['message']}")


def test_a_machine_that_vanishes_closes_nothing_until_the_kernel_gives_it_up() -> None:
    async def main() -> tuple[list[float], float]:
        loop, died = asyncio.get_running_loop(), asyncio.Event()
        engine, _ = engine_of(has_direct=True)
        engine.on_death = died.set
        network = engine._network  # noqa: SLF001
        failed: list[float] = []

        async def ask(after_s: float) -> None:
            await asyncio.sleep(after_s)
            begun = loop.time()
            with pytest.raises(OSError):
                async with network.session({}).request("POST", f"{engine.url}/init_weights_update_group", data=BODY):
                    pass
            failed.append(round(loop.time() - begun, 1))

        loop.call_later(1.0, engine.vanish)
        async with asyncio.TaskGroup() as tasks:
            for after_s in (0.0, 2.0):
                tasks.create_task(ask(after_s))
        await died.wait()
        return failed, loop.time()

    (failed, reported), _ = run_virtually(main())
    assert failed == [NO_ROUTE_S, 1.0 + GONE_AFTER_S]
    assert reported == pytest.approx(1.0 + REPORTED_S)


def test_a_folder_that_is_gone_is_refused_and_the_engine_keeps_its_weights(tmp_path: Path) -> None:
    """A late command of an earlier update names a folder that has been removed, as SGLang then finds."""

    async def main() -> tuple[list[tuple[int, Any]], int]:
        engine, _ = engine_of(has_direct=True)
        engine.step = 3
        answers: list[tuple[int, Any]] = []
        body = {"model_path": str(tmp_path / "version-1"), "weight_version": "1"}
        engine.command("POST", "/update_weights_from_disk", body, lambda *answer: answers.append(answer))
        await asyncio.sleep(1.0)
        return answers, engine.step

    [(status, told)], step = run_virtually(main())[0]
    assert (status, told["success"]) == (400, False)
    assert "version-1" in told["message"]
    assert step == 3

"""Deadlines of peers: a loop that stood still loses no answer that has arrived, and a silent peer is late on time."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.errors import EngineTimeout
from asyncrl.event_loop import Deadline, PeerTimer, blocked_time, loop_time
from asyncrl.metrics.loop_lag import LoopLag, watch_loop
from asyncrl.sim.faults.loop import LifeLoop, run_life
from tests.virtual_time import run_virtually

ROOT = Path(__file__).parents[2]
SERVER = """
import asyncio
async def answer(reader, writer):
    while True:
        try:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
        except EOFError:
            return writer.close()
        if b"POST" in head:
            await reader.readexactly(2)
        await asyncio.sleep(60 if b"/silent" in head else 0.05)
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nContent-Type: application/json\\r\\n\\r\\n{}")
        await writer.drain()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""A server in another process, which answers after 0.05 s however long our loop is blocked."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def on_uvloop[T](main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def block(seconds: float) -> None:
    time.sleep(seconds)  # in a callback: the loop stands still


async def asked_while_blocked(url: str, ask: Callable[[HttpClient, str], Coroutine[Any, Any, Any]]) -> str:
    """Ask with a deadline of 0.2 s, block the loop for 0.5 s in ten callbacks, and return how the request ended."""

    async def ended(http: HttpClient) -> str:
        try:
            await ask(http, url)
        except EngineTimeout as error:
            return str(error)
        return "answered"

    async with HttpClient() as http, asyncio.TaskGroup() as tasks:
        await http.look(f"{url}/first", 5.0)  # the connection is open
        asking = tasks.create_task(ended(http))
        await asyncio.sleep(0.001)  # it is sent
        for _ in range(10):
            asyncio.get_running_loop().call_soon(block, 0.05)
        return await asking


def test_a_block_that_outlasts_the_deadline_does_not_hide_an_answer_that_has_arrived(url: str) -> None:
    assert on_uvloop(asked_while_blocked(url, lambda http, url: http.look(f"{url}/info", 0.2))) == "answered"


def test_streamed_answer_that_has_arrived_is_no_silence(url: str) -> None:
    async def ask(http: HttpClient, url: str) -> None:
        await http.stream(f"{url}/generate", {}, 0.2, lambda event: None)

    assert on_uvloop(asked_while_blocked(url, ask)) == "answered"


def test_connection_that_was_accepted_during_a_block_is_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.engines.sglang.client.http._CONNECT_S", 0.2)

    async def run() -> object:
        async with HttpClient() as http, asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(http.look(f"{url}/info", 5.0))
            for _ in range(6):
                asyncio.get_running_loop().call_soon(block, 0.1)
            return await asking

    assert on_uvloop(run()) == {}


def test_without_the_mend_uvloop_takes_the_answer_for_silence(url: str) -> None:
    async def ask(http: HttpClient, url: str) -> None:
        try:
            async with asyncio.timeout(0.2):
                await http.look(f"{url}/info", 5.0)
        except TimeoutError as error:
            raise EngineTimeout("silent") from error

    # On a busy machine an answer may arrive before the loop stands still.
    assert "silent" in [on_uvloop(asked_while_blocked(url, ask)) for _ in range(3)]


def test_a_silent_peer_is_late_after_its_time_and_the_time_of_the_block(url: str) -> None:
    async def run() -> float:
        async with HttpClient() as http:
            await http.look(f"{url}/first", 5.0)
            asyncio.get_running_loop().call_later(0.1, block, 0.4)
            began = time.monotonic()
            with pytest.raises(EngineTimeout, match=r"did not answer within 0\.2 s"):
                await http.look(f"{url}/silent", 0.2)
            return time.monotonic() - began

    assert 0.55 < on_uvloop(run()) < 3.0  # 0.1 s, the block of 0.4 s, of which 0.3 s were its own: these again


def test_a_block_that_ends_before_the_deadline_does_not_count_either() -> None:
    lag = LoopLag()

    async def run() -> float:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch_loop(lag))
            await asyncio.sleep(0.1)
            asyncio.get_running_loop().call_later(0.05, block, 0.4)
            began = time.monotonic()
            with blocked_time(lag.blocked_s), pytest.raises(TimeoutError):
                async with Deadline(0.5):
                    await asyncio.Event().wait()
            watching.cancel()
            return time.monotonic() - began

    assert 0.8 < on_uvloop(run()) < 3.0


def test_a_long_block_gives_a_peer_no_more_than_its_time_again() -> None:
    loop = LifeLoop()

    async def run() -> float:
        loop.call_later(1.0, loop.jump, 3600.0)  # a driver that was stopped for an hour
        with pytest.raises(TimeoutError):
            async with Deadline(5.0):
                await asyncio.Event().wait()
        return loop_time()

    try:
        assert run_life(loop, run()) == 3601.0 + 5.0
    finally:
        loop.drop()


def test_on_a_virtual_clock_a_deadline_is_exact() -> None:
    async def run() -> tuple[float, bool]:
        deadline = Deadline(7.0)
        with pytest.raises(TimeoutError):
            async with deadline:
                await asyncio.Event().wait()
        return loop_time(), deadline.expired()

    assert run_virtually(run()) == ((7.0, True), 7.0)


@pytest.mark.parametrize(("given_s", "end_s"), [(2.0, 3.0), (20.0, 21.0)])
def test_the_end_of_a_deadline_can_move_either_way(given_s: float, end_s: float) -> None:
    async def run() -> float:
        deadline = Deadline(10.0)
        asyncio.get_running_loop().call_later(1.0, lambda: deadline.give(given_s))
        with pytest.raises(TimeoutError):
            async with deadline:
                await asyncio.Event().wait()
        deadline.give(1.0)  # after its end
        return loop_time()

    assert run_virtually(run())[0] == end_s


def test_a_deadline_in_the_past_is_over_at_once() -> None:
    async def run() -> float:
        with pytest.raises(TimeoutError):
            async with Deadline(-5.0):
                await asyncio.Event().wait()
        return loop_time()

    assert run_virtually(run())[0] == 0.0


@pytest.mark.parametrize("seconds", [None, float("inf")])
def test_a_deadline_may_be_without_limit(seconds: float | None) -> None:
    async def run() -> None:
        async with Deadline(seconds):
            await asyncio.sleep(1e6)

    assert run_virtually(run())[1] == 1e6


def test_the_exception_of_the_block_and_a_cancellation_pass_through() -> None:
    async def run() -> None:
        with pytest.raises(KeyError):
            async with Deadline(1.0):
                raise KeyError("a bug")

        async def waits() -> None:
            async with Deadline(1.0):
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(waits())
            await asyncio.sleep(0.5)
            task.cancel()
        assert task.cancelled()

    assert run_virtually(run())[1] == 0.5


def test_an_answer_in_the_last_turns_counts() -> None:
    async def run() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(
            1.0, lambda: asyncio.get_running_loop().call_soon(answer.set_result, "in")
        )
        async with Deadline(1.0):
            return await answer

    assert run_virtually(run()) == ("in", 1.0)


@pytest.mark.parametrize("at_s", [0.5, 1.0])
def test_a_cancelled_timer_never_calls(at_s: float) -> None:
    async def run() -> list[str]:
        called: list[str] = []
        timer = PeerTimer(1.0, lambda: called.append("late"))
        asyncio.get_running_loop().call_later(at_s, timer.cancel)
        await asyncio.sleep(5.0)
        return called

    assert run_virtually(run())[0] == []


OWN_WAITS = {
    "asyncrl/buffer/journal/journal.py": "its own thread and the disk, in two waits",
    "asyncrl/engines/fake.py": "its time to generate",
    "asyncrl/engines/sglang/client/calls_in_flight.py": "no time limit",
    "asyncrl/event_loop.py": "Deadline itself",
    "asyncrl/outages.py": "its pause before the next attempt",
    "asyncrl/pipeline/sampling/open_episode.py": "no time limit",
    "asyncrl/pipeline/scheduling/prompt_queue.py": "no time limit",
    "asyncrl/rollouts/gateway/open_episodes.py": "no time limit",
    "asyncrl/rollouts/native.py": "in the process of user code, on asyncio's loop, which reads sockets first",
    "asyncrl/rollouts/tools/sandbox.py": "in the process of user code",
    "asyncrl/sim/model/modelled_trainer.py": "its time to train",
}
"""Modules that may use ``asyncio.timeout``, and what for."""


def test_peers_are_judged_by_fair_deadlines_alone() -> None:
    unfair = ("asyncio.timeout(", "asyncio.timeout_at(", "asyncio.wait_for(")
    using = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "asyncrl").rglob("*.py")
        if any(name in path.read_text() for name in unfair)
    }
    assert using == set(OWN_WAITS)

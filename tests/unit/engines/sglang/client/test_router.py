"""The router's list of engines, changed by engines that move, leave for long and come back."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.router import introduce, listed
from asyncrl.errors import EngineLost, EngineRejected, ForeignServer
from tests.virtual_time import run_virtually


@dataclass
class Router:
    """The HTTP interface of a router that answers after a second; ``engines`` are its ids by URL."""

    engines: dict[str, str]
    key_of_worker: dict[str, str] = field(default_factory=dict)
    num_foreign: int = 0
    """The number of checks of the key in which another program answers."""
    asked: list[str] = field(default_factory=list)
    """The destination of each request."""

    async def look(self, url: str, timeout_s: float) -> Any:
        await asyncio.sleep(1.0)
        return {"workers": [{"url": url, "id": number, "is_healthy": True} for url, number in self.engines.items()]}

    async def check_key(self, url: str, timeout_s: float) -> None:
        if self.num_foreign:
            self.num_foreign -= 1
            raise ForeignServer(f"{url} answers 404 to a wrong key")

    async def ask(self, url: str, body: dict[str, Any], timeout_s: float) -> Any:
        self.asked.append(url.removesuffix("/generate"))
        return {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}}

    async def delete(self, url: str, timeout_s: float) -> None:
        await asyncio.sleep(1.0)
        names = {number: name for name, number in self.engines.items()}
        number = url.rpartition("/")[2]
        if number not in names:
            raise EngineRejected(f"{url} answered 404")
        del self.engines[names[number]]

    async def command(self, url: str, body: dict[str, str], timeout_s: float) -> None:
        self.engines[body["url"]] = body["url"]


@pytest.mark.parametrize("answer", [None, {}, {"workers": None}, {"workers": [{}]}])
def test_a_list_of_another_shape_is_a_loss(answer: Any) -> None:
    class Odd(Router):
        async def look(self, url: str, timeout_s: float) -> Any:
            return answer

    router: Any = Odd({})
    with pytest.raises(EngineLost):
        run_virtually(listed(router, "router"))


def test_engines_that_move_at_the_same_time_are_all_introduced_and_each_old_url_is_removed_once() -> None:
    router: Any = Router({"a": "1", "b": "2", "c": "3"})
    gone = {"a", "b", "unknown"}

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            for url in ("a2", "b2"):
                tasks.create_task(introduce(router, "router", url, gone))
            await asyncio.sleep(1.5)
            gone.add("d")  # it moves meanwhile

    run_virtually(run())
    assert router.engines.keys() == {"a2", "b2", "c"}
    assert gone == {"d"}, "the next engine that is introduced has it removed"


def test_an_engine_that_could_not_be_removed_is_removed_later() -> None:
    router: Any = Router({"a": "1"})
    gone = {"a"}

    async def run() -> None:
        asyncio.get_running_loop().call_later(1.5, router.engines.update, {"a": "9"})  # the removal names its old id
        await introduce(router, "router", "a2", gone)

    with pytest.raises(EngineRejected, match="404"):
        run_virtually(run())
    assert gone == {"a"}


def test_requests_use_the_router_again_once_it_has_forgotten_an_engine_that_left_for_long() -> None:
    router: Any = Router({"a": "1", "b": "2"})
    engine = SGLangEngine(router, ("a", "b"), router_url="router", request_timeout_s=1.0)

    async def run() -> None:
        engine.leave("a")
        await engine.score((1, 2), 1)
        await engine.forget("a")
        assert router.engines.keys() == {"b"}
        await engine.score((1, 2), 1)
        engine.join("a")
        await engine.score((1, 2), 1)
        await engine.route("a")
        await engine.score((1, 2), 1)

    run_virtually(run())
    assert router.asked == ["b", "router", "b", "router"]
    assert router.engines.keys() == {"a", "b"}


def test_another_program_at_the_routers_port_is_no_reason_to_restart_an_engine() -> None:
    router: Any = Router({"b": "2"}, num_foreign=1)
    engine = SGLangEngine(router, ("a", "b"), router_url="router", request_timeout_s=1.0)
    _, seconds = run_virtually(engine.route("a"))
    assert seconds > 5.0, "the router, which is restarted meanwhile, is asked again"
    assert router.engines.keys() == {"a", "b"}


def test_each_engine_that_gets_requests_can_be_asked_for_scores_by_its_number() -> None:
    router: Any = Router({"a": "1", "b": "2"})
    engine = SGLangEngine(router, ("a", "b"), router_url="router", request_timeout_s=1.0)

    async def run() -> None:
        for number, score in engine.scorers().items():
            assert await score((1, 2), 1) == (-0.5,)
            router.asked.append(f"engine {number}")
        engine.leave("a")
        assert list(engine.scorers()) == [1]
        engine.move("a", "c")
        engine.join("c")
        assert sorted(engine.scorers()) == [0, 1], "a restarted engine keeps its number"
        await engine.scorers()[0]((1, 2), 1)

    run_virtually(run())
    assert router.asked == ["a", "engine 0", "b", "engine 1", "c"]

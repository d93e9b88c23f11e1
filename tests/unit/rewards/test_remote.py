"""Rewards from a service: retries, refusals, and the pause of admission while the service is down."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncrl.errors import FailureBudgetSpent, RewardFailed, RewardOutage
from asyncrl.event_loop import loop_time
from asyncrl.outages import MOST_ATTEMPTS
from asyncrl.rewards.built_in import BuiltIn
from asyncrl.rewards.remote import RemoteService
from asyncrl.rewards.resources import RewardResources
from asyncrl.types import Prompt, Sample
from tests.unit.pipeline.harness import World
from tests.unit.rewards.grading import in_a_run, prompt, sample, settings
from tests.virtual_time import run_virtually

REQUEST_S = 0.01
URL = "http://rewards:1/score"
REFUSED = aiohttp.ClientConnectorError(
    aiohttp.client_reqrep.ConnectionKey("rewards", 1, False, True, None, None, None),
    ConnectionRefusedError("connection refused"),
)


class Service(RemoteService):
    """A client whose service is a function of the request's number and of the time, on any clock."""

    def __init__(self, replies: Callable[[int, float], tuple[int, Any] | Exception], **limits: Any) -> None:
        settings = {"concurrency": 64, "timeout_s": 60.0} | limits
        super().__init__(URL, None, **settings)  # type: ignore[arg-type]
        self._replies = replies
        self.times: list[float] = []

    async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
        self.times.append(loop_time())
        await asyncio.sleep(REQUEST_S)
        reply = self._replies(len(self.times), loop_time())
        if isinstance(reply, Exception):
            raise reply
        return reply


def scored(*replies: tuple[int, Any] | Exception, **limits: Any) -> tuple[Any, list[float]]:
    """Score one answer; the last reply repeats.  Return the value or the error's text, and the times of requests."""

    async def main() -> tuple[Any, list[float]]:
        service = Service(lambda number, _: replies[min(number, len(replies)) - 1], **limits)
        try:
            return await service.score("q", "a", "7"), service.times
        except RewardFailed as error:
            return str(error), service.times

    return run_virtually(main())[0]


def gaps(times: Sequence[float], request_s: float = REQUEST_S) -> list[int]:
    """The whole seconds between the end of a request and the next request."""
    return [math.floor(later - earlier - request_s + 1e-6) for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_requests_are_repeated_with_growing_pauses(status: int) -> None:
    value, times = scored((status, "busy"), (status, "busy"), (status, "busy"), (200, 0.5))
    assert value == 0.5
    assert gaps(times) == [1, 2, 1], "the third failure in a row opens the breaker, whose pauses begin anew"


def test_pauses_are_bounded_and_attempts_are_counted() -> None:
    value, times = scored((500, "a bug"))
    assert value == f"{URL}: {MOST_ATTEMPTS} attempts, the last: status 500: a bug"
    assert gaps(times) == [1, 2, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_repeated(status: int) -> None:
    assert scored((status, "no")) == (f"{URL}: status {status}: no", [0.0])


def test_a_service_that_hangs_is_tried_again() -> None:
    class Hanging(Service):
        async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
            self.times.append(loop_time())
            await asyncio.sleep(3600.0 if len(self.times) < 3 else 0.0)
            return 200, 1.0

    async def main() -> tuple[Any, list[float]]:
        service = Hanging(lambda *_: (200, 1.0), timeout_s=60.0)
        return await service.score("q", "a", None), service.times

    (value, times), _ = run_virtually(main())
    assert value == 1.0
    assert gaps(times, request_s=0.0) == [61, 62]


def test_an_unreachable_service_is_tried_without_a_limit() -> None:
    value, times = scored(*[REFUSED] * 40, (200, 1.0))
    assert value == 1.0
    assert len(times) == 41


@pytest.mark.parametrize(
    "reply", [aiohttp.ServerDisconnectedError(), aiohttp.ClientPayloadError("cut"), (502, ""), (504, ""), (429, "")]
)
def test_an_answer_that_the_service_never_survives_fails(reply: tuple[int, Any] | Exception) -> None:
    value, times = scored(reply)
    assert f"{MOST_ATTEMPTS} attempts, the last: " in value
    assert len(times) == MOST_ATTEMPTS


def test_requests_in_flight_are_bounded() -> None:
    in_flight: list[int] = [0, 0]

    class Counting(Service):
        async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
            in_flight[0] += 1
            in_flight[1] = max(in_flight)
            await asyncio.sleep(1.0)
            in_flight[0] -= 1
            return 200, 1.0

    async def main() -> None:
        service = Counting(lambda *_: (200, 1.0), concurrency=4)
        async with asyncio.TaskGroup() as calls:
            for _ in range(20):
                calls.create_task(service.score("q", "a", None))

    assert run_virtually(main())[1] == pytest.approx(5.0)
    assert in_flight[1] == 4


# ---- a run


def world(
    replies: Callable[[int, float], tuple[int, Any] | Exception], kind: Callable[..., Service] = Service, **changes: Any
) -> tuple[World, Service]:
    """A run with 4 steps, whose rewards come from a service."""
    service = kind(replies)
    service.breaker.holds_groups = True

    async def reward(prompt: Prompt, sample: Sample) -> float:
        value: float = await service.score(prompt.text, sample.text, prompt.label)
        return value

    reward.has_deadlines = True  # type: ignore[attr-defined]
    return World(reward=reward, hold=service.breaker, **changes), service


def test_admission_pauses_while_the_service_is_down(caplog: pytest.LogCaptureFixture) -> None:
    """The service is down from 1 s to 301 s.  The run continues where it was, and fails no group."""

    def replies(number: int, now: float) -> tuple[int, Any] | Exception:
        return REFUSED if 1.0 < now < 301.0 else (200, float(number % 2))

    run, _ = world(replies, staleness=3, steps=8, watchdog_s=1000.0)
    admitted: list[tuple[float, int]] = []

    async def watched() -> None:
        async with asyncio.TaskGroup() as tasks:
            main = tasks.create_task(run.main())
            while not main.done():
                if hasattr(run, "scheduler"):
                    admitted.append((loop_time(), run.scheduler.gauges().groups.admitted))
                await asyncio.sleep(0.5)

    with caplog.at_level(logging.WARNING):
        run_virtually(watched())
    during = {count for when, count in admitted if 2.0 < when < 300.0}
    assert len(during) == 1, "no group starts during the outage"
    assert max(count for _, count in admitted) > max(during), "groups start again"
    assert run.scheduler.gauges().groups.failed == 0
    assert len(run.trainer.batches) == 8
    lines = [record.getMessage() for record in caplog.records if URL in record.getMessage()]
    assert len(lines) == 2
    assert "has failed for" in lines[0]
    assert "answers wait for it, and no new group starts" in lines[0]
    assert "answers again after" in lines[1]


def test_a_poisonous_answer_fails_its_group_alone() -> None:
    """The 3rd answer always disconnects the service.  The run continues without its group."""

    class Poisoned(Service):
        async def _post(self, payload: dict[str, Any]) -> tuple[int, Any]:
            if len(self.times) == 2:
                poison.append(payload)
            reply = await super()._post(payload)
            if any(payload is each for each in poison):
                raise aiohttp.ServerDisconnectedError
            return reply

    poison: list[Any] = []
    run, _ = world(lambda number, now: (200, float(number % 2)), kind=Poisoned, watchdog_s=1000.0)
    run.run()
    assert run.scheduler.gauges().groups.failed == 1
    assert len(run.trainer.batches) == 4


def test_an_outage_ends_the_run_after_its_limit() -> None:
    run, _ = world(lambda number, now: REFUSED, watchdog_s=1000.0, reward_outage_s=2000.0)
    with pytest.raises(RewardOutage, match=f"every call to {URL} has failed for 2000 s .* answers wait for it.*2000 s"):
        run.run()


def test_a_service_that_fails_every_answer_ends_the_run_after_the_limit() -> None:
    run, service = world(lambda number, now: (500, "a bug"), watchdog_s=1000.0, reward_outage_s=300.0)
    with pytest.raises(RewardOutage, match="status 500: a bug"):
        run.run()
    assert service.breaker.reason is None, "no answer waits, so nothing holds admission"


def test_without_a_limit_errors_of_the_service_spend_the_failure_budget() -> None:
    run, _ = world(lambda number, now: (500, "a bug"), kind=partial(Service, outage_limit_s=0.0), watchdog_s=10_000.0)
    with pytest.raises(FailureBudgetSpent, match="10 attempts, the last: status 500: a bug"):
        run.run()


def test_only_the_service_of_training_pauses_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: Any) -> Any:
        raise REFUSED

    monkeypatch.setattr(RemoteService, "_post", refuses)
    training, held_out = (BuiltIn("remote_rm", key=None, url=URL) for _ in range(2))

    async def main() -> list[tuple[str | None, str | None]]:
        reasons = []
        async with RewardResources(settings(), training) as resources, asyncio.TaskGroup() as tasks:
            for reward in (held_out, training):
                waiting = tasks.create_task(reward(prompt(), sample("a")))
                await asyncio.sleep(60.0)
                reasons.append((resources.service(URL, None).breaker.reason, resources.reason))
                waiting.cancel()
        return reasons

    (down, reason), (still_down, held) = run_virtually(main())[0]
    assert down is not None
    assert reason is None
    assert "no new group starts" not in down
    assert held == still_down
    assert "no new group starts" in str(held)


# ---- over HTTP


def test_the_request_is_slime_s() -> None:
    got: list[Any] = []

    async def run(resources: RewardResources) -> list[Any]:
        async def handle(request: web.Request) -> web.Response:
            got.append(await request.json())
            text = got[-1]["response"]
            if text == "bad":
                return web.Response(text="not json")
            return web.json_response({"score": 0.25, "why": "x"} if text == "dict" else 0.75)

        app = web.Application()
        app.router.add_post("/score", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        reward = BuiltIn("remote_rm", key="score", url=f"http://127.0.0.1:{port}/score")
        try:
            values = [await reward(prompt(), sample(text)) for text in ("number", "dict")]
            with pytest.raises(RewardFailed, match="the reply is not JSON: 'not json'"):
                await reward(prompt(), sample("bad"))
        finally:
            await runner.cleanup()
        return [(value.value, value.parts) for value in values]

    assert in_a_run(run) == [(0.75, {}), (0.25, {"score": 0.25, "why": "x"})]
    assert got[0] == {"prompt": "a question", "response": "number", "label": "7"}

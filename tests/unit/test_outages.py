"""Outages: which errors are one, and what the circuit breaker lets through."""

import asyncio
import errno
import itertools
import socket
import ssl
import urllib.error
from collections.abc import Callable
from email.message import Message

import aiohttp
import httpx
import pytest
import requests
import tenacity
import urllib3
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from asyncrl.errors import RewardFailed, RewardUnavailable
from asyncrl.event_loop import loop_time
from asyncrl.outages import FAILURES, MOST_ATTEMPTS, CircuitBreaker, Holds, reached_by
from tests.virtual_time import run_virtually

KEY = aiohttp.client_reqrep.ConnectionKey("rewards", 1, False, True, None, None, None)


UNREACHED_BY_URLLIB3 = urllib3.exceptions.MaxRetryError(
    urllib3.HTTPConnectionPool("rewards"),
    "/",
    urllib3.exceptions.NewConnectionError(urllib3.connection.HTTPConnection("rewards"), "refused"),
)


class Broken(Exception):
    """An exception that cannot be looked at."""

    @property
    def reason(self) -> str:
        """Raise."""
        raise ValueError("no reason")


def after_retries(cause: Exception) -> tenacity.RetryError:
    error = tenacity.RetryError(tenacity.Future(1))
    error.__cause__ = cause
    return error


class Refused(ConnectionRefusedError):
    """A user's subclass."""


def with_status(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://rewards")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


def of_aiohttp(status: int) -> aiohttp.ClientResponseError:
    url = URL("http://rewards")
    return aiohttp.ClientResponseError(
        aiohttp.RequestInfo(url, "POST", CIMultiDictProxy(CIMultiDict()), url), (), status=status
    )


def of_urllib(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://rewards", status, "", Message(), None)


@pytest.mark.parametrize(
    ("error", "reached"),
    [
        (ConnectionError("refused"), False),
        (ConnectionRefusedError(), False),
        (Refused(), False),
        (OSError(errno.EHOSTUNREACH, "no route"), False),
        (socket.gaierror(-2, "unknown name"), False),
        (aiohttp.ClientConnectorError(KEY, ConnectionRefusedError()), False),
        (aiohttp.ConnectionTimeoutError(), False),
        (httpx.ConnectError("refused"), False),
        (httpx.ConnectTimeout("late"), False),
        (requests.exceptions.ConnectTimeout(), False),
        (requests.exceptions.ConnectionError(UNREACHED_BY_URLLIB3), False),
        (after_retries(ConnectionRefusedError()), False),
        (urllib.error.URLError(ConnectionRefusedError()), False),
        (ExceptionGroup("", [ConnectionError(), Refused()]), False),
        (ExceptionGroup("", [ConnectionError(), ConnectionResetError()]), True),
        (ConnectionResetError(), True),
        (OSError(errno.ETIMEDOUT, "late"), False),
        (aiohttp.ServerDisconnectedError(), True),
        (aiohttp.ServerTimeoutError(), True),
        (aiohttp.ClientPayloadError(), True),
        (of_aiohttp(503), True),
        (httpx.ReadTimeout("late"), True),
        (httpx.RemoteProtocolError("cut"), True),
        (requests.exceptions.ConnectionError(), True),
        (requests.exceptions.ReadTimeout(), True),
        (urllib3.exceptions.ProtocolError("cut"), True),
        (with_status(502), True),
        (of_urllib(504), True),
        (ValueError("no number"), None),
        (KeyError("label"), None),
        (FileNotFoundError(errno.ENOENT, "no file"), None),
        (ssl.SSLCertVerificationError("expired"), None),
        (of_aiohttp(500), None),
        (with_status(404), None),
        (of_urllib(400), None),
        (aiohttp.InvalidURL("x"), None),
        (urllib.error.URLError("unknown url type"), None),
        (after_retries(ValueError()), None),
        (Broken(), None),
        (RuntimeError("a bug"), None),
        (TimeoutError(), None),
        (ExceptionGroup("", [ConnectionError(), ValueError()]), None),
    ],
)
def test_errors_of_connections_are_outages(error: Exception, reached: bool | None) -> None:
    assert reached_by(error) is reached


UNREACHED, DROPPED, LATE = (
    RewardUnavailable("refused", False),
    RewardUnavailable("cut", True),
    RewardUnavailable("silent", True, True),
)


class Service:
    """A service that is away for the given stretches of time, and records its calls."""

    def __init__(self, *away: tuple[float, float], error: Exception = UNREACHED, seconds: float = 0.1) -> None:
        self.calls: list[tuple[float, int]] = []
        self._away = away
        self._error = error
        self._seconds = seconds

    def attempt(self, number: int) -> Callable[[], "asyncio.Future[int]"]:
        async def call() -> int:
            self.calls.append((loop_time(), number))
            await asyncio.sleep(self._seconds)
            if any(start <= loop_time() < stop for start, stop in self._away):
                raise type(self._error)(*self._error.args)
            return number

        return call  # type: ignore[return-value]

    def during(self, start: float, stop: float) -> list[float]:
        return [when for when, _ in self.calls if start <= when < stop]


async def called(breaker: CircuitBreaker, service: Service, numbers: int) -> list[int | str]:
    """Make calls at the same time; return their results, or the texts of their errors."""

    async def one(number: int) -> int | str:
        try:
            return await breaker.call(service.attempt(number))
        except RewardFailed as error:
            return str(error)

    async with asyncio.TaskGroup() as tasks:
        made = [tasks.create_task(one(number)) for number in range(numbers)]
    return [each.result() for each in made]


def test_while_every_call_fails_one_at_a_time_probes_and_all_succeed_afterwards() -> None:
    service, breaker = Service((0.0, 60.0)), CircuitBreaker("it", holds_groups=True)
    found, seconds = run_virtually(called(breaker, service, 200))
    assert found == list(range(200))
    probes = service.during(0.05, 60.0)
    assert 4 <= len(probes) <= 7
    assert all(later - earlier > 1.0 for earlier, later in itertools.pairwise(probes))
    assert 60.0 < seconds < 95.0
    assert len(service.during(60.0, 100.0)) == 200, "one probe, and then every other answer once"
    assert breaker.reason is None
    assert 60.0 < breaker.outage_s < 95.0


def test_different_answers_probe() -> None:
    """An answer that the service never survives must not be the only one that probes."""
    service, breaker = Service((0.0, 60.0)), CircuitBreaker("it", holds_groups=True)
    run_virtually(called(breaker, service, 20))
    probing = [number for when, number in service.calls if 0.05 < when < 60.0]
    assert len(set(probing)) == len(probing)


def test_a_cancelled_probe_hands_its_place_to_another_call() -> None:
    async def main() -> float:
        service, breaker = Service((0.0, 20.0), seconds=5.0), CircuitBreaker("it", holds_groups=True)
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(breaker.call(service.attempt(number))) for number in range(8)]
            await asyncio.sleep(7.5)  # a second of a pause, and half of a probe
            assert breaker.is_open
            prober = service.calls[-1][1]
            calls[prober].cancel()
        assert [number for number, call in enumerate(calls) if call.cancelled()] == [prober]
        return loop_time()

    assert run_virtually(main())[0] < 60.0


def test_a_success_of_a_call_in_flight_closes_the_breaker() -> None:
    async def main() -> float:
        breaker = CircuitBreaker("it", holds_groups=True)
        slow, broken = Service(seconds=1.5), Service((0.0, 1.5), seconds=0.1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(breaker.call(slow.attempt(0)))
            for number in range(FAILURES):
                tasks.create_task(breaker.call(broken.attempt(number)))
        return breaker.outage_s

    assert run_virtually(main())[0] == pytest.approx(1.4)


def test_an_error_of_the_answer_itself_is_an_answer() -> None:
    async def broken() -> int:
        raise RewardFailed("no number")

    async def main() -> None:
        breaker = CircuitBreaker("it", holds_groups=True)
        for _ in range(5 * FAILURES):
            with pytest.raises(RewardFailed, match="no number"):
                await breaker.call(broken)
            assert not breaker.is_open

    assert run_virtually(main())[1] == 0.0


@pytest.mark.parametrize(("error", "attempts"), [(UNREACHED, MOST_ATTEMPTS), (DROPPED, MOST_ATTEMPTS), (LATE, 1)])
def test_an_answer_that_fails_among_others_that_succeed_fails_alone(error: RewardUnavailable, attempts: int) -> None:
    good, bad = Service(), Service((0.0, 1e9), error=error)

    async def main() -> int:
        breaker = CircuitBreaker("it", holds_groups=True)

        async def others() -> None:
            while True:
                await breaker.call(good.attempt(0))

        async with asyncio.TaskGroup() as tasks:
            going_on = tasks.create_task(others())
            with pytest.raises(RewardFailed, match=str(error)):
                await breaker.call(bad.attempt(1))
            going_on.cancel()
        return len(bad.calls)

    assert run_virtually(main())[0] == attempts


def test_silent_functions_do_not_open_the_breaker() -> None:
    service, breaker = Service((0.0, 1e9), error=LATE, seconds=60.0), CircuitBreaker("it", holds_groups=True)
    found, seconds = run_virtually(called(breaker, service, 3 * FAILURES))
    assert found == ["silent"] * 3 * FAILURES
    assert seconds == pytest.approx(60.0), "each was tried once"
    assert breaker.outage_s == 0.0


def test_an_outage_ends_when_the_last_answer_that_waits_for_it_is_cancelled() -> None:
    """A later failure begins another outage, with the whole limit."""

    async def main() -> tuple[float, float | None]:
        breaker, service = CircuitBreaker("it", holds_groups=True), Service((0.0, 1e9))
        for pause in (50.0, 0.0):
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(breaker.call(service.attempt(number))) for number in range(4)]
                await asyncio.sleep(10.0)
                since = breaker.since
                for call in calls:
                    call.cancel()
            await asyncio.sleep(pause)
            assert not breaker.is_open
        return breaker.outage_s, since

    outage_s, since = run_virtually(main())[0]
    assert since == pytest.approx(60.1)
    assert outage_s == pytest.approx(2 * 9.9)


def test_a_thousand_failures_in_a_row_have_a_pause() -> None:
    async def main() -> int:
        breaker, service = CircuitBreaker("it", holds_groups=True), Service((0.0, 50_000.0))
        await called(breaker, service, 4)
        return len(service.calls)

    assert run_virtually(main())[0] > 1100


def test_answers_that_hold_no_group_fail_after_the_limit_and_later_ones_are_tried() -> None:
    async def main() -> tuple[list[int | str], list[int | str], float]:
        breaker, service = CircuitBreaker("it", limit_s=100.0), Service((0.0, 200.0))
        first = await called(breaker, service, 50)
        seconds = loop_time()
        await asyncio.sleep(150.0)
        return first, await called(breaker, service, 50), seconds

    first, later, seconds = run_virtually(main())[0]
    assert all("refused" in str(each) for each in first)
    assert seconds < 140.0
    assert later == list(range(50))


def test_without_a_limit_the_breaker_never_opens() -> None:
    service, breaker = Service((0.0, 1e9)), CircuitBreaker("it", limit_s=0.0, holds_groups=True)
    found, _ = run_virtually(called(breaker, service, 5))
    assert found == [f"{MOST_ATTEMPTS} attempts, the last: refused"] * 5
    assert breaker.outage_s == 0.0


def test_holds_join_their_reasons() -> None:
    async def main() -> None:
        well, ill = (CircuitBreaker(name, holds_groups=True) for name in ("well", "ill"))
        changes: list[str | None] = []
        holds = Holds([well, Holds([ill])])
        holds.notify(lambda: changes.append(holds.reason))
        await called(ill, Service((0.0, 5.0)), 4)
        assert holds.since is None
        assert holds.outage_s == ill.outage_s > 4.5
        assert changes[-1] is None
        assert any(each is not None and "every call to ill" in each for each in changes)

    run_virtually(main())

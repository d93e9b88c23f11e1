"""The errors that ``SGLangEngine`` raises when a server misbehaves, which a small HTTP server does."""

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson
import pytest
from aiohttp import web

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.client.streams import Streams
from asyncrl.engines.sglang.labels import PACKED, STAMPS
from asyncrl.errors import EngineError, EngineLost, EngineRejected, EngineTimeout
from asyncrl.types import Chunk, FinishReason, Request, SamplingParams, Weights
from tests.ports import free_ports

REQUEST = Request(
    request_id="r1",
    token_ids=(1, 2),
    sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9),
    seed=1,
    weights=Weights(version=4, step=4),
)

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(tokens: list[int], version: int = 4, stamps: list[str] | None = None, **finish: object) -> bytes:
    meta = {
        **({} if stamps is None else {STAMPS: stamps}),
        "id": "r1",
        "finish_reason": finish or None,
        "weight_version": str(version),
        "output_token_logprobs": [[-1.5, token, None] for token in tokens],
    }
    return b"data: " + orjson.dumps({"output_ids": tokens, "meta_info": meta}) + b"\n\n"


def sending(*pieces: bytes) -> Answering:
    """A handler that sends the pieces one by one and closes the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    return answer


def refusing(status: int) -> Answering:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no"}, status=status)

    return answer


async def breaking_off(request: web.Request) -> web.StreamResponse:
    response = await sending(event([7]))(request)
    assert request.transport is not None
    request.transport.abort()
    return response


async def stalling(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(event([7]))
    await asyncio.sleep(60.0)
    return response


@contextlib.asynccontextmanager
async def server(answer: Answering, aborted: list[str]) -> AsyncIterator[str]:
    async def abort(request: web.Request) -> web.StreamResponse:
        aborted.append((await request.json())["rid"])
        return web.Response()

    async with serving({"/generate": answer, "/abort_request": abort}) as url:
        yield url


@contextlib.asynccontextmanager
async def serving(answers: Mapping[str, Answering]) -> AsyncIterator[str]:
    """Serve the answers by path; return the server's address."""
    app = web.Application()
    for path, answer in answers.items():
        app.router.add_route("*", path, answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def generate(answer: Answering, idle_s: float = 5.0) -> tuple[list[Chunk], FinishReason | EngineError, list[str]]:
    """The chunks, the finish reason, and the ids of the aborted requests."""
    chunks: list[Chunk] = []
    aborted: list[str] = []

    async def run() -> FinishReason | EngineError:
        async with server(answer, aborted) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=idle_s)
            try:
                return await engine.generate(REQUEST, chunks.append)
            except EngineError as error:
                return error

    return chunks, asyncio.run(run()), aborted


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_a_request_of_an_episode_names_it_and_has_further_sampling_parameters() -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((request.headers.get("X-SMG-Routing-Key"), (await request.json())["sampling_params"]))
        return await sending(event([1], type="stop"))(request)

    async def run(*requests: Request) -> None:
        async with server(answer, []) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            for request in requests:
                await engine.generate(request, lambda chunk: None)

    sampling = dataclasses.replace(REQUEST.sampling, extra={"min_p": 0.1, "max_new_tokens": 1_000_000})
    asyncio.run(run(REQUEST, dataclasses.replace(REQUEST, routing_key="eval-1-ä b\r\n-3.0", sampling=sampling)))
    (no_key, plain), (key, further) = asked
    assert no_key is None
    assert "min_p" not in plain
    assert key == "eval-1-%C3%A4%20b%0D%0A-3.0"
    assert further == {**plain, "min_p": 0.1}


def test_a_stream_cut_into_any_pieces_is_read_whole() -> None:
    whole = event([1]) + event([2, 3]) + event(list(range(9000))) + event([4], type="stop") + b"data: [DONE]\n\n"
    for size in (7, 1000, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        chunks, end, aborted = generate(sending(*pieces))
        assert tokens(chunks) == [1, 2, 3, *range(9000), 4]
        assert end == FinishReason.STOP
        assert not aborted


def test_a_chunk_is_as_old_as_the_stamp_on_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.engines.sglang.client.versions.DETOKENIZER_LAG_S", 60.0)  # on a busy machine, too
    stream = sending(event([1], 4), event([2], 4), event([3], 5), event([4], 5, type="length"))
    chunks, end, _ = generate(stream)
    assert end == FinishReason.LENGTH
    assert [chunk.version for chunk in chunks] == [4, 4, 4, 4]  # version 5 is not certain yet


def test_stamped_tokens_are_as_old_as_their_stamps() -> None:
    stream = sending(event([1, 2, 3], 6, ["4", "4", "5"]), event([4], 6, ["5"]), event([5], 6, ["6"], type="length"))
    chunks, _, _ = generate(stream)
    assert [(chunk.version, chunk.token_ids) for chunk in chunks] == [(4, (1, 2)), (5, (3,)), (5, (4,)), (6, (5,))]


@pytest.mark.parametrize("stamps", [["5"], ["5", None], []])
def test_stamps_that_do_not_fit_their_tokens_are_ignored(stamps: list[str]) -> None:
    chunks, _, _ = generate(sending(event([1, 2], 5, stamps), event([3], 5, ["5"], type="length")))
    assert [(chunk.version, chunk.token_ids) for chunk in chunks] == [(4, (1, 2)), (5, (3,))]


@pytest.mark.parametrize("stamps", [["default"], None], ids=["with stamps", "without"])
def test_an_engine_with_weights_of_no_update_is_lost(stamps: list[str] | None) -> None:
    foreign = event([8], 5, stamps).replace(b'"weight_version":"5"', b'"weight_version":"default"')
    chunks, end, aborted = generate(sending(event([7], 4, stamps and ["4"]), foreign, event([9], 5, type="length")))
    assert tokens(chunks) == [7]
    assert isinstance(end, EngineLost)
    assert "'default'" in str(end)
    assert len(aborted) == 1


def test_silence_is_a_timeout_and_the_request_is_aborted() -> None:
    chunks, end, aborted = generate(stalling, idle_s=1.0)
    assert tokens(chunks) == [7]
    assert isinstance(end, EngineTimeout)
    assert len(aborted) == 1
    assert aborted[0].startswith(f"{PACKED}r1/")


def test_a_refused_request_is_rejected() -> None:
    _, end, aborted = generate(refusing(400))
    assert isinstance(end, EngineRejected)
    assert "400" in str(end)
    assert not aborted


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_lost(status: int) -> None:
    assert isinstance(generate(refusing(status))[1], EngineLost)


@pytest.mark.parametrize(
    "answer",
    [
        breaking_off,
        sending(event([7])),
        sending(event([7]), event([], type="abort", message="killed")),
        sending(event([7]), b'data: {"error": {"message": "worker died", "code": 502}}\n\n'),
        sending(event([7]), b"<html>\n\n", b"data: <html>\n\n"),
        sending(event([7]), event([7], type="abort", message="retracted")),  # SGLang repeats the last token
    ],
    ids=["connection reset", "no end", "aborted by others", "error event", "not JSON", "abort with an echo"],
)
def test_tokens_that_arrived_before_a_loss_are_kept(answer: Answering) -> None:
    chunks, end, aborted = generate(answer)
    assert tokens(chunks) == [7]
    assert isinstance(end, EngineLost)
    assert len(aborted) == 1


def test_an_answer_that_ended_is_not_lost_with_its_connection() -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        response = await sending(event([7]), event([8], type="stop"))(request)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    chunks, end, aborted = generate(hang_up)
    assert tokens(chunks) == [7, 8]
    assert end == FinishReason.STOP
    assert not aborted


def test_an_error_is_named_once() -> None:
    _, end, _ = generate(refusing(503))
    assert str(end).count("EngineLost") == 0
    assert "answered 503" in str(end)


def test_a_machine_that_has_vanished_is_a_lost_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def vanish(*asked: Any) -> int:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # as the kernel says it

    monkeypatch.setattr(Streams, "post", vanish)
    _, end, _ = generate(refusing(503))
    assert isinstance(end, EngineLost)
    assert "Connection timed out" in str(end)


def test_an_error_event_about_the_request_is_a_rejection() -> None:
    assert isinstance(
        generate(sending(b'data: {"error": {"message": "too long", "code": 400}}\n\n'))[1], EngineRejected
    )
    refusal = sending(event([], type="abort", message="too long", status_code=400))
    assert isinstance(generate(refusal)[1], EngineRejected)


def test_logprobs_of_other_tokens_are_a_loss() -> None:
    wrong = orjson.loads(event([1, 2]).removeprefix(b"data: "))
    wrong["output_ids"] = [1, 3]
    chunks, end, _ = generate(sending(b"data: " + orjson.dumps(wrong) + b"\n\n"))
    assert isinstance(end, EngineLost)
    assert not chunks


def changed(**changes: Any) -> bytes:
    """An event whose ``meta_info`` has other values."""
    usual = orjson.loads(event([1]).removeprefix(b"data: "))
    return orjson.dumps({**usual, "meta_info": usual["meta_info"] | changes})


@pytest.mark.parametrize(
    "payload",
    [
        b"null",
        b"5",
        b"[]",
        b"{}",
        b'{"detail": "overloaded"}',
        b'{"meta_info": null}',
        changed(finish_reason="stop"),
        changed(finish_reason={}),
        changed(finish_reason={"type": "error"}),
        changed(output_token_logprobs=None),
        changed(output_token_logprobs=[[None, 1, None]]),
        orjson.dumps({PACKED: {"token_ids": "AQAAAA==", "logprobs": "AACAvwAAgL8=", "versions": None}}),
    ],
)
def test_an_event_of_another_shape_is_a_loss(payload: bytes) -> None:
    chunks, end, _ = generate(sending(b"data: " + payload + b"\n\n"))
    assert isinstance(end, EngineLost)
    assert not chunks


@pytest.mark.parametrize("answer", [b"", b"{}", b"null", changed(input_token_logprobs=[None, [None, 2, None]])])
def test_scores_of_another_shape_are_a_loss(answer: bytes) -> None:
    """JSON has null in the place of NaN."""

    async def scoring(request: web.Request) -> web.StreamResponse:
        return web.Response(body=answer)

    async def run() -> None:
        async with server(scoring, []) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            with pytest.raises(EngineLost):
                await engine.score((1, 2), 1)

    asyncio.run(run())


@pytest.mark.parametrize("answer", [b"", b"{}", b"[]", b'{"loads": [{}]}', b'{"loads": null}'])
def test_loads_of_another_shape_are_left_out(answer: bytes) -> None:
    async def loads(request: web.Request) -> web.StreamResponse:
        return web.Response(body=answer)

    async def run() -> None:
        async with serving({"/v1/loads": loads}) as url, HttpClient() as http:
            assert await EngineLoads(http, lambda: (url,)).loads() == ()

    asyncio.run(run())


def test_few_aborts_are_in_flight_to_one_server_and_none_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs a connection, so a file of the driver; a server that hangs must not hold the caller."""
    monkeypatch.setattr("asyncrl.engines.sglang.client.engine._ABORT_S", 1.0)
    asked = most = now = 0

    async def hangs(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(60.0)
        return web.Response()

    class Counting(HttpClient):
        """Counts aborts here: the server does not notice that a caller has given up, and another begins."""

        async def command(self, url: str, body: dict[str, Any], timeout_s: float) -> Any:
            nonlocal most, now
            now += 1
            most = max(most, now)
            try:
                return await super().command(url, body, timeout_s)
            finally:
                now -= 1

    async def run() -> float:
        async with serving({"/generate": stalling, "/abort_request": hangs}) as url, Counting() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=60.0)
            began = 0

            def begin(chunk: Chunk) -> None:
                nonlocal began
                began += 1

            async with asyncio.TaskGroup() as tasks:
                requests = [tasks.create_task(engine.generate(REQUEST, begin)) for _ in range(100)]
                while began < len(requests):  # noqa: ASYNC110 -- the count is of another handler
                    await asyncio.sleep(0.01)
                start = asyncio.get_running_loop().time()
                for request in requests:
                    request.cancel()
            return asyncio.get_running_loop().time() - start

    assert asyncio.run(run()) < 10.0
    assert asked > 0
    assert most == 32


def test_a_refused_connection_is_a_loss() -> None:
    async def run() -> None:
        async with HttpClient() as http:
            url = f"http://127.0.0.1:{free_ports(1)[0]}"
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            with pytest.raises(EngineLost):
                await engine.generate(REQUEST, lambda chunk: None)
            with pytest.raises(EngineLost):
                await engine.score((1, 2, 3), 1)

    asyncio.run(run())


def test_cancelling_twice_still_aborts_the_request() -> None:
    aborted: list[str] = []

    async def run() -> None:
        async with server(stalling, aborted) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            began = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(engine.generate(REQUEST, lambda chunk: began.set()))
                await began.wait()
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()
            async with asyncio.timeout(5.0):
                while not aborted:  # noqa: ASYNC110 -- the list is filled by another handler
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)

    asyncio.run(run())
    assert len(aborted) == 1


def test_a_chunk_that_its_reader_refuses_aborts_the_request() -> None:
    aborted: list[str] = []

    def refuse(chunk: Chunk) -> None:
        raise LookupError

    async def run() -> None:
        async with server(stalling, aborted) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            with pytest.raises(LookupError):
                await engine.generate(REQUEST, refuse)

    asyncio.run(run())
    assert [rid.startswith(f"{PACKED}r1/") for rid in aborted] == [True]


def test_a_server_that_lost_a_request_is_chosen_last() -> None:
    async def run() -> None:
        good, bad = sending(event([1], type="stop")), refusing(500)
        async with server(bad, []) as bad_url, server(good, []) as good_url, HttpClient() as http:
            engine = SGLangEngine(http, (bad_url, good_url), router_url=None, request_timeout_s=5.0)
            with pytest.raises(EngineLost):
                await engine.generate(REQUEST, lambda chunk: None)
            for _ in range(3):
                assert await engine.generate(REQUEST, lambda chunk: None) == FinishReason.STOP

    asyncio.run(run())


def interrupt(
    first: bytes, last: bytes, request: Request = REQUEST, *, by_drain: bool = False
) -> tuple[list[int], FinishReason]:
    """The tokens and the finish reason of an answer whose ``last`` event comes after the abort."""
    chunks: list[Chunk] = []
    aborted: list[str] = []

    async def until_aborted(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(first)
        while not aborted:  # noqa: ASYNC110 -- the list is filled by another handler
            await asyncio.sleep(0.01)
        await response.write(last)
        return response

    async def run() -> FinishReason:
        async with server(until_aborted, aborted) as url, HttpClient() as http, asyncio.TaskGroup() as tasks:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0)
            began = asyncio.Event()

            def take(chunk: Chunk) -> None:
                chunks.append(chunk)
                began.set()

            task = tasks.create_task(engine.generate(request, take))
            await began.wait()
            if not by_drain:
                await engine.interrupt()
                return task.result()
            engine.leave(url)
            draining = tasks.create_task(engine.drain(url))
            reason = await task
            draining.cancel()  # it takes DRAIN_S, because it cannot know which requests the engine has
            return reason

    reason = asyncio.run(run())
    return tokens(chunks), reason


def aborted_event(tokens: list[int], scored: list[int], completion_tokens: int, **more: Any) -> bytes:
    """The last event of an aborted request, as SGLang writes it; ``more`` are further fields of the finish reason."""
    whole = orjson.loads(event(scored, type="abort", message="Aborted", **more).removeprefix(b"data: "))
    whole["output_ids"], whole["meta_info"]["completion_tokens"] = tokens, completion_tokens
    return b"data: " + orjson.dumps({**whole, "text": "".join(map(str, tokens))}) + b"\n\n"


def test_an_interrupted_answer_has_the_tokens_that_came_with_its_end() -> None:
    assert interrupt(event([7]), aborted_event([8, 9], [8, 9], 3)) == ([7, 8, 9], FinishReason.ABORT)


def test_a_drained_engine_delivers_the_tokens_of_its_requests() -> None:
    assert interrupt(event([7]), aborted_event([8, 9], [8, 9], 3), by_drain=True) == ([7, 8, 9], FinishReason.ABORT)


def test_the_token_that_an_abort_repeats_is_not_counted_again() -> None:
    assert interrupt(event([7]), aborted_event([7], [7], 1)) == ([7], FinishReason.ABORT)
    behind_a_chunk = aborted_event([8, 9, 9], [8, 9, 7, 8, 9], 3)
    assert interrupt(event([7]), behind_a_chunk) == ([7, 8, 9], FinishReason.ABORT)


def test_an_answer_aborted_at_its_last_token_ended_by_itself() -> None:
    def asked(**sampling: Any) -> Request:
        return dataclasses.replace(REQUEST, sampling=dataclasses.replace(REQUEST.sampling, **sampling))

    last = aborted_event([8, 9], [8, 9], 3)
    assert interrupt(event([7]), last, asked(stop_token_ids=(9,))) == ([7, 8, 9], FinishReason.STOP)
    ignored = asked(stop_token_ids=(9,), extra={"ignore_eos": True})
    assert interrupt(event([7]), last, ignored) == ([7, 8, 9], FinishReason.ABORT)
    assert interrupt(event([7]), last, asked(max_new_tokens=3)) == ([7, 8, 9], FinishReason.LENGTH)
    first = event([7]).replace(b'{"output_ids"', b'{"text":"7","output_ids"')
    assert interrupt(first, last, asked(stop=("789",))) == ([7, 8, 9], FinishReason.STOP)
    assert interrupt(first, last, asked(stop=("78x", "99"))) == ([7, 8, 9], FinishReason.ABORT)


def test_a_request_that_cannot_be_aborted_is_lost_and_the_interruption_ends() -> None:
    aborted: list[str] = []

    async def run() -> None:
        async with server(stalling, aborted) as url, HttpClient() as http, asyncio.TaskGroup() as tasks:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=60.0, interrupt_timeout_s=0.3)
            began = asyncio.Event()
            task = tasks.create_task(lost(engine, began))
            await began.wait()
            async with asyncio.timeout(5.0):
                await engine.interrupt()
            assert "not aborted in time" in str(task.result())

    async def lost(engine: SGLangEngine, began: asyncio.Event) -> EngineLost:
        with pytest.raises(EngineLost) as error:
            await engine.generate(REQUEST, lambda chunk: began.set())
        return error.value

    asyncio.run(run())
    assert len(aborted) >= 2  # tried again


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_is_ready_once_its_garbage_collectors_are_frozen_or_warns(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        is_healthy = request.path == "/health" and len(asked) > 1
        return web.json_response({}, status=status if request.path == "/freeze_gc" else 200 if is_healthy else 503)

    async def run() -> None:
        async with serving({"/health": answer, "/freeze_gc": answer}) as url, HttpClient() as http:
            await EngineControl(http, url, timeout_s=5.0).get_ready(5.0)

    asyncio.run(run())
    assert asked == ["/health", "/health", "/freeze_gc"]
    assert ("garbage collectors are as they were" in caplog.text) == (status == 404)

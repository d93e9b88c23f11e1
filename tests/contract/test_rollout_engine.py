"""The promises of ``RolloutEngine`` and ``WeightUpdater``, on the fake and on the real SGLang."""

import asyncio
import random
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import psutil
import pytest

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.client.payload import read_event
from asyncrl.engines.sglang.labels import PACKED
from asyncrl.errors import EngineError, EngineTimeout
from asyncrl.protocols import LoadProbe, RolloutEngine
from asyncrl.types import Chunk, EngineLoad, FinishReason, Request, SamplingParams, Weights
from tests.contract.conftest import OpenPlace, Place, Servers, free_ports, open_sglang

pytestmark = [pytest.mark.timeout(360), pytest.mark.filterwarnings("ignore::SyntaxWarning")]

PROMPT = (5, 9, 33, 12, 60)
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    finish: FinishReason
    chunks: tuple[Chunk, ...]
    loads: tuple[EngineLoad, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(logprob for chunk in self.chunks for logprob in chunk.logprobs)


def ask(place: Place, seed: int, max_new_tokens: int, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> Request:
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **sampling}
    return Request(
        request_id=f"request-{seed}",
        token_ids=prompt,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **params),
        seed=seed,
        weights=place.weights,
    )


async def answer(engine: RolloutEngine, request: Request) -> Answer:
    chunks: list[Chunk] = []
    finish = await engine.generate(request, chunks.append)
    return Answer(finish, tuple(chunks))


async def answers(engine: RolloutEngine, requests: Sequence[Request]) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(answer(engine, request)) for request in requests]
    return [task.result() for task in running]


def test_an_answer_has_as_many_tokens_as_allowed_each_delivered_once(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            wanted = [1, 2, 16, 17, 18, 33, 100]
            got = await answers(place.engine, [ask(place, seed, size) for seed, size in enumerate(wanted)])
            assert [len(one.token_ids) for one in got] == wanted
            assert {one.finish for one in got} == {FinishReason.LENGTH}
            assert {chunk.version for one in got for chunk in one.chunks} == {place.weights.version}

    asyncio.run(run())


def test_scoring_an_answer_gives_the_logprobs_it_was_sampled_with(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            for one in await answers(place.engine, [ask(place, seed, 70) for seed in range(8)]):
                scores = await place.engine.score(PROMPT + one.token_ids, len(PROMPT))
                assert scores == pytest.approx(one.logprobs, abs=1e-5)

    asyncio.run(run())


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            requests = [ask(place, seed, 40 + seed % 7) for seed in range(32)]
            first = await answers(place.engine, requests)
            order = random.Random(0).sample(range(32), 32)
            second = dict(zip(order, await answers(place.engine, [requests[seed] for seed in order]), strict=True))
            alone = await answer(place.engine, requests[3])
            assert [one.token_ids for one in first] == [second[seed].token_ids for seed in range(32)]
            assert alone.token_ids == first[3].token_ids
            assert len({one.token_ids[:20] for one in first}) == 32

    asyncio.run(run())


def test_an_answer_resumed_from_its_prefix_continues_identically(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            whole = await answer(place.engine, ask(place, 7, 50))
            rest = await answer(place.engine, ask(place, 7, 30, PROMPT + whole.token_ids[:20]))
            assert rest.token_ids == whole.token_ids[20:]

    asyncio.run(run())


def test_cancelling_frees_the_server(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place, asyncio.TaskGroup() as tasks:
            started = asyncio.Event()
            kept = tasks.create_task(answer(place.engine, ask(place, 1, 300)))
            running = [
                tasks.create_task(place.engine.generate(ask(place, seed, 6000), lambda chunk: started.set()))
                for seed in range(10, 18)
            ]
            await started.wait()
            for task in running:
                task.cancel()
            assert len((await kept).token_ids) == 300  # request-1 is not taken for request-10
            await emptied(place)
            assert all(task.cancelled() for task in running)

    asyncio.run(run())


def test_an_interruption_ends_every_call_and_loses_no_token(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            for pause_s in (0.0, 0.1):
                partial = await interrupted(place.engine, [ask(place, seed, 5000) for seed in range(8)], pause_s)
                assert {one.finish for one in partial} == {FinishReason.ABORT}
                await emptied(place)
                rest = await answers(
                    place.engine,
                    [ask(place, seed, 50, PROMPT + one.token_ids) for seed, one in enumerate(partial)],
                )
                whole = await answers(
                    place.engine,
                    [ask(place, seed, len(one.token_ids) + 50) for seed, one in enumerate(partial)],
                )
                for one, first, second in zip(whole, partial, rest, strict=True):
                    assert first.token_ids + second.token_ids == one.token_ids
                    assert first.logprobs + second.logprobs == pytest.approx(one.logprobs, abs=1e-4)

    asyncio.run(run())


def test_a_request_that_was_just_sent_is_interrupted_too(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(answer(place.engine, ask(place, seed, 5000))) for seed in range(8)]
            await asyncio.sleep(0)  # each has begun, none has been answered
            await place.engine.interrupt()
            assert [task.result().finish for task in running] == [FinishReason.ABORT] * 8

    asyncio.run(run())


def test_an_answer_that_finishes_during_an_interruption_keeps_its_finish_reason(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            requests = [ask(place, seed, 1 + seed * 5) for seed in range(32)]
            got = await interrupted(place.engine, requests, 0.1)
            for request, one in zip(requests, got, strict=True):
                wanted = request.sampling.max_new_tokens
                expected = FinishReason.LENGTH if len(one.token_ids) == wanted else FinishReason.ABORT
                assert (one.finish, len(one.token_ids) <= wanted) == (expected, True)

    asyncio.run(run())


def test_nothing_is_left_to_interrupt_afterwards(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            await place.engine.interrupt()
            assert (await answer(place.engine, ask(place, 3, 40))).finish == FinishReason.LENGTH

    asyncio.run(run())


def test_an_interruption_leaves_the_requests_of_others_alone(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as ours, open_sglang(servers) as others, asyncio.TaskGroup() as tasks:
            kept = [tasks.create_task(answer(others.engine, ask(others, seed, 200))) for seed in range(4)]
            got = await interrupted(ours.engine, [ask(ours, seed, 5000) for seed in range(4)], 0.1)
            assert {one.finish for one in got} == {FinishReason.ABORT}
            assert [len((await task).token_ids) for task in kept] == [200] * 4

    asyncio.run(run())


def test_an_answer_interrupted_while_it_waits_for_its_turn_has_all_its_tokens(servers: Servers) -> None:
    """SGLang answers for what waits without the tokens it has not sent: retracted requests must send them before."""

    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient() as http, asyncio.TaskGroup() as tasks:
            requests = [ask(place, seed, 500) for seed in range(4)]
            whole = await answers(place.engine, requests)
            control = EngineControl(http, servers.engine_url, timeout_s=30.0)
            chunks: list[list[Chunk]] = [[] for _ in requests]
            running = [
                tasks.create_task(place.engine.generate(request, mine.append))
                for request, mine in zip(requests, chunks, strict=True)
            ]
            await until(lambda: all(chunks))
            await asyncio.sleep(0.3)  # for tokens that are not sent yet
            await control.pause("retract")
            await control.probe(10.0)
            await asyncio.sleep(0.3)
            await place.engine.interrupt()
            await control.go_on()
            for task, mine, one in zip(running, chunks, whole, strict=True):
                got = Answer(task.result(), tuple(mine))
                assert got.finish == FinishReason.ABORT
                assert got.token_ids == one.token_ids[: len(got.token_ids)]
                assert len(got.token_ids) > 1  # more than the first chunk

    asyncio.run(run())


def test_a_server_whose_scheduler_hangs_does_not_answer_a_probe(servers: Servers) -> None:
    port = servers.engine_url.rpartition(":")[2]
    every = psutil.process_iter(["cmdline"])
    (main,) = (each for each in every if {"sglang.launch_server", port} <= set(each.info["cmdline"] or ()))
    (scheduler,) = (each for each in main.children(recursive=True) if "sglang::scheduler" in " ".join(each.cmdline()))

    async def run() -> None:
        async with HttpClient() as http:
            control = EngineControl(http, servers.engine_url, timeout_s=30.0)
            scheduler.suspend()
            try:
                with pytest.raises(EngineTimeout):
                    await control.probe(2.0)
            finally:
                scheduler.resume()
            await control.probe(30.0)
            await control.pause("in_place")
            await control.probe(10.0)
            await control.go_on()

    asyncio.run(run())


def test_load_is_reported_per_server_and_dead_servers_are_omitted(servers: Servers) -> None:
    async def run() -> None:
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        async with open_sglang(servers) as place, HttpClient() as http:
            probe = EngineLoads(http, (dead, servers.engine_url))
            answers = await interrupted(place.engine, [ask(place, seed, 5000) for seed in range(4)], probe=probe)
            (busy,), (idle,) = answers[0].loads, await full(probe, 0)
            assert (busy.running, busy.waiting) == (4, 0)
            assert 0 < busy.kv_used < 4 * 5000 / 65536  # of --max-total-tokens
            assert (idle.running, idle.waiting, idle.kv_used) == (0, 0, 0.0)

    asyncio.run(run())


def test_a_server_is_empty_once_nothing_runs_and_not_before(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient() as http, asyncio.TaskGroup() as tasks:
            first = asyncio.Event()
            busy = tasks.create_task(place.engine.generate(ask(place, 1, 5000), lambda _: first.set()))
            await first.wait()
            with pytest.raises(EngineError, match="flush_cache"):
                await EngineControl(http, servers.engine_url, timeout_s=2.0).empty()
            await place.engine.interrupt()
            await busy
            await EngineControl(http, servers.engine_url, timeout_s=30.0).empty()

    asyncio.run(run())


def test_a_server_that_got_ready_answers_as_before(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient() as http:
            before = await answer(place.engine, ask(place, 1, 20))
            await EngineControl(http, servers.engine_url, timeout_s=30.0).get_ready(30.0)
            assert (await answer(place.engine, ask(place, 1, 20))).token_ids == before.token_ids

    asyncio.run(run())
    assert "garbage" not in caplog.text


def test_requests_in_flight_live_through_an_update(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place, asyncio.TaskGroup() as tasks:
            chunks: list[list[Chunk]] = [[] for _ in range(8)]
            requests = [ask(place, seed, 1000) for seed in range(8)]
            running = [
                tasks.create_task(place.engine.generate(request, mine.append))
                for request, mine in zip(requests, chunks, strict=True)
            ]
            await until(lambda: all(chunks))
            before = await place.engine.score(PROMPT, 1)
            new = await place.publish()
            after = await place.engine.score(PROMPT, 1)
            assert before != pytest.approx(after, abs=1e-3)
            for task, mine in zip(running, chunks, strict=True):
                assert await task == FinishReason.LENGTH
                versions = [chunk.version for chunk in mine]
                assert versions == sorted(versions)
                assert (versions[0], versions[-1]) == (place.weights.version, new.version)
                assert sum(len(chunk.token_ids) for chunk in mine) == 1000

    asyncio.run(run())


def test_every_token_is_labelled_with_the_weights_that_made_it(servers: Servers) -> None:
    """Only the output layer changes, so the KV cache stays valid and a token's log-prob tells which weights made it."""

    async def run() -> None:
        async with open_sglang(servers) as place:
            requests = [ask(place, seed, 500) for seed in range(16)]
            chunks: list[list[Chunk]] = [[] for _ in requests]
            async with asyncio.TaskGroup() as tasks:
                for request, mine in zip(requests, chunks, strict=True):
                    tasks.create_task(place.engine.generate(request, mine.append))
                await until(lambda: all(chunks))
                await asyncio.sleep(0.2)  # for some tokens that are not sent yet when the update comes
                new = await place.publish()
            last_old = []
            for mine in chunks:
                got = Answer(FinishReason.LENGTH, tuple(mine))
                scores = await place.engine.score(PROMPT + got.token_ids, len(PROMPT))
                num_old = sum(len(chunk.token_ids) for chunk in mine if chunk.version < new.version)
                assert 1 < num_old < 500
                apart = [abs(score - logprob) for score, logprob in zip(scores, got.logprobs, strict=True)]
                assert max(apart[num_old:]) < 1e-4
                last_old.append(apart[num_old - 1])
            assert sum(each > 1e-4 for each in last_old) >= 14  # one in 3,000 is as likely under both

    asyncio.run(run())


def test_packed_and_plain_answers_are_equal(servers: Servers) -> None:
    def written(rid: str) -> list[dict[str, Any]]:
        """The events that the server writes for the same draw."""
        body = {
            "rid": rid,
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 300, "sampling_seed": 7, "temperature": 1.0},
            "stream": True,
            "return_logprob": True,
            "extra_key": rid,  # no cached prefix
        }
        call = urllib.request.Request(f"{servers.engine_url}/generate", orjson.dumps(body), JSON)
        with urllib.request.urlopen(call, timeout=60) as answer:
            lines: list[bytes] = answer.read().split(b"\n")
        return [orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    def columns(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
        read = [read_event(orjson.dumps(event))["meta_info"]["output_token_logprobs"] for event in events]
        return [pair for one in read for pair in zip(one.token_ids, one.logprobs, strict=True)]

    packed, plain = written(f"{PACKED}for-us"), written("for-them")
    assert all("packed" in event and "output_ids" not in event for event in packed)
    assert all("packed" not in event and event["output_ids"] for event in plain)
    assert columns(packed) == columns(plain)
    assert len(columns(packed)) == 300


def test_a_stop_token_ends_the_answer_and_belongs_to_it(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place:
            ends = (3, 4, 5, 6, 7, 8)
            got = await answers(place.engine, [ask(place, seed, 500, stop_token_ids=ends) for seed in range(16)])
            for one in got:
                assert one.finish == FinishReason.STOP
                assert one.token_ids[-1] in ends
                assert not set(one.token_ids[:-1]) & set(ends)

    asyncio.run(run())


def test_a_stop_text_ends_the_answer_and_belongs_to_it(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place:
            got = await answers(place.engine, [ask(place, seed, 500, stop=("h", "i", "j")) for seed in range(16)])
            ends = {ord(letter) - ord("0") + 2 for letter in "hij"}
            for one in got:
                assert one.finish == FinishReason.STOP
                assert one.token_ids[-1] in ends
                assert not set(one.token_ids[:-1]) & ends

    asyncio.run(run())


def test_scores_are_those_of_transformers(servers: Servers) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3ForCausalLM

    async def run() -> tuple[tuple[float, ...], Weights]:
        async with open_sglang(servers) as place:
            return await place.engine.score(token_ids, 4), place.weights

    token_ids = (5, 63, 33, 12, 60, 0, 1, 63, 17, 63)
    scores, weights = asyncio.run(run())
    model = Qwen3ForCausalLM.from_pretrained(servers.model, dtype=torch.float32)
    with torch.no_grad():
        if weights.version:
            model.lm_head.weight *= 1.0 + 0.1 * weights.version
        logprobs = model(torch.tensor([token_ids])).logits.log_softmax(-1)[0]
    expected = [logprobs[place - 1, token_ids[place]].item() for place in range(4, len(token_ids))]
    assert scores == pytest.approx(expected, abs=1e-5)


async def interrupted(
    engine: RolloutEngine, requests: Sequence[Request], after_s: float = 0.0, probe: LoadProbe | None = None
) -> list[Answer]:
    """The answers that an interruption leaves, ``after_s`` behind the first token of the last of them.

    With ``probe``, once it has seen all of them at work: what a server says of itself is some steps old.
    """
    chunks: list[list[Chunk]] = [[] for _ in requests]
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(request, mine.append))
            for request, mine in zip(requests, chunks, strict=True)
        ]
        await until(lambda: all(chunks))
        await asyncio.sleep(after_s)
        loads = await full(probe, len(requests)) if probe else ()
        await engine.interrupt()
        assert all(task.done() for task in running)
    return [Answer(task.result(), tuple(mine), loads) for task, mine in zip(running, chunks, strict=True)]


async def full(probe: LoadProbe, running: int) -> tuple[EngineLoad, ...]:
    """The probe's answer once so many requests run, or at the deadline."""
    for _ in range(100):
        loads = await probe.loads()
        if sum(load.running for load in loads) == running:
            break
        await asyncio.sleep(0.1)
    return loads


async def emptied(place: Place) -> None:
    """Return once the server says that nothing runs, which it says a little after the last answer."""
    async with asyncio.timeout(5.0):
        while await place.num_running():  # noqa: ASYNC110 -- a remote server can only be polled
            await asyncio.sleep(0.02)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not is_true():  # noqa: ASYNC110 -- it depends on a remote server
            await asyncio.sleep(0.01)

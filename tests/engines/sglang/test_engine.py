"""The client of a real SGLang server: answers, interruptions, probes, loads, token versions and scores."""

import asyncio
import urllib.request
from typing import Any

import orjson
import pytest

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.loads import EngineLoads
from asyncrl.engines.sglang.client.payload import read_event
from asyncrl.engines.sglang.labels import PACKED
from asyncrl.errors import EngineError, EngineTimeout
from asyncrl.types import Chunk, FinishReason, Weights
from tests.generation import PROMPT, Answer, answer, answers, ask, full, interrupted, until
from tests.ports import free_ports
from tests.sglang_server import BEARER, KEY, Servers, main_process, open_sglang

pytestmark = [pytest.mark.timeout(1080), pytest.mark.filterwarnings("ignore::SyntaxWarning")]

JSON = {"Content-Type": "application/json"}


def test_an_interruption_leaves_the_requests_of_other_clients_alone(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as ours, open_sglang(servers) as others, asyncio.TaskGroup() as tasks:
            kept = [tasks.create_task(answer(others.engine, ask(others, seed, 200))) for seed in range(4)]
            got = await interrupted(ours.engine, [ask(ours, seed, 5000) for seed in range(4)], 0.1)
            assert {one.finish for one in got} == {FinishReason.ABORT}
            assert [len((await task).token_ids) for task in kept] == [200] * 4

    asyncio.run(run())


def test_a_retracted_request_that_is_interrupted_keeps_all_its_tokens(servers: Servers) -> None:
    """SGLang aborts a queued request without its unsent tokens: a retracted request must send them before."""

    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient(KEY) as http, asyncio.TaskGroup() as tasks:
            requests = [ask(place, seed, 1000) for seed in range(4)]
            whole = await answers(place.engine, requests)
            control = EngineControl(http, servers.engine_url, timeout_s=90.0)
            speed = await control.decoding_speed(10.0)
            assert speed is not None and speed.tokens_per_s > 0  # slow engines are found by it
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
            await control.continue_generation()
            for task, mine, one in zip(running, chunks, whole, strict=True):
                got = Answer(task.result(), tuple(mine))
                assert got.finish == FinishReason.ABORT
                assert got.token_ids == one.token_ids[: len(got.token_ids)]
                assert len(got.token_ids) > 1  # more than the first chunk

    asyncio.run(run())


def test_a_server_whose_scheduler_hangs_does_not_answer_a_probe(servers: Servers) -> None:
    children = main_process(servers).children(recursive=True)
    (scheduler,) = (each for each in children if "sglang::scheduler" in " ".join(each.cmdline()))

    async def run() -> None:
        async with HttpClient(KEY) as http:
            control = EngineControl(http, servers.engine_url, timeout_s=90.0)
            scheduler.suspend()
            try:
                with pytest.raises(EngineTimeout):
                    await control.probe(2.0)
            finally:
                scheduler.resume()
            await control.probe(30.0)
            await control.pause("in_place")
            await control.probe(10.0)
            await control.continue_generation()

    asyncio.run(run())


def test_load_is_reported_per_server_and_dead_servers_are_omitted(servers: Servers) -> None:
    async def run() -> None:
        dead = f"http://127.0.0.1:{free_ports(1)[0]}"
        async with open_sglang(servers) as place, HttpClient(KEY) as http:
            probe = EngineLoads(http, lambda: (dead, servers.engine_url))
            answers = await interrupted(place.engine, [ask(place, seed, 5000) for seed in range(4)], probe=probe)
            (busy,), (idle,) = answers[0].loads, await full(probe, 0)
            assert (busy.running, busy.waiting) == (4, 0)
            assert 0 < busy.kv_used < 4 * 5000 / 65536  # of --max-total-tokens
            assert (idle.running, idle.waiting, idle.kv_used) == (0, 0, 0.0)

    asyncio.run(run())


def test_a_server_can_be_emptied_only_when_nothing_runs(servers: Servers) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient(KEY) as http, asyncio.TaskGroup() as tasks:
            first = asyncio.Event()
            busy = tasks.create_task(place.engine.generate(ask(place, 1, 5000), lambda _: first.set()))
            await first.wait()
            with pytest.raises(EngineError, match="flush_cache"):
                await EngineControl(http, servers.engine_url, timeout_s=2.0).empty()
            await place.engine.interrupt()
            await busy
            await EngineControl(http, servers.engine_url, timeout_s=90.0).empty()

    asyncio.run(run())


def test_getting_a_server_ready_does_not_change_its_answers(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with open_sglang(servers) as place, HttpClient(KEY) as http:
            before = await answer(place.engine, ask(place, 1, 20))
            await EngineControl(http, servers.engine_url, timeout_s=90.0).get_ready(90.0)
            assert (await answer(place.engine, ask(place, 1, 20))).token_ids == before.token_ids

    asyncio.run(run())
    assert "garbage" not in caplog.text


def test_every_token_is_labelled_with_the_weights_that_generated_it(servers: Servers) -> None:
    """Only the output layer changes, so the KV cache stays valid and a token's log-prob identifies its weights."""

    async def run() -> None:
        async with open_sglang(servers) as place:
            requests = [ask(place, seed, 1000) for seed in range(16)]
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
                assert 1 < num_old < 1000
                apart = [abs(score - logprob) for score, logprob in zip(scores, got.logprobs, strict=True)]
                assert max(apart[num_old:]) < 1e-4
                last_old.append(apart[num_old - 1])
            assert sum(each > 1e-4 for each in last_old) >= 14  # one in 3,000 is as likely under both

    asyncio.run(run())


def test_packed_and_plain_answers_are_equal(servers: Servers) -> None:
    def written(rid: str) -> list[dict[str, Any]]:
        """The events that the server writes for one request, always with the same seed."""
        body = {
            "rid": rid,
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 300, "sampling_seed": 7, "temperature": 1.0},
            "stream": True,
            "return_logprob": True,
            "extra_key": rid,  # no cached prefix
        }
        call = urllib.request.Request(f"{servers.engine_url}/generate", orjson.dumps(body), {**JSON, **BEARER})
        with urllib.request.urlopen(call, timeout=180) as answer:
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


def test_scores_equal_those_of_transformers(servers: Servers) -> None:
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

"""The promises of ``RolloutEngine`` and ``WeightUpdater``, on the fake and on the real SGLang."""

import asyncio
import random

import pytest

from asyncrl.types import Chunk, FinishReason
from tests.contract.conftest import OpenPlace
from tests.generation import PROMPT, answer, answers, ask, emptied, interrupted, until

pytestmark = [pytest.mark.timeout(1080), pytest.mark.filterwarnings("ignore::SyntaxWarning")]


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


def test_cancelling_a_call_aborts_its_request_on_the_server(open_place: OpenPlace) -> None:
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


def test_an_interruption_also_ends_requests_that_were_just_sent(open_place: OpenPlace) -> None:
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


def test_an_interruption_does_not_affect_later_requests(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            await place.engine.interrupt()
            assert (await answer(place.engine, ask(place, 3, 40))).finish == FinishReason.LENGTH

    asyncio.run(run())


def test_requests_in_flight_survive_a_weight_update(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place, asyncio.TaskGroup() as tasks:
            chunks: list[list[Chunk]] = [[] for _ in range(8)]
            requests = [ask(place, seed, 2000) for seed in range(8)]
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
                assert sum(len(chunk.token_ids) for chunk in mine) == 2000

    asyncio.run(run())


@pytest.mark.timeout(600)  # SGLang compiles its kernel for penalties at the first of them
def test_a_repetition_penalty_changes_no_other_answer(open_place: OpenPlace) -> None:
    async def run() -> None:
        async with open_place() as place:
            plain = [ask(place, seed, 60) for seed in range(4)]
            alone = await answers(place.engine, plain)
            penalised = [ask(place, 10 + seed, 60, repetition_penalty=1.8) for seed in range(4)]
            mixed = await answers(place.engine, [*plain, *penalised])
            assert [one.token_ids for one in mixed[:4]] == [one.token_ids for one in alone]
            assert [len(one.token_ids) for one in mixed[4:]] == [60] * 4

    asyncio.run(run())

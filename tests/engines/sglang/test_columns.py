"""Kept ids and routes of a real SGLang server with a mixture of experts are those of transformers."""

import asyncio
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.launch import Flags
from asyncrl.token_columns import Routes
from asyncrl.types import Chunk, FinishReason, Request
from tests.generation import PROMPT, Answer, answers, ask, interrupted, until
from tests.sglang_server import KEY, Servers, open_sglang, start_servers
from tests.tiny_model import tiny_mixture

pytestmark = [pytest.mark.timeout(1080), pytest.mark.filterwarnings("ignore::SyntaxWarning")]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A server whose model is a mixture of experts."""
    flags: Flags = {"enable-return-routed-experts": True}
    with start_servers(tmp_path_factory.mktemp("mixture"), tiny_mixture, flags) as servers:
        yield servers


def logits_of(model: Path, token_ids: tuple[int, ...]) -> NDArray[np.float64]:
    """The logits that transformers computes at each position."""
    found: NDArray[np.float64] = _computed(model, token_ids).logits[0].double().numpy()
    return found


def experts_of(model: Path, token_ids: tuple[int, ...]) -> NDArray[np.int64]:
    """The experts that transformers chooses at each position but the last, by layer, in ascending order."""
    layers = [each.topk(2).indices.numpy() for each in _computed(model, token_ids).router_logits]
    return np.sort(np.stack(layers, axis=1)[:-1], axis=2)


def _computed(model: Path, token_ids: tuple[int, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return network(torch.tensor([token_ids]), output_router_logits=True)


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.9, -1, 0.0), (1.0, 20, 0.0), (0.9, 20, 0.0), (1.0, -1, 0.3)])
def test_log_probs_are_over_the_ids_that_were_kept(mixture: Servers, top_p: float, top_k: int, min_p: float) -> None:
    async def run() -> None:
        async with open_sglang(mixture) as place:
            limits: dict[str, Any] = {"top_p": top_p, "top_k": top_k, "extra": {"min_p": min_p} if min_p else {}}
            requests = [replace(ask(place, seed, 60 + seed, **limits), returns_kept=True) for seed in range(3)]
            for one in await answers(place.engine, requests):
                logits = logits_of(mixture.model, PROMPT + one.token_ids)[len(PROMPT) - 1 : -1]
                kept = [
                    chunk.kept.part(place, place + 1).ids_I
                    for chunk in one.chunks
                    if chunk.kept
                    for place in range(len(chunk.kept))
                ]
                assert len(kept) == len(one.token_ids)
                for token, logprob, ids, row in zip(one.token_ids, one.logprobs, kept, logits, strict=True):
                    over_kept = row[token] - np.log(np.exp(row[ids]).sum())
                    assert logprob == pytest.approx(over_kept, abs=1e-4)
                    assert_kept(row, ids, token, top_p, top_k, min_p)

    asyncio.run(run())


def assert_kept(
    logits: NDArray[np.float64], ids: NDArray[np.int32], token: int, top_p: float, top_k: int, min_p: float
) -> None:
    """Assert that ``ids`` are the likeliest ones, as many as the limits keep, but for rounding."""
    probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    assert token in ids
    ordered = np.sort(probs)[::-1]
    assert np.sort(probs[ids])[::-1] == pytest.approx(ordered[: len(ids)], abs=1e-5)
    before = ordered.cumsum() - ordered
    keeps = (before <= top_p) & (ordered >= min_p * ordered[0])
    keeps[top_k if top_k > 0 else len(ordered) :] = False
    is_near = (abs(before - top_p) < 1e-5) & (top_p < 1) | (abs(ordered - min_p * ordered[0]) < 1e-6) & (min_p > 0)
    assert keeps.sum() == len(ids) or is_near.any()
    assert len(ids) < len(ordered)


SHAPE = RoutesShape(num_layers=3, num_dense_layers=0, num_experts=8, num_chosen=2)


def routes_of(one: Answer) -> Routes:
    """The rows of all chunks; each chunk has the rows from which its tokens are predicted."""
    parts = [chunk.routes for chunk in one.chunks if chunk.routes is not None]
    assert len(parts) == len(one.chunks)
    assert [len(part) for part in parts[1:]] == [len(chunk.token_ids) for chunk in one.chunks[1:]]
    return Routes.joined(parts)


def assert_routed(model: Path, one: Answer, prompt: tuple[int, ...] = PROMPT, routes_from: int = 0) -> None:
    """Assert that an answer has the experts that transformers chooses, from a position of its prompt on."""
    routes = routes_of(one)
    assert routes.missing == ()
    expected = experts_of(model, prompt + one.token_ids)[routes_from:]
    assert np.array_equal(np.sort(routes.experts_NLK, axis=2), expected)


def asking(request: Request, routes_from: int = 0) -> Request:
    return replace(request, routes_from=routes_from)


def test_routes_come_with_each_chunk_and_are_those_of_the_model(mixture: Servers) -> None:
    async def run() -> None:
        async with open_sglang(mixture, SHAPE) as place:
            sizes = (1, 2, 600, 30)  # of one chunk and of several
            requests = [asking(ask(place, seed, size), seed) for seed, size in enumerate(sizes)]
            for seed, one in enumerate(await answers(place.engine, requests)):
                assert_routed(mixture.model, one, routes_from=seed)

    asyncio.run(run())


def test_a_resumed_answer_asks_for_the_rows_that_are_new(mixture: Servers) -> None:
    async def run() -> None:
        async with open_sglang(mixture, SHAPE) as place:
            requests = [asking(ask(place, seed, 5000)) for seed in range(4)]
            first = await interrupted(place.engine, requests, 0.3)
            before = [PROMPT + one.token_ids for one in first]
            more = [asking(ask(place, seed, 40, tokens), len(tokens) - 1) for seed, tokens in enumerate(before)]
            for tokens, one, rest in zip(before, first, await answers(place.engine, more), strict=True):
                assert one.finish is FinishReason.ABORT
                assert_routed(mixture.model, one)
                assert_routed(mixture.model, rest, tokens, len(tokens) - 1)

    asyncio.run(run())


def test_a_retracted_answer_has_each_row_once_also_if_it_is_aborted_then(mixture: Servers) -> None:
    async def run() -> None:
        async with open_sglang(mixture, SHAPE) as place, HttpClient(KEY) as http, asyncio.TaskGroup() as tasks:
            control = EngineControl(http, mixture.engine_url, timeout_s=90.0)
            requests = [asking(ask(place, seed, 300)) for seed in range(4)]
            chunks: list[list[Chunk]] = [[] for _ in requests]
            running = [
                tasks.create_task(place.engine.generate(request, mine.append))
                for request, mine in zip(requests, chunks, strict=True)
            ]
            for ends in (False, True):
                await until(lambda: all(chunks))
                await asyncio.sleep(0.2)
                await control.pause("retract")
                await control.probe(10.0)
                await asyncio.sleep(0.2)
                if ends:
                    await place.engine.interrupt()
                await control.continue_generation()
            for task, mine in zip(running, chunks, strict=True):
                assert_routed(mixture.model, Answer(task.result(), tuple(mine)))

    asyncio.run(run())


def test_requests_of_others_get_no_routes(mixture: Servers) -> None:
    async def run() -> None:
        async with open_sglang(mixture, SHAPE) as place:
            asked, plain = await answers(place.engine, [asking(ask(place, 1, 20)), ask(place, 1, 20)])
            assert asked.token_ids == plain.token_ids
            assert [chunk.routes for chunk in plain.chunks] == [None] * len(plain.chunks)

    asyncio.run(run())

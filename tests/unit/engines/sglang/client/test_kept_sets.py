"""Log-probs within top-p and top-k are those over the ids that SGLang kept, or unknown."""

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.labels import PACKED, STAMPS
from asyncrl.engines.sglang.packed import MASK, MASK_LOGPROBS, TOP, pack
from asyncrl.token_columns import TokenSets
from asyncrl.types import Chunk, FinishReason, SamplingParams
from tests.unit.engines.sglang.client.test_engine_errors import REQUEST, sending, server

NUCLEUS = replace(
    REQUEST,
    sampling=SamplingParams(temperature=1.0, top_p=0.9, top_k=-1, max_new_tokens=9),
    returns_kept=True,
)
REFUSAL = "return_sampling_mask is not supported with speculative decoding."


def event(
    tokens: list[int],
    kept: list[list[int]] | None,
    finish: dict[str, Any] | None = None,
    *,
    top: list[list[int]] | None = None,
    is_packed: bool = False,
) -> bytes:
    """An event with two versions, whose log-probs are -1.5 over the vocabulary and -0.5 over the kept ids."""
    meta: dict[str, Any] = {
        "id": f"{PACKED}r1",
        "finish_reason": finish,
        "weight_version": "5",
        "completion_tokens": len(tokens),
        STAMPS: ["4"] + ["5"] * (len(tokens) - 1),
        "output_token_logprobs": [[-1.5, token, None] for token in tokens],
    }
    if kept is not None:
        meta |= {MASK: kept, MASK_LOGPROBS: [-0.5] * len(kept)}
    if top is not None:
        meta[TOP] = [[[-float(token), token, None] for token in tokens] for tokens in top]
    found = {"text": "", "output_ids": tokens, "meta_info": meta}
    return b"data: " + orjson.dumps(pack(found) if is_packed else found) + b"\n\n"


def generated(
    answers: Callable[[dict[str, Any]], bytes],
    request: Any = NUCLEUS,
    times: int = 1,
    routes: RoutesShape | None = None,
) -> Any:
    """The chunks of the last of ``times`` answers, and the bodies of all requests."""
    bodies: list[dict[str, Any]] = []
    chunks: list[Chunk] = []

    async def answer(asked: web.Request) -> web.StreamResponse:
        bodies.append(await asked.json())
        return await sending(answers(bodies[-1]))(asked)

    async def run() -> None:
        async with server(answer, []) as url, HttpClient() as http:
            engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=5.0, routes=routes)
            for _ in range(times):
                chunks.clear()
                assert await engine.generate(request, chunks.append) is FinishReason.STOP

    asyncio.run(run())
    return chunks, bodies


def sets(*ids: list[int]) -> TokenSets:
    return TokenSets(counts_T=np.array([*map(len, ids)], np.int32), ids_I=np.array([*chain(*ids)], np.int32))


@pytest.mark.parametrize("is_packed", [False, True])
def test_log_probs_are_over_the_kept_ids_and_cut_with_the_versions(is_packed: bool) -> None:
    whole = event([7, 8, 9], [[7, 1], [8], [2, 9, 3]], {"type": "stop"}, is_packed=is_packed)
    (first, second), (body,) = generated(lambda _: whole)
    assert (first.version, first.kept, first.logprobs) == (4, sets([7, 1]), array("f", [-0.5]))
    assert (second.version, second.kept, second.logprobs) == (5, sets([8], [2, 9, 3]), array("f", [-0.5, -0.5]))
    assert body["return_sampling_mask"] is True
    assert body["sampling_params"]["top_k"] == 2**30 - 1  # SGLang refuses the field without a limit


def test_nothing_is_asked_where_all_of_the_vocabulary_is_drawn_from() -> None:
    plain = event([7], None, {"type": "stop"})
    for request in (
        REQUEST,
        replace(REQUEST, returns_kept=True),
        replace(NUCLEUS, returns_kept=False),
        replace(NUCLEUS, sampling=replace(NUCLEUS.sampling, temperature=0.0)),
    ):
        (chunk,), (body,) = generated(lambda _: plain, request)
        assert "return_sampling_mask" not in body
        assert body["sampling_params"]["top_k"] == -1
        assert (chunk.logprobs, chunk.kept) == (array("f", [-1.5]), None)


def test_a_top_k_is_sent_as_it_is() -> None:
    request = replace(NUCLEUS, sampling=replace(NUCLEUS.sampling, top_p=1.0, top_k=20))
    _, (body,) = generated(lambda _: event([7], [[7]], {"type": "stop"}), request)
    assert (body["sampling_params"]["top_k"], body["return_sampling_mask"]) == (20, True)


@pytest.mark.parametrize("kept", [None, [[7, 1]]], ids=["no sets", "too few sets"])
def test_log_probs_are_unknown_where_the_answer_lacks_the_sets(
    kept: list[list[int]] | None, caplog: pytest.LogCaptureFixture
) -> None:
    chunks, _ = generated(lambda _: event([7, 8], kept, {"type": "stop"}), times=2)
    assert [math.isnan(logprob) for chunk in chunks for logprob in chunk.logprobs] == [True, True]
    assert [chunk.kept for chunk in chunks] == [None, None]
    assert len([each for each in caplog.records if "trainer's log-probs" in each.message]) == 1


def test_a_server_that_refuses_the_sets_is_asked_again_without_and_then_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answers(body: dict[str, Any]) -> bytes:
        refused = {"type": "abort", "message": REFUSAL, "status_code": 400}
        return event([], None, refused) if "return_sampling_mask" in body else event([7], None, {"type": "stop"})

    (chunk,), bodies = generated(answers, times=2)
    assert ["return_sampling_mask" in body for body in bodies] == [True, False, False]
    assert math.isnan(chunk.logprobs[0])
    assert caplog.text.count(REFUSAL) == 1


def test_min_p_is_within_the_sets_but_not_with_both_other_limits() -> None:
    alone = replace(NUCLEUS.sampling, top_p=1.0, extra={"min_p": 0.1})
    _, (body,) = generated(lambda _: event([7], [[7]], {"type": "stop"}), replace(NUCLEUS, sampling=alone))
    assert body["return_sampling_mask"] is True
    all_three = replace(alone, top_p=0.9, top_k=20)
    (chunk,), (body,) = generated(lambda _: event([7], None, {"type": "stop"}), replace(NUCLEUS, sampling=all_three))
    assert "return_sampling_mask" not in body
    assert math.isnan(chunk.logprobs[0])


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_likeliest_ids_come_with_log_probs_and_are_cut_with_the_versions(is_packed: bool) -> None:
    whole = event([7, 8, 9], None, {"type": "stop"}, top=[[1, 7], [8, 2], [3, 4]], is_packed=is_packed)
    (first, second), (body,) = generated(lambda _: whole, replace(REQUEST, num_top=2))
    assert body["top_logprobs_num"] == 2
    assert first.top == with_logprobs(sets([1, 7]), [-1, -7])
    assert second.top == with_logprobs(sets([8, 2], [3, 4]), [-8, -2, -3, -4])


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_likeliest_ids_within_top_p_are_kept_ones_with_log_probs_over_these(is_packed: bool) -> None:
    whole = event([7, 8], [[7, 1], [8]], {"type": "stop"}, top=[[1, 2], [8, 7]], is_packed=is_packed)
    chunks, _ = generated(lambda _: whole, replace(NUCLEUS, num_top=2))
    # The token's log-probs, -1.5 over the vocabulary and -0.5 over the kept ids, tell how much was kept.
    assert [chunk.top for chunk in chunks] == [with_logprobs(sets([1]), [0]), with_logprobs(sets([8]), [-7])]


def test_a_request_without_likeliest_ids_does_not_ask() -> None:
    (chunk,), (body,) = generated(lambda _: event([7], None, {"type": "stop"}), REQUEST)
    assert "top_logprobs_num" not in body
    assert chunk.top is None


def with_logprobs(found: TokenSets, logprobs: list[float]) -> TokenSets:
    return replace(found, logprobs_I=np.array(logprobs, np.float32))

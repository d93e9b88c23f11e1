"""Routes of experts reach the chunks, cut with them, from the plug-in's rows and from SGLang's own."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from numpy.typing import NDArray

from asyncrl.engines.sglang.client.routes import RouteReader, RoutesShape
from asyncrl.engines.sglang.labels import PACKED, ROUTES, STAMPS, asked_in
from asyncrl.engines.sglang.packed import pack
from asyncrl.token_columns import Routes
from tests.unit.engines.sglang.client.test_engine_errors import REQUEST
from tests.unit.engines.sglang.client.test_kept_sets import generated

SHAPE = RoutesShape(num_layers=3, num_dense_layers=1, num_experts=8, num_chosen=2)
ASKING = replace(REQUEST, token_ids=(1, 2, 3), routes_from=1)


def rows(start: int, stop: int) -> NDArray[np.uint8]:
    """The rows of two mixture layers at these positions."""
    first = np.arange(start, stop)[:, None] + np.array([0, 3])
    return np.asarray(np.stack([first % 8, (first + 5) % 8], axis=2), np.uint8)


def stock(start: int, stop: int) -> NDArray[np.int32]:
    """The same rows as SGLang itself sends them: with zeros for the dense layer."""
    return np.concatenate([np.zeros((stop - start, 1, 2), np.int32), rows(start, stop).astype(np.int32)], axis=1)


def text(found: NDArray[Any]) -> str:
    return pybase64.b64encode_as_string(found.tobytes())


def event(
    tokens: list[int], routes: Any, finish: dict[str, Any] | None = None, *, is_packed: bool = False, done: int = 0
) -> bytes:
    meta: dict[str, Any] = {
        "id": f"{PACKED}r1",
        "finish_reason": finish,
        "weight_version": "5",
        "completion_tokens": done + len(tokens),
        STAMPS: ["4"] + ["5"] * (len(tokens) - 1),
        "output_token_logprobs": [[-1.5, token, None] for token in tokens],
        **({} if routes is None else {ROUTES: routes}),
    }
    found = {"text": "", "output_ids": tokens, "meta_info": meta}
    return b"data: " + orjson.dumps(pack(found) if is_packed else found) + b"\n\n"


@pytest.mark.parametrize("is_packed", [False, True])
def test_rows_come_with_the_tokens_that_they_predict(is_packed: bool) -> None:
    first = event([7, 8, 9], text(rows(1, 5)), is_packed=is_packed)
    last = event([4], text(rows(5, 6)), {"type": "stop"}, is_packed=is_packed, done=3)
    chunks, (body,) = generated(lambda _: first + last, ASKING, routes=SHAPE)
    assert [each.token_ids for each in chunks] == [(7,), (8, 9), (4,)]
    edges = [1, 3, 5, 6]  # the first chunk begins at the position that was asked for
    for chunk, start, stop in zip(chunks, edges, edges[1:], strict=False):
        assert chunk.routes == Routes(experts_NLK=rows(start, stop))
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 1)
    asked = asked_in(body["rid"])
    assert asked is not None
    assert asked.routes_from == 1


def test_rows_of_events_that_were_joined_are_joined() -> None:
    whole = event([7, 8, 9], [text(rows(1, 3)), text(rows(3, 5))], {"type": "stop"}, is_packed=True)
    chunks, _ = generated(lambda _: whole, ASKING, routes=SHAPE)
    assert Routes.joined([each.routes for each in chunks]) == Routes(experts_NLK=rows(1, 5))


def test_without_the_plug_in_all_rows_come_with_the_last_tokens_and_lose_dense_layers() -> None:
    first, last = event([7, 8], None), event([9], text(stock(1, 5)), {"type": "stop"}, done=2)
    *early, late = generated(lambda _: first + last, ASKING, routes=SHAPE)[0]
    assert [each.routes for each in early] == [None, None]
    assert late.routes == Routes(experts_NLK=rows(1, 5))


def test_nothing_is_asked_of_servers_without_routes_or_without_need() -> None:
    for request, shape in ((ASKING, None), (replace(ASKING, routes_from=None), SHAPE)):
        (chunk,), (body,) = generated(lambda _: event([7], None, {"type": "stop"}), request, routes=shape)
        assert chunk.routes is None
        assert not [name for name in body if "routed" in name]


@pytest.mark.parametrize(
    ("data", "missing"),
    [
        (rows(0, 4).tobytes(), ()),
        (rows(0, 3).tobytes(), ((0, 4),)),
        (b"", ((0, 4),)),
        (np.zeros_like(rows(0, 4)).tobytes(), ((0, 4),)),  # a backend that never reached the capture
        (np.where(np.arange(4)[:, None, None] == 1, 5, rows(0, 4)).astype(np.uint8).tobytes(), ((1, 2),)),
        (np.where(np.arange(4)[:, None, None] >= 2, rows(0, 4) + 8, rows(0, 4)).astype(np.uint8).tobytes(), ((2, 4),)),
        (np.where(np.arange(4)[:, None, None] == 3, -1, stock(0, 4)).astype(np.int32).tobytes(), ((3, 4),)),
    ],
    ids=["right", "too few", "none", "zeros", "one twice", "unknown experts", "negative"],
)
def test_rows_that_cannot_be_routes_are_missing_with_one_warning(
    data: bytes, missing: tuple[tuple[int, int], ...], caplog: pytest.LogCaptureFixture
) -> None:
    reader = RouteReader(SHAPE)
    for _ in range(2):
        found = reader.read(data, 4)
        assert (len(found), found.missing) == (4, missing)
    assert found.experts_NLK.dtype == np.uint8
    assert caplog.text.count("rollout/routes_missing") == bool(missing)


def test_many_experts_take_two_bytes() -> None:
    reader = RouteReader(replace(SHAPE, num_experts=384))
    wide = rows(0, 4).astype(np.uint16) + 300
    assert reader.read(wide.tobytes(), 4) == Routes(experts_NLK=wide)


def test_an_answer_that_ends_without_routes_gives_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    generated(lambda _: event([7], None, {"type": "stop"}), ASKING, times=2, routes=SHAPE)
    assert caplog.text.count("an answer without any") == 1

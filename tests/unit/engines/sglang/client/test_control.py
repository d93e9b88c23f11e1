"""The parsing of a server's answers to commands."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engines.sglang.client.control import EngineControl
from asyncrl.engines.sglang.labels import (
    DIRECT,
    DIRECT_BY_PART,
    DIRECT_BY_PART_CHECKED,
    DIRECT_CHECKED,
    EXPERT_PARTS,
    NOT_REPLAYED,
    RECORDED,
    STOOD_STILL,
)
from asyncrl.engines.slow_engines import DecodingSpeed
from asyncrl.engines.weight_sync.broadcast import Received
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.expert_parts import EngineParts
from asyncrl.types import RankBytes

PARTS = f'{EXPERT_PARTS}{{"num_parts": 2, "needs": [3, 2, 0], "bytes": [[8, 8], [16, 12]]}}'
BUCKET = WeightBucket(names=("a",), dtypes=("float32",), shapes=((2,),), num_bytes=8)


class Http:
    """An HTTP client that always returns one answer."""

    def __init__(self, message: str) -> None:
        self.asked: list[dict[str, Any]] = []
        self._message = message

    async def command(self, url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append(body)
        return {"success": True, "message": self._message}


def control(message: str) -> EngineControl:
    return EngineControl(Http(message), "http://engine", timeout_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "received"),
    [
        # SGLang adds a sentence; with data-parallel attention it joins the answers of all ranks.
        (
            f"{RECORDED} {STOOD_STILL}0.012345 Weight version updated to 4.",
            Received(is_recorded=True, still_s=0.012345),
        ),
        (f"ok {STOOD_STILL}1.5 | ok {STOOD_STILL}1.6", Received(is_recorded=False, still_s=1.6)),
        (
            f'{RECORDED} {NOT_REPLAYED}["b", "a"] | {RECORDED} {NOT_REPLAYED}["b"] {STOOD_STILL}1.5',
            Received(is_recorded=True, still_s=1.5, not_replayed=("a", "b")),
        ),
        (
            f"{RECORDED} {PARTS} {STOOD_STILL}1.5 | {RECORDED} {PARTS} {STOOD_STILL}1.25",
            Received(
                is_recorded=True,
                still_s=1.5,
                parts=EngineParts(
                    num_parts=2,
                    needed_by=(frozenset({0, 1}), frozenset({1}), frozenset()),
                    bytes_per_rank=(RankBytes(received=8, needed=8), RankBytes(received=16, needed=12)),
                ),
            ),
        ),
        ("Succeeded to update. Weight version updated to 4.", Received(is_recorded=False)),
    ],
)
def test_the_answer_to_an_update_reports_kept_buckets_and_the_pause(message: str, received: Received) -> None:
    told = control(message)
    assert asyncio.run(told.receive_bucket(BUCKET, group_name="g", label="4")) == received
    everything = told.receive_all([BUCKET], group_name="g", label="4", is_checked=False, by_part=False)
    assert asyncio.run(everything) == received
    assert asyncio.run(told.receive_folder(Path("weights"), label="4", timeout_s=1.0)) == received.still_s


@pytest.mark.parametrize(
    ("by_part", "is_checked", "load_format"),
    [
        (False, False, DIRECT),
        (False, True, DIRECT_CHECKED),
        (True, False, DIRECT_BY_PART),
        (True, True, DIRECT_BY_PART_CHECKED),
    ],
)
def test_an_update_by_part_names_the_part_of_each_bucket(by_part: bool, is_checked: bool, load_format: str) -> None:
    http = Http(RECORDED)
    engine = EngineControl(http, "http://engine", timeout_s=1.0)  # type: ignore[arg-type]
    buckets = [BUCKET, replace(BUCKET, names=("b",), expert_part=1)]
    asyncio.run(engine.receive_all(buckets, group_name="g", label="4", is_checked=is_checked, by_part=by_part))
    (body,) = http.asked
    assert (body["names"], body["load_format"]) == (["a", "b"], load_format)
    assert body["shapes"] == ([[], [1]] if by_part else [])


@pytest.mark.parametrize(
    ("state", "speed"),
    [
        (
            {"internal_states": [{"last_gen_throughput": 1.5}, {"last_gen_throughput": 2.25}]},
            DecodingSpeed(tokens_per_s=3.75, running=7),
        ),
        ({"internal_states": [{}]}, None),  # another SGLang
        ({}, None),
    ],
)
def test_the_speed_of_an_engine_is_the_sum_over_its_ranks(state: dict[str, Any], speed: DecodingSpeed | None) -> None:
    class Answers:
        async def look(self, url: str, timeout_s: float) -> dict[str, Any]:
            return {"loads": [{"num_running_reqs": 3}, {"num_running_reqs": 4}]} if "/v1/loads" in url else state

    engine = EngineControl(Answers(), "http://engine", timeout_s=1.0)  # type: ignore[arg-type]
    assert asyncio.run(engine.decoding_speed(1.0)) == speed

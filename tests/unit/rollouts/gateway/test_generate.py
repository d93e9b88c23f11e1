"""``POST /generate`` and the pages around it, as SGLang and its router answer."""

import asyncio
import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from asyncrl.errors import EngineRejected, SampleFailed
from asyncrl.types import FinishReason
from tests.unit.rollouts.gateway.world import Client, World, run

META = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "reasoning_tokens"),
    *("completion_tokens", "cached_tokens", "cached_tokens_details", "dp_rank", "e2e_latency", "token_versions"),
}


def test_an_answer_has_the_fields_of_sglang(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains.<|im_end|>"])
        asked = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0}, "return_logprob": True, "rid": "mine"}
        status, body = await client.post("/generate", asked)
        written = client.session.record.lines[0].turns[0][1]
        assert (status, set(body)) == (200, {"text", "output_ids", "meta_info"})
        assert (body["text"], tuple(body["output_ids"])) == ("It rains.", written.token_ids)
        meta = body["meta_info"]
        assert set(meta) == META | {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}
        assert meta["finish_reason"] == {"type": "stop", "matched": world.im_end}
        assert meta["output_token_logprobs"] == [
            [logprob, token, None] for logprob, token in zip(written.logprobs, written.token_ids, strict=True)
        ]
        assert meta["output_token_logprobs_length"] == len(written.token_ids)
        assert meta["input_token_logprobs"] == []
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 3, len(written.token_ids))
        assert (meta["weight_version"], meta["token_versions"]) == ("3", ["3"] * len(written.token_ids))

    run(test, World(tmp_path))


def test_log_probs_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        _, body = await world.episode(["It rains."]).post("/generate", {"input_ids": [5]})
        assert set(body["meta_info"]) == META

    run(test, World(tmp_path))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "It "),
        ({"no_stop_trim": True}, "It rains"),
        ({"stop": []}, "It rains.\n\nHello"),
        ({"stop": [], "skip_special_tokens": False, "no_stop_trim": True}, "It rains.\n\nHello<|im_end|>"),
        ({"stop": [], "skip_special_tokens": False}, "It rains.\n\nHello"),
    ],
)
def test_texts_are_trimmed_as_asked(tmp_path: Path, params: dict[str, Any], text: str) -> None:
    async def test(world: World) -> None:
        answer = "It rains" if params.get("stop", True) else "It rains.\n\nHello<|im_end|>"
        client = world.episode([answer])
        params.setdefault("stop", ["rains"])
        _, body = await client.post("/generate", {"input_ids": [5], "sampling_params": params})
        assert body["text"] == text
        assert body["meta_info"]["finish_reason"]["matched"] == (params["stop"] or [world.im_end])[0]

    run(test, World(tmp_path))


def test_sampling_settings_reach_the_engine(tmp_path: Path) -> None:
    asked = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_new_tokens": 2000, "stop": "x", "stop_token_ids": [9]},
        **{"min_p": 0.1, "sampling_seed": 3, "spaces_between_special_tokens": False, "ignore_eos": True, "regex": None},
    }

    async def test(world: World) -> None:
        client = world.episode(["It rains."])
        await client.post("/generate", {"input_ids": [5], "sampling_params": asked})
        sampling = client.turns.asked[0][1]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 20)
        assert (sampling.max_new_tokens, sampling.stop, sampling.stop_token_ids) == (2000, ("x",), (9,))
        assert sampling.extra == {"min_p": 0.1, "ignore_eos": True}

    run(test, World(tmp_path))


def test_without_settings_the_run_s_apply(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."])
        await client.post("/generate", {"input_ids": [5]})
        assert client.turns.asked[0][1] == client.session.start.sampling

    run(test, World(tmp_path))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"input_ids": [5], "sampling_params": {"foo": 1}}, "Unexpected keyword argument 'foo'"),
        (
            {"input_ids": [5], "sampling_params": {"temperature": -1}},
            "temperature must be a non-negative finite number",
        ),
        ({"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1], got 0."),
        ({"input_ids": [5], "sampling_params": {"min_new_tokens": 99}}, "min_new_tokens must be in [0, max_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"stop": 5}}, "stop must be a text or a list of texts, got 5"),
        ({"input_ids": [5], "sampling_params": {"n": 2000}}, "n must be at most 1024, got 2000"),
        (
            {"input_ids": [5], "sampling_params": {"stop_token_ids": [5, 1000]}},
            "stop_token_ids must be 0 to 999, got 1000",
        ),
        (
            {"input_ids": [5], "sampling_params": {"custom_params": json.loads(300 * "[" + 300 * "]")}},
            "custom_params must be nested at most 250 levels deep",
        ),
        (
            {"input_ids": [5], "sampling_params": {"json_schema": {"type": "object"}}},
            "json_schema must be a text that is not empty, got {'type': 'object'}",
        ),
        (
            {"input_ids": [5], "sampling_params": {"logit_bias": {"5": "1"}}},
            "logit_bias must be an object of numbers by token id, got {'5': '1'}",
        ),
        ({"input_ids": []}, "must not be empty"),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": [5, 1000]}, "token ids must be 0 to 999, got 1000"),
        ({"input_ids": [5, -1]}, "token ids must be 0 to 999, got -1"),
        ({"input_ids": list(range(900)) * 5}, "longer than the model's context length"),
        ({"input_ids": [5], "image_data": ["x"]}, "image_data is not supported"),
        ({"input_ids": [5], "return_routed_experts": True}, "return_routed_experts is not supported"),
        ([1], "the body must be a JSON object"),
    ],
)
def test_wrong_requests_get_one_line_and_reach_no_engine(tmp_path: Path, body: object, line: str) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."])
        status, found = await client.post("/generate", body)
        assert status == 400
        assert line in found["error"]["message"]
        assert "\n" not in found["error"]["message"]
        assert not client.turns.asked

    run(test, World(tmp_path))


def test_several_answers_and_several_prompts_are_lists(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(lambda call, *_: f"It is {call}.")
        _, many = await client.post("/generate", {"input_ids": [5], "sampling_params": {"n": 3}})
        assert [each["text"] for each in many] == ["It is 0.", "It is 1.", "It is 2."]
        assert client.session.record.branches == {"parallel": 2}
        _, many = await client.post("/generate", {"input_ids": [[5], [6]], "sampling_params": [{}, {"top_k": 7}]})
        assert [each["text"] for each in many] == ["It is 3.", "It is 4."]
        assert [sampling.top_k for _, sampling in client.turns.asked[3:]] == [-1, 7]
        _, one = await client.post("/generate", {"text": ["Hello"]})
        assert isinstance(one, list)

    run(test, World(tmp_path))


def test_a_stream_is_cumulative(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains.\n\nHello there, how are you?<|im_end|>"])
        _, lines = await client.post("/generate", {"input_ids": [5], "stream": True, "return_logprob": True})
        assert lines[-1] == b"[DONE]"
        events = [orjson.loads(line) for line in lines[:-1]]
        assert len(events) > 2
        for before, after in itertools.pairwise(events):
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None
            assert len(before["meta_info"]["output_token_logprobs"]) == len(before["output_ids"])
        assert events[-1]["text"] == "It rains.\n\nHello there, how are you?"
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"

    run(test, World(tmp_path))


def test_log_probs_of_the_input_are_those_of_the_record(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains.", "Hello"])
        _, first = await client.post("/generate", {"input_ids": [5, 6], "return_logprob": True})
        written = first["output_ids"]
        asked = {"input_ids": [5, 6, *written, 7], "return_logprob": True, "logprob_start_len": 1}
        _, second = await client.post("/generate", asked)
        logprobs = [logprob for logprob, _, _ in first["meta_info"]["output_token_logprobs"]]
        assert second["meta_info"]["input_token_logprobs"] == [
            [None, 6, None],
            *([logprob, token, None] for logprob, token in zip(logprobs, written, strict=True)),
            [None, 7, None],
        ]
        assert second["meta_info"]["cached_tokens"] == 2 + len(written)

    run(test, World(tmp_path))


def test_an_answer_that_was_cut_says_so(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."], finish=FinishReason.LENGTH)
        _, body = await client.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}})
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 2}

    run(test, World(tmp_path))


@pytest.mark.parametrize(("error", "status"), [(SampleFailed("no engine"), 500), (EngineRejected("too odd"), 400)])
def test_errors_of_engines_are_named(tmp_path: Path, error: Exception, status: int) -> None:
    async def test(world: World) -> None:
        found, body = await world.episode(lambda *_: error).post("/generate", {"input_ids": [5]})
        assert (found, body["error"]["message"]) == (status, f"{type(error).__name__}: {error}")

    run(test, World(tmp_path))


def test_more_turns_than_allowed_are_refused(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."])
        await client.post("/generate", {"input_ids": [5]})
        status, body = await client.post("/generate", {"input_ids": [5]})
        assert status == 403
        assert "max-turns is 1" in body["error"]["message"]

    run(test, World(tmp_path, max_turns=1))


def test_a_bug_in_the_pipeline_ends_the_run(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(lambda *_: KeyError("slot"))
        status, body = await client.post("/generate", {"input_ids": [5]})
        assert (status, body["error"]["message"]) == (500, "internal error of the gateway")
        await asyncio.Event().wait()  # the gateway ends the block

    with pytest.raises(KeyError, match="slot"):
        run(test, World(tmp_path))


def test_the_pages_of_a_server_and_a_router_are_there(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode([])
        assert (await client.get("/health"))[0] == (await client.get("/health_generate"))[0] == 200
        _, info = await client.get("/model_info")
        assert info == (await client.get("/get_model_info"))[1]
        assert (info["model_path"], info["has_image_understanding"], info["weight_version"]) == (
            "/models/tiny",
            False,
            "3",
        )
        _, workers = await client.get("/workers")
        assert [worker["url"] for worker in workers["workers"]] == [client.url]
        _, models = await client.get("/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 4096)
        status, body = await client.get("/flush_cache")
        assert (status, body["error"]["type"]) == (404, "not_found_error")

    run(test, World(tmp_path))


def test_a_client_that_leaves_cancels_its_call(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."], gate=asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.post("/generate", {"input_ids": [5]}))
            await client.turns.started.wait()  # one that leaves earlier has no call
            asked.cancel()
        assert asked.cancelled()
        await client.turns.cancelled.wait()

    run(test, World(tmp_path))


def test_a_request_is_aborted_by_its_id(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."], gate=asyncio.Event())
        other = world.episode([], name="e1")
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.post("/generate", {"input_ids": [5], "rid": "mine"}))
            await client.turns.started.wait()
            await other.post("/abort_request", {"rid": "mine"})  # of another episode: no effect
            assert not client.turns.num_cancelled
            status, _ = await client.post("/abort_request", {"rid": "mine"})
            assert status == 200
        assert asked.result()[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert (client.turns.num_cancelled, client.session.record.lines) == (1, [])

    run(test, World(tmp_path))


def test_large_bodies_are_refused(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode([])
        data = io.BytesIO(orjson.dumps({"text": "x" * (1 << 20)}))
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{client.url}/generate", data=data, headers=client.bearer) as response,
        ):
            assert response.status == 413
            assert "too large" in (await response.json())["error"]["message"]

    run(test, World(tmp_path))


# ---- whose request it is


async def _asked(client: Client, headers: dict[str, str]) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{client.url}/generate", json={"input_ids": [5]}, headers=headers) as response,
    ):
        return response.status


def _basic(name: str, password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"}


def test_a_key_is_accepted_in_each_place(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(lambda *_: "It rains.")
        address = client.address
        assert await _asked(client, {"Authorization": f"Bearer {address.key}"}) == 200
        assert await _asked(client, {"x-api-key": address.key}) == 200
        assert await _asked(client, {"X-SMG-Routing-Key": address.key}) == 200
        assert await _asked(client, _basic(address.key, address.secret)) == 200
        assert await _asked(client, _basic(address.key, "wrong")) == 401
        assert await _asked(client, _basic(address.key, "wröng")) == 401
        assert await _asked(client, {"Authorization": "Bearer wrong"}) == 401
        assert await _asked(client, {"Authorization": "Basic wrong"}) == 401
        assert await _asked(client, {}) == 401
        url = f"http://{address.key}:{address.secret}@{address.host}:{address.port}/generate"
        async with aiohttp.ClientSession() as http, http.post(url, json={"input_ids": [5]}) as response:
            assert response.status == 200

    run(test, World(tmp_path))


def test_a_request_without_a_key_belongs_to_the_episode_that_it_extends(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        clients = [world.episode(lambda *_: "It rains.", f"What is {n}?", name=f"e{n}") for n in (1, 2, 2)]
        status, body = await clients[0].post("/generate", {"text": "What is 1?"}, {"Authorization": "Bearer EMPTY"})
        assert (status, len(clients[0].turns.asked)) == (200, 1)
        ids = [*clients[0].turns.asked[0][0], *body["output_ids"], 7]
        assert (await clients[0].post("/generate", {"input_ids": ids}, {}))[0] == 200
        assert len(clients[0].turns.asked) == 2
        status, body = await clients[0].post("/generate", {"text": "What is 2?"}, {})
        assert (status, "fits 2 open episodes" in body["error"]["message"]) == (401, True)
        status, body = await clients[0].post("/generate", {"text": "Hello"}, {})
        assert (status, "no open episode" in body["error"]["message"]) == (401, True)

    run(test, World(tmp_path))


def test_a_program_that_keeps_its_first_address_is_told_apart_by_content(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        first, second = (world.episode(lambda *_: "It rains.", f"What is {n}?", name=f"e{n}") for n in (1, 2))
        world.gateway.close(first.address)
        status, _ = await first.post("/generate", {"text": "What is 2?"})
        assert (status, len(second.turns.asked)) == (200, 1)
        status, body = await first.post("/generate", {"text": "What is 1?"})
        assert (status, body["error"]["type"]) == (410, "episode_ended")

    run(test, World(tmp_path))


def test_the_end_of_an_episode_ends_its_requests(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It rains."], gate=asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(client.post("/generate", {"input_ids": [5]}))
            await client.turns.started.wait()
            world.gateway.close(client.address)
            world.gateway.close(client.address)
        line = "EpisodeEnded: e0: the episode is over"
        assert (asked.result()[0], asked.result()[1]["error"]["message"]) == (410, line)
        status, body = await client.post("/generate", {"input_ids": [5]})
        assert (status, body["error"]["message"]) == (410, line)
        assert client.turns.num_cancelled == 1

    run(test, World(tmp_path))


def test_an_address_is_shown_without_its_key(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        address = world.episode(["It rains."]).address
        assert address.key not in repr(address)
        assert address.secret not in repr(address)

    run(test, World(tmp_path))


def test_keys_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        client = world.episode(lambda *_: SampleFailed("no engine"))
        await client.post("/generate", {"input_ids": [5]})
        await client.post("/generate", {"input_ids": [5]}, {"x-api-key": client.address.key + "x"})
        world.gateway.close(client.address)
        await client.post("/generate", {"input_ids": [5]})
        assert client.address.key not in caplog.text
        assert client.address.secret not in caplog.text

    caplog.set_level("DEBUG")
    run(test, World(tmp_path))

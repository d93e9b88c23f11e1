"""The unmodified clients of OpenAI and Anthropic drive episodes."""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from asyncrl.types import FinishReason
from tests.unit.rollouts.gateway.templates import QWEN3
from tests.unit.rollouts.gateway.test_chat_tokens import TagParser
from tests.unit.rollouts.gateway.world import Client, World, run
from tests.unit.rollouts.turns import SAMPLING

if TYPE_CHECKING:
    import anthropic  # takes 2 s, which every worker would spend in the collection

CALL = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name":"add","arguments":{"a":40,"b":2}}\n</tool_call><|im_end|>'
SO = "<think>\nOf course.\n</think>\n\nThe answer is 42.<|im_end|>"
QUESTION: Any = {"role": "user", "content": "What is 40 + 2?"}
BROKEN_CALL = {"function": {"name": "x", "arguments": "}"}}
DEEP = json.loads(300 * '{"a":' + "1" + 300 * "}")
"""An object that orjson reads and does not write."""
DEEP_CALL = {"function": {"name": "x", "arguments": DEEP}}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
ANTHROPIC_TOOL: Any = {"name": "add", "description": "adds", "input_schema": PARAMETERS}


def openai_client(client: Client, key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key=key or client.address.key, max_retries=0)


def anthropic_client(client: Client) -> "anthropic.AsyncAnthropic":
    import anthropic

    return anthropic.AsyncAnthropic(base_url=client.url, api_key=client.address.key, max_retries=0)


# ---- OpenAI


def test_openai_runs_a_tool_loop_in_one_line(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode([CALL, SO])
        async with openai_client(client) as model:
            messages: list[Any] = [QUESTION]
            first = await model.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
            (choice,) = first.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
            second = await model.chat.completions.create(model="any", messages=messages, tools=[OPENAI_TOOL])
        assert second.choices[0].message.content == "The answer is 42."
        assert second.usage is not None
        assert second.usage.prompt_tokens == len(client.turns.asked[1][0])
        assert second.usage.prompt_tokens_details is not None
        written = client.session.record.lines[0].turns[0][1].token_ids
        assert second.usage.prompt_tokens_details.cached_tokens == len(client.turns.asked[0][0]) + len(written)
        outcome = client.outcome()
        assert (len(outcome.trajectories), outcome.metrics) == (1, {})

    run(scenario, World(tmp_path, QWEN3, parser=TagParser()))


def test_openai_streams_a_tool_loop(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode([CALL, SO])
        async with openai_client(client) as model:
            made = await _streamed(model, [QUESTION])
            assert made["tool_calls"][0]["function"]["arguments"] == '{"a": 40, "b": 2}'
            assert made.pop("reasoning_content") == "I add."
            made = await _streamed(model, [QUESTION, made, {"role": "tool", "content": "42"}])
        assert made["content"] == "The answer is 42."
        assert len(client.outcome().trajectories) == 1

    run(scenario, World(tmp_path, QWEN3, parser=TagParser()))


async def _streamed(model: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    """The message of a streamed answer, put together as agents do."""
    made: dict[str, Any] = {"role": "assistant", "content": ""}
    stream: Any = await model.chat.completions.create(
        model="any", messages=messages, tools=[OPENAI_TOOL], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason in ("stop", "tool_calls")
    for delta in (chunk.choices[0].delta for chunk in chunks[:-1]):
        made["content"] += delta.content or ""
        if getattr(delta, "reasoning_content", None):
            made["reasoning_content"] = delta.reasoning_content
        if delta.tool_calls:
            made["tool_calls"] = [call.model_dump(exclude={"index"}) for call in delta.tool_calls]
    return made


@pytest.mark.parametrize("stop", [None, ["How"], ["how are"]])
def test_openai_streams_text_in_pieces_that_are_never_taken_back(tmp_path: Path, stop: list[str] | None) -> None:
    answer = (
        "Hello there, how are" if stop == ["how are"] else "Hello there, how are you? \u00e9\u4f60 It rains.<|im_end|>"
    )

    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: answer)
        async with openai_client(client) as model:
            stream: Any = await model.chat.completions.create(model="a", messages=[QUESTION], stream=True, stop=stop)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            whole = await model.chat.completions.create(model="a", messages=[QUESTION], stop=stop)
        assert len([piece for piece in pieces if piece]) > 2
        assert "".join(pieces) == whole.choices[0].message.content
        assert "".join(pieces) == answer.removesuffix("<|im_end|>").removesuffix("how are")

    run(scenario, World(tmp_path))


def test_openai_gets_several_answers_with_log_probs(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda call, *_: f"It is {call}.<|im_end|>")
        async with openai_client(client) as model:
            made = await model.chat.completions.create(model="any", messages=[QUESTION], n=3, logprobs=True)
            assert [choice.message.content for choice in made.choices] == ["It is 0.", "It is 1.", "It is 2."]
            turn = client.session.record.lines[1].turns[0][1]
            logprobs = made.choices[1].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            assert [entry.logprob for entry in logprobs.content] == list(turn.logprobs)
            assert "".join(entry.token for entry in logprobs.content) == "It is 1.<|im_end|>"
            more: Any = [QUESTION, made.choices[2].message, {"role": "user", "content": "Hello?"}]
            await model.chat.completions.create(model="any", messages=more)
            with pytest.raises(openai.BadRequestError, match="top_logprobs must be 0"):
                await model.chat.completions.create(model="any", messages=[QUESTION], logprobs=True, top_logprobs=5)
        assert client.session.record.branches == {"parallel": 2}  # the third answer is continued in its line

    run(scenario, World(tmp_path))


def test_openai_settings_reach_the_engine(tmp_path: Path) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "It rains.<|im_end|>")
        async with openai_client(client) as model:
            await model.chat.completions.create(
                model="any",
                messages=[QUESTION],
                temperature=0.5,
                max_completion_tokens=100_000,
                stop=["x"],
                response_format=shape,
                extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}},
            )
            await model.chat.completions.create(model="any", messages=[QUESTION], max_tokens=7)
        sampling = client.turns.asked[0][1]
        assert (sampling.temperature, sampling.top_k, sampling.stop) == (0.5, 5, ("x",))
        assert sampling.max_new_tokens == client.session.start.sampling.max_new_tokens  # the limit of the run
        assert json.loads(sampling.extra["json_schema"]) == schema
        assert client.seen(0).endswith("<think>\n\n</think>\n\n")
        assert client.turns.asked[1][1].max_new_tokens == 7

    run(scenario, World(tmp_path, QWEN3))


def test_openai_may_require_a_tool(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(['[{"name": "add", "parameters": {"a": 1}}]<|im_end|>'])
        async with openai_client(client) as model:
            made = await model.chat.completions.create(
                model="any",
                messages=[QUESTION],
                tools=[OPENAI_TOOL],
                tool_choice={"type": "function", "function": {"name": "add"}},
            )
        calls: Any = made.choices[0].message.tool_calls
        assert (calls[0].function.name, calls[0].function.arguments) == ("add", '{"a": 1}')
        schema = json.loads(client.turns.asked[0][1].extra["json_schema"])
        assert schema["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS

    run(scenario, World(tmp_path))


def test_openai_completions_continue_texts_and_tokens(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda call, *_: f" It is {call}.<|im_end|>")
        async with openai_client(client) as model:
            first = await model.completions.create(model="any", prompt="What is it?", logprobs=1, max_tokens=50)
            assert first.choices[0].text == " It is 0."
            assert first.choices[0].logprobs is not None
            assert first.choices[0].logprobs.tokens is not None
            assert "".join(first.choices[0].logprobs.tokens) == " It is 0.<|im_end|>"
            ids = world.tokenizer.encode("Hello")
            stream = await model.completions.create(model="any", prompt=ids, stream=True, n=2)
            texts = {0: "", 1: ""}
            async for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].text
            assert texts == {0: " It is 1.", 1: " It is 2."}
            with pytest.raises(openai.BadRequestError, match="logprobs must be 0 or 1"):
                await model.completions.create(model="any", prompt="x", logprobs=5)

    run(scenario, World(tmp_path))


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"content": "x"}]}, "must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content must have text parts only"),
        ({"messages": [QUESTION], "tools": [{"type": "x"}]}, "each of tools must have a function with a name"),
        ({"messages": [QUESTION], "tool_choice": "required"}, "tool_choice must be"),
        ({"messages": [QUESTION], "n": 0}, "n must be an integer of at least 1, got 0"),
        ({"messages": [QUESTION], "max_tokens": "x"}, "max_tokens must be an integer"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "must be JSON"),
        ({"messages": [{**QUESTION, "x": DEEP}]}, "each of messages must be nested at most 250 levels deep"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}, QUESTION]}, "each of messages must be nested"),
        (
            {"messages": [QUESTION], "tools": [{"function": {"name": "x", "parameters": DEEP}}]},
            "tools and chat_template_kwargs must be nested at most 250 levels deep",
        ),
        (
            {"messages": [QUESTION], "chat_template_kwargs": DEEP},
            "tools and chat_template_kwargs must be nested",
        ),
        (
            {"messages": [QUESTION], "custom_params": DEEP},
            "custom_params must be nested at most 250 levels deep",
        ),
    ],
)
def test_wrong_chats_get_one_line(tmp_path: Path, body: object, line: str) -> None:
    async def scenario(world: World) -> None:
        client = world.episode([])
        status, found = await client.post("/v1/chat/completions", body)
        assert (status, line in found["error"]["message"]) == (400, True), found

    run(scenario, World(tmp_path))


def test_a_value_of_250_levels_is_accepted(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "It rains.<|im_end|>")
        for levels, expected in ((250, 200), (251, 400)):
            value = json.loads(levels * "[" + levels * "]")
            for body in ({"messages": [QUESTION], "custom_params": value}, {"messages": [{**QUESTION, "x": value[0]}]}):
                assert (await client.post("/v1/chat/completions", body))[0] == expected

    run(scenario, World(tmp_path))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_model_may_nest_the_arguments_of_a_call_as_deeply_as_it_likes(tmp_path: Path, path: str) -> None:
    async def scenario(world: World) -> None:
        call = json.dumps({"name": "add", "arguments": DEEP})
        client = world.episode(
            [f"<tool_call>{call}</tool_call><|im_end|>"], sampling=replace(SAMPLING, max_new_tokens=4000)
        )
        status, found = await client.post(path, {"messages": [QUESTION], "max_tokens": 4000})
        assert status == 200, found
        assert json.dumps(DEEP) in json.dumps(found).replace("\\", "")

    run(scenario, World(tmp_path, parser=TagParser()))


def test_openai_gets_named_errors(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "It rains.<|im_end|>")
        async with openai_client(client, "wrong") as model:
            with pytest.raises(openai.AuthenticationError, match="no open episode has this key"):
                await model.chat.completions.create(model="any", messages=[QUESTION])
        async with openai_client(client) as model:
            long: Any = {"role": "user", "content": "Hello there " * 3000}
            with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
                await model.chat.completions.create(model="any", messages=[long])
            world.gateway.close(client.address)
            with pytest.raises(openai.APIStatusError, match="the episode is over") as raised:
                await model.chat.completions.create(model="any", messages=[QUESTION])
            assert raised.value.status_code == 410

    run(scenario, World(tmp_path))


def test_a_stream_ends_with_its_episode(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(["It rains."], gate=asyncio.Event())
        async with openai_client(client) as model, asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(_text_of_stream(model))
            await client.turns.started.wait()
            world.gateway.close(client.address)
        assert asked.result() == "410"

    run(scenario, World(tmp_path))


async def _text_of_stream(model: openai.AsyncOpenAI) -> str:
    try:
        stream = await model.chat.completions.create(model="any", messages=[QUESTION], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    except openai.APIStatusError as error:
        return str(error.status_code)


def test_another_temperature_of_a_client_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "It rains.<|im_end|>")
        for _ in range(2):
            await client.chat([QUESTION], temperature=0.5, top_p=0.9)

    with caplog.at_level(logging.WARNING):
        run(scenario, World(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        "e0: a call samples with temperature 0.5, the run with 1.0: the trainer computes log-probs with the run's, so "
        "ratios and train/logprob_diff contain the difference"
    ]


# ---- Anthropic


def test_anthropic_runs_a_tool_loop_in_one_line(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode([CALL, SO])
        async with anthropic_client(client) as model:
            asked: Any = {"model": "any", "max_tokens": 1000, "system": "You add.", "tools": [ANTHROPIC_TOOL]}
            messages: list[Any] = [QUESTION]
            first = await model.messages.create(**asked, messages=messages)
            assert first.stop_reason == "tool_use"
            assert [block.type for block in first.content] == ["thinking", "tool_use"]
            call: Any = first.content[-1]
            assert (call.name, call.input) == ("add", {"a": 40, "b": 2})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "42"}]}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            count = await model.messages.count_tokens(
                model="any", system="You add.", tools=[ANTHROPIC_TOOL], messages=messages
            )
            second = await model.messages.create(**asked, messages=messages)
        assert second.stop_reason == "end_turn"
        assert [getattr(block, "text", None) for block in second.content] == [None, "The answer is 42."]
        assert count.input_tokens == len(client.turns.asked[1][0])
        usage = second.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
        assert CALL in client.seen(1)
        outcome = client.outcome()
        assert (len(outcome.trajectories), outcome.metrics) == (1, {})

    run(scenario, World(tmp_path, QWEN3, parser=TagParser()))


def test_anthropic_streams_a_tool_loop(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode([CALL, SO])
        async with anthropic_client(client) as model:
            messages: list[Any] = [QUESTION]
            asked: Any = {"model": "any", "max_tokens": 1000, "tools": [ANTHROPIC_TOOL]}
            async with model.messages.stream(**asked, messages=messages) as stream:
                first = await stream.get_final_message()
            call: Any = first.content[-1]
            assert (first.stop_reason, call.name, call.input) == ("tool_use", "add", {"a": 40, "b": 2})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            async with model.messages.stream(**asked, messages=messages) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                second = await stream.get_final_message()
        assert (text, second.stop_reason, second.usage.output_tokens > 0) == ("The answer is 42.", "end_turn", True)
        assert len(client.outcome().trajectories) == 1

    run(scenario, World(tmp_path, QWEN3, parser=TagParser()))


def test_anthropic_streams_text_and_stops_at_a_sequence(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "Hello there, how are")
        async with anthropic_client(client) as model:
            asked: Any = {"model": "any", "max_tokens": 50, "messages": [QUESTION], "stop_sequences": ["how are"]}
            async with model.messages.stream(**asked) as stream:
                pieces = [piece async for piece in stream.text_stream]
                made = await stream.get_final_message()
        assert ("".join(pieces), len(pieces) > 1) == ("Hello there, ", True)
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "how are")

    run(scenario, World(tmp_path))


def test_anthropic_gets_named_errors(tmp_path: Path) -> None:
    import anthropic

    async def scenario(world: World) -> None:
        client = world.episode(lambda *_: "It is", finish=FinishReason.LENGTH)
        async with anthropic_client(client) as model:
            made = await model.messages.create(model="any", max_tokens=1, messages=[QUESTION])
            assert made.stop_reason == "max_tokens"
            image: Any = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}
            with pytest.raises(anthropic.BadRequestError, match="blocks of text, tool_use and tool_result only"):
                await model.messages.create(model="any", max_tokens=1, messages=[image])
            world.gateway.close(client.address)
            with pytest.raises(anthropic.APIStatusError, match="the episode is over"):
                await model.messages.create(model="any", max_tokens=1, messages=[QUESTION])

    run(scenario, World(tmp_path))

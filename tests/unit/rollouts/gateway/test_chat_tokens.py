"""Chats become recorded tokens and new ones: what the model wrote is never tokenised again unseen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.rollouts.gateway.chats import ParsedAnswer, ToolCall
from asyncrl.rollouts.session import EpisodeSession
from asyncrl.types import FinishReason
from tests.unit.rollouts.gateway.templates import GLM45, LLAMA3, MISTRAL, QWEN3, QWEN25
from tests.unit.rollouts.gateway.world import Client, World, run
from tests.unit.rollouts.turns import ScriptedTurns, start_of

QUESTION = {"role": "user", "content": "What is 40 + 2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class TagParser:
    """Finds ``<tool_call>`` and ``<think>`` as SGLang's parsers for Qwen do, in this process."""

    has_reasoning = True
    has_tools = True

    async def parse(self, text: str, prompt_end: str, tools: Any) -> ParsedAnswer:
        head, mark, rest = text.rpartition("</think>")
        content, *parts = rest.split("<tool_call>")
        calls = [json.loads(part.partition("</tool_call>")[0]) for part in parts]
        return ParsedAnswer(
            content=content.strip(),
            reasoning=head.removeprefix("<think>").strip() if mark else None,
            tool_calls=tuple(
                ToolCall(id=f"call_{place}", name=call["name"], arguments=json.dumps(call["arguments"]))
                for place, call in enumerate(calls)
            ),
        )


def ids_written(client: Client) -> list[tuple[int, ...]]:
    """The tokens of each call of the model, from the record."""
    turns = {turn.call: turn.token_ids for line in client.session.record.lines for _, turn in line.turns}
    return [turns[call] for call in sorted(turns)]


@pytest.mark.parametrize(
    ("template", "end"), [(QWEN25, "<|im_end|>"), (QWEN3, "<|im_end|>"), (GLM45, "<|user|>"), (LLAMA3, "<|eot_id|>")]
)
def test_a_chat_without_thinking_is_one_line(tmp_path: Path, template: str, end: str) -> None:
    async def test(world: World) -> None:
        client = world.episode([f"\nIt is 4{number}.{end}" for number in range(5)])
        messages = [QUESTION]
        for number in range(5):
            messages += [await client.chat(messages), {"role": "user", "content": f"Hello there, {number}"}]
        outcome = client.outcome()
        if template != GLM45:  # GLM's template adds an empty thinking to each answer that has none
            assert len(outcome.trajectories) == 1
            assert not outcome.metrics
            assert outcome.trajectories[0].sample.text.count(end) == 5 + (template != GLM45) * 4

    run(test, World(tmp_path, template))


def test_variables_of_the_prompt_are_those_of_every_request(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["It is 42.<|im_end|>"] * 3)
        start = client.session.start
        prompt = replace(start.prompt, template_variables={"enable_thinking": False})
        client.session.start = replace(start, prompt=prompt)
        await client.chat([QUESTION])
        body = {"model": "tiny", "max_tokens": 16, "messages": [QUESTION]}
        assert (await client.post("/v1/messages", body))[0] == 200
        counted = await client.post("/v1/messages/count_tokens", body)
        assert counted == (200, {"input_tokens": len(client.turns.asked[1][0])})
        await client.chat([QUESTION], chat_template_kwargs={"enable_thinking": True})
        ends = [client.seen(call).endswith("<think>\n\n</think>\n\n") for call in range(3)]
        assert ends == [True, True, False]

    run(test, World(tmp_path, QWEN3))


def test_a_tool_loop_keeps_calls_as_the_model_wrote_them(tmp_path: Path) -> None:
    written = (
        '<think>\nI add.\n</think>\n\n<tool_call>\n{"name":"add",  "arguments": {"a":40,"b":2}}\n</tool_call><|im_end|>'
    )

    async def test(world: World) -> None:
        client = world.episode([written, "<think>\nOf course.\n</think>\n\nThe answer is 42.<|im_end|>"])
        message = await client.chat([QUESTION], tools=[TOOL])
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 40, "b": 2}'}
        assert message["reasoning_content"] == "I add."
        message.pop("reasoning_content")  # as the openai client sends it back
        message |= {"refusal": None, "annotations": []}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
        await client.chat([QUESTION, message, result], tools=[TOOL])
        assert written in client.seen(1)
        outcome = client.outcome()
        assert len(outcome.trajectories) == 1
        assert outcome.metrics == {}
        assert client.seen(1) == world.tokenizer.decode(client.turns.asked[0][0]) + written + (
            "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )

    run(test, World(tmp_path, QWEN3, parser=TagParser()))


def test_ten_turns_with_a_template_that_drops_thinking_count_every_dropped_token(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode([f"<think>\nI think {n}.\n</think>\n\nThe answer is {n}.<|im_end|>" for n in range(10)])
        messages: list[dict[str, Any]] = []
        for number in range(10):
            messages.append({"role": "user", "content": f"Hello {number}?"})
            messages.append(await client.chat(messages))
        outcome, written = client.outcome(), ids_written(client)
        assert len(written) == len(outcome.trajectories) == 10
        thinking = [len(world.tokenizer.encode(f"<think>\nI think {n}.\n</think>\n\n")) for n in range(9)]
        assert outcome.metrics == {"episodes/branches/template": 9.0, "episodes/dropped_tokens": float(sum(thinking))}
        for number in range(1, 10):
            context = client.turns.asked[number][0]
            assert "<think>" not in client.seen(number)
            for before in range(number):  # the kept part of each answer is there with its recorded tokens
                kept = written[before][thinking[before] :]
                places = range(len(context) - len(kept))
                assert any(context[place : place + len(kept)] == kept for place in places)
        assert sum(sum(each.loss_mask) for each in outcome.trajectories) == sum(map(len, written))

    run(test, World(tmp_path, QWEN3))


def test_thinking_is_kept_within_a_tool_loop_and_dropped_behind_it(tmp_path: Path) -> None:
    call = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'

    async def test(world: World) -> None:
        client = world.episode([call, "<think>\nSo.\n</think>\n\nThe answer is 42.<|im_end|>", "Hello<|im_end|>"])
        messages: list[dict[str, Any]] = [QUESTION]
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": "42"})
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "user", "content": "Hello?"})
        await client.chat(messages, tools=[TOOL])
        assert "I add." in client.seen(1)
        assert "I add." not in client.seen(2)
        assert "So." not in client.seen(2)
        assert '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>' in client.seen(2)
        outcome = client.outcome()
        assert outcome.metrics["episodes/branches/template"] == 1
        assert len(outcome.trajectories) == 2
        encode = world.tokenizer.encode
        dropped = [encode("<think>\nI add.\n</think>\n\n"), encode("<think>\nSo.\n</think>\n\n")]
        assert outcome.metrics["episodes/dropped_tokens"] == sum(map(len, dropped))

    run(test, World(tmp_path, QWEN3, parser=TagParser()))


def test_end_tokens_that_begin_the_next_message_are_not_doubled(tmp_path: Path) -> None:
    call = '\n<think>I add.</think>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<|observation|>'

    async def test(world: World) -> None:
        client = world.episode([call, "\n<think>So.</think>\nThe answer is 42.<|user|>"])
        messages: list[dict[str, Any]] = [QUESTION]
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "tool", "content": "42"})
        await client.chat(messages, tools=[TOOL])
        assert client.seen(1).endswith(f"<|assistant|>{call}\n<tool_response>\n42\n</tool_response><|assistant|>")
        assert len(client.outcome().trajectories) == 1

    run(test, World(tmp_path, GLM45, parser=TagParser()))


def test_a_template_that_trims_and_rewrites_calls_sees_what_the_model_wrote(tmp_path: Path) -> None:
    call = '  <tool_call>{"name":"add","arguments":{"a":1}}</tool_call><|eot_id|>'

    async def test(world: World) -> None:
        client = world.episode([call, " The answer is 42. <|eot_id|>", "Hello<|eot_id|>"])
        messages: list[dict[str, Any]] = [QUESTION]
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "tool", "content": "42"})
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "user", "content": "Hello?"})
        await client.chat(messages, tools=[TOOL])
        assert call in client.seen(2)
        assert " The answer is 42. <|eot_id|><|start_header_id|>user" in client.seen(2)
        assert len(client.outcome().trajectories) == 1

    run(test, World(tmp_path, LLAMA3, parser=TagParser()))


def test_a_template_that_needs_calls_as_objects_gets_them_and_the_tokens_are_counted(tmp_path: Path) -> None:
    call = '<tool_call>{"name":"add","arguments":{}}</tool_call></s>'

    async def test(world: World) -> None:
        client = world.episode([call, " The answer is 42.</s>", "Hello</s>"])
        messages: list[dict[str, Any]] = [QUESTION]
        messages.append(await client.chat(messages, tools=[TOOL]))
        messages.append({"role": "tool", "content": "42"})
        messages.append(await client.chat(messages, tools=[TOOL]))
        assert not client.session.record.branches  # so far the template took the text of the call
        messages.append({"role": "user", "content": "Hello?"})
        await client.chat(messages, tools=[TOOL])
        assert '[TOOL_CALLS] [{"name": "add", "arguments": {}}]</s>' in client.seen(2)
        outcome, (first, *_) = client.outcome(), ids_written(client)
        assert outcome.metrics["episodes/branches/template"] == 1
        assert outcome.metrics["episodes/retokenized_tokens"] == outcome.metrics["episodes/dropped_tokens"]
        assert outcome.metrics["episodes/retokenized_tokens"] == len(first)

    run(test, World(tmp_path, MISTRAL, parser=TagParser()))


def test_an_edited_history_branches(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["The answer is 42.<|im_end|>", "Hello<|im_end|>"])
        message = await client.chat([QUESTION])
        more = {"role": "user", "content": "Hello?"}
        await client.chat([QUESTION, {**message, "content": "The answer is 43."}, more])
        outcome = client.outcome()
        assert "43" in client.seen(1)
        assert outcome.metrics["episodes/branches/edited"] == 1
        assert "episodes/retokenized_tokens" not in outcome.metrics

    run(test, World(tmp_path))


def test_a_compacted_history_is_a_new_conversation_with_recorded_answers(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["The answer is 42.<|im_end|>", "It rains.<|im_end|>", "Hello<|im_end|>"])
        first = await client.chat([QUESTION])
        more = {"role": "user", "content": "What is the weather?"}
        second = await client.chat([QUESTION, first, more])
        await client.chat([{"role": "system", "content": "The tool said 42."}, more, second, QUESTION])
        assert client.session.record.branches == {"new": 1}
        written = ids_written(client)[1]
        context = client.turns.asked[2][0]
        assert any(context[place : place + len(written)] == written for place in range(len(context)))

    run(test, World(tmp_path))


def test_answers_of_equal_text_are_told_apart_by_what_is_before_them(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        same = [
            "<think>\nI think one.\n</think>\n\nHello<|im_end|>",
            "<think>\nI think two.\n</think>\n\nHello<|im_end|>",
        ]
        client = world.episode([*same, "Hello<|im_end|>"])
        first = await client.chat([QUESTION])
        more = {"role": "user", "content": "Hello?"}
        second = await client.chat([QUESTION, first, more])
        assert first["content"] == second["content"] == "Hello"
        result = {"role": "tool", "content": "42"}
        await client.chat([QUESTION, first, more, second, result])
        assert "two" in client.seen(2)
        assert "one" not in client.seen(2)

    run(test, World(tmp_path, QWEN3, parser=TagParser()))


def test_thinking_that_the_client_strips_itself_is_restored(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["<think>\nI add.\n</think>\n\nThe answer is 42.<|im_end|>", "Hello<|im_end|>"])
        message = await client.chat([QUESTION])
        assert "<think>" in message["content"]
        stripped = {"role": "assistant", "content": message["content"].partition("</think>")[2].strip()}
        await client.chat([QUESTION, stripped, {"role": "tool", "content": "Go."}])
        assert len(client.outcome().trajectories) == 1

    run(test, World(tmp_path, QWEN3))


def test_a_cut_through_a_token_is_tokenised_anew_and_counted(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["Hello<|im_end|>", "Hello<|im_end|>"])
        context = "What is the weather?"
        status, _ = await client.post("/generate", {"text": context})
        assert status == 200
        cut = client.world.tokenizer.decode((client.session.record.lines[0].turns[0][1].token_ids[0],))[:-1]
        assert cut
        await client.post("/generate", {"text": context + cut + " there"})
        assert client.seen(1) == context + cut + " there"
        assert client.outcome().metrics["episodes/retokenized_tokens"] == 1

    run(test, World(tmp_path))


def test_a_text_that_extends_the_record_uses_its_tokens(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode([" <search>weather in Paris</search>\n\nHello", "It rains."], "What is the weather?")
        _, body = await client.post("/generate", {"text": "What is the weather?"})
        text = "What is the weather?" + body["text"]
        await client.post("/generate", {"text": text + "\n\nThe tool said 42."})
        outcome = client.outcome()
        assert len(outcome.trajectories) == 1
        assert outcome.trajectories[0].sample.prompt_ids is None
        assert outcome.metrics == {}

    run(test, World(tmp_path))


def test_a_text_that_a_client_cuts_at_a_mark_keeps_the_tokens_before_it(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode([" <search>weather in Paris</search>\n\nHello", "It rains."], "What is the weather?")
        _, body = await client.post("/generate", {"text": "What is the weather?"})
        text = "What is the weather?" + body["text"].partition("</search>")[0] + "</search>"
        await client.post("/generate", {"text": text + " The tool said 42."})
        first, second = client.turns.asked[0][0], client.turns.asked[1][0]
        written = client.session.record.lines[0].turns[0][1].token_ids
        shared = sum(a == b for a, b in zip((*first, *written), second, strict=False))
        assert world.tokenizer.decode(second[:shared]) in text + " The"
        assert client.session.record.branches == {"edited": 1}
        assert client.outcome().metrics["episodes/dropped_tokens"] > 0

    run(test, World(tmp_path))


@pytest.mark.parametrize("template", [QWEN25, MISTRAL])
def test_an_answer_that_a_client_continues_keeps_its_tokens(tmp_path: Path, template: str) -> None:
    answers = ("It is forty", " and two, so", " there it is.")

    async def test(world: World) -> None:
        drawn = [tuple(token for letter in each for token in world.tokenizer.encode(letter)) for each in answers]
        turns = ScriptedTurns(lambda call, *_: drawn[call], finish=FinishReason.LENGTH)
        session = EpisodeSession(start_of(), turns, world.limits, world.tokenizer.decode)
        client = Client(world, session, turns, world.gateway.open(session))
        said = (await client.chat([QUESTION]))["content"]
        for _ in answers[1:]:
            partial = {"role": "assistant", "content": said}
            said += (await client.chat([QUESTION, partial], continue_final_message=True))["content"]
        assert said == "".join(answers)
        assert len(drawn[0]) > len(world.tokenizer.encode(answers[0]))
        (line,) = session.record.lines
        assert line.tokens == (*drawn[0], *drawn[1], *drawn[2])
        assert not client.outcome().metrics

    run(test, World(tmp_path, template))


def test_a_continued_answer_that_the_client_cut_through_a_token_is_counted(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        client = world.episode(["I think that.", " Hello there."], finish=FinishReason.LENGTH)
        await client.chat([QUESTION])
        partial = {"role": "assistant", "content": "I thi"}
        await client.chat([QUESTION, partial], continue_final_message=True)
        assert client.seen(1).endswith("assistant\nI thi")
        assert client.outcome().metrics["episodes/retokenized_tokens"] == 1.0

    run(test, World(tmp_path))

"""An episode whose client of the model depends on its place in the group, and a reward that has its tokens scored.

``strands-sglang`` takes part where it is installed.  It is no dependency of the tests: boto3, which it needs, refuses
the version of python-dateutil that the other dependencies have.
"""

import asyncio
import contextlib
import importlib
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import orjson
import psutil

from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.errors import EngineError, RewardFailed
from asyncrl.rollouts.environments.verifiers import ROW, environment
from asyncrl.rollouts.native import Episode
from asyncrl.types import Prompt, Sample
from tests.integration.episodes.thinking_model import TOOL
from tests.integration.launcher import MARK

ENVIRONMENT = "tests.unit.rollouts.environments.toy_environment"
API_KEY = "key-of-the-clients"
"""The key that the run is told to use, for the log-probs of another engine."""
SERVER = "sglang.launch_server"
MOST_TURNS = 3
NUM_QUESTIONS = 10
SCHEMA: Any = {"type": "object", "properties": {}}
SCORE_S = 60.0
HELD_S = 0.05
"""Time between two looks for the file that lets episodes begin."""
TOKENIZER = "ASYNCRL_TEST_TOKENIZER"
"""Environment variable with the folder of the tokenizer."""


async def ask_with_openai(ep: Episode) -> None:
    """Call the tool as long as the model wants to."""
    function: Any = {"name": TOOL, "description": "looks", "parameters": SCHEMA}
    messages: list[Any] = _question(ep)
    async with openai.AsyncOpenAI(base_url=ep.openai_base_url, api_key=ep.api_key) as model:
        for _ in range(MOST_TURNS):
            made = await model.chat.completions.create(
                model="any", messages=messages, tools=[{"type": "function", "function": function}]
            )
            message = made.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": await ep.call(look)} for call in message.tool_calls
            ]


async def ask_with_anthropic(ep: Episode) -> None:
    """Call the tool as long as the model wants to; answers are streamed."""
    import anthropic  # takes seconds, and every worker of the tests imports this module

    tool: Any = {"name": TOOL, "description": "looks", "input_schema": SCHEMA}
    messages: list[Any] = _question(ep)
    async with anthropic.AsyncAnthropic(base_url=ep.base_url, api_key=ep.api_key) as model:
        for _ in range(MOST_TURNS):
            asked: Any = {"model": "any", "max_tokens": 1000, "tools": [tool], "messages": messages}
            async with model.messages.stream(**asked) as stream:
                made = await stream.get_final_message()
            calls = [block for block in made.content if block.type == "tool_use"]
            if not calls:
                return
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": await ep.call(look)} for call in calls
            ]
            messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]


async def ask_ten_questions(ep: Episode) -> None:
    """Chat for ten turns; Qwen3's template shows the thinking of none but the last."""
    messages: list[Any] = _question(ep)
    async with openai.AsyncOpenAI(base_url=ep.openai_base_url, api_key=ep.api_key) as model:
        for number in range(1, NUM_QUESTIONS + 1):
            made = await model.chat.completions.create(model="any", messages=messages)
            messages += [made.choices[0].message, {"role": "user", "content": f"abcd {number}?"}]
    ep.metadata["questions"] = [message["content"] for message in messages[:-1:2]]


async def play_verifiers(ep: Episode) -> None:
    """Play the environment; the rubric's number reaches the reward function, which sees every sample."""
    await _sums()(ep)
    ep.metadata["rubric"], ep.reward = ep.reward, None


async def ask_with_strands(ep: Episode) -> None:
    """Let an agent of strands call the tool, through SGLang's own API: tokens in, tokens out."""
    strands, client = importlib.import_module("strands"), importlib.import_module("strands_sglang")
    folder = os.environ[TOKENIZER]
    tokenizer = await asyncio.to_thread(client.get_tokenizer, folder)
    async with client.SGLangClient(base_url=ep.keyed_url) as http:
        model = client.SGLangModel(client=http, tokenizer=tokenizer)
        agent = strands.Agent(model=model, tools=[strands.tool(look)], callback_handler=None)
        with contextlib.suppress(_too_long()):
            await agent.invoke_async(_question(ep)[0]["content"])
        ep.metadata["strands_ids"] = [*model.rollout.token_ids]
        ep.metadata["strands_mask"] = [*model.rollout.loss_mask]


def _too_long() -> type[Exception]:
    """Return what an agent raises if a limit cut an answer; the episode is trained."""
    found: type[Exception] = importlib.import_module("strands.types.exceptions").MaxTokensReachedException
    return found


CLIENTS: dict[str, Callable[[Episode], Awaitable[None]]] = {
    "openai": ask_with_openai,
    "anthropic": ask_with_anthropic,
    "verifiers": play_verifiers,
    "ten questions": ask_ten_questions,
    **({"strands": ask_with_strands} if find_spec("strands_sglang") else {}),
}


def held_after(first: int, folder: str) -> Callable[[Episode], Awaitable[None]]:
    """Return a program that asks the model with the client of each place in the group.

    All episodes but the ``first`` ones touch the file ``held`` in the folder, and ask once there is a file ``go``.
    """
    held, go = Path(folder) / "held", Path(folder) / "go"
    numbers = itertools.count()

    async def episode(ep: Episode) -> None:
        name = [*CLIENTS][ep.index % len(CLIENTS)]
        ep.metadata["client"] = name
        if next(numbers) >= first:
            held.touch()
            while not go.exists():  # noqa: ASYNC110 -- the test makes it in another process
                await asyncio.sleep(HELD_S)
        await CLIENTS[name](ep)

    return episode


def look() -> str:
    """Look."""
    return "abcd efgh"


def _question(ep: Episode) -> list[Any]:
    return [dict(message) for message in ep.metadata[ROW]["prompt"]]


def _sums() -> Callable[[Episode], Awaitable[None]]:
    return environment(ENVIRONMENT)  # of one process, however often it is asked for


def scored(into: str, tokenizer: str) -> Callable[[Prompt, Sample], Awaitable[float]]:
    """Return a reward that writes each sample to the file ``into``, with its log-probs as an engine scores them.

    ``tokenizer`` is the folder from which the agents of strands load theirs.
    """
    file = Path(into)
    os.environ[TOKENIZER] = tokenizer

    async def reward(prompt: Prompt, sample: Sample) -> float:
        before = prompt.token_ids if sample.prompt_ids is None else sample.prompt_ids
        versions = {span.weights.version for span in sample.spans}
        logprobs = await _scores((*before, *sample.token_ids), len(before), versions)
        told = {
            "group": sample.group_id,
            "rollout": sample.rollout,
            "prompt_ids": before,
            "token_ids": sample.token_ids,
            "turns": [(turn.call, turn.start, turn.stop) for turn in sample.turns],
            "recorded": [*sample.logprobs],
            "scored": logprobs,
            "metadata": {name: value for name, value in sample.metadata.items() if name != ROW},
        }
        await asyncio.to_thread(_append, file, orjson.dumps(told) + b"\n")
        found: float = sample.metadata.get("rubric", 0.0)
        return found + len(set(sample.token_ids)) / 100

    return reward


def _append(file: Path, line: bytes) -> None:
    with file.open("ab") as lines:
        lines.write(line)


async def _scores(token_ids: tuple[int, ...], start: int, versions: set[int]) -> tuple[float, ...]:
    """Return the log-probs of an engine that serves the version that wrote the tokens."""
    async with HttpClient(API_KEY) as http:
        for url in await asyncio.to_thread(lambda: [*engine_urls()]):
            try:
                served = (await http.look(f"{url}/model_info", SCORE_S))["weight_version"]
                if {int(served)} == versions:
                    engine = SGLangEngine(http, (url,), router_url=None, request_timeout_s=SCORE_S)
                    return await engine.score(token_ids, start)
            except (EngineError, ValueError):  # it was killed, or starts
                continue
    raise RewardFailed(f"no engine serves the weights of {versions}")


def engine_urls() -> Iterator[str]:
    """Yield the addresses of the servers of this run."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if SERVER in words and process.environ().get(MARK) == os.environ[MARK]:
                yield f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"
        except psutil.Error:
            continue

"""Environments of the package ``verifiers``, in a real process, with an HTTP server in the place of the gateway."""

import asyncio
import functools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.errors import EpisodeFailed, PluginError
from asyncrl.rollouts.environments.verifiers import ROW, environment, main, prompts
from asyncrl.rollouts.interfaces import EpisodeAddress
from asyncrl.rollouts.native import Episode, EpisodeSettings
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.types import Prompt, SamplingParams
from tests.programs import children_with

FOLDER = Path(__file__).parent
NAME = "toy-environment"


@pytest.fixture(autouse=True)
def in_the_folder_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


@functools.cache
def row() -> Any:
    """Return one prompt; reading the rows starts a process, which imports ``verifiers`` for seconds."""
    return prompts(NAME).take()


@dataclass(frozen=True, kw_only=True)
class Call:
    """An episode at the address of the test's server."""

    start: EpisodeStart
    address: EpisodeAddress

    async def generate(self, *arguments: Any, **settings: Any) -> GeneratedTurn:
        raise AssertionError("the environment asks over HTTP")


@dataclass
class Gateway:
    """A server that answers every chat with the next text; a number is the status of an error."""

    answers: list[str | int]
    keys: list[str] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers["Authorization"])
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            kind = "EpisodeEnded: x: 1 turns, max-turns is 1" if answer == 403 else "broken"
            return web.json_response({"error": {"message": kind}}, status=answer)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response(
            {"id": "0", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )


def episode(address: EpisodeAddress, metadata: dict[str, Any]) -> Episode:
    start = EpisodeStart(
        name="0.0",
        prompt=Prompt(row=0, epoch=0, text="?", token_ids=(1,), label=None, metadata=metadata),
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=9),
        index=0,
        group_size=1,
        seed=0,
    )
    return Episode(Call(start=start, address=address), EpisodeSettings(tokenizer=CharacterTokenizer()))


def played(gateway: Gateway, metadata: dict[str, Any] | None = None) -> Episode:
    found = dict(row().metadata) if metadata is None else metadata

    async def run() -> Episode:
        server = web.Application()
        server.router.add_post("/v1/chat/completions", gateway.chat)
        async with TestServer(server) as at:
            address = EpisodeAddress(host=at.host, port=at.port or 0, key="key-7", secret="")
            ep = episode(address, found)
            await environment(NAME)(ep)
            return ep

    return asyncio.run(run())


def test_environment_asks_with_the_key_of_its_episode_and_its_rubric_gives_the_reward() -> None:
    gateway = Gateway(["I do not know", str(row().label)])
    ep = played(gateway)
    assert ep.reward == 1.0
    assert ep.metadata["is_right"] == 1.0
    assert ep.metadata["num_turns"] == 2.0
    assert gateway.keys == ["Bearer key-7"] * 2
    assert [each["content"] for each in gateway.bodies[1]["messages"]][1:] == ["I do not know", "Are you sure?"]
    assert "temperature" not in gateway.bodies[0]


def test_limit_of_the_run_ends_the_conversation_with_its_reward() -> None:
    assert played(Gateway([str(row().label), 403])).reward == 1.0


def test_empty_answer_is_the_models_mistake_and_keeps_its_reward() -> None:
    assert played(Gateway([""])).reward == 0.0


def test_any_other_error_costs_the_episode() -> None:
    with pytest.raises(EpisodeFailed, match=r"toy-environment: .*broken"):
        played(Gateway([500]))


def test_prompt_of_another_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"take prompts from asyncrl\.rollouts\.environments\.verifiers:prompts"):
        played(Gateway([]), {"other": 1})


def test_process_that_was_killed_is_started_again() -> None:
    played(Gateway(["1", "1"]))
    for process in children_with(NAME):
        process.kill()
        process.wait()
    assert played(Gateway(["1", "1"])).metadata["num_turns"] == 2.0


def test_cancelled_episode_cancels_the_rollout() -> None:
    async def run() -> int:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def never(request: web.Request) -> web.Response:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                gone.set()
            raise AssertionError

        server = web.Application()
        server.router.add_post("/v1/chat/completions", never)
        async with TestServer(server, handler_cancellation=True) as at, asyncio.TaskGroup() as tasks:
            address = EpisodeAddress(host=at.host, port=at.port or 0, key="k", secret="")
            task = tasks.create_task(play(episode(address, dict(row().metadata))))
            async with asyncio.timeout(20):
                await asked.wait()
                task.cancel()
                await gone.wait()
        return 0

    async def play(ep: Episode) -> None:
        await environment(NAME)(ep)

    assert asyncio.run(run()) == 0


def test_prompts_repeat_in_a_new_order_and_continue_where_they_were() -> None:
    source = prompts(NAME, seed=1)
    taken = [source.take() for _ in range(12)]
    labels = [prompt.label for prompt in taken]
    assert [sorted(labels[at : at + 4]) for at in (0, 4, 8)] == [["1", "2", "3", "4"]] * 3
    assert len({tuple(labels[at : at + 4]) for at in (0, 4, 8)}) > 1
    assert (source.state(), taken[0].metadata[ROW]["answer"]) == (12, taken[0].label)
    source.load(5)
    assert [source.take().label for _ in range(7)] == labels[5:]
    json.dumps(taken[0].metadata)


def test_rows_are_printed_for_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([NAME, "--arguments", '{"size": 3}']) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["label"] for line in lines] == ["1", "2"]
    assert lines[0]["prompt"] == [{"role": "user", "content": "0+1=?"}]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no-such-environment", {}, "the environment 'no-such-environment' does not load: .*no_such_environment"),
        (NAME, {"size": 0}, "the environment 'toy-environment' does not load: ValueError: size must be at least 1"),
        (NAME, {"python": "/bin/false"}, "its process ended at the start"),
    ],
)
def test_environment_that_does_not_load_is_one_line(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message) as error:
        environment(name, **arguments)
    assert "\n" not in str(error.value)


def test_interpreter_without_the_package_is_named() -> None:
    with pytest.raises(PluginError, match=r"no package verifiers; install asyncrl\[verifiers\], or give python="):
        prompts(NAME, python=str(Path(sys.base_prefix, "bin", "python3")))

"""The examples without engines: their episodes with a scripted model, their agent with a real HTTP server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.load import load_run
from asyncrl.plugins.episodes import load_episode
from asyncrl.rollouts.testing import Played, play
from asyncrl.rollouts.tools.search import Document, SearchIndex
from asyncrl.rollouts.tools.search_server import application

ROOT = Path(__file__).parents[3]
SEARCH = "examples/search/search_episode.py:SearchEpisode"
DOCUMENTS = [
    Document(id="0", title="Old Bridge", text="The Old Bridge is the oldest bridge of the town Lindal."),
    Document(id="1", title="Lindal", text="Lindal is a town on the river Aster."),
]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def rewards(played: Played) -> list[float]:
    return [each.reward.value for each in played.trajectories if each.reward is not None]


# ---- search


def searched(*answers: str, max_turns: int | None = None, label: str = "Aster") -> Played:
    """Play the episode against the real retriever, which has its own thread and loop."""

    async def serve(started: "asyncio.Queue[str]", until: asyncio.Event) -> None:
        async with TestServer(application(SearchIndex(DOCUMENTS))) as server:
            await started.put(str(server.make_url("/retrieve")))
            await until.wait()

    async def main() -> Played:
        started: asyncio.Queue[str] = asyncio.Queue()
        until = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(started, until))
            url = await started.get()
            function = load_episode(f"{SEARCH}(url={url!r}, topk=1)").function
            played = await asyncio.to_thread(
                play, function, prompt="?", answers=answers, label=label, max_turns=max_turns
            )
            until.set()
        return played

    return asyncio.run(main())


def test_search_reads_documents_until_it_answers() -> None:
    played = searched(
        "<think>first the town</think><search>Old Bridge</search>",
        "<search>town Lindal river",  # engines may cut the stop string off
        "<answer>the Aster.</answer>",
    )
    assert played.seen[1].endswith(f"<information>Doc 1(Title: Old Bridge) {DOCUMENTS[0].text}</information>\n\n")
    assert played.seen[2].endswith(f"<information>Doc 1(Title: Lindal) {DOCUMENTS[1].text}</information>\n\n")
    assert rewards(played) == [1.0]
    assert played.trajectories[0].sample.metadata == {"searches": 2}


def test_wrong_answer_and_a_turn_without_action_get_nothing() -> None:
    played = searched("hm", "<answer>Brenna</answer>")
    assert "The last action is invalid" in played.seen[1]
    assert rewards(played) == [0.0]


def test_search_ends_at_the_last_turn_without_another_query() -> None:
    played = searched("<search>a</search>", "<search>b</search>", max_turns=2)
    assert (rewards(played), played.trajectories[0].sample.metadata["searches"]) == ([0.0], 1)


def test_questions_can_be_answered_from_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = module("examples/search/make.py")
    monkeypatch.setattr(make, "DATA", tmp_path)
    monkeypatch.setattr(make, "make_model", lambda texts: None)
    make.main()
    index = SearchIndex.of_file(tmp_path / "corpus.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    for row in rows[:40]:
        question = row["messages"][0]["content"].rpartition("Question: ")[2]
        [hits] = index.search_all([question], limit=3)
        texts = " ".join(hit.document.text for hit in hits)
        if row["metadata"]["hops"] == 1:
            assert row["label"] in texts
    first = (tmp_path / "train.jsonl").read_bytes()
    make.main()
    assert (tmp_path / "train.jsonl").read_bytes() == first


# ---- agent


def chat_server(answers: list[Any], seen: list[Any]) -> web.Application:
    async def chat(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], await request.json()))
        message = {"role": "assistant", "content": None} | answers.pop(0)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "0", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(body)

    server = web.Application()
    server.router.add_post("/v1/chat/completions", chat)
    return server


def call(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"tool_calls": [{"id": "c", "type": "function", "function": function}]}


def test_agent_runs_as_a_command_and_writes_its_reward(tmp_path: Path) -> None:
    seen: list[Any] = []
    task = {"prompt": "?", "label": "4192", "metadata": {"question": "47*83+291"}}
    (tmp_path / "episode.json").write_text(json.dumps(task))

    async def main() -> int:
        answers = [call("47*83"), call("3901+291"), {"content": "4192"}]
        async with TestServer(chat_server(answers, seen)) as server:
            environment = {
                "OPENAI_BASE_URL": str(server.make_url("/v1")),
                "OPENAI_API_KEY": "key-7",
                "ASYNCRL_EPISODE": str(tmp_path / "episode.json"),
                "ASYNCRL_RESULT": str(tmp_path / "result.json"),
            }
            return await asyncio.to_thread(run_command, environment)

    assert asyncio.run(main()) == 0
    assert json.loads((tmp_path / "result.json").read_text()) == {"reward": 1.0}
    assert {key for key, _ in seen} == {"Bearer key-7"}
    assert [each["content"] for each in seen[2][1]["messages"] if each["role"] == "tool"] == ["3901", "4192"]


def run_command(environment: dict[str, str]) -> int:
    command = [sys.executable, "examples/agent/run.py"]
    return subprocess.run(command, env={**os.environ, **environment}, check=False, timeout=150).returncode


def test_agent_observes_a_mistake_in_a_call() -> None:
    seen: list[Any] = []
    agent = module("examples/agent/agent.py")

    async def main() -> str:
        async with TestServer(chat_server([call("1-1"), {"content": "0"}], seen)) as server:
            client = agent.OpenAI(base_url=str(server.make_url("/v1")), api_key="k")
            with client:
                return str(await asyncio.to_thread(agent.solve, "1-1", client))

    assert asyncio.run(main()) == "0"
    assert seen[1][1]["messages"][-1]["content"] == "Error: one operation, like 12*34 or 1234+56"


# ---- two agents


def test_two_agents_have_separate_samples_and_rewards() -> None:
    function = load_episode("examples/multi_agent/episode.py:episode").function
    metadata = {"question": "47*83"}
    played = play(function, prompt="47*83", answers=["7", "wrong", "3901"], label="3901", metadata=metadata)
    proposer, critic = played.trajectories
    assert rewards(played) == [1.0, 1.0]
    assert (len(proposer.sample.turns), len(critic.sample.turns)) == (2, 1)
    assert "47*83=7" in played.seen[1]
    assert proposer.sample.metadata == {"first_is_right": False, "second_is_right": True, "changed": True}
    fooled = play(function, prompt="47*83", answers=["3901", "wrong", "7"], label="3901", metadata=metadata)
    assert rewards(fooled) == [0.0, 0.0]


# ---- the quickstart with a tool


def calculated(*answers: str) -> Played:
    function = load_episode("configs/quickstart_tools/calculator.py:episode").function
    return play(function, prompt="47*83+291", answers=answers, label="4192")


def test_calculator_is_called_until_the_answer() -> None:
    def asked(expression: str) -> str:
        written = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        return f"<tool_call>{written}</tool_call>"

    played = calculated(asked("47*83"), asked("3901+291"), "4192<end>")
    assert rewards(played) == [1.0]
    assert played.metrics["episodes/tool_calls"] == 2
    assert "3901" in played.seen[1]
    assert rewards(calculated(asked("47*83+291"), "4192 or so")) == [0.0]
    assert "Error" in calculated(asked("47*83+291"), "1").seen[1]


CONFIGS = [
    "configs/quickstart_tools.toml",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").rglob("*.toml")) if path.name != "sets.toml"),
]


@pytest.mark.parametrize("path", CONFIGS)
def test_configuration_has_only_known_flags_and_its_function_loads(path: str) -> None:
    run = load_run(["--config", path, "--dry-run"])
    if run.episodes.custom_generate_function_path is not None:
        assert load_episode(run.episodes.custom_generate_function_path).shape == "native"


def module(path: str) -> Any:
    loaded: Callable[[Path], Any] = __import__("asyncrl.plugins.paths", fromlist=["module_of_file"]).module_of_file
    return loaded(Path(path))

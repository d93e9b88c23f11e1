"""Agents: a command per episode, its address, its result and its end."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from asyncrl.engines.fake import FakeEngine
from asyncrl.episodes import EpisodeEnd, EpisodeOutcome
from asyncrl.errors import EpisodeFailed
from asyncrl.metrics.timeline import NoTimeline
from asyncrl.pipeline.sampling.episode_load import EpisodeLoad
from asyncrl.pipeline.sampling.episode_settings import EpisodeSettings
from asyncrl.pipeline.sampling.episodes import Episodes
from asyncrl.pipeline.sampling.retry import RetryingEngine
from asyncrl.pipeline.sampling.sampler import Sampler, ServingWeights
from asyncrl.pipeline.sampling.slots import Slots
from asyncrl.rollouts.agents import AgentCommand, AgentSettings, _Agent
from asyncrl.rollouts.stray_processes import StrayScans
from asyncrl.types import Weights
from tests.unit.pipeline.harness import token_sum
from tests.unit.rollouts.gateway.world import World
from tests.unit.rollouts.turns import SAMPLING, ScriptedTurns, start_of

ASK = """
import json, os, urllib.request
task = json.load(open(os.environ["ASYNCRL_EPISODE"]))
body = {"model": os.environ["ASYNCRL_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
REPORT = (
    'json.dump({"reward": len(answer), "metadata": {"label": task["label"]}}, open(os.environ["ASYNCRL_RESULT"], "w"))'
)


def run(
    folder: Path,
    program: str,
    *,
    test: Callable[..., Coroutine[Any, Any, Any]] | None = None,
    label: Any = "42",
) -> Any:
    """Run an agent that consists of a Python program to the end, or ``test`` with it."""
    (folder / "agent.py").write_text(program)

    async def opened() -> Any:
        world = World(folder)
        turns = ScriptedTurns(lambda *_: world.tokenizer.encode("It rains.<|im_end|>"))
        settings = AgentSettings(
            command=f"{sys.executable} {folder / 'agent.py'}",
            model_name="tiny",
            log_path=folder / "logs" / "agents.log",
            term_s=0.3,
        )
        async with asyncio.timeout(30), world.gateway:
            agents = AgentCommand(settings, world.gateway, world.limits, world.tokenizer.decode)
            try:
                start = start_of((1, 2), text="What is the weather?")
                episode = agents(replace(start, prompt=replace(start.prompt, label=label)), turns)
                return await (episode if test is None else test(episode))
            finally:
                agents.close()

    return asyncio.run(opened())


def test_an_agent_reaches_the_model_and_sets_its_reward(tmp_path: Path) -> None:
    outcome = run(tmp_path, ASK + REPORT)
    assert isinstance(outcome, EpisodeOutcome)
    (made,) = outcome.trajectories
    assert made.sample.text == "It rains.<|im_end|>"
    assert made.reward is not None
    assert (made.reward.value, made.sample.metadata) == (9.0, {"label": "42"})
    assert outcome.end is EpisodeEnd.FINISHED


def test_without_a_result_the_reward_function_is_asked(tmp_path: Path) -> None:
    outcome = run(tmp_path, ASK + "print(answer)")
    assert outcome.trajectories[0].reward is None
    assert "=== e0 stdout\nIt rains.\n" in (tmp_path / "logs" / "agents.log").read_text()


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("raise SystemExit('no tools here')", "e0: the agent ended with code 1: no tools here"),
        ("pass", "e0: the episode ended without a call of the model"),
        (ASK + "open(os.environ['ASYNCRL_RESULT'], 'w').write('x')", "is not JSON"),
        (ASK + "open(os.environ['ASYNCRL_RESULT'], 'w').write('[]')", 'must be {"reward": NUMBER'),
        (ASK + "open(os.environ['ASYNCRL_RESULT'], 'w').write('{\"reward\": true}')", 'must be {"reward": NUMBER'),
    ],
)
def test_an_agent_that_fails_says_why_in_one_line(tmp_path: Path, program: str, line: str) -> None:
    with pytest.raises(EpisodeFailed) as raised:
        run(tmp_path, program)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_agent_that_fails_at_a_limit_of_its_episode_is_trained(tmp_path: Path) -> None:
    program = ASK + "body['messages'][0]['content'] *= 4000\nrequest.data = json.dumps(body).encode()\n"
    outcome = run(tmp_path, program + "urllib.request.urlopen(request)")
    assert (outcome.end, len(outcome.trajectories)) == (EpisodeEnd.CONTEXT_FULL, 1)


def in_pipeline(folder: Path, program: str, timeout_s: float, *, parked_s: float = 0.0) -> EpisodeOutcome:
    """Run an agent as the pipeline does, with a group that is interrupted at once for ``parked_s`` seconds."""
    (folder / "agent.py").write_text(program)

    async def opened() -> EpisodeOutcome:
        world = World(folder)
        settings = AgentSettings(
            command=f"{sys.executable} {folder / 'agent.py'}",
            model_name="tiny",
            log_path=folder / "logs" / "agents.log",
            term_s=0.3,
        )
        engine, serving, load = FakeEngine(), ServingWeights(Weights(version=0, step=0)), EpisodeLoad(1)
        agents = AgentCommand(settings, world.gateway, world.limits, world.tokenizer.decode)
        sampler = Sampler(
            engine=RetryingEngine(engine, 0, lambda: serving.now),
            reward=token_sum,
            reward_timeout_s=1.0,
            tokenizer=world.tokenizer,
            sampling=SAMPLING,
            slots=Slots(1, load),
            serving=serving,
            timeline=NoTimeline(),
            seed=1,
            episodes=EpisodeSettings(function=agents, timeout_s=timeout_s),
        )
        async with asyncio.timeout(30), world.gateway, Episodes(load, NoTimeline()) as episodes:
            prompt = start_of((1, 2), text="What is the weather?").prompt
            episode = episodes.open(sampler, prompt, name="e", group_seed=0, index=0, group_size=1)
            try:
                episode.resume(lambda num_tokens: True)
                if parked_s:
                    episode.interrupt()
                    await asyncio.sleep(parked_s)
                    episode.resume(lambda num_tokens: True)
                return await episode.outcome()
            finally:
                agents.close()

    return asyncio.run(opened())


def test_a_slow_agent_is_ended_with_all_of_its_processes(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailed, match=r"no result within 1.5 s \(episode-timeout-s\)"):
        in_pipeline(tmp_path, _with_strays(tmp_path), 1.5)
    assert _left(_pids(tmp_path)) == []


def test_the_time_of_an_interruption_does_not_count_in_the_limit_of_an_agent(tmp_path: Path) -> None:
    outcome = in_pipeline(tmp_path, ASK + REPORT, 2.0, parked_s=2.5)
    assert (outcome.end, len(outcome.trajectories)) == (EpisodeEnd.FINISHED, 1)


def test_cancelling_an_episode_ends_its_agent(tmp_path: Path) -> None:
    async def scenario(episode: Coroutine[Any, Any, Any]) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(episode)
            while len(_pids(tmp_path)) < 3:  # noqa: ASYNC110 (another process writes them)
                await asyncio.sleep(0.02)
            task.cancel()

    run(tmp_path, _with_strays(tmp_path), test=scenario)
    assert _left(_pids(tmp_path)) == []


LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


def agent_of(program: str) -> _Agent:
    environment = {**os.environ, "ASYNCRL_EPISODE": "none"}
    return _Agent([sys.executable, "-c", program], environment, 0.3, StrayScans())


@LOOPS
def test_an_agent_that_is_cancelled_while_it_starts_leaves_no_file_open(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def started(num_turns: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(agent_of("").run())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            task.cancel()

    async def scenario() -> None:
        await started(9)  # opens what the loop keeps
        num_before = psutil.Process().num_fds()
        for num_turns in (1, 2, 3, 4) * 3:
            await started(num_turns)
        for _ in range(250):
            if psutil.Process().num_fds() > num_before:
                await asyncio.sleep(0.02)  # the loop closes what watched a child
        assert psutil.Process().num_fds() <= num_before

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


@LOOPS
def test_the_end_of_an_agents_output_is_kept(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    agent = agent_of("import sys; print('a' * 100_000, 'end'); print('b' * 100_000, file=sys.stderr); sys.exit(3)")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(agent.run()) == 3
    assert agent.output == b"a" * (32_768 - 5) + b" end\n"
    assert agent.errors == b"b" * 32_767 + b"\n"


def test_a_child_that_outlives_its_agent_is_ended(tmp_path: Path) -> None:
    run(tmp_path, _with_strays(tmp_path).replace("time.sleep(60)", "") + ASK)
    assert _left(_pids(tmp_path)[:2]) == []


def test_a_child_that_left_the_session_of_its_agent_is_ended(tmp_path: Path) -> None:
    daemon = "import subprocess; child = subprocess.Popen(['sleep', '987'], start_new_session=True)\n"
    save = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
    run(tmp_path, daemon + save + ASK)
    assert _left([int((tmp_path / "pid").read_text())]) == []


@pytest.mark.parametrize(
    "make",
    [
        "os.mkdir(os.environ['ASYNCRL_RESULT'])",
        "os.mkfifo(os.environ['ASYNCRL_RESULT'])",
        "os.symlink('/dev/zero', os.environ['ASYNCRL_RESULT'])",
        "os.truncate(os.open(os.environ['ASYNCRL_RESULT'], os.O_RDWR | os.O_CREAT), 1 << 34)",
    ],
)
def test_a_result_that_is_no_small_file_costs_the_episode(tmp_path: Path, make: str) -> None:
    with pytest.raises(EpisodeFailed, match="ASYNCRL_RESULT must be a file of at most 16 MiB"):
        run(tmp_path, ASK + make)


def test_a_task_that_is_no_json_costs_the_episode_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(EpisodeFailed, match="e0: the task cannot be written for the agent: "):
        run(tmp_path, ASK, label=2**70)
    assert not [*(tmp_path / "temporary").iterdir()]


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async def started() -> None:
        world = World(tmp_path)
        settings = AgentSettings(command="/no/such/agent", model_name="tiny", log_path=tmp_path / "agents.log")
        async with world.gateway:
            agents = AgentCommand(settings, world.gateway, world.limits, world.tokenizer.decode)
            with pytest.raises(EpisodeFailed, match=r"the agent did not start: .*/no/such/agent.* \(agent-command\)"):
                await agents(start_of(), ScriptedTurns(lambda *_: ()))

    asyncio.run(started())


def _with_strays(folder: Path) -> str:
    """A program that ignores SIGTERM, with a child in its group and one in another group."""
    return f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
children = [subprocess.Popen([sys.executable, "-c", sleep], process_group=group) for group in (None, 0)]
with open({str(folder / "pids")!r}, "w") as file:
    file.write(" ".join(str(pid) for pid in (children[0].pid, children[1].pid, os.getpid())) + "\\n")
time.sleep(60)
"""


def _pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() and file.read_text().endswith("\n") else []


def _left(pids: list[int]) -> list[int]:
    """Return those of the processes that are still there after 10 s; a killed one is there for a moment."""
    deadline = time.monotonic() + 10.0
    while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

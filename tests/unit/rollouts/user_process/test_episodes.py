"""Episodes in a real process of user code: turns, limits, cancellation, and functions that misbehave."""

import asyncio
import logging
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.episodes import EpisodeEnd, EpisodeOutcome, EpisodeStart
from asyncrl.errors import EpisodeFailed, PluginError, RewardKeyMissing, SampleFailed, ServerFailed, UserProcessFailed
from asyncrl.rollouts.user_process import supervised
from asyncrl.rollouts.user_process.episodes import UserEpisodes
from asyncrl.rollouts.user_process.host import UserProcesses
from asyncrl.rollouts.user_process.process import UserCodeProcess
from asyncrl.types import SamplingParams
from tests.programs import children_with
from tests.unit.rollouts.turns import ScriptedTurns
from tests.unit.rollouts.user_process import programs
from tests.unit.rollouts.user_process.runs import FakeGateway, episodes, opened, run_processes, seen, start


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(programs.MARKS, str(tmp_path))
    return tmp_path


def answer(call: int, token_ids: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return [ord(each) for each in f"answer {call}"]


def turns(**changes: Any) -> ScriptedTurns:
    return ScriptedTurns(answer, **changes)


async def error_of(run: UserEpisodes, task: EpisodeStart, with_turns: ScriptedTurns | None = None) -> str:
    with pytest.raises(EpisodeFailed) as caught:
        await run(task, with_turns or turns())
    return str(caught.value)


def test_turns_observations_and_decisions_reach_the_outcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = turns()

    async def main(_: UserProcesses, run: UserEpisodes) -> EpisodeOutcome:
        return await run(start("two_turns"), asked)

    outcome = run_processes(tmp_path, main)
    (found,) = outcome.trajectories
    first, second = asked.asked
    assert first[0] == start("two_turns").prompt.token_ids
    assert second[0] == (*first[0], *map(ord, "answer 0[]"))
    assert (first[1].stop, first[1].max_new_tokens) == (("\n", "</call>"), 20)
    assert second[1] == start("two_turns").sampling
    assert found.sample.text == "answer 0[]answer 1"
    assert found.loss_mask == (1,) * 8 + (0,) * 2 + (1,) * 8
    assert found.reward is not None and found.reward.value == 8.0
    assert found.sample.metadata == {"seen": [0]}
    assert "left out of results: metadata.client (object)" in caplog.text


def test_a_limit_that_leaves_the_function_ends_the_episode_with_its_turns(tmp_path: Path) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> EpisodeOutcome:
        return await run(start("without_end"), turns())

    outcome = run_processes(tmp_path, main)
    assert outcome.end is EpisodeEnd.MAX_TURNS
    assert len(outcome.trajectories[0].sample.turns) == 3


def test_a_function_that_fails_costs_its_own_episode(marks: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refusing = ScriptedTurns(lambda *_: SampleFailed("no engine is left"))
    gateway = FakeGateway()

    async def main(processes: UserProcesses, run: UserEpisodes) -> list[str]:
        run = episodes(processes, gateway=gateway)
        async with asyncio.TaskGroup() as group:
            other = group.create_task(run(start("slow", 0), turns(gate=asyncio.Event())))
            lines = [await error_of(run, start(name, 1)) for name in ("raising", "raising", "leaving")]
            lines.append(await error_of(run, start("two_turns", 1), refusing))
            with pytest.raises(RewardKeyMissing, match=r"^g0\.1: a dict reward with right: name one of them with"):
                await run(start("keyless", 1), turns())
            assert gateway.open_keys == {"g0.0"}
            other.cancel()
        return lines

    caplog.clear()
    lines = run_processes(marks, main)
    assert lines == [
        "g0.1: --flag 'mine.py': KeyError: 'no such tool' (programs.py:49, in raising)",
        "g0.1: --flag 'mine.py': KeyError: 'no such tool' (programs.py:49, in raising)",
        "g0.1: --flag 'mine.py': SystemExit: 3 (programs.py:58, in leaving)",
        "g0.1: --flag 'mine.py': SampleFailed: no engine is left (programs.py:33, in two_turns)",
    ]
    told = [(each.levelname, each.message) for each in caplog.records if "KeyError" in each.message]
    assert [level for level, _ in told] == ["WARNING", "INFO"]
    assert "programs.py" in told[0][1] and "user_process/worker.py" not in told[0][1]
    assert gateway.open_keys == set()


def test_cancelling_an_episode_runs_its_finally_and_aborts_its_turn(marks: Path) -> None:
    waiting = turns(gate=asyncio.Event())

    async def main(processes: UserProcesses, run: UserEpisodes) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(start("slow"), waiting))
            await waiting.started.wait()
            task.cancel()
        assert waiting.num_cancelled == 1
        await seen(marks / "finally-0")
        assert isinstance(await run(start("two_turns"), turns()), EpisodeOutcome)

    run_processes(marks, main)


def test_a_function_that_catches_its_cancellation_gets_no_further_turn_and_no_result(marks: Path) -> None:
    asked = turns()

    async def main(processes: UserProcesses, run: UserEpisodes) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(start("stubborn"), asked))
            await seen(marks / "stubborn")
            task.cancel()
        assert task.cancelled()
        await seen(marks / "cancelled")
        assert isinstance(await run(start("two_turns"), turns()), EpisodeOutcome)

    run_processes(marks, main)
    assert (marks / "refused-over").exists()
    assert len(asked.asked) == 1


def test_a_function_that_asks_again_for_ever_does_not_hold_the_process(marks: Path) -> None:
    waiting = turns(gate=asyncio.Event())

    async def main(processes: UserProcesses, run: UserEpisodes) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(start("persistent"), waiting))
            await waiting.started.wait()
            task.cancel()
        async with asyncio.timeout(20.0):
            assert isinstance(await run(start("two_turns"), turns()), EpisodeOutcome)

    run_processes(marks, main)


def test_a_turn_that_the_function_no_longer_waits_for_is_cancelled(marks: Path) -> None:
    gate = asyncio.Event()
    asked = turns(gate=gate)

    async def main(_: UserProcesses, run: UserEpisodes) -> EpisodeOutcome:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run(start("impatient"), asked))
            await seen(marks / "gave-up")
            await asked.cancelled.wait()
            gate.set()
        return task.result()

    outcome = run_processes(marks, main)
    assert outcome.trajectories[0].sample.text == "answer 1"


def test_the_end_of_a_process_costs_its_episodes_and_a_new_one_takes_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(processes: UserProcesses, run: UserEpisodes) -> list[str]:
        waiting = turns(gate=asyncio.Event())
        async with asyncio.TaskGroup() as group:
            other = group.create_task(error_of(run, start("two_turns", 0), waiting))
            await waiting.started.wait()
            lines = [await error_of(run, start("dying", 1))]
        lines += [other.result(), await error_of(run, start("killed"))]
        assert isinstance(await run(start("two_turns"), turns()), EpisodeOutcome)
        assert processes.num_restarts == 2
        return lines

    lines = run_processes(tmp_path, main)
    assert lines[0] == "g0.1: the process of its function ended: exit code 7"
    assert lines[1] == "g0.0: the process of its function ended: exit code 7"
    assert "signal 9, Killed" in lines[2]
    assert "user-code-0 ended: exit code 7; it is started again" in caplog.text


def test_a_daemon_of_a_process_that_died_is_ended(marks: Path) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> None:
        with pytest.raises(EpisodeFailed, match="exit code 7"):
            await run(start("dying_with_a_daemon"), turns())

    run_processes(marks, main)
    assert ended(int((marks / "daemon").read_text()))


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie, within 10 s; a killed one is there for a moment."""
    deadline = time.monotonic() + 10.0
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def test_siblings_share_a_process_and_groups_spread_over_all(tmp_path: Path) -> None:
    async def main(processes: UserProcesses, _: UserEpisodes) -> list[int]:
        places = [processes.of(task.group_id, task.prompt) for task in (start("a"), start("a", 1), start("a", group=1))]
        held_out = start("a", group=None)
        return [id(each) for each in (*places, processes.of(held_out.group_id, held_out.prompt))]

    first, sibling, other, held_out = run_processes(tmp_path, main, number=2)
    assert first == sibling == held_out != other


def test_a_loop_that_stands_still_too_long_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "BEAT_S", 0.1)
    monkeypatch.setattr(supervised, "STUCK_S", 3.0)

    async def main(_: UserProcesses, run: UserEpisodes) -> str:
        line = await error_of(run, start("blocking", label=60.0))
        assert isinstance(await run(start("two_turns"), turns()), EpisodeOutcome)
        return line

    assert "its event loop stood still for 3 s, so it was killed" in run_processes(tmp_path, main)


def test_a_program_that_blocks_its_loop_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> None:
        for index in range(2):
            await run(start("blocking", index, label=0.08), turns())

    run_processes(tmp_path, main)
    (line,) = [each for each in caplog.messages if "blocked the event loop" in each]
    assert line.startswith("user-code-0: native blocked the event loop of its process for ")


def test_a_thread_that_hangs_does_not_keep_its_process(tmp_path: Path) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await run(start("hung_in_a_thread"), turns())
        return time.monotonic()

    assert time.monotonic() - run_processes(tmp_path, main) < supervised.EXIT_S / 2


def test_a_process_that_never_completes_a_call_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "MOST_IN_A_ROW", 2)

    async def main(_: UserProcesses, run: UserEpisodes) -> None:
        for index in range(3):
            await error_of(run, start("dying", index))

    with pytest.raises(UserProcessFailed, match=r"user-code-0 ended 2 times in a row .* exit code 7 .*user-code-0.log"):
        run_processes(tmp_path, main)


def test_large_results_arrive(tmp_path: Path) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> EpisodeOutcome:
        return await run(start("large", label=20_000), turns())

    found = run_processes(tmp_path, main).trajectories[0].sample.metadata["large"]
    assert len(found) == 20_000 and found[-1] == {"text": "x" * 100, "place": 19_999}


def test_samples_of_slimes_shape_arrive_in_plain_types(tmp_path: Path) -> None:
    async def main(processes: UserProcesses, _: UserEpisodes) -> Any:
        task = start("any")
        await episodes(processes, "slimes")(task, turns())
        return task.prompt.metadata["samples"]

    (sample,) = run_processes(tmp_path, main)
    assert sample == {"tokens": [ord(each) for each in "answer 0"] * 20, "status": "done", "mask": [1, 0]}


def test_nothing_is_left_after_a_run(tmp_path: Path) -> None:
    async def main(_: UserProcesses, run: UserEpisodes) -> list[psutil.Process]:
        await run(start("two_turns"), turns())
        return children_with("user_process")

    left = run_processes(tmp_path, main, number=2)
    assert len(left) == 2
    assert not any(each.is_running() for each in left)


def test_a_process_that_was_never_taken_over_is_ended(tmp_path: Path) -> None:
    """The block ends before the task of the process has begun."""
    process = UserCodeProcess()

    async def main() -> None:
        async with opened(tmp_path, started=process):
            raise ServerFailed("the next part of the run does not start")

    with pytest.raises(ServerFailed):
        asyncio.run(main())
    assert process.has_ended()


def test_a_second_process_that_cannot_load_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from tests.unit.rollouts.user_process import runs

    monkeypatch.setattr(runs, "PROGRAMS", {"native": pickle.dumps(programs.nothing)})

    async def main(processes: UserProcesses, _: UserEpisodes) -> None:
        await processes.ready()

    with pytest.raises(PluginError, match="has no function 'nothing'"):
        run_processes(tmp_path, main)

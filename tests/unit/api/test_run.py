"""The Python API with a program in place of the run's, which speaks as it does."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import orjson
import psutil
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import asyncrl
from asyncrl.api.process import RunProcess, error_of, wait_for_left_runs
from asyncrl.api.reports import Reports
from asyncrl.api.run import Step, Steps
from asyncrl.errors import AsyncRLError, ConfigError, NonFiniteLoss, SamplesMissing, ServerFailed
from benchmarks.page.made_up_run import write_step

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
FOREVER = "sleep:50"


class Started:
    """Starts the program with actions, and knows the processes."""

    def __init__(self) -> None:
        self.processes = list[psutil.Process]()

    def steps(self, *actions: str) -> Steps:
        return Steps(partial(self._process, actions))

    def _process(self, actions: tuple[str, ...]) -> RunProcess:
        program = ("-m", "tests.unit.api.speaker")
        started = RunProcess(actions, grace_s=0.0, shows_output=False, program=program)
        with suppress(psutil.NoSuchProcess):  # it has ended, and RunProcess has waited for it
            self.processes.append(psutil.Process(started.pid))
        return started

    def ended(self, timeout_s: float = 30.0) -> bool:
        _, left = psutil.wait_procs(self.processes, timeout=timeout_s)
        return not left


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    monkeypatch.chdir(ROOT)
    started = Started()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a browser's driver may have left another
    yield started
    signal.signal(signal.SIGINT, before or signal.default_int_handler)
    for each in started.processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    wait_for_left_runs()


def numbers_of(steps: Steps) -> list[int]:
    async def main() -> list[int]:
        return [step.number async for step in steps]

    return asyncio.run(main())


# ---- settings


def test_settings_become_the_flags_of_the_command() -> None:
    run = asyncrl.Run(
        QUICKSTART,
        num_rollout=4,
        sglang_schedule_conservativeness=-1,
        eval_prompt_data=["a", QUICKSTART],
        timeline=False,
    )
    assert run.argv == (
        f"--config={QUICKSTART}",
        "--num-rollout=4",
        "--sglang-schedule-conservativeness=-1",
        "--eval-prompt-data",
        "a",
        str(QUICKSTART),
        "--no-timeline",
    )


def test_keywords_replace_settings_of_a_mapping_and_none_leaves_them_out() -> None:
    given: dict[str, object] = {
        "hf-checkpoint": ROOT / "configs/quickstart/model",
        "prompt-data": ROOT / "configs/quickstart/train.jsonl",
    }
    given |= {"rollout-batch-size": 16, "n_samples_per_prompt": 2, "rm-type": "random", "num-rollout": 9, "seed": 1}
    run = asyncrl.Run(given, num_rollout=2, seed=None, sglang_enable_metrics=True)
    assert run.argv[3:] == (
        "--n-samples-per-prompt=2",
        "--rm-type=random",
        "--num-rollout=2",
        "--sglang-enable-metrics=true",
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"num_rolout": 4}, "unknown flag --num-rolout; did you mean --num-rollout?"),
        ({"num_rollout": 0}, "num-rollout must be at least 1, got 0"),
        ({"lr": object}, "lr must be text, a number, a path, true, false or a list of these, got <class 'object'>"),
        ({"num_rollout": True}, "--num-rollout must be a whole number"),
    ],
)
def test_wrong_settings_are_refused_where_the_run_is_described(flags: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line.replace("?", r"\?")):
        asyncrl.Run(QUICKSTART, **flags)


def test_importing_asyncrl_and_describing_a_run_import_no_large_library() -> None:
    large = ("torch", "ray", "aiohttp", "numpy", "pyarrow", "uvloop")
    code = (
        f"import asyncrl, sys; before = len([m for m in sys.modules if m.startswith('asyncrl')]); "
        f"asyncrl.Run({str(QUICKSTART)!r}).steps(); "
        f"print(before, [name for name in {large} if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    ).stdout
    assert printed == "1 []\n"


def test_names_of_the_package_are_those_of_the_api() -> None:
    assert {"Run", "Step", "Steps"} <= set(dir(asyncrl))
    with pytest.raises(AttributeError, match="no attribute 'Walk'"):
        _ = asyncrl.Walk


# ---- steps


def test_steps_come_with_for_and_with_async_for(start: Started) -> None:
    steps = list(start.steps("row:0", "row:1"))
    assert [step.number for step in steps] == [0, 1]
    assert math.isnan(steps[0].metrics["reward/mean"])
    assert steps[0].samples_file == Path("runs/here/rollouts/step-000000.parquet")
    assert numbers_of(start.steps("row:0", "sleep:0.2", "row:1")) == [0, 1]
    assert start.ended()


def test_a_slow_loop_loses_no_step(start: Started) -> None:
    steps = start.steps(*(f"row:{number}" for number in range(200)))
    assert next(steps).number == 0
    assert start.ended()
    assert [step.number for step in steps] == list(range(1, 200))


def test_the_error_of_the_run_is_raised_after_its_steps(start: Started) -> None:
    seen = []
    with pytest.raises(NonFiniteLoss, match="the cause"):
        for step in start.steps("row:0", "fail:NonFiniteLoss", "code:1"):
            seen.append(step.number)
    assert seen == [0]
    with pytest.raises(ConfigError, match="the cause"):
        numbers_of(start.steps("fail:ConfigError", "code:2"))


def test_an_error_that_quotes_half_a_surrogate_pair_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reports, "_end_with_starter", lambda self: None)  # it ends this process
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reports = Reports(theirs)
        reports.fail("RewardFailed", f"no file {os.fsdecode(bytes([0xE9]))}")
        reports.finish()
        assert orjson.loads(ours.recv(1000)) == {"error": {"name": "RewardFailed", "text": "no file \\udce9"}}


def test_errors_that_no_class_stands_for_keep_their_names() -> None:
    assert str(error_of("RewardUnavailable", "away")) == "RewardUnavailable: away"
    assert type(error_of("RewardUnavailable", "away")) is AsyncRLError
    assert type(error_of("KeyError", "KeyError: 1 (a bug in asyncrl)")) is RuntimeError


def test_a_process_that_ends_without_a_word_is_an_error_with_its_last_line(start: Started) -> None:
    with pytest.raises(ServerFailed, match=r"ended with exit code 1: Stalled: nothing moved$"):
        list(start.steps("say:first", "say:Stalled: nothing moved", "code:1"))
    steps = start.steps("row:0", FOREVER)
    next(steps)
    start.processes[-1].kill()
    with pytest.raises(ServerFailed, match=r"ended with signal 9$"):
        next(steps)
    assert list(steps) == []


# ---- the end


def test_a_loop_that_is_left_ends_the_run(start: Started) -> None:
    for _ in start.steps("end-on-sigterm", "row:0", FOREVER):
        break
    assert start.ended()

    async def failing() -> None:
        async for _ in start.steps("end-on-sigterm", "row:0", FOREVER):
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(failing())
    assert start.ended()


def test_an_interrupted_wait_for_a_step_ends_the_run_although_the_traceback_is_kept(start: Started) -> None:
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt) as kept:
        for _ in start.steps("end-on-sigterm", "row:0", FOREVER):
            pass
    assert start.ended()
    assert kept.tb is not None

    async def main() -> BaseException | None:
        try:
            async with asyncio.timeout(1.0):
                async for _ in start.steps("end-on-sigterm", "row:0", FOREVER):
                    pass
        except TimeoutError as error:
            return error
        return None

    error = asyncio.run(main())
    assert start.ended()
    assert error is not None


def test_a_block_waits_for_the_end_without_blocking_the_loop(start: Started, tmp_path: Path) -> None:
    over = tmp_path / "over"

    async def tick() -> None:
        for _ in range(5):
            await asyncio.sleep(0.01)
        over.touch()

    async def main() -> bool:
        async with asyncio.TaskGroup() as tasks:
            async with start.steps("deaf", "row:0", f"until:{over}") as steps:
                assert (await anext(steps)).number == 0
                tasks.create_task(tick())
            return over.exists()  # without the loop's turns, the process ends after its limit

    assert asyncio.run(main())
    assert start.ended(0.0)
    with start.steps("end-on-sigterm", "row:0", FOREVER) as steps:
        next(steps)
    assert start.ended(0.0)
    assert list(steps) == []


def test_the_next_run_waits_for_one_that_was_left(start: Started) -> None:
    next(start.steps("deaf", "row:0", "sleep:0.5"))
    assert numbers_of(start.steps("row:0")) == [0]
    assert psutil.wait_procs(start.processes[:1], timeout=0.0)[1] == []


def test_an_interrupted_wait_ends_the_run_at_once(start: Started) -> None:
    steps = start.steps("deaf", "row:0", FOREVER)
    next(steps)
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        steps.close()
    assert time.monotonic() - began < 10.0
    assert start.ended(0.0)


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_run_outlives_the_program_that_started_it(end: str) -> None:
    code = f"""
from asyncrl.api.process import RunProcess
program = ("-m", "tests.unit.api.speaker")
run = RunProcess(["end-on-sigterm", "row:0", {FOREVER!r}], grace_s=0.0, shows_output=False, program=program)
run.get()
print(run.pid, flush=True)
{end}
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, cwd=ROOT, check=False
    )
    pid = int(ran.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=30.0)
    assert not psutil.pid_exists(pid)


# ---- samples


def test_samples_are_read_once_their_file_is_there(tmp_path: Path) -> None:
    step = Step(number=3, metrics={}, run_dir=tmp_path)
    with pytest.raises(SamplesMissing, match=r"step-000003\.parquet: not there after 0.1 s"):
        step.samples(timeout_s=0.1)
    step.samples_file.parent.mkdir()
    pq.write_table(pa.table({"reward": [0.0, 1.0]}), step.samples_file)
    assert step.samples()["reward"].to_pylist() == [0.0, 1.0]


def test_samples_of_a_repeated_step_are_not_those_of_the_former_life(start: Started, tmp_path: Path) -> None:
    write_step(tmp_path, 0, seed=1)
    for step in start.steps(f"in:{tmp_path}", "row:0", "row:1"):
        with pytest.raises(SamplesMissing):
            step.samples(timeout_s=0.1)
        path = write_step(tmp_path, step.number, seed=2)
        assert step.samples().equals(pq.read_table(path))

"""Every launch script fits on its GPUs, by its own dry run; one that cannot fit is refused in one line."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "configs").glob("*.sh"))
MODELS = Path(__file__).parent / "models"
"""The shape-giving keys of the released models' config.json."""

WAITING = f"{ROOT}/configs/launch/wait_for_gpus.py"
GPUS = {"qwen3-4b": 8, "glm-z1-9b": 8, "qwen3-30b-a3b": 8, "glm4.5-355b-a32b": 64, "deepseek-r1": 128}


def launched(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "configs" / f"{script}.sh"), *flags],
        capture_output=True,
        text=True,
        timeout=360,
        env={**os.environ, "PYTHON": sys.executable, "MODEL": str(MODELS / script), "COLUMNS": "160", **environment},
    )


def test_each_script_has_a_model_here() -> None:
    assert set(GPUS) == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_fits_on_its_gpus(script: str, tmp_path: Path) -> None:
    done = launched(script, "--dry-run", RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert re.search(rf"GPUs +{GPUS[script]}: ", done.stdout)
    assert "no tokenizer.json, no *.safetensors" in done.stdout
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


@pytest.mark.parametrize(
    ("script", "engine", "batch", "driver"),
    [
        ("qwen3-30b-a3b", "0.2", "6.8", "20.5"),
        ("glm4.5-355b-a32b", "0.5", "12.7", "38.1"),
        ("deepseek-r1", "0.5", "8.3", "24.8"),
    ],
)
def test_scripts_of_mixtures_replay_routes_and_show_their_memory(
    script: str, engine: str, batch: str, driver: str
) -> None:
    done = launched(script, "--dry-run")
    assert re.search(rf"engine +{engine} +out of the memory that SGLang leaves free", done.stdout)
    assert re.search(rf"trainer +up to {batch} GB of a node", done.stdout)
    assert re.search(rf"driver +up to {driver} GB of host memory: the 3 batches", done.stdout)
    assert re.search("routing replay +on", done.stdout)
    without = launched(script, "--dry-run", "--no-use-rollout-routing-replay").stdout
    assert re.search("routing replay +off", without)
    assert "SGLang leaves free" not in without


def test_a_gpu_that_is_too_small_is_refused() -> None:
    done = launched("qwen3-4b", "--dry-run", GPU_MEMORY_GB="40")
    assert done.returncode == 2
    trainer, *others = done.stderr.splitlines()
    assert trainer.startswith("error: a trainer rank needs 97.4 GB on pipeline stage 0, a GPU has 40 GB")
    assert not others, "an engine with a short cache fits"


def test_an_engine_that_cannot_hold_its_weights_is_refused() -> None:
    done = launched("deepseek-r1", "--dry-run", GPU_MEMORY_GB="141")
    assert done.returncode == 2
    assert "error: an engine does not fit on 8 GPUs of 141 GB (gpu-memory-gb): 169.6 GB of weights" in done.stderr


def test_flags_on_the_command_line_win() -> None:
    done = launched("qwen3-4b", "--dry-run", "--rollout-max-response-len", "50000")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "error: rollout-max-prompt-len 2048 + rollout-max-response-len 50000 = 52048 tokens, "
        "the model has 40960 positions (max-position-embeddings)"
    )


def test_an_unknown_flag_is_refused() -> None:
    done = launched("qwen3-4b", "--dry-run", "--sglang-mem-fraction", "0.8")
    assert done.returncode == 2
    assert "unknown flag --sglang-mem-fraction; did you mean --sglang-mem-fraction-static?" in done.stderr


def test_many_machines_need_the_first_ones_address() -> None:
    environment = {"MASTER_ADDR": "", "RAY_JOB_ADDRESS": ""}
    done = launched("deepseek-r1", **environment)
    assert done.returncode == 2
    assert done.stderr == "error: 16 machines need MASTER_ADDR, the first one's address; see docs/launch.md\n"


def test_a_machine_that_finds_no_ray_ends_with_an_error() -> None:
    done = launched("deepseek-r1", MASTER_ADDR="127.0.0.1", NODE_RANK="3", RAY_PORT="1", JOIN_TIMEOUT_S="0")
    assert done.returncode == 1
    assert done.stderr == "error: no Ray at 127.0.0.1:1 within 0 s (JOIN_TIMEOUT_S)\n"


@pytest.fixture
def joining(stand_in: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of another machine, while something listens where the first one's Ray does."""
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = {"MASTER_ADDR": "127.0.0.1", "RAY_PORT": str(head.getsockname()[1])}
        yield {**stand_in, **address, "NODE_RANK": "1", "RAY_AUTH_MODE": "disabled", "JOIN_TIMEOUT_S": "10"}


def num_joins(environment: dict[str, str]) -> int:
    return sum("start --address" in call for call in calls(environment))


def test_a_machine_ends_with_the_ray_that_it_joined(joining: dict[str, str]) -> None:
    assert launched("deepseek-r1", **joining, RAY_FAILS="1").returncode == 1
    assert num_joins(joining) == 1


def test_a_machine_that_shall_joins_again_until_it_is_ended(joining: dict[str, str]) -> None:
    again = {**joining, "JOIN_AGAIN": "yes", "JOINED_S": "0", "RAY_FAILS": "1"}
    with led(again) as running:
        assert ends(was_called(joining, "start --address"))
        assert ends(lambda: num_joins(joining) >= 3)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=90) == 143


def test_a_machine_that_cannot_join_does_not_try_for_ever(joining: dict[str, str]) -> None:
    done = launched("deepseek-r1", **joining, JOIN_AGAIN="yes", RAY_FAILS="4")
    assert done.returncode == 4
    assert num_joins(joining) == 1


STAND_IN = """#!/usr/bin/env bash
# Stands where Python would: writes down what it was asked for, once it can be ended.
case "$*" in
    *"start --head"*)
        trap 'sleep "$RAY_ENDS_IN_S"; echo "Ray was ended" >>"$CALLS"; exit 0' TERM
        echo "$*" >>"$CALLS"
        [[ -z "${RAY_FAILS:-}" ]] || exit "$RAY_FAILS"
        while true; do sleep 0.05; done ;;
    *"start --address"*)
        echo "$*" >>"$CALLS"
        exit "${RAY_FAILS:-0}" ;;
    *wait_for_gpus.py*)
        until grep -q "start --head" "$CALLS"; do sleep 0.02; done 2>/dev/null
        echo "$*" >>"$CALLS"
        exec sleep "$GPUS_COME_IN_S" ;;
    *train_async.py*)
        [[ -z "${HASTE:-}" ]] || kill -TERM $PPID
        echo "$*" >>"$CALLS"
        [[ -z "${RUNS_ON:-}" ]] || exec sleep 1000
        exit 7 ;;
    *) echo "$*" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """The environment in which a script starts nothing real; the file ``calls`` gets its commands instead."""
    program = tmp_path / "python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return {
        "PYTHON": str(program),
        "CALLS": str(tmp_path / "calls"),
        "GPUS_COME_IN_S": "0",
        "RAY_ENDS_IN_S": "0",
        "RUNS": str(tmp_path),
    }


def calls(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLS"]).read_text().splitlines()


@pytest.mark.parametrize("script", [name for name, gpus in GPUS.items() if gpus > 8])
def test_the_first_machine_starts_the_cluster_and_the_run(script: str, stand_in: dict[str, str]) -> None:
    done = launched(script, "--num-rollout", "3", **stand_in, MASTER_ADDR="10.0.0.1")
    assert done.returncode == 7, "the program's own exit code"
    told = calls(stand_in)
    (started,) = (call for call in told if "start --head" in call)
    assert "start --head --node-ip-address 10.0.0.1 --port 6379 --num-gpus 8 --block" in started
    assert "--no-monitor" in started.split()
    folder = Path(started.split("--temp-dir ")[1])
    assert folder == Path(f"/tmp/asyncrl-{os.getuid()}/cluster")
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert f"{WAITING} {GPUS[script]} 1800" in told, "it waits for all GPUs"
    (run,) = [call for call in told if "train_async.py" in call]
    assert run.endswith(" --num-rollout 3")
    assert told[-1] == "Ray was ended"


def test_a_machine_alone_needs_no_cluster(stand_in: dict[str, str]) -> None:
    assert launched("qwen3-4b", **stand_in).returncode == 7
    (run,) = calls(stand_in)
    assert "train_async.py --hf-checkpoint" in run


def test_a_cluster_that_is_there_gets_a_job(stand_in: dict[str, str]) -> None:
    launched("deepseek-r1", **stand_in, RAY_JOB_ADDRESS="http://10.0.0.1:8265")
    (job,) = calls(stand_in)
    assert "job submit --address http://10.0.0.1:8265 -- " in job
    assert f"{stand_in['PYTHON']} {ROOT / 'train_async.py'} --hf-checkpoint" in job


def test_a_ray_that_does_not_start_ends_the_waiting_for_gpus(stand_in: dict[str, str]) -> None:
    done = launched("deepseek-r1", **{**stand_in, "GPUS_COME_IN_S": "1000", "RAY_FAILS": "4"}, MASTER_ADDR="10.0.0.1")
    assert done.returncode == 1
    assert done.stderr == "error: Ray failed to start (exit code 4); its output is above\n"


@contextmanager
def led(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The script of the first machine, in a separate session; at the end no process of the session may be left."""
    # Tests that run in the background ignore SIGINT, and bash could not catch it then.
    script = ["env", "--default-signal=INT", "bash", str(ROOT / "configs" / "deepseek-r1.sh")]
    environment = {**os.environ, "RUNS_ON": "yes", "MASTER_ADDR": "10.0.0.1", **environment}
    with subprocess.Popen(
        script, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
            assert running.poll() is not None
            assert ends(lambda: not is_there(running.pid)), "the script left processes behind"
        finally:
            if is_there(running.pid):
                os.killpg(running.pid, signal.SIGKILL)


def is_there(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def ends(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def was_called(environment: dict[str, str], part: str) -> Callable[[], bool]:
    return lambda: Path(environment["CALLS"]).exists() and any(part in call for call in calls(environment))


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_reaches_the_program_first(number: signal.Signals, code: int, stand_in: dict[str, str]) -> None:
    with led(stand_in) as running:
        assert ends(was_called(stand_in, "train_async.py"))
        running.send_signal(number)
        assert running.wait(timeout=90) == code
    assert calls(stand_in)[-1] == "Ray was ended"


def test_a_terminal_that_is_gone_ends_nothing(stand_in: dict[str, str]) -> None:
    with led(stand_in) as running:
        assert ends(was_called(stand_in, "train_async.py"))
        os.killpg(running.pid, signal.SIGHUP)  # as the kernel does
        time.sleep(0.5)
        assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=90) == 143, "the program lived until then"
    assert calls(stand_in)[-1] == "Ray was ended"


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_ends_the_waiting_for_gpus(number: signal.Signals, code: int, stand_in: dict[str, str]) -> None:
    with led({**stand_in, "GPUS_COME_IN_S": "1000"}) as running:
        assert ends(was_called(stand_in, WAITING))
        running.send_signal(number)
        assert running.wait(timeout=90) == code
    assert not was_called(stand_in, "train_async.py")()
    assert calls(stand_in)[-1] == "Ray was ended"


def test_sigterm_in_the_moment_when_the_program_starts(stand_in: dict[str, str]) -> None:
    with led({**stand_in, "HASTE": "the program sends it"}) as running:
        assert running.wait(timeout=90) == 143
    assert was_called(stand_in, "Ray was ended")()


def test_a_second_signal_does_not_leave_ray_behind(stand_in: dict[str, str]) -> None:
    with led({**stand_in, "GPUS_COME_IN_S": "1000", "RAY_ENDS_IN_S": "2"}) as running:
        assert ends(was_called(stand_in, WAITING))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            running.send_signal(number)
            time.sleep(0.2)
        assert running.wait(timeout=90) == 143
    assert calls(stand_in)[-1] == "Ray was ended"


def test_a_ray_that_does_not_end_is_killed(stand_in: dict[str, str]) -> None:
    with led({**stand_in, "RAY_ENDS_IN_S": "1000", "END_TIMEOUT_S": "1"}) as running:
        assert ends(was_called(stand_in, "train_async.py"))
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=90) == 143
        os.killpg(running.pid, signal.SIGKILL)  # what Ray itself had started
        assert running.stderr is not None
        assert "error: Ray did not end within 1 s and was killed" in running.stderr.read()

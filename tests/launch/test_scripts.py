"""Every launch script fits on the GPUs that it names, by its own dry run; what cannot is refused in one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "configs").glob("*.sh"))
MODELS = Path(__file__).parent / "models"
"""The released models' config.json, as far as it says what shape they have."""

GPUS = {"qwen3-4b": 8, "glm-z1-9b": 8, "qwen3-30b-a3b": 8, "glm4.5-355b-a32b": 64, "deepseek-r1": 128}


def launched(script: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "configs" / f"{script}.sh"), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHON": sys.executable, "MODEL": str(MODELS / script), "COLUMNS": "160", **environment},
    )


def test_each_script_has_a_model_here() -> None:
    assert set(GPUS) == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_fits_on_its_gpus(script: str, tmp_path: Path) -> None:
    done = launched(script, "--dry-run", RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"GPUs{' ' * 34}{GPUS[script]}: " in done.stdout
    assert "no tokenizer.json, no *.safetensors" in done.stdout
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


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


def test_a_flag_that_is_not_there_is_refused() -> None:
    done = launched("qwen3-4b", "--dry-run", "--sglang-mem-fraction", "0.8")
    assert done.returncode == 2
    assert "unknown flag --sglang-mem-fraction; did you mean --sglang-mem-fraction-static?" in done.stderr


def test_many_machines_need_the_first_ones_address() -> None:
    environment = {"MASTER_ADDR": "", "RAY_JOB_ADDRESS": ""}
    done = launched("deepseek-r1", **environment)
    assert done.returncode == 2
    assert done.stderr == "error: 16 machines need MASTER_ADDR, the first one's address; see docs/launch.md\n"


def test_a_machine_that_finds_no_ray_gives_up() -> None:
    done = launched("deepseek-r1", MASTER_ADDR="127.0.0.1", NODE_RANK="3", RAY_PORT="1", JOIN_TIMEOUT_S="0")
    assert done.returncode == 1
    assert done.stderr == "error: no Ray at 127.0.0.1:1 within 0 s (JOIN_TIMEOUT_S)\n"


STAND_IN = """#!/usr/bin/env bash
# Stands where Python would: writes down what it was asked for, once it can be ended.
case "$*" in
    *"start --head"*)
        trap 'echo "Ray was ended" >>"$CALLS"; exit 0' TERM
        echo "$*" >>"$CALLS"
        [[ -z "${RAY_FAILS:-}" ]] || exit "$RAY_FAILS"
        while true; do sleep 0.05; done ;;
    "- "*)
        until grep -q "start --head" "$CALLS"; do sleep 0.02; done 2>/dev/null
        echo "$*" >>"$CALLS"
        exec sleep "$GPUS_AFTER_S" ;;
    *train_async.py*)
        [[ -z "${HASTE:-}" ]] || kill -TERM $PPID
        echo "$*" >>"$CALLS"
        for _ in $(seq "$TICKS"); do sleep 0.05; done
        exit 7 ;;
    *) echo "$*" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """Environment in which a script starts nothing real; ``calls`` in the same folder has what it would have."""
    program = tmp_path / "python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    return {
        "PYTHON": str(program),
        "CALLS": str(tmp_path / "calls"),
        "TICKS": "1",
        "GPUS_AFTER_S": "0",
        "RUNS": str(tmp_path),
    }


def calls(environment: dict[str, str]) -> list[str]:
    return Path(environment["CALLS"]).read_text().splitlines()


@pytest.mark.parametrize("script", [name for name, gpus in GPUS.items() if gpus > 8])
def test_the_first_machine_leads(script: str, stand_in: dict[str, str]) -> None:
    done = launched(script, "--num-rollout", "3", **stand_in, MASTER_ADDR="10.0.0.1")
    assert done.returncode == 7, "the program's own exit code"
    told = calls(stand_in)
    assert any("start --head --node-ip-address 10.0.0.1 --port 6379 --num-gpus 8 --block" in call for call in told)
    assert f"- {GPUS[script]} 1800" in told, "it waits for all GPUs"
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
    done = launched("deepseek-r1", **{**stand_in, "GPUS_AFTER_S": "1000", "RAY_FAILS": "4"}, MASTER_ADDR="10.0.0.1")
    assert done.returncode == 1
    assert done.stderr == "error: Ray ended at its start (exit code 4); above is what it said\n"


def wait_for_call(environment: dict[str, str], part: str, running: subprocess.Popen[bytes]) -> None:
    while not (Path(environment["CALLS"]).exists() and any(part in call for call in calls(environment))):
        assert running.poll() is None
        time.sleep(0.01)


def ended_by_sigterm(environment: dict[str, str], once: str | None = None) -> int:
    """The script's exit code; SIGTERM is sent when a call with ``once`` in it is seen.  Nothing it started is left."""
    script = ["bash", str(ROOT / "configs" / "deepseek-r1.sh")]
    environment = {**os.environ, **environment, "TICKS": "1000", "MASTER_ADDR": "10.0.0.1"}
    with subprocess.Popen(script, env=environment, start_new_session=True) as running:
        if once:
            wait_for_call(environment, once, running)
            running.send_signal(signal.SIGTERM)
        code = running.wait(timeout=60)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(running.pid, 0)
        except ProcessLookupError:
            return code
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGKILL)
    raise AssertionError("the script left processes behind")


def test_sigterm_reaches_the_program_first(stand_in: dict[str, str]) -> None:
    assert ended_by_sigterm(stand_in, once="train_async.py") == 143
    assert calls(stand_in)[-1] == "Ray was ended"


def test_sigterm_ends_the_waiting_for_gpus(stand_in: dict[str, str]) -> None:
    assert ended_by_sigterm({**stand_in, "GPUS_AFTER_S": "1000"}, once="- 128 1800") == 143
    assert not any("train_async.py" in call for call in calls(stand_in))
    assert calls(stand_in)[-1] == "Ray was ended"


def test_sigterm_in_the_moment_when_the_program_starts(stand_in: dict[str, str]) -> None:
    assert ended_by_sigterm({**stand_in, "HASTE": "the program sends it"}) == 143
    assert "Ray was ended" in calls(stand_in)

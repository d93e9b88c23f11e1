"""A preempted job starts again by itself, and one that cannot succeed does not."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import load_run

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "configs" / "launch" / "slurm.sh"
KUBERNETES = ROOT / "configs" / "launch" / "kubernetes.yaml"

SRUN = """#!/usr/bin/env bash
# Stands where srun would: runs the command here, and notes what it was asked for.
echo "srun $*" >>"$CALLS"
while [[ "$1" == --* ]]; do shift 2; done
trap 'echo "srun was stopped" >>"$CALLS"; kill %1; exit 1' TERM
"$@" &
wait
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
[[ "$*" != "show config" ]] || echo "${SETTINGS:-}"
[[ "$*" != "show hostnames"* ]] || printf 'node-a\\nnode-b\\n'
"""
RUN = """
# On the first machine alone: bash loses a trapped signal that comes as it becomes another program.
[[ "$NODE_RANK" -ne 0 ]] || trap 'echo "checkpoint written" >>"$CALLS"; exit 143' TERM
echo "rank $NODE_RANK of $MASTER_ADDR: $*" >>"$CALLS"
[[ "$NODE_RANK" -eq 0 ]] || exec sleep 1000
[[ -z "${SAVES:-}" ]] || { mkdir -p "$RUNS/model-checkpoints"; \
echo "$SAVES" >"$RUNS/model-checkpoints/latest_checkpointed_iteration.txt"; }
[[ -n "${CODE:-}" ]] && exit "$CODE"
while true; do sleep 0.05; done
"""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two machines, whose run is a stand-in."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "model.sh": RUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RUNS": str(tmp_path / "runs"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
    }


@contextmanager
def started(job: dict[str, str], *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = ["bash", str(SLURM), str(Path(job["CALLS"]).parent / "model.sh"), *flags]
    with subprocess.Popen(command, env=job, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def ended(job: dict[str, str], *flags: str) -> tuple[int, str]:
    with started(job, *flags) as running:
        _, said = running.communicate(timeout=60)
        return running.returncode, said


def calls(job: dict[str, str]) -> list[str]:
    path = Path(job["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def is_requeued(job: dict[str, str]) -> bool:
    return "scontrol requeue 77" in calls(job)


def test_a_preempted_job_saves_and_is_requeued_before_the_other_machines_end(job: dict[str, str]) -> None:
    with started(job, "--num-rollout", "3") as running:
        deadline = time.monotonic() + 20
        while sum("rank" in call for call in calls(job)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=60) == 143
    told = calls(job)
    assert "rank 0 of node-a: --grace-s 120 --num-rollout 3" in told
    assert "rank 1 of node-a: " in told
    assert "scontrol requeue 77" in told
    assert any(call.startswith("srun --nodes 1 --ntasks 1 --exclude node-a bash ") for call in told)
    assert told.index("checkpoint written") < told.index("srun was stopped")


@pytest.mark.parametrize(("code", "again"), [(0, False), (2, False), (1, True), (137, True), (143, True)])
def test_the_exit_code_decides(code: int, again: bool, job: dict[str, str]) -> None:
    assert ended({**job, "CODE": str(code)})[0] == code
    assert is_requeued(job) == again


@pytest.mark.parametrize(
    ("kind", "parameters", "is_told"),
    [
        ("preempt/none", "(null)", False),
        ("preempt/partition_prio", "(null)", True),
        ("preempt/qos", "send_user_signal", False),
    ],
)
def test_a_cluster_that_would_signal_the_other_machines_is_told(
    kind: str, parameters: str, is_told: bool, job: dict[str, str]
) -> None:
    settings = f"PreemptMode             = REQUEUE\nPreemptParameters       = {parameters}\nPreemptType = {kind}\n"
    _, said = ended({**job, "CODE": "0", "SETTINGS": settings})
    assert ("warning: this cluster preempts jobs without PreemptParameters=send_user_signal" in said) == is_told


def test_failures_without_progress_end_the_job(job: dict[str, str]) -> None:
    for _ in range(2):
        ended({**job, "CODE": "1", "SAVES": "10", "MOST_RESTARTS": "2"})
    assert calls(job).count("scontrol requeue 77") == 2
    ended({**job, "CODE": "1", "SAVES": "20", "MOST_RESTARTS": "2"})
    assert calls(job).count("scontrol requeue 77") == 3, "there was a new checkpoint"
    ended({**job, "CODE": "1", "SAVES": "20", "MOST_RESTARTS": "2"})
    code, said = ended({**job, "CODE": "1", "SAVES": "20", "MOST_RESTARTS": "2"})
    assert code == 1
    assert "error: 2 restarts without a new checkpoint (newest: 20); the job is not requeued (MOST_RESTARTS)" in said
    assert calls(job).count("scontrol requeue 77") == 4


def test_a_job_without_a_script_is_one_line(job: dict[str, str]) -> None:
    done = subprocess.run(["bash", str(SLURM), "nothing.sh"], env=job, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        done.stderr == "error: the first argument must be a script of configs/, got 'nothing.sh'; see docs/launch.md\n"
    )
    assert calls(job) == []


def manifest() -> dict[str, Any]:
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    spec: dict[str, Any] = job["spec"]
    return spec


def test_the_pod_outlives_the_grace() -> None:
    pod = manifest()["template"]["spec"]
    *_, line = pod["containers"][0]["command"]
    _, _, flags = line.partition(".sh ")
    run = load_run(["--config", str(ROOT / "configs" / "quickstart.toml"), *flags.split()], program="train_async.py")
    assert pod["terminationGracePeriodSeconds"] >= run.failures.grace_s + 60
    assert (ROOT / line.split("bash ")[1].split(" ")[0]).is_file()


def test_the_other_machines_use_up_no_replacement_when_the_first_one_is_preempted() -> None:
    """Their scripts would end with 1, of which backoffLimit allows 20, while 143 is allowed without limit."""
    job = manifest()
    (container,) = job["template"]["spec"]["containers"]
    assert {"name": "JOIN_AGAIN", "value": "yes"} in container["env"]
    assert job["successPolicy"]["rules"] == [{"succeededIndexes": "0"}], "their pods end with the Job"


def test_every_documented_exit_code_has_its_action() -> None:
    rules = manifest()["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert actions == {2: "FailJob", 143: "Ignore"}

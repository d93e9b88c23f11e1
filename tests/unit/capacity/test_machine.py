"""Limits of the machine that starts a run: one line each, with a remedy, before anything starts."""

import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.capacity.machine import (
    Disk,
    DiskNeed,
    MachineLimits,
    MachineNeeds,
    checkpoint_bytes,
    machine_findings,
    machine_limits,
    machine_needs,
    raise_open_files,
)
from asyncrl.config import load_run
from asyncrl.models.shape import read_shape

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
SAVE, RUN = Path("/big/save"), Path("/big/run")
NEEDS = MachineNeeds(
    requests=4096,
    uses_router=True,
    episodes=0,
    shared_bytes=1.5e9,
    disks=(
        DiskNeed(flag="save", folder=SAVE, least=50e9, usual=100e9, what="two checkpoints take 100.0 GB"),
        DiskNeed(flag="run-dir", folder=RUN, least=0, usual=8e9, what="the final weights take 8.0 GB"),
    ),
    ports=10,
)
LIMITS = MachineLimits(
    open_files=65_536,
    shared_bytes=16e9,
    disks={SAVE: Disk(number=1, free=200e9), RUN: Disk(number=1, free=200e9)},
    free_ports=10,
    ports=range(20_000, 32_000),
    outgoing_ports=range(32_768, 61_000),
)
REMEDY = (
    "; raise the limit (LimitNOFILE= of a systemd unit, --ulimit nofile= of docker run), or lower "
    "sglang-server-concurrency"
)


def on_disk(gigabytes: float) -> MachineLimits:
    disk = Disk(number=1, free=gigabytes * 1e9)
    return replace(LIMITS, disks={SAVE: disk, RUN: disk})


def test_a_machine_with_room_for_everything_gives_no_line() -> None:
    found = machine_findings(NEEDS, LIMITS)
    assert (found.errors, found.warnings) == ((), ())


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (
            replace(LIMITS, open_files=1024),
            f"at most 1,024 open files per process (ulimit -Hn), and 4,096 requests at a time need 4,352{REMEDY}",
        ),
        (
            on_disk(49),
            "save /big/save: 49.0 GB are free; two checkpoints take 100.0 GB; free some space, or give another folder "
            "with save",
        ),
        (
            replace(LIMITS, free_ports=3),
            "ports 20000 to 31999: 3 are free, the servers of this run need 10; end programs that listen there",
        ),
    ],
)
def test_what_cannot_work_is_an_error(limits: MachineLimits, line: str) -> None:
    assert machine_findings(NEEDS, limits).errors == (line,)


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        (
            replace(LIMITS, open_files=5000),
            "at most 5,000 open files per process (ulimit -Hn), and 4,096 requests at a time need up to 8,448 in the "
            f"router{REMEDY}",
        ),
        (
            on_disk(99),
            "save /big/save: 99.0 GB are free; two checkpoints take 100.0 GB; free some space, or give another folder "
            "with save",
        ),
        (
            on_disk(104),
            "run-dir /big/run: 104.0 GB are free, and other folders of the run need 100.0 GB of them; the final "
            "weights take 8.0 GB; free some space, or give another folder with run-dir",
        ),
        (
            replace(LIMITS, shared_bytes=64e6),
            "/dev/shm: 0.06 GB are free, 1.5 GB are needed for batches in Ray's object store and for NCCL; with docker "
            "run, give --shm-size or --ipc=host, in Kubernetes a volume of medium Memory",
        ),
        (
            replace(LIMITS, outgoing_ports=range(1024, 65_536)),
            "ports 20000 to 31999: the kernel gives them to outgoing connections as well, which may take a server's "
            "port while it loads; set sysctl net.ipv4.ip_local_port_range='32768 60999'",
        ),
    ],
)
def test_a_doubt_is_a_warning(limits: MachineLimits, line: str) -> None:
    found = machine_findings(NEEDS, limits)
    assert found.errors == ()
    assert line in found.warnings


def test_agents_need_open_files_as_well() -> None:
    found = machine_findings(replace(NEEDS, episodes=70_000), LIMITS)
    assert "4,096 requests at a time and 70,000 agents need 74,352" in found.errors[0]


def test_the_needs_follow_from_flags_and_shape(tmp_path: Path) -> None:
    flags = ["--save", str(tmp_path / "new" / "save"), "--dtype", "bfloat16", "--sglang-server-concurrency", "100"]
    run = load_run(["--config", QUICKSTART, *flags])
    shape = read_shape(run.model.hf_checkpoint)
    needs = machine_needs(run, shape, tmp_path / "run")
    assert needs.requests == 100 * run.cluster.num_engines
    assert [need.flag for need in needs.disks] == ["save", "run-dir"]
    save, model = needs.disks
    assert save.usual == 2 * save.least == 2 * checkpoint_bytes(run, shape)
    assert save.least == 7 * model.usual  # 14 bytes of a parameter, and 2
    without = load_run(["--config", QUICKSTART, *flags, "--no-save-optim"])
    assert checkpoint_bytes(without, shape) == model.usual


def test_this_machine_is_measured(tmp_path: Path) -> None:
    needs = replace(NEEDS, ports=2, disks=(replace(NEEDS.disks[0], folder=tmp_path / "not" / "there"),))
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        limits = machine_limits(needs, range(port, port + 1))
    assert limits.free_ports == 0
    assert limits.disks[tmp_path / "not" / "there"].free > 0
    assert limits.open_files >= 256


def test_the_soft_limit_of_open_files_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_run_that_needs_more_open_files_than_there_may_be_is_refused_before_it_starts(tmp_path: Path) -> None:
    flags = f"--config {QUICKSTART} --sglang-server-concurrency 4096 --run-dir {tmp_path / 'run'}"
    command = f"ulimit -n 1024 && exec {sys.executable} train_async.py {flags}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "error: at most 1,024 open files per process (ulimit -Hn), and " in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_limits_of_this_machine_and_refuses_nothing(tmp_path: Path) -> None:
    flags = f"--config {QUICKSTART} --sglang-server-concurrency 4096 --run-dir {tmp_path / 'run'} --dry-run"
    command = f"ulimit -n 1024 && exec {sys.executable} train_async.py {flags}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert ended.returncode == 0, ended.stderr
    assert "on this machine: at most 1,024 open files per process" in ended.stdout

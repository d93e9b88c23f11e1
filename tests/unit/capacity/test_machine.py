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
from asyncrl.models.sizes import model_size

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "configs" / "quickstart.toml")
SAVE, RUN = Path("/big/save"), Path("/big/run")
NEEDS = MachineNeeds(
    requests=4096,
    first_requests=2048,
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
            "at most 1,024 open files per process (ulimit -Hn), and the 2,048 requests of the first step are sent at "
            f"once{REMEDY}",
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
            replace(LIMITS, open_files=4000),
            f"at most 4,000 open files per process (ulimit -Hn), and up to 4,096 requests at a time need 4,352{REMEDY}",
        ),
        (
            replace(LIMITS, open_files=5000),
            "at most 5,000 open files per process (ulimit -Hn), and up to 4,096 requests at a time need up to 8,448 in "
            f"the router{REMEDY}",
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
    assert "4,096 requests at a time and 70,000 agents need 74,352" in found.warnings[0]


@pytest.mark.parametrize(
    ("flags", "requests"),
    [
        ("", 2 * 64),  # two steps of 64 samples
        ("--max-staleness 3", 4 * 64),
        ("--max-staleness 3 --num-rollout 2", 2 * 64),
        ("--eval-interval 1", 2 * 64 + 1024),  # half of the slots
        ("--over-sampling-batch-size 16 --dynamic-sampling-filter-path any.filter", 2 * 128),
        ("--dynamic-sampling-filter-path any.filter", 2048),  # as many as the acceptance rate asks for
        ("--stale-policy mask", 2048),
        ("--sglang-server-concurrency 10", 20),
    ],
)
def test_no_more_requests_count_than_admission_lets_in_flight(flags: str, requests: int, tmp_path: Path) -> None:
    words = (
        "--rollout-batch-size 8 --n-samples-per-prompt 8 --sglang-server-concurrency 1024 --rollout-num-gpus 2 "
        f"--max-staleness 1 {flags}"
    )
    run = load_run(["--config", QUICKSTART, *words.split()])
    if "eval" not in flags:
        run = replace(run, evaluation=replace(run.evaluation, eval_interval=None))
    needs = machine_needs(run, read_shape(run.model.hf_checkpoint), tmp_path)
    assert needs.requests == requests
    assert needs.first_requests == min(64, requests)


def test_a_critic_of_unknown_size_refuses_nothing(tmp_path: Path) -> None:
    run = load_run(["--config", QUICKSTART, "--save", str(tmp_path / "save"), "--advantage-estimator", "ppo"])
    shape = read_shape(run.model.hf_checkpoint)
    save, _ = machine_needs(run, shape, tmp_path / "run").disks
    assert save.usual == 2 * checkpoint_bytes(run, shape) == 4 * save.least


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


def test_float32_weights_are_in_a_checkpoint_twice_with_the_distributed_optimizer(tmp_path: Path) -> None:
    run = load_run(["--config", QUICKSTART, "--dtype", "float32"])
    shape = read_shape(run.model.hf_checkpoint)
    assert checkpoint_bytes(run, shape) == 16 * model_size(shape).total
    without = load_run(["--config", QUICKSTART, "--dtype", "float32", "--no-use-distributed-optimizer"])
    assert checkpoint_bytes(without, shape) == 12 * model_size(shape).total


def test_shared_memory_has_room_for_the_experts_and_the_likeliest_ids_of_each_token(tmp_path: Path) -> None:
    def shared(config: str, *flags: str) -> float:
        run = load_run(["--config", config, "--rollout-max-response-len", "32000", *flags])
        return machine_needs(run, read_shape(run.model.hf_checkpoint), tmp_path).shared_bytes

    mixture = str(ROOT / "configs" / "quickstart_moe.toml")
    run = load_run(["--config", mixture])
    shape = read_shape(run.model.hf_checkpoint)
    assert shape.experts is not None
    tokens = 2 * run.rollout.samples_per_step * (32_000 + (run.data.rollout_max_prompt_len or 0))
    routes = shape.num_layers * shape.experts.num_chosen
    assert shared(mixture) - shared(mixture, "--no-use-rollout-routing-replay") == tokens * routes
    known = shared(QUICKSTART, "--use-score-centering", "--score-centering-top-k", "8") - shared(QUICKSTART)
    assert known == tokens * 8 * 8


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
    more = "--sglang-server-concurrency 4096 --rollout-batch-size 512"
    flags = f"--config {QUICKSTART} {more} --run-dir {tmp_path / 'run'}"
    command = f"ulimit -n 1024 && exec {sys.executable} train_async.py {flags}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=150)
    assert ended.returncode == 1, "launchers try it again, perhaps on another machine"
    assert ended.stderr.count("\n") == 1
    assert "error: at most 1,024 open files per process (ulimit -Hn), and the 4,096 requests" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_limits_of_this_machine_and_refuses_nothing(tmp_path: Path) -> None:
    flags = f"--config {QUICKSTART} --sglang-server-concurrency 4096 --run-dir {tmp_path / 'run'} --dry-run"
    command = f"ulimit -n 1024 && exec {sys.executable} train_async.py {flags}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert "on this machine: at most 1,024 open files per process" in ended.stdout

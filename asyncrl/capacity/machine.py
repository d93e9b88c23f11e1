"""Limits of the machine that starts a run: open files, shared memory, disks and ports.

    flags, shape ──▶ MachineNeeds ──┐
                                    ├──▶ MachineFindings: errors and warnings, one line each
    this machine ──▶ MachineLimits ─┘

Other nodes of the run are not looked at.
"""

import os
import resource
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.capacity.routes import route_memory
from asyncrl.config.areas import RunConfig
from asyncrl.config.areas.ranges import must
from asyncrl.config.derived import (
    has_critic,
    longest_sample,
    num_known_ids,
    num_ranks,
    use_routing_replay,
    weight_bytes,
)
from asyncrl.models.shape import ModelShape
from asyncrl.models.sizes import model_size, sent_bytes

OTHER_FILES = 256
"""Open files of a process besides requests: libraries, logs, pipes and Ray's connections."""
MOST_OPEN_FILES = 2**20
EPISODES_PER_SLOT = 4
"""The default of ``--max-episodes``, per slot."""
SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_BYTES = 1e9
"""Shared memory without a batch: NCCL between GPUs of one machine, and Ray's own values."""
_TOKEN_BYTES = 32
"""Bytes of a token in Ray's object store: id, log-prob, version and mask."""
_KNOWN_ID_BYTES = 8
"""Bytes of one of a token's likeliest ids there: the id and its log-prob."""
_FLOAT32 = 4
_GB = 1e9
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """The bytes that a run writes to a folder."""

    flag: str
    """The flag that chooses the folder."""
    folder: Path
    least: float
    """Without these bytes the run must fail."""
    usual: float
    """Bytes that it usually takes."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineNeeds:
    """The resources that a run needs on the machine that starts it."""

    requests: int
    """Most requests in flight."""
    first_requests: int
    """Requests that are in flight at once as soon as the run begins, whatever happens later."""
    uses_router: bool
    episodes: int
    """Agents that may be connected to the gateway."""
    shared_bytes: float
    disks: tuple[DiskNeed, ...]
    ports: int
    """Ports that servers listen on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system: its number, and the free bytes on it."""

    number: int
    free: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """The limits of a machine; None where one cannot be found out."""

    open_files: int
    shared_bytes: float | None
    disks: dict[Path, Disk]
    """Disks by the folder of each ``DiskNeed``."""
    free_ports: int
    ports: range
    """The ports among which servers get theirs."""
    outgoing_ports: range | None
    """The ports that the kernel gives to outgoing connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFindings:
    """One line for each limit: ``errors`` make the run impossible, ``warnings`` may hurt it."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def raise_open_files() -> None:
    """Raise the soft limit of open files, which child processes inherit, to the hard one.

    The limit is at most MOST_OPEN_FILES, because some programs visit every number of a file that they may have open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def machine_needs(run: RunConfig, shape: ModelShape, run_dir: Path) -> MachineNeeds:
    """Return the needs of ``run``; ``run_dir`` need not exist."""
    slots = run.rollout.sglang_server_concurrency * run.cluster.num_engines
    requests = min(slots, _most_samples(run, slots))
    tokens = run.rollout.samples_per_step * longest_sample(run, run.rollout.rollout_max_response_len)
    return MachineNeeds(
        requests=requests,
        first_requests=0 if run.episodes.has_episodes else min(slots, run.rollout.samples_per_step),
        uses_router=run.cluster.use_router,
        episodes=0 if run.episodes.agent_command is None else run.episodes.max_episodes or EPISODES_PER_SLOT * requests,
        shared_bytes=_MIN_SHARED_BYTES + 2 * _batch_bytes(run, shape, tokens),
        disks=tuple(_disk_needs(run, shape, run_dir)),
        ports=2 * run.cluster.num_engines + 2 * run.cluster.use_router + num_ranks(run),
    )


def _batch_bytes(run: RunConfig, shape: ModelShape, num_tokens: int) -> float:
    """Return the bytes of a batch of ``num_tokens`` in Ray's object store, with its routes and likeliest ids."""
    each = _TOKEN_BYTES + _KNOWN_ID_BYTES * num_known_ids(run.train, shape.vocab_size)
    routes = None
    if use_routing_replay(run, is_mixture=shape.experts is not None):
        routes = route_memory(shape, kv_tokens=0, page_size=0, batch_tokens=num_tokens)
    return num_tokens * each + (0.0 if routes is None else routes.batch)


def _most_samples(run: RunConfig, slots: int) -> int:
    """Return an upper bound of the samples that admission lets in flight, with those of an evaluation.

    Without a bound by ``max_staleness``, they are as many as there are slots.  An evaluation takes half of these.
    """
    rollout = run.rollout
    evaluation = 0 if run.evaluation.eval_interval is None else max(1, slots // 2)
    has_filter, most = rollout.dynamic_sampling_filter_path is not None, rollout.over_sampling_batch_size
    if rollout.stale_policy != "wait" or (has_filter and most is None):
        return slots
    groups = max(rollout.rollout_batch_size, most or 0) * min(rollout.staleness + 1, rollout.num_rollout)
    return groups * rollout.n_samples_per_prompt + evaluation


def checkpoint_bytes(run: RunConfig, shape: ModelShape) -> float:
    """Return the bytes of one checkpoint: weights, Adam's two moments, and float32 copies of the weights.

    Only the distributed optimizer writes copies of float32 weights.  A critic counts as large as the policy.
    """
    each = _weight_bytes(run)
    if run.checkpoint.save_optim:
        has_copies = each < _FLOAT32 or run.parallel.use_distributed_optimizer
        each += 2 * _FLOAT32 + (_FLOAT32 if has_copies else 0)
    return (1 + has_critic(run.train)) * model_size(shape).total * each


def machine_limits(needs: MachineNeeds, ports: range) -> MachineLimits:
    """Measure this machine; ``ports`` are those among which servers get theirs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineLimits(
        open_files=MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES),
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None,
        disks={need.folder: disk for need in needs.disks if (disk := _disk(need.folder)) is not None},
        free_ports=_count_free(ports, needs.ports),
        ports=ports,
        outgoing_ports=_outgoing_ports(),
    )


def machine_findings(needs: MachineNeeds, limits: MachineLimits) -> MachineFindings:
    """Compare the needs with the limits."""
    errors, warnings = _open_files(needs, limits.open_files)
    for found in (_disks(needs.disks, limits.disks), _ports(needs.ports, limits)):
        errors, warnings = errors + found[0], warnings + found[1]
    return MachineFindings(errors=tuple(errors), warnings=(*warnings, *_shared(needs, limits.shared_bytes)))


type _Lines = tuple[list[str], list[str]]


def _open_files(needs: MachineNeeds, limit: int) -> _Lines:
    driver = needs.requests + needs.episodes + OTHER_FILES
    router = 2 * needs.requests + OTHER_FILES if needs.uses_router else 0  # a request's way in and its way out
    there = f"at most {limit:,} open files per process (ulimit -Hn), and "
    remedy = (
        "raise the limit (LimitNOFILE= of a systemd unit, --ulimit nofile= of docker run), or lower "
        "sglang-server-concurrency"
    )
    if limit < needs.first_requests:
        return [f"{there}the {needs.first_requests:,} requests of the first step are sent at once; {remedy}"], []
    episodes = f" and {needs.episodes:,} agents" if needs.episodes else ""
    most = f"{there}up to {needs.requests:,} requests at a time{episodes} need"
    if limit < driver:
        return [], [f"{most} {driver:,}; {remedy}"]
    return [], must(limit >= router, f"{most} up to {router:,} in the router; {remedy}")


def _disks(needs: Iterable[DiskNeed], disks: dict[Path, Disk]) -> _Lines:
    """Compare with the free space; folders on the same disk share it."""
    errors, warnings, taken = list[str](), list[str](), dict[int, float]()
    for need in needs:
        disk = disks.get(need.folder)
        if disk is None:
            continue
        before = taken.get(disk.number, 0.0)
        taken[disk.number] = before + need.usual
        others = f", and other folders of the run need {before / _GB:.1f} GB of them" if before else ""
        line = (
            f"{need.flag} {need.folder}: {disk.free / _GB:.1f} GB are free{others}; {need.what}; free some space, or "
            f"give another folder with {need.flag}"
        )
        if disk.free < need.least:
            errors.append(line)
        elif disk.free < before + need.usual:
            warnings.append(line)
    return errors, warnings


def _ports(wanted: int, limits: MachineLimits) -> _Lines:
    ports, outgoing = limits.ports, limits.outgoing_ports
    which = f"ports {ports.start} to {ports.stop - 1}"
    errors = must(
        limits.free_ports >= wanted,
        f"{which}: {limits.free_ports} are free, the servers of this run need {wanted}; end programs that listen there",
    )
    overlaps = outgoing is not None and outgoing.start < ports.stop and ports.start < outgoing.stop
    warnings = must(
        not overlaps,
        f"{which}: the kernel gives them to outgoing connections as well, which may take a server's port while it "
        f"loads; set sysctl net.ipv4.ip_local_port_range='32768 60999'",
    )
    return errors, warnings


def _shared(needs: MachineNeeds, free: float | None) -> list[str]:
    return must(
        free is None or free >= needs.shared_bytes,
        f"{SHARED_MEMORY}: {(free or 0) / _GB:.2f} GB are free, {needs.shared_bytes / _GB:.1f} GB are needed for "
        "batches in Ray's object store and for NCCL; with docker run, give --shm-size or --ipc=host, in Kubernetes a "
        "volume of medium Memory",
    )


def _disk_needs(run: RunConfig, shape: ModelShape, run_dir: Path) -> Iterable[DiskNeed]:
    model = model_size(shape).total * _weight_bytes(run)
    if run.checkpoint.save is not None:
        each = checkpoint_bytes(run, shape)
        yield DiskNeed(
            flag="save",
            folder=run.checkpoint.save,
            least=each / (1 + has_critic(run.train)),  # a critic may be far smaller than the policy
            usual=2 * each,
            what=f"two checkpoints take {2 * each / _GB:.1f} GB",
        )
    if run.train.update_weight_disk_dir is not None:
        sets = 2 * sent_bytes(shape, _weight_bytes(run))
        yield DiskNeed(
            flag="update-weight-disk-dir",
            folder=run.train.update_weight_disk_dir,
            least=sets,
            usual=sets,
            what=f"two sets of weights take {sets / _GB:.1f} GB",
        )
    if not num_ranks(run):
        return
    what = f"the final weights take {model / _GB:.1f} GB"
    yield DiskNeed(flag="run-dir", folder=run_dir, least=0.0, usual=model, what=what)


def _weight_bytes(run: RunConfig) -> int:
    return _FLOAT32 if run.cluster.device == "cpu" and run.model.dtype == "auto" else weight_bytes(run.model)


def _disk(folder: Path) -> Disk | None:
    """Return the disk of ``folder``, or of its nearest parent that exists; None if it cannot be found out."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        usage = shutil.disk_usage(there)
        # Some network file systems report no size at all.
        return Disk(number=os.stat(there).st_dev, free=usage.free) if usage.total else None
    except OSError:
        return None


def _count_free(ports: range, wanted: int) -> int:
    """Count free ports, up to ``wanted``."""
    count = 0
    for port in ports:
        if count >= wanted:
            break
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
        count += 1
    return count


def _outgoing_ports() -> range | None:
    try:
        first, last = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return None
    return range(first, last + 1)

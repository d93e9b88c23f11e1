"""Command lines and environments of SGLang servers and of the router, built from typed values.  Starts no process."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.engines.listening import LOOPBACK, NO_PROXIES, loopback_variables, without_proxy
from asyncrl.engines.sglang.keyed_launch import ROUTER, SERVER
from asyncrl.engines.sglang.labels import SAVES_GRAPHS

Flags = Mapping[str, str | bool | tuple[str, ...]]
"""Flags by name, without the leading dashes.

True is a flag without a value, a tuple is several words, and False removes our default.
"""

STREAM_INTERVAL = 512
"""Tokens per streamed chunk.  The first token and the end of an answer do not wait for a chunk to fill.

A chunk costs nearly the same whatever its length, so a 1,000-token answer comes in 3 pieces instead of 64.  The
driver needs 0.8 of the CPU time at 512 that it needs at 256, and no less at 1,000 than at 512.  Spans do not depend
on the interval, because tokens are stamped one by one (``plugin/token_versions``).

A longer interval loses more tokens with a server and shows progress in larger steps.  The silence between chunks also
grows: it is 102 s where a request gets only 5 tokens a second, and must stay below ``--request-timeout-s`` (300 s).
"""

CPU_FLAGS: dict[str, str | bool] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "cuda-graph-backend-decode": "disabled",
    "max-total-tokens": "65536",
    "sleep-on-idle": True,  # otherwise an idle scheduler spins on a core that the trainer needs
}
"""Flags of a server without a GPU; the platform plug-in (``plugin/cpu/cpu_platform``) does the rest."""

SERVER_ENVIRONMENT = {"SGLANG_TIMEOUT_KEEP_ALIVE": "600"}
"""Environment of every server: its HTTP keep-alive, in seconds.

The router keeps unused connections for 90 to 100 s.  With SGLang's default of 5 s the router may send a request on a
connection that the server is closing; that request is lost.
"""

CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of a server without a GPU: one thread.

With two spinning threads on two cores, 16 requests once took 22 s instead of 0.5 s.
"""


_KEYED_LAUNCH = (sys.executable, "-m", "asyncrl.engines.sglang.keyed_launch")

_EXPERT_PARALLEL = ("ep-size", "expert-parallel-size", "ep")
"""The names of SGLang's flag for expert parallelism."""

SHARED_FLAGS: dict[str, str | bool] = {"enable-memory-saver": True, "enable-draft-weights-cpu-backup": True}
"""Extra flags of a server that time-shares its GPUs with the trainer and releases their memory.

No weight update sends a draft model, so SGLang must keep a copy of it.  Without one the second flag does nothing.
"""

SHARED_ENVIRONMENT = {
    SAVES_GRAPHS: "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
}
"""Extra environment of a server that time-shares its GPUs with the trainer.

The memory of CUDA graphs is released, too.  A health check generates no token, because a server without weights cannot.
The idle check does not report released caches as a leak.  slime sets the same variables.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command line of a process; ``environment`` is added to the parent's, and ``key`` goes to standard input."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """The settings of one SGLang server.  Its GPUs are the ones visible to the caller's process, unless shared."""

    model_path: Path
    port: int
    key: str = field(repr=False)
    """The key of the run, without which the server answers nothing but health checks."""
    nccl_port: int
    """The port of the rendezvous of the server's ranks.

    SGLang's own choice lies in the kernel's range for outgoing connections, and is made seconds before SGLang listens
    on it.  On a busy machine another process once took that port in between.
    """
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    seed: int
    """The random seed of requests that bring none."""
    tensor_parallel: int = 1
    host: str = "127.0.0.1"
    returns_routes: bool = False
    """Whether requests may ask for routes of experts."""
    flags: Flags = field(default_factory=dict)
    """The user's flags; they override ours."""
    shared_gpus: tuple[str, ...] | None = None
    """GPUs that the server time-shares with a trainer, as in ``CUDA_VISIBLE_DEVICES``; empty on a CPU.

    None if the server has its GPUs to itself.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLaunch:
    """The settings of the router in front of the servers."""

    worker_urls: tuple[str, ...]
    port: int
    key: str = field(repr=False)
    """The key of the run: the router wants it from clients, and sends it to the servers."""
    prometheus_port: int
    """The port of the router's metrics.  The router always opens one, so two routers on a machine need two ports."""
    host: str = "127.0.0.1"
    flags: Flags = field(default_factory=dict)
    """The user's flags; they override ours."""


def expert_parallel_size(flags: Flags) -> int:
    """Return the expert-parallel size that the flags of a server ask for; 1 without a number.

    SGLang may choose another size.  Weight updates compare it with the engines' reports.
    """
    given = [flags[name] for name in _EXPERT_PARALLEL if name in flags]
    return int(given[-1]) if given and isinstance(given[-1], str) and given[-1].isdecimal() else 1


def server_command(launch: ServerLaunch) -> Command:
    """Build the command that starts this server."""
    defaults: dict[str, str | bool] = {
        "model-path": str(launch.model_path),
        "host": launch.host,
        "port": str(launch.port),
        "nccl-port": str(launch.nccl_port),
        "device": launch.device,
        "dtype": launch.dtype,
        "tp-size": str(launch.tensor_parallel),
        "random-seed": str(launch.seed),
        "weight-version": "0",
        "incremental-streaming-output": True,
        "stream-interval": str(STREAM_INTERVAL),
        "log-level": "warning",
        **({"enable-return-routed-experts": True} if launch.returns_routes else {}),
        **(CPU_FLAGS if launch.device == "cpu" else {}),
        **(SHARED_FLAGS if launch.device == "cuda" and launch.shared_gpus is not None else {}),
    }
    return Command(
        arguments=(*_KEYED_LAUNCH, SERVER, *_arguments({**defaults, **launch.flags})),
        environment=_environment(launch),
        key=launch.key,
    )


def router_command(launch: RouterLaunch) -> Command:
    """Build the command that starts this router."""
    defaults: dict[str, str | bool] = {
        "host": launch.host,
        "port": str(launch.port),
        "prometheus-port": str(launch.prometheus_port),
        "prometheus-host": launch.host,  # the router's default is every interface
        "policy": "cache_aware",
        "disable-retries": True,  # the client retries, and keeps the tokens
        "disable-circuit-breaker": True,  # the run's own failure budget decides
        "health-success-threshold": "1",  # one is enough: we route to a restarted engine only after it has generated
        "request-timeout-secs": "86400",  # the client sets deadlines
        "max-concurrent-requests": "-1",  # the scheduler controls admission
        "log-level": "warn",
    }
    workers = ("--worker-urls", *launch.worker_urls)
    return Command(
        arguments=(*_KEYED_LAUNCH, ROUTER, *workers, *_arguments({**defaults, **launch.flags})),
        environment=NO_PROXIES,
        key=launch.key,
    )


def _environment(launch: ServerLaunch) -> dict[str, str]:
    found = (
        SERVER_ENVIRONMENT
        | loopback_variables(launch.host)
        | without_proxy(*sorted({launch.host, LOOPBACK}), "localhost")
        | ({} if launch.shared_gpus is None else SHARED_ENVIRONMENT)
    )
    if launch.device == "cpu":
        return found | CPU_ENVIRONMENT
    if launch.shared_gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(launch.shared_gpus)
    return found


def _arguments(flags: Flags) -> tuple[str, ...]:
    arguments: list[str] = []
    for name, value in flags.items():
        if value is not False:
            words = () if value is True else (value,) if isinstance(value, str) else value
            arguments += [f"--{name}", *words]
    return tuple(arguments)

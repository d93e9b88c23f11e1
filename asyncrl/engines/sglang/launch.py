"""Command lines and environments of SGLang servers and of the router, from typed values.  Starts nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from asyncrl.engines.sglang.labels import SAVES_GRAPHS

Flags = Mapping[str, str | bool]
"""Flags by name without the leading dashes; True is a bare flag, False leaves our default out."""

STREAM_INTERVAL = 512
"""Tokens per streamed chunk; the first token and the end of an answer do not wait for a chunk to fill.

A chunk costs nearly the same whatever it holds, so a 1,000-token answer comes in 3 pieces instead of 64: with 512 it
takes the controller 0.8 of the CPU time that it takes with 256, and with 1,000 no less than with 512.  Spans do not
depend on it, they are stamped per token (``stamps``).  What grows with it: the tokens lost with a server, the steps in
which progress is seen, and the silence between chunks, 102 s where a request gets only 5 tokens a second, which must
stay below ``--request-timeout-s`` (300 s).
"""

_ROUTER_PROGRAM = """
import sys
sys.modules["sglang"] = None
from sglang_router.launch_router import main
sys.exit(main())
"""
"""The router is a Rust program, but its launcher imports all of sglang for tracing, if it can: 2 s against 20 s."""

CPU_FLAGS: dict[str, str | bool] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "cuda-graph-backend-decode": "disabled",
    "max-total-tokens": "65536",
    "sleep-on-idle": True,  # an idle scheduler spins otherwise, on a core that the trainer needs
}
"""What a server needs where there is no GPU; the platform plug-in does the rest."""

SERVER_ENVIRONMENT = {"SGLANG_TIMEOUT_KEEP_ALIVE": "600"}
"""Seconds.  With SGLang's 5 a request of the router's may meet a connection that is just being closed, and is lost: the
router keeps unused ones for 90 to 100 s."""

CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""One thread: with two spinning on two cores, 16 requests once took 22 s instead of 0.5 s."""


SHARED_FLAGS: dict[str, str | bool] = {"enable-memory-saver": True}
"""What a server needs that gives its GPUs' memory back in turns."""

SHARED_ENVIRONMENT = {
    SAVES_GRAPHS: "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
}
"""Graphs are given back, too; a look at the health generates no token, which a server without weights cannot; and
caches that are gone are no leak.  slime sets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start; ``environment`` is added to the parent's."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaunch:
    """One SGLang server.  Unless it shares them, its GPUs are those that the caller's process sees."""

    model_path: Path
    port: int
    nccl_port: int
    """Where its ranks meet.  SGLang would choose one in the kernel's range for outgoing connections, seconds before it
    listens there: once, on a busy machine, something else had it by then."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    seed: int
    """Of draws whose request names no seed."""
    tensor_parallel: int = 1
    host: str = "127.0.0.1"
    flags: Flags = field(default_factory=dict)
    """The user's; they win over ours."""
    shared_gpus: tuple[str, ...] | None = None
    """Those that it has in turns with a trainer, as ``CUDA_VISIBLE_DEVICES`` calls them; on a CPU empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLaunch:
    """The router in front of the servers."""

    worker_urls: tuple[str, ...]
    port: int
    prometheus_port: int
    """The router always opens one; two routers on a machine need two."""
    host: str = "127.0.0.1"
    flags: Flags = field(default_factory=dict)
    """The user's; they win over ours."""


def server_command(launch: ServerLaunch) -> Command:
    """How to start this server."""
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
        **(CPU_FLAGS if launch.device == "cpu" else {}),
        **(SHARED_FLAGS if launch.device == "cuda" and launch.shared_gpus is not None else {}),
    }
    return Command(
        arguments=(sys.executable, "-m", "sglang.launch_server", *_arguments({**defaults, **launch.flags})),
        environment=_environment(launch),
    )


def router_command(launch: RouterLaunch) -> Command:
    """How to start this router."""
    defaults: dict[str, str | bool] = {
        "host": launch.host,
        "port": str(launch.port),
        "prometheus-port": str(launch.prometheus_port),
        "policy": "cache_aware",
        "disable-retries": True,  # we retry, with the tokens kept
        "disable-circuit-breaker": True,  # our own failure budget decides
        "health-success-threshold": "1",  # an engine that is back has generated: we wait for that
        "request-timeout-secs": "86400",  # deadlines are the client's
        "max-concurrent-requests": "-1",  # admission is the scheduler's
        "log-level": "warn",
    }
    workers = ("--worker-urls", *launch.worker_urls)
    return Command(
        arguments=(
            *(sys.executable, "-c", _ROUTER_PROGRAM),
            *workers,
            *_arguments({**defaults, **launch.flags}),
        ),
        environment={},
    )


def _environment(launch: ServerLaunch) -> dict[str, str]:
    found = SERVER_ENVIRONMENT | ({} if launch.shared_gpus is None else SHARED_ENVIRONMENT)
    if launch.device == "cpu":
        return found | CPU_ENVIRONMENT
    if launch.shared_gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(launch.shared_gpus)
    return found


def _arguments(flags: Flags) -> tuple[str, ...]:
    arguments: list[str] = []
    for name, value in flags.items():
        if value is not False:
            arguments += [f"--{name}"] if value is True else [f"--{name}", value]
    return tuple(arguments)

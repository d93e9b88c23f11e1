"""The cost of routing replay to an engine: time with routes recorded and sent, and without.

    uv run python -m benchmarks.engine_routes --model moe-6b                               one GPU
    uv run python -m benchmarks.engine_routes --model tiny-moe --device cpu --loads 4 --longest 128 --repeats 2

    without     a server that was started without --enable-return-routed-experts
    recorded    a server that records routes, which no request asks for
    sent        the same server, which sends the routes of every token

Both servers share one GPU, and one of them always sleeps, so that the state of the machine affects all three alike.
Each window measures one of the three at one load: that many answers are in flight, the next one starts when one ends,
and lengths are the log-normal ones of ``benchmarks.sync_vs_async``.  A window ends when ``--rounds`` times the load
have started.  The windows of one repeat have the same prompts and lengths, so the servers make the same passes in each.
Their order changes from repeat to repeat.  A cost is the longer time of a window against ``without``, with the standard
error of its mean over the repeats.  Weights are random numbers of SGLang.
"""

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from asyncrl.engines.cluster.actors import NetworkPlace
from asyncrl.engines.cluster.settings import routes_shape
from asyncrl.engines.server_process import ServerProcess
from asyncrl.engines.sglang.client.control import EngineControl, wait_for_server
from asyncrl.engines.sglang.client.engine import SGLangEngine
from asyncrl.engines.sglang.client.http import HttpClient
from asyncrl.engines.sglang.client.routes import RoutesShape
from asyncrl.engines.sglang.launch import ServerLaunch, server_command
from asyncrl.models.shape import shape_of
from asyncrl.protocols import RolloutEngine
from asyncrl.types import Chunk, FinishReason, Request, Weights
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.common.devices import need
from benchmarks.common.shapes import SHAPES
from benchmarks.sync_vs_async.full import Task, fresh, request_of
from benchmarks.sync_vs_async.options import ON_GPUS
from benchmarks.sync_vs_async.workload import CUT_RATIO, ForcedWorkload, write_weightless

ARMS = ("without", "recorded", "sent")
"""The three that are compared."""
START_S = 600.0
"""Seconds until both servers are ready."""
SILENCE_S = 300.0
"""Longest silence of a request."""
FLAGS: Mapping[str, str | bool] = {"load-format": "dummy", "sleep-on-idle": True, "mem-fraction-static": "0.4"}
"""Server flags: random weights, no spinning thread in the server that waits, and memory for both."""
KEY = "key-of-a-benchmark"
"""The key of the servers, which listen on loopback only."""


class AsksForRoutes:
    """A ``RolloutEngine`` over another, that asks for the routes of every token."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> FinishReason:
        """See ``RolloutEngine.generate``.  Raises RuntimeError if a chunk has no routes."""

        def arrived(chunk: Chunk) -> None:
            if chunk.routes is None:
                raise RuntimeError("the server sent no routes")
            on_chunk(chunk)

        return await self._engine.generate(replace(request, routes_from=0), arrived)

    async def interrupt(self) -> None:
        """See ``RolloutEngine.interrupt``."""
        await self._engine.interrupt()

    async def score(self, token_ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        """See ``RolloutEngine.score``."""
        return await self._engine.score(token_ids, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One measurement."""

    arm: str
    load: int
    repeat: int
    took_s: float
    """Seconds until the last of its answers started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One server, and a client of it."""

    engine: RolloutEngine
    control: EngineControl


def main(argv: Sequence[str]) -> int:
    """Measure and show what ``argv`` asks for; returns the exit code."""
    asked = _parser().parse_args(argv)
    need(asked.device)
    console = Console(width=120)
    shape = routes_shape(shape_of(SHAPES[asked.model]))
    if shape is None:
        raise SystemExit(f"error: --model {asked.model} has no experts; take a mixture, such as moe-2b")
    for name, value in circumstances("engine_routes", argv, asked.commit).items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        write_weightless(Path(folder), asked.model)
        urls = [_start(asked, Path(folder), servers, returns_routes=each) for each in (False, True)]
        windows = asyncio.run(_measured(asked, shape, urls, console))
    _show(asked, windows, console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("engine_routes", __doc__)
    mixtures = [name for name, shape in SHAPES.items() if "num_experts" in shape]
    add_option(parser, "--model", str, "shape of the model, which gets random weights", "moe-6b", choices=mixtures)
    add_option(parser, "--device", str, "device of the servers", "cuda", choices=["cuda", "cpu"])
    add_option(parser, "--loads", int, "requests in flight", [64, 144], nargs="+")
    add_option(parser, "--longest", int, "longest answer in tokens; the median is a sixteenth", 2048)
    add_option(parser, "--prompt-tokens", int, "tokens of a prompt", 256)
    add_option(parser, "--group-size", int, "answers to each prompt", 8)
    add_option(parser, "--rounds", int, "answers that a window starts, divided by its load", 4)
    add_option(parser, "--repeats", int, "windows of each kind", 8)
    add_option(parser, "--deadline-s", float, "seconds after the start of the first window, for all of them", 900.0)
    add_option(parser, "--logs", Path, "folder for the logs of the servers", Path("runs/engine_routes"))
    add_option(parser, "--commit", str, "the commit that is measured, where there is no git")
    return parser


def _start(asked: argparse.Namespace, checkpoint: Path, servers: ExitStack, *, returns_routes: bool) -> str:
    """Start a server, which ends with ``servers``, and return its address."""
    port, nccl_port = NetworkPlace().free_ports(2)
    on_gpu = asked.device == "cuda"
    command = server_command(
        ServerLaunch(
            model_path=checkpoint,
            port=port,
            key=KEY,
            nccl_port=nccl_port,
            device=asked.device,
            dtype="bfloat16" if on_gpu else "float32",
            seed=1,
            returns_routes=returns_routes,
            flags={**(ON_GPUS if on_gpu else {}), **FLAGS},
        )
    )
    name = "routes" if returns_routes else "plain"
    process = ServerProcess(name, command.arguments, command.environment, asked.logs / f"{name}.log", command.key)
    servers.callback(process.stop)
    url = f"http://127.0.0.1:{port}"
    asyncio.run(_ready(url))  # one after the other: a server takes a share of the memory that is free
    return url


async def _ready(url: str) -> None:
    async with HttpClient(KEY) as http:
        await wait_for_server(http, url, START_S)


async def _measured(
    asked: argparse.Namespace, shape: RoutesShape, urls: Sequence[str], console: Console
) -> list[Window]:
    """Measure all windows that start before the deadline."""
    windows, began = list[Window](), time.monotonic()
    async with HttpClient(KEY) as http:
        plain, recording = (
            Side(
                engine=SGLangEngine(http, (url,), router_url=None, request_timeout_s=SILENCE_S, routes=routes),
                control=EngineControl(http, url, timeout_s=SILENCE_S),
            )
            for url, routes in zip(urls, (None, shape), strict=True)
        )
        sending = replace(recording, engine=AsksForRoutes(recording.engine))
        sides = dict(zip(ARMS, (plain, recording, sending), strict=True))
        for load in asked.loads:  # kernels are compiled, and caches of allocators filled
            for arm in ARMS:
                await _window_s(asked, sides[arm], load, -1)
        for repeat in range(asked.repeats):
            for load in asked.loads:
                for place in range(len(ARMS)):
                    if time.monotonic() - began > asked.deadline_s:
                        return windows
                    arm = ARMS[(place + repeat) % len(ARMS)]
                    took_s = await _window_s(asked, sides[arm], load, repeat)
                    windows.append(Window(arm=arm, load=load, repeat=repeat, took_s=took_s))
                    console.print(f"{repeat + 1}: {load} requests, {arm}: {took_s:.3f} s", highlight=False)
    return windows


async def _window_s(asked: argparse.Namespace, side: Side, load: int, repeat: int) -> float:
    """Return the seconds until ``asked.rounds`` times ``load`` answers have started."""
    tasks = fresh(_workload(asked, repeat), asked.group_size)
    has_free, names = asyncio.Semaphore(load), count()

    async def write(task: Task) -> None:
        await side.engine.generate(request_of(task, next(names), Weights(version=0, step=0)), lambda chunk: None)
        has_free.release()

    async with asyncio.TaskGroup() as writers:
        began, running = time.monotonic(), list[asyncio.Task[None]]()
        for _ in range(asked.rounds * load):
            await has_free.acquire()
            running.append(writers.create_task(write(next(tasks))))
        took_s = time.monotonic() - began
        for each in running:
            each.cancel()
    await side.control.empty()
    return took_s


def _workload(asked: argparse.Namespace, repeat: int) -> ForcedWorkload:
    return ForcedWorkload(
        vocabulary=SHAPES[asked.model]["vocab_size"],
        prompt_tokens=asked.prompt_tokens,
        median=max(1, asked.longest // CUT_RATIO),
        longest=asked.longest,
        seed=repeat + 1,
    )


def costs(windows: Sequence[Window], load: int, arm: str) -> list[float]:
    """Return, for each repeat that has both, how many per cent longer ``arm`` takes than ``without``."""
    took_s = {(each.arm, each.repeat): each.took_s for each in windows if each.load == load}
    return [
        100 * (seconds / took_s["without", repeat] - 1)
        for (name, repeat), seconds in took_s.items()
        if name == arm and ("without", repeat) in took_s
    ]


def _show(asked: argparse.Namespace, windows: Sequence[Window], console: Console) -> None:
    table = Table("requests", *(f"s {arm}" for arm in ARMS), *(f"cost of {arm}" for arm in ARMS[1:]))
    for load in asked.loads:
        found = [[each.took_s for each in windows if each.load == load and each.arm == arm] for arm in ARMS]
        cells = [f"{mean(each):.3f}" if each else "" for each in found]
        table.add_row(str(load), *cells, *(_mean_and_error(costs(windows, load, arm)) for arm in ARMS[1:]))
    console.print(table)


def _mean_and_error(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.1f} %" if values else ""
    return f"{mean(values):+.1f} % ({stdev(values) / math.sqrt(len(values)):.1f}, {len(values)} pairs)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The lag of the controller's event loop while user code blocks, leaks, exits or imports half the world.

    uv run python -m benchmarks.user_code              every kind of misbehaviour, and the cost of calls
    uv run python -m benchmarks.user_code --check      exit code 1 if the lag exceeds 20 ms at the 99th percentile

Episodes run in the real process of user code, against engines that answer in 50 ms.  Some episodes behave all the time.
On a busy machine other programs cause most of the lag, as the column ``starved`` shows: it is the share of time in
which the controller was ready to run and had no CPU.
"""

import asyncio
import itertools
import pickle
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import uvloop
from rich.console import Console
from rich.table import Table

from asyncrl.episodes import EpisodeStart, GeneratedTurn
from asyncrl.errors import EpisodeFailed
from asyncrl.metrics.loop_lag import watch_loop
from asyncrl.rollouts.interfaces import EpisodeAddress, SlimeResult
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.rollouts.user_process.episodes import UserEpisodes
from asyncrl.rollouts.user_process.host import UserProcesses, user_processes
from asyncrl.types import Chunk, FinishReason, GroupId, Prompt, Sample, SamplingParams, Span, Weights
from benchmarks.common.circumstances import circumstances
from benchmarks.common.command_line import add_option, parser_of
from benchmarks.controller.meters import LAG_PERIOD_S, AllLags, percentiles_ms, starved_s
from benchmarks.user_code import functions

MAX_LAG_P99_MS = 20.0
WEIGHTS = Weights(version=0, step=0)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1024)
TURN_TOKENS = 200
TURN_S = 0.05
"""Seconds of one turn: the loop is idle in between, as with real engines."""
SAMPLE_TOKENS = 1000


class Engines:
    """Turns of TURN_TOKENS tokens after TURN_S seconds."""

    weights = WEIGHTS

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: SamplingParams,
        on_chunk: Callable[[Chunk], None] | None = None,
        routes_from: int = 0,
    ) -> GeneratedTurn:
        """See ``EpisodeTurns``."""
        await asyncio.sleep(TURN_S)
        return GeneratedTurn(
            call=0,
            token_ids=(97,) * TURN_TOKENS,
            logprobs=array("f", [-1.0] * TURN_TOKENS),
            spans=(Span(weights=WEIGHTS, start=0, stop=TURN_TOKENS),),
            text="a" * TURN_TOKENS,
            finish=FinishReason.STOP,
            seconds=TURN_S,
        )


class NoGateway:
    """A gateway without clients."""

    def open(self, session: EpisodeSession) -> EpisodeAddress:
        """See ``Gateway``."""
        return EpisodeAddress(host="127.0.0.1", port=9, key="none", secret="")

    def close(self, address: EpisodeAddress) -> None:
        """See ``Gateway``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The loop's lag during one kind of misbehaviour."""

    name: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    starved: float
    """Share of the time in which the controller had no CPU although it was ready."""
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Measure, show and check; returns the exit code."""
    parser = parser_of("user_code", __doc__)
    add_option(parser, "--episodes", int, "episodes that behave, all the time", 32)
    add_option(parser, "--only", str, "kinds of misbehaviour", nargs="+", choices=list(functions.FUNCTIONS))
    parser.add_argument("--check", action="store_true", help="fail if a limit is exceeded")
    asked = parser.parse_args(argv)
    rows, calls = uvloop.run(_measured(asked.only or list(functions.FUNCTIONS), asked.episodes))
    console = Console()
    console.print_json(data=circumstances("user_code", argv))
    console.print(_table(rows))
    console.print(f"{calls:,.0f} async rewards per second, of answers of {SAMPLE_TOKENS:,} tokens")
    late = [row.name for row in rows if row.p99_ms > MAX_LAG_P99_MS]
    if asked.check and late:
        console.print(f"the lag exceeds {MAX_LAG_P99_MS:g} ms at the 99th percentile: {', '.join(late)}")
    return 1 if asked.check and late else 0


async def _measured(names: Sequence[str], num_episodes: int) -> tuple[list[Measured], float]:
    programs = {"episodes": pickle.dumps(functions.episodes), "rewards": pickle.dumps(functions.rewards)}
    with tempfile.TemporaryDirectory() as folder:
        async with user_processes(programs, number=1, log_folder=Path(folder), start_timeout_s=60.0) as processes:
            await processes.ready()
            calls = await _rewards_per_s(processes)
            rows = []
            async with asyncio.TaskGroup() as group:
                run = _episodes(processes)
                tasks = [group.create_task(_behaving(run, index)) for index in range(num_episodes)]
                for name in names:
                    rows.append(await _during(name, run))
                for task in tasks:
                    task.cancel()
    return rows, calls


async def _during(name: str, run: UserEpisodes) -> Measured:
    """Measure while two episodes of ``name`` run, and a second after."""
    lags, began, starved = AllLags(), time.monotonic(), starved_s()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch_loop(lags, LAG_PERIOD_S))
        for index in range(2):
            with suppress(EpisodeFailed):
                await run(_start(name, 1000 + index), Engines())
        await asyncio.sleep(1.0)
        watching.cancel()
    seconds = time.monotonic() - began
    p50, p99, longest = percentiles_ms(lags.late_s)
    share = (starved_s() - starved) / seconds
    return Measured(name=name, p50_ms=p50, p99_ms=p99, max_ms=longest, starved=share, seconds=seconds)


async def _behaving(run: UserEpisodes, index: int) -> None:
    for number in itertools.count():
        with suppress(EpisodeFailed):  # its process ended
            await run(_start("behaves", index, number), Engines())


async def _rewards_per_s(processes: UserProcesses, at_once: int = 64, seconds: float = 3.0) -> float:
    prompt = _start("behaves", 0).prompt
    sample = Sample(
        index=0,
        token_ids=tuple(range(SAMPLE_TOKENS)),
        logprobs=array("f", [-1.0] * SAMPLE_TOKENS),
        spans=(Span(weights=WEIGHTS, start=0, stop=SAMPLE_TOKENS),),
        text="word " * SAMPLE_TOKENS,
        finish=FinishReason.STOP,
        seconds=1.0,
    )
    count, end = 0, time.monotonic() + seconds

    async def ask() -> None:
        nonlocal count
        while time.monotonic() < end:
            await processes.score("rewards", prompt, (sample,))
            count += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(ask())
    return count / seconds


def _episodes(processes: UserProcesses) -> UserEpisodes:
    limits = EpisodeLimits(vocabulary_size=0x110000, max_context_len=100_000)
    return UserEpisodes(
        processes,
        "episodes",
        gateway=NoGateway(),
        limits=limits,
        decode=CharacterTokenizer().decode,
        slime_outcome=_no_samples,
    )


def _no_samples(session: EpisodeSession, result: SlimeResult) -> NoReturn:
    raise NotImplementedError


def _start(function: str, index: int, number: int = 0) -> EpisodeStart:
    ids = tuple(map(ord, function))
    return EpisodeStart(
        name=f"{function}.{index}.{number}",
        prompt=Prompt(row=index, epoch=0, text=function, token_ids=ids, label="a"),
        sampling=SAMPLING,
        index=index,
        group_size=1,
        seed=0,
        group_id=GroupId(index),
    )


def _table(rows: Sequence[Measured]) -> Table:
    table = Table("user code", "lag p50 ms", "p99", "max", "starved", "seconds")
    for row in rows:
        lags = (f"{each:.1f}" for each in (row.p50_ms, row.p99_ms, row.max_ms))
        table.add_row(row.name, *lags, f"{row.starved:.1%}", f"{row.seconds:.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

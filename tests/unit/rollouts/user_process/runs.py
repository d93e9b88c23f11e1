"""Runs of the real processes with scripted engines."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.episodes import EpisodeOutcome, EpisodeStart
from asyncrl.rollouts.interfaces import EpisodeAddress, SlimeResult
from asyncrl.rollouts.session import EpisodeLimits, EpisodeSession
from asyncrl.rollouts.testing import CharacterTokenizer
from asyncrl.rollouts.user_process.episodes import UserEpisodes
from asyncrl.rollouts.user_process.host import UserProcesses, user_processes
from asyncrl.types import GroupId, Prompt, SamplingParams
from tests.unit.rollouts.user_process import programs

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=64, stop=("\n",))
LIMITS = EpisodeLimits(vocabulary_size=0x110000, max_context_len=4096, max_turns=3)
PROGRAMS = {name: pickle.dumps(getattr(programs, name)) for name in ("native", "slimes", "rewards")}


class FakeGateway:
    """Counts the episodes that are open."""

    def __init__(self) -> None:
        self.open_keys: set[str] = set()

    def open(self, session: EpisodeSession) -> EpisodeAddress:
        """See ``Gateway``."""
        self.open_keys.add(session.start.name)
        return EpisodeAddress(host="127.0.0.1", port=1, key=session.start.name, secret="s")

    def close(self, address: EpisodeAddress) -> None:
        """See ``Gateway``."""
        self.open_keys.discard(address.key)


def start(function: str, index: int = 0, *, group: int | None = 0, label: Any = None) -> EpisodeStart:
    ids = tuple(CharacterTokenizer().encode(function))
    prompt = Prompt(row=group or 0, epoch=0, text=function, token_ids=ids, label=label)
    return EpisodeStart(
        name=f"g{group}.{index}",
        prompt=prompt,
        sampling=SAMPLING,
        index=index,
        group_size=2,
        seed=1,
        group_id=None if group is None else GroupId(group),
        data_set="held-out" if group is None else None,
    )


def samples_of(session: EpisodeSession, result: SlimeResult) -> EpisodeOutcome:
    """Take the trajectories of the record and show the samples in the metadata's place."""
    session.counts["samples"] = len(result.samples)
    session.start.prompt.metadata["samples"] = result.samples  # type: ignore[index]
    return session.outcome()


@asynccontextmanager
async def opened(folder: Path, *, number: int = 1, **changes: Any) -> AsyncIterator[tuple[UserProcesses, UserEpisodes]]:
    settings: dict[str, Any] = {"start_timeout_s": 60.0} | changes
    async with user_processes(PROGRAMS, number=number, log_folder=folder / "logs", **settings) as processes:
        yield processes, episodes(processes)


def episodes(processes: UserProcesses, program: str = "native", **changes: Any) -> UserEpisodes:
    settings: dict[str, Any] = {
        "gateway": FakeGateway(),
        "limits": LIMITS,
        "decode": CharacterTokenizer().decode,
        "slime_outcome": samples_of,
        "label": "--flag 'mine.py'",
    }
    return UserEpisodes(processes, program, **settings | changes)


def run_processes[T](folder: Path, call: Callable[[UserProcesses, UserEpisodes], Awaitable[T]], **changes: Any) -> T:
    """Run ``call`` with processes of user code."""

    async def main() -> T:
        async with asyncio.timeout(90.0), opened(folder, **changes) as (processes, run):
            return await call(processes, run)

    return asyncio.run(main())


async def seen(path: Path, timeout_s: float = 20.0) -> None:
    """Wait for a file that another process leaves."""
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(path.exists):  # noqa: ASYNC110 (another process makes it)
            await asyncio.sleep(0.01)

"""The processes of user code of a run, in the controller.

    EpisodeFn ──▶ UserEpisodes ─┐
                                ├─▶ UserProcesses ──▶ one process per group of siblings
    rewards ────▶ score ────────┘

The samples of a group, and their rewards, go to the same process, so that its functions see the same objects.
"""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from asyncrl.errors import RewardFailed, RewardKeyMissing, RewardUnavailable, place_in, plainly
from asyncrl.rollouts.user_process.messages import Raised, Returned, Score
from asyncrl.rollouts.user_process.process import UserCodeProcess
from asyncrl.rollouts.user_process.results import reward_value_of
from asyncrl.rollouts.user_process.supervised import Died, SupervisedProcess
from asyncrl.task_groups import TaskGroup
from asyncrl.types import GroupId, Prompt, Reward, Sample

logger = logging.getLogger(__name__)


class UserProcesses:
    """The processes.  Made by ``user_processes``."""

    def __init__(self, processes: Sequence[SupervisedProcess]) -> None:
        self._processes = processes
        self._told: set[tuple[str, str]] = set()

    @property
    def num_restarts(self) -> int:
        """Starts of a process after the death of another."""
        return sum(each.num_restarts for each in self._processes)

    @property
    def num_abandoned(self) -> int:
        """Cancelled functions that did not end within their limit, in the processes that run now."""
        return sum(each.num_abandoned for each in self._processes)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of all processes, as they last reported it."""
        return sum(each.rss_bytes for each in self._processes)

    def of(self, group_id: GroupId | None, prompt: Prompt) -> SupervisedProcess:
        """Return the process of a group; in an evaluation, of a prompt."""
        return self._processes[(prompt.row if group_id is None else group_id) % len(self._processes)]

    async def ready(self) -> None:
        """Wait until all processes have loaded their programs."""
        for each in self._processes:
            await each.ready()

    async def score(self, program: str, prompt: Prompt, samples: tuple[Sample, ...]) -> list[Reward]:
        """Return the rewards of a function in the process.  Raises RewardFailed.

        Cancelling the call cancels the function.
        """
        process, plain = self.of(samples[0].group_id, prompt), tuple(each.without_columns() for each in samples)
        async with process.call(partial(Score, program=program, prompt=prompt, samples=plain)) as call:
            message = await call.receive()
        if isinstance(message, Returned):
            return _rewards(message)
        if isinstance(message, Died):
            raise RewardFailed(f"its process ended: {message.how}")
        assert isinstance(message, Raised)
        if message.type == RewardKeyMissing.__name__:
            raise RewardKeyMissing(message.message)
        is_named = message.type == RewardFailed.__name__
        place = place_in(message.traceback) if message.reached is None else ""
        text = message.message if is_named else f"{message.type}: {message.message}{place}"
        failed = RewardFailed(text) if message.reached is None else RewardUnavailable(text, message.reached)
        raise failed from RemoteTraceback(message.traceback)

    def tell(self, name: str, raised: Raised) -> None:
        """Log an exception of a user function: as a warning the first time that one of its type is at its place."""
        lines = raised.traceback.rstrip().splitlines()
        place = next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File ")), "")
        is_first = (raised.type, place) not in self._told
        self._told.add((raised.type, place))
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "%s: %s: %s\n%s",
            name,
            raised.type,
            raised.message,
            raised.traceback.rstrip(),
        )

    def tell_left_out(self, names: Sequence[str]) -> None:
        """Log the parts of results that cannot leave their process, each once."""
        new = [name for name in names if ("left out", name) not in self._told]
        self._told.update(("left out", name) for name in new)
        if new:
            logger.warning("values that only their process can hold are left out of results: %s", ", ".join(new))


class RemoteTraceback(Exception):
    """The traceback of an exception in a process of user code, as the cause of the error in the controller."""


@asynccontextmanager
async def user_processes(
    programs: Mapping[str, bytes],
    *,
    number: int,
    log_folder: Path,
    start_timeout_s: float,
    started: UserCodeProcess | None = None,
) -> AsyncIterator[UserProcesses]:
    """Keep ``number`` processes alive while the block runs; they end with it.

    ``programs`` are pickled factories by name.  ``started`` is a process that has loaded them.  Raises PluginError if
    another process cannot load them, and UserProcessFailed if one dies again and again.
    """
    processes = [
        SupervisedProcess(
            place,
            programs,
            log_path=log_folder / f"user-code-{place}.log",
            start_timeout_s=start_timeout_s,
            started=started if place == 0 else None,
        )
        for place in range(number)
    ]
    try:
        with plainly():
            async with TaskGroup() as group:
                running = [group.create_task(each.run(), name=each.name) for each in processes]
                try:
                    yield UserProcesses(processes)
                finally:
                    for task in running:
                        task.cancel()
    finally:
        for each in processes:
            await each.close()


def _rewards(message: Returned) -> list[Reward]:
    try:
        return reward_value_of(message.value)
    except (ValueError, TypeError, KeyError) as error:
        raise RewardFailed(str(error)) from error

"""A trainer whose ranks die and start again, around the simulated one."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from asyncrl.engines.cluster.ray_trainer import RayCheckpointer
from asyncrl.errors import TrainerFailed, TrainerOutOfMemory, plainly
from asyncrl.protocols import WeightUpdater
from asyncrl.sim.faults.world.plan import SHORTAGE, Weather
from asyncrl.sim.faults.world.trainer import SimTrainer
from asyncrl.task_groups import TaskGroup

START_S = 3.0
"""Seconds until new ranks have loaded a checkpoint."""
WHY = "trainer rank 0: simulated death"
HUNGRY = ("train", "snapshot", "send")
"""Calls that may run out of memory."""


class MortalTrainer:
    """Passes each call to the present ranks.  Calls in flight fail when the ranks die."""

    def __init__(self, make: Callable[[int], SimTrainer], first_step: int, weather: Weather) -> None:
        """``make`` returns ranks with the weights after so many steps."""
        self._make = make
        self._weather = weather
        self.ranks = make(first_step)
        self.died = asyncio.Event()

    def die(self) -> None:
        """End the ranks, and all that they do."""
        self.ranks.die()
        self.died.set()

    def start(self, step: int) -> None:
        """Start new ranks with the weights after ``step`` steps."""
        self.ranks = self._make(step)
        self.died.clear()

    @property
    def has_begun_checkpoint(self) -> bool:
        """See ``RayTrainer``."""
        return self.ranks.has_begun_checkpoint

    def __getattr__(self, name: str) -> Any:
        async def ask(*args: Any, **kwargs: Any) -> Any:
            if name in HUNGRY and not self.died.is_set() and self._weather.take(SHORTAGE):
                raise TrainerOutOfMemory(f"trainer rank 0, {name}: simulated shortage")
            return await self._while_alive(lambda: getattr(self.ranks, name)(*args, **kwargs))

        return ask

    async def _while_alive(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        if self.died.is_set():
            raise TrainerFailed(WHY)

        async def answer() -> Any:
            return await ask()

        with plainly():
            async with TaskGroup() as tasks:
                working, dying = tasks.create_task(answer()), tasks.create_task(self.died.wait())
                await asyncio.wait((working, dying), return_when=asyncio.FIRST_COMPLETED)
                dying.cancel()
                working.cancel()
        if working.cancelled():
            raise TrainerFailed(WHY)
        return working.result()


class SimTrainerProcesses:
    """The ``TrainerProcesses`` of a mortal trainer."""

    def __init__(
        self, trainer: MortalTrainer, updater: WeightUpdater, checkpointer: RayCheckpointer, first_step: int
    ) -> None:
        self._trainer = trainer
        self._updater = updater
        self._checkpointer = checkpointer
        self._first_step = first_step
        self._savings = ["max-tokens-per-gpu 4096", "recompute-granularity full"]

    async def wait_until_lost(self) -> str:
        """See ``TrainerProcesses.wait_until_lost``."""
        await self._trainer.died.wait()
        await asyncio.sleep(0.5)
        return WHY

    async def find_lost(self) -> str | None:
        """See ``TrainerProcesses.find_lost``."""
        await asyncio.sleep(0.01)
        return WHY if self._trainer.died.is_set() else None

    async def restart(self) -> int:
        """See ``TrainerProcesses.restart``."""
        self._trainer.die()
        found = await self._checkpointer.newest()
        await asyncio.sleep(START_S)
        step = self._first_step if found is None else found[0]
        self._trainer.start(step)
        self._updater.trainer_restarted("10.0.1.1")
        return step

    def save_memory(self) -> str | None:
        """See ``TrainerProcesses.save_memory``."""
        return self._savings.pop() if self._savings else None

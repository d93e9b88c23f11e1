"""The actors of the trainer's ranks: their start, their signs of life, and their restart within a run.

    create ──▶ load ──▶ a ping of each rank every second ──▶ lost ──▶ kill all ──▶ create ──▶ load ...

All ranks end and start together, because a process group with a dead member is of no use.  New actors take the same
reserved resources.  Engines are not touched: the updater forms another group with them before its next snapshot.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from asyncrl.engines.cluster.actors import WATCH, RankActor
from asyncrl.engines.cluster.addresses import Addresses
from asyncrl.engines.cluster.calls import answered, together
from asyncrl.engines.cluster.placement import Placement
from asyncrl.engines.cluster.ray_trainer import NoTrainer, RayCheckpointer, RayTrainer
from asyncrl.engines.cluster.settings import Deployment
from asyncrl.engines.megatron.checkpoint.directory import Origin
from asyncrl.engines.megatron.setup.less_memory import less_memory
from asyncrl.errors import ServerFailed, TrainerFailed
from asyncrl.event_loop import Deadline
from asyncrl.protocols import WeightUpdater

logger = logging.getLogger(__name__)

PING_EVERY_S = 1.0
"""Seconds between two pings of a rank, with up to ``MANY`` ranks; more ranks are pinged less often."""
MANY = 32
"""Ranks that are pinged in a second: a ping costs the driver a millisecond."""
FIND_S = 10.0
"""Deadline in seconds of a ping after a call has failed.  A dead rank fails it at once."""


class TrainerRanks:
    """The ranks of a deployment.  ``trainer`` stays the same object over all restarts."""

    def __init__(self, placement: Placement, deployment: Deployment, addresses: Addresses) -> None:
        self._placement = placement
        self._deployment = deployment
        self._addresses = addresses
        self._actors: tuple[Any, ...] = ()
        failures = deployment.failures
        kind = RayTrainer if deployment.layout.num_ranks else NoTrainer
        self.trainer: RayTrainer = kind(
            (), train_timeout_s=failures.train_timeout_s, control_timeout_s=failures.control_timeout_s
        )

    def __len__(self) -> int:
        """Return the number of ranks."""
        return len(self._actors)

    def create(self) -> None:
        """Create the actors, which take their places as soon as these are free."""
        self._actors = tuple(self._placement.rank(RankActor, rank) for rank in range(self._deployment.layout.num_ranks))
        self.trainer.use(self._actors)

    async def gpus(self) -> list[Any]:
        """Return the GPUs of each rank."""
        return await self._every("GPUs", lambda actor, _: actor.gpus.remote())

    async def load(self, origin: Origin | None) -> None:
        """Load the model and join the ranks, with the weights of ``origin`` or of ``--hf-checkpoint``.

        Raises ConfigError, TrainerFailed, CheckpointFailed or ServerFailed.
        """
        layers = await self._start()
        logger.info("the trainer's layers: %s (--transformer-impl)", layers)
        timeout_s = self._deployment.cluster.start_timeout_s
        if self._deployment.trainer.train.check_fast_step:
            for line in await self.trainer.check_fast_step(timeout_s=timeout_s):
                logger.info("%s", line)
        if origin is not None:
            await self.trainer.load(origin, timeout_s=timeout_s)

    async def address(self) -> tuple[str, int]:
        """Return the host of rank 0 and a free port there; possible while it trains.  Raises TrainerFailed."""
        try:
            return await self._addresses.rank(self._actors[0])
        except ServerFailed as error:  # the rank has died, and may start again
            raise TrainerFailed(f"trainer rank 0: {error}") from error

    async def restart(self, origin: Origin | None) -> None:
        """End all ranks, and start others with the weights of ``origin`` or of ``--hf-checkpoint``.

        Raises ConfigError, TrainerFailed, CheckpointFailed, or ServerFailed if they are not ready in time.
        """
        for actor in self._actors:  # a living rank waits for the dead ones, or has other weights
            self._placement.kill(actor)
        self.create()
        timeout_s = self._deployment.cluster.start_timeout_s
        try:
            async with Deadline(timeout_s):
                await self._start()
                if origin is not None:
                    await self.trainer.load(origin, timeout_s=timeout_s)
        except TimeoutError as error:
            raise ServerFailed(f"the trainer is not ready within {timeout_s:g} s (start-timeout-s)") from error

    def save_memory(self) -> str | None:
        """See ``TrainerProcesses.save_memory``."""
        found = less_memory(self._deployment.trainer)
        if found is None:
            return None
        settings, flags = found
        self._deployment = replace(self._deployment, trainer=settings)
        return flags

    async def wait_until_lost(self) -> str:
        """Return the reason once a rank has died, or has not answered a ping within ``--control-timeout-s``."""
        while True:
            await asyncio.sleep(PING_EVERY_S * max(1.0, len(self) / MANY))
            if (why := await self._pinged(self._deployment.failures.control_timeout_s)) is not None:
                return why

    async def find_lost(self) -> str | None:
        """Return the reason if a rank has died, does not answer a ping, or was silent in a call; None if all live."""
        return self.trainer.silence or await self._pinged(FIND_S)

    async def _pinged(self, timeout_s: float) -> str | None:
        try:
            pings = [actor.ping.options(concurrency_group=WATCH) for actor in self._actors]
            await together(
                [answered(ping.remote(), f"trainer rank {rank}", timeout_s) for rank, ping in enumerate(pings)]
            )
        except TrainerFailed as error:
            return str(error)
        return None

    async def _start(self) -> Any:
        """Have the ranks load the model and join; return which implementation of layers rank 0 uses."""
        address, port = await self.address()
        settings, size = self._deployment.trainer, self._deployment.layout.num_ranks
        layers = await self._every("start", lambda actor, rank: actor.start.remote(settings, rank, size, address, port))
        return layers[0]

    async def _every(self, what: str, ask: Callable[[Any, int], Any]) -> list[Any]:
        """Ask all ranks at once and return their answers."""
        timeout_s = self._deployment.cluster.start_timeout_s
        calls = [
            answered(ask(actor, rank), f"trainer rank {rank}, {what}", timeout_s)
            for rank, actor in enumerate(self._actors)
        ]
        return await together(calls)


class RankProcesses:
    """The ``TrainerProcesses`` of a run that writes checkpoints."""

    def __init__(
        self,
        ranks: TrainerRanks,
        updater: WeightUpdater,
        checkpointer: RayCheckpointer,
        *,
        origin: Origin | None,
        first_step: int,
    ) -> None:
        """``origin`` and ``first_step`` are those with which the run began."""
        self._ranks = ranks
        self._updater = updater
        self._checkpointer = checkpointer
        self._first = (first_step, origin)

    async def wait_until_lost(self) -> str:
        """See ``TrainerProcesses.wait_until_lost``."""
        return await self._ranks.wait_until_lost()

    async def find_lost(self) -> str | None:
        """See ``TrainerProcesses.find_lost``."""
        return await self._ranks.find_lost()

    async def restart(self) -> int:
        """See ``TrainerProcesses.restart``."""
        step, origin = await self._checkpointer.newest() or self._first
        logger.info("the trainer starts from %s", "the first weights" if origin is None else origin.folder)
        await self._ranks.restart(origin)
        host, _ = await self._ranks.address()
        self._updater.trainer_restarted(host)
        return step

    def save_memory(self) -> str | None:
        """See ``TrainerProcesses.save_memory``."""
        return self._ranks.save_memory()

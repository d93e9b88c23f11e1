"""The early end of a run: somebody asks for it, and the run writes a checkpoint instead of waiting for the next batch.

asked by      SIGTERM, or the loss of a process without which the run ends soon
answered by   the run, between two steps; a step in training is finished first
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from asyncrl.errors import plainly
from asyncrl.task_groups import TaskGroup

logger = logging.getLogger(__name__)


class EarlyEnd:
    """A request to end a run early, and its answer."""

    def __init__(self) -> None:
        self.is_possible = False
        """Whether the run has begun to train and writes checkpoints."""
        self.saved_step: int | None = None
        """Training steps in the checkpoint that the run wrote at its early end."""
        self._asked = asyncio.Event()

    @property
    def is_asked(self) -> bool:
        """Whether the run ends as soon as it can."""
        return self._asked.is_set()

    def ask(self, reason: str, grace_s: float) -> bool:
        """Ask for the end within ``grace_s`` seconds; False if no checkpoint could be written."""
        if not self.is_possible or grace_s == 0:
            return False
        logger.warning("%s: the run writes a checkpoint and ends, within %g s (grace-s)", reason, grace_s)
        self._asked.set()
        return True

    async def unless_asked[T](self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; cancel it and return None once the end is asked for."""
        if self.is_asked:
            work.close()
            return None
        with plainly():
            async with TaskGroup() as tasks:
                working = tasks.create_task(work)
                asking = tasks.create_task(self._asked.wait())
                await asyncio.wait((working, asking), return_when=asyncio.FIRST_COMPLETED)
                asking.cancel()
                working.cancel()
        return None if working.cancelled() else working.result()

"""Batches that are saved on their way to the trainer (``--save-debug-rollout-data``)."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.errors import DataError
from asyncrl.event_loop import Deadline
from asyncrl.protocols import BatchPreparer
from asyncrl.rollout_log.batch_file import write_batch
from asyncrl.types import Batch

WRITING_S = 120.0
"""Seconds for one file, after which training continues without it: a batch with routes has some gigabytes."""

logger = logging.getLogger(__name__)


class SavedBatches:
    """A ``BatchPreparer`` behind another, which saves each batch before it is trained.  Training waits for the file."""

    def __init__(self, file_of: Callable[[int], Path], hooks: BatchPreparer | None) -> None:
        """``file_of`` returns the file of a step."""
        self._file_of = file_of
        self._hooks = hooks
        self._thread = DaemonThreads(1, "batches")

    async def prepared_again(self, batch: Batch) -> Batch:
        """See ``BatchPreparer.prepared_again``.  Saves nothing."""
        return batch if self._hooks is None else await self._hooks.prepared_again(batch)

    async def prepared(self, batch: Batch) -> Batch:
        """See ``BatchPreparer.prepared``.  A batch that cannot be written costs a warning."""
        if self._hooks is not None:
            batch = await self._hooks.prepared(batch)
        path = self._file_of(batch.step)
        try:
            async with Deadline(WRITING_S):
                await asyncio.wrap_future(self._thread.submit(write_batch, path, batch))
        except (OSError, DataError) as error:  # TimeoutError is an OSError
            why = str(error) or f"it took more than {WRITING_S:g} s"
            logger.warning("step %d: its batch was not saved to %s: %s", batch.step, path, why)
        return batch

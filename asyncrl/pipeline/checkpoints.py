"""The checkpoints of a run: a failed one is a warning, several in a row end the run, and so does a failed last one."""

import logging
from collections.abc import Callable
from contextlib import suppress

from asyncrl.errors import CheckpointFailed
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.protocols import Checkpointer

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes one checkpoint at a time.

    Raises CheckpointFailed if ``max_failed`` checkpoints in a row have failed, and at once for one that
    ``must_succeed``.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        max_failed: int,
        first_step: int,
        on_complete: Callable[[int], None] = lambda step: None,
    ) -> None:
        """``first_step`` is that of the checkpoint which the run started from.

        ``on_complete`` is called with the step of each checkpoint once it is complete.
        """
        self._on_complete = on_complete
        self._checkpointer = checkpointer
        self._max_failed = max_failed
        self._failed = 0
        self.saved_step = first_step
        """The step of the newest checkpoint that is written, or being written; the first step of the run if none is."""
        self._saved_before = first_step
        self._step: int | None = None
        """The step of the checkpoint that is being written, as far as is known."""

    async def check(self) -> None:
        """Notice whether the checkpoint that is being written has failed.  Does not wait for it."""
        if self._step is not None:
            try:
                await self._checkpointer.check()
            except CheckpointFailed as error:
                self._note(error)

    async def begin(self, state: RunState, *, must_succeed: bool) -> None:
        """Wait for the previous checkpoint, copy the trainer's state and start to write it."""
        if self._step is None and self._failed:  # some ranks may not have noticed the failure yet
            with suppress(CheckpointFailed):
                await self._checkpointer.finish()
        await self.finish()
        self._saved_before, self.saved_step = self.saved_step, state.step
        self._step = state.step
        try:
            await self._checkpointer.begin(state.step, state.as_json())
        except CheckpointFailed as error:
            if must_succeed:
                raise
            self._note(error)

    async def finish(self, *, must_succeed: bool = False) -> None:
        """Wait until no checkpoint is being written."""
        if self._step is None:
            return
        try:
            await self._checkpointer.finish()
        except CheckpointFailed as error:
            if must_succeed:
                raise
            self._note(error)
        else:
            step, self._step, self._failed = self._step, None, 0
            self._on_complete(step)

    def _note(self, error: CheckpointFailed) -> None:
        step, self._step = self._step, None
        self.saved_step = self._saved_before
        self._failed += 1
        if self._failed >= self._max_failed:
            raise CheckpointFailed(
                f"{self._failed} checkpoints in a row failed (max-failed-saves); the last: {error}"
            ) from error
        logger.warning(
            "the checkpoint of step %s failed; training continues, and the next interval tries again (failed in a row: "
            "%d, the run ends at max-failed-saves %d): %s",
            step,
            self._failed,
            self._max_failed,
            error,
        )

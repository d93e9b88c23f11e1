"""The batches that a running run has taken since a checkpoint, read from its own journal."""

from collections.abc import Iterable
from functools import partial

from asyncrl.buffer.journal.replay import Replay
from asyncrl.daemon_threads import off_loop
from asyncrl.errors import JournalDamaged
from asyncrl.types import Batch


class RecordedSteps:
    """The recorded batches by step.  Each is decoded, in a thread, when it is asked for."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def missing(self, steps: Iterable[int]) -> list[int]:
        """Return the steps without a recorded batch."""
        return [step for step in steps if step not in self._replay.batches]

    async def batch(self, step: int) -> Batch:
        """Return the batch of a step that is not missing, as its groups were finished.

        Masks for old tokens, and changes by hooks, must be made again.  Raises JournalDamaged.
        """
        try:
            return await off_loop(partial(self._replay.batch, step), "journal")
        except OSError as error:
            raise JournalDamaged(f"cannot be read: {error}", "the journal", 0) from error

"""The hooks of a step, called in order between the batch and the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from asyncrl.errors import HookFailed, name_of
from asyncrl.hooks.changes import samples_of
from asyncrl.hooks.worker import Caller
from asyncrl.protocols import BatchHook
from asyncrl.types import Batch, Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class FlaggedHook:
    """A hook and the flag that named it."""

    flag: str
    hook: BatchHook


class BatchHooks:
    """Calls the hooks of a step in a thread.  A hook that fails ends the run, because no wrong batch may be trained."""

    def __init__(
        self, hooks: Sequence[FlaggedHook], worker: Caller, timeout_s: float, *, keeps_filtered: bool = False
    ) -> None:
        """``keeps_filtered``: keep the groups that the filter dropped since the last batch, which costs memory."""
        self._hooks = tuple(hooks)
        self._worker = worker
        self._timeout_s = timeout_s
        self._keeps_filtered = keeps_filtered
        self._filtered: list[ScoredGroup] = []

    async def prepared(self, batch: Batch) -> Batch:
        """Return the batch to train.  Raises HookFailed, which names step, flag and function."""
        filtered, self._filtered = tuple(self._filtered), []
        return await self._changed(batch, filtered)

    async def prepared_again(self, batch: Batch) -> Batch:
        """See ``BatchPreparer.prepared_again``.  The groups filtered since the last batch wait for the next one."""
        return await self._changed(batch, ())

    async def _changed(self, batch: Batch, filtered: Sequence[ScoredGroup]) -> Batch:
        for each in self._hooks:
            name = f"step {batch.step}: {each.flag} {name_of(each.hook)}"
            batch = await self._worker.call(partial(each.hook, batch, filtered), name, self._timeout_s)
        samples = samples_of(batch)
        with_outcome = sum(scored.outcome is not None for scored in samples)
        if with_outcome not in (0, len(samples)):
            raise HookFailed(
                f"step {batch.step}: {with_outcome} of {len(samples)} samples have an outcome after the hooks; all "
                "samples must have one, or none"
            )
        return batch

    def finished(self, group: ScoredGroup, reason: str | None, /) -> None:
        """Keep a group that the filter dropped, if a hook wants it."""
        if reason is not None and self._keeps_filtered:
            self._filtered.append(group)

    def returned(self, prompt: Prompt, group: ScoredGroup | None, outcome: str, /) -> bool:
        """Leave the prompt to others."""
        return False

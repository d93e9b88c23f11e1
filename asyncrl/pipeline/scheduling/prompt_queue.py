"""The queue of prompts for new groups."""

import asyncio
from collections import deque
from collections.abc import Iterable

from asyncrl.event_loop import loop_time
from asyncrl.pipeline.scheduling.run_state import RunState
from asyncrl.protocols import PromptSource
from asyncrl.types import Prompt


class PromptQueue:
    """Returned prompts first, then new ones from the source."""

    def __init__(self, source: PromptSource, again: Iterable[Prompt] = (), before: RunState | None = None) -> None:
        """Start with the returned prompts ``again``; ``before`` is the state of the run that this one resumes."""
        self._source = source
        self._returned = deque(again)
        self.num_taken = before.prompts_taken if before else 0
        """Number of prompts taken from the source, over the whole run."""
        self.last_taken = before.last_taken if before else None
        """Epoch and row of the prompt taken from the source last; None before the first."""
        self._wait: asyncio.Timeout | None = None
        self._waiting_since = 0.0

    @property
    def returned(self) -> tuple[Prompt, ...]:
        """The returned prompts, in the order in which they will be taken."""
        return tuple(self._returned)

    async def ready(self) -> bool:
        """Wait until ``take`` returns at once, or until ``wake``.  Returns whether ``take`` would return at once.

        Raises DataError or HookFailed if the source ends.  Only one task may call this.
        """
        if self._returned:
            return True
        self._waiting_since = loop_time()
        try:
            async with asyncio.timeout(None) as self._wait:
                await self._source.ready()
        except TimeoutError:
            if self._wait is None or not self._wait.expired():
                raise  # an error of the source
            return bool(self._returned)
        finally:
            self._wait = None
        return True

    def wake(self) -> None:
        """End a wait in ``ready``, because a group can start without a new prompt.  No-op without a wait."""
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(loop_time())

    @property
    def seconds_waited(self) -> float | None:
        """Seconds for which ``ready`` has been waiting for the source; None if it does not wait."""
        return None if self._wait is None else loop_time() - self._waiting_since

    def take(self) -> Prompt:
        """Return the next prompt.  Never waits; allowed once ``ready`` returned True."""
        if self._returned:
            return self._returned.popleft()
        prompt = self._source.take()
        self.num_taken += 1
        self.last_taken = (prompt.epoch, prompt.row)
        return prompt

    def return_prompt(self, prompt: Prompt) -> None:
        """Return a prompt whose group will not be trained."""
        self._returned.append(prompt)
        self.wake()

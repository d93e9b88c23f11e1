"""Prompts for groups that start."""

from collections import deque
from collections.abc import Iterable

from asyncrl.protocols import PromptSource
from asyncrl.types import Prompt


class PromptQueue:
    """Those that came back first, then fresh ones."""

    def __init__(self, source: PromptSource, again: Iterable[Prompt] = (), num_taken: int = 0) -> None:
        """``again`` came back before; ``num_taken`` of the source's were taken by a run that this one goes on from."""
        self._source = source
        self._returned = deque(again)
        self.num_taken = num_taken
        """Of fresh ones, over the whole run."""

    @property
    def returned(self) -> tuple[Prompt, ...]:
        """Those that wait to be taken again, in order."""
        return tuple(self._returned)

    def take(self) -> Prompt:
        """The next one.  Never waits."""
        if self._returned:
            return self._returned.popleft()
        self.num_taken += 1
        return self._source.take()

    def give_back(self, prompt: Prompt) -> None:
        """Its group will not be trained."""
        self._returned.append(prompt)

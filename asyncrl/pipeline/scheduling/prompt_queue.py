"""The queue of prompts for new groups."""

from collections import deque
from collections.abc import Iterable

from asyncrl.protocols import PromptSource
from asyncrl.types import Prompt


class PromptQueue:
    """Returned prompts first, then new ones from the source."""

    def __init__(self, source: PromptSource, again: Iterable[Prompt] = (), num_taken: int = 0) -> None:
        """Start with the returned prompts ``again``; the resumed run has taken ``num_taken`` prompts of the source."""
        self._source = source
        self._returned = deque(again)
        self.num_taken = num_taken
        """Number of prompts taken from the source, over the whole run."""

    @property
    def returned(self) -> tuple[Prompt, ...]:
        """The returned prompts, in the order in which they will be taken."""
        return tuple(self._returned)

    def take(self) -> Prompt:
        """Return the next prompt.  Never waits."""
        if self._returned:
            return self._returned.popleft()
        self.num_taken += 1
        return self._source.take()

    def return_prompt(self, prompt: Prompt) -> None:
        """Return a prompt whose group will not be trained."""
        self._returned.append(prompt)

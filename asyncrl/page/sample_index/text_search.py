"""The search for a text in whole prompts and responses: a thread reads the files of the chosen steps, newest first."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.errors import DataError
from asyncrl.page.sample_index import tables
from asyncrl.page.sample_index.step_files import read_columns

SEARCH_S = 60.0
"""Seconds of one search; the steps that it did not reach are named."""
PATIENCE_S = 0.2
"""Seconds that a request waits for the search."""
_STEPS_AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Question:
    """One text, and the steps in which it is searched."""

    text: str
    from_step: int | None
    to_step: int | None


class TextSearch:
    """One search.  ``refresh`` may be called from one thread at a time; the search's own thread only adds results."""

    def __init__(self, run_dir: Path, question: Question) -> None:
        self.question = question
        self.is_cancelled = False
        """Set when the user asks for something else; the thread then ends."""
        self.num_searched = 0
        self.num_steps = 0
        self.reached: int | None = None
        """The oldest step whose whole text was searched."""
        self.is_late = False
        """Whether the search took ``SEARCH_S`` and ended."""
        self._run_dir = run_dir
        self._done: set[int] = set()
        self._found: list[Any] = []
        self._thread: Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether there will be further results."""
        return self._thread is not None and not self._thread.done()

    def refresh(self, steps: Sequence[int]) -> None:
        """Search the steps that were not searched yet, in a thread; wait for it at most ``PATIENCE_S``."""
        asked = self.question
        first, last = asked.from_step or 0, 2**31 if asked.to_step is None else asked.to_step
        chosen = [step for step in steps if first <= step <= last]
        self.num_steps = len(chosen)
        new = sorted(set(chosen) - self._done, reverse=True)
        if new and not self.is_running and not self.is_late:
            self._thread = in_daemon_thread(lambda: self._search(new), "text search")
        if self._thread is not None:
            wait([self._thread], PATIENCE_S)

    def found(self) -> Any:
        """Return step, group and number of the samples found so far, as pyarrow's table."""
        return tables.joined([tables.no_samples(), *self._found])

    def _search(self, steps: Sequence[int]) -> None:
        deadline = time.monotonic() + SEARCH_S
        database = tables.connect()
        for several in batched(steps, _STEPS_AT_ONCE):
            if self.is_cancelled:
                return
            if time.monotonic() > deadline:
                self.is_late = True
                return
            chunks = [chunk for step in several if (chunk := self._texts(step)) is not None]
            if chunks:
                self._found.append(tables.with_text(database, tables.joined(chunks), self.question.text))
            self._done.update(several)
            self.num_searched, self.reached = len(self._done), min(self._done)

    def _texts(self, step: int) -> Any:
        """Return the texts of a step; None if its file cannot be read, which the index reports."""
        try:
            return read_columns(self._run_dir, step, ("group_id", "sample", "prompt", "response"))
        except DataError:
            return None

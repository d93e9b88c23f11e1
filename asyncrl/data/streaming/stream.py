"""A source of prompts that reads its files during the run.

consumes      blocks that the data workers read and tokenised
produces      prompts, in an order that neither the number of workers nor their speed changes
waits for     the workers, within ANSWER_S each; demand: about two windows are read ahead
unblocked by  an answer of a worker, take()
on cancel     the workers are killed
on crash      nothing is lost: a checkpoint names the prompt taken last, and the order is a function of the seed
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from asyncrl.data.making import Broken, Made, PromptMaker, TooLong
from asyncrl.data.streaming.account import StreamAccount
from asyncrl.data.streaming.order import StreamOrder, Window
from asyncrl.data.streaming.table import BlockTable
from asyncrl.data.streaming.wire import BlockPrompts, WorkerSettings, unpack
from asyncrl.data.streaming.workers import DataWorkers
from asyncrl.errors import DataError, plainly
from asyncrl.task_groups import TaskGroup
from asyncrl.types import Prompt

logger = logging.getLogger(__name__)

LOW_WATER = 64
"""Prompts that are left when the next window is delivered."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A packed prompt that can be taken."""

    epoch: int
    row: int
    packed: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    """A window whose blocks are requested or read."""

    window: Window
    answers: tuple[asyncio.Future[BlockPrompts], ...]


class PromptStream:
    """Prompts of the files in a table, in an order.  ``run`` must be a task of the caller while prompts are taken."""

    def __init__(
        self, *, settings: WorkerSettings, table: BlockTable, order: StreamOrder, maker: PromptMaker, fingerprint: str
    ) -> None:
        self._settings = settings
        self._table = table
        self._order = order
        self._maker = maker
        self.fingerprint = fingerprint
        """A digest of the files and the settings; positions are comparable only if it is equal."""
        self.account = StreamAccount(table)
        self._start: tuple[int, int] = (0, 0)
        """Epoch and window with which to begin."""
        self._last_taken: tuple[int, int] | None = None
        """Epoch and row of the prompt before the first."""
        self._num_skipped = 0
        """Prompts to skip at the start."""
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._failure: DataError | None = None
        self._workers = DataWorkers(settings)

    @property
    def started(self) -> asyncio.Event:
        """Set once a worker runs; what follows is reading."""
        return self._workers.started

    def __len__(self) -> int:
        """Return the number of blocks: the number of prompts is not known before all are read."""
        return len(self._table)

    # ---- position

    def seek(self, position: int) -> None:
        """Continue with the prompt at ``position``, counted from 0 over all epochs.

        Reads and skips all earlier prompts; ``resume_after`` does not.  Raises ValueError if ``position`` is negative.
        """
        if position < 0:
            raise ValueError(f"position must be at least 0, got {position}")
        self._start, self._last_taken, self._num_skipped = (0, 0), None, position

    def resume_after(self, epoch: int, row: int) -> None:
        """Continue behind a prompt that was taken.  Reads only its window again.  Raises KeyError."""
        window = self._order.window_of(epoch, self._table.block_of(row))
        self._start, self._last_taken, self._num_skipped = (epoch, window), (epoch, row), 0

    def at(self, epoch: int, row: int) -> Prompt:
        """Read the prompt of a row, in this process.  Raises KeyError if there is none, or DataError."""
        try:
            (made,) = self._maker.made([self._table.read_row(row)])
        except OSError as error:
            raise DataError(f"row {row}: {error.strerror or error}") from error
        match made:
            case Made():
                return made.prompt(row, epoch)
            case TooLong() | Broken():
                raise KeyError(row)

    # ---- prompts

    async def ready(self) -> None:
        """See ``PromptSource.ready``."""
        while not self._waiting:
            if self._failure is not None:
                raise self._failure
            self._arrived.clear()
            await self._arrived.wait()

    def take(self) -> Prompt:
        """See ``PromptSource.take``.  Raises IndexError before ``ready`` returned."""
        first = self._waiting.popleft()
        if len(self._waiting) <= LOW_WATER:
            self._taken.set()
        return unpack(first.packed).prompt(first.row, first.epoch)

    # ---- reading

    async def run(self) -> None:
        """Read until cancelled, or until a DataError, which ``ready`` raises once the prompts so far are taken."""
        workers = self._workers
        try:
            with plainly():
                async with TaskGroup() as tasks:
                    for number in range(self._settings.data.num_workers):
                        tasks.create_task(workers.serve(f"data worker {number}"), name=f"data-worker-{number}")
                    await self._feed(workers)
        except DataError as error:
            self._failure = error
            self._arrived.set()

    async def _feed(self, workers: DataWorkers) -> NoReturn:
        windows = self._order.windows(*self._start)
        ahead: deque[_Read] = deque()
        is_whole = self._start[1] == 0
        while True:
            self._read_ahead(workers, windows, ahead)
            reading = ahead.popleft()
            answers = [await answer for answer in reading.answers]
            self._read_ahead(workers, windows, ahead)
            while len(self._waiting) > LOW_WATER:
                self._taken.clear()
                await self._taken.wait()
            self._deliver(reading.window, answers)
            if reading.window.is_last:
                self.account.close_epoch(reading.window, is_whole=is_whole)
                is_whole = True

    def _read_ahead(self, workers: DataWorkers, windows: Iterator[Window], ahead: deque[_Read]) -> None:
        """Request windows until one window is on its way, and at least two blocks for each worker.

        Blocks of a window are requested in the order of the files: going back in a Parquet row group reads it again.
        """
        wanted = 2 * self._settings.data.num_workers
        while not ahead or sum(len(reading.window.blocks) for reading in ahead) < wanted:
            window = next(windows)
            requests = {block: workers.request(*self._table.locate(block)) for block in sorted(window.blocks)}
            ahead.append(_Read(window, tuple(requests[block] for block in window.blocks)))

    def _deliver(self, window: Window, answers: list[BlockPrompts]) -> None:
        """Make the prompts of a window available, behind the prompt at which a resumed run begins."""
        found: list[_Waiting] = []
        for block, answer in zip(window.blocks, answers, strict=True):
            self.account.note(block, answer)
            rows = (self._table.address(block, place) for place in answer.places)
            found += [_Waiting(window.epoch, row, packed) for row, packed in zip(rows, answer.packed, strict=True)]
        ordered = [found[place] for place in self._order.mixed(window, len(found))]
        if self._last_taken is not None:
            ordered = self._behind(self._last_taken, ordered)
            self._last_taken = None
        skipped = min(self._num_skipped, len(ordered))
        self._num_skipped -= skipped
        self._waiting.extend(ordered[skipped:])
        if self._waiting:
            self._arrived.set()

    def _behind(self, taken: tuple[int, int], ordered: list[_Waiting]) -> list[_Waiting]:
        for place, waiting in enumerate(ordered):
            if (waiting.epoch, waiting.row) == taken:
                return ordered[place + 1 :]
        raise DataError(f"the prompt at which the run continues, row {taken[1]} of epoch {taken[0]}, is gone")

"""The account of a stream: every row read is a prompt, too long or broken."""

import logging
from dataclasses import dataclass

from asyncrl.data.streaming.order import Window
from asyncrl.data.streaming.table import BlockTable
from asyncrl.data.streaming.wire import BlockPrompts
from asyncrl.errors import DataError

logger = logging.getLogger(__name__)

MOST_NAMED = 100
"""Broken rows that the log names; further ones are only counted."""


@dataclass(slots=True)
class RowCounts:
    """Rows read, by outcome."""

    rows: int = 0
    prompts: int = 0
    too_long: int = 0
    broken: int = 0

    def add(self, found: BlockPrompts) -> None:
        """Add the rows of a block.  Raises AssertionError if the account does not balance."""
        self.rows += found.num_rows
        self.prompts += len(found.packed)
        self.too_long += found.too_long
        self.broken += len(found.broken)
        if self.rows != self.prompts + self.too_long + self.broken:
            raise AssertionError(f"the account of rows does not balance: {self}")

    def __str__(self) -> str:
        return f"{self.rows} rows = {self.prompts} prompts + {self.too_long} too long + {self.broken} broken"


class StreamAccount:
    """Counts rows, names broken ones in the log, and reports at the end of each epoch."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.total = RowCounts()
        """All rows read by this run."""
        self.epoch = RowCounts()
        """Rows read of the current epoch."""

    def note(self, block: int, found: BlockPrompts) -> None:
        """Count the rows of a block."""
        self._table.note_lines(block, found.num_lines)
        for place, broken in enumerate(found.broken, start=self.total.broken):
            if place < MOST_NAMED:
                where = self._table.where(block, broken.place, broken.line)
                logger.warning("%s: %s; the row is skipped", where, broken.fault)
            elif place == MOST_NAMED:
                logger.warning("%d rows are broken; further ones are only counted", MOST_NAMED)
        self.total.add(found)
        self.epoch.add(found)

    def close_epoch(self, window: Window, *, is_whole: bool) -> None:
        """Report an epoch.  Raises DataError if a whole epoch had no prompt, because every further one has none."""
        part = "" if is_whole else " (continued)"
        logger.info("prompts of epoch %d%s: %s", window.epoch, part, self.epoch)
        if is_whole and not self.epoch.prompts:
            files = ", ".join(str(file.path) for file in self._table.files)
            raise DataError(f"{files}: no prompt in a whole epoch: {self.epoch}")
        self.epoch = RowCounts()

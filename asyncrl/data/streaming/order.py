"""The order of a stream: a function of the number of blocks, the seed and the epoch alone.

Without a seed: the blocks in order, the rows of each in order.  With a seed: each epoch has a permutation of the
blocks, of which WINDOW_BLOCKS successive ones are a window; the prompts of a window are permuted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

WINDOW_BLOCKS = 32
"""Blocks whose prompts are mixed, from 32 places of the files: about 2,000 prompts of 1 kB from JSONL, 8,000 from
Parquet."""

_BLOCKS, _ROWS = 1, 2
"""Different random streams of one seed."""


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks whose prompts are delivered together."""

    epoch: int
    number: int
    """Number in the epoch, from 0."""
    blocks: tuple[int, ...]
    is_last: bool
    """Whether the epoch ends with it."""


@dataclass(slots=True)
class StreamOrder:
    """The order of all epochs."""

    num_blocks: int
    seed: int | None
    _epoch: int = field(default=-1, init=False)
    _blocks: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.empty(0, np.int64), init=False
    )
    """The permutation of ``_epoch``: 8 bytes per block."""

    @property
    def size(self) -> int:
        """Blocks of a window."""
        return 1 if self.seed is None else WINDOW_BLOCKS

    def windows(self, epoch: int = 0, number: int = 0) -> Iterator[Window]:
        """Yield all windows from window ``number`` of ``epoch`` on, without end."""
        count = -(-self.num_blocks // self.size)
        while True:
            for each in range(number, count):
                yield Window(epoch, each, self._window(epoch, each), is_last=each + 1 == count)
            epoch, number = epoch + 1, 0

    def window_of(self, epoch: int, block: int) -> int:
        """Return the number of the window that holds ``block``."""
        if self.seed is None:
            return block
        (places,) = np.nonzero(self._permuted(epoch) == block)
        return int(places[0]) // self.size

    def mixed(self, window: Window, count: int) -> list[int]:
        """Return the order of the ``count`` prompts of a window."""
        if self.seed is None:
            return list(range(count))
        draws = np.random.default_rng([self.seed, window.epoch, _ROWS, window.number])
        order: list[int] = draws.permutation(count).tolist()
        return order

    def _window(self, epoch: int, number: int) -> tuple[int, ...]:
        if self.seed is None:
            return (number,)
        blocks: list[int] = self._permuted(epoch)[number * self.size : (number + 1) * self.size].tolist()
        return tuple(blocks)

    def _permuted(self, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if epoch != self._epoch:
            draws = np.random.default_rng([self.seed or 0, epoch, _BLOCKS])
            self._epoch, self._blocks = epoch, draws.permutation(self.num_blocks)
        return self._blocks

"""The journal of a run, as the event loop uses it.

consumes      records, from the scheduler
produces      segments in ``folder``
waits for     the disk, in ``durable`` and ``close`` only
on cancel     the records that were appended are written all the same
on failure    one warning; the journal is off from then on, and the run continues without it
on crash      the records of the last ``COMMIT_S`` seconds are lost, none of which ``durable`` had confirmed
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from asyncrl.buffer.journal.recorded_steps import RecordedSteps
from asyncrl.buffer.journal.records import Finished, Grown, Record, Snapshot
from asyncrl.buffer.journal.recovery import replay_from
from asyncrl.buffer.journal.segments import Disk
from asyncrl.buffer.journal.writer import COMMIT_BYTES, Checkpointed, End, JournalWriter, estimated_bytes
from asyncrl.daemon_threads import in_daemon_thread, off_loop
from asyncrl.errors import first_line

logger = logging.getLogger(__name__)

STALL_S = 30.0
"""Seconds without an answer of the disk after which the journal is switched off."""
MOST_WAITING = 100_000
"""Records that may wait for the disk.  Groups are far fewer: each waits in ``durable``."""


class Journal:
    """The journal of one run.  Not thread-safe: all methods are for the event loop's thread."""

    def __init__(
        self,
        folder: Path,
        run_epoch: int,
        *,
        delivered: Callable[[], int],
        disk: Disk | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """Prepare a journal in ``folder``, which is made with the first record.

        ``delivered`` returns the tokens delivered so far; the writer's thread calls it before each commit.
        """
        self._folder = folder
        self._stall_s = stall_s
        self._sequence = 0
        self._waiting = list[tuple[int, asyncio.Future[None]]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Future[None] | None = None
        self._problem: str | None = None
        self._is_closed = False
        self._full_at = COMMIT_BYTES
        """The ``num_queued`` at which the writer is told that a commit is full."""
        self._writer = JournalWriter(
            folder, run_epoch, delivered=delivered, on_commit=self._committed, disk=disk or Disk()
        )

    @property
    def problem(self) -> str | None:
        """The reason why the journal switched itself off; None while it is on."""
        return self._problem

    @property
    def num_waiting(self) -> int:
        """Number of records that wait for the writer's thread."""
        return len(self._writer.queue)

    def append(self, record: Record) -> int:
        """Queue a record and return its sequence number.  Costs microseconds.

        The record must not change later.  No-op if the journal is off or closed.
        """
        if self._is_over:
            return self._sequence
        self._sequence += 1
        self._put(record)
        if len(self._writer.queue) > MOST_WAITING:
            self._switch_off(f"{MOST_WAITING} records wait for the disk")
        return self._sequence

    def hurry(self) -> None:
        """Write what is queued at once, and not after up to ``COMMIT_S`` with what follows."""
        self._writer.due.set()

    async def durable(self, sequence: int) -> None:
        """Wait until the record is on the disk.  Returns at once if the journal is off.

        The record waits for others up to ``COMMIT_S``, unless ``hurry`` is called.  Switches the journal off after
        ``STALL_S`` seconds.
        """
        # Two waits: after a suspension of the whole process, the first one ends before the disk could answer.
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._stall_s / 2):
                    return await self._confirmed(sequence)
        self._switch_off(f"the disk has not answered for {self._stall_s:g} s")

    def begin_segment(self, snapshot: Snapshot) -> int:
        """Write later records to a new segment, whose first record is ``snapshot``; return its sequence number."""
        return self.append(snapshot)

    async def steps_since(self, step: int) -> RecordedSteps | None:
        """Read the batches since the snapshot of ``step``; None if the journal is off, or has no such snapshot.

        Raises JournalDamaged, or OSError.
        """
        self.hurry()
        await self.durable(self._sequence)
        if self._is_over:
            return None
        replay = await off_loop(partial(replay_from, self._folder, step), "journal")
        return None if replay is None else RecordedSteps(replay)

    def checkpointed(self, step: int) -> None:
        """Delete the segments that no recovery from the checkpoint of ``step`` or a later one needs."""
        if not self._is_over:
            self._put(Checkpointed(step=step))

    async def close(self) -> None:
        """Write what waits, and end the thread; takes ``STALL_S`` seconds at most.  No-op if it is closed."""
        if not self._is_over and self._thread is not None:
            self._put(End())
        self._is_closed = True
        if self._thread is not None and self._problem is None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await asyncio.shield(asyncio.wrap_future(self._thread))
            except TimeoutError:
                self._switch_off(f"the disk has not answered for {self._stall_s:g} s")
        self._release()

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._problem is not None

    def _put(self, item: Record | Checkpointed | End) -> None:
        # Invariant: the item is in the queue before ``wake`` is read, and the thread clears ``wake`` before it reads
        # the queue.  In any other order an item could wait for the next one.
        self._writer.queue.append((self._sequence, item))
        if self._thread is None:
            self._thread = in_daemon_thread(self._write, "journal")
        if not self._writer.wake.is_set():
            self._writer.wake.set()
        if isinstance(item, Finished | Grown):
            self._writer.num_queued += estimated_bytes(item)
        if isinstance(item, End) or self._writer.num_queued >= self._full_at:
            self._full_at = self._writer.num_queued + COMMIT_BYTES
            self._writer.due.set()

    async def _confirmed(self, sequence: int) -> None:
        if self._is_confirmed(sequence):
            return
        self._loop = asyncio.get_running_loop()
        waiter = self._loop.create_future()
        self._waiting.append((sequence, waiter))
        self._release()  # a commit between the look above and the append has not seen the waiter
        await waiter

    def _is_confirmed(self, sequence: int) -> bool:
        return sequence <= self._writer.synced or self._problem is not None

    def _release(self) -> None:
        """End the waits that are over."""
        # Invariant: a waiter is in ``_waiting`` from before the look at what is confirmed until it is released.
        # Otherwise a commit right after the look finds the list empty, and does not tell the loop.
        left = list[tuple[int, asyncio.Future[None]]]()
        for sequence, waiter in self._waiting:
            if waiter.done():  # cancelled
                continue
            if self._is_confirmed(sequence):
                waiter.set_result(None)
            else:
                left.append((sequence, waiter))
        self._waiting = left

    def _switch_off(self, problem: str) -> None:
        """Write nothing more.  Any thread may call this; the waits end on the loop's."""
        if self._problem is None:
            self._writer.is_off = True
            logger.warning(
                "%s: THE JOURNAL IS OFF: %s; the run continues, and a restart would begin at its last checkpoint, "
                "or where the journal ends",
                self._folder,
                problem,
            )
            self._problem = problem  # last, because the run may end as soon as no wait is left
            self._writer.queue.clear()
        self._committed()

    # ---- in the writer's thread

    def _write(self) -> None:
        try:
            self._writer.run()
        except Exception as error:  # noqa: BLE001 (whatever fails here must not end the run)
            self._switch_off(first_line(error))

    def _committed(self) -> None:
        """Let the event loop end the waits that are over."""
        if self._waiting and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._release)

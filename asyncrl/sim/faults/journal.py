"""The journal of a process on virtual time: the real encoder and files, with a disk that is slow, fails or stalls.

The writer's thread becomes callbacks of the loop: an idle wait, the wait for more records of a commit, and the
wait for the disk take virtual time.  All else is the code of ``Journal`` and ``JournalWriter``.
"""

import asyncio
import errno
import os
import random
import stat
from collections import deque
from collections.abc import Buffer, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.buffer.journal import Finished, Journal, Record
from asyncrl.buffer.journal.segments import Disk
from asyncrl.buffer.journal.writer import COMMIT_S, IDLE_S, JournalWriter
from asyncrl.errors import first_line
from asyncrl.sim.faults.world.plan import Weather
from asyncrl.types import GroupId

STALLED_S = 70.0
"""Longest wait of a stalled disk in seconds: twice as long as a journal waits."""


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A change that is not on the disk yet."""

    at: float
    act: Callable[[], None]
    path: Path | None = None
    """The file whose bytes up to ``size`` will be durable; None: another change."""
    size: int = 0


class SlowDisk(Disk):
    """A disk in the life's folder, on which bytes are durable only a drawn time after they were written.

    The calls do not wait.  ``done_at`` is the virtual time at which a thread that waits would continue.
    """

    def __init__(self, weather: Weather, rng: random.Random, longest_s: float) -> None:
        """``longest_s`` is that of a wait without a fault."""
        self.done_at = 0.0
        self._weather = weather
        self._rng = rng
        self._longest_s = longest_s
        self._paths = dict[int, Path]()
        self._durable = dict[Path, int]()
        self._pending = deque[_Pending]()

    def begin(self, now: float) -> None:
        """Begin a turn of the writer."""
        self.done_at = now

    def create(self, path: Path) -> int:
        """See ``Disk.create``."""
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._durable[path] = 0
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[Buffer]) -> int:
        """See ``Disk.write``.  A disk that is full takes a part of the first buffer."""
        if self._weather.take("journal_full"):
            os.write(descriptor, memoryview(buffers[0])[: self._rng.randint(0, memoryview(buffers[0]).nbytes)])
            raise OSError(errno.ENOSPC, "No space left on device")
        if self._rng.random() < 0.05:  # fewer bytes than asked for, as after a signal
            buffers = [memoryview(buffers[0])[: self._rng.randint(1, memoryview(buffers[0]).nbytes)]]
        return super().write(descriptor, buffers)

    def sync(self, descriptor: int) -> None:
        """See ``Disk.sync``."""
        if self._weather.take("journal_fails"):
            raise OSError(errno.EIO, "Input/output error")
        self.done_at += self._rng.random() * self._longest_s
        if fault := self._weather.take("journal_stalls"):
            self.done_at += fault.amount * STALLED_S
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode):
            path, size = self._paths[descriptor], found.st_size
            self._pending.append(
                _Pending(at=self.done_at, path=path, size=size, act=lambda: self._durable.update({path: size}))
            )

    def remove(self, path: Path) -> None:
        """See ``Disk.remove``."""
        self.then(lambda: path.unlink(missing_ok=True))

    def then(self, act: Callable[[], None]) -> None:
        """Call ``act`` when all that was written so far is durable."""
        self._pending.append(_Pending(at=self.done_at, act=act))

    def advance(self, now: float) -> None:
        """Make durable what is due."""
        while self._pending and self._pending[0].at <= now:
            self._pending.popleft().act()

    def times(self) -> list[float]:
        """Return the times at which something becomes durable."""
        return list(dict.fromkeys(each.at for each in self._pending))

    def end(self) -> None:
        """Keep what is durable, and a random number of the bytes that follow it.

        A file is made only when the file before is whole, so nothing is left of a file behind a torn one.
        """
        is_torn = False
        for path, durable in self._durable.items():
            if not path.exists():
                continue
            size = path.stat().st_size
            kept = 0 if is_torn else self._rng.randint(durable, size)
            os.truncate(path, kept)
            if not kept and (is_torn or self._rng.random() < 0.5):
                path.unlink()
            is_torn = is_torn or kept < size or not durable


class _Signal:
    """A ``threading.Event`` that tells the loop."""

    def __init__(self, on_set: Callable[[], None]) -> None:
        self._on_set = on_set
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._on_set()

    def clear(self) -> None:
        self._is_set = False


class SteppedWriter(JournalWriter):
    """The writer without its thread: ``run`` becomes turns on the loop."""

    def __init__(
        self, *args: Any, disk: SlowDisk, on_commit: Callable[[], None], on_error: Callable[[str], None], **options: Any
    ) -> None:
        self._slow_disk = disk
        self._publish = on_commit
        super().__init__(*args, disk=disk, on_commit=lambda: None, **options)
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._is_gathering = self._is_busy = False
        self.ended = Future[None]()
        """The thread's future."""
        self.wake: Any = _Signal(self._woken)
        self.due: Any = _Signal(self._hurried)

    @property
    def synced(self) -> int:
        """The largest sequence number that is on the disk.  Known only after the disk has answered."""
        return self._synced

    @synced.setter
    def synced(self, sequence: int) -> None:
        self._slow_disk.then(lambda: self._confirm(sequence))

    _synced = 0

    def _confirm(self, sequence: int) -> None:
        self._synced = sequence
        self._publish()

    # ---- the turns

    def _woken(self) -> None:
        if not self._is_busy and not self._is_gathering:
            self._gather_soon()

    def _hurried(self) -> None:
        if self._is_gathering:
            self._call_at(self._loop.time(), self._turn)

    def _gather_soon(self) -> None:
        """Wait for more records of a commit, unless it is due."""
        self._is_gathering = True
        is_due = self.due.is_set() or self._is_at_once
        self._call_at(self._loop.time() + (0.0 if is_due else COMMIT_S), self._turn)

    def _call_at(self, when: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, act)

    def _turn(self) -> None:
        """Write what is queued, and wait for the disk."""
        self._is_gathering, self._is_busy = False, True
        self.wake.clear()
        self.due.clear()
        self._slow_disk.begin(self._loop.time())
        try:
            for _ in self._steps():
                pass
            if not self.is_off:
                self._commit()
        except Exception as error:  # noqa: BLE001 (as in the thread)
            self._on_error(first_line(error))
        self._wait_for_disk()

    def _wait_for_disk(self) -> None:
        self._slow_disk.advance(self._loop.time())
        if (done_at := self._slow_disk.done_at) > self._loop.time():
            for at in self._slow_disk.times():
                self._loop.call_at(at, lambda: self._slow_disk.advance(self._loop.time()))
            self._call_at(done_at, self._wait_for_disk)
            return
        self._is_busy = False
        if self._is_ending or self.is_off:
            self._is_busy = True
            self.end()
            self.ended.set_result(None)
        elif self.queue:
            self._gather_soon()
        else:
            self._call_at(self._loop.time() + IDLE_S, self._turn)

    def end(self) -> None:
        """Close the file, as ``run`` does in any case."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SimJournal(Journal):
    """The journal of one process.  ``note`` gets each record with its sequence number."""

    def __init__(
        self,
        folder: Path,
        run_epoch: int,
        *,
        delivered: Callable[[], int],
        disk: SlowDisk,
        note: Callable[[int, Record], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(folder, run_epoch, delivered=delivered, disk=disk)
        self.run_epoch = run_epoch
        self._say = say
        self._slow_disk = disk
        self._note = note
        self._finished = dict[GroupId, int]()
        self._stepped = SteppedWriter(
            folder, run_epoch, delivered=delivered, disk=disk, on_commit=self._committed, on_error=self._switch_off
        )
        self._writer = self._stepped
        self._thread = self._stepped.ended

    def append(self, record: Record) -> int:
        """See ``Journal.append``."""
        before = self._sequence
        sequence = super().append(record)
        if sequence > before:
            if isinstance(record, Finished):
                self._finished[record.group.group_id] = sequence
            self._note(sequence, record)
        return sequence

    def has(self, group_id: GroupId) -> bool:
        """Return whether the content of a group is durable, or the journal is off."""
        sequence = self._finished.get(group_id)
        return self.problem is not None or (sequence is not None and sequence <= self._stepped.synced)

    @property
    def num_durable(self) -> int:
        """The largest sequence number that was confirmed."""
        return self._stepped.synced

    def end(self) -> None:
        """End as the process does: what is not durable is torn."""
        self._stepped.end()
        self._slow_disk.end()

    def _switch_off(self, problem: str) -> None:
        if self.problem is None:
            self._say(f"the journal is off: {problem}")
        super()._switch_off(problem)

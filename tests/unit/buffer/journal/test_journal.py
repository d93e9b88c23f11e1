import asyncio
import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.buffer.journal import Delivered, Finished, Journal, Record, Snapshot, Taken, Wasted, read, recover
from asyncrl.buffer.journal.segments import segments
from asyncrl.buffer.journal.writer import COMMIT_BYTES
from asyncrl.token_columns import Routes
from tests.unit.buffer.journal.disks import BrokenDisk, CountingDisk, FolderlessDisk, FullDisk, StalledDisk, write
from tests.unit.buffer.journal.made import bits, finished, grown, held

ROOT = Path(__file__).parents[4]
SHORT_S = 3.0
"""Seconds in the place of STALL_S."""
SNAPSHOT = Snapshot(step=0, state={}, held=())


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test on a real loop, because a thread and a disk are part of it."""

    async def limited() -> None:
        async with asyncio.timeout(20.0):
            await work

    asyncio.run(limited())


def records(folder: Path) -> list[Record]:
    return [record for _, record in read(folder) if not isinstance(record, Delivered)]


def numbers(folder: Path) -> list[int]:
    return [each.number for each in segments(folder)]


def test_a_durable_record_can_be_read_while_the_journal_is_open(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path / "journal", 1, delivered=lambda: 5)
        await journal.durable(journal.append(finished(3)))
        assert bits(records(tmp_path / "journal")) == bits([finished(3)])
        await journal.close()

    run(work())


def test_a_run_reads_its_own_batches_while_it_writes_more(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        assert await journal.steps_since(0) is None
        for record in (SNAPSHOT, finished(3), finished(4), Taken(step=0, group_ids=(finished(4).group.group_id,))):
            journal.append(record)
        found = await journal.steps_since(0)
        assert found is not None
        journal.append(finished(5))
        assert found.missing(range(3)) == [1, 2]
        batch = await found.batch(0)
        assert (batch.step, [group.group_id for group in batch.groups]) == (0, [4])
        assert await journal.steps_since(7) is None
        await journal.close()
        assert await journal.steps_since(0) is None

    run(work())


def test_records_of_one_moment_are_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may take longer over the records than a commit waits for more of them.
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 15.0)
    disk = CountingDisk()

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=disk)
        opened = journal.append(Wasted(num_tokens=1))
        journal.hurry()
        await journal.durable(opened)
        opening = disk.num_synced
        sequences = [journal.append(finished(number)) for number in range(50)]
        journal.hurry()
        async with asyncio.TaskGroup() as waits:
            for each in sequences:
                waits.create_task(journal.durable(each))
        assert disk.num_synced == opening + 1
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 51


def test_groups_that_finish_soon_after_each_other_are_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 2.0)
    disk = CountingDisk()

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=disk)
        await journal.durable(journal.append(Wasted(num_tokens=1)))
        opening = disk.num_synced
        async with asyncio.TaskGroup() as waits:
            for number in range(5):
                waits.create_task(journal.durable(journal.append(finished(number))))
                await asyncio.sleep(0.05)
            assert disk.num_synced == opening
        assert disk.num_synced == opening + 1
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 6


def test_a_commit_in_a_hurry_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch may wait for it."""
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 30.0)

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 0)
        for _ in range(20):  # the thread may wake between two calls, or after them
            sequence = journal.append(Wasted(num_tokens=1))
            journal.hurry()
            await journal.durable(sequence)
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 20


def test_a_full_commit_does_not_wait_for_the_rest_of_its_time(tmp_path: Path) -> None:
    num_tokens = COMMIT_BYTES // 16
    disk = CountingDisk()

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=disk)
        await journal.durable(journal.append(Wasted(num_tokens=1)))
        opening = disk.num_synced
        for number in range(4):
            journal.append(finished(number, tokens=num_tokens))
        await journal.close()
        assert disk.num_synced >= opening + 4

    run(work())
    assert len(records(tmp_path)) == 5


def test_records_that_a_full_commit_leaves_behind_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are in a hurry, but the estimate knows nothing of metadata."""
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 20.0)

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        for number in range(5):
            last = journal.append(with_metadata(finished(number), COMMIT_BYTES))
        journal.hurry()
        async with asyncio.timeout(10):
            await journal.durable(last)
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 5


def with_metadata(record: Finished, num_bytes: int) -> Finished:
    prompt = replace(record.group.prompt, metadata={"page": "a" * num_bytes})
    return replace(record, group=replace(record.group, prompt=prompt))


@pytest.mark.parametrize("what", ["text", "routes"])
def test_texts_and_routes_fill_a_commit(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 20.0)
    record = finished(3)
    first, second = record.group.samples
    experts = np.zeros((3, 1, COMMIT_BYTES // 3 + 1), np.uint8)
    more = {"text": "a" * COMMIT_BYTES} if what == "text" else {"routes": Routes(experts_NLK=experts)}
    samples = (replace(first, sample=replace(first.sample, **more)), second)

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        async with asyncio.timeout(10):
            await journal.durable(journal.append(replace(record, group=replace(record.group, samples=samples))))
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 1


def test_delivered_tokens_are_written_without_records(tmp_path: Path) -> None:
    delivered = [5]

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: delivered[0])
        await journal.durable(journal.append(Wasted(num_tokens=1)))
        delivered[0] = 7
        while [record for _, record in read(tmp_path)][-1] != Delivered(num_tokens=7):  # noqa: ASYNC110 (a thread ends the wait)
            await asyncio.sleep(0.1)
        delivered[0] = 9
        await journal.close()

    run(work())
    assert [record for _, record in read(tmp_path)][-1] == Delivered(num_tokens=9)


def test_a_snapshot_begins_a_segment(tmp_path: Path) -> None:
    write(tmp_path, [Wasted(num_tokens=1), SNAPSHOT, Wasted(num_tokens=2), replace(SNAPSHOT, step=1)])
    assert numbers(tmp_path) == [1, 2, 3]
    assert records(tmp_path) == [Wasted(num_tokens=1), SNAPSHOT, Wasted(num_tokens=2), replace(SNAPSHOT, step=1)]


def test_another_journal_continues_in_a_segment_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, [Wasted(num_tokens=1)], run_epoch=1)
    write(tmp_path, [Wasted(num_tokens=2)], run_epoch=1)
    assert numbers(tmp_path) == [1, 2]
    assert records(tmp_path) == [Wasted(num_tokens=1), Wasted(num_tokens=2)]


def test_only_the_user_can_read_a_segment(tmp_path: Path) -> None:
    write(tmp_path, [Wasted(num_tokens=1)])
    assert segments(tmp_path)[0].path.stat().st_mode & 0o777 == 0o600


WRITES = """
import asyncio, sys
from pathlib import Path
from asyncrl.buffer.journal import Journal
from tests.unit.buffer.journal.made import finished

async def main():
    journal = Journal(Path(sys.argv[1]), 1, delivered=lambda: 5)
    for number in range(10_000):
        await journal.durable(journal.append(finished(number)))
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_killed_process_loses_nothing_that_was_confirmed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 5:
                process.kill()
        process.wait()
    left = [bits(record) for record in records(tmp_path)]
    assert len(left) >= 6
    assert left == [bits(finished(number)) for number in range(len(left))]


# ---- failures of the disk


def is_off(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """One loud warning, and no more."""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "THE JOURNAL IS OFF" in warnings[0].getMessage()
    assert text in warnings[0].getMessage()


async def goes_without(journal: Journal) -> None:
    """Every method still works, at once."""
    start = time.monotonic()
    sequence = journal.append(finished(9))
    journal.begin_segment(SNAPSHOT)
    journal.checkpointed(0)
    await journal.durable(sequence)
    await journal.close()
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("num_bytes", [0, 30, 100, 400])
def test_a_full_disk_switches_the_journal_off(num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=FullDisk(num_bytes))
        for number in range(3):
            await journal.durable(journal.append(finished(number)))
        assert "No space left on device" in str(journal.problem)
        await goes_without(journal)

    run(work())
    is_off(caplog, "No space left on device")
    left = [bits(record) for record in records(tmp_path)]
    assert left == [bits(finished(number)) for number in range(len(left))]


@pytest.mark.parametrize("num_synced", range(4))
def test_a_disk_that_cannot_sync_switches_the_journal_off(
    num_synced: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=BrokenDisk(num_synced))
        for number in range(3):
            await journal.durable(journal.append(finished(number)))
        await goes_without(journal)

    run(work())
    is_off(caplog, "Input/output error")


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_flushes_of_folders_keeps_the_journal(reason: int, tmp_path: Path) -> None:
    write(tmp_path, [finished(number) for number in range(3)], disk=FolderlessDisk(reason))
    assert [bits(record) for record in records(tmp_path)] == [bits(finished(number)) for number in range(3)]


def test_a_folder_that_cannot_be_flushed_switches_the_journal_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=FolderlessDisk(errno.EIO))
        await journal.durable(journal.append(finished(0)))
        await goes_without(journal)

    run(work())
    is_off(caplog, "Input/output error")


def test_a_stalled_disk_switches_the_journal_off_after_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = StalledDisk()

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=disk, stall_s=SHORT_S)
        await journal.durable(journal.append(finished(0)))
        disk.stalls.set()
        start = time.monotonic()
        sequences = [journal.append(finished(number)) for number in range(1, 4)]
        async with asyncio.TaskGroup() as waits:
            for each in sequences:
                waits.create_task(journal.durable(each))
        assert SHORT_S * 0.9 < time.monotonic() - start < SHORT_S + 5.0
        await goes_without(journal)

    run(work())
    is_off(caplog, f"the disk has not answered for {SHORT_S:g} s")
    before = len(threading.enumerate())
    disk.continues.set()
    ended(
        lambda: len(threading.enumerate()) < before or not any(each.name == "journal" for each in threading.enumerate())
    )


def ended(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_stalls_at_the_end_does_not_hold_the_end_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = StalledDisk()

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5, disk=disk, stall_s=SHORT_S)
        await journal.durable(journal.append(finished(0)))
        disk.stalls.set()
        journal.append(finished(1))
        await journal.close()

    run(work())
    disk.continues.set()
    is_off(caplog, f"the disk has not answered for {SHORT_S:g} s")


def test_a_folder_that_cannot_be_made_switches_the_journal_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    async def work() -> None:
        journal = Journal(tmp_path / "file" / "journal", 1, delivered=lambda: 5)
        await journal.durable(journal.append(finished(0)))
        await goes_without(journal)

    run(work())
    is_off(caplog, "Not a directory")


def test_a_record_that_cannot_be_written_switches_the_journal_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = finished(0)
    first, second = made.group.samples
    wrong = replace(first.sample, token_ids=(-1,) * 3)
    group = replace(made.group, samples=(replace(first, sample=wrong), second))

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        await journal.durable(journal.append(replace(made, group=group)))
        await goes_without(journal)

    run(work())
    is_off(caplog, "can't convert negative value")


def test_a_newer_run_in_the_folder_switches_the_journal_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        await journal.durable(journal.append(finished(0)))
        newer = Journal(tmp_path, 2, delivered=lambda: 5)
        await newer.durable(newer.append(finished(1)))
        await journal.durable(journal.begin_segment(SNAPSHOT))
        await goes_without(journal)
        await newer.close()
        assert newer.problem is None

    run(work())
    is_off(caplog, "a run of epoch 2 writes there, and this one has 1")
    assert len(records(tmp_path)) == 2


def test_a_wait_that_is_cancelled_leaves_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.journal.writer.COMMIT_S", 15.0)  # it is on no disk before the wait begins

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await journal.durable(journal.append(finished(0)))
        last = journal.append(finished(1))
        journal.hurry()
        await journal.durable(last)
        await journal.close()
        await journal.close()

    run(work())
    assert len(records(tmp_path)) == 2


def test_a_commit_between_a_look_and_its_consequence_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, looks = threading.Event(), list[int]()
    look, tell = Journal._is_confirmed, Journal._committed  # noqa: SLF001

    def slow_look(journal: Journal, sequence: int) -> bool:
        looks.append(sequence)
        found = look(journal, sequence)
        if len(looks) == 2:  # the first look of ``_release``; the thread gets the GIL right after it
            assert committed.wait(10.0)
        return found

    def told(journal: Journal) -> None:
        tell(journal)
        committed.set()

    monkeypatch.setattr(Journal, "_is_confirmed", slow_look)
    monkeypatch.setattr(Journal, "_committed", told)

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 0)
        since = time.monotonic()
        await journal.durable(journal.append(finished(1)))
        assert time.monotonic() - since < 5.0, "the wait ended with its deadline"
        await journal.close()

    run(work())


def test_a_journal_that_wrote_nothing_closes(tmp_path: Path) -> None:
    run(Journal(tmp_path / "none", 1, delivered=lambda: 5).close())
    assert not (tmp_path / "none").exists()


def test_what_json_does_not_have_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def odd(group_id: int, key: str) -> Record:
        made = finished(group_id)
        first, second = made.group.samples
        samples = (replace(first, reward_parts={key: print, "fine": 1}), second)
        return replace(made, group=replace(made.group, samples=samples))

    write(tmp_path, [odd(0, "judge"), odd(1, "judge"), odd(2, "verdict")])
    texts = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert texts == ["judge", "verdict"]


# ---- deletion of segments


async def checkpoint(journal: Journal, step: int, *buffered: int) -> None:
    """Begin a checkpoint, and complete it."""
    snapshot = Snapshot(step=step, state={}, held=tuple(held(each, is_buffered=True) for each in buffered))
    journal.begin_segment(snapshot)
    journal.append(Wasted(num_tokens=step))
    journal.checkpointed(step)
    await journal.durable(journal.append(Wasted(num_tokens=step)))  # behind the deletion in the queue


def test_segments_before_a_checkpoint_are_deleted_unless_they_hold_groups_of_it(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        journal.begin_segment(SNAPSHOT)  # segment 1
        journal.append(finished(0))
        journal.append(finished(1))
        await checkpoint(journal, 1, 0, 1)  # 2
        assert numbers(tmp_path) == [1, 2]
        journal.append(finished(2))
        await checkpoint(journal, 2, 1, 2)  # 3
        assert numbers(tmp_path) == [1, 2, 3]
        journal.append(finished(1, reward=0.5))  # finished again: its record in 1 does not count any more
        await checkpoint(journal, 3, 1)  # 4
        assert numbers(tmp_path) == [3, 4]
        await checkpoint(journal, 4)  # 5
        assert numbers(tmp_path) == [5]
        await journal.close()

    run(work())


def test_segments_with_tokens_of_groups_in_flight_stay(tmp_path: Path) -> None:
    def snapshot(step: int, *in_flight: int) -> Snapshot:
        return Snapshot(step=step, state={}, held=tuple(held(each, is_buffered=False) for each in in_flight))

    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        journal.begin_segment(SNAPSHOT)  # segment 1
        journal.append(grown(7, 0, 4))
        journal.begin_segment(snapshot(1, 7))  # 2
        journal.append(grown(7, 4, 9))
        journal.begin_segment(snapshot(2, 7))  # 3
        journal.checkpointed(2)
        await journal.close()

    run(work())
    assert numbers(tmp_path) == [1, 2, 3]
    found = recover(tmp_path, 2)
    assert found is not None
    assert bits(found.growth) == bits({7: (grown(7, 0, 4), grown(7, 4, 9))})

    async def later() -> None:
        journal = Journal(tmp_path, 2, delivered=lambda: 5)  # it reads what the other wrote
        await checkpoint(journal, 3)
        await journal.close()

    run(later())
    assert numbers(tmp_path) == [4]


def test_a_later_checkpoint_that_is_being_written_keeps_its_segments(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        journal.begin_segment(SNAPSHOT)
        journal.begin_segment(replace(SNAPSHOT, step=1))
        journal.append(finished(0))
        journal.begin_segment(Snapshot(step=2, state={}, held=(held(0, is_buffered=True),)))
        journal.checkpointed(1)
        await journal.close()

    run(work())
    assert numbers(tmp_path) == [2, 3]


def test_segments_of_earlier_journals_are_deleted_too(tmp_path: Path) -> None:
    write(tmp_path, [SNAPSHOT, finished(0)], run_epoch=1)
    write(tmp_path, [finished(1)], run_epoch=2)

    async def work() -> None:
        journal = Journal(tmp_path, 3, delivered=lambda: 5)
        await checkpoint(journal, 1, 1)
        assert numbers(tmp_path) == [2, 3]
        recovered = recover(tmp_path, 1)
        assert recovered is not None
        assert bits(recovered.buffered) == bits((finished(1),))
        await checkpoint(journal, 2)
        assert numbers(tmp_path) == [4]
        await journal.close()

    run(work())


def test_a_checkpoint_without_a_snapshot_deletes_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        journal = Journal(tmp_path, 1, delivered=lambda: 5)
        journal.begin_segment(SNAPSHOT)
        journal.begin_segment(replace(SNAPSHOT, step=1))
        journal.checkpointed(7)
        await journal.close()

    run(work())
    assert numbers(tmp_path) == [1, 2]

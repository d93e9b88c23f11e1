"""The journal of a life: its disk, and the writer without its thread."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from asyncrl.buffer.journal import Delivered, Record, Trained, read
from asyncrl.sim.faults.journal import SimJournal, SlowDisk
from asyncrl.sim.faults.loop import LifeLoop, run_life
from asyncrl.sim.faults.world.plan import Fault, Weather


def disk_with(*kinds: str, seed: int = 1, longest_s: float = 0.1, amount: float = 0.9) -> SlowDisk:
    weather = Weather(1, lambda: 0.0, lambda line: None)
    for number, kind in enumerate(kinds):
        weather.begin(Fault(number=number, kind=kind, at=0.0, where=0, amount=amount))
    return SlowDisk(weather, random.Random(seed), longest_s)


def opened(folder: Path, disk: SlowDisk, said: list[str]) -> SimJournal:
    return SimJournal(folder, 1, delivered=lambda: 0, disk=disk, note=lambda *_: None, say=said.append)


def steps(folder: Path) -> list[int]:
    return [record.step for _, record in read(folder) if isinstance(record, Trained)]


def trained(step: int) -> Record:
    return Trained(step=step, is_skipped=False)


def test_records_are_durable_when_the_disk_has_answered(tmp_path: Path) -> None:
    async def main() -> None:
        journal = opened(tmp_path, disk_with(longest_s=1.0), [])
        sequence, start = journal.append(trained(0)), loop.time()
        assert journal.num_durable == 0
        await journal.durable(sequence)
        assert journal.num_durable == sequence
        assert loop.time() > start
        await journal.close()

    loop = LifeLoop()
    run_life(loop, main())
    loop.drop()
    assert steps(tmp_path) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_keeps_what_is_durable(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        journal = opened(tmp_path, disk_with(seed=seed), [])
        await journal.durable(journal.append(trained(0)))
        for step in range(1, 5):
            journal.append(trained(step))
        await asyncio.sleep(0.06)
        journal.end()

    loop = LifeLoop()
    run_life(loop, main())
    loop.drop()
    found = steps(tmp_path)
    assert found == list(range(len(found)))
    assert found


def test_nothing_is_left_behind_a_torn_file(tmp_path: Path) -> None:
    disk = disk_with(seed=3)
    for number in (1, 2):
        descriptor = disk.create(tmp_path / f"{number}")
        os.write(descriptor, bytes(100))
        os.close(descriptor)
    disk.end()
    assert not (tmp_path / "1").exists() or (tmp_path / "1").stat().st_size < 100
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize(
    ("kind", "text"),
    [("journal_full", "No space left"), ("journal_fails", "Input/output"), ("journal_stalls", "has not answered")],
)
def test_a_bad_disk_switches_the_journal_off(tmp_path: Path, kind: str, text: str) -> None:
    async def main() -> None:
        journal = opened(tmp_path, disk_with(kind), said)
        await journal.durable(journal.append(trained(0)))
        assert journal.append(trained(1)) == 1
        await journal.close()
        journal.end()

    said: list[str] = []
    loop = LifeLoop()
    run_life(loop, main())
    loop.drop()
    assert len(said) == 1
    assert text in said[0]


def test_an_idle_journal_writes_what_was_delivered(tmp_path: Path) -> None:
    async def main() -> None:
        delivered = 0
        journal = SimJournal(
            tmp_path, 1, delivered=lambda: delivered, disk=disk_with(), note=lambda *_: None, say=lambda line: None
        )
        await journal.durable(journal.append(trained(0)))
        delivered = 7
        await asyncio.sleep(3.0)
        journal.end()

    loop = LifeLoop()
    run_life(loop, main())
    loop.drop()
    assert [record for _, record in read(tmp_path)][-1] == Delivered(num_tokens=7)

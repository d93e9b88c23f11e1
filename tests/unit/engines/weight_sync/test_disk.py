"""``DiskUpdater`` with engines, a trainer and a disk that fail, hang or are slow."""

import asyncio
import shutil
from itertools import chain
from pathlib import Path

import pytest

from asyncrl.engines.weight_sync.disk import DiskUpdater, WeightReader, check_disk
from asyncrl.engines.weight_sync.membership import EngineMembership
from asyncrl.errors import ConfigError, EngineLost, EngineRejected, TrainerFailed, UpdateInterrupted, WeightUpdateFailed
from asyncrl.types import UpdateReport, Weights
from tests.steps import Step, failing, hanging, nothing
from tests.unit.engines.weight_sync.recorders import PausableRecorder, TwoBuckets


class Engine(PausableRecorder):
    """An engine that records its commands, and the weights that it finds in the folder."""

    def __init__(self, url: str, step: Step = nothing, still_s: float | None = None) -> None:
        super().__init__(url, step)
        self._still_s = still_s

    async def probe(self, timeout_s: float) -> None:
        """Answer every probe."""

    async def receive_folder(self, folder: Path, *, label: str, timeout_s: float) -> float | None:
        await self._do(f"{folder.name} {(folder / 'weights').read_text()} as {label}")
        return self._still_s


class Trainer(TwoBuckets):
    """A trainer with two buckets, whose weights are a number that each step raises."""

    def __init__(self, step: Step = nothing) -> None:
        self.number = 0
        self.written = 0
        self._step = step

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        await self._step("write")
        await asyncio.to_thread(self._write, folder)

    def _write(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "weights").write_text(str(self.number))
        self.written += 1


def updater_of(
    folder: Path,
    trainer: Trainer,
    *engines: Engine,
    timeout_s: float = 5.0,
    silence_s: float = 60.0,
    membership: EngineMembership[WeightReader] | None = None,
) -> DiskUpdater:
    return DiskUpdater(
        membership or EngineMembership(engines),
        trainer,
        folder=folder / "disk",
        timeout_s=timeout_s,
        silence_s=silence_s,
        lost_s=0.05,
    )


async def update(updater: DiskUpdater, trainer: Trainer, version: int) -> UpdateReport:
    """Take a snapshot, train one more step, and publish the snapshot."""
    trainer.number = version
    assert await updater.snapshot()
    trainer.number = -1
    return await updater.publish(Weights(version=version, step=6))


def failure(folder: Path, trainer: Trainer, *engines: Engine, timeout_s: float = 5.0, silence_s: float = 60.0) -> str:
    async def run() -> None:
        updater = updater_of(folder, trainer, *engines, timeout_s=timeout_s, silence_s=silence_s)
        await updater.connect()
        try:
            await update(updater, trainer, 3)
        finally:
            await updater.close()

    with pytest.raises(WeightUpdateFailed) as error:
        asyncio.run(run())
    return str(error.value)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "disk").iterdir())


def test_engines_pause_read_the_snapshot_and_continue(tmp_path: Path) -> None:
    a, b, trainer = Engine("a"), Engine("b"), Trainer()

    async def run() -> list[UpdateReport]:
        updater = updater_of(tmp_path, trainer, a, b)
        await updater.connect()
        return [await update(updater, trainer, version) for version in (3, 4, 5)]

    reports = asyncio.run(run())
    assert a.told == b.told
    rounds = [("pause in_place", f"version-{version} {version} as {version}", "continue") for version in (3, 4, 5)]
    assert a.told == list(chain.from_iterable(rounds))
    assert [report.num_bytes for report in reports] == [16, 16, 16]
    assert left(tmp_path) == ["version-4", "version-5"]


def test_a_pause_begins_when_engines_report_to_have_stood_still(tmp_path: Path) -> None:
    async def report(*engines: Engine) -> UpdateReport:
        trainer = Trainer()
        updater = updater_of(tmp_path / engines[-1].url, trainer, *engines)
        await updater.connect()
        return await update(updater, trainer, 3)

    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    a, b, c = Engine("a", still_s=300.0), Engine("b", still_s=100.0), Engine("c")
    told = asyncio.run(report(a, b))
    assert told.total_s >= told.pause_s >= 300.0
    assert asyncio.run(report(a, c)).pause_s < 100.0  # one does not know


def test_a_run_leaves_no_file(tmp_path: Path) -> None:
    trainer = Trainer()

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, Engine("a"))
        await updater.connect()
        await update(updater, trainer, 1)
        await updater.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)

    async def run() -> None:
        updater = updater_of(tmp_path, Trainer(), Engine("a"))
        try:
            with pytest.raises(WeightUpdateFailed, match="disk: File exists"):
                await updater.connect()
        finally:
            await updater.close()

    asyncio.run(run())
    assert left(tmp_path) == ["model"]


def test_a_folder_that_cannot_be_removed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        updater = updater_of(tmp_path, Trainer(), Engine("a"))
        await updater.connect()
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        await updater.close()

    asyncio.run(run())
    assert f"{tmp_path}/disk stays: [Errno 2] No such file or directory" in caplog.text


def test_a_failure_names_the_member_the_step_and_the_cause(tmp_path: Path) -> None:
    lost, boom = EngineLost("gone"), TrainerFailed("boom")
    said = failure(tmp_path, Trainer(), Engine("a"), Engine("b", failing("version-3 3 as 3", lost)))
    assert said == "reading the weights: b: gone"
    assert failure(tmp_path, Trainer(failing("write", boom)), Engine("a")) == "writing the weights: trainer: boom"
    said = failure(tmp_path, Trainer(), Engine("a", hanging("version-3 3 as 3")), timeout_s=0.1)
    assert said == "reading the weights: no answer from a within 0.2 s"  # 0.1 s for each bucket
    said = failure(tmp_path, Trainer(), Engine("a", hanging("version-3 3 as 3")), silence_s=0.1)
    assert said.endswith("requests that may be silent no longer (request-timeout-s): no answer from a within 0.1 s")


def test_engines_continue_if_nothing_was_read_and_stay_paused_otherwise(tmp_path: Path) -> None:
    a = Engine("a")
    failure(tmp_path, Trainer(), a, Engine("b", failing("pause in_place", EngineLost("gone"))))
    assert a.told == ["pause in_place", "continue"]
    a = Engine("a")
    failure(tmp_path, Trainer(), a, Engine("b", failing("version-3 3 as 3", EngineLost("gone"))))
    assert "continue" not in a.told


def test_a_lost_engine_interrupts_the_update_and_is_left_out_of_the_next_one(tmp_path: Path) -> None:
    a, c, trainer = Engine("a"), Engine("c"), Trainer()

    async def dies(step: str) -> None:
        if step.startswith("version-3"):
            membership.mark_lost("b")
            raise EngineLost("gone")

    b = Engine("b", dies)
    membership: EngineMembership[WeightReader] = EngineMembership((a, b, c))

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=membership)
        await updater.connect()
        await update(updater, trainer, 2)
        with pytest.raises(UpdateInterrupted, match="b: gone"):
            await update(updater, trainer, 3)
        assert left(tmp_path) == ["version-2", "version-3"]
        trainer.number = 4
        await updater.snapshot()
        assert left(tmp_path) == ["taken", "version-2"]  # never more than two
        await updater.publish(Weights(version=4, step=6))

    asyncio.run(run())
    assert a.told[-3:] == c.told[-3:] == ["pause in_place", "version-4 4 as 4", "continue"]
    assert b.told[-2:] == ["pause in_place", "version-3 3 as 3"]
    assert left(tmp_path) == ["version-2", "version-4"]


def test_the_snapshot_is_read_again_by_the_remaining_and_the_restarted_engines(tmp_path: Path) -> None:
    a, trainer = Engine("a"), Trainer()

    async def dies(step: str) -> None:
        if step == "version-3 3 as 3":
            membership.mark_lost("b")
            raise EngineLost("gone")

    b = Engine("b", dies)
    membership: EngineMembership[WeightReader] = EngineMembership((a, b))

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=membership)
        await updater.connect()
        assert not await updater.resnapshot()
        await update(updater, trainer, 2)
        with pytest.raises(UpdateInterrupted):
            await update(updater, trainer, 3)
        for version in (4, 5):
            assert await updater.resnapshot()
            await updater.publish(Weights(version=version, step=3))
            membership.mark_restarted("b")
        assert left(tmp_path) == ["version-2", "version-3"]
        await update(updater, trainer, 6)

    asyncio.run(run())
    assert trainer.written == 3
    assert a.told[-6:] == [
        "pause in_place",
        "version-3 3 as 5",
        "continue",
        "pause in_place",
        "version-6 6 as 6",
        "continue",
    ]
    assert b.told[-6:] == a.told[-6:]
    assert left(tmp_path) == ["version-3", "version-6"]


def test_the_remaining_engines_finish_reading_before_they_read_again(tmp_path: Path) -> None:
    ended: list[str] = []

    async def slow(step: str) -> None:
        if step.startswith("version"):
            await asyncio.sleep(0.2)
            ended.append(step)

    a = Engine("a", slow)
    failure(tmp_path, Trainer(), a, Engine("b", failing("version-3 3 as 3", EngineLost("gone"))))
    assert ended == ["version-3 3 as 3"]


def test_a_failure_of_engines_that_have_all_lived_since_it_began_is_final(tmp_path: Path) -> None:
    a, trainer = Engine("a", failing("version-4 4 as 4", EngineRejected("no such file"))), Trainer()
    membership: EngineMembership[WeightReader] = EngineMembership((a, Engine("b")))

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=membership)
        await updater.connect()
        membership.mark_lost("b")
        await update(updater, trainer, 3)
        membership.mark_restarted("b")
        with pytest.raises(WeightUpdateFailed) as error:
            await update(updater, trainer, 4)
        assert not isinstance(error.value, UpdateInterrupted)

    asyncio.run(run())


def test_written_weights_are_read_again_after_a_connection_broke(tmp_path: Path) -> None:
    a, trainer = Engine("a", failing("version-3 3 as 3", EngineLost("connection reset"))), Trainer()

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=EngineMembership((a,)))
        await updater.connect()
        with pytest.raises(UpdateInterrupted):
            await update(updater, trainer, 3)
        assert await updater.resnapshot()
        await updater.publish(Weights(version=4, step=6))

    asyncio.run(run())
    assert a.told[-2:] == ["version-3 3 as 4", "continue"]


def test_without_engines_nothing_is_written_and_a_restarted_engine_gets_its_update(tmp_path: Path) -> None:
    a, trainer = Engine("a"), Trainer()
    membership: EngineMembership[WeightReader] = EngineMembership((a,))

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=membership)
        await updater.connect()
        membership.mark_lost("a")
        report = await update(updater, trainer, 1)
        assert (report.num_bytes, trainer.written) == (0, 0)
        membership.mark_restarted("a")
        async with asyncio.timeout(1.0):
            await updater.wait_for_rejoined()
        await update(updater, trainer, 2)
        async with asyncio.timeout(1.0):
            await membership.wait_until_synced("a")

    asyncio.run(run())
    assert a.told == ["pause in_place", "version-2 2 as 2", "continue"]


def test_a_disk_that_this_process_does_not_share_is_named(tmp_path: Path) -> None:
    class WritesElsewhere(Trainer):
        async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
            """Write the weights to the disk of another machine."""

    said = failure(tmp_path, WritesElsewhere(), Engine("a"))
    assert f"{tmp_path}/disk/taken: No such file or directory" in said
    assert "must share the disk" in said


def test_a_folder_that_cannot_take_the_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    check_disk(tmp_path / "not" / "there" / "yet", 1000)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file/x: cannot be written to: Not a directory$"):
        check_disk(tmp_path / "file" / "x", 1000)
    with pytest.raises(ConfigError, match=r"^update-weight-disk-dir /proc/x: cannot be written to: "):
        check_disk(Path("/proc/x"), 1000)
    with pytest.raises(ConfigError, match=r"GB are free, 2 sets of weights take 2000000000\.0 GB$"):
        check_disk(tmp_path, 10**18)


def test_a_snapshot_older_than_the_last_update_is_not_read_again(tmp_path: Path) -> None:
    a, trainer = Engine("a"), Trainer()
    membership: EngineMembership[WeightReader] = EngineMembership((a,))

    async def run() -> None:
        updater = updater_of(tmp_path, trainer, membership=membership)
        await updater.connect()
        await update(updater, trainer, 1)
        membership.mark_lost("a")
        await update(updater, trainer, 2)  # there is no engine to write for
        membership.mark_restarted("a")
        assert not await updater.resnapshot()

    asyncio.run(run())
    assert trainer.written == 1

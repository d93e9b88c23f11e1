"""The lease of ``--save`` during a run."""

import asyncio
import errno
import logging
import shutil
import time
from pathlib import Path
from threading import Event

import pytest

from asyncrl.buffer.journal import Journal, Snapshot
from asyncrl.buffer.journal.reader import opened
from asyncrl.config import CheckpointConfig
from asyncrl.engines.megatron.checkpoint import held as module
from asyncrl.engines.megatron.checkpoint import lease
from asyncrl.engines.megatron.checkpoint.held import held
from asyncrl.engines.megatron.checkpoint.lease import Claim, release, take
from asyncrl.errors import ConfigError, LeaseLost, NotNow
from asyncrl.pipeline.recovery import last_epoch
from tests.unit.engines.megatron.checkpoint.test_directory import written


def quiet(line: str) -> None:
    pass


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(lease, "EXPIRES_S", 0.5)


def test_no_folder_needs_no_lease(tmp_path: Path) -> None:
    with held(CheckpointConfig(load=tmp_path), quiet) as found:
        assert found is None
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_takes_the_folder_at_once(tmp_path: Path) -> None:
    saves = CheckpointConfig(save=tmp_path / "new")
    for token in (1, 2):
        with held(saves, quiet) as found:
            assert found is not None
            assert found.claim.token == token


def test_a_journal_that_was_copied_without_its_leases_is_continued(tmp_path: Path) -> None:
    def run(save: Path) -> str | None:
        with held(CheckpointConfig(save=save), quiet, last_epoch) as found:
            assert found is not None

            async def write() -> str | None:
                journal = Journal(save / "journal", found.claim.token, delivered=lambda: 0)
                await journal.durable(journal.append(Snapshot(step=0, state={}, held=())))
                await journal.close()
                return journal.problem

            return asyncio.run(write())

    assert [run(tmp_path / "one") for _ in range(3)] == [None] * 3
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns(".*"))
    assert [run(tmp_path / "two") for _ in range(2)] == [None] * 2
    assert [each.header.run_epoch for each in opened(tmp_path / "two" / "journal")] == [1, 2, 3, 4, 5]


def test_a_run_ends_when_another_one_takes_its_folder(tmp_path: Path) -> None:
    async def watched() -> None:
        with held(CheckpointConfig(save=tmp_path), quiet) as found:
            assert found is not None
            release(found.claim)
            other = take(tmp_path, quiet)
            with pytest.raises(LeaseLost, match=f"held by run {other.run}"):
                async with asyncio.timeout(5):
                    await found.watch()
        assert not (tmp_path / ".lease" / f"{other.token:07}.released").exists()

    asyncio.run(watched())


def test_watching_ends_with_its_task(tmp_path: Path) -> None:
    async def cancelled() -> None:
        with held(CheckpointConfig(save=tmp_path), quiet) as found:
            assert found is not None
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(found.watch())
                await asyncio.sleep(0.2)  # some heartbeats
                watching.cancel()

    asyncio.run(cancelled())


def test_an_outage_of_the_file_system_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    beats: list[int] = []

    def renew(claim: Claim) -> None:
        beats.append(len(beats))
        if len(beats) in (1, 2, 4):
            raise OSError(116, "Stale file handle")

    monkeypatch.setattr(module, "renew", renew)

    async def long_enough() -> None:
        with held(CheckpointConfig(save=tmp_path), quiet) as found:
            assert found is not None
            async with asyncio.TaskGroup() as group, asyncio.timeout(20):
                watching = group.create_task(found.watch())
                while len(beats) < 5:  # noqa: ASYNC110 (a thread gives them)
                    await asyncio.sleep(0.02)
                assert not watching.done()
                watching.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(long_enough())
    assert caplog.text.count("no heartbeat of its lease: [Errno 116] Stale file handle") == 2  # once for each outage


def test_a_disk_that_does_not_answer_does_not_keep_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Event()

    def hangs(claim: Claim) -> None:
        answers.wait(20.0)

    monkeypatch.setattr(module, "release", hangs)
    monkeypatch.setattr(module, "RELEASE_S", 0.2)
    with caplog.at_level(logging.WARNING), held(CheckpointConfig(save=tmp_path), quiet):
        began = time.monotonic()
    answers.set()
    assert time.monotonic() - began < 10.0
    assert "its lease was not released, and expires: no answer within 0.2 s" in caplog.text


def test_a_folder_that_cannot_be_claimed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lease").write_text("")
    with (
        pytest.raises(ConfigError, match=rf"save {tmp_path}: its lease cannot be taken: .*exists"),
        held(CheckpointConfig(save=tmp_path), quiet),
    ):
        raise AssertionError("the run began")


def test_a_disk_that_does_not_answer_is_tried_again_by_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(root: Path, say: object, after: int = 0) -> Claim:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(module, "take", take)
    with (
        pytest.raises(NotNow, match=rf"save {tmp_path}: its lease cannot be taken: .*Stale"),
        held(CheckpointConfig(save=tmp_path), quiet),
    ):
        raise AssertionError("the run began")


def test_a_folder_of_another_run_is_refused_before_anything_is_removed(tmp_path: Path) -> None:
    written(tmp_path, 5)
    (tmp_path / "iter_0000010.partial").mkdir()
    with (
        pytest.raises(ConfigError, match="has checkpoints of another run"),
        held(CheckpointConfig(save=tmp_path), quiet),
    ):
        raise AssertionError("the run began")
    assert (tmp_path / "iter_0000010.partial").exists()

"""Two runs, or one after another, write to one folder: every way in which they meet leaves whole checkpoints."""

import errno
import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from threading import Event, Lock

import pytest

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.engines.megatron.checkpoint import writes
from asyncrl.engines.megatron.checkpoint.checksums import Part, checksum
from asyncrl.engines.megatron.checkpoint.directory import latest, read_notes
from asyncrl.engines.megatron.checkpoint.lease import Claim, check, release, take
from asyncrl.engines.megatron.checkpoint.writes import Permit, Target, commit, fence, open_partial
from asyncrl.errors import CheckpointFailed, LeaseLost
from tests.save_targets import claim, target
from tests.unit.engines.megatron.checkpoint.test_directory import written

SHARD = "__0_0.distcp"


def next_run(root: Path, before: Claim) -> Claim:
    """The claim of a run that takes the folder after the run ``before``, which does not know."""
    release(before)
    after = take(root, say=lambda line: None)
    fence(after)
    return after


def filled(made: Target, content: bytes) -> dict[str, list[Part]]:
    """Write a shard and the description to the partial folder, and return the parts of the shard."""
    open_partial(made)
    (made.partial / SHARD).write_bytes(content)
    for name in (".metadata", "metadata.json"):
        (made.partial / name).write_text("{}")
    summed = checksum()
    summed.update(content)
    return {SHARD: [(0, len(content), summed.hexdigest())]}


def notes(run: str) -> bytes:
    return f'{{"model": {{}}, "run": {{"of": "{run}"}}}}'.encode()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("iter_*"))


def test_two_runs_cannot_mix_their_checkpoints(tmp_path: Path) -> None:
    first = claim(tmp_path)
    old = Target(claim=first, step=10)
    parts = filled(old, b"weights of run A")
    new = Target(claim=next_run(tmp_path, first), step=10)
    with pytest.raises(LeaseLost, match=rf"this run lost its lease .*: it is held by run {new.claim.run} \(process"):
        commit_again(old, parts)
    commit(new, notes("B"), filled(new, b"weights of run B"))
    with pytest.raises(LeaseLost):
        open_partial(old)
    with pytest.raises(LeaseLost):
        commit_again(old, parts)
    assert latest(tmp_path) == new.folder
    assert (new.folder / SHARD).read_bytes() == b"weights of run B"
    assert (read_notes(new.folder) or {})["run"] == {"of": "B"}


def commit_again(old: Target, parts: dict[str, list[Part]]) -> None:
    """Commit what a rank of the old run has written to the partial folder since it was removed."""
    old.partial.mkdir(exist_ok=True)
    (old.partial / SHARD).write_bytes(b"weights of run A")
    for name in (".metadata", "metadata.json"):
        (old.partial / name).write_text("{}")
    commit(old, notes("A"), parts)


@pytest.mark.parametrize("asleep_before", ["the checkpoint", "the tracker"])
def test_a_run_that_sleeps_between_its_check_and_its_rename_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asleep_before: str
) -> None:
    written(tmp_path, 5)
    old = target(tmp_path, 10)
    parts, checks, after = filled(old, b"weights of run A"), [], []

    def check_and_sleep(own: Claim) -> None:
        check(own)
        if own == old.claim:
            checks.append(own)
            if len(checks) == (1 if asleep_before == "the checkpoint" else 2):
                new = Target(claim=next_run(tmp_path, own), step=15)
                after.append(latest(tmp_path))  # what the new run sees when it starts
                commit(new, notes("B"), filled(new, b"weights of run B"))

    monkeypatch.setattr(writes, "check", check_and_sleep)
    with pytest.raises(FileNotFoundError):
        commit(old, notes("A"), parts)
    is_there = asleep_before == "the tracker"
    assert after == [tmp_path / "iter_0000005"]
    assert latest(tmp_path) == tmp_path / "iter_0000015"
    assert names(tmp_path) == ["iter_0000005", *(["iter_0000010"] if is_there else []), "iter_0000015"]


def test_a_replaced_checkpoint_returns_if_its_replacement_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 5, notes("before"))
    made = target(tmp_path, 5)
    parts = filled(made, b"again")
    monkeypatch.setattr(writes, "check", lambda own: fence(next_run(tmp_path, own)))
    with pytest.raises(FileNotFoundError):
        commit(made, notes("after"), parts)
    assert names(tmp_path) == ["iter_0000005"]
    assert (read_notes(made.folder) or {})["run"] == {"of": "before"}


@pytest.mark.parametrize("name", ["iter_0000010.partial", "iter_0000010.outdated"])
def test_a_folder_that_the_old_run_renames_first_stops_no_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, rename = claim(tmp_path), Path.rename
    (tmp_path / name).mkdir()

    def meanwhile(path: Path, to: Path) -> Path:
        shutil.rmtree(path)
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", meanwhile)
    fence(own)
    assert names(tmp_path) == []


def test_the_next_run_removes_what_earlier_runs_left(tmp_path: Path) -> None:
    written(tmp_path, 5)
    open_partial(target(tmp_path, 10))
    (tmp_path / "iter_0000015.partial").mkdir()  # of an earlier version
    (tmp_path / "iter_0000020.outdated").mkdir()
    (tmp_path / "iter_0000002.deleted").mkdir()
    (tmp_path / "notes.partial").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt.partial").touch()
    next_run(tmp_path, claim(tmp_path))
    assert names(tmp_path) == ["iter_0000005", "iter_0000020"]
    assert (tmp_path / "notes.partial").exists()  # none of ours
    assert sorted(path.name for path in tmp_path.glob("latest*")) == ["latest_checkpointed_iteration.txt"]


def test_an_unfinished_checkpoint_is_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    complete = written(tmp_path, 5)
    open_partial(target(tmp_path, 10))
    assert claim(tmp_path).run in names(tmp_path)[1]
    assert latest(tmp_path) == complete
    written(tmp_path, 15)
    assert names(tmp_path) == ["iter_0000005", "iter_0000015"]


def test_a_checkpoint_of_the_same_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (written(tmp_path, 5) / "__3_0.distcp").touch()
    again = written(tmp_path, 5, b'{"model": {}, "run": {"state": 2}}')
    assert names(tmp_path) == ["iter_0000005"]
    assert not (again / "__3_0.distcp").exists()
    assert read_notes(again) == {"model": {}, "run": {"state": 2}}


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (lambda shard: shard.write_bytes(b"half"), r"__0_0.distcp is torn: it has 4 bytes of 12"),
        (lambda shard: shard.unlink(), r"__0_0.distcp is missing: 12 bytes of it were written"),
    ],
)
def test_a_torn_shard_is_found_before_the_commit(tmp_path: Path, harm: object, line: str) -> None:
    complete = written(tmp_path, 5)
    made = target(tmp_path, 10)
    parts = filled(made, b"whole weight")
    assert callable(harm)
    harm(made.partial / SHARD)
    with pytest.raises(CheckpointFailed, match=line):
        commit(made, notes("A"), parts)
    assert latest(tmp_path) == complete


@pytest.mark.parametrize("stalls_before", ["the checkpoint", "the tracker"])
def test_a_save_that_was_given_up_changes_nothing_after_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalls_before: str
) -> None:
    early, late, lock, sync = target(tmp_path, 1), target(tmp_path, 2, keep=1), Lock(), writes.sync
    parts, permit, stalls, wakes = filled(early, b"early"), Permit(lock), Event(), Event()
    stalled_at = early.partial if stalls_before == "the checkpoint" else tmp_path

    def stalling(path: Path) -> None:
        if path == stalled_at and not stalls.is_set():
            stalls.set()
            assert wakes.wait(60.0)
        sync(path)

    monkeypatch.setattr(writes, "sync", stalling)
    saving = in_daemon_thread(lambda: commit(early, notes("A"), parts, permit), "early")
    assert stalls.wait(60.0)
    permit.withdraw()
    commit(late, notes("A"), filled(late, b"late"), Permit(lock))
    wakes.set()
    with pytest.raises((CheckpointFailed, FileNotFoundError), match=r"was given up|No such file"):
        saving.result(timeout=60.0)
    assert latest(tmp_path) == late.folder
    assert names(tmp_path) == ["iter_0000002"]


# ---- deletion


def kept(root: Path, step: int, keep: int, spared: Path | None = None) -> list[int]:
    """Write the checkpoint of ``step`` and return the steps of all that are left."""
    made = Target(claim=claim(root), step=step, keep=keep, spared=spared)
    commit(made, notes("A"), filled(made, b"weights"))
    return [int(name[5:12]) for name in names(root)]


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EIO])
def test_only_a_file_system_without_flushes_of_folders_may_refuse_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    flush = os.fsync

    def refused(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(reason, os.strerror(reason))
        flush(number)

    made = target(tmp_path, 10)
    parts = filled(made, b"weights")
    monkeypatch.setattr(os, "fsync", refused)
    with nullcontext() if reason == errno.EINVAL else pytest.raises(OSError, match="Input/output error"):
        commit(made, notes("A"), parts)
    assert (latest(tmp_path) is not None) == (reason == errno.EINVAL)


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    found = [kept(tmp_path, step, keep=2) for step in (5, 10, 15, 20)]
    assert found == [[5], [5, 10], [10, 15], [15, 20]]
    assert kept(tmp_path, 25, keep=1) == [25]


def test_the_checkpoint_that_the_run_started_from_is_kept(tmp_path: Path) -> None:
    start = written(tmp_path, 5)
    assert kept(tmp_path, 10, keep=1, spared=tmp_path / "." / start.name) == [5, 10]
    assert kept(tmp_path, 15, keep=1, spared=start) == [5, 15]


def test_checkpoints_of_later_steps_and_other_folders_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 20):
        written(tmp_path, step)
    (tmp_path / "iter_0000001").mkdir()  # not complete
    assert kept(tmp_path, 12, keep=1) == [1, 12, 20]
    assert latest(tmp_path) == tmp_path / "iter_0000012"


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 5)

    def refused(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(shutil, "rmtree", refused)
    kept(tmp_path, 10, keep=1)
    assert latest(tmp_path) == tmp_path / "iter_0000010"
    assert "old checkpoints were not deleted: [Errno 13]" in caplog.text

"""A run that stops and resumes trains like one that does not: the real Megatron on a CPU, through files."""

import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from asyncrl.engines.megatron.checkpoint import saver
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of, latest, read_notes
from asyncrl.engines.megatron.checkpoint.lease import release, take
from asyncrl.engines.megatron.checkpoint.writes import Target, commit
from asyncrl.engines.megatron.model.layers import RMSNorm
from asyncrl.engines.megatron.rank import MegatronRank
from asyncrl.errors import CheckpointFailed, LeaseLost
from asyncrl.types import TrainReport
from tests.engines.megatron.checkpoint import checkpoint_process
from tests.engines.megatron.tiny import VOCAB, one_rank, random_batch, trainer_settings, write_checkpoint
from tests.forks import Fork
from tests.save_targets import target as target_of

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # torch warns about calls by Megatron

DEADLINE_S = 360
"""Limit for a process that imports Megatron, which takes 10 to 50 s on two shared cores."""


def steps(rank: MegatronRank, first: int, last: int) -> list[TrainReport]:
    return [rank.train(random_batch(seed=step, step=step)) for step in range(first, last)]


def numbers(report: TrainReport) -> tuple[object, ...]:
    return report.loss, report.grad_norm, report.entropy, report.learning_rate, report.logprobs


def newest(root: Path) -> Path:
    folder = latest(root)
    assert folder is not None
    return folder


def resume(root: Path) -> Origin:
    return Origin(folder=newest(root), kind="resume", optimizer=True)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, dense: Path) -> Path:
    """A checkpoint after two steps."""
    root = tmp_path_factory.mktemp("saved")
    with one_rank(trainer_settings(dense)) as rank:
        steps(rank, 0, 2)
        rank.begin_checkpoint(target_of(root, 2), {}, with_optimizer=True)
        rank.finish_checkpoint()
        rank.save(root / "hf")
    return root


@pytest.mark.parametrize(("moe", "dtype"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
def test_five_steps_and_five_after_a_restart_equal_ten_steps(tmp_path: Path, moe: bool, dtype: str) -> None:
    settings = trainer_settings(write_checkpoint(tmp_path / "hf", moe=moe), dtype=dtype, lr_warmup_iters=8)
    with one_rank(settings) as rank:
        straight = steps(rank, 0, 10)
    with one_rank(settings) as rank:
        before = steps(rank, 0, 5)
        rank.begin_checkpoint(target_of(tmp_path / "saved", 5), {"step": 5}, with_optimizer=True)
        rank.train(random_batch(seed=99))  # the tensors being written are copies
        rank.finish_checkpoint()
        torch.rand(3)  # must not change the draws of the trainer
    drawn = torch.rand(1)
    with one_rank(settings) as rank:
        rank.load(resume(tmp_path / "saved"))
        assert torch.rand(1) != drawn
        after = steps(rank, 5, 10)
    assert [numbers(report) for report in before + after] == [numbers(report) for report in straight]
    notes = read_notes(folder_of(tmp_path / "saved", 5))
    assert notes is not None
    assert notes["run"] == {"step": 5}


def test_a_critic_resumes_even_before_the_first_policy_step(tmp_path: Path, dense: Path) -> None:
    settings = trainer_settings(dense, advantage_estimator="ppo", num_critic_only_steps=3)
    with one_rank(settings) as rank:
        straight = steps(rank, 0, 5)
    with one_rank(settings) as rank:
        before = steps(rank, 0, 2)
        rank.begin_checkpoint(target_of(tmp_path, 2), {}, with_optimizer=True)
        rank.finish_checkpoint()
    with one_rank(settings) as rank:
        rank.load(resume(tmp_path))
        after = steps(rank, 2, 5)
    assert [numbers(report) for report in before + after] == [numbers(report) for report in straight]
    assert [report.metrics for report in before + after] == [report.metrics for report in straight]


def test_random_number_generators_resume_their_state(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        rank.train(random_batch())
        torch.manual_seed(7)
        rank.begin_checkpoint(target_of(tmp_path, 1), {}, with_optimizer=True)
        expected = torch.rand(3)
        rank.finish_checkpoint()
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(resume(tmp_path))
        assert torch.equal(torch.rand(3), expected)


def test_extra_state_of_layers_may_be_absent_from_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, dense: Path, saved: Path
) -> None:
    """TransformerEngine's layers have extra state; Megatron's own, which may have written the checkpoint, have none."""
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(resume(saved))
        expected = numbers(rank.train(random_batch(step=2)))
    monkeypatch.setattr(RMSNorm, "get_extra_state", lambda self: torch.zeros(1), raising=False)
    monkeypatch.setattr(RMSNorm, "set_extra_state", lambda self, state: None, raising=False)
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(resume(saved))
        assert numbers(rank.train(random_batch(step=2))) == expected


def test_optimizer_settings_come_from_the_new_run(dense: Path, saved: Path) -> None:
    with one_rank(trainer_settings(dense, lr=7e-5, weight_decay=0.5, adam_beta2=0.9, adam_eps=1e-6)) as rank:
        rank.load(resume(saved))
        groups = rank._optimizer.param_groups  # noqa: SLF001
        assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
        assert {(group["betas"], group["eps"]) for group in groups} == {((0.9, 0.9), 1e-6)}
        assert rank.train(random_batch(step=2)).learning_rate == 7e-5


def test_weights_alone_start_with_a_fresh_optimizer(tmp_path: Path, dense: Path, saved: Path) -> None:
    trained = trainer_settings(dense)
    reports = []
    for origin in (
        Origin(folder=newest(saved), kind="weights"),
        Origin(folder=saved / "hf", kind="hugging_face"),
        resume(saved),
    ):
        with one_rank(trained) as rank:
            rank.load(origin)
            rank.train(random_batch(seed=1))
            reports.append(numbers(rank.train(random_batch(seed=2))))
    assert reports[0] == reports[1]
    assert reports[0] != reports[2]


def test_a_checkpoint_with_a_smaller_vocabulary_than_the_model_is_refused(tmp_path: Path, saved: Path) -> None:
    larger = trainer_settings(write_checkpoint(tmp_path / "hf", vocab_size=VOCAB + 32))
    with (
        one_rank(larger) as rank,
        pytest.raises(CheckpointFailed, match="has 96 rows, less than the model's vocabulary size 128"),
    ):
        rank.load(resume(saved))  # Megatron would have filled up with zeros


def test_the_optimizer_can_be_left_out(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        rank.train(random_batch())
        for name, keeps in (("with", True), ("without", False)):
            rank.begin_checkpoint(target_of(tmp_path / name, 1), {}, with_optimizer=keeps)
            rank.finish_checkpoint()
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).rglob("*.distcp")) for name in ("with", "without")]
    assert sizes[0] > 2.5 * sizes[1]  # two moments, and in bfloat16 a finer copy of the weights
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(replace(resume(tmp_path / "without"), optimizer=False))
        with pytest.raises(CheckpointFailed, match=r"cannot be loaded: it has no state of .* --no-load-optim begins"):
            rank.load(resume(tmp_path / "without"))


def test_a_save_waits_for_the_previous_one_and_both_remain(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        rank.train(random_batch())
        rank.begin_checkpoint(target_of(tmp_path, 1), {}, with_optimizer=True)
        rank.begin_checkpoint(target_of(tmp_path, 2), {}, with_optimizer=True)
        assert folder_of(tmp_path, 1).exists()
        rank.finish_checkpoint()
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert latest(tmp_path) == folder_of(tmp_path, 2)


def test_a_failed_save_raises_and_leaves_the_previous_checkpoint(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        rank.train(random_batch())
        rank.begin_checkpoint(target_of(tmp_path, 1), {}, with_optimizer=True)
        rank.finish_checkpoint()
        with checkpoint_process.file_size_limit():
            rank.begin_checkpoint(target_of(tmp_path, 2), {}, with_optimizer=True)
            # torch's writer does not say that a file is too large, or a disk full
            with pytest.raises(CheckpointFailed, match=r"iter_0000002: RuntimeError: .*unexpected pos"):
                rank.finish_checkpoint()
        assert not rank.check_checkpoint()  # the error is raised once
        assert latest(tmp_path) == folder_of(tmp_path, 1)
        assert not list(tmp_path.glob("*.partial"))
        rank.load(resume(tmp_path))


def test_a_rank_trains_on_after_a_failed_save_and_saves_again(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        with checkpoint_process.file_size_limit():
            rank.begin_checkpoint(target_of(tmp_path, 1), {}, with_optimizer=True)
            with pytest.raises(CheckpointFailed):
                rank.finish_checkpoint()
        blocked = target_of(tmp_path, 2)
        blocked.partial.touch()
        with pytest.raises(CheckpointFailed, match=r"iter_0000002 cannot be written: .*Not a directory"):
            rank.begin_checkpoint(blocked, {}, with_optimizer=True)
        blocked.partial.unlink()
        steps(rank, 0, 1)
        rank.begin_checkpoint(target_of(tmp_path, 3), {}, with_optimizer=True)
        rank.finish_checkpoint()
        assert latest(tmp_path) == folder_of(tmp_path, 3)


@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_checkpoint_whose_writing_was_killed_is_not_loaded(tmp_path: Path, dense: Path) -> None:
    """The kernel kills it within the first large file of its second checkpoint."""
    with Fork(checkpoint_process.__name__, dense, tmp_path, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGXFSZ, said
    (partial,) = tmp_path.glob("iter_0000002.*.partial")
    assert list(partial.glob("*.distcp"))
    assert latest(tmp_path) == folder_of(tmp_path, 1)
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(resume(tmp_path))


def test_every_part_is_checked_when_it_is_read(tmp_path: Path, dense: Path, saved: Path) -> None:
    """Each byte of the shards belongs to a part with a checksum; one that changed is found, and named."""
    folder = Path(shutil.copytree(newest(saved), tmp_path / "iter_0000002"))
    listed = orjson.loads((folder / "checksums.json").read_bytes())["files"]
    shards = sorted(folder.glob("*.distcp"))
    assert shards
    assert {path.name for path in folder.iterdir()} == {*listed, "checksums.json"}
    for shard in shards:
        places = [(offset, offset + length) for offset, length, _ in listed[shard.name]["parts"]]
        assert [place[0] for place in places] == [0, *(place[1] for place in places[:-1])]
        assert places[-1][1] == shard.stat().st_size
    with one_rank(trainer_settings(dense)) as rank:
        rank.load(Origin(folder=folder, kind="resume", optimizer=True))
    largest = max(shards, key=lambda path: path.stat().st_size)
    offset, length, _ = max(listed[largest.name]["parts"], key=lambda part: part[1])
    with largest.open("r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with (
        one_rank(trainer_settings(dense)) as rank,
        pytest.raises(CheckpointFailed, match=rf"{largest.name} is damaged: its {length:,} bytes from {offset:,} have"),
    ):
        rank.load(Origin(folder=folder, kind="resume", optimizer=True))


def test_a_run_that_lost_its_lease_writes_no_checkpoint(tmp_path: Path, dense: Path) -> None:
    with one_rank(trainer_settings(dense)) as rank:
        made = target_of(tmp_path, 1)
        rank.begin_checkpoint(made, {}, with_optimizer=True)
        rank.finish_checkpoint()
        release(made.claim)
        take(tmp_path, say=lambda line: None)
        with pytest.raises(LeaseLost, match="this run lost its lease and writes nothing more: it is held by run"):
            rank.begin_checkpoint(target_of(tmp_path, 2), {}, with_optimizer=True)
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000001"]


def test_a_lease_that_is_lost_while_files_are_written_stops_the_commit(
    tmp_path: Path, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit_late(made: Target, *written: Any) -> None:
        release(made.claim)
        take(tmp_path, say=lambda line: None)
        commit(made, *written)

    monkeypatch.setattr(saver, "commit", commit_late)
    with one_rank(trainer_settings(dense)) as rank:
        rank.begin_checkpoint(target_of(tmp_path, 1), {}, with_optimizer=True)
        with pytest.raises(LeaseLost):
            rank.finish_checkpoint()
    assert latest(tmp_path) is None

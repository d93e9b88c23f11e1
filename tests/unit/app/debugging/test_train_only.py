"""Training on saved batches, with a fake trainer."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.app.debugging import train_only
from asyncrl.app.debugging.train_only import train_on_files
from asyncrl.engines.fake import FakeTrainer
from asyncrl.errors import DataError
from asyncrl.metrics.facts import GroupCounts, StepFacts, TokenCounts
from asyncrl.rollout_log.batch_file import write_batch
from tests.unit.metrics.made import batch


def trained(folder: Path, trainer: FakeTrainer, *, num_updates: int = 1) -> list[StepFacts]:
    """Train two steps of ``num_updates`` on the files of ``folder``, and return their facts."""

    @asynccontextmanager
    async def deployed() -> AsyncIterator[FakeTrainer]:
        yield trainer

    facts: list[StepFacts] = []
    training = train_on_files(
        deployed(),
        range(2),
        lambda step: folder / f"{step}.batch",
        (TokenCounts(), GroupCounts()),
        num_updates=num_updates,
        save_to=folder / "model",
        phase=lambda text: None,
        report=facts.append,
        ending=nullcontext(),
    )
    asyncio.run(training)
    return facts


def test_each_file_is_a_step_and_the_final_weights_are_saved(tmp_path: Path) -> None:
    for step in range(2):
        write_batch(tmp_path / f"{step}.batch", batch(7))
    trainer = FakeTrainer(seconds=0.0)
    facts = trained(tmp_path, trainer)
    assert [each.batch.step for each in facts] == [0, 1]
    assert [each.groups for each in trainer.batches] == [batch(7).groups] * 2
    assert [each.scheduler.tokens.trained for each in facts] == [12, 24]
    assert trainer.saved == [tmp_path / "model"]


def test_a_file_with_fewer_groups_than_updates_ends_the_run_with_one_line(tmp_path: Path) -> None:
    write_batch(tmp_path / "0.batch", batch(0))
    trainer = FakeTrainer(seconds=0.0)
    with pytest.raises(DataError, match=r"0\.batch has 2 groups, .* 3 optimizer updates \(num-steps-per-rollout"):
        trained(tmp_path, trainer, num_updates=3)
    assert trainer.batches == []


def test_groups_of_files_of_different_sizes_are_counted(tmp_path: Path) -> None:
    whole = batch(0)
    write_batch(tmp_path / "0.batch", whole)
    write_batch(tmp_path / "1.batch", replace(whole, groups=whole.groups[:1]))
    facts = trained(tmp_path, FakeTrainer(seconds=0.0))
    assert [each.scheduler.groups.trained for each in facts] == [2, 3]


def test_each_step_has_the_mismatch_of_the_file_s_logprobs_and_the_trainer_s(tmp_path: Path) -> None:
    for step in range(2):
        write_batch(tmp_path / f"{step}.batch", batch(step))
    for each in trained(tmp_path, FakeTrainer(seconds=0.0)):
        samples = [scored for group in each.batch.groups for scored in group.samples]
        apart = [
            abs(told - sampled)
            for scored, logprobs in zip(samples, each.report.logprobs, strict=True)
            for told, sampled, counts in zip(logprobs, scored.sample.logprobs, scored.loss_mask, strict=True)
            if counts
        ]
        assert each.mismatch["mismatch/logprob_mean"] == pytest.approx(fmean(apart))
        assert {"mismatch/age/0/k3", "mismatch/age/1/k3"} <= each.mismatch.keys()


def test_a_disk_that_never_answers_ends_the_run_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(train_only, "READING_S", 0.1)
    monkeypatch.setattr(train_only, "read_batch", lambda path: answers.wait(60.0))
    trainer = FakeTrainer(seconds=0.0)
    with pytest.raises(DataError, match=r"0\.batch was not read within 0\.1 s$"):
        trained(tmp_path, trainer)
    answers.set()
    assert trainer.batches == []
    assert trainer.saved == [], "nothing was trained"

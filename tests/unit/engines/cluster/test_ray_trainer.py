"""Calls of a rank are recorded in the driver, and sent to its actor as they were written."""

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError, RayTaskError

from asyncrl.daemon_threads import DaemonThreads
from asyncrl.engines.cluster.ray_trainer import NoTrainer, RayTrainer
from asyncrl.errors import CheckpointFailed, FastStepWrong, TrainerFailed
from asyncrl.types import Batch


class RankActor:
    """A trainer rank's actor that answers with the call it got, or fails."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.call = self
        self._failure = failure
        self._options: dict[str, str] = {}

    def options(self, **options: str) -> "RankActor":
        self._options = options
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        async def answer() -> Any:
            if self._failure is not None:
                raise self._failure
            return args, kwargs, self._options

        return answer()


def trainer(*ranks: RankActor) -> RayTrainer:
    return RayTrainer(ranks, train_timeout_s=5.0, control_timeout_s=5.0)


def test_call_reaches_the_rank_with_its_arguments_by_position_and_by_name() -> None:
    ours = trainer(RankActor())
    told: Any = asyncio.run(ours._first(lambda rank: rank.snapshot(is_checked=True)))  # noqa: SLF001
    assert told == (("snapshot",), {"is_checked": True}, {"name": "RankActor.snapshot"})
    told = asyncio.run(ours._first(lambda rank: rank.snapshot(True)))  # noqa: SLF001
    assert told == (("snapshot", True), {}, {"name": "RankActor.snapshot"})


def test_a_store_that_is_full_is_a_failure_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(value: object) -> None:
        raise ray.exceptions.OutOfDiskError("Local disk is full")

    monkeypatch.setattr(ray, "put", full)
    batch: Any = None
    with pytest.raises(TrainerFailed, match=r"did not store the batch.*full.*: free space in /dev/shm and RAY_TMPDIR"):
        asyncio.run(trainer(RankActor()).train(batch))


def test_resend_runs_on_the_second_thread_of_rank_0_alone() -> None:
    told: Any = asyncio.run(trainer(RankActor(), RankActor()).resend(is_checked=False, by_part=False))
    assert told == (("resend", False, False), {}, {"name": "RankActor.resend", "concurrency_group": "concurrent"})


def test_all_ranks_check_their_fast_operations_and_rank_0_reports() -> None:
    told: Any = asyncio.run(trainer(RankActor(), RankActor()).check_fast_step(timeout_s=5.0))
    assert told == (("check_fast_step",), {}, {"name": "RankActor.check_fast_step"})
    wrong = FastStepWrong("check-fast-step: rank 1, log-prob head: difference 1 in log-probs")
    with pytest.raises(FastStepWrong, match="rank 1, log-prob head"):
        asyncio.run(trainer(RankActor(), RankActor(wrong)).check_fast_step(timeout_s=5.0))


def test_failed_rank_is_named() -> None:
    ours = trainer(RankActor(), RankActor(RayError("out of memory")))
    with pytest.raises(TrainerFailed, match=r"^trainer rank 1, put_away_weights: out of memory$"):
        asyncio.run(ours.put_away_weights())


@pytest.mark.parametrize("pool", [None, DaemonThreads(3, "user")])
def test_threads_that_user_code_has_occupied_do_not_keep_the_trainer_from_its_batch(
    pool: DaemonThreads | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, batch = threading.Event(), SimpleNamespace()
    monkeypatch.setattr(ray, "put", lambda given: given)

    async def run() -> Any:
        if pool is not None:
            asyncio.get_running_loop().set_default_executor(pool)
        most = min(32, (os.cpu_count() or 1) + 4)
        hung = [asyncio.get_running_loop().run_in_executor(None, end.wait) for _ in range(most)]
        try:
            return await trainer(RankActor()).train(batch)  # type: ignore[arg-type]
        finally:
            end.set()
            await asyncio.wait(hung)

    assert asyncio.run(run()) == (("train", batch), {}, {"name": "RankActor.train"})


def test_a_rank_that_gives_up_a_save_after_the_time_for_it_is_not_silent() -> None:
    class SlowActor(RankActor):
        def remote(self, *_: Any, **__: Any) -> Any:
            async def answer() -> None:
                await asyncio.sleep(0.1)  # its wait begins when the call reaches it
                cause = CheckpointFailed("not written within 0.05 s")
                raise RayTaskError("finish_checkpoint", str(cause), cause)

            return answer()

    ours = RayTrainer((SlowActor(),), train_timeout_s=0.05, control_timeout_s=5.0)
    with pytest.raises(CheckpointFailed, match="not written within"):
        asyncio.run(ours.finish_checkpoint())
    assert ours.silence is None
    with pytest.raises(TrainerFailed, match="no answer within"):
        asyncio.run(ours.finish_checkpoint(0.01))


def test_without_ranks_a_batch_is_taken_and_nothing_is_saved(tmp_path: Path) -> None:
    ours = NoTrainer((), train_timeout_s=5.0, control_timeout_s=5.0)
    report = asyncio.run(ours.train(Batch(step=0, groups=())))
    assert (report.has_trainer, report.is_skipped, report.logprobs) == (False, False, ())
    asyncio.run(ours.save(tmp_path / "model"))
    assert not (tmp_path / "model").exists()

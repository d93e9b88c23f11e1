"""The simulated trainer: steps, weights for both kinds of updates, and checkpoints that the real code commits."""

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from asyncrl.engines.fake import fake_logprob
from asyncrl.engines.megatron.checkpoint.checksums import checksum
from asyncrl.engines.megatron.checkpoint.directory import notes_of
from asyncrl.engines.megatron.checkpoint.writes import Target, commit, open_partial
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.errors import CheckpointFailed, LeaseLost, NonFiniteLoss, TrainerFailed, WeightUpdateFailed
from asyncrl.event_loop import Deadline
from asyncrl.models.shape import ModelShape
from asyncrl.sim.faults.world.collective import TRAINER, Collectives
from asyncrl.sim.faults.world.plan import Setting, Weather
from asyncrl.sim.faults.world.violation import Violation
from asyncrl.sim.faults.world.witness import Witness
from asyncrl.types import Batch, TrainReport

JOIN_S = 60.0
"""Seconds after which rank 0 gives up a group whose members do not come."""
SHARD = "__0_0.distcp"


@dataclass(frozen=True)
class _Shape:
    """The shape of a model, as far as a checkpoint needs it."""

    layers: int = 1


class SimTrainer:
    """``Trainer``, ``WeightSender``, ``WeightWriter``, and the part of ``RayTrainer`` that writes checkpoints."""

    def __init__(
        self, setting: Setting, weather: Weather, collectives: Collectives, witness: Witness, first_step: int
    ) -> None:
        self.step = first_step
        """Training steps behind the live weights."""
        self.has_begun_checkpoint = False
        self._setting = setting
        self._weather = weather
        self._collectives = collectives
        self._witness = witness
        self._group = ""
        self._joining: asyncio.Future[None] | None = None
        """The call that waits for the members of a group, also if the driver waits for it no longer."""
        self._snapshot: int | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_dead = False
        self._pass_skipped()

    def die(self) -> None:
        """End: nothing more is written, and engines that wait for this trainer's weights notice it."""
        self._is_dead = True
        self._collectives.abandon_all()

    def _pass_skipped(self) -> None:
        """Count the steps that changed no weights, which are not trained again."""
        while self.step in self._witness.skipped_steps:
            self.step += 1

    # ---- Trainer

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        await asyncio.sleep(self._setting.train_s)
        if self._weather.take("step_fails"):
            raise TrainerFailed("trainer rank 0: simulated")
        if batch.step != self.step:
            raise Violation("steps in order", f"step {batch.step} is trained on weights after {self.step} steps")
        is_again = self._witness.is_done(batch.step)
        self.step += 1
        if not is_again and self._weather.take("step_not_finite"):
            self._witness.skipped(batch)
            raise NonFiniteLoss(f"policy: loss nan in step {batch.step}")
        if is_again:
            self._witness.trained_again(batch)
        else:
            self._witness.trained(batch)
        self._pass_skipped()
        return TrainReport(
            loss=0.0,
            grad_norm=1.0,
            clip_fraction=0.0,
            entropy=1.0,
            learning_rate=0.0,
            seconds=self._setting.train_s,
            logprobs=_logprobs(batch),
        )

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        await asyncio.sleep(0.01)

    # ---- weights by broadcast

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """See ``WeightSender.weight_buckets``."""
        return tuple(
            WeightBucket(names=(f"w{number}",), dtypes=("float32",), shapes=((1,),), num_bytes=4)
            for number in range(self._setting.num_buckets)
        )

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        """See ``WeightSender.open_group``."""
        await self._turn()
        self._collectives.abandon(self._group)
        self._collectives.serve(group_name)
        self._group = group_name

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """See ``WeightSender.join_engines``."""
        await self._join(group_name, world_size)

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        """See ``WeightSender.join_parts``; there are no experts."""

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        """See ``WeightSender.snapshot``."""
        await asyncio.sleep(0.01)
        if not self._setting.is_copied:
            return False
        self._snapshot = self.step
        self._collectives.send(self._group, self.step, self._setting.num_buckets, lambda: None)
        return True

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        """See ``WeightSender.resend``."""
        await self._turn()
        if self._snapshot is None:
            return False
        self._collectives.send(self._group, self._snapshot, self._setting.num_buckets, lambda: None)
        return True

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        """See ``WeightSender.send``."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def is_sent() -> None:
            if not sent.done():
                sent.set_result(None)

        self._collectives.send(self._group, self.step, self._setting.num_buckets, is_sent)
        await sent

    async def abandon(self, group_name: str) -> None:
        """See ``WeightSender.abandon``."""
        await asyncio.sleep(0.001)
        self._collectives.abandon(group_name)

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        """See ``TrainerEnd.meet_engine``."""
        await self._turn()
        self._collectives.serve(where.group_name)
        try:
            async with Deadline(timeout_s):
                await self._join(where.group_name, where.world_size)
        except TimeoutError as error:
            self._collectives.abandon(where.group_name)
            raise WeightUpdateFailed(f"no collective within {timeout_s:g} s") from error

    async def _turn(self) -> None:
        """Wait until rank 0's second thread is free.  Raises TrainerFailed if the rank has died meanwhile."""
        await asyncio.sleep(0.001)
        while self._joining is not None and not self._joining.done():
            await asyncio.wait([self._joining])
        if self._is_dead:  # this call ends one turn of the loop later
            raise TrainerFailed("trainer rank 0: it has died")

    async def _join(self, name: str, size: int) -> None:
        loop = asyncio.get_running_loop()
        there = self._joining = loop.create_future()

        def joined(error: str | None) -> None:
            there.set_exception(TrainerFailed(error)) if error else there.set_result(None)
            there.exception()  # marks it retrieved, also if the driver waits for it no longer

        self._collectives.join(name, size, TRAINER, joined)
        late = loop.call_later(JOIN_S, self._collectives.abandon, name)
        there.add_done_callback(lambda _: late.cancel())
        await asyncio.wait([there])
        there.result()

    # ---- weights through a folder

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        """See ``WeightWriter.write_weights``."""
        step = self.step
        await asyncio.sleep(0.05)
        partial = folder.with_name("partial")
        for path in (partial, folder):
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "weights.json").write_text(json.dumps({"step": step}))
        partial.rename(folder)

    # ---- checkpoints

    async def begin_checkpoint(self, target: Target, run: Mapping[str, Any], with_optimizer: bool) -> None:
        """See ``RayTrainer.begin_checkpoint``."""
        self.has_begun_checkpoint = True
        await self.finish_checkpoint()
        if self._weather.take("checkpoint_fails"):
            raise CheckpointFailed(f"{target.folder} cannot be written: simulated")
        try:
            open_partial(target)
        except OSError as error:
            raise CheckpointFailed(f"{target.folder} cannot be written: {error}") from error
        await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        self._writing = loop.create_future()
        notes = notes_of(cast(ModelShape, _Shape()), run)
        loop.call_later(self._setting.writing_s, self._write, target, notes, self.step, self._writing)

    async def check_checkpoint(self) -> bool:
        """See ``RayTrainer.check_checkpoint``."""
        if self._writing is not None and self._writing.done():
            await self.finish_checkpoint()
        return self._writing is not None

    async def finish_checkpoint(self, timeout_s: float | None = None) -> None:
        """See ``RayTrainer.finish_checkpoint``."""
        if (writing := self._writing) is not None:
            await asyncio.wait([writing])  # a cancellation of this call does not end the thread
            self._writing = None
            writing.result()

    def _write(self, target: Target, notes: bytes, step: int, done: asyncio.Future[None]) -> None:
        """Write the files of a checkpoint, as the thread of a rank does, and commit it."""
        if self._is_dead:
            return
        try:
            self._write_files(target, notes, step)
        except LeaseLost as error:
            done.set_exception(error)
        except (OSError, CheckpointFailed) as error:
            shutil.rmtree(target.partial, ignore_errors=True)
            done.set_exception(CheckpointFailed(f"{target.folder}: {error}"))
        else:
            done.set_result(None)
        done.exception()  # marks it retrieved, also if the run ends before it asks

    def _write_files(self, target: Target, notes: bytes, step: int) -> None:
        content = b"weights of step %d" % step
        summed = checksum()
        summed.update(content)
        is_torn = self._weather.take("torn_file") is not None
        (target.partial / SHARD).write_bytes(content[:-3] if is_torn else content)
        for name in (".metadata", "metadata.json"):
            (target.partial / name).write_bytes(b"{}")
        commit(target, notes, {SHARD: [(0, len(content), summed.hexdigest())]})


def read_step(folder: Path) -> int:
    """Return the step of the weights in a checkpoint."""
    return int((folder / SHARD).read_bytes().rpartition(b" ")[2])


def _logprobs(batch: Batch) -> tuple[tuple[float, ...], ...]:
    rows = []
    for group in batch.groups:
        for scored in group.samples:
            ids = (*group.prompt.token_ids[-1:], *scored.sample.token_ids)
            rows.append(tuple(fake_logprob(ids[at - 1], ids[at], batch.step) for at in range(1, len(ids))))
    return tuple(rows)

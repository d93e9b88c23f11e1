"""The driver's view of the trainer: all ranks as one object, called through Ray.

    RayTrainer.save ──▶ a recorded call of MegatronRank.save ──Ray──▶ RankActor.call ──▶ MegatronRank.save

Each method here chooses which ranks are called, the deadline, and whose answer counts.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asyncrl.daemon_threads import off_loop
from asyncrl.engines.cluster.actors import ABANDON, CONCURRENT
from asyncrl.engines.cluster.calls import answered, is_silent, together
from asyncrl.engines.megatron.checkpoint.checksums import check_files
from asyncrl.engines.megatron.checkpoint.directory import Origin, folder_of, read_notes
from asyncrl.engines.megatron.checkpoint.lease import Claim
from asyncrl.engines.megatron.checkpoint.writes import Target
from asyncrl.engines.weight_sync.buckets import WeightBucket
from asyncrl.engines.weight_sync.path_check import Meeting
from asyncrl.errors import CheckpointFailed, ConfigError, TrainerFailed, first_line
from asyncrl.event_loop import Deadline
from asyncrl.types import Batch, TrainReport

if TYPE_CHECKING:  # the driver imports no torch
    from asyncrl.engines.megatron.rank import MegatronRank

logger = logging.getLogger(__name__)

LOOK_S = 120.0
"""Most seconds to find and check the newest checkpoint, which reads all small files of it."""

type Ask[T] = Callable[["MegatronRank"], T]
"""A function that calls one method of a rank.  mypy checks the name and arguments, and infers the result."""


class RayTrainer:
    """``Trainer``, and the trainer's side of every kind of weight update, over ``RankActor`` actors, rank 0 first.

    At most one call at a time.  ``join_engines``, ``join_parts``, ``meet_engine``, ``resend`` and ``abandon`` may run
    during another call, but only one of them at a time.
    """

    def __init__(self, ranks: Sequence[Any], *, train_timeout_s: float, control_timeout_s: float) -> None:
        self._ranks = ranks
        self._train_timeout_s = train_timeout_s
        self._control_timeout_s = control_timeout_s
        self.has_begun_checkpoint = False
        """Whether a checkpoint may be being written."""
        self.silence: str | None = None
        """The call that one of these ranks did not answer; None if all of them have answered one since."""

    def use(self, ranks: Sequence[Any]) -> None:
        """Call other ranks from now on."""
        self._ranks, self.silence = ranks, None

    async def load(self, origin: Origin, *, timeout_s: float) -> None:
        """Load a checkpoint, before the first step."""
        await self._all(lambda rank: rank.load(origin), timeout_s)

    async def check_fast_step(self, *, timeout_s: float) -> tuple[str, ...]:
        """Compare fast operations with their plain forms; return one line per operation.  Raises FastStepWrong."""
        lines = await self._all(lambda rank: rank.check_fast_step(), timeout_s)
        return lines[0]

    async def train(self, batch: Batch) -> TrainReport:
        """See ``Trainer.train``."""
        import ray

        # Invariant: a batch is frozen.  A thread cannot be cancelled: after the timeout it may still read the batch.
        # It copies the batch into Ray's store once for all ranks.  In a thread, because a batch of long answers has
        # many megabytes, and the event loop would stand still; in a separate one, which no user code can occupy.
        try:
            async with Deadline(self._control_timeout_s):
                shared = await off_loop(lambda: ray.put(batch), "ray-put")
        except TimeoutError as error:
            raise TrainerFailed(f"Ray did not store the batch within {self._control_timeout_s:g} s") from error
        except ray.exceptions.RayError as error:  # its store and its disk are full
            text = f"Ray did not store the batch: {first_line(error)}: free space in /dev/shm and RAY_TMPDIR"
            raise TrainerFailed(text) from error
        reports = await self._all(lambda rank: rank.train(shared), self._train_timeout_s)
        return reports[0]

    async def save(self, path: Path) -> None:
        """See ``Trainer.save``."""
        await self._all(lambda rank: rank.save(path), self._train_timeout_s)

    async def begin_checkpoint(self, target: Target, run: Mapping[str, Any], with_optimizer: bool) -> None:
        """Return once every rank has copied its state; writing continues in the background."""
        self.has_begun_checkpoint = True
        await self._all(lambda rank: rank.begin_checkpoint(target, dict(run), with_optimizer), self._train_timeout_s)

    async def check_checkpoint(self) -> bool:
        """Return whether a rank is still writing.  Raises CheckpointFailed if one of them has failed."""
        return any(await self._all(lambda rank: rank.check_checkpoint(), self._control_timeout_s))

    async def finish_checkpoint(self, timeout_s: float | None = None) -> None:
        """Return once no rank is writing.  Raises CheckpointFailed if one has not written within ``train_timeout_s``.

        ``timeout_s``: how long to wait instead for answers.
        """
        # A rank that gives its save up after this time lives.  Its answer must come before it counts as silent.
        patience_s = self._train_timeout_s + self._control_timeout_s
        await self._all(lambda rank: rank.finish_checkpoint(), patience_s if timeout_s is None else timeout_s)

    async def weight_buckets(self) -> tuple[WeightBucket, ...]:
        """See ``WeightSender.weight_buckets``."""
        return await self._first(lambda rank: rank.weight_buckets())

    async def open_group(self, *, master_address: str, master_port: int, group_name: str) -> None:
        """See ``WeightSender.open_group``."""
        await self._concurrently(lambda rank: rank.open_group(master_address, master_port, group_name))

    async def join_engines(
        self, *, master_address: str, master_port: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """See ``WeightSender.join_engines``."""
        await self._concurrently(
            lambda rank: rank.join_engines(master_address, master_port, world_size, group_name, backend)
        )

    async def join_parts(self, *, num_parts: int, world_size: int, group_name: str, backend: str) -> None:
        """See ``WeightSender.join_parts``."""
        await self._concurrently(lambda rank: rank.join_parts(num_parts, world_size, group_name, backend))

    async def meet_engine(self, where: Meeting, *, timeout_s: float) -> None:
        """See ``WeightSender.meet_engine``."""
        await self._concurrently(lambda rank: rank.meet_engine(where, timeout_s))

    async def snapshot(self, *, is_checked: bool, by_part: bool) -> bool:
        """See ``WeightSender.snapshot``."""
        are_sending = await self._all(lambda rank: rank.snapshot(is_checked, by_part), self._control_timeout_s)
        return are_sending[0]

    async def resend(self, *, is_checked: bool, by_part: bool) -> bool:
        """See ``WeightSender.resend``."""
        return await self._concurrently(lambda rank: rank.resend(is_checked, by_part))

    async def send(self, *, is_checked: bool, by_part: bool, timeout_s: float) -> None:
        """See ``WeightSender.send``."""
        await self._all(lambda rank: rank.send(is_checked, by_part), timeout_s)

    async def abandon(self, group_name: str) -> None:
        """See ``WeightSender.abandon``."""
        await self._first(lambda rank: rank.abandon(group_name), concurrency_group=ABANDON)

    async def share(self, bucket: int) -> list[str]:
        """See ``TensorSharer.share``."""
        return await self._all(lambda rank: rank.share(bucket), self._control_timeout_s)

    async def unshare(self) -> None:
        """See ``TensorSharer.unshare``."""
        await self._all(lambda rank: rank.unshare(), self._control_timeout_s)

    async def fetch(self) -> None:
        """See ``MemoryOwner.fetch``."""
        await self._all(lambda rank: rank.fetch(), self._control_timeout_s)

    async def put_away_optimizer(self) -> None:
        """See ``MemoryOwner.put_away_optimizer``."""
        await self._all(lambda rank: rank.put_away_optimizer(), self._control_timeout_s)

    async def put_away_weights(self) -> None:
        """See ``MemoryOwner.put_away_weights``."""
        await self._all(lambda rank: rank.put_away_weights(), self._control_timeout_s)

    async def write_weights(self, folder: Path, *, timeout_s: float) -> None:
        """See ``WeightWriter.write_weights``."""
        await self._all(lambda rank: rank.write_weights(folder), timeout_s)

    async def _concurrently[T](self, ask: Ask[T]) -> T:
        """Ask rank 0 on the second thread of its actor, also while the first one is busy."""
        return await self._first(ask, concurrency_group=CONCURRENT)

    async def _first[T](self, ask: Ask[T], **options: str) -> T:
        """Ask rank 0 alone."""
        call = _recorded(ask)
        return cast(T, await self._answered(0, call, self._control_timeout_s, **options))

    async def _all[T](self, ask: Ask[T], timeout_s: float) -> list[T]:
        """Ask all ranks at once; return the answers, rank 0's first."""
        call, ranks = _recorded(ask), self._ranks
        answers = await together([self._answered(number, call, timeout_s) for number in range(len(ranks))])
        if self._ranks is ranks:
            self.silence = None
        return answers

    async def _answered(self, number: int, call: "_Call", timeout_s: float, **options: str) -> Any:
        """Return the answer of one rank; remember if it is silent, unless another one has taken its place."""
        ranks = self._ranks
        try:
            answer = call.sent_to(ranks[number], **options)
            return await answered(answer, f"trainer rank {number}, {call.method}", timeout_s)
        except TrainerFailed as error:
            if is_silent(error) and self._ranks is ranks:
                self.silence = self.silence or str(error)
            raise


@dataclass(frozen=True, slots=True)
class _Call:
    """A recorded call of a rank's method."""

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def sent_to(self, rank: Any, **options: str) -> Any:
        """Send the call and return Ray's reference to the answer.  Ray and ``ps`` show the method's name."""
        return rank.call.options(name=f"RankActor.{self.method}", **options).remote(
            self.method, *self.args, **self.kwargs
        )


class _Recorder:
    """A stand-in for a rank whose methods return the call instead of running it."""

    def __getattr__(self, method: str) -> Callable[..., _Call]:
        return lambda *args, **kwargs: _Call(method, args, kwargs)


def _recorded(ask: Ask[Any]) -> _Call:
    call: _Call = ask(cast("MegatronRank", _Recorder()))
    return call


class RayCheckpointer:
    """A ``Checkpointer`` that writes a trainer's state to the folder of a run's lease."""

    def __init__(
        self,
        trainer: RayTrainer,
        claim: Claim,
        *,
        with_optimizer: bool,
        about: Mapping[str, Any],
        keep: int | None = None,
        spared: Path | None = None,
    ) -> None:
        """Set the folder, by its lease; ``about`` is stored with every checkpoint, in addition to the run's state.

        ``keep`` and ``spared`` say which checkpoints stay: see ``Target``.
        """
        self._trainer = trainer
        self._claim = claim
        self._with_optimizer = with_optimizer
        self._about = dict(about)
        self._keep = keep
        self._spared = spared
        self._is_writing = False
        self._begun: list[tuple[int, Any]] = []
        """Step and mark of every checkpoint that was begun."""

    async def newest(self) -> tuple[int, Origin] | None:
        """Return the step and folder of this run's newest complete checkpoint; None without one.

        The ranks may have died after they completed it, and before they said so.  Raises CheckpointFailed if the disk
        does not answer.
        """
        try:
            async with Deadline(LOOK_S):
                return await off_loop(self._newest, "checkpoints")
        except TimeoutError as error:
            raise CheckpointFailed(f"{self._claim.root}: the disk does not answer within {LOOK_S:g} s") from error

    def _newest(self) -> tuple[int, Origin] | None:
        for step, mark in reversed(self._begun):
            folder = folder_of(self._claim.root, step)
            try:
                notes = read_notes(folder)
                if notes is None or notes["run"]["state"].get("mark") != mark:
                    continue
                check_files(folder)
            except (CheckpointFailed, ConfigError) as error:
                logger.warning("the trainer does not start from %s: %s", folder, error)
            else:
                return step, Origin(folder=folder, kind="resume", optimizer=self._with_optimizer)
        return None

    async def begin(self, step: int, run: Mapping[str, Any]) -> None:
        """See ``Checkpointer.begin``."""
        self._begun.append((step, run.get("mark")))
        notes = {**self._about, "optimizer": self._with_optimizer, "state": dict(run)}
        target = Target(claim=self._claim, step=step, keep=self._keep, spared=self._spared)
        await self._trainer.begin_checkpoint(target, notes, self._with_optimizer)
        self._is_writing = True

    async def check(self) -> None:
        """See ``Checkpointer.check``.  Asks the ranks only while one of them is writing."""
        if self._is_writing:
            self._is_writing = await self._trainer.check_checkpoint()

    async def finish(self) -> None:
        """See ``Checkpointer.finish``."""
        self._is_writing = False
        await self._trainer.finish_checkpoint()


class NoTrainer(RayTrainer):
    """A ``Trainer`` without ranks, which takes each batch and trains nothing (``--debug-rollout-only``).

    The calls that it inherits ask every rank, of which there is none.
    """

    async def train(self, batch: Batch) -> TrainReport:
        """Return a report without numbers."""
        return TrainReport(
            loss=math.nan,
            grad_norm=math.nan,
            clip_fraction=math.nan,
            entropy=math.nan,
            learning_rate=math.nan,
            seconds=0.0,
            logprobs=(),
            has_trainer=False,
        )

"""Asynchronous checkpoints: training waits for a copy to host memory, and a thread writes the files.

    begin: wait for the previous save ─▶ plan with the other ranks ─▶ copy ─▶ return
    thread:                          └─▶ write, with checksums ─▶ gather ─▶ rank 0: check the lease, name it

Every rank writes its own shards.  The threads of all ranks synchronize once more when all have written.  They use a
separate process group, because collective operations of two threads in one group would mix.
"""

import queue
import shutil
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.engines.megatron.checkpoint.checked_files import SummingTransforms
from asyncrl.engines.megatron.checkpoint.checksums import Part
from asyncrl.engines.megatron.checkpoint.host_memory import CheckpointMemory
from asyncrl.engines.megatron.checkpoint.writes import Permit, Target, commit, open_partial
from asyncrl.engines.megatron.setup.ranks import of_every_rank
from asyncrl.errors import CheckpointFailed, LeaseLost, first_line
from asyncrl.internals import Internal

INTERNALS = (
    Internal(
        name="megatron.core.dist_checkpointing.save",
        parameters=("sharded_state_dict", "checkpoint_dir", "sharded_strategy"),
        keywords=("validate_access_integrity", "async_sharded_save", "async_strategy"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.core.save_config",
        parameters=("config", "checkpoint_dir"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.core.CheckpointingConfig",
        parameters=("sharded_backend", "sharded_backend_version"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.strategies.torch.TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",
        parameters=("self", "writer", "save_state_dict_ret", "async_strategy"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.strategies.async_utils.AsyncRequest",
        attributes=("async_fn", "async_fn_args"),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
        attributes=("_results_queue",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync",
        attributes=("finish",),
        used_in=__name__,
    ),
    Internal(
        name="megatron.core.dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data",
        parameters=("transform_list", "local_proc_idx", "write_bucket", "results_queue", "count_queue", "use_fsync"),
        used_in=__name__,
    ),
    Internal(name="torch.distributed.checkpoint.api.CheckpointException", attributes=("failures",), used_in=__name__),
)
"""Names that may change with the library: see docs/internals.md."""

# Megatron would start a process in every rank to serve this queue; here the writer is a thread.
# Invariant: set before the first save, because Megatron makes its own queue if there is none.
filesystem_async._results_queue = queue.Queue()  # noqa: SLF001


class Saver:
    """A writer of one rank's part of checkpoints, one checkpoint at a time."""

    def __init__(self, timeout_s: float) -> None:
        """Create the process group of the writers.  Collective.

        ``timeout_s`` limits how long ranks wait for the slowest writer.
        """
        # Invariant: the caller's thread uses the group only while no writer runs (``begin`` waits first), and the
        # writer uses no other group.  Two threads in one group would receive each other's messages.
        self._timeout_s = timeout_s
        self._group = self._new_group()
        self._has_failed = False
        """Whether a save failed on this rank since the group was made.  gloo closes a group after an error for good."""
        self._host = CheckpointMemory()
        self._abandoned: list[CheckpointMemory] = []
        """Memory from which a thread may still write; it stays pinned, so it is never freed."""
        self._writing: Future[None] | None = None
        self._lock = Lock()
        self._permit = Permit(self._lock)
        """The permit of the newest save."""
        self._has_checked = False

    def begin(self, state: Callable[[CheckpointMemory], dict[str, Any]], target: Target, notes: bytes) -> float:
        """Copy the state, start a thread that writes it, and return the seconds that the caller waited.

        ``state`` returns the state, and may put parts of it in the memory that it gets.  The folder gets its name, and
        becomes the latest checkpoint, when everything is in it.  Waits for the previous save first.  Raises
        CheckpointFailed, also if the previous save failed, or LeaseLost.
        """
        started = time.perf_counter()
        # Invariant: nothing is put in the memory while a previous save is written from there.
        self._wait_for_all()
        try:
            plan = self._planned(self._made(state), target)
        except LeaseLost:
            raise
        except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
            self._has_failed = True
            raise CheckpointFailed(f"{target.folder} cannot be written: {first_line(error)}") from error
        seconds = time.perf_counter() - started
        self._permit = permit = Permit(self._lock)
        group = self._group  # a thread that is given up keeps its group, which later saves do not use
        self._writing = in_daemon_thread(lambda: self._write(plan, target, notes, permit, group), "checkpoint")
        return seconds

    def wait(self) -> None:
        """Return once no checkpoint is being written.  Raises CheckpointFailed or LeaseLost if the save failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(timeout=self._timeout_s)
            except BaseException as error:
                self._has_failed = True
                if not isinstance(error, TimeoutError):
                    raise
                self._permit.withdraw()
                self._abandoned.append(self._host)
                self._host = CheckpointMemory()
                raise CheckpointFailed(f"not written within {self._timeout_s:g} s") from error

    def check(self) -> bool:
        """Return whether a checkpoint is being written, at once.  Raises CheckpointFailed if it has failed."""
        if self._writing is not None and self._writing.done():
            self.wait()
        return self._writing is not None

    def _new_group(self) -> Any:
        """Create the process group of the writers.  Collective."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))

    def _wait_for_all(self) -> None:
        """Wait for the previous save, and replace the group if a save failed on any rank.  Collective.

        Raises an error of the previous save on all ranks.
        """
        failure: CheckpointFailed | LeaseLost | None = None
        try:
            self.wait()
        except (CheckpointFailed, LeaseLost) as error:
            failure = error
        # In training's group, because the writers' group may be closed on some ranks, of which the others know nothing.
        found = of_every_rank((self._has_failed, failure))
        if any(has_failed for has_failed, _ in found):
            self._group = self._new_group()
            self._has_failed = False
        for each in (failure, *(their for _, their in found)):
            if each is not None:
                raise each

    def _on_first_rank(self, work: Callable[[], object]) -> None:
        """Run ``work`` on rank 0, and raise its error on all ranks, because each would wait for the others."""
        failure: list[Exception | None] = [None]
        if dist.get_rank() == 0:
            try:
                work()
            except Exception as error:  # noqa: BLE001 (raised on all ranks)
                failure = [error]
        dist.broadcast_object_list(failure, src=0, group=self._group)
        if failure[0] is not None:
            raise failure[0]

    def _made(self, state: Callable[[CheckpointMemory], dict[str, Any]]) -> dict[str, Any]:
        """Return the state.  Raises CheckpointFailed on all ranks if memory was short on any, because each would wait.

        Collective.
        """
        self._host.failure = None
        made = state(self._host)
        failures = [each for each in of_every_rank(self._host.failure) if each is not None]
        if failures:
            raise CheckpointFailed(failures[0])
        return made

    def _planned(self, state: dict[str, Any], target: Target) -> "_Plan":
        """Agree with the other ranks on which rank writes which tensor, and copy this rank's part to host memory."""
        self._on_first_rank(lambda: open_partial(target))
        strategy = _Strategy()
        # The check takes as long as the plan.  Once is enough, because the set of tensors never changes in a run.
        check, self._has_checked = not self._has_checked, True
        request = dist_checkpointing.save(
            state,
            str(target.partial),
            strategy,
            validate_access_integrity=check,
            async_sharded_save=True,
            async_strategy="mcore",
        )
        plan = strategy.plan
        if plan is None:
            raise AssertionError("Megatron made no plan")
        if request.async_fn is not None:  # this rank has something to write
            _, buckets, _ = request.async_fn_args
            try:
                plan.buckets = [self._copied(bucket) for bucket in buckets]
            except (MemoryError, RuntimeError) as error:  # the other ranks wait for this one's result
                plan.failure = f"no copy in host memory: {first_line(error)}"
        if torch.cuda.is_available():  # not the whole device: another stream may be broadcasting weights
            torch.cuda.current_stream().synchronize()
        return plan

    def _copied(self, bucket: Any) -> Any:
        """Copy the tensors of a bucket of Megatron's writer to host memory, where training does not change them."""
        path, key, (objects, tensors) = bucket
        return path, key, (objects, [(item, self._copy(item.index, tensor.detach())) for item, tensor in tensors])

    def _copy(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        if self._host.has(tensor):  # a copy already
            return tensor
        return self._host.tensor(name, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def _write(self, plan: "_Plan", target: Target, notes: bytes, permit: Permit, group: Any) -> None:
        """Write this rank's files, gather the results, and complete the checkpoint on rank 0.  Runs in the thread."""
        written = _write_buckets(plan)
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        try:
            dist.gather_object(written, everyone, dst=0, group=group)
            failures = [each for each in everyone or [written] if isinstance(each, str)]
            if everyone is not None and not failures:
                plan.writer.finish(plan.metadata, [each.results for each in everyone])
                save_config(CheckpointingConfig("torch_dist", 1), str(target.partial))
                commit(target, notes, _by_file(everyone), permit)
        except LeaseLost:
            raise
        except Exception as error:  # Megatron, torch, pickle and the disk raise different ones
            _remove_partial(target, permit)
            raise CheckpointFailed(f"{target.folder}: {first_line(error)}") from error
        if failures:
            _remove_partial(target, permit)
            raise CheckpointFailed(f"{target.folder}: {failures[0]}")


@dataclass(slots=True, kw_only=True)
class _Plan:
    """The part of one checkpoint that one rank writes."""

    writer: Any
    metadata: Any
    """The metadata of the whole checkpoint, on rank 0."""
    buckets: list[Any] = field(default_factory=list)
    """One bucket of tensors and objects for each of this rank's files."""
    failure: str | None = None
    """The reason why there is nothing to write."""


class _Strategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's save strategy, which keeps its plan.

    Megatron's finalization is not used, because it would communicate in training's process group.
    """

    plan: _Plan | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        self.plan = _Plan(writer=writer, metadata=planned[1])
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)


def _remove_partial(target: Target, permit: Permit) -> None:
    """Remove what was written of a failed checkpoint, so that it takes no space until the next one begins.

    After a save that was given up, the next one removes it.  It may be writing to a folder of the same name by now.
    """
    if dist.get_rank() == 0 and not permit.is_withdrawn:
        shutil.rmtree(target.partial, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The result of one rank."""

    results: list[Any]
    """torch's results, one for each part, with its place in the files."""
    parts: list[tuple[str, Part]]
    """The file and the checksum of each part."""


def _by_file(everyone: list[_Written]) -> dict[str, list[Part]]:
    """Return the parts of each file."""
    files: dict[str, list[Part]] = {}
    for written in everyone:
        for name, part in written.parts:
            files.setdefault(name, []).append(part)
    return files


def _write_buckets(plan: _Plan) -> _Written | str:
    """Write this rank's files and return the results, or a text with the error."""
    if plan.failure is not None:
        return plan.failure
    try:
        written = [_write_file(plan.writer, bucket) for bucket in plan.buckets]
    except Exception as error:  # noqa: BLE001 (whatever the error is, the other ranks wait for this result)
        return f"{type(error).__name__}: {error}"
    return _Written(
        results=[result for each in written for result in each.results],
        parts=[part for each in written for part in each.parts],
    )


def _write_file(writer: Any, bucket: Any) -> _Written:
    """Write one file and flush it to the disk."""
    transforms = SummingTransforms()
    # Megatron disables Python's garbage collector during this call, for all threads of the process.
    _, results = writer.write_preloaded_data([transforms], 0, bucket, None, None, use_fsync=True)
    if isinstance(results, Exception):
        raise results
    return _Written(results=results, parts=list(transforms.parts(results)))

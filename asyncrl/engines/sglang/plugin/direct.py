"""Weight updates at the speed of copies: a plug-in of stock SGLang, group ``sglang.srt.plugins``.

SGLang's loaders look up the place of each tensor by name.  That takes 0.1 s for a dense model and more than 1 s for the
thousands of tensors of a mixture of experts, while generation is paused.  The places never change, so the copies are
recorded once and replayed:

    first update    flattened_bucket, by SGLang's loaders ──▶ recorded: which bytes were copied where
    later updates   DIRECT: all buckets in one request    ──▶ the same copies again

    bucket i+1 ──network──▶ one buffer  ║  bucket i in the other buffer ──copies──▶ weights

SGLang's loaders load a bucket in every update if its loading is more than copies: a cast by hand, a product of weights,
a value read.  They also do so if a replay proves incomplete (``replay_check``), which is tested in the second update
and in every checked update.  Without the plug-in, all updates are like the first one.

With expert parallelism each rank also reports which buckets it needs, and later receives those alone: all buckets
without experts, and the buckets of its expert part, over a group of that part (``expert_parts``).

Invariant: SGLang calls the hooks on each scheduler's own thread, one update at a time, and all its GPU work is launched
on that thread's current stream.  Buffers and weights need no lock for this reason, and no other thread may touch them.
"""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.engines.sglang.labels import (
    DIRECT,
    DIRECT_BY_PART,
    DIRECT_BY_PART_CHECKED,
    DIRECT_CHECKED,
    NOT_REPLAYED,
    RECORDED,
)
from asyncrl.engines.sglang.plugin.activation import note_and_answer
from asyncrl.engines.sglang.plugin.arrival import Channel, broadcast, check_arrival, finish, wait
from asyncrl.engines.sglang.plugin.copies import RecordedBucket, num_bytes
from asyncrl.engines.sglang.plugin.expert_parts import INTERNALS as EXPERT_PARTS
from asyncrl.engines.sglang.plugin.expert_parts import (
    channels,
    join_part,
    part_of_this_rank,
    ranks_of_this_engine,
    report,
)
from asyncrl.engines.sglang.plugin.replay_check import ReplayCheck, load_alone
from asyncrl.engines.weight_sync.expert_parts import asked_parts
from asyncrl.engines.weight_sync.path_check import MET, PATH_CHECK, PATH_S
from asyncrl.engines.weight_sync.store_connection import connecting_within, wait_until_served
from asyncrl.internals import Internal, unlike

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATE = f"{_UPDATER}.update_weights_from_distributed"
_JOIN = f"{_UPDATER}.init_weights_update_group"
_COPIES = "asyncrl.engines.sglang.plugin.copies"
_DIRECT = (DIRECT, DIRECT_CHECKED, DIRECT_BY_PART, DIRECT_BY_PART_CHECKED)
_CHECKED = (DIRECT_CHECKED, DIRECT_BY_PART_CHECKED)
SERVED_S = 60.0
"""Seconds in which this machine must reach the trainer's, to join a group."""
REFUSED_S = 1.0
"""Seconds after which a closed port means that the group was given up: the trainer serves its store before it asks.

torch would try for half an hour to connect, and this server would stand still.
"""
MEETING_S = PATH_S + 5.0
"""The same for a path check, which asks both sides at once: the trainer may first have to leave another one."""
CONNECT_S = 10.0
"""Seconds for torch's connection to the store, which may be closed after it was found open."""
_ALIGNMENT = 64
"""The buffers' sizes are multiples of this number of bytes, a multiple of every dtype's element size."""

logger = logging.getLogger(__name__)


INTERNALS = (
    Internal(
        name=_UPDATE,
        parameters=("self", "names", "dtypes", "shapes", "group_name", "load_format"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(
        name=_JOIN,
        parameters=("self", "master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"),
        is_exact=True,
        used_in=__name__,
    ),
    Internal(name=_UPDATER, attributes=("_model_update_group", "device", "get_model"), used_in=__name__),
    Internal(name="torch._foreach_copy_", used_in=_COPIES),
    Internal(
        name="torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__",
        parameters=("self", "func", "types", "args", "kwargs"),
        is_exact=True,
        used_in=_COPIES,
    ),
    Internal(name="torch.utils._pytree.tree_leaves", parameters=("tree",), used_in=_COPIES),
    Internal(name="torch._ops.OpOverload", attributes=("is_view",), used_in=_COPIES),
)
"""Names that may change with the library: see docs/internals.md."""


def activate() -> None:
    """Register the hooks, or warn if SGLang's internals differ.  SGLang calls this."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from asyncrl.engines.weight_sync.group_abort import INTERNALS as GROUPS
    from asyncrl.engines.weight_sync.part_groups import INTERNALS as PART_GROUPS

    if (difference := unlike(INTERNALS, EXPERT_PARTS, GROUPS, PART_GROUPS)) is not None:
        note_and_answer("direct", f"this SGLang is unlike 0.5.16 inside ({difference})")
        logger.warning(
            "asyncrl: this SGLang is unlike 0.5.16 inside (%s); weight updates take longer, and if another server dies "
            "in one, this server may end, too",
            difference,
        )
        return
    HookRegistry.register(_UPDATE, DirectUpdates().around_receive, HookType.AROUND)
    HookRegistry.register(_JOIN, around_join, HookType.AROUND)
    note_and_answer("direct")


def around_join(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Join a group without torch's watchdog, so that this server survives the death of another member.

    A name from ``name_of_parts`` asks for the group of this rank's expert part, over the store of the main group.  In a
    group of ``PATH_CHECK`` this rank also meets the trainer before it answers.
    """
    from asyncrl.engines.weight_sync.group_abort import without_watchdog

    # Invariant: the scheduler's thread is the only one of its process that makes groups, as ``without_watchdog`` needs.
    if asked_parts(group_name) is None:
        try:
            refused_s = MEETING_S if group_name.startswith(PATH_CHECK) else REFUSED_S
            wait_until_served(master_address, int(master_port), SERVED_S, refused_s)
        except TimeoutError as error:
            return False, str(error)
        with without_watchdog(), connecting_within(CONNECT_S):
            joined = original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)
        return _met(updater, group_name) if joined[0] and group_name.startswith(PATH_CHECK) else joined
    failure = None
    try:
        join_part(updater._model_update_group, group_name, rank_offset, world_size, backend)  # noqa: SLF001
    except Exception as error:
        logger.exception("asyncrl: this rank did not join the group of its expert part")
        failure = f"{type(error).__name__}: {error}"
    failure = first_failure(failure, ranks_of_this_engine())
    return (True, "joined") if failure is None else (False, f"not in the group of its expert part: {failure}")


def _met(updater: Any, group_name: str) -> tuple[bool, str]:
    """Meet the trainer; return whether that worked, and a message.

    The group is left with the next update, because the trainer may not be done yet.
    """
    from asyncrl.engines.weight_sync.path_check import meet

    groups = updater._model_update_group  # noqa: SLF001
    try:
        meet(groups[group_name], updater.device, PATH_S)
    except Exception as error:
        logger.exception("asyncrl: this rank did not meet the trainer")
        _leave(groups.pop(group_name))
        return False, f"not met: {type(error).__name__}: {error}"
    return True, MET


class DirectUpdates:
    """The hook of one scheduler process."""

    def __init__(self) -> None:
        self._recorded: dict[str, RecordedBucket] = {}
        """Buckets with their recorded copies, by the name of the first tensor."""
        # Invariant: replaced only in ``_make_room``, which also drops the views of the old ones.  Every broadcast and
        # every copy of an update uses these two.
        self._buffers: list[Any] = []
        self._places: list[int] = []
        """Addresses of the model's weights when the copies were recorded."""
        self._refused: set[str] = set()
        """Names of the buckets whose replay differed from their loading on this rank; they are never replayed again."""

    def around_receive(
        self,
        original: Callable[..., tuple[bool, str]],
        updater: Any,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        """Receive one bucket and record its copies, or receive all buckets that were received before.

        Returns whether it succeeded, and a message (``labels``).
        """
        groups = updater._model_update_group  # noqa: SLF001 (SGLang has no public way)
        group = groups.get(group_name)
        if load_format not in ("flattened_bucket", *_DIRECT):
            return original(updater, names, dtypes, shapes, group_name, load_format)
        if group is None:  # SGLang's own method would end the process
            return False, f"there is no group {group_name}: its update was given up"
        failure, received = None, 0
        try:
            _leave_others(groups, group_name)
            if load_format == "flattened_bucket":
                self._receive_bucket(updater, Channel(group=group, main=group), names, dtypes, shapes)
            else:
                parts = shapes if load_format in (DIRECT_BY_PART, DIRECT_BY_PART_CHECKED) else None
                coming = channels(groups, group_name, parts, len(names))
                received = self._receive_all(updater, coming, names, is_checked=load_format in _CHECKED)
        except Exception as error:
            logger.exception("asyncrl: a weight update failed")
            failure = f"{type(error).__name__}: {error}"
        # Invariant: every rank of the engine comes here, also after a failure, and ``first_failure`` returns None on
        # all of them or on none.  Otherwise some would wait in a collective that the others never call.
        ranks = ranks_of_this_engine()
        failure = first_failure(failure, ranks)
        if failure is not None:
            return False, f"weights may be partly updated: {failure}"
        refused = refused_by_any(names, self._refused, ranks)
        told = [RECORDED, f"{NOT_REPLAYED}{json.dumps(refused)}" if refused else ""]
        if load_format in _DIRECT:
            buckets = [self._recorded[name] for name in names]
            needed = sum(bucket.needed_bytes for bucket in buckets)
            told.append(report([not bucket.is_unused for bucket in buckets], received, needed, ranks))
        return True, " ".join(filter(None, told))

    def _receive_bucket(self, updater: Any, channel: Channel, names: Any, dtypes: Any, shapes: Any) -> None:
        bucket = RecordedBucket(
            names=tuple(names),
            dtypes=tuple(dtypes),
            shapes=tuple(map(tuple, shapes)),
            num_bytes=num_bytes(dtypes, shapes),
        )
        buffer = self._make_room(updater, bucket.num_bytes)[0]
        flat = buffer[: bucket.num_bytes]
        wait(broadcast(flat, channel), flat, channel)
        finish(flat, channel)  # a loader may read a value, and would wait for good if the trainer has died
        if bucket.names[0] in self._refused:
            load_alone(updater.get_model(), bucket, flat)
            bucket.refuse()
        else:
            bucket.watch(
                flat,
                lambda: updater.get_model().load_weights(bucket.tensors(flat)),
                may_be_unused=part_of_this_rank().num_parts > 1,
            )
            bucket.launch_once(buffer)
        finish(flat, channel)
        self._recorded[bucket.names[0]] = bucket
        self._places = _places(updater.get_model())

    def _receive_all(
        self, updater: Any, coming: Sequence[Channel | None], names: Sequence[str], *, is_checked: bool
    ) -> int:
        """Receive all buckets that come on a channel; return their bytes.

        Raises ValueError, before anything is received, if this rank needs a bucket that does not come.
        """
        self._forget_if_moved(updater.get_model())
        buckets = [self._recorded[name] for name in names]
        parts = self._parts(updater, buckets, coming)
        check = ReplayCheck(updater.get_model(), buckets)
        # Invariant: the copies of bucket i-1 are launched before the broadcast of bucket i+1, which fills the same
        # buffer and waits for all that this stream has been given (``broadcast``).  In another order, or with copies on
        # another stream, weights would get bytes of the wrong bucket.
        following = broadcast(parts[0].flat, parts[0].channel)
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            wait(following, part.flat, part.channel)
            is_alone = is_checked or part.bucket.needs_test or part.bucket.names[0] in self._refused
            if is_alone:  # before the next broadcast: a test's first launch waits for it, for good if a member died
                self._load_and_test(updater, part, check, is_checked=is_checked)
            if after is not None:  # before this bucket's copies, so that it arrives while they are made
                following = broadcast(after.flat, after.channel)
            if not is_alone:
                self._load(updater, part)
        finish(self._buffers[0], parts[-1].channel)
        return sum(part.bucket.num_bytes for part in parts)

    def _parts(
        self, updater: Any, buckets: Sequence[RecordedBucket], coming: Sequence[Channel | None]
    ) -> list["_Part"]:
        """Return the buckets that come, each with its place in one of the two buffers."""
        for bucket, channel in zip(buckets, coming, strict=True):
            if channel is None and not bucket.is_unused:
                raise ValueError(f"this rank holds weights of the bucket of {bucket.names[0]}, sent to others alone")
        mine = [(bucket, channel) for bucket, channel in zip(buckets, coming, strict=True) if channel is not None]
        buffers = self._make_room(updater, max(bucket.num_bytes for bucket, _ in mine))
        return [
            _Part(bucket=bucket, channel=channel, flat=buffers[number % 2][: bucket.num_bytes], buffer=number % 2)
            for number, (bucket, channel) in enumerate(mine)
        ]

    def _load_and_test(self, updater: Any, part: "_Part", check: ReplayCheck, *, is_checked: bool) -> None:
        """Load a bucket with no broadcast in flight.

        Raises ValueError if it ``is_checked`` and differs from what the trainer sent.
        """
        bucket = part.bucket
        if is_checked:
            check_arrival(part.flat, part.channel, bucket.names[0])
        finish(part.flat, part.channel)
        if not bucket.is_replayed:
            load_alone(updater.get_model(), bucket, part.flat)
        else:
            bucket.is_tested = check.passes(bucket, part.flat, lambda: bucket.copy(self._buffers, part.buffer))
            if not bucket.is_tested:
                self._refuse(bucket)
        if is_checked:
            bucket.check(part.buffer)

    def _refuse(self, bucket: RecordedBucket) -> None:
        logger.warning(
            "asyncrl: a replay of the bucket of %s is not all that SGLang's loaders do; they load it in every update",
            bucket.names[0],
        )
        self._refused.add(bucket.names[0])
        bucket.refuse()

    def _load(self, updater: Any, part: "_Part") -> None:
        if not part.bucket.is_replayed:
            # Invariant: the host waits for this bucket first, with a deadline: a loader may read a value.  The next
            # broadcast may be in flight, because a loader waits for this stream only.  Loaders must launch on this
            # thread (in 0.5.16 they use others for CPU tensors only), or the buffer could be filled again too early.
            finish(part.flat, part.channel)
            updater.get_model().load_weights(part.bucket.tensors(part.flat))
        else:
            part.bucket.copy(self._buffers, part.buffer)

    def _forget_if_moved(self, model: Any) -> None:
        """Drop all recorded copies if the model's weights have moved.

        Copies to the old addresses would change tensors that the model no longer uses.
        """
        if (places := _places(model)) != self._places:
            logger.warning("asyncrl: the model's weights have moved; SGLang's loaders load them from now on")
            self._places = places
            for bucket in self._recorded.values():
                bucket.forget()

    def _make_room(self, updater: Any, num_bytes: int) -> list[Any]:
        """Return two buffers of at least ``num_bytes`` bytes, replaced if they are too small."""
        import torch

        # Invariant: called before the first broadcast of an update.  Allocating may wait for the whole GPU, and a
        # broadcast in flight would still write to the old buffers.
        if not self._buffers or self._buffers[0].numel() < num_bytes:
            for bucket in self._recorded.values():
                bucket.copies.clear()  # views of the old buffers, which would keep them alive and copy old bytes
            self._buffers = []  # freed first, so that old and new ones are never there at the same time
            size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=updater.device) for _ in range(2)]
        return self._buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One bucket of an update that sends all buckets."""

    bucket: RecordedBucket
    channel: Channel
    flat: Any
    """The bytes that the bucket is received into: the beginning of a buffer."""
    buffer: int
    """The number of that buffer, 0 or 1."""


def _places(model: Any) -> list[int]:
    """Return the addresses of the model's weights."""
    return [parameter.data_ptr() for parameter in model.parameters()]


# ---- groups


def first_failure(failure: str | None, ranks: Any) -> str | None:
    """Return this rank's failure, or a message if another rank has failed; None on all ranks if none has.

    Needed because SGLang returns only the answer of an engine's first rank.  Collective over ``ranks``: a rank that has
    failed waits here for the others, for ``arrival.ARRIVAL_S`` at most.
    """
    import torch
    import torch.distributed as dist

    if ranks is None:
        return failure
    all_is_well = torch.tensor(int(failure is None))
    dist.all_reduce(all_is_well, op=dist.ReduceOp.MIN, group=ranks)
    return failure or (None if all_is_well else "another rank of this engine failed; the server's log says why")


def refused_by_any(names: Sequence[str], refused: set[str], ranks: Any) -> list[str]:
    """Return the ``names`` that are ``refused`` on any rank, because the driver gets the first rank's answer only.

    Collective over ``ranks``; ``names`` must be the same on all of them.
    """
    import torch
    import torch.distributed as dist

    flags = torch.tensor([name in refused for name in names], dtype=torch.int32)
    if ranks is not None:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=ranks)
    return [name for name, is_refused in zip(names, flags.tolist(), strict=True) if is_refused]


def _leave_others(groups: dict[str, Any], present: str) -> None:
    """Leave all groups but ``present`` and the group of this rank's expert part below it.

    They date from before an engine was lost or restarted.  They are of no use and hold GPU memory.  Raises RuntimeError
    if ``present`` is the older one: the command is late, and its update was given up.
    """
    from asyncrl.engines.weight_sync.group_abort import is_abandoned

    others = [each for each in groups if each != present and (asked_parts(each) or (each,))[0] != present]
    if others and is_abandoned(groups[present]):
        raise RuntimeError("the trainer has given this update up")
    for name in others:
        _leave(groups.pop(name))


def _leave(group: Any) -> None:
    import torch.distributed as dist

    # Invariant: abort first.  It ends collectives in flight; ``destroy_process_group`` alone may wait for members that
    # are gone.
    with suppress(RuntimeError):  # its other members may be gone
        group.abort()
    dist.destroy_process_group(group)

"""The trainer's side of a path check: meet one engine in a separate group, with a deadline."""

import logging
from threading import Thread

import torch
import torch.distributed as dist

from asyncrl.engines.megatron.weights.update_group import GroupStore, join_update_group, stream_of_its_own
from asyncrl.engines.weight_sync.group_abort import UpdateGroups, abandon
from asyncrl.engines.weight_sync.path_check import Meeting, meet, wait_until_all_met
from asyncrl.errors import WeightUpdateFailed

logger = logging.getLogger(__name__)

FREED_S = 5.0
"""The time in which the thread of an aborted check must end, in seconds."""


def meet_engine(where: Meeting, device: torch.device, timeout_s: float) -> None:
    """Form the group ``where`` as its rank 0, meet the engine in it (``path_check``), and leave it.

    Raises WeightUpdateFailed after about ``timeout_s``.
    """
    try:
        thread = _MeetingThread(where, device, timeout_s)
    except RuntimeError as error:
        raise WeightUpdateFailed(f"cannot serve the store of {where.group_name}: {error}") from error
    if not thread.has_ended(timeout_s):
        thread.give_up()
        raise WeightUpdateFailed(f"did not meet the engine within {timeout_s:g} s")
    if thread.failure is not None:
        raise WeightUpdateFailed(f"did not meet the engine: {thread.failure}")


class _MeetingThread:
    """A thread that meets an engine, and its failure.

    A separate thread, because nothing ends the forming of an NCCL communicator whose members do not all come.
    """

    def __init__(self, where: Meeting, device: torch.device, timeout_s: float) -> None:
        # Invariant: only the thread uses the group, and it alone leaves it.  The waiting thread may abort the group,
        # which any thread may.  ``failure`` is read only after the thread has ended; an exception would keep the group.
        self.failure: str | None = None
        self._where = where
        self._device = device
        self._timeout_s = timeout_s
        self._store = GroupStore(where.master_address, where.master_port)
        self._group: dist.ProcessGroup | None = None
        self._thread = Thread(target=self._run, name="asyncrl-path-check", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        """Whether the thread has ended; waits for at most ``within_s`` seconds."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Abort the group or its forming.  A thread that nevertheless stays is left alone, with the little it holds."""
        self._store.close()  # first: a thread that waits in the store holds its connection
        if self._group is not None:
            abandon(UpdateGroups(main=self._group))
        if not self.has_ended(FREED_S):
            logger.warning("the path check %s still waits for its engine, in a thread", self._where.group_name)

    def _run(self) -> None:
        where, timeout_s = self._where, self._timeout_s
        try:
            self._group = group = join_update_group(
                self._store, where.world_size, where.group_name, where.backend, timeout_s
            )
            try:
                with stream_of_its_own(self._device):
                    meet(group, self._device, timeout_s)
                wait_until_all_met(group, timeout_s)
            finally:
                abandon(UpdateGroups(main=group))
                dist.destroy_process_group(group)
        except (RuntimeError, TimeoutError, ValueError) as error:
            self.failure = str(error)
        finally:
            self._store.close()

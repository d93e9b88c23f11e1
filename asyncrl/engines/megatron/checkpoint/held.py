"""The lease of ``--save`` during a run: taken before anything expensive, renewed by a thread, released at the end."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import NoReturn

from asyncrl.config.areas import CheckpointConfig
from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.engines.megatron.checkpoint.directory import check_save
from asyncrl.engines.megatron.checkpoint.lease import HEARTBEAT_S, Claim, release, renew, take
from asyncrl.engines.megatron.checkpoint.writes import fence
from asyncrl.errors import LeaseLost, unusable

logger = logging.getLogger(__name__)

RELEASE_S = 5.0
"""Seconds for the release of a lease.  On a file server that is away, it would keep the program."""


class SaveLease:
    """A lease that a thread renews, whatever the main thread and the event loop do."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self._stopping = Event()
        self._renewing = in_daemon_thread(self._renew, "save-lease")

    async def watch(self) -> NoReturn:
        """Wait, and raise LeaseLost as soon as another run has taken the folder."""
        await asyncio.wrap_future(self._renewing)
        raise AssertionError("the lease was released while it was watched")

    def release(self) -> None:
        """End the lease: the next run takes the folder at once."""
        # Not joined: the thread may wait for a file server that is away.  A late heartbeat does no harm.
        self._stopping.set()
        if self._renewing.done() and self._renewing.exception() is not None:
            return  # the folder is another run's
        releasing = in_daemon_thread(lambda: release(self.claim), "lease-release")
        try:
            releasing.result(timeout=RELEASE_S)
        except OSError as error:  # a timeout is one
            why = f"no answer within {RELEASE_S:g} s" if isinstance(error, TimeoutError) else error
            logger.warning("save %s: its lease was not released, and expires: %s", self.claim.root, why)

    def _renew(self) -> None:
        """Give heartbeats until the lease is released or lost.  Runs in the thread."""
        is_failing = False
        while not self._stopping.wait(HEARTBEAT_S):
            try:
                renew(self.claim)
            except LeaseLost:
                if self._stopping.is_set():
                    return
                raise
            except OSError as error:
                # An outage alone ends nothing: the lease is lost only when another run takes it.
                if not is_failing:
                    logger.warning("save %s: no heartbeat of its lease: %s", self.claim.root, error)
                is_failing = True
            else:
                is_failing = False


@contextmanager
def held(
    checkpoint: CheckpointConfig, say: Callable[[str], None], last_token: Callable[[Path], int] = lambda save: 0
) -> Iterator[SaveLease | None]:
    """Hold the lease of ``--save`` during the body; None without ``--save``.

    Removes what earlier runs left unfinished there.  ``last_token`` returns the largest fencing token that the folder's
    other files name, and may raise OSError.  Raises NotNow if another run holds the folder or
    the disk does not answer, and ConfigError if the folder cannot be used.
    """
    if checkpoint.save is None:
        yield None
        return
    check_save(checkpoint)
    try:
        claim = take(checkpoint.save, say, last_token(checkpoint.save))
        fence(claim)
    except OSError as error:
        raise unusable(f"save {checkpoint.save}: its lease cannot be taken: {error}", error) from error
    lease = SaveLease(claim)
    try:
        yield lease
    finally:
        lease.release()

"""The first signal of a run."""

import asyncio
import os
import signal

import pytest

from asyncrl.app.signals import Signals


async def _signalled(signals: Signals, *, seconds: float, grace_s: float) -> str:
    """Get SIGTERM in a block that lasts some seconds longer, and clean up for longer than its grace."""
    with signals.cancelling(lambda: True, grace_s=grace_s):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(seconds)
    await asyncio.sleep(grace_s + 0.2)
    return "ended by itself"


def test_a_run_that_ended_within_its_grace_is_not_cancelled_afterwards() -> None:
    with Signals.caught() as signals:
        signals.remember()
        assert asyncio.run(_signalled(signals, seconds=0.02, grace_s=1.0)) == "ended by itself"


def test_a_run_that_takes_longer_than_its_grace_is_cancelled() -> None:
    with Signals.caught() as signals, pytest.raises(asyncio.CancelledError):
        signals.remember()
        asyncio.run(_signalled(signals, seconds=5.0, grace_s=0.1))

"""The simulator's clock, and lengths for the fake engine."""

from collections.abc import Sequence
from typing import Any

from asyncrl.sim.clock import Deadlock, VirtualLoop, run_virtually

__all__ = ["Deadlock", "VirtualLoop", "lengths_in_rotation", "run_virtually"]


def lengths_in_rotation(lengths: Sequence[int]) -> Any:
    """A ``lengths`` function for FakeEngine: the given lengths in rotation, by the request's seed."""
    return lambda request: lengths[request.seed % len(lengths)]

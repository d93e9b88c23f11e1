"""The simulator's clock, and lengths for the fake engine."""

from collections.abc import Sequence
from typing import Any

from asyncrl.sim.clock import Deadlock, VirtualLoop, run_virtually

__all__ = ["Deadlock", "VirtualLoop", "lengths_in_turn", "run_virtually"]


def lengths_in_turn(lengths: Sequence[int]) -> Any:
    """A ``lengths`` function for FakeEngine: one after the other, over and over, by the request's seed."""
    return lambda request: lengths[request.seed % len(lengths)]

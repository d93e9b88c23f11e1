"""Named points at which a simulation of faults may interfere.  In a run they do nothing.

``asyncrl/sim/faults`` installs a function for the time of one simulated life: it may raise there what the operating
system could raise, or end the simulated process.  A point costs one look at a global variable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_installed: Callable[[str], None] | None = None


def at(name: str) -> None:
    """Let an installed simulation act at the point ``name``; no-op without one."""
    if _installed is not None:
        _installed(name)


def is_installed() -> bool:
    """Return whether a simulation is running."""
    return _installed is not None


@contextmanager
def installed(act: Callable[[str], None]) -> Iterator[None]:
    """Have ``act`` called with the name of each point that is reached in the block."""
    global _installed
    before, _installed = _installed, act
    try:
        yield
    finally:
        _installed = before

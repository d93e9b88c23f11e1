"""The identity of a process, which tells it from later processes with the same id.

The time at which a process began does not: it follows from the wall clock, which may be set at any moment.
"""

import os
from pathlib import Path


def machine_id() -> str | None:
    """Return an id of this boot and of the namespace of process ids; containers of one machine have different ones.

    None if the system has none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def start_of(pid: int) -> str | None:
    """Return the start time of a process, in the kernel's ticks since boot; None if it has ended."""
    try:
        # The name, in parentheses, may have any characters.  Then come the state and 19 fields before the start time.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]

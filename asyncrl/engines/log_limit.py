"""A bound on the log of a process that writes to the file itself, so that a rename would not end its growth."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

LOG_BYTES = 64 * 1024 * 1024
"""Size at which a server's log is moved aside."""


def shorten_log(path: Path, most_bytes: int = LOG_BYTES) -> bool:
    """Move the content of a log of ``most_bytes`` or more to ``path.1``; return whether that was done.

    The file itself stays, because the process has it open: it must append (``O_APPEND``), and then continues at the
    start.  Lines that it writes during the copy, some 50 ms, are lost.  On a full disk the content is dropped.
    """
    try:
        if path.stat().st_size < most_bytes:
            return False
        before = path.with_name(f"{path.name}.1")
        try:
            shutil.copyfile(path, before)
        except OSError:
            with suppress(OSError):
                before.unlink()
        os.truncate(path, 0)
    except OSError:
        return False
    return True

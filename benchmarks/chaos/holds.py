"""Moments of a run that are too short to be met by chance: the process in one of them waits until the fault happened.

Two programs of this module run inside the observed run, and change nothing until the file ``armed`` is there:

    update    a plug-in of SGLang: before a broadcast of weights is received
    commit    an audit hook of Python in every process (``site/sitecustomize.py``): before a rename of a checkpoint

The first process that reaches the moment removes ``armed``, writes ``reached``, and waits until that file is gone.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import sglang_plugin

FOLDER = "ASYNCRL_CHAOS_HOLD"
"""Environment variable with the folder of ``armed`` and ``reached``."""
SAVE = "ASYNCRL_CHAOS_SAVE"
"""Environment variable with the folder of checkpoints."""
ARMED, REACHED = "armed", "reached"
HELD_S = 3.0
"""Most seconds of a hold."""
UPDATE = "update"
RENAMES = {"folder": "iter_", "tracker": "latest_"}
"""Beginnings of the new names, by what is renamed."""


def environment(folder: Path, save: Path) -> dict[str, str]:
    """Create ``folder`` and return the environment variables with which a run can be held there."""
    found = sglang_plugin.environment(folder, "asyncrl_chaos", __name__, Path(__file__).parent / "site")
    return {FOLDER: str(folder), SAVE: str(save.resolve()), **found}


def arm(folder: Path, moment: str) -> None:
    """Hold the first process that reaches ``moment``: "update", or a key of RENAMES."""
    (folder / REACHED).unlink(missing_ok=True)
    (folder / ARMED).write_text(moment)


def is_reached(folder: Path) -> bool:
    """Whether a process waits."""
    return (folder / REACHED).exists()


def release(folder: Path) -> None:
    """Let the run continue, and hold no further process."""
    (folder / ARMED).unlink(missing_ok=True)
    (folder / REACHED).unlink(missing_ok=True)


def activate() -> None:
    """Install the hold of updates.  SGLang calls this in each of its processes."""
    import torch.distributed as dist

    original = dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        hold(UPDATE)
        return original(*args, **kwargs)

    dist.broadcast = broadcast


def watch_renames() -> None:
    """Install the hold of commits in this process, if the environment asks for it."""
    save = os.environ.get(SAVE)
    if save is None or FOLDER not in os.environ:
        return

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and str(args[1]).startswith(save):
            name = os.path.basename(str(args[1]))
            for moment, begins in RENAMES.items():
                if name.startswith(begins):
                    hold(moment)

    sys.addaudithook(hook)


def hold(moment: str) -> None:
    """Wait here if ``moment`` is armed and no other process was faster."""
    folder = Path(os.environ[FOLDER])
    armed, reached = folder / ARMED, folder / REACHED
    try:
        if armed.read_text() != moment:
            return
        armed.rename(reached)
    except OSError:  # not armed, or another process was faster
        return
    deadline = time.monotonic() + HELD_S
    while reached.exists() and time.monotonic() < deadline:
        time.sleep(0.002)

"""A plug-in of SGLang for ``benchmarks.lost_engine --kill pause`` and ``update``: a server dies in a weight update.

The plug-in waits for a file that the environment names.  The first server of one GPU that is then asked to pause, or to
receive a bucket, removes the file and kills itself.  Of a bucket, the trainer and other servers are then within the
broadcast.
"""

import os
import signal
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import sglang_plugin

ARMED = "ASYNCRL_LOST_ENGINE_ARMED"
"""Environment variable with the path of the file."""
AT = "ASYNCRL_LOST_ENGINE_AT"
"""Environment variable with the moment."""
Moment = Literal["pause", "update"]
_PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"


def environment(folder: Path, armed: Path, moment: Moment) -> dict[str, str]:
    """Environment variables with which SGLang finds the plug-in, described in ``folder``; ``armed`` is the file."""
    return {ARMED: str(armed), AT: moment, **sglang_plugin.environment(folder, "asyncrl_dies_in_update", __name__)}


def activate() -> None:
    """Install the hook.  SGLang calls this in each of its processes."""
    if os.environ[AT] == "update":
        _before_broadcasts()
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PAUSE, lambda *args, **kwargs: _die_if_armed(), HookType.BEFORE)


def _before_broadcasts() -> None:
    import torch.distributed as dist

    original = dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        _die_if_armed()
        return original(*args, **kwargs)

    dist.broadcast = broadcast


def _die_if_armed() -> None:
    if _claim(Path(os.environ[ARMED])):
        os.kill(os.getpid(), signal.SIGKILL)


def _claim(file: Path) -> bool:
    """Remove ``file``; True for exactly one of the processes that try."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True

"""A plug-in of SGLang, for ``lost_engine.py --kill update``: a server dies in the middle of a weight update.

As soon as a file is there that the environment names, the first server of one GPU that is to receive a bucket takes the
file away and kills itself, while trainer and other servers are within the broadcast.
"""

import os
import signal
from pathlib import Path
from typing import Any

from benchmarks._circumstances import ROOT

ARMED = "ASYNCRL_LOST_ENGINE_ARMED"
"""Environment variable: the file."""
_METADATA = "Metadata-Version: 2.1\nName: asyncrl-dies-in-update\nVersion: 0\n"
_ENTRY_POINTS = f"[sglang.srt.plugins]\nasyncrl_dies_in_update = {__name__}:activate\n"


def environment(folder: Path, armed: Path) -> dict[str, str]:
    """With it SGLang finds the plug-in, which is described in ``folder``; ``armed`` is the file."""
    described = folder / "asyncrl_dies_in_update-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(_METADATA)
    (described / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")
    return {ARMED: str(armed), "PYTHONPATH": ":".join(filter(None, paths))}


def activate() -> None:
    """SGLang calls it, in each of its processes."""
    import torch.distributed as dist

    armed, original = Path(os.environ[ARMED]), dist.broadcast

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        if _claim(armed):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    dist.broadcast = broadcast


def _claim(file: Path) -> bool:
    """Whether it was there, and nobody else took it."""
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True

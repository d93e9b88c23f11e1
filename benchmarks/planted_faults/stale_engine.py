"""A plug-in of SGLang that makes one engine keep its old weights: it receives each update and then undoes it.

The engine takes part in the broadcast and acknowledges the new version, as an engine would whose loading is broken.
The first scheduler process that is asked for an update becomes this engine, for all later updates as well.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import sglang_plugin

CLAIM = "ASYNCRL_STALE_ENGINE"
"""Environment variable with the path of the file that names the process."""
LOGGED = "planted fault: this engine keeps its old weights"
_UPDATE = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    "update_weights_from_distributed"
)
"""Outside of asyncrl's own hook of updates, which replaces what it hooks."""

logger = logging.getLogger(__name__)


def environment(folder: Path) -> Mapping[str, str]:
    """Return the environment variables with which SGLang finds the plug-in, described in ``folder``."""
    found = sglang_plugin.environment(folder / "plugin", "asyncrl_stale_engine", __name__)
    return {CLAIM: str(folder / "stale_engine"), **found}


def activate() -> None:
    """Install the hook.  SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATE, _undone, HookType.AROUND)


def _undone(original: Any, manager: Any, asked: Any) -> Any:
    if not _is_claimed_by_this_process():
        return original(manager, asked)
    weights = dict(manager.tp_worker.model_runner.model.named_parameters())
    before = {name: tensor.detach().clone() for name, tensor in weights.items()}
    answer = original(manager, asked)
    for name, tensor in weights.items():
        tensor.data.copy_(before[name])
    return answer


def _is_claimed_by_this_process() -> bool:
    """Whether this process was the first to ask."""
    file = Path(os.environ[CLAIM])
    try:
        with file.open("x") as claim:
            claim.write(str(os.getpid()))
        logger.warning(LOGGED)
    except FileExistsError:
        return file.read_text() == str(os.getpid())
    return True

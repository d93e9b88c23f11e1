"""How the trainer tells engines that it has given up a weight update.

Who waits in a broadcast on a GPU does not see that another member has died.  The trainer serves the group's store, and
says it there.
"""

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_KEY = "asyncrl-abandoned"


def abandon(group: dist.ProcessGroup) -> None:
    """Nobody shall wait any more, neither the engines nor any thread here: the group is of no use after this."""
    with suppress(RuntimeError, KeyError):  # nobody can be told
        _store(group).set(_KEY, "")
    with suppress(RuntimeError):  # of a group whose member died
        group.abort()


def is_abandoned(group: dist.ProcessGroup) -> bool:
    """Also when the trainer is gone, and its store with it."""
    try:
        return bool(_store(group).check([_KEY]))
    except (RuntimeError, KeyError):
        return True


def _store(group: dist.ProcessGroup) -> Any:
    """Where its members met; torch has no public way to it."""
    return distributed_c10d._get_process_group_store(group)  # noqa: SLF001

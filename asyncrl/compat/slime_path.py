"""The package ``slime`` for user files: the shim in ``slime_shim``, in a process that runs such files."""

import importlib
import sys
from pathlib import Path

SHIM = Path(__file__).with_name("slime_shim")
"""The folder on ``sys.path`` from which the shim is imported."""
PACKAGE = SHIM / "slime"


def provide_slime() -> None:
    """Make ``import slime`` give the shim in this process, from now on.

    It takes precedence over a folder ``slime`` in the working directory and over an installed package: a package that
    is imported already finds its modules by itself, whatever ``sys.path`` has in front later.
    """
    known = getattr(sys.modules.get("slime"), "__file__", None)
    if known is not None and Path(known).is_relative_to(SHIM):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        del sys.modules[name]
    sys.path[:] = [str(SHIM), *(entry for entry in sys.path if entry != str(SHIM))]
    importlib.import_module("slime")

"""Loading of the user's functions of the objective, in the driver's check and in every trainer rank."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.compat import SlimeArgs, provide_slime
from asyncrl.plugins.kinds import ADVANTAGE, LOSS, TIS
from asyncrl.plugins.resolve import load_plugin

if TYPE_CHECKING:
    from asyncrl.algorithms.custom_functions import Custom


def load_custom(
    advantage: str | None, loss: str | None, args: SlimeArgs, folder: Path, tis: str | None = None
) -> "Custom":
    """Load the functions of these paths.

    Modules are also searched in ``folder``, because a rank may run in another working directory.  A correction may
    import from ``slime``, so this process gets the package's shim of it.

    Raises PluginError.
    """
    from asyncrl.algorithms.custom_functions import Custom  # imports torch

    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if tis is not None:
        provide_slime()
    return Custom(
        advantage=None if advantage is None else load_plugin(advantage, ADVANTAGE, args),
        loss=None if loss is None else load_plugin(loss, LOSS, args),
        tis=None if tis is None else load_plugin(tis, TIS, args),
    )

"""``import slime`` in the process of user code.

The finder below comes first on ``sys.meta_path``.  So the shim is found before an installed slime, and before the
folder ``slime`` of slime's own checkout, which is the working directory of many users.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "slime"
FOLDER = Path(__file__).parents[1] / "slime_shim" / PACKAGE


class ShimFinder:
    """Finds the package ``slime``; its modules are found in the package's folder as usual."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the shim's spec for ``slime``, None for any other module."""
        if name != PACKAGE:
            return None
        return spec_from_file_location(name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])


def install_shim() -> None:
    """Let ``import slime`` give the shim, in this process.  Idempotent."""
    if ShimFinder not in sys.meta_path:
        sys.meta_path.insert(0, ShimFinder)
    other = getattr(sys.modules.get(PACKAGE), "__file__", None)
    if PACKAGE in sys.modules and other != str(FOLDER / "__init__.py"):
        remove_modules()


def remove_shim() -> None:
    """Undo ``install_shim``."""
    if ShimFinder in sys.meta_path:
        sys.meta_path.remove(ShimFinder)
        remove_modules()


def remove_modules() -> None:
    """Forget the imported modules of any slime."""
    for name in [each for each in sys.modules if each.partition(".")[0] == PACKAGE]:
        del sys.modules[name]

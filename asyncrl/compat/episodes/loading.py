"""The loader of functions by path, for the modules of the shim.

``plugins`` imports files, but ``compat`` may not import ``plugins``.  So the program that starts in the user's process
sets the loader, before it imports the first user file.
"""

from collections.abc import Callable
from typing import Any

from asyncrl.errors import PluginError

Load = Callable[[str], Any]
"""Returns the function of a path.  Raises PluginError."""

_loaders: list[Load] = []
"""The loader of the process, once it is set."""


def set_loader(load: Load) -> None:
    """Set the loader of the process."""
    _loaders[:] = [load]


def load(path: str) -> Any:
    """Return the function of ``dotted.path.name``, ``module:name`` or ``file.py:name``.  Raises PluginError."""
    if not _loaders:
        raise PluginError(f"'{path}': functions are loaded only in the process of user code")
    return _loaders[0](path)

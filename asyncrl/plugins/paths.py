"""The import of the object that a path names."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.compat import provide_slime
from asyncrl.errors import PluginError


def found(path: str) -> Any:
    """Import the object named by ``dotted.path.name``, ``module:name`` or ``file.py:name``.  Raises PluginError.

    From now on ``import slime`` gives the shim in this process.
    """
    provide_slime()
    place, colon, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if path.endswith(".py") or (place.endswith(".py") and not name):
        raise PluginError("names no function; write file.py:function")
    if not place or not name:
        raise PluginError("must be dotted.path.name, module:function or file.py:function")
    module = module_of_file(Path(place)) if colon == ":" and place.endswith(".py") else _module(place)
    if not hasattr(module, name):
        has = _functions(module)
        raise PluginError(f"{place} has no function '{name}'" + (f"; it has: {', '.join(has)}" if has else ""))
    return getattr(module, name)


def _module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise PluginError(_not_found(error.name, here)) from None
        raise PluginError(_raised(error)) from error
    except (Exception, SystemExit) as error:
        raise PluginError(_raised(error)) from error


def _not_found(name: str, here: str) -> str:
    if "." in name:  # the package around it was found
        return f"no module named '{name}'"
    return (
        f"no module named '{name}' in {here} or on PYTHONPATH; "
        f"export PYTHONPATH=FOLDER, the folder that has {name}, or write file.py:function"
    )


def module_of_file(path: Path) -> ModuleType:
    """Import a file under a unique name, once per process.  Raises PluginError."""
    full = path.expanduser().resolve()
    if not full.is_file():
        raise PluginError(f"no such file: {full}")
    # A unique name, so that a user's types.py does not replace the standard library's types.
    name = f"asyncrl_plugin_{full.stem}_{hashlib.sha256(str(full).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(_raised(error)) from error
    return module


def _raised(error: BaseException) -> str:
    """Describe the exception of an import and its location."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "slime" and frames:
        symbol = ".".join(filter(None, (error.name, error.name_from)))
        return f"{frames[-1].filename}:{frames[-1].lineno} needs {symbol}, which asyncrl does not have"
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    where = "" if isinstance(error, SyntaxError) else where  # its text has the location
    return f"raised on import: {type(error).__name__}: {error}{where}"


def _functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not inspect.isclass(value)
        if getattr(value, "__module__", "").startswith(module.__name__)
    )

"""User functions, named by path on the command line: found, imported and checked before anything starts."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.compat import OUR_NAMES, SlimeArgs, filter_from_slime, reward_from_slime
from asyncrl.errors import PluginError
from asyncrl.protocols import KeepFn, RewardFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind[F]:
    """What a plug-in of one flag must look like."""

    flag: str
    is_async: bool
    parameters: tuple[str, ...]
    slime_parameters: tuple[str, ...]
    """slime's shape has ``args`` as its first parameter, ours never."""
    from_slime: Callable[[Callable[..., Any], SlimeArgs], F]


REWARD: Kind[RewardFn] = Kind(
    flag="--custom-rm-path",
    is_async=True,
    parameters=("prompt", "sample"),
    slime_parameters=("args", "sample"),
    from_slime=reward_from_slime,
)
KEEP: Kind[KeepFn] = Kind(
    flag="--dynamic-sampling-filter-path",
    is_async=False,
    parameters=("group",),
    slime_parameters=("args", "samples"),
    from_slime=filter_from_slime,
)


def load_plugin[F](path: str, kind: Kind[F], args: SlimeArgs) -> F:
    """The function behind ``dotted.path.name``, ``module:function`` or ``file.py:function``.

    A function whose first parameter is ``args`` is of slime's shape and is handed ``args``.  Modules are looked for in
    the working directory first.  Raises PluginError.
    """
    try:
        function = _found(OUR_NAMES.get(path, path))
        is_slime = _checked_shape(function, kind)
    except PluginError as error:
        raise PluginError(f"{kind.flag} '{path}': {error}") from error.__cause__
    return kind.from_slime(function, args) if is_slime else function


def _found(path: str) -> Any:
    place, colon, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if path.endswith(".py") or (place.endswith(".py") and not name):
        raise PluginError("names no function; write file.py:function")
    if not place or not name:
        raise PluginError("must be dotted.path.name, module:function or file.py:function")
    module = _file(Path(place)) if colon == ":" and place.endswith(".py") else _module(place)
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
            raise PluginError(f"no module named '{error.name}'") from None
        raise PluginError(_raised(error)) from error
    except (Exception, SystemExit) as error:
        raise PluginError(_raised(error)) from error


def _file(path: Path) -> ModuleType:
    full = path.expanduser().resolve()
    if not full.is_file():
        raise PluginError(f"no such file: {full}")
    # A name of its own: types.py must not become the standard library's types.
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
    """What an import raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    where = "" if isinstance(error, SyntaxError) else where  # says so itself
    is_slime = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "slime"
    hint = "; import Sample and DynamicFilterOutput from asyncrl.compat instead" if is_slime else ""
    return f"raised on import: {type(error).__name__}: {error}{where}{hint}"


def _functions(module: ModuleType) -> list[str]:
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and not inspect.isclass(value)
        if getattr(value, "__module__", "").startswith(module.__name__)
    )


def _checked_shape(function: Any, kind: Kind[Any]) -> bool:
    """Whether it is of slime's shape.  Raises PluginError if it is neither that nor ours."""
    if inspect.isclass(function):
        raise PluginError("is a class; name a function, or an instance that can be called")
    if not callable(function):
        raise PluginError(f"is {function!r}, not a function")
    if _is_async(function) != kind.is_async:
        written, instead = ("'async def'", "'def'") if kind.is_async else ("'def'", "'async def'")
        raise PluginError(f"must be written with {written}, not {instead}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        raise PluginError("has no signature that can be read; wrap it in a function") from None
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind is first.VAR_POSITIONAL:
        raise PluginError("takes *args, so its shape cannot be told; use functools.wraps in its decorator")
    is_slime = first is not None and first.name == "args"
    wanted = kind.slime_parameters if is_slime else kind.parameters
    try:
        signature.bind(*wanted)
    except TypeError:
        ours, slimes = ", ".join(kind.parameters), ", ".join(kind.slime_parameters)
        taken = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise PluginError(f"must take ({ours}) or slime's ({slimes}, **kwargs), takes ({taken})") from None
    return is_slime


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

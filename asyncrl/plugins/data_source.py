"""The loading of the user's data source, in either shape."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from asyncrl.compat import SlimeArgs
from asyncrl.compat.data_sources import Dataset, RolloutDataSource, SlimeSource
from asyncrl.errors import ConfigError, PluginError
from asyncrl.hooks.native_source import METHODS, NativeSource
from asyncrl.hooks.prompt_source import FLAG
from asyncrl.plugins.arguments import Arguments, made, split
from asyncrl.plugins.paths import found
from asyncrl.protocols import UserSource

SLIME = "get_samples"
"""The method by which a source of slime's shape is known."""
_SHAPES = "take(), an iterator, or slime's get_samples(num_samples)"


def load_source(path: str, args: SlimeArgs, dataset: Callable[[], Dataset] | None = None) -> Callable[[], UserSource]:
    """Find the class, factory or object of ``path``; return a function that makes the source.

    The function may block.  A class or factory gets ``args`` if its first parameter has that name, or the arguments in
    ``path``.  An object of slime's shape without ``dataset`` gets that of ``--prompt-data``.  Both raise PluginError.
    For a class that derives from ``RolloutDataSource``, the function reads the rows and raises their DataError.
    """
    try:
        place, arguments = split(path)
        target = found(place)
        name = place.rpartition(":" if ":" in place else ".")[2]
        call = _call_of(target, name, arguments, args)
    except PluginError as error:
        raise PluginError(f"{FLAG} '{path}': {error}") from error.__cause__

    def make() -> UserSource:
        try:
            return _adapted(call(), args, dataset)
        except PluginError as error:
            raise PluginError(f"{FLAG} '{path}': {error}") from error.__cause__
        except ConfigError:  # of --prompt-data
            raise
        except Exception as error:
            raise PluginError(f"{FLAG} '{path}': {name}(...) raised {type(error).__name__}: {error}") from error

    return make


def _call_of(target: Any, name: str, arguments: Arguments | None, args: SlimeArgs) -> Callable[[], Any]:
    """Return the call that makes the user's object.  Raises PluginError if it cannot be called so."""
    if inspect.isclass(target) and not _is_source(target):
        raise PluginError(f"the class {name} has no {_SHAPES}")
    if arguments is not None:
        return lambda: made(name, target, arguments)
    if not inspect.isclass(target) and _is_source(target):
        return lambda: target
    if not callable(target):
        raise PluginError(f"is {target!r}, which has no {_SHAPES}")
    given: list[SlimeArgs] = []
    try:
        parameters = [*inspect.signature(target).parameters.values()]
    except ValueError:
        parameters = []
    if parameters and parameters[0].name == "args" and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters, given = parameters[1:], [args]
    missing = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if missing:
        raise PluginError(f"{name} takes {', '.join(missing)}; write {name}(...) with its arguments")
    return lambda: target(*given)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_source(thing: Any) -> bool:
    return any(hasattr(thing, name) for name in (SLIME, *METHODS))


def _adapted(source: Any, args: SlimeArgs, dataset: Callable[[], Dataset] | None) -> UserSource:
    if hasattr(source, SLIME):
        if dataset is not None and not hasattr(source, "dataset"):
            with suppress(AttributeError):  # it has slots: its own code knows where its prompts are
                source.dataset = dataset()
                if isinstance(source, RolloutDataSource):  # others may have prompts elsewhere
                    source.dataset.read()
        return SlimeSource(source, args)
    if _is_source(source):
        return NativeSource(source)
    raise PluginError(f"made a {type(source).__name__}, which has no {_SHAPES}")

"""The loading of a user function by path, with a check of its signature."""

import inspect
from typing import Any

from asyncrl.compat import OUR_NAMES, SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.plugins.arguments import made, split
from asyncrl.plugins.kinds import Kind
from asyncrl.plugins.paths import found


def load_plugin[F](path: str, kind: Kind[F], args: SlimeArgs) -> F:
    """Load the function of ``dotted.path.name``, ``module:function`` or ``file.py:function``.

    With arguments, as in ``file.py:name(0.5, high=0.9)``, ``name`` is called once, now, and must return the function.
    A function with a parameter ``args`` where slime has it, mostly first, has slime's signature.  Modules are searched
    in the working directory first.  Raises PluginError.
    """
    label = f"{kind.flag} '{path}'"
    try:
        plugin: F = _adapted(named_object(path), kind, args)
    except PluginError as error:
        raise PluginError(f"{label}: {error}") from error.__cause__
    return kind.guarded(plugin, label)


def _adapted[F](function: Any, kind: Kind[F], args: SlimeArgs) -> F:
    return kind.from_slime(function, args) if has_slime_shape(function, kind) else kind.from_native(function)


def named_object(path: str) -> Any:
    """Return the object that a path names, called with the arguments in the path.  Raises PluginError."""
    place, arguments = split(path)
    place = OUR_NAMES.get(place, place)
    function = found(place)
    return function if arguments is None else made(_name(place), function, arguments)


def _name(place: str) -> str:
    return place.rpartition(":" if ":" in place else ".")[2]


def has_slime_shape(function: Any, kind: Kind[Any]) -> bool:
    """Return whether the function has slime's signature.  Raises PluginError if it has neither slime's nor ours."""
    if inspect.isclass(function):
        raise PluginError(f"is a class; write {function.__name__}(...) with its arguments, or name a function")
    if not callable(function):
        raise PluginError(f"is {function!r}, not a function")
    if kind.is_async is not None and is_async(function) != kind.is_async:
        written, instead = ("'async def'", "'def'") if kind.is_async else ("'def'", "'async def'")
        raise PluginError(f"must be written with {written}, not {instead}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C
        raise PluginError("has no signature that can be read; wrap it in a function") from None
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.kind is first.VAR_POSITIONAL:
        raise PluginError("takes *args, so its signature is unknown; use functools.wraps in its decorator")
    is_slime = "args" in list(signature.parameters)[_place_of_args(kind) :][:1]
    if is_slime and not kind.slime_parameters:
        return True
    wanted = kind.slime_parameters if is_slime else kind.parameters
    try:
        signature.bind(*wanted, **dict.fromkeys(kind.slime_keywords if is_slime else ()))
    except TypeError:
        slime_names = ", ".join((*kind.slime_parameters, *kind.slime_keywords))
        slimes = f" or slime's ({slime_names}, **kwargs)" if kind.slime_parameters else ""
        taken = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise PluginError(f"must take ({', '.join(kind.parameters)}){slimes}, takes ({taken})") from None
    return is_slime


def _place_of_args(kind: Kind[Any]) -> int:
    return kind.slime_parameters.index("args") if kind.slime_parameters else 0


def is_async(function: Any) -> bool:
    """Return whether a function, or the call of an object, is written with 'async def'."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def signature_problem(function: Any, kind: Kind[Any]) -> str | None:
    """Return why ``function`` cannot be a function of this kind, judged by its signature; None if it can."""
    try:
        has_slime_shape(function, kind)
    except PluginError as error:
        return str(error)
    return None

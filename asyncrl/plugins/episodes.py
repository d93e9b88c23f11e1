"""The loading of a user's function or environment that generates samples, in the process of user code.

async def episode(ep)                                      native
async def generate(args, sample, sampling_params)          slime's, also with evaluation=False
async def generate(args, samples, evaluation=False)        slime's, of several samples
class with reset and step                                  an environment
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import PluginError
from asyncrl.plugins.arguments import Arguments, made, split
from asyncrl.plugins.paths import found, module_of_file
from asyncrl.plugins.resolve import is_async

FLAG = "--custom-generate-function-path"
FUNCTION_NAMES = ("generate", "custom_generate", "rollout", "episode", "run_episode")
"""The functions that a file without a name in the path may define, one of them."""

type Shape = Literal["native", "slime", "environment"]
"""The signature of a function, or a class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEpisode:
    """A user's function or class that generates samples."""

    shape: Shape
    function: Callable[..., Any]
    """The function; of an environment: makes the object."""


def load_episode(path: str) -> LoadedEpisode:
    """Import the function of ``--custom-generate-function-path`` and check its signature.  Raises PluginError."""
    place, arguments = (path, None) if path.endswith(".py") else split(path)
    named = _of_file(Path(place)) if place.endswith(".py") else found(place)
    if inspect.isclass(named) and hasattr(named, "step"):
        return LoadedEpisode(shape="environment", function=_environment(named, arguments))
    if arguments is not None:
        named = made(place.rpartition(":" if ":" in place else ".")[2], named, arguments)
    if hasattr(named, "step") and hasattr(named, "reset"):
        raise PluginError(f"is an object; name its class: file.py:{type(named).__name__}(...)")
    return LoadedEpisode(shape=shape_of(named), function=named)


def shape_of(function: Any) -> Shape:
    """Return the shape of a function by its signature.  Raises PluginError if it has none of those above."""
    if inspect.isclass(function):
        raise PluginError(
            f"is a class without step; an environment has reset and step, and {function.__name__}(...) with its "
            "arguments names an object that is called"
        )
    if not callable(function):
        raise PluginError(f"is {function!r}, not a function")
    if not is_async(function):
        raise PluginError("must be written with 'async def', not 'def'")
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if names[:1] != ["args"]:
        _check(signature, (1,), "(ep)")
        return "native"
    if names[1:2] == ["samples"]:
        _check(signature, (2,), "slime's (args, samples, evaluation=False)")
        return "slime"
    _check(signature, (3,), "slime's (args, sample, sampling_params)")
    return "slime"


def _check(signature: inspect.Signature, counts: tuple[int, ...], wanted: str) -> None:
    """Raise PluginError unless the function can be called with one of these numbers of arguments."""
    for number in counts:
        keywords = {"evaluation": False} if "evaluation" in signature.parameters else {}
        try:
            signature.bind(*range(number), **keywords)
        except TypeError:
            continue
        return
    taken = ", ".join(str(parameter) for parameter in signature.parameters.values())
    raise PluginError(f"must take {wanted}, takes ({taken})")


def _environment(cls: type[Any], arguments: Arguments | None) -> Callable[..., Any]:
    """Return a function that makes the object, or the class.  Raises PluginError for a class without ``reset``."""
    if not hasattr(cls, "reset"):
        raise PluginError(f"{cls.__name__} has step but no reset; an environment has both")
    return cls if arguments is None else partial(made, cls.__name__, cls, arguments)


def _of_file(path: Path) -> Any:
    """Return the one function of a file with a usual name, or else its one environment.  Raises PluginError."""
    module = module_of_file(path)
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    public = [value for value in own if inspect.iscoroutinefunction(value) and not value.__name__.startswith("_")]
    usual = [value for value in public if value.__name__ in (*FUNCTION_NAMES, path.stem)]
    environments = [value for value in own if inspect.isclass(value) and hasattr(value, "step")]
    candidates = usual or environments or public
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(f"{path.name}:{value.__name__}" for value in candidates)
    has = f"it has {names}" if names else "it has neither"
    raise PluginError(
        f"names no function; a file alone needs one function with 'async def', named {', '.join(FUNCTION_NAMES[:-1])} "
        f"or {FUNCTION_NAMES[-1]} if there are several, or one class with reset and step; {has}; write {path.name}:NAME"
    )

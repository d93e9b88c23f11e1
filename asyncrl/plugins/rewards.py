"""The loading of a user's reward: a function or a class, of a sample or of a group, in the driver and in workers."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl.compat import SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.plugins.arguments import Arguments, made, split
from asyncrl.plugins.kinds import GROUP_REWARD, REWARD
from asyncrl.plugins.paths import found, module_of_file
from asyncrl.plugins.resolve import has_slime_shape, is_async, named_object

METHOD = "compute_reward"
"""The method of a class reward: ``compute_reward(prompts, responses)`` returns a list of numbers."""
FUNCTION_NAMES = ("reward", "rm", "reward_func", "reward_fn", "custom_rm", "compute_reward")
"""The functions that a file without a name in the path may define, one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A user's reward in the native shape."""

    runs: Literal["in the process of user code", "in a worker", "as a class"]
    function: Callable[..., Any]
    """``(prompt, sample)``, or ``(prompt, samples)`` of a group; of a class: makes the object."""


def load_reward(path: str, args: SlimeArgs, *, is_group: bool) -> LoadedReward:
    """Load and check the reward of ``--custom-rm-path``.  A class is not constructed.  Raises PluginError."""
    try:
        return _loaded(path, args, is_group=is_group)
    except PluginError as error:
        raise PluginError(f"{REWARD.flag} '{path}': {error}") from error.__cause__


def plain_function(path: str, args: SlimeArgs, is_group: bool, folder: Path) -> Callable[..., Any]:
    """Return the function of a path, in a worker.  Modules are also searched in ``folder``.  Raises PluginError."""
    _search_in(folder)
    return load_reward(path, args, is_group=is_group).function


def method_of_class(path: str, args: SlimeArgs, folder: Path) -> Callable[..., Any]:
    """Construct the object of a class reward, in its process, and return its method.  Raises PluginError."""
    _search_in(folder)
    method: Callable[..., Any] = getattr(load_reward(path, args, is_group=False).function(), METHOD)
    return method


def _search_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _loaded(path: str, args: SlimeArgs, *, is_group: bool) -> LoadedReward:
    place, arguments = (path, None) if path.endswith(".py") else split(path)
    named = function_of_file(Path(place)) if place.endswith(".py") else found(place)
    if inspect.isclass(named) and hasattr(named, METHOD):
        if is_group:
            raise PluginError("is a class, which is called with batches of answers anyway; leave out --group-rm")
        return LoadedReward(runs="as a class", function=_constructor(named, arguments, args))
    function = named if place.endswith(".py") else named_object(path)
    if not callable(function) and hasattr(function, METHOD):
        raise PluginError(f"is an object; name its class: file.py:{type(function).__name__}(...)")
    _check_count(function, args, is_group=is_group)
    kind = GROUP_REWARD if is_group else REWARD
    native = kind.from_slime(function, args) if has_slime_shape(function, kind) else function
    return LoadedReward(runs="in the process of user code" if is_async(function) else "in a worker", function=native)


def _check_count(function: Any, args: SlimeArgs, *, is_group: bool) -> None:
    """Compare the name of the second parameter with ``--group-rm``, because both shapes have two parameters.

    A function of slime's shape may also score the list of samples that a generate function returned.
    """
    if inspect.isclass(function) or not callable(function):
        return
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # written in C
        return
    second = names[1] if len(names) > 1 else ""
    has_lists = getattr(args, "custom_generate_function_path", None) is not None
    scores_lists = has_lists and names[:1] == ["args"] and is_async(function)
    if second == "samples" and not is_group and not scores_lists:
        raise PluginError(f"takes ({', '.join(names)}), all samples of a group at once; give --group-rm as well")
    if second == "sample" and is_group:
        raise PluginError(f"takes ({', '.join(names)}), one sample; with --group-rm it must take (prompt, samples)")


def function_of_file(path: Path) -> Any:
    """Return the one class with ``compute_reward`` of a file, or else its one function with a usual name.

    Raises PluginError.
    """
    module = module_of_file(path)
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    classes = [value for value in own if inspect.isclass(value) and hasattr(value, METHOD)]
    functions = [value for value in own if inspect.isfunction(value) and value.__name__ in FUNCTION_NAMES]
    candidates = classes or functions
    if len(candidates) == 1:
        return candidates[0]
    others = [value for value in own if inspect.isfunction(value) and not value.__name__.startswith("_")]
    names = ", ".join(f"{path.name}:{value.__name__}" for value in candidates or others)
    has = f"it has {names}" if names else "it has none"
    raise PluginError(
        f"names no function; a file alone needs exactly one class with {METHOD}, or one function named "
        f"{', '.join(FUNCTION_NAMES[:-1])} or {FUNCTION_NAMES[-1]}; {has}; write {path.name}:NAME"
    )


def _constructor(cls: type[Any], arguments: Arguments | None, args: SlimeArgs) -> Callable[[], Any]:
    """Return a function that makes the object.  Raises PluginError if the arguments or the method do not fit."""
    method = getattr(cls, METHOD)
    if inspect.iscoroutinefunction(method):
        raise PluginError(f"{cls.__name__}.{METHOD} must be written with 'def', not 'async def'")
    try:
        inspect.signature(method).bind(None, [], [])
    except TypeError:
        taken = ", ".join(list(inspect.signature(method).parameters)[1:])
        raise PluginError(f"{cls.__name__}.{METHOD} must take (prompts, responses), takes ({taken})") from None
    if arguments is None:
        arguments = _default_arguments(cls, args)
    try:
        inspect.signature(cls).bind(*arguments.args, **arguments.kwargs)
    except TypeError as error:
        needs = str(inspect.signature(cls)).removesuffix(" -> None")
        raise PluginError(
            f"{cls.__name__} takes {needs}: {error}; write file.py:{cls.__name__}('...') with its arguments, or give "
            "them as keys of --custom-config-path"
        ) from None
    given = arguments
    return lambda: made(cls.__name__, cls, given)


def _default_arguments(cls: type[Any], args: SlimeArgs) -> Arguments:
    """Return the arguments of a class without arguments in its path.

    A parameter ``args`` gets ``args``; any other parameter without a default gets the attribute of ``args`` of its
    name, if there is one.
    """
    parameters = inspect.signature(cls).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    found = {
        each.name: getattr(args, each.name)
        for each in named
        if each.default is each.empty and getattr(args, each.name, None) is not None
    }
    takes_args = any(each.name == "args" for each in named)
    return Arguments(text="", kwargs={**found, "args": args} if takes_args else found)

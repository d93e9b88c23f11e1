"""The three shapes of slime's generate functions, told by their signatures.

generate(args, sample, sampling_params)
generate(args, sample, sampling_params, evaluation=False)
custom_generate(args, samples, evaluation=False)
"""

import inspect
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import PluginError

SHAPES = "(args, sample, sampling_params), with or without evaluation=False, or (args, samples, evaluation=False)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The arguments that a generate function gets."""

    takes_list: bool
    """Whether it gets a list of samples and no sampling parameters.  The list has the one sample of the episode."""
    names_evaluation: bool
    """Whether it gets ``evaluation``, as slime decides: its signature names it."""


def shape_of(function: Any) -> Shape:
    """Return the shape of a generate function.  Raises PluginError."""
    parameters = _parameters(function)
    names_evaluation = "evaluation" in parameters
    positional = [
        each for each in parameters.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    takes_all = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    takes_list = not takes_all and len([each for each in positional if each.name != "evaluation"]) == 2
    given: list[Any] = [None, None] if takes_list else [None, None, None]
    try:
        inspect.signature(function).bind(*given, **({"evaluation": False} if names_evaluation else {}))
    except TypeError:
        taken = ", ".join(map(str, parameters.values()))
        raise PluginError(f"must take {SHAPES}, takes ({taken})") from None
    return Shape(takes_list=takes_list, names_evaluation=names_evaluation)


def is_slime_generate(function: Any) -> bool:
    """Return whether a function has one of slime's shapes: its first parameter is ``args``."""
    return callable(function) and not inspect.isclass(function) and next(iter(_parameters(function)), None) == "args"


def is_slime_reward(function: Any) -> bool:
    """Return whether a reward function runs in the process of user code: slime's shape, written with ``async def``.

    Plain functions would block its event loop, so worker processes of the controller call them.
    """
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return is_async and is_slime_generate(function)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        raise PluginError("has no signature that can be read; wrap it in a function") from None

"""The adapter for slime's evaluation functions."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from asyncrl.compat.slime_types import SlimeArgs
from asyncrl.errors import PluginError
from asyncrl.types import EvalOutcome


@dataclass(slots=True)
class RolloutFnEvalOutput:
    """slime's result of an evaluation function."""

    data: dict[str, dict[str, Any]]
    """Lists under ``rewards`` and ``truncated``, by data set name."""
    metrics: dict[str, Any] | None = None


class BlockingEval:
    """slime's ``fn(args, rollout_id, data_source, evaluation=True)``, which may block its thread."""

    def __init__(self, function: Callable[..., Any], args: SlimeArgs) -> None:
        """Raise PluginError if ``function`` is written with ``async def``."""
        if inspect.iscoroutinefunction(function):
            raise PluginError("has slime's signature, but is written with 'async def'; slime's is written with 'def'")
        self._function = function
        self._args = args

    def __call__(self, step: int, more: Mapping[str, Any]) -> EvalOutcome:
        """Call the function for the weights of ``step``; ``more`` are further attributes of its ``args``.

        Its ``rollout_id`` is the step that trained these weights, 0 before training, as in slime.  There is no data
        source: the function finds the sets in ``args.eval_datasets``.  Raises TypeError if the result has not slime's
        form.
        """
        args = SlimeArgs(**{**vars(self._args), **more})
        returned = self._function(args, max(0, step - 1), None, evaluation=True)
        data, metrics = getattr(returned, "data", returned), getattr(returned, "metrics", None) or {}
        if not isinstance(data, Mapping) or not isinstance(metrics, Mapping):
            raise TypeError(f"must return RolloutFnEvalOutput or its data, got a {type(returned).__name__}")
        return EvalOutcome(
            rewards={str(name): tuple(_numbers(name, "rewards", each)) for name, each in data.items()},
            truncated={
                str(name): sum(found) / len(found)
                for name, each in data.items()
                if "truncated" in each and (found := _numbers(name, "truncated", each))
            },
            columns={str(name): each for name, each in data.items()},
            metrics={str(name).removeprefix("eval/"): _number(name, value) for name, value in metrics.items()},
        )


def _numbers(name: object, key: str, each: Any) -> list[float]:
    if not isinstance(each, Mapping) or key not in each:
        raise TypeError(f"the data of {name} must be a dict with a list of {key}, got a {type(each).__name__}")
    return [_number(f"{key} of {name}", value) for value in each[key]]


def _number(name: object, value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, Real):
        raise TypeError(f"{name} must be a number, got a {type(plain).__name__}: {plain!r}")
    return float(plain)

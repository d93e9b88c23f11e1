"""The results of slime's rollout functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.compat.evaluation import RolloutFnEvalOutput

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput", "call_rollout_fn"]


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function, and wrap a result without a class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)

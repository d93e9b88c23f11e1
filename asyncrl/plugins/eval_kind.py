"""The required signature of a user's evaluation function."""

import inspect

from asyncrl.compat import BlockingEval
from asyncrl.errors import PluginError
from asyncrl.plugins.kinds import Kind
from asyncrl.protocols import EvalFn


def _awaited(function: EvalFn | BlockingEval, label: str) -> EvalFn | BlockingEval:
    """Return ``function``.  Raises PluginError if it has the native signature and is not written with ``async def``."""
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    if isinstance(function, BlockingEval) or is_async:
        return function
    raise PluginError(
        f"{label}: a function (evaluation) must be written with 'async def'; only slime's "
        f"({', '.join((*EVAL.slime_parameters, *EVAL.slime_keywords))}) is written with 'def'"
    )


EVAL: Kind[EvalFn | BlockingEval] = Kind(
    flag="--eval-function-path",
    is_async=None,
    parameters=("evaluation",),
    slime_parameters=("args", "rollout_id", "data_source"),
    slime_keywords=("evaluation",),
    from_slime=BlockingEval,
    guarded=_awaited,
)

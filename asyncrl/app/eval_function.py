"""The user's evaluation function, with what it needs of the running engines."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from asyncrl.blocking_calls import UserCalls
from asyncrl.compat import BlockingEval, SlimeArgs
from asyncrl.compat.slime_args import eval_dataset
from asyncrl.config.eval_sets import EvalSet
from asyncrl.daemon_threads import in_daemon_thread
from asyncrl.plugins import EVAL, load_plugin
from asyncrl.protocols import EvalFn, HeldOutPass
from asyncrl.types import EvalOutcome


def load_eval_function(path: str | None, args: SlimeArgs) -> EvalFn | BlockingEval | None:
    """Load the function of ``--eval-function-path``.  Raises PluginError."""
    return None if path is None else load_plugin(path, EVAL, args)


def running_eval_function(
    loaded: EvalFn | BlockingEval, url: Callable[[], str], key: str, sets: Sequence[EvalSet], path: str | None = None
) -> EvalFn:
    """Return the function of ``path`` for engines that answer ``key`` at the URL that ``url`` returns.

    One of slime's shape runs in a thread.
    """
    if isinstance(loaded, BlockingEval):
        return ThreadedEval(loaded, partial(_args_of, url, key, sets))
    return UserCalls(f"{EVAL.flag} '{path}'").of_async(loaded)


class ThreadedEval:
    """slime's evaluation function in a daemon thread, one call at a time.

    A thread cannot be stopped: a call that is too late runs to its end, and calls before that are refused.
    """

    def __init__(self, function: BlockingEval, more: Callable[[], Mapping[str, Any]]) -> None:
        """``more`` returns the attributes of the function's ``args`` that only a running deployment has."""
        self._function = function
        self._more = more
        self._busy: Future[EvalOutcome] | None = None

    async def __call__(self, evaluation: HeldOutPass, /) -> EvalOutcome:
        """Call the function.  Raises its exception, or RuntimeError while an earlier call is not over."""
        if self._busy is not None and not self._busy.done():
            raise RuntimeError("the call before is not over, and its thread cannot be stopped")
        more = self._more()
        self._busy = in_daemon_thread(lambda: self._function(evaluation.weights.step, more), "evaluation")
        return await asyncio.wrap_future(self._busy)


def _args_of(url: Callable[[], str], key: str, sets: Sequence[EvalSet]) -> dict[str, Any]:
    address = urlsplit(url())
    return {
        "sglang_router_ip": address.hostname,
        "sglang_router_port": address.port,
        "sglang_api_key": key,
        "eval_datasets": [eval_dataset(each) for each in sets],
    }

"""The user's evaluation function, with what it needs of the running engines."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from asyncrl.blocking_calls import UserCalls
from asyncrl.compat import BlockingEval, SlimeArgs
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
        "eval_datasets": [_for_slime(each) for each in sets],
    }


def _for_slime(each: EvalSet) -> SimpleNamespace:
    """Return a set with the attributes of slime's EvalDatasetConfig."""
    return SimpleNamespace(
        name=each.name,
        path=str(each.path),
        rm_type=each.reward.rm_type,
        custom_rm_path=each.reward.custom_rm_path,
        input_key=each.data.input_key,
        label_key=each.data.label_key,
        metadata_key=each.data.metadata_key,
        apply_chat_template=each.data.apply_chat_template,
        n_samples_per_eval_prompt=each.n_samples_per_eval_prompt,
        temperature=each.temperature,
        top_p=each.top_p,
        top_k=each.top_k,
        max_response_len=each.max_response_len,
        min_new_tokens=each.min_new_tokens or None,
        repetition_penalty=each.repetition_penalty,
        stop=list(each.stop) or None,
        stop_token_ids=list(each.stop_token_ids) or None,
        metadata_overrides=dict(each.metadata),
    )
